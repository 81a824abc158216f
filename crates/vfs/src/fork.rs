//! Forks. Of a branch on which nothing runs: its open layer is sealed, and it goes on over it as its child does,
//! whatever its size. Of a branch whose processes are frozen, or without overlays: what it changed is copied.

use std::io;
use std::path::Path;
use std::sync::PoisonError;

use proto::api::BranchInfo;
use proto::error::{Code, Coded};
use proto::ids::{BranchId, LayerId};
use rusqlite::{Transaction, params};

use crate::audit::Actor;
use crate::branch::{CreateError, ForkBusy, MountError, NameError, NewBranch, check_name, io_code, random};
use crate::captured::Uncaptured;
use crate::db::DbError;
use crate::engine::Engine;
use crate::entries;
use crate::flatten::{LAYERS_HARD_MAX, LAYERS_MOUNT_MAX};
use crate::scan::{Layers, ScanError};
use crate::store::Store;

/// A fork that was not made. The parent is as it was.
#[derive(Debug, thiserror::Error)]
pub enum ForkError {
    /// There is no such branch.
    #[error("there is no branch {0}")]
    NoBranch(BranchId),
    /// The fork can't have that name.
    #[error(transparent)]
    Name(#[from] NameError),
    /// Somebody uses the branch.
    #[error("the branch {0} is in use")]
    InUse(BranchId),
    /// What was written to the branch last can't be recorded.
    #[error("can't record the state to fork from")]
    Scan(#[from] ScanError),
    /// The branch can't be mounted.
    #[error(transparent)]
    Mount(#[from] MountError),
    /// Something on the branch can't be recorded.
    #[error(transparent)]
    Unscannable(#[from] Uncaptured),
    /// As many layers as a mount can have.
    #[error("the branch {0} stands on as many forks as can be")]
    Deep(BranchId),
    /// The directories can't be made.
    #[error("can't make the directories of the fork")]
    Io(#[from] io::Error),
    /// The database failed.
    #[error("can't record the fork")]
    Db(#[from] DbError),
}

impl From<CreateError> for ForkError {
    fn from(error: CreateError) -> Self {
        match error {
            CreateError::Name(error) => ForkError::Name(error),
            CreateError::Io(error) => ForkError::Io(error),
            CreateError::Db(error) => ForkError::Db(error),
            CreateError::NoBase(base) => ForkError::Db(DbError::Damaged(format!("{base} is gone"))),
            CreateError::Engine(reason) => ForkError::Io(io::Error::other(reason)),
        }
    }
}

impl Coded for ForkError {
    fn code(&self) -> Code {
        match self {
            ForkError::NoBranch(_) => Code::NotFound,
            ForkError::Name(error) => error.code(),
            ForkError::InUse(_) => Code::Conflict,
            ForkError::Unscannable(error) => error.code(),
            ForkError::Deep(_) => Code::Refused,
            ForkError::Scan(error) => error.code(),
            ForkError::Mount(error) => error.code(),
            ForkError::Io(error) => io_code(error),
            ForkError::Db(error) => error.code(),
        }
    }
    fn hint(&self) -> Option<String> {
        match self {
            ForkError::Name(error) => error.hint(),
            ForkError::InUse(_) => Some("wait until what runs on it has ended, then fork".into()),
            ForkError::Scan(error) => error.hint(),
            ForkError::Mount(error) => error.hint(),
            ForkError::Unscannable(error) => error.hint(),
            ForkError::Deep(_) => Some(
                "stop what runs on it: chains are flattened while nothing does, see the runner's log".into(),
            ),
            ForkError::NoBranch(_) | ForkError::Io(_) | ForkError::Db(_) => None,
        }
    }
}

/// A fork at work.
struct Fork<'a> {
    parent: &'a BranchId,
    child: BranchId,
    name: Option<&'a str>,
    actor: &'a Actor,
    layers: Layers,
    engine: &'a dyn Engine,
}

impl Store {
    /// Makes a branch that holds what `parent` holds now, ignored files included. `busy` says whether a hand of the
    /// parent runs something, which the caller has frozen. Whatever is not yet recorded of the parent is recorded first.
    pub fn fork_branch(
        &self,
        parent: &BranchId,
        name: Option<&str>,
        actor: &Actor,
        busy: ForkBusy<'_>,
    ) -> Result<BranchInfo, ForkError> {
        check_name(name)?;
        let lock = self.branch_lock(parent);
        let _held = lock.lock().unwrap_or_else(PoisonError::into_inner);
        if Layers::of(&self.inner.db.read(), parent)?.is_none() {
            return Err(ForkError::NoBranch(parent.clone()));
        }
        self.recovered_locked(parent)?;
        if busy != ForkBusy::Quiet || self.inner.live.may_be_written(parent) {
            let found_by = match busy {
                ForkBusy::Frozen(writer) => writer.clone(),
                ForkBusy::Quiet => Actor::unknown(),
            };
            self.scan_locked(parent, &found_by, None, busy.writers())?.is_whole()?;
        }
        let layers = Layers::of(&self.inner.db.read(), parent)?;
        let layers = layers.ok_or_else(|| ForkError::NoBranch(parent.clone()))?;
        if !layers.copy && layers.lower.len() >= LAYERS_MOUNT_MAX {
            return Err(ForkError::Deep(parent.clone()));
        }
        let engine = self.engine(if layers.copy { "copy" } else { "overlay" });
        let child = BranchId::from_random(random()?);
        let fork = Fork { parent, child, name, actor, layers, engine };
        let made = match busy {
            ForkBusy::Quiet if engine.can_seal() => self.fork_sealing(&fork)?,
            ForkBusy::Quiet | ForkBusy::Frozen(_) => self.fork_copying(&fork)?,
        };
        if made.depth > LAYERS_HARD_MAX {
            self.flatten_now(parent, &made.id);
        }
        Ok(made)
    }

    /// Flattens a chain that comes near the most layers that a mount can have. The fork stands also if that fails.
    fn flatten_now(&self, parent: &BranchId, child: &BranchId) {
        let lock = self.branch_lock(child);
        let _held = lock.lock().unwrap_or_else(PoisonError::into_inner);
        for branch in [child, parent] {
            if !self.inner.live.is_mounted(branch)
                && let Err(error) = self.flatten_locked(branch, LAYERS_HARD_MAX)
            {
                tracing::warn!(%branch, %error, "a long chain of layers could not be flattened");
            }
        }
    }

    fn fork_sealing(&self, fork: &Fork<'_>) -> Result<BranchInfo, ForkError> {
        if !self.inner.live.release(fork.parent) {
            return Err(ForkError::InUse(fork.parent.clone()));
        }
        let layout = &self.inner.layout;
        let (parent_dir, child_dir) = (layout.branch(fork.parent), layout.branch(&fork.child));
        let sealed_dir = layout.layer(&fork.layers.open);
        let go_on = LayerId::from_random(random()?);
        let open = LayerId::from_random(random()?);
        let make = || -> Result<BranchInfo, ForkError> {
            fork.engine.create(&child_dir, &sealed_dir)?;
            self.inner.live.step("fork: directory");
            fork.engine.seal(&parent_dir, &sealed_dir)?;
            self.inner.live.step("fork: sealed");
            like_root(&sealed_dir, &fork.engine.scanned(&child_dir))?;
            self.inner.db.write(|tx| {
                let depth = depth(tx, &fork.layers.open)? + 1;
                let sealed = &fork.layers.open;
                let seal = "UPDATE layers SET state = 'sealed' WHERE id = ?1";
                tx.execute(seal, [sealed.as_str()]).map_err(DbError::from)?;
                let new = fork.new_branch(tx, &open, depth)?;
                self.insert_layer(tx, &go_on, sealed, &new.as_new())?;
                self.insert_layer(tx, &open, sealed, &new.as_new())?;
                let moved = "UPDATE branches SET layer = ?2 WHERE id = ?1";
                tx.execute(moved, [fork.parent.as_str(), go_on.as_str()]).map_err(DbError::from)?;
                Ok(self.insert_branch(tx, &new.as_new())?)
            })
        };
        let made = make().inspect_err(|_| {
            if let Err(error) = fork.engine.unseal(&parent_dir, &sealed_dir) {
                tracing::error!(branch = %fork.parent, %error, "a fork could not be taken back; the next start will");
            }
            let _ = crate::base::remove_tree(&child_dir);
        })?;
        self.inner.live.not_written(fork.parent);
        self.inner.live.step("fork: recorded");
        Ok(made)
    }

    fn fork_copying(&self, fork: &Fork<'_>) -> Result<BranchInfo, ForkError> {
        let layout = &self.inner.layout;
        let (parent_dir, child_dir) = (layout.branch(fork.parent), layout.branch(&fork.child));
        let sealed = LayerId::from_random(random()?);
        let open = LayerId::from_random(random()?);
        let sealed_dir = layout.layer(&sealed);
        let make = || -> Result<BranchInfo, ForkError> {
            fork.engine.copy_sealed(&parent_dir, &sealed_dir, &child_dir)?;
            self.inner.live.step("fork: copied");
            self.inner.db.write(|tx| {
                let below = fork.layers.lower.first().unwrap_or(&fork.layers.open);
                let depth = depth(tx, below)? + 1;
                let new = fork.new_branch(tx, &open, depth + 1)?;
                let layer = NewBranch { depth, ..new.as_new() };
                self.insert_layer(tx, &sealed, below, &layer)?;
                let seal = "UPDATE layers SET state = 'sealed' WHERE id = ?1";
                tx.execute(seal, [sealed.as_str()]).map_err(DbError::from)?;
                entries::copy_layer(tx, &fork.layers.open, &sealed)?;
                self.insert_layer(tx, &open, &sealed, &new.as_new())?;
                Ok(self.insert_branch(tx, &new.as_new())?)
            })
        };
        let made = make().inspect_err(|_| {
            let _ = crate::base::remove_tree(&child_dir);
            let _ = crate::base::remove_tree(&sealed_dir);
        })?;
        self.inner.live.step("fork: recorded");
        Ok(made)
    }
}

/// A fork's child, as it will be inserted.
struct Child<'a> {
    fork: &'a Fork<'a>,
    base: proto::ids::BaseId,
    layer: &'a LayerId,
    parent_seq: u64,
    depth: u32,
    detail: String,
}

impl<'f> Fork<'f> {
    fn new_branch<'a>(
        &'a self,
        tx: &Transaction<'_>,
        layer: &'a LayerId,
        depth: u32,
    ) -> Result<Child<'a>, DbError>
    where
        'f: 'a,
    {
        let base: String =
            tx.query_row("SELECT base FROM branches WHERE id = ?1", params![self.parent.as_str()], |row| {
                row.get(0)
            })?;
        Ok(Child {
            fork: self,
            base: base.parse().map_err(crate::branch::damaged)?,
            layer,
            parent_seq: entries::last_seq(tx, self.parent)?,
            depth,
            detail: format!("of {}", self.parent),
        })
    }
}

impl Child<'_> {
    fn as_new(&self) -> NewBranch<'_> {
        NewBranch {
            id: &self.fork.child,
            name: self.fork.name,
            base: &self.base,
            layer: self.layer,
            parent: Some((self.fork.parent, self.parent_seq)),
            engine: self.fork.engine.word(),
            depth: self.depth,
            op: "fork",
            detail: Some(&self.detail),
            actor: self.fork.actor,
        }
    }
}

fn depth(tx: &Transaction<'_>, layer: &LayerId) -> Result<u32, DbError> {
    Ok(tx.query_row("SELECT depth FROM layers WHERE id = ?1", [layer.as_str()], |row| row.get(0))?)
}

/// Gives the root directory of the child the mode of the parent's.
fn like_root(parent: &Path, child: &Path) -> io::Result<()> {
    std::fs::set_permissions(child, parent.symlink_metadata()?.permissions())
}
