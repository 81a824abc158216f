//! One edit at work: it puts what is new in its place and takes it back when it can't be recorded. Each of these holds
//! the branch's lock and a mount of it, and changes files only beneath that.

use proto::ids::BranchId;
use proto::path::TreePath;
use rustix::fs::Mode;
use rustix::io::Errno;

use super::EditError;
use super::record::kind_of;
use crate::audit::Actor;
use crate::beneath::{self, BeneathError, FileKind, Replaced, Staged, fail};
use crate::blobs::Sync;
use crate::engine::Root;
use crate::entries::{Class, Entry, Kind, StatId};
use crate::scan::{Layers, ScanError, Scope, Writers, op};
use crate::store::Store;
/// An edit at work, with the branch's lock held.
pub(super) struct Work<'a> {
    pub(super) store: &'a Store,
    pub(super) branch: &'a BranchId,
    pub(super) actor: &'a Actor,
    /// Who else may have written, as far as anybody knows.
    pub(super) beside: &'a dyn Fn() -> Option<Actor>,
    pub(super) root: &'a Root,
    pub(super) layers: Layers,
}

impl Work<'_> {
    pub(super) fn owner(&self) -> beneath::Owner {
        self.store.inner.options.owner
    }

    pub(super) fn step(&self, name: &'static str) {
        self.store.inner.live.step(name);
    }

    pub(super) fn write(&self, path: &TreePath, bytes: &[u8], mode: Option<u32>) -> Result<(), EditError> {
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

    pub(super) fn symlink(&self, path: &TreePath, target: &[u8]) -> Result<(), EditError> {
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

    pub(super) fn remove(&self, path: &TreePath) -> Result<(), EditError> {
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

    pub(super) fn rename(&self, from: &TreePath, to: &TreePath) -> Result<(), EditError> {
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
        // Before the other is gone: of what is ignored there is no third.
        let synced =
            rustix::fs::openat(root, ".", beneath::OPEN_DIR, Mode::empty()).and_then(rustix::fs::syncfs);
        synced.map_err(beneath::fail("copy", from))?;
        self.step("edit: copied");
        if let Err(error) = beneath::remove(root, from) {
            // Both are there, in part: recorded as found, and the caller is told.
            self.scan(self.actor, &touched(from, to, made))?;
            return Err(error.into());
        }
        Ok(())
    }

    pub(super) fn chmod(&self, path: &TreePath, mode: u32) -> Result<(), EditError> {
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
    /// not the edit's, before the edit takes its place.
    fn record_found(&self, path: &TreePath) -> Result<(), EditError> {
        if !self.store.inner.live.may_be_written(self.branch) {
            return Ok(());
        }
        let found_by = (self.beside)().unwrap_or_else(Actor::unknown);
        let before = self.recorded(path)?;
        let now = match beneath::find(self.root.fd(), path)? {
            Some(found) if found.kind == FileKind::Dir => return Ok(self.scan(&found_by, &[path])?),
            Some(_) => self.capture(path, path)?,
            None => match &before {
                Some(before) => Entry::whiteout(before.class),
                None => return Ok(()),
            },
        };
        if op(before.as_ref(), &now).is_none() {
            return Ok(());
        }
        self.commit_as(&found_by, &[], |rows| rows.push(path, &now))
    }

    /// Records what changed at and below `paths`.
    fn scan(&self, actor: &Actor, paths: &[&TreePath]) -> Result<(), ScanError> {
        let scope = Scope::Below(paths);
        self.store.scan_scope(self.branch, actor, None, Writers::MayLive, scope).map(drop)
    }

    pub(super) fn synced(&self, paths: &[&TreePath]) {
        self.step("edit: committed");
        if let Err(errno) = beneath::sync_parents(self.root.fd(), paths) {
            tracing::warn!(branch = %self.branch, %errno, "a directory could not be synced");
        }
    }
}

/// The paths that the move of a directory touches.
fn touched<'a>(from: &'a TreePath, to: &'a TreePath, made: &'a [TreePath]) -> Vec<&'a TreePath> {
    [from, to].into_iter().chain(made).collect()
}
