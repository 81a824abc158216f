//! Direct edits of a branch: each is recorded, durable and in the audit before it is acknowledged, or it did not happen.
//!
//! The order: content to its blob, synced → what is new is made beside its place, synced → BEGIN, audit rows → it is put
//! in its place → COMMIT → what it replaced is removed → acknowledged. Whatever fails is taken back. A runner that is
//! killed in between leaves an edit that nobody was told of; the next mount records what is there as found by
//! `recovery`. Edits hold the branch's lock: they and the captures of commands that run meanwhile come one after another.

mod record;
mod work;

use std::io::Write;
use std::sync::{Arc, PoisonError};

use proto::error::{Code, Coded};
use proto::ids::BranchId;
use proto::path::TreePath;

use self::work::Work;
use crate::audit::Actor;
use crate::beneath::{self, BeneathError, FileStat};
use crate::blobs::BlobError;
use crate::branch::MountError;
use crate::db::DbError;
use crate::engine::Root;
use crate::hashing::KEPT_BYTES_MAX;
use crate::rules::is_rules;
use crate::scan::{Layers, ScanError, Scope, Writers};
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
    beside: Arc<dyn Fn() -> Option<Actor> + Send + Sync>,
}

impl Store {
    /// Reads and edits of a branch by `actor`.
    pub fn edit(&self, branch: &BranchId, actor: &Actor) -> Result<Editor, EditError> {
        let exists = Layers::of(&self.inner.db.read(), branch)?.is_some();
        if !exists {
            return Err(MountError::NoBranch(branch.clone()).into());
        }
        let (branch, actor) = (branch.clone(), actor.clone());
        Ok(Editor { store: self.clone(), branch, actor, beside: Arc::new(|| None) })
    }
}

impl Editor {
    /// Whoever `who` names is taken for the writer of what an edit finds that is not recorded yet: all whose processes may
    /// have written to the branch since its last scan. It is asked with the branch's lock held.
    pub fn beside(self, who: impl Fn() -> Option<Actor> + Send + Sync + 'static) -> Self {
        Self { beside: Arc::new(who), ..self }
    }

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
        let (store, branch, actor) = (&self.store, &self.branch, &self.actor);
        work(&Work { store, branch, actor, beside: &*self.beside, root: &root, layers })?;
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

#[cfg(test)]
#[path = "edit_tests.rs"]
mod tests;
