//! Drops branches, and removes the layers that nothing stands on any more. Rows first: directories that no row names
//! are removed by the next start.

use std::io;
use std::sync::PoisonError;

use proto::error::{Code, Coded};
use proto::ids::{BranchId, LayerId};
use rusqlite::{OptionalExtension, params};

use crate::audit::{Actor, NewRow, append};
use crate::branch::damaged;
use crate::db::DbError;
use crate::scan::Layers;
use crate::store::Store;

/// A branch that was not dropped.
#[derive(Debug, thiserror::Error)]
pub enum DropError {
    /// There is no such branch.
    #[error("there is no branch {0}")]
    NoBranch(BranchId),
    /// Somebody uses it.
    #[error("the branch {0} is in use")]
    InUse(BranchId),
    /// The database failed.
    #[error("can't record that the branch is dropped")]
    Db(#[from] DbError),
}

impl Coded for DropError {
    fn code(&self) -> Code {
        match self {
            DropError::NoBranch(_) => Code::NotFound,
            DropError::InUse(_) => Code::Conflict,
            DropError::Db(error) => error.code(),
        }
    }
    fn hint(&self) -> Option<String> {
        matches!(self, DropError::InUse(_)).then(|| "end what runs on it first".into())
    }
}

impl Store {
    /// Drops a branch: its files are removed, its rows are kept for history.
    pub fn drop_branch(&self, branch: &BranchId, actor: &Actor) -> Result<(), DropError> {
        let lock = self.branch_lock(branch);
        let _held = lock.lock().unwrap_or_else(PoisonError::into_inner);
        if Layers::of(&self.inner.db.read(), branch)?.is_none() {
            return Err(DropError::NoBranch(branch.clone()));
        }
        if !self.inner.live.release(branch) {
            return Err(DropError::InUse(branch.clone()));
        }
        let layers = self.making_room(|| self.record_drop(branch, actor))?;
        self.inner.live.step("drop: recorded");
        self.inner.live.unscanned().remove(branch);
        self.discard(&self.inner.layout.branch(branch), branch.as_str());
        self.inner.live.step("drop: directory");
        self.making_room(|| self.forget_entries(&layers.open))?;
        if let Some(below) = layers.lower.first() {
            self.making_room(|| self.release_layers(below))?;
        }
        Ok(())
    }

    fn record_drop(&self, branch: &BranchId, actor: &Actor) -> Result<Layers, DropError> {
        let now_ms = self.inner.options.clock.now_ms();
        self.inner.db.write(|tx| {
            let layers = Layers::of(tx, branch)?.ok_or_else(|| DropError::NoBranch(branch.clone()))?;
            let name: Option<String> = tx
                .query_row("SELECT name FROM branches WHERE id = ?1", [branch.as_str()], |row| row.get(0))
                .map_err(DbError::from)?;
            append(tx, &self.inner.key, now_ms, &NewRow::event(branch, actor, "drop", name.as_deref()))?;
            tx.execute(
                "UPDATE branches SET dropped_ms = ?2, name = NULL WHERE id = ?1",
                params![branch.as_str(), now_ms.cast_signed()],
            )
            .map_err(DbError::from)?;
            // Nothing is looked up through it any more: the layers below need not be kept for it.
            tx.execute(
                "UPDATE layers SET parent = ?2, depth = 1 WHERE id = ?1",
                [layers.open.as_str(), layers.base().as_str()],
            )
            .map_err(DbError::from)?;
            Ok(layers)
        })
    }

    /// Takes a directory out of its place at once, and removes it in the background.
    pub(crate) fn discard(&self, dir: &std::path::Path, name: &str) {
        let aside = self.inner.layout.tmp().join(format!("dropped-{name}"));
        match std::fs::rename(dir, &aside) {
            Ok(()) => self.inner.live.remove_later(aside),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            // It is removed at the next start: no row names it.
            Err(error) => tracing::warn!(dir = %dir.display(), %error, "a directory could not be removed"),
        }
    }

    /// Deletes what a layer says, a little at a time: others want to write too.
    pub(crate) fn forget_entries(&self, layer: &LayerId) -> Result<(), DbError> {
        let some = "SELECT EXISTS (SELECT 1 FROM entries WHERE layer = ?1)";
        let some: bool = self.inner.db.read().query_row(some, [layer.as_str()], |row| row.get(0))?;
        if !some {
            return Ok(());
        }
        let sql = "DELETE FROM entries WHERE layer = ?1 AND path IN
                   (SELECT path FROM entries WHERE layer = ?1 LIMIT 5000)";
        loop {
            let deleted = self
                .inner
                .db
                .write(|tx| Ok::<_, DbError>(tx.prepare_cached(sql)?.execute([layer.as_str()])?))?;
            if deleted < 5_000 {
                return Ok(());
            }
        }
    }

    /// Removes the sealed layer `from`, if nothing stands on it any more, and then those below it.
    pub(crate) fn release_layers(&self, from: &LayerId) -> Result<(), DbError> {
        let mut next = Some(from.clone());
        while let Some(layer) = next.take() {
            let unused = "SELECT parent FROM layers WHERE id = ?1 AND state = 'sealed' AND engine != 'base'
                          AND NOT EXISTS (SELECT 1 FROM layers AS above WHERE above.parent = ?1)";
            let parent: Option<Option<String>> = {
                let conn = self.inner.db.read();
                let mut statement = conn.prepare_cached(unused)?;
                statement.query_row([layer.as_str()], |row| row.get(0)).optional()?
            };
            let Some(parent) = parent else { return Ok(()) };
            // Nothing can come to stand on it again: only open layers get sealed, and only below new ones.
            self.forget_entries(&layer)?;
            self.inner.db.write(|tx| {
                Ok::<_, DbError>(tx.execute("DELETE FROM layers WHERE id = ?1", [layer.as_str()])?)
            })?;
            self.inner.live.step("release: recorded");
            self.discard(&self.inner.layout.layer(&layer), layer.as_str());
            next = parent.map(|parent| parent.parse()).transpose().map_err(damaged)?;
        }
        Ok(())
    }
}
