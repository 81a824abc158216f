//! Removes what nobody needs any more: bases without branches, mirrors without bases, and what a crash left.

use std::collections::{BTreeSet, HashSet};
use std::fs::File;
use std::io;
use std::path::Path;

use proto::error::{Code, Coded};
use proto::ids::{BaseId, LayerId};
use rusqlite::{Transaction, params};

use crate::beneath::remove_tree;
use crate::db::DbError;
use crate::store::Store;

/// What a collection removed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GcReport {
    /// The bases.
    pub removed: Vec<BaseId>,
    /// Disk space of all that was removed, mirrors included.
    pub bytes: u64,
}

/// A collection that failed. What was recorded as removed stays removed; the rest of it is for the next one.
#[derive(Debug, thiserror::Error)]
pub enum GcError {
    /// A directory can't be read or removed.
    #[error("can't remove unused bases")]
    Io(#[from] io::Error),
    /// The database failed.
    #[error("can't find unused bases")]
    Db(#[from] DbError),
}

impl Coded for GcError {
    fn code(&self) -> Code {
        match self {
            GcError::Io(_) => Code::HostBroken,
            GcError::Db(source) => source.code(),
        }
    }
    fn hint(&self) -> Option<String> {
        match self {
            GcError::Io(_) => None,
            GcError::Db(source) => source.hint(),
        }
    }
}

/// How the keys in `meta` begin that say what a frozen directory looked like.
pub(super) const SURVEY_KEY: &str = "survey:";

/// The key in `meta` that names a base's mirror.
pub(super) fn mirror_key(base: &BaseId) -> String {
    format!("mirror:{base}")
}

/// A base that no branch stands on.
struct Unused {
    base: BaseId,
    /// That stood on it, its own among them.
    layers: Vec<LayerId>,
    bytes: u64,
    /// When it, or a branch on it, was made or dropped last.
    used_ms: u64,
    /// No user's branch stood on it.
    of_verifies: bool,
}

impl Store {
    /// Removes the bases that no branch stands on, except those that were handed out within the last seconds, and the
    /// mirrors that no base came from. Branches that were dropped don't count: with the base their rows go too, and
    /// they can't be brought back; the audit keeps what it says of them.
    pub fn base_gc(&self) -> Result<GcReport, GcError> {
        self.making_room(|| self.remove_bases(|_| true, true))
    }

    /// Removes bases that no branch stands on and that nothing was done with for `idle_ms_max`; and, as long as those that are
    /// left have more than `bytes_max` together, those that only verifies used, the longest unused one first and never the
    /// last one. 0 is no bound. What a user's dropped branch stood on is removed for its age alone, as the branch can be had
    /// again until then.
    pub fn collect_bases(&self, idle_ms_max: u64, bytes_max: u64) -> Result<GcReport, GcError> {
        let now_ms = self.inner.options.clock.now_ms();
        let (mut kept, mut bytes) = (0, 0u64);
        let wanted = |unused: &Unused| {
            let old = idle_ms_max != 0 && now_ms.saturating_sub(unused.used_ms) > idle_ms_max;
            let much = bytes_max != 0 && bytes.saturating_add(unused.bytes) > bytes_max;
            if old || (much && unused.of_verifies && kept > 0) {
                return true;
            }
            kept += 1;
            bytes = bytes.saturating_add(unused.bytes);
            false
        };
        self.remove_bases(wanted, false)
    }

    /// Removes the unused bases that are `wanted` away; they are asked for from the one used last.
    fn remove_bases(&self, wanted: impl FnMut(&Unused) -> bool, surveys: bool) -> Result<GcReport, GcError> {
        // Rows first: a base with a row is whole. A crash in between leaves directories, which the sweep removes.
        let gone = self.inner.db.write(|tx| -> Result<_, DbError> {
            let mut gone = self.unused(tx)?;
            gone.sort_by(|a, b| b.used_ms.cmp(&a.used_ms).then_with(|| a.base.cmp(&b.base)));
            let mut wanted = wanted;
            gone.retain(|unused| wanted(unused));
            for unused in &gone {
                forget(tx, &unused.base, &unused.layers)?;
            }
            // They tell what need not be read again, also for a base that comes back: only for a user it is time to tidy up.
            if surveys && !gone.is_empty() {
                tx.execute("DELETE FROM meta WHERE key GLOB ?1", [format!("{SURVEY_KEY}*")])?;
            }
            Ok(gone)
        })?;
        let mut report = GcReport::default();
        let some = !gone.is_empty();
        for Unused { base, layers, .. } in gone {
            for layer in &layers {
                report.bytes += remove(&self.inner.layout.base(layer))?;
                report.bytes += remove(&self.inner.layout.layer(layer))?;
            }
            report.removed.push(base);
        }
        if some || surveys {
            report.bytes += self.remove_mirrors()?;
        }
        Ok(report)
    }

    /// Removes what a crash left of bases and mirrors. To be called when the store was opened, before anything is frozen.
    pub fn sweep_bases(&self) -> Result<(), GcError> {
        let known: HashSet<String> = {
            let conn = self.inner.db.read();
            let mut statement = conn.prepare_cached("SELECT layer FROM bases").map_err(DbError::from)?;
            let rows = statement.query_map([], |row| row.get(0)).map_err(DbError::from)?;
            rows.collect::<Result<_, _>>().map_err(DbError::from)?
        };
        for entry in std::fs::read_dir(self.inner.layout.root().join("bases"))? {
            let entry = entry?;
            if !entry.file_name().to_str().is_some_and(|name| known.contains(name)) {
                remove(&entry.path())?;
            }
        }
        for entry in std::fs::read_dir(self.inner.layout.mirrors())? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                unlock(&entry.path())?;
            } else if entry.path().extension().is_some_and(|ext| ext == "lock") {
                std::fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    }

    /// Bases without a live branch.
    fn unused(&self, tx: &Transaction<'_>) -> Result<Vec<Unused>, DbError> {
        let now_ms = self.inner.options.clock.now_ms();
        let mut statement = tx.prepare_cached(
            "SELECT id, bytes, max(created_ms, coalesce((SELECT max(max(created_ms, dropped_ms)) FROM branches WHERE base = bases.id), 0))
             FROM bases WHERE NOT EXISTS
                 (SELECT 1 FROM branches WHERE branches.base = bases.id AND dropped_ms IS NULL)",
        )?;
        let rows = statement.query_map([], |row| Ok((row.get::<_, String>(0)?, row.get(1)?, row.get(2)?)))?;
        let mut out = Vec::new();
        for row in rows {
            let (id, bytes, used_ms): (String, i64, i64) = row?;
            let base: BaseId = id.parse().map_err(damaged)?;
            if let Some(since_ms) = self.inner.leases.get(&base, now_ms)
                && !has_been_used(tx, &base, since_ms)?
            {
                continue;
            }
            let mut layers = tx.prepare_cached("SELECT id FROM layers WHERE base = ?1")?;
            let layers = layers.query_map([base.as_str()], |row| row.get::<_, String>(0))?;
            let layers: Result<Vec<LayerId>, DbError> =
                layers.map(|id| id?.parse().map_err(damaged)).collect();
            let of_verifies = is_of_verifies(tx, &base)?;
            let (bytes, used_ms) = (bytes.cast_unsigned(), used_ms.cast_unsigned());
            out.push(Unused { base, layers: layers?, bytes, used_ms, of_verifies });
        }
        Ok(out)
    }

    /// Removes the mirrors that no base came from, and the locks that no mirror and nobody needs.
    fn remove_mirrors(&self) -> Result<u64, GcError> {
        let mirrors = self.inner.layout.mirrors();
        let mut ids = BTreeSet::new();
        for entry in std::fs::read_dir(&mirrors)? {
            let name = entry?.file_name();
            let id = name.to_str().and_then(|name| name.strip_suffix(".git").or(name.strip_suffix(".lock")));
            ids.extend(id.map(str::to_owned));
        }
        let mut bytes = 0;
        for id in ids {
            // Who freezes from it holds this lock until the base has its row.
            let path = mirrors.join(format!("{id}.lock"));
            let lock = File::options().write(true).create(true).truncate(false).open(&path)?;
            if lock.try_lock().is_err() {
                continue;
            }
            let used: bool = self
                .inner
                .db
                .read()
                .query_row(
                    "SELECT EXISTS (SELECT 1 FROM meta WHERE key GLOB 'mirror:*' AND value = ?1)",
                    [id.as_bytes()],
                    |row| row.get(0),
                )
                .map_err(DbError::from)?;
            if !used {
                bytes += remove(&mirrors.join(format!("{id}.git")))?;
                // Who waits for it sees that it is gone and makes another.
                std::fs::remove_file(&path)?;
            }
        }
        Ok(bytes)
    }
}

fn damaged(error: proto::ids::IdError) -> DbError {
    DbError::Damaged(error.to_string())
}

/// Whether a branch was made on the base since it was handed out: then the hand-out has served.
fn has_been_used(tx: &Transaction<'_>, base: &BaseId, since_ms: u64) -> Result<bool, DbError> {
    let sql = "SELECT EXISTS (SELECT 1 FROM branches WHERE base = ?1 AND created_ms >= ?2)";
    Ok(tx.query_row(sql, params![base.as_str(), since_ms.cast_signed()], |row| row.get(0))?)
}

/// Whether branches were made on the base, and each was dropped by the verify that it was made for.
fn is_of_verifies(tx: &Transaction<'_>, base: &BaseId) -> Result<bool, DbError> {
    let sql = "SELECT count(*) > 0 AND count(*) = coalesce(sum(EXISTS (SELECT 1 FROM audit
                   WHERE audit.branch = branches.id AND op = 'drop' AND actor GLOB 'verify:*')), 0)
               FROM branches WHERE base = ?1";
    Ok(tx.query_row(sql, [base.as_str()], |row| row.get(0))?)
}

fn forget(tx: &Transaction<'_>, base: &BaseId, layers: &[LayerId]) -> Result<(), DbError> {
    for layer in layers {
        tx.prepare_cached("DELETE FROM entries WHERE layer = ?1")?.execute([layer.as_str()])?;
    }
    for sql in [
        "DELETE FROM branches WHERE base = ?1",
        "DELETE FROM bases WHERE id = ?1",
        "DELETE FROM layers WHERE base = ?1",
    ] {
        tx.execute(sql, [base.as_str()])?;
    }
    tx.execute("DELETE FROM meta WHERE key = ?1", [mirror_key(base)])?;
    Ok(())
}

/// Takes away the locks and temporary files that a git that was killed left in a mirror.
pub(super) fn unlock(mirror: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(mirror)? {
        let entry = entry?;
        let name = entry.file_name();
        if entry.file_type()?.is_dir() {
            unlock(&entry.path())?;
        } else if name.as_encoded_bytes().ends_with(b".lock") || name.as_encoded_bytes().starts_with(b"tmp_")
        {
            std::fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// Removes a directory, if it is there, and says how much disk space that frees.
fn remove(dir: &Path) -> io::Result<u64> {
    let bytes = disk_bytes(dir);
    match remove_tree(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
        done => done.map(|()| bytes),
    }
}

/// Disk space below `dir`, as far as it can be measured.
fn disk_bytes(dir: &Path) -> u64 {
    crate::beneath::disk_use(dir).unwrap_or_default().bytes
}
