//! What an edit records: the entries of what it replaces and makes, and its audit rows in one transaction.

use std::io::Read;
use std::os::fd::AsFd;

use proto::path::TreePath;
use rusqlite::Transaction;

use super::EditError;
use super::work::Work;
use crate::audit::{Actor, Appender, NewRow};
use crate::beneath::{self, BeneathError, FileKind};
use crate::db::DbError;
use crate::entries::{self, Class, Entry, Kind, StatId};
use crate::hashing::{self, Job};
use crate::rules::{RULES_BYTES_MAX, RuleSource, Rules};
use crate::scan::op;
impl Work<'_> {
    /// What the database says lies at `path`.
    pub(super) fn recorded(&self, path: &TreePath) -> Result<Option<Entry>, DbError> {
        entries::lookup(&self.store.inner.db.read(), &self.layers.chain(), path)
    }

    /// What the open layer remembers of a directory, for a scan to compare.
    pub(super) fn dir_stat(&self, path: &TreePath) -> Result<StatId, DbError> {
        let own = entries::get(&self.store.inner.db.read(), &self.layers.open, path)?;
        let own = own.filter(|own| own.kind == Kind::Dir);
        Ok(own.map_or_else(|| self.new_dir_stat(), |own| own.stat))
    }

    pub(super) fn new_dir_stat(&self) -> StatId {
        StatId { mtime_ns: i64::from(self.layers.copy), ..StatId::default() }
    }

    /// What lies at `from`, as it will be recorded at `to`; its content is kept if it has to be.
    pub(super) fn capture(&self, from: &TreePath, to: &TreePath) -> Result<Entry, EditError> {
        let stat = beneath::stat(self.root.fd(), from)?;
        let class = self.class(to, stat.kind == FileKind::Dir)?;
        let kind = kind_of(stat.kind);
        let identity = if kind == Kind::Dir { self.new_dir_stat() } else { StatId::default() };
        let found = Entry { kind, class, mode: stat.mode, size: 0, hash: None, kept: true, stat: identity };
        if matches!(kind, Kind::Dir | Kind::Other | Kind::Whiteout) {
            return Ok(found);
        }
        let kept = self.recorded(from)?.filter(|entry| entry.kept).and_then(|entry| entry.hash);
        let job = Job { path: from.clone(), root: None, keep: class != Class::Ignored, kept };
        let read = hashing::read_all(self.root.fd(), &self.store.inner.blobs, &[job]);
        let read = read.map_err(|error| error.of(self.branch))?;
        let Some(read) = read.into_iter().next().flatten() else {
            return Err(BeneathError::NotFound(from.to_string()).into());
        };
        let hashes: Vec<_> = read.hash.into_iter().filter(|_| read.kept).collect();
        self.store.inner.blobs.sync_all(&hashes)?;
        let hashing::Captured { kind, mode, size, hash, kept, .. } = read;
        Ok(Entry { kind, mode, size, hash, kept, ..found })
    }

    pub(super) fn class(&self, path: &TreePath, is_dir: bool) -> Result<Class, DbError> {
        let base = entries::get(&self.store.inner.db.read(), self.layers.base(), path)?;
        Ok(Rules::new(self).class(path, is_dir, base.map(|entry| entry.class)))
    }

    /// Writes rows for the directories `made`, lets `apply` add rows and change files, and commits. When this fails the
    /// directories are removed; what `apply` did is the caller's to take back first.
    pub(super) fn commit(
        &self,
        made: &[TreePath],
        apply: impl FnOnce(&mut Rows<'_, '_>) -> Result<(), EditError>,
    ) -> Result<(), EditError> {
        self.commit_as(self.actor, made, apply)
    }

    pub(super) fn commit_as(
        &self,
        actor: &Actor,
        made: &[TreePath],
        apply: impl FnOnce(&mut Rows<'_, '_>) -> Result<(), EditError>,
    ) -> Result<(), EditError> {
        let inner = &*self.store.inner;
        let classes = made.iter().map(|dir| self.class(dir, true)).collect::<Result<Vec<_>, _>>()?;
        let now_ms = inner.options.clock.now_ms();
        let committed = inner.db.write(|tx| {
            let mut rows = Rows { work: self, actor, tx, rows: Appender::begin(tx, &inner.key, now_ms)? };
            for (path, class) in made.iter().zip(classes) {
                let stat = self.new_dir_stat();
                let now =
                    Entry { kind: Kind::Dir, class, mode: 0o755, size: 0, hash: None, kept: true, stat };
                rows.push(path, &now)?;
            }
            self.step("edit: rows");
            apply(&mut rows)?;
            rows.rows.finish()?;
            self.step("edit: commit");
            Ok(())
        });
        if committed.is_err() {
            beneath::remove_dirs(self.root.fd(), made);
        }
        committed
    }
}

/// The rows of an edit, in its transaction.
pub(super) struct Rows<'w, 't> {
    work: &'w Work<'w>,
    actor: &'w Actor,
    tx: &'t Transaction<'t>,
    rows: Appender<'t>,
}

impl Rows<'_, '_> {
    /// Writes the audit row and the entry of a path that is now as `now` says (a whiteout: gone). With a directory that is
    /// recorded there goes all that is recorded in it, also what something else has removed since.
    pub(super) fn push(&mut self, path: &TreePath, now: &Entry) -> Result<(), EditError> {
        let own = entries::get(self.tx, &self.work.layers.open, path)?;
        let lower = entries::lookup(self.tx, &self.work.layers.lower, path)?;
        let before = match own {
            Some(own) => (own.kind != Kind::Whiteout).then_some(own),
            None => lower.clone(),
        };
        if now.kind != Kind::Dir && before.as_ref().is_some_and(|before| before.kind == Kind::Dir) {
            let below = entries::merged(self.tx, &self.work.layers.chain(), Some(path))?;
            for (path, entry) in below.into_iter().rev() {
                let lower = entries::lookup(self.tx, &self.work.layers.lower, &path)?;
                self.say(&path, Some(&entry), &Entry::whiteout(entry.class), lower.is_some())?;
            }
        }
        self.say(path, before.as_ref(), now, lower.is_some())
    }

    pub(super) fn say(
        &mut self,
        path: &TreePath,
        before: Option<&Entry>,
        now: &Entry,
        lower: bool,
    ) -> Result<(), EditError> {
        if let Some(op) = op(before, now) {
            let row = NewRow::change(self.work.branch, self.actor, op, path, before, now);
            self.rows.push(&row)?;
        }
        let open = &self.work.layers.open;
        if now.kind == Kind::Whiteout && !lower {
            entries::forget(self.tx, open, path)?;
        } else {
            entries::put(self.tx, open, path, now)?;
        }
        Ok(())
    }

    /// Writes the audit row of a removal of what no scan has seen: a guest made it just now, or there was no room for
    /// its record.
    pub(super) fn unseen(&mut self, path: &TreePath, class: Class) -> Result<(), EditError> {
        let gone = Entry::whiteout(class);
        self.rows.push(&NewRow::change(self.work.branch, self.actor, "delete", path, None, &gone))?;
        Ok(())
    }
}

impl RuleSource for Work<'_> {
    fn rules(&self, path: &TreePath) -> Option<Vec<u8>> {
        let file = beneath::open_file(self.root.fd(), path).ok()?;
        if rustix::fs::fstat(file.as_fd()).ok()?.st_size.cast_unsigned() > RULES_BYTES_MAX {
            return None;
        }
        let mut out = Vec::new();
        file.take(RULES_BYTES_MAX).read_to_end(&mut out).ok()?;
        Some(out)
    }
}

pub(super) fn kind_of(kind: FileKind) -> Kind {
    match kind {
        FileKind::File => Kind::File,
        FileKind::Dir => Kind::Dir,
        FileKind::Symlink => Kind::Symlink,
        FileKind::Other => Kind::Other,
    }
}
