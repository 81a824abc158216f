//! A branch as it was: its state as of any audit sequence number, single files of it, and a new branch that starts
//! from it.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use proto::error::{Code, Coded};
use proto::ids::{BranchId, LayerId};
use proto::path::TreePath;
use rusqlite::{Connection, OptionalExtension, Row, params};
use rustix::fs::{AtFlags, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;

use crate::beneath::{NEW, READ};
use crate::content::{Content, ContentError, Contents};
use crate::db::DbError;
use crate::entries::{self, Class, Entry, Kind, StatId};
use crate::store::Store;
use crate::walk::open_beneath;

/// A past state that can't be told.
#[derive(Debug, thiserror::Error)]
pub enum HistoryError {
    /// There never was such a branch.
    #[error("there is no branch {0}")]
    NoBranch(BranchId),
    /// The branch did not exist then.
    #[error("the branch {branch} began at audit row {first}, after {seq}")]
    Before {
        /// Which branch.
        branch: BranchId,
        /// Its first row.
        first: u64,
        /// What was asked for.
        seq: u64,
    },
    /// The audit is not that long.
    #[error("the audit ends at row {last}, before {seq}")]
    Future {
        /// The last row.
        last: u64,
        /// What was asked for.
        seq: u64,
    },
    /// The content can't be had.
    #[error("can't read what lay there")]
    Content(#[from] ContentError),
    /// The database failed.
    #[error("can't read the history")]
    Db(#[from] DbError),
}

impl Coded for HistoryError {
    fn code(&self) -> Code {
        match self {
            HistoryError::NoBranch(_) => Code::NotFound,
            HistoryError::Before { .. } | HistoryError::Future { .. } => Code::Usage,
            HistoryError::Content(error) => error.code(),
            HistoryError::Db(error) => error.code(),
        }
    }
    fn hint(&self) -> Option<String> {
        match self {
            HistoryError::Before { .. } | HistoryError::Future { .. } => {
                Some("`tendon audit log` lists the rows".into())
            }
            HistoryError::Content(error) => error.hint(),
            HistoryError::NoBranch(_) | HistoryError::Db(_) => None,
        }
    }
}

/// A state that can't be made into files.
#[derive(Debug, thiserror::Error)]
pub enum AtError {
    /// It can't be told.
    #[error("can't tell what the branch held then")]
    History(#[from] HistoryError),
    /// It can't be written.
    #[error("can't put {path} back")]
    Io {
        /// Which path.
        path: TreePath,
        /// Why.
        source: io::Error,
    },
    /// Its content can't be had.
    #[error("can't put a file back")]
    Content(#[from] ContentError),
}

impl Coded for AtError {
    fn code(&self) -> Code {
        match self {
            AtError::History(error) => error.code(),
            AtError::Content(error) => error.code(),
            AtError::Io { source, .. } if source.kind() == io::ErrorKind::StorageFull => Code::NoSpace,
            AtError::Io { .. } => Code::HostBroken,
        }
    }
    fn hint(&self) -> Option<String> {
        match self {
            AtError::History(error) => error.hint(),
            AtError::Content(error) => error.hint(),
            AtError::Io { .. } => None,
        }
    }
}

/// What a branch held at some time.
pub(crate) struct Past {
    /// Everything that was there, by path.
    pub(crate) entries: BTreeMap<TreePath, Entry>,
    /// The layer of the base below it.
    pub(crate) base: LayerId,
}

/// One branch of a line of forks, and up to which row it counts.
struct Lineage {
    branch: BranchId,
    until: u64,
}

/// What `branch` held when row `seq` had been written: what its base holds, and every change of its ancestors up to
/// their forks and of its own up to `seq`.
pub(crate) fn past(conn: &Connection, branch: &BranchId, seq: u64) -> Result<Past, HistoryError> {
    let (base, line) = lineage(conn, branch, seq)?;
    let mut entries = entries::merged(conn, std::slice::from_ref(&base), None)?;
    for one in line.iter().rev() {
        replay(conn, one, &mut entries)?;
    }
    Ok(Past { entries, base })
}

/// Parent, the fork's row, the base's layer, the branch's first row.
type BranchColumns = (Option<String>, Option<i64>, String, Option<i64>);

fn lineage(conn: &Connection, branch: &BranchId, seq: u64) -> Result<(LayerId, Vec<Lineage>), HistoryError> {
    let last: Option<i64> =
        conn.query_row("SELECT max(seq) FROM audit", [], |row| row.get(0)).map_err(DbError::from)?;
    let last = last.unwrap_or_default().cast_unsigned();
    if seq > last {
        return Err(HistoryError::Future { last, seq });
    }
    let sql = "SELECT b.parent, b.parent_seq, bases.layer, (SELECT min(seq) FROM audit WHERE branch = b.id)
               FROM branches b JOIN bases ON bases.id = b.base WHERE b.id = ?1";
    let mut statement = conn.prepare_cached(sql).map_err(DbError::from)?;
    let mut line = Vec::new();
    let mut base: Option<String> = None;
    let mut next = Some((branch.clone(), seq));
    while let Some((branch, until)) = next.take() {
        let row: Option<BranchColumns> = statement
            .query_row([branch.as_str()], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?)))
            .optional()
            .map_err(DbError::from)?;
        let Some((parent, parent_seq, layer, first)) = row else {
            return Err(HistoryError::NoBranch(branch));
        };
        let first = first.unwrap_or_default().cast_unsigned();
        if line.is_empty() && until < first {
            return Err(HistoryError::Before { branch, first, seq });
        }
        base.get_or_insert(layer);
        let damaged = |error: proto::ids::IdError| DbError::Damaged(error.to_string());
        line.push(Lineage { branch, until });
        if let (Some(parent), Some(fork)) = (parent, parent_seq) {
            next = Some((parent.parse().map_err(damaged)?, until.min(fork.cast_unsigned())));
        }
    }
    let base = base.ok_or_else(|| HistoryError::NoBranch(branch.clone()))?;
    let base = base.parse().map_err(|error| DbError::Damaged(format!("{error}")))?;
    Ok((base, line))
}

/// The columns that [`entry_of`] reads.
const ENTRY: &str = "kind, class, mode, size, after, kept";

fn replay(conn: &Connection, one: &Lineage, entries: &mut BTreeMap<TreePath, Entry>) -> Result<(), DbError> {
    let sql = format!(
        "SELECT {ENTRY}, path FROM audit
         WHERE branch = ?1 AND seq <= ?2 AND path IS NOT NULL AND kind IS NOT NULL ORDER BY seq"
    );
    let mut statement = conn.prepare_cached(&sql)?;
    let mut rows = statement.query(params![one.branch.as_str(), one.until.cast_signed()])?;
    while let Some(row) = rows.next()? {
        let path =
            TreePath::new(row.get::<_, Vec<u8>>(6)?).map_err(|error| DbError::Damaged(error.to_string()))?;
        match entry_of(row)? {
            Some(entry) => entries.insert(path, entry),
            None => entries.remove(&path),
        };
    }
    Ok(())
}

/// The last word of a branch about a path, if it has any.
fn last_word(conn: &Connection, one: &Lineage, path: &TreePath) -> Result<Option<Option<Entry>>, DbError> {
    let sql = format!(
        "SELECT {ENTRY} FROM audit
         WHERE branch = ?1 AND seq <= ?2 AND path = ?3 AND kind IS NOT NULL ORDER BY seq DESC LIMIT 1"
    );
    let mut statement = conn.prepare_cached(&sql)?;
    let mut rows = statement.query(params![one.branch.as_str(), one.until.cast_signed(), path.as_bytes()])?;
    rows.next()?.map(entry_of).transpose()
}

/// What a row says lies at its path; `None`: nothing.
fn entry_of(row: &Row<'_>) -> Result<Option<Entry>, DbError> {
    let kind: String = row.get(0)?;
    let kind = Kind::from_letter(&kind).ok_or_else(|| DbError::Damaged(format!("audit kind `{kind}`")))?;
    let class: Option<String> = row.get(1)?;
    let hash: Option<[u8; 32]> = row.get(4)?;
    let entry = Entry {
        kind,
        class: class.as_deref().and_then(Class::from_word).unwrap_or(Class::Tree),
        mode: row.get::<_, Option<u32>>(2)?.unwrap_or(0o644),
        size: row.get::<_, Option<i64>>(3)?.unwrap_or_default().cast_unsigned(),
        hash: hash.map(blake3::Hash::from_bytes),
        kept: row.get::<_, Option<bool>>(5)?.unwrap_or_default(),
        stat: StatId::default(),
    };
    Ok((kind != Kind::Whiteout).then_some(entry))
}

impl Store {
    /// The file or symlink that lay at `path` when row `seq` had been written, and its content; `None` if there was
    /// none. The content is checked against its hash when its end is read.
    pub fn content_at(
        &self,
        branch: &BranchId,
        path: &TreePath,
        seq: u64,
    ) -> Result<Option<(Entry, Content)>, HistoryError> {
        let conn = self.inner.db.reader()?;
        let (base, line) = lineage(&conn, branch, seq)?;
        // The nearest branch that says anything of the path decides, else the base.
        let mut found = None;
        for one in &line {
            found = last_word(&conn, one, path)?;
            if found.is_some() {
                break;
            }
        }
        let found = match found {
            Some(entry) => entry,
            None => entries::get(&conn, &base, path)?,
        };
        let Some(entry) = found.filter(|entry| matches!(entry.kind, Kind::File | Kind::Symlink)) else {
            return Ok(None);
        };
        let base = [base];
        let contents = Contents::new(self, &conn, None, &base);
        let content = contents.open(path, &entry)?;
        Ok(Some((entry, content)))
    }

    /// What changed in a branch's base to become the branch as of `seq`, written below `root`: a branch of the same
    /// base that nothing else writes to. Ignored files are not put back: their content is not kept.
    /// Returns the files whose content is not to be had: they are not there.
    pub(crate) fn restore(
        &self,
        branch: &BranchId,
        seq: u64,
        root: BorrowedFd<'_>,
    ) -> Result<Vec<TreePath>, AtError> {
        let conn = self.inner.db.reader().map_err(HistoryError::from)?;
        let past = past(&conn, branch, seq)?;
        let base = [past.base];
        let from = entries::merged(&conn, &base, None).map_err(HistoryError::from)?;
        let contents = Contents::new(self, &conn, None, &base);
        let writer = Writer { root, owner: self.inner.options.owner };
        apply(&writer, &from, &past.entries, &contents)
    }
}

/// Where restored files go.
struct Writer<'a> {
    root: BorrowedFd<'a>,
    owner: Option<(u32, u32)>,
}

/// Turns the tree `from` below the writer's root into `to`.
fn apply(
    writer: &Writer<'_>,
    from: &BTreeMap<TreePath, Entry>,
    to: &BTreeMap<TreePath, Entry>,
    contents: &Contents<'_>,
) -> Result<Vec<TreePath>, AtError> {
    let mut missing = Vec::new();
    let restored = |entry: &&Entry| entry.class != Class::Ignored && entry.kind != Kind::Other;
    let io_error = |path: &TreePath| {
        let path = path.clone();
        move |errno: Errno| AtError::Io { path, source: errno.into() }
    };
    // Deepest first: a directory is empty when its turn comes.
    for (path, old) in from.iter().rev() {
        let new = to.get(path).filter(restored);
        if new.is_none_or(|new| new.kind != old.kind) {
            writer.remove(path, old.kind).map_err(io_error(path))?;
        }
    }
    let changed = |path: &TreePath, new: &Entry| {
        from.get(path).is_none_or(|old| {
            !(old.same_content(new) || old.kind == Kind::Dir && old.kind == new.kind && old.mode == new.mode)
        })
    };
    let mut modes = BTreeSet::new();
    for (path, new) in to.iter().filter(|(path, new)| restored(new) && changed(path, new)) {
        let old = from.get(path).filter(|old| old.kind == new.kind);
        match new.kind {
            Kind::Dir => {
                if old.is_none() {
                    writer.mkdir(path).map_err(io_error(path))?;
                }
                modes.insert(path);
            }
            Kind::Symlink => match contents.read(path, new) {
                Ok(target) => writer.symlink(path, &target).map_err(io_error(path))?,
                Err(error) if error.is_of_file() => {
                    writer.lack(path, &mut missing).map_err(io_error(path))?
                }
                Err(error) => return Err(error.into()),
            },
            Kind::File if old.is_some_and(|old| old.hash == new.hash) => {
                modes.insert(path);
            }
            Kind::File => {
                let written = match contents.open(path, new) {
                    Ok(mut content) => writer.file(path, &mut content, new.mode),
                    Err(error) if error.is_of_file() => Err(io::ErrorKind::InvalidData.into()),
                    Err(error) => return Err(error.into()),
                };
                match written {
                    // It has another content, or none.
                    Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                        writer.lack(path, &mut missing).map_err(io_error(path))?;
                    }
                    written => written.map_err(|source| AtError::Io { path: path.clone(), source })?,
                }
            }
            Kind::Other | Kind::Whiteout => {}
        }
    }
    // Deepest first again: a directory may take away the right to reach what it holds.
    for path in modes.into_iter().rev() {
        writer.chmod(path, to[path].mode).map_err(io_error(path))?;
    }
    Ok(missing)
}

impl Writer<'_> {
    /// The directory that holds `path`.
    fn parent(&self, path: &TreePath) -> Result<OwnedFd, Errno> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match path.parent() {
            Some(parent) => open_beneath(self.root, &parent, flags),
            None => rustix::fs::openat(self.root, ".", flags, Mode::empty()),
        }
    }

    fn remove(&self, path: &TreePath, kind: Kind) -> Result<(), Errno> {
        let flags = if kind == Kind::Dir { AtFlags::REMOVEDIR } else { AtFlags::empty() };
        rustix::fs::unlinkat(self.parent(path)?, path.file_name(), flags)
    }

    /// Leaves nothing at `path`, whose content is not to be had.
    fn lack(&self, path: &TreePath, missing: &mut Vec<TreePath>) -> Result<(), Errno> {
        missing.push(path.clone());
        clear(self.parent(path)?.as_fd(), path)
    }

    fn mkdir(&self, path: &TreePath) -> Result<(), Errno> {
        let parent = self.parent(path)?;
        rustix::fs::mkdirat(&parent, path.file_name(), Mode::from_raw_mode(0o755))?;
        self.own(parent.as_fd(), path)
    }

    fn symlink(&self, path: &TreePath, target: &[u8]) -> Result<(), Errno> {
        let parent = self.parent(path)?;
        clear(parent.as_fd(), path)?;
        rustix::fs::symlinkat(target, &parent, path.file_name())?;
        self.own(parent.as_fd(), path)
    }

    fn file(&self, path: &TreePath, content: &mut Content, mode: u32) -> io::Result<()> {
        let parent = self.parent(path)?;
        clear(parent.as_fd(), path)?;
        let fd = rustix::fs::openat(&parent, path.file_name(), NEW, Mode::from_raw_mode(0o600))?;
        let mut file = std::fs::File::from(fd);
        io::copy(content, &mut file)?;
        self.own(parent.as_fd(), path)?;
        // After the owner: a change of owner takes setuid bits away.
        Ok(rustix::fs::fchmod(&file, Mode::from_raw_mode(mode))?)
    }

    fn chmod(&self, path: &TreePath, mode: u32) -> Result<(), Errno> {
        let fd = open_beneath(self.root, path, READ)?;
        rustix::fs::fchmod(fd, Mode::from_raw_mode(mode))
    }

    fn own(&self, parent: BorrowedFd<'_>, path: &TreePath) -> Result<(), Errno> {
        let Some((uid, gid)) = self.owner else { return Ok(()) };
        let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
        rustix::fs::chownat(parent, path.file_name(), Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)
    }
}

/// Leaves no file and no link at `path`, which lies in `parent`.
fn clear(parent: BorrowedFd<'_>, path: &TreePath) -> Result<(), Errno> {
    match rustix::fs::unlinkat(parent, path.file_name(), AtFlags::empty()) {
        Err(Errno::NOENT) => Ok(()),
        done => done,
    }
}

#[cfg(test)]
#[path = "history_tests.rs"]
mod tests;
