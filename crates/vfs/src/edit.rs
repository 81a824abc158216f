//! Direct edits of a branch: each is recorded, durable and in the audit before it is acknowledged, or it did not happen.
//!
//! The order: content to its blob, synced → what is new is made beside its place, synced → BEGIN, audit rows → it is put
//! in its place → COMMIT → what it replaced is removed → acknowledged. Whatever fails is taken back. A runner that is
//! killed in between leaves an edit that nobody was told of; the next mount records what is there as found by
//! `recovery`. Edits hold the branch's lock: they and the captures of commands that run meanwhile come one after another.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::sync::PoisonError;

use proto::error::{Code, Coded};
use proto::ids::BranchId;
use proto::path::TreePath;
use rusqlite::Transaction;
use rustix::io::Errno;

use crate::audit::{Actor, Appender, NewRow};
use crate::beneath::{self, BeneathError, FileKind, FileStat, Replaced, Staged, fail};
use crate::blobs::{BlobError, Sync};
use crate::branch::MountError;
use crate::db::DbError;
use crate::engine::Root;
use crate::entries::{self, Class, Entry, Kind, StatId};
use crate::hashing::{self, Job, KEPT_BYTES_MAX};
use crate::rules::{RULES_BYTES_MAX, RuleSource, Rules, is_rules};
use crate::scan::{Layers, ScanError, Scope, Writers, op};
use crate::store::Store;

/// An edit that was not made, or a read that failed.
#[derive(Debug, thiserror::Error)]
pub enum EditError {
    /// The branch can't be reached.
    #[error(transparent)]
    Mount(#[from] MountError),
    /// The file operation was not done.
    #[error(transparent)]
    Beneath(#[from] BeneathError),
    /// The name is one that edits use themselves.
    #[error("`{0}` has a name that is reserved")]
    Reserved(TreePath),
    /// The content is larger than one edit may be.
    #[error("`{path}` has more bytes than {max}")]
    TooLarge {
        /// Which.
        path: TreePath,
        /// The limit.
        max: u64,
    },
    /// A directory can't be moved into itself.
    #[error("`{0}` can't be moved to a place in itself")]
    IntoItself(TreePath),
    /// The content can't be kept.
    #[error("can't keep the content of the edit")]
    Blob(#[from] BlobError),
    /// The edit can't be recorded.
    #[error("can't record the edit")]
    Scan(#[from] ScanError),
    /// The edit can't be recorded.
    #[error("can't record the edit")]
    Db(#[from] DbError),
}

impl Coded for EditError {
    fn code(&self) -> Code {
        match self {
            EditError::Mount(error) => error.code(),
            EditError::Beneath(error) => error.code(),
            EditError::Reserved(_) | EditError::TooLarge { .. } | EditError::IntoItself(_) => Code::BadInput,
            EditError::Blob(error) if error.is_full() => Code::NoSpace,
            EditError::Blob(_) => Code::HostBroken,
            EditError::Scan(error) => error.code(),
            EditError::Db(error) => error.code(),
        }
    }
    fn hint(&self) -> Option<String> {
        match self {
            EditError::Mount(error) => error.hint(),
            EditError::Beneath(error) => error.hint(),
            EditError::Reserved(_) => {
                Some(format!("names that begin with `{}` are tendon's", beneath::STAGED))
            }
            EditError::Blob(_) | EditError::Scan(_) | EditError::Db(_) if self.code() == Code::NoSpace => {
                Some("make room, then do it again: nothing was changed".into())
            }
            EditError::TooLarge { .. }
            | EditError::IntoItself(_)
            | EditError::Blob(_)
            | EditError::Scan(_)
            | EditError::Db(_) => None,
        }
    }
}

/// A name in a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirEntry {
    /// The name; any bytes but `/` and NUL.
    pub name: Vec<u8>,
    /// What lies there.
    pub stat: FileStat,
}

/// Reads and edits one branch, as one actor.
#[derive(Clone)]
pub struct Editor {
    store: Store,
    branch: BranchId,
    actor: Actor,
}

impl Store {
    /// Reads and edits of a branch by `actor`.
    pub fn edit(&self, branch: &BranchId, actor: &Actor) -> Result<Editor, EditError> {
        let exists = Layers::of(&self.inner.db.read(), branch)?.is_some();
        if !exists {
            return Err(MountError::NoBranch(branch.clone()).into());
        }
        Ok(Editor { store: self.clone(), branch: branch.clone(), actor: actor.clone() })
    }
}

impl Editor {
    /// Up to `max` bytes of a file, from `offset` on.
    pub fn read(&self, path: &TreePath, offset: u64, max: u64) -> Result<Vec<u8>, EditError> {
        Ok(beneath::read(self.root()?.fd(), path, offset, max)?)
    }

    /// Writes all of a file to `out`, as it is while it is read, and returns its size.
    pub fn copy_out(&self, path: &TreePath, out: &mut dyn Write) -> Result<u64, EditError> {
        let root = self.root()?;
        let mut file = beneath::open_file(root.fd(), path)?;
        let copied = std::io::copy(&mut file, out);
        copied.map_err(|source| BeneathError::Io { what: "read", path: path.to_string(), source }.into())
    }

    /// What lies at a path.
    pub fn stat(&self, path: &TreePath) -> Result<FileStat, EditError> {
        Ok(beneath::stat(self.root()?.fd(), path)?)
    }

    /// The target of a symbolic link.
    pub fn read_link(&self, path: &TreePath) -> Result<Vec<u8>, EditError> {
        Ok(beneath::read_link(self.root()?.fd(), path)?)
    }

    /// The names in a directory (`None`: the top), in order.
    pub fn list(&self, path: Option<&TreePath>) -> Result<Vec<DirEntry>, EditError> {
        let listed = beneath::list(self.root()?.fd(), path)?;
        Ok(listed.into_iter().map(|(name, stat)| DirEntry { name, stat }).collect())
    }

    /// Makes the file `path` hold `bytes`, with the directories above it. `mode` `None` keeps the permissions of the
    /// file that it replaces (`0o644` for a new one). A symbolic link is neither written through nor replaced.
    pub fn write(
        &self,
        path: &TreePath,
        bytes: &[u8],
        mode: impl Into<Option<u32>>,
    ) -> Result<(), EditError> {
        let mode = mode.into();
        if bytes.len() as u64 > KEPT_BYTES_MAX {
            return Err(EditError::TooLarge { path: path.clone(), max: KEPT_BYTES_MAX });
        }
        self.locked(&[path], |work| work.write(path, bytes, mode))
    }

    /// Makes a directory, with those above it. One that is there already is no error.
    pub fn mkdir(&self, path: &TreePath) -> Result<(), EditError> {
        self.locked(&[path], |work| {
            let made = beneath::make_dirs(work.root.fd(), path, work.owner())?;
            if made.is_empty() {
                return Ok(());
            }
            work.commit(&made, |_| Ok(()))?;
            work.synced(&made.iter().collect::<Vec<_>>());
            Ok(())
        })
    }

    /// Removes a file, symbolic link, or directory with all that is in it.
    pub fn remove(&self, path: &TreePath) -> Result<(), EditError> {
        self.locked(&[path], |work| work.remove(path))
    }

    /// Moves what lies at `from` to `to`, where nothing may be. Makes the directories above `to`.
    pub fn rename(&self, from: &TreePath, to: &TreePath) -> Result<(), EditError> {
        if to.starts_with(from) {
            return Err(EditError::IntoItself(from.clone()));
        }
        self.locked(&[from, to], |work| work.rename(from, to))
    }

    /// Makes a symbolic link where nothing is, with the directories above it.
    pub fn symlink(&self, path: &TreePath, target: &[u8]) -> Result<(), EditError> {
        self.locked(&[path], |work| work.symlink(path, target))
    }

    /// Gives a file or directory permission bits.
    pub fn chmod(&self, path: &TreePath, mode: u32) -> Result<(), EditError> {
        self.locked(&[path], |work| work.chmod(path, mode & 0o7777))
    }

    fn root(&self) -> Result<Root, EditError> {
        if let Some(root) = self.store.inner.live.cached(&self.branch, false) {
            return Ok(root);
        }
        let lock = self.store.branch_lock(&self.branch);
        let _held = lock.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(self.store.mount_locked(&self.branch)?)
    }

    fn locked(
        &self,
        paths: &[&TreePath],
        work: impl FnOnce(&Work<'_>) -> Result<(), EditError>,
    ) -> Result<(), EditError> {
        if let Some(path) = paths.iter().find(|path| path.components().any(beneath::is_staged)) {
            return Err(EditError::Reserved((*path).clone()));
        }
        let lock = self.store.branch_lock(&self.branch);
        let _held = lock.lock().unwrap_or_else(PoisonError::into_inner);
        let root = self.store.mount_locked(&self.branch)?;
        let layers = Layers::of(&self.store.inner.db.read(), &self.branch)?
            .ok_or_else(|| MountError::NoBranch(self.branch.clone()))?;
        work(&Work { store: &self.store, branch: &self.branch, actor: &self.actor, root: &root, layers })?;
        if paths.iter().any(|path| is_rules(path)) {
            // The edit stands; if this fails the next scan that sees other patterns does it.
            let again =
                self.store.scan_scope(&self.branch, &self.actor, None, Writers::MayLive, Scope::Rules);
            if let Err(error) = again {
                tracing::warn!(branch = %self.branch, %error, "files could not be given their new class");
            }
        }
        Ok(())
    }
}

/// An edit at work, with the branch's lock held.
struct Work<'a> {
    store: &'a Store,
    branch: &'a BranchId,
    actor: &'a Actor,
    root: &'a Root,
    layers: Layers,
}

impl Work<'_> {
    fn owner(&self) -> beneath::Owner {
        self.store.inner.options.owner
    }

    fn step(&self, name: &'static str) {
        self.store.inner.live.step(name);
    }

    fn write(&self, path: &TreePath, bytes: &[u8], mode: Option<u32>) -> Result<(), EditError> {
        let root = self.root.fd();
        let old = beneath::find(root, path)?;
        match old.as_ref().map(|old| old.kind) {
            None | Some(FileKind::File) => {}
            Some(FileKind::Dir) => return Err(BeneathError::IsDir(path.to_string()).into()),
            Some(FileKind::Symlink) => return Err(BeneathError::Symlink(path.to_string()).into()),
            Some(FileKind::Other) => return Err(BeneathError::NotFile(path.to_string()).into()),
        }
        self.record_found(path)?;
        let mode = mode.or(old.map(|old| old.mode)).unwrap_or(0o644) & 0o7777;
        let now = Entry { mode, ..self.new_entry(Kind::File, path, bytes)? };
        let made = self.make_parents(path)?;
        let staged = Staged::file(root, path, &mut &*bytes, mode, self.owner())
            .inspect_err(|_| beneath::remove_dirs(root, &made))?;
        self.put(path, &made, staged, now)
    }

    fn symlink(&self, path: &TreePath, target: &[u8]) -> Result<(), EditError> {
        let root = self.root.fd();
        if beneath::find(root, path)?.is_some() {
            return Err(BeneathError::Exists(path.to_string()).into());
        }
        self.record_found(path)?;
        let now = Entry { mode: 0o777, ..self.new_entry(Kind::Symlink, path, target)? };
        let made = self.make_parents(path)?;
        let staged = Staged::symlink(root, path, target, self.owner())
            .inspect_err(|_| beneath::remove_dirs(root, &made))?;
        self.put(path, &made, staged, now)
    }

    /// The entry of content that is new at `path`, kept if it has to be. Its identity is zero: the next scan looks at it
    /// again, so that a change in the same tick of the file system's clock is found.
    fn new_entry(&self, kind: Kind, path: &TreePath, bytes: &[u8]) -> Result<Entry, EditError> {
        let class = self.class(path, false)?;
        let kept = class != Class::Ignored;
        let hash =
            if kept { self.store.inner.blobs.store(&mut &*bytes, Sync::Now)?.0 } else { blake3::hash(bytes) };
        let (size, stat) = (bytes.len() as u64, StatId::default());
        Ok(Entry { kind, class, mode: 0, size, hash: Some(hash), kept, stat })
    }

    /// Records what is staged and puts it at `path`. `made`: the directories that were made for it.
    fn put(
        &self,
        path: &TreePath,
        made: &[TreePath],
        mut staged: Staged,
        now: Entry,
    ) -> Result<(), EditError> {
        self.step("edit: staged");
        let mut placed = None;
        let recorded = self.commit(made, |rows| {
            rows.push(path, &now)?;
            let replaced = staged.place(path).map_err(fail("write", path))?;
            placed = Some(replaced);
            self.step("edit: placed");
            self.check_replaced(&staged, path, replaced, now.kind)
        });
        if let Err(error) = recorded {
            if let Some(replaced) = placed {
                self.undone(staged.put_back(path, replaced), path);
            }
            let _ = staged.discard(path);
            beneath::remove_dirs(self.root.fd(), made);
            return Err(error);
        }
        self.finish(staged, path);
        Ok(())
    }

    /// A file replaces only a file, a link nothing: a guest may have put something else there since it was looked at.
    fn check_replaced(
        &self,
        staged: &Staged,
        path: &TreePath,
        replaced: Replaced,
        kind: Kind,
    ) -> Result<(), EditError> {
        if replaced == Replaced::Nothing {
            return Ok(());
        }
        let at = staged.path(path).unwrap_or_else(|| path.clone());
        let was = beneath::stat(self.root.fd(), &at)?.kind;
        if kind == Kind::File && was == FileKind::File {
            return Ok(());
        }
        Err(BeneathError::Racing(path.to_string()).into())
    }

    /// After the commit: what is left to do can't undo the edit any more, and a restart would do it too.
    fn finish(&self, staged: Staged, path: &TreePath) {
        self.step("edit: committed");
        if let Err(errno) = staged.sync() {
            tracing::warn!(branch = %self.branch, %path, %errno, "a directory could not be synced");
        }
        if let Err(error) = staged.discard(path) {
            tracing::warn!(branch = %self.branch, %path, %error, "what an edit replaced could not be removed");
        }
    }

    fn undone(&self, undone: Result<(), Errno>, path: &TreePath) {
        if let Err(errno) = undone {
            tracing::error!(branch = %self.branch, %path, %errno, "a failed edit could not be taken back");
            // What is there now is nobody's edit: the next mount records it as such.
            self.store.inner.live.unscanned().insert(self.branch.clone());
        }
    }

    fn make_parents(&self, path: &TreePath) -> Result<Vec<TreePath>, EditError> {
        match path.parent() {
            Some(dir) => Ok(beneath::make_dirs(self.root.fd(), &dir, self.owner())?),
            None => Ok(Vec::new()),
        }
    }

    fn remove(&self, path: &TreePath) -> Result<(), EditError> {
        let root = self.root.fd();
        let old = beneath::stat(root, path)?;
        self.record_found(path)?;
        let before = self.recorded(path)?;
        let class = self.class(path, old.kind == FileKind::Dir)?;
        let mut taken = None;
        let recorded = self.commit(&[], |rows| {
            match &before {
                Some(before) => rows.push(path, &Entry::whiteout(before.class))?,
                None => rows.unseen(path, class)?,
            }
            match Staged::take(root, path) {
                Ok(staged) => taken = Some(staged),
                // Without root's rights a directory of the layers below can't be renamed: it is removed afterwards.
                Err(Errno::XDEV) => {}
                Err(errno) => return Err(fail("remove", path)(errno).into()),
            }
            self.step("edit: placed");
            Ok(())
        });
        match (recorded, taken) {
            (Ok(()), Some(staged)) => self.finish(staged, path),
            (Ok(()), None) => {
                self.step("edit: committed");
                if let Err(error) = beneath::remove(root, path) {
                    // Part of it is gone and all of it is recorded as gone: record what is there.
                    self.scan(self.actor, &[path])?;
                    return Err(error.into());
                }
            }
            (Err(error), Some(mut staged)) => {
                self.undone(staged.restore(path), path);
                return Err(error);
            }
            (Err(error), None) => return Err(error),
        }
        Ok(())
    }

    fn rename(&self, from: &TreePath, to: &TreePath) -> Result<(), EditError> {
        let root = self.root.fd();
        let old = beneath::stat(root, from)?;
        if beneath::find(root, to)?.is_some() {
            return Err(BeneathError::Exists(to.to_string()).into());
        }
        if old.kind == FileKind::Dir {
            return self.rename_dir(from, to);
        }
        self.record_found(from)?;
        self.record_found(to)?;
        let now = self.capture(from, to)?;
        let before = self.recorded(from)?;
        let made = self.make_parents(to)?;
        let mut renamed = false;
        let recorded = self.commit(&made, |rows| {
            if let Some(before) = &before {
                rows.push(from, &Entry::whiteout(before.class))?;
            }
            rows.push(to, &now)?;
            beneath::rename(root, from, to).map_err(fail("rename", from))?;
            renamed = true;
            self.step("edit: placed");
            Ok(())
        });
        if let Err(error) = recorded {
            if renamed {
                self.undone(beneath::rename(root, to, from), from);
            }
            beneath::remove_dirs(root, &made);
            return Err(error);
        }
        self.synced(&[from, to]);
        Ok(())
    }

    /// A directory: a scan finds what became of all that is in it, and records it in one transaction.
    fn rename_dir(&self, from: &TreePath, to: &TreePath) -> Result<(), EditError> {
        let root = self.root.fd();
        self.record_found(from)?;
        self.record_found(to)?;
        let made = self.make_parents(to)?;
        let moved = match beneath::rename(root, from, to) {
            // The kernel can't rename a directory of the layers below without root's rights: a copy takes the new name.
            Err(Errno::XDEV) => self.move_dir(from, to, &made),
            done => done.map_err(fail("rename", from)).map_err(EditError::from),
        };
        moved.inspect_err(|_| beneath::remove_dirs(root, &made))?;
        self.step("edit: placed");
        if let Err(error) = self.scan(self.actor, &touched(from, to, &made)) {
            self.undone(beneath::rename(root, to, from), from);
            beneath::remove_dirs(root, &made);
            return Err(error.into());
        }
        self.synced(&[from, to]);
        Ok(())
    }

    fn move_dir(&self, from: &TreePath, to: &TreePath, made: &[TreePath]) -> Result<(), EditError> {
        let root = self.root.fd();
        beneath::copy_dir(root, from, to)?;
        self.step("edit: copied");
        if let Err(error) = beneath::remove(root, from) {
            // Both are there, in part: recorded as found, and the caller is told.
            self.scan(self.actor, &touched(from, to, made))?;
            return Err(error.into());
        }
        Ok(())
    }

    fn chmod(&self, path: &TreePath, mode: u32) -> Result<(), EditError> {
        let root = self.root.fd();
        let old = beneath::stat(root, path)?;
        if old.kind != FileKind::Dir {
            self.record_found(path)?;
        }
        let now = match self.recorded(path)? {
            Some(entry) if entry.kind == kind_of(old.kind) => {
                // A directory's identity is what shows through it; a file is looked at again.
                let stat = if entry.kind == Kind::Dir { self.dir_stat(path)? } else { StatId::default() };
                Entry { mode, stat, ..entry }
            }
            Some(_) | None => Entry { mode, ..self.capture(path, path)? },
        };
        let mut changed = None;
        let committed = self.commit(&[], |rows| {
            rows.push(path, &now)?;
            changed = Some(beneath::chmod(root, path, mode)?);
            self.step("edit: placed");
            Ok(())
        });
        if let (Err(_), Some(mode)) = (&committed, changed) {
            let back = beneath::chmod(root, path, mode).map(drop).map_err(|_| Errno::IO);
            self.undone(back, path);
        }
        committed
    }

    /// Records what something else has made of `path` since it was last looked at: its own version is in the history, and
    /// nobody's but its own, before the edit takes its place.
    fn record_found(&self, path: &TreePath) -> Result<(), EditError> {
        if !self.store.inner.live.may_be_written(self.branch) {
            return Ok(());
        }
        let unknown = Actor::unknown();
        let before = self.recorded(path)?;
        let now = match beneath::find(self.root.fd(), path)? {
            Some(found) if found.kind == FileKind::Dir => return Ok(self.scan(&unknown, &[path])?),
            Some(_) => self.capture(path, path)?,
            None => match &before {
                Some(before) => Entry::whiteout(before.class),
                None => return Ok(()),
            },
        };
        if op(before.as_ref(), &now).is_none() {
            return Ok(());
        }
        self.commit_as(&unknown, &[], |rows| rows.push(path, &now))
    }

    /// Records what changed at and below `paths`.
    fn scan(&self, actor: &Actor, paths: &[&TreePath]) -> Result<(), ScanError> {
        let scope = Scope::Below(paths);
        self.store.scan_scope(self.branch, actor, None, Writers::MayLive, scope).map(drop)
    }

    fn synced(&self, paths: &[&TreePath]) {
        self.step("edit: committed");
        if let Err(errno) = beneath::sync_parents(self.root.fd(), paths) {
            tracing::warn!(branch = %self.branch, %errno, "a directory could not be synced");
        }
    }

    /// What the database says lies at `path`.
    fn recorded(&self, path: &TreePath) -> Result<Option<Entry>, DbError> {
        entries::lookup(&self.store.inner.db.read(), &self.layers.chain(), path)
    }

    /// What the open layer remembers of a directory, for a scan to compare.
    fn dir_stat(&self, path: &TreePath) -> Result<StatId, DbError> {
        let own = entries::get(&self.store.inner.db.read(), &self.layers.open, path)?;
        let own = own.filter(|own| own.kind == Kind::Dir);
        Ok(own.map_or_else(|| self.new_dir_stat(), |own| own.stat))
    }

    fn new_dir_stat(&self) -> StatId {
        StatId { mtime_ns: i64::from(self.layers.copy), ..StatId::default() }
    }

    /// What lies at `from`, as it will be recorded at `to`; its content is kept if it has to be.
    fn capture(&self, from: &TreePath, to: &TreePath) -> Result<Entry, EditError> {
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
        let read = hashing::read_all(self.root.fd(), &self.store.inner.blobs, &[job])?;
        let Some(read) = read.into_iter().next().flatten() else {
            return Err(BeneathError::NotFound(from.to_string()).into());
        };
        let hashes: Vec<_> = read.hash.into_iter().filter(|_| read.kept).collect();
        self.store.inner.blobs.sync_all(&hashes)?;
        let hashing::Captured { kind, mode, size, hash, kept, .. } = read;
        Ok(Entry { kind, mode, size, hash, kept, ..found })
    }

    fn class(&self, path: &TreePath, is_dir: bool) -> Result<Class, DbError> {
        let base = entries::get(&self.store.inner.db.read(), self.layers.base(), path)?;
        Ok(Rules::new(self).class(path, is_dir, base.map(|entry| entry.class)))
    }

    /// Writes rows for the directories `made`, lets `apply` add rows and change files, and commits. When this fails the
    /// directories are removed; what `apply` did is the caller's to take back first.
    fn commit(
        &self,
        made: &[TreePath],
        apply: impl FnOnce(&mut Rows<'_, '_>) -> Result<(), EditError>,
    ) -> Result<(), EditError> {
        self.commit_as(self.actor, made, apply)
    }

    fn commit_as(
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
struct Rows<'w, 't> {
    work: &'w Work<'w>,
    actor: &'w Actor,
    tx: &'t Transaction<'t>,
    rows: Appender<'t>,
}

impl Rows<'_, '_> {
    /// Writes the audit row and the entry of a path that is now as `now` says (a whiteout: gone). With a directory that is
    /// recorded there goes all that is recorded in it, also what something else has removed since.
    fn push(&mut self, path: &TreePath, now: &Entry) -> Result<(), EditError> {
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

    fn say(
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
    fn unseen(&mut self, path: &TreePath, class: Class) -> Result<(), EditError> {
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

/// The paths that the move of a directory touches.
fn touched<'a>(from: &'a TreePath, to: &'a TreePath, made: &'a [TreePath]) -> Vec<&'a TreePath> {
    [from, to].into_iter().chain(made).collect()
}

fn kind_of(kind: FileKind) -> Kind {
    match kind {
        FileKind::File => Kind::File,
        FileKind::Dir => Kind::Dir,
        FileKind::Symlink => Kind::Symlink,
        FileKind::Other => Kind::Other,
    }
}

#[cfg(test)]
#[path = "edit_tests.rs"]
mod tests;
