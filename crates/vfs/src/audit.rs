//! The audit: one row per change, chained under a key, so that an altered, removed, inserted or reordered row and a
//! cut tail are found. Rows are appended inside the transaction that records what they tell of.
//!
//! The chain, also in `SPEC.md`. With H the BLAKE3 keyed by `audit.key`, `hash(0)` 32 zero bytes and
//! `‖` concatenation:
//!
//! ```text
//! hash(n) = H("tendon audit row 1\0" ‖ hash(n-1) ‖ row(n))
//! row     = u64(seq) u64(time_ms) bytes(branch) bytes(actor) bytes(op)
//!           opt(bytes(path)) opt(bytes(before)) opt(bytes(after)) opt(bytes(kind)) opt(bytes(class))
//!           opt(u64(mode)) opt(u64(size)) opt(u64(kept)) opt(bytes(detail))
//! u64     = 8 bytes, little-endian        bytes(x) = u64(length of x) ‖ x        opt = 0x00, or 0x01 ‖ value
//! head    = u64(seq) ‖ hash(seq) ‖ H("tendon audit head 1\0" ‖ u64(seq) ‖ hash(seq))     in meta.audit_head
//! ```

use std::fmt;
use std::io;
use std::path::Path;

use proto::api::AuditRow;
use proto::ids::{BranchId, ExecId, VerifyId};
use proto::path::TreePath;
use rusqlite::{Connection, OptionalExtension, Row, Transaction, params};

use crate::db::{Db, DbError};
use crate::entries::{Class, Entry, Kind};
use crate::key::AuditKey;
use crate::store::Store;
use crate::witness::Witness;

/// Longer details are cut: a command line may have megabytes.
const DETAIL_BYTES_MAX: usize = 16 * 1024;
/// The most rows that one `audit_log` gives.
pub const LOG_ROWS_MAX: u64 = 10_000;
const ROW_DOMAIN: &[u8] = b"tendon audit row 1\0";
const HEAD_DOMAIN: &[u8] = b"tendon audit head 1\0";
const COLUMNS: &str =
    "seq, time_ms, branch, actor, op, path, before, after, kind, class, mode, size, kept, detail, hash";

/// Actors that one row names; beyond that it names `unknown`, too.
pub const ACTORS_MAX: usize = 8;

/// Who did something, as the audit names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Actor(String);

impl Actor {
    /// A command that ran in a hand.
    pub fn exec(id: &ExecId) -> Self {
        Self(format!("exec:{id}"))
    }
    /// A person at the command line, by uid.
    pub fn cli(uid: u32) -> Self {
        Self(format!("cli:{uid}"))
    }
    /// A verify itself, between its commands: its branch, and what its hand wrote last.
    pub fn verify(id: &VerifyId) -> Self {
        Self(format!("verify:{id}"))
    }
    /// A brain's session.
    pub fn session(id: &str) -> Self {
        Self(format!("session:{id}"))
    }
    /// Changes found after a crash, that nobody acknowledged.
    pub fn recovery() -> Self {
        Self("recovery".into())
    }
    /// Changes that nobody recorded as theirs before somebody else took over.
    pub fn unknown() -> Self {
        Self("unknown".into())
    }
    /// Whoever of these and `self` it was: all that could have done it, joined by `+`. An event of its own is `self`'s.
    #[must_use]
    pub fn or<'a>(self, others: impl IntoIterator<Item = &'a Actor>) -> Self {
        let mut names: Vec<String> = self.0.split('+').map(str::to_owned).collect();
        for name in others.into_iter().flat_map(|other| other.0.split('+')) {
            if !names.iter().any(|known| known == name) {
                names.push(name.to_owned());
            }
        }
        if names.len() > ACTORS_MAX {
            names.truncate(ACTORS_MAX);
            names.push("unknown".into());
        }
        Self(names.join("+"))
    }
    /// The first of those that it could have been.
    pub(crate) fn first(&self) -> Self {
        Self(self.0.split('+').next().unwrap_or_default().to_owned())
    }
    /// The actor as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Actor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A row to append.
#[derive(Clone, Copy)]
pub(crate) struct NewRow<'a> {
    pub(crate) branch: &'a BranchId,
    pub(crate) actor: &'a Actor,
    pub(crate) op: &'a str,
    pub(crate) path: Option<&'a TreePath>,
    pub(crate) before: Option<blake3::Hash>,
    pub(crate) after: Option<blake3::Hash>,
    pub(crate) kind: Option<Kind>,
    pub(crate) class: Option<Class>,
    pub(crate) mode: Option<u32>,
    pub(crate) size: Option<u64>,
    pub(crate) kept: Option<bool>,
    pub(crate) detail: Option<&'a str>,
}

impl<'a> NewRow<'a> {
    /// A row about the branch as a whole.
    pub(crate) fn event(
        branch: &'a BranchId,
        actor: &'a Actor,
        op: &'a str,
        detail: Option<&'a str>,
    ) -> Self {
        Self {
            branch,
            actor,
            op,
            path: None,
            before: None,
            after: None,
            kind: None,
            class: None,
            mode: None,
            size: None,
            kept: None,
            detail,
        }
    }

    /// A row about a path that was `before` and is now `after` (a whiteout when it is gone).
    pub(crate) fn change(
        branch: &'a BranchId,
        actor: &'a Actor,
        op: &'a str,
        path: &'a TreePath,
        before: Option<&Entry>,
        after: &Entry,
    ) -> Self {
        Self {
            path: Some(path),
            before: before.and_then(|entry| entry.hash),
            after: after.hash,
            kind: Some(after.kind),
            class: Some(after.class),
            mode: Some(after.mode),
            size: Some(after.size),
            kept: Some(after.kept),
            ..Self::event(branch, actor, op, None)
        }
    }
}

/// Appends rows within one transaction; [`Appender::finish`] writes the new head.
pub(crate) struct Appender<'t> {
    tx: &'t Transaction<'t>,
    key: &'t AuditKey,
    time_ms: u64,
    head: Head,
    first: Option<u64>,
}

impl<'t> Appender<'t> {
    pub(crate) fn begin(tx: &'t Transaction<'t>, key: &'t AuditKey, time_ms: u64) -> Result<Self, DbError> {
        let head =
            read_head(tx, key)?.ok_or_else(|| DbError::Damaged("the head of the audit is missing".into()))?;
        Ok(Self { tx, key, time_ms, head, first: None })
    }

    /// Appends one row and returns its sequence number.
    pub(crate) fn push(&mut self, row: &NewRow<'_>) -> Result<u64, DbError> {
        let seq = self.head.seq + 1;
        let stored = Stored {
            seq,
            time_ms: self.time_ms,
            branch: row.branch.as_str(),
            actor: row.actor.as_str(),
            op: row.op,
            path: row.path.map(TreePath::as_bytes),
            before: row.before.as_ref().map(|hash| hash.as_bytes().as_slice()),
            after: row.after.as_ref().map(|hash| hash.as_bytes().as_slice()),
            kind: row.kind.map(Kind::letter),
            class: row.class.map(Class::word),
            mode: row.mode.map(u64::from),
            size: row.size,
            kept: row.kept.map(u64::from),
            detail: row.detail.map(cut),
        };
        let hash = stored.chain(self.key, &self.head.hash);
        stored.insert(self.tx, &hash)?;
        self.head = Head { seq, hash };
        self.first.get_or_insert(seq);
        Ok(seq)
    }

    /// Writes the head. Returns the first and last sequence number that were appended.
    pub(crate) fn finish(self) -> Result<Option<(u64, u64)>, DbError> {
        let Some(first) = self.first else { return Ok(None) };
        write_head(self.tx, self.key, &self.head)?;
        Ok(Some((first, self.head.seq)))
    }
}

/// Appends one row.
pub(crate) fn append(
    tx: &Transaction<'_>,
    key: &AuditKey,
    time_ms: u64,
    row: &NewRow<'_>,
) -> Result<u64, DbError> {
    let mut appender = Appender::begin(tx, key, time_ms)?;
    let seq = appender.push(row)?;
    appender.finish()?;
    Ok(seq)
}

/// Why the audit can't be opened.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// The key file can't be read or made.
    #[error("can't use the audit key")]
    Io(#[from] io::Error),
    /// Rows exist and their key is gone.
    #[error("the audit has rows and its key is missing")]
    Lost,
    /// The database failed.
    #[error("can't read the audit")]
    Db(#[from] DbError),
}

/// Loads the key, or makes it at the first start. The head is written before the key, so that a head without rows
/// and without key is an interrupted first start, and a key without head is damage.
pub(crate) fn open_key(db: &Db, path: &Path) -> Result<AuditKey, KeyError> {
    if let Some(key) = AuditKey::load(path)? {
        return Ok(key);
    }
    let rows: bool = db
        .read()
        .query_row("SELECT EXISTS (SELECT 1 FROM audit)", [], |row| row.get(0))
        .map_err(DbError::from)?;
    let stored: Option<Vec<u8>> = head_bytes(&db.read())?;
    if rows || stored.is_some_and(|bytes| bytes.get(..8) != Some([0; 8].as_slice())) {
        return Err(KeyError::Lost);
    }
    let key = AuditKey::generate()?;
    db.write(|tx| write_head(tx, &key, &Head { seq: 0, hash: [0; 32] }))?;
    key.save(path)?;
    Ok(key)
}

/// What `audit_log` gives.
#[derive(Clone, Debug, Default)]
pub struct AuditFilter {
    /// Only this branch.
    pub branch: Option<BranchId>,
    /// Only what this actor did, or may have done.
    pub actor: Option<String>,
    /// Only this path and what lies below it.
    pub path: Option<TreePath>,
    /// Only rows after this sequence number.
    pub since: Option<u64>,
    /// Only rows up to this sequence number.
    pub until: Option<u64>,
    /// At most so many rows, and never more than [`LOG_ROWS_MAX`].
    pub limit: Option<u64>,
}

/// What `audit_verify` found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditCheck {
    /// Rows that were read.
    pub rows: u64,
    /// The first row that is not as it was written.
    pub bad_seq: Option<u64>,
    /// What is wrong, or `None`.
    pub problem: Option<String>,
}

impl Store {
    /// The rows that pass the filter, oldest first.
    pub fn audit_log(&self, filter: &AuditFilter) -> Result<Vec<AuditRow>, DbError> {
        let conn = self.inner.db.reader()?;
        let (from, to) = match &filter.path {
            Some(path) => {
                let (mut from, mut to) = (path.as_bytes().to_vec(), path.as_bytes().to_vec());
                from.push(b'/');
                to.push(b'0');
                (Some(from), Some(to))
            }
            None => (None, None),
        };
        let sql = format!(
            "SELECT {COLUMNS} FROM audit WHERE seq > ?1 AND seq <= ?2 AND (?3 IS NULL OR branch = ?3)
             AND (?4 IS NULL OR actor = ?4 OR instr('+' || actor || '+', '+' || ?4 || '+'))
             AND (?5 IS NULL OR path = ?5 OR (path >= ?6 AND path < ?7)) ORDER BY seq LIMIT ?8"
        );
        let mut statement = conn.prepare(&sql)?;
        let rows = statement.query_and_then(
            params![
                filter.since.unwrap_or(0).min(i64::MAX as u64).cast_signed(),
                filter.until.unwrap_or(u64::MAX).min(i64::MAX as u64).cast_signed(),
                filter.branch.as_ref().map(BranchId::as_str),
                filter.actor.as_deref(),
                filter.path.as_ref().map(TreePath::as_bytes),
                from,
                to,
                filter.limit.unwrap_or(LOG_ROWS_MAX).min(LOG_ROWS_MAX).cast_signed(),
            ],
            shown,
        )?;
        rows.collect()
    }

    /// Reads all rows and says whether the chain is whole.
    pub fn audit_verify(&self) -> Result<AuditCheck, DbError> {
        let conn = self.inner.db.reader()?;
        let check = verify(&conn, &self.inner.key, &Witness::read(&self.inner.layout, &self.inner.key))?;
        drop(conn);
        if check.problem.is_none() {
            self.witness()?;
        }
        Ok(check)
    }
}

fn verify(conn: &Connection, key: &AuditKey, witness: &Witness) -> Result<AuditCheck, DbError> {
    let mut statement = conn.prepare(&format!("SELECT {COLUMNS} FROM audit ORDER BY seq"))?;
    let mut rows = statement.query([])?;
    let mut last = Head { seq: 0, hash: [0; 32] };
    let bad = |rows, seq, problem: String| AuditCheck { rows, bad_seq: Some(seq), problem: Some(problem) };
    let mut count = 0;
    while let Some(row) = rows.next()? {
        count += 1;
        let expected = last.seq + 1;
        let seq = row.get::<_, i64>(0)?.cast_unsigned();
        if seq != expected {
            return Ok(bad(count, expected, format!("row {expected} is missing")));
        }
        // What can't even be read as the types that we write was written by somebody else.
        let hash = Stored::read(row).ok().map(|stored| stored.chain(key, &last.hash));
        let Some(hash) = hash.filter(|hash| row.get::<_, [u8; 32]>(14).is_ok_and(|found| found == *hash))
        else {
            return Ok(bad(count, seq, format!("row {seq} is not as it was written")));
        };
        last = Head { seq, hash };
        if let Witness::Head(noted) = witness
            && noted.seq == seq
            && noted.hash != hash
        {
            return Ok(bad(count, seq, format!("row {seq} is not the one that was noted")));
        }
    }
    let head = match read_head(conn, key) {
        Ok(Some(head)) => head,
        Ok(None) => return Ok(bad(count, last.seq + 1, "the head of the audit is missing".into())),
        Err(DbError::Damaged(what)) => return Ok(bad(count, last.seq + 1, what)),
        Err(error) => return Err(error),
    };
    if head.seq > last.seq {
        let (from, to) = (last.seq + 1, head.seq);
        return Ok(bad(count, from, format!("rows {from} to {to} are missing at the end")));
    }
    if head.seq < last.seq || head.hash != last.hash {
        return Ok(bad(count, head.seq + 1, "the rows do not end where the head says".into()));
    }
    match witness {
        Witness::Head(noted) if noted.seq > last.seq => {
            let (from, to) = (last.seq + 1, noted.seq);
            Ok(bad(count, from, format!("rows {from} to {to} are missing at the end")))
        }
        Witness::Bad(problem) => Ok(bad(count, last.seq + 1, (*problem).to_owned())),
        Witness::Head(_) => Ok(AuditCheck { rows: count, bad_seq: None, problem: None }),
    }
}

/// The end of the chain.
pub(crate) struct Head {
    pub(crate) seq: u64,
    hash: [u8; 32],
}

impl Head {
    fn mac(&self, key: &AuditKey) -> blake3::Hash {
        let mut hasher = key.hasher();
        hasher.update(HEAD_DOMAIN).update(&self.seq.to_le_bytes()).update(&self.hash);
        hasher.finalize()
    }

    pub(crate) fn encode(&self, key: &AuditKey) -> Vec<u8> {
        [&self.seq.to_le_bytes()[..], &self.hash, self.mac(key).as_bytes()].concat()
    }

    /// `None` if nobody with the key wrote this.
    pub(crate) fn decode(bytes: &[u8], key: &AuditKey) -> Option<Self> {
        let seq = u64::from_le_bytes(bytes.get(..8)?.try_into().ok()?);
        let head = Head { seq, hash: bytes.get(8..40)?.try_into().ok()? };
        let mac: [u8; 32] = bytes.get(40..)?.try_into().ok()?;
        (head.mac(key) == blake3::Hash::from_bytes(mac)).then_some(head)
    }
}

fn head_bytes(conn: &Connection) -> Result<Option<Vec<u8>>, DbError> {
    let mut statement = conn.prepare_cached("SELECT value FROM meta WHERE key = 'audit_head'")?;
    Ok(statement.query_row([], |row| row.get(0)).optional()?)
}

/// Whether the chain still has the row that was its end once.
pub(crate) fn has_row(conn: &Connection, noted: &Head) -> Result<bool, DbError> {
    if noted.seq == 0 {
        return Ok(true);
    }
    let sql = "SELECT hash FROM audit WHERE seq = ?1";
    let hash: Option<Vec<u8>> =
        conn.prepare_cached(sql)?.query_row([noted.seq.cast_signed()], |row| row.get(0)).optional()?;
    Ok(hash.is_some_and(|hash| hash == noted.hash))
}

pub(crate) fn read_head(conn: &Connection, key: &AuditKey) -> Result<Option<Head>, DbError> {
    let Some(bytes) = head_bytes(conn)? else { return Ok(None) };
    let damaged = || DbError::Damaged("the head of the audit is not as it was written".into());
    Head::decode(&bytes, key).map(Some).ok_or_else(damaged)
}

fn write_head(tx: &Transaction<'_>, key: &AuditKey, head: &Head) -> Result<(), DbError> {
    tx.prepare_cached("INSERT OR REPLACE INTO meta (key, value) VALUES ('audit_head', ?1)")?
        .execute([head.encode(key)])?;
    Ok(())
}

/// A row as it lies in the table, less its hash.
struct Stored<'a> {
    seq: u64,
    time_ms: u64,
    branch: &'a str,
    actor: &'a str,
    op: &'a str,
    path: Option<&'a [u8]>,
    before: Option<&'a [u8]>,
    after: Option<&'a [u8]>,
    kind: Option<&'a str>,
    class: Option<&'a str>,
    mode: Option<u64>,
    size: Option<u64>,
    kept: Option<u64>,
    detail: Option<&'a str>,
}

impl<'a> Stored<'a> {
    fn chain(&self, key: &AuditKey, previous: &[u8; 32]) -> [u8; 32] {
        let mut out = Vec::with_capacity(512);
        out.extend_from_slice(ROW_DOMAIN);
        out.extend_from_slice(previous);
        out.extend_from_slice(&self.seq.to_le_bytes());
        out.extend_from_slice(&self.time_ms.to_le_bytes());
        for text in [self.branch, self.actor, self.op] {
            encode_bytes(&mut out, text.as_bytes());
        }
        let text = |value: Option<&'a str>| value.map(str::as_bytes);
        for value in [self.path, self.before, self.after, text(self.kind), text(self.class)] {
            out.push(u8::from(value.is_some()));
            value.inspect(|value| encode_bytes(&mut out, value));
        }
        for value in [self.mode, self.size, self.kept] {
            out.push(u8::from(value.is_some()));
            value.inspect(|value| out.extend_from_slice(&value.to_le_bytes()));
        }
        out.push(u8::from(self.detail.is_some()));
        self.detail.inspect(|value| encode_bytes(&mut out, value.as_bytes()));
        *key.hasher().update(&out).finalize().as_bytes()
    }

    fn insert(&self, tx: &Transaction<'_>, hash: &[u8; 32]) -> Result<(), DbError> {
        const INSERT: &str = "INSERT INTO audit (seq, time_ms, branch, actor, op, path, before, after, kind, class, mode, size, kept, detail, hash)
            VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15)";
        tx.prepare_cached(INSERT)?.execute(params![
            self.seq.cast_signed(),
            self.time_ms.cast_signed(),
            self.branch,
            self.actor,
            self.op,
            self.path,
            self.before,
            self.after,
            self.kind,
            self.class,
            self.mode.map(u64::cast_signed),
            self.size.map(u64::cast_signed),
            self.kept.map(u64::cast_signed),
            self.detail,
            hash.as_slice(),
        ])?;
        Ok(())
    }

    fn read(row: &'a Row<'_>) -> Result<Self, rusqlite::Error> {
        let text = |at: usize| -> Result<&'a str, rusqlite::Error> { Ok(row.get_ref(at)?.as_str()?) };
        let text_or = |at: usize| -> Result<Option<&'a str>, rusqlite::Error> {
            Ok(row.get_ref(at)?.as_str_or_null()?)
        };
        let blob_or = |at: usize| -> Result<Option<&'a [u8]>, rusqlite::Error> {
            Ok(row.get_ref(at)?.as_blob_or_null()?)
        };
        let number =
            |at: usize| -> Result<u64, rusqlite::Error> { Ok(row.get::<_, i64>(at)?.cast_unsigned()) };
        let number_or = |at: usize| -> Result<Option<u64>, rusqlite::Error> {
            Ok(row.get::<_, Option<i64>>(at)?.map(i64::cast_unsigned))
        };
        Ok(Self {
            seq: number(0)?,
            time_ms: number(1)?,
            branch: text(2)?,
            actor: text(3)?,
            op: text(4)?,
            path: blob_or(5)?,
            before: blob_or(6)?,
            after: blob_or(7)?,
            kind: text_or(8)?,
            class: text_or(9)?,
            mode: number_or(10)?,
            size: number_or(11)?,
            kept: number_or(12)?,
            detail: text_or(13)?,
        })
    }
}

fn encode_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
    out.extend_from_slice(bytes);
}

fn cut(detail: &str) -> &str {
    &detail[..detail.floor_char_boundary(DETAIL_BYTES_MAX)]
}

/// A row as the API shows it.
fn shown(row: &Row<'_>) -> Result<AuditRow, DbError> {
    let stored = Stored::read(row)?;
    let damaged = |what: String| DbError::Damaged(what);
    let hex = |bytes: Option<&[u8]>| bytes.map(crate::sql::hex);
    let kind = stored.kind.and_then(Kind::from_letter);
    let type_bits = match kind {
        Some(Kind::File) => 0o100_000,
        Some(Kind::Dir) => 0o040_000,
        Some(Kind::Symlink) => 0o120_000,
        Some(Kind::Other | Kind::Whiteout) | None => 0,
    };
    Ok(AuditRow {
        seq: stored.seq,
        time_ms: stored.time_ms,
        branch: stored.branch.parse().map_err(|error| damaged(format!("{error}")))?,
        actor: stored.actor.to_owned(),
        op: stored.op.to_owned(),
        path: stored.path.map(TreePath::new).transpose().map_err(|error| damaged(error.to_string()))?,
        before: hex(stored.before),
        after: hex(stored.after),
        mode: stored.mode.and_then(|mode| u32::try_from(mode).ok()).map(|mode| mode | type_bits),
        size: stored.size,
        detail: stored.detail.map(str::to_owned),
        hash: hex(row.get_ref(14)?.as_blob_or_null().map_err(rusqlite::Error::from)?).unwrap_or_default(),
    })
}

#[cfg(test)]
mod tests;
