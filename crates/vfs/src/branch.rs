//! Branches: made, listed, found and mounted. What makes the files is the engine's; what is true is in the
//! database. The order of every operation leaves, whenever the runner is killed, a state that `recover` repairs.

mod error;

use std::io;
use std::sync::{Arc, PoisonError};

use proto::api::BranchInfo;
use proto::ids::{BaseId, BranchId, IdError, LayerId};
use proto::path::TreePath;
use rusqlite::{Connection, OptionalExtension, Row, Transaction, params};

pub(crate) use self::error::io_code;
pub use self::error::{BranchAtError, BranchError, CreateError, MountError, NameError};
use crate::audit::{Actor, NewRow, append};
use crate::beneath::DiskUse;
use crate::db::DbError;
use crate::engine::Root;
use crate::history::AtError;
use crate::scan::{Layers, ScanError, Writers};
use crate::store::Store;

/// The longest name of a branch.
const NAME_BYTES_MAX: usize = 64;

/// A branch that is to get its rows.
pub(crate) struct NewBranch<'a> {
    pub(crate) id: &'a BranchId,
    pub(crate) name: Option<&'a str>,
    pub(crate) base: &'a BaseId,
    /// Its open layer, which has its row.
    pub(crate) layer: &'a LayerId,
    pub(crate) parent: Option<(&'a BranchId, u64)>,
    pub(crate) engine: &'static str,
    pub(crate) depth: u32,
    /// `create` or `fork`, and the audit row's text.
    pub(crate) op: &'static str,
    pub(crate) detail: Option<&'a str>,
    pub(crate) actor: &'a Actor,
}

/// A branch that is to be made of a base.
#[derive(Clone, Copy)]
struct Wish<'a> {
    base: &'a BaseId,
    name: Option<&'a str>,
    actor: &'a Actor,
    /// What it is filled with, for the audit.
    detail: Option<&'a str>,
    /// Whether it has to be on the disk.
    synced: bool,
}

impl Store {
    /// Makes a branch of a base. It outlives a power cut.
    pub fn create_branch(
        &self,
        base: &BaseId,
        name: Option<&str>,
        actor: &Actor,
    ) -> Result<BranchInfo, CreateError> {
        self.create_filled(&Wish { base, name, actor, detail: None, synced: true }, |_| Ok(()))
    }

    /// As [`Store::create_branch`], without waiting for the disk: a power cut may take the branch with all that is in it,
    /// until [`Store::settle`] or the next thing of any branch that is recorded. For who tells nobody of it before.
    pub fn begin_branch(
        &self,
        base: &BaseId,
        name: Option<&str>,
        actor: &Actor,
    ) -> Result<BranchInfo, CreateError> {
        self.create_filled(&Wish { base, name, actor, detail: None, synced: false }, |_| Ok(()))
    }

    /// Waits until all branches that were begun are on the disk.
    pub fn settle(&self) -> Result<(), CreateError> {
        Ok(self.inner.db.settle()?)
    }

    /// Makes a branch that holds what `branch`, which may have been dropped since, held when audit row `seq` was
    /// written. What git ignores is not put back.
    pub fn branch_at(
        &self,
        branch: &BranchId,
        seq: u64,
        name: Option<&str>,
        actor: &Actor,
    ) -> Result<(BranchInfo, Vec<TreePath>), BranchAtError> {
        check_name(name).map_err(CreateError::from)?;
        let base = {
            let conn = self.inner.db.read();
            let sql = "SELECT base FROM branches WHERE id = ?1";
            let found: Option<String> = conn
                .query_row(sql, [branch.as_str()], |row| row.get(0))
                .optional()
                .map_err(|error| CreateError::Db(error.into()))?;
            found.ok_or_else(|| AtError::History(crate::HistoryError::NoBranch(branch.clone())))?
        };
        let base = base.parse().map_err(|error| CreateError::Db(damaged(error)))?;
        let detail = format!("{branch} at {seq}");
        let mut missing = Vec::new();
        let fill = |root: &Root| {
            missing = self.restore(branch, seq, root.fd())?;
            Ok::<_, BranchAtError>(())
        };
        let wish = Wish { base: &base, name, actor, detail: Some(&detail), synced: true };
        let info = self.create_filled(&wish, fill)?;
        match self.scan(&info.id, actor, None) {
            Ok(_) => self.branch(&info.id).map(|info| (info, missing)).map_err(|error| match error {
                BranchError::Db(error) => CreateError::Db(error).into(),
                BranchError::Io(error) => CreateError::Io(error).into(),
                BranchError::NoBranch(_) | BranchError::Dropped { .. } => {
                    ScanError::NoBranch(info.id.clone()).into()
                }
            }),
            Err(error) => {
                // Not half of it: what can't be recorded is not made.
                let _ = self.drop_branch(&info.id, actor);
                Err(error.into())
            }
        }
    }

    /// Makes a branch and lets `fill` write to it before it is known to anybody. With `detail`, it is filled.
    fn create_filled<E: From<CreateError>>(
        &self,
        wish: &Wish<'_>,
        fill: impl FnOnce(&Root) -> Result<(), E>,
    ) -> Result<BranchInfo, E> {
        let Wish { base, name, actor, detail, synced } = *wish;
        check_name(name).map_err(CreateError::from)?;
        let engine = self.engines().chosen().map_err(|why| CreateError::Engine(why.to_owned()))?;
        let below = base_layer(&self.inner.db.read(), base)?;
        let id = BranchId::from_random(random().map_err(CreateError::from)?);
        let layer = LayerId::from_random(random().map_err(CreateError::from)?);
        let dir = self.inner.layout.branch(&id);
        let make = || -> Result<BranchInfo, E> {
            let lower = self.inner.layout.base(&below);
            engine.create(&dir, &lower).map_err(CreateError::from)?;
            self.inner.live.step("create: directory");
            if detail.is_some() {
                let mounted = engine.mount(&dir, &[lower]).map_err(CreateError::from)?;
                fill(&Root(Arc::new(mounted)))?;
                self.inner.live.step("create: filled");
            }
            let new = NewBranch {
                id: &id,
                name,
                base,
                layer: &layer,
                parent: None,
                engine: engine.word(),
                depth: 1,
                op: "create",
                detail,
                actor,
            };
            let record = |tx: &Transaction<'_>| -> Result<_, CreateError> {
                // Again: it may have been collected meanwhile.
                let parent = base_layer(tx, base)?;
                self.insert_layer(tx, &layer, &parent, &new)?;
                self.insert_branch(tx, &new)
            };
            let db = &self.inner.db;
            Ok(if synced { db.write(record) } else { db.write_unsynced(record) }?)
        };
        let made = make().inspect_err(|_| drop(crate::base::remove_tree(&dir)))?;
        self.inner.live.step("create: recorded");
        Ok(made)
    }

    pub(crate) fn insert_layer(
        &self,
        tx: &Transaction<'_>,
        layer: &LayerId,
        parent: &LayerId,
        new: &NewBranch<'_>,
    ) -> Result<(), DbError> {
        let sql = "INSERT INTO layers (id, parent, base, depth, state, engine, created_ms)
                   VALUES (?1, ?2, ?3, ?4, 'open', ?5, ?6)";
        let now = self.inner.options.clock.now_ms().cast_signed();
        tx.prepare_cached(sql)?.execute(params![
            layer.as_str(),
            parent.as_str(),
            new.base.as_str(),
            new.depth,
            new.engine,
            now
        ])?;
        Ok(())
    }

    /// Inserts the branch and its first audit row.
    pub(crate) fn insert_branch(
        &self,
        tx: &Transaction<'_>,
        new: &NewBranch<'_>,
    ) -> Result<BranchInfo, CreateError> {
        let taken = "SELECT 1 FROM branches WHERE name = ?1";
        if let Some(name) = new.name
            && tx.prepare_cached(taken).and_then(|mut s| s.exists([name])).map_err(DbError::from)?
        {
            return Err(NameError::Taken(name.to_owned()).into());
        }
        let now_ms = self.inner.options.clock.now_ms();
        let insert = "INSERT INTO branches (id, name, base, layer, parent, parent_seq, engine, created_ms)
                      VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)";
        let inserted = tx.prepare_cached(insert).and_then(|mut statement| {
            statement.execute(params![
                new.id.as_str(),
                new.name,
                new.base.as_str(),
                new.layer.as_str(),
                new.parent.map(|(parent, _)| parent.as_str()),
                new.parent.map(|(_, seq)| seq.cast_signed()),
                new.engine,
                now_ms.cast_signed(),
            ])
        });
        inserted.map_err(DbError::from)?;
        let row = NewRow::event(new.id, new.actor, new.op, new.detail);
        let audit_seq = append(tx, &self.inner.key, now_ms, &row)?;
        Ok(BranchInfo {
            id: new.id.clone(),
            name: new.name.map(str::to_owned),
            base: new.base.clone(),
            parent: new.parent.map(|(parent, _)| parent.clone()),
            engine: new.engine.to_owned(),
            depth: new.depth - 1,
            created_ms: now_ms,
            audit_seq,
        })
    }

    /// All branches, oldest first.
    pub fn branches(&self) -> Result<Vec<BranchInfo>, BranchError> {
        let conn = self.inner.db.reader()?;
        let sql = format!("{SELECT} ORDER BY b.created_ms, b.id");
        let mut statement = conn.prepare_cached(&sql).map_err(DbError::from)?;
        let rows = statement.query_and_then([], info).map_err(DbError::from)?;
        Ok(rows.collect::<Result<_, _>>()?)
    }

    /// One branch.
    pub fn branch(&self, branch: &BranchId) -> Result<BranchInfo, BranchError> {
        let conn = self.inner.db.read();
        let sql = format!("{SELECT} AND b.id = ?1");
        let mut statement = conn.prepare_cached(&sql).map_err(DbError::from)?;
        let found = statement.query_row([branch.as_str()], |row| Ok(info(row))).optional();
        let found = found.map_err(DbError::from)?.transpose()?;
        found.ok_or_else(|| BranchError::NoBranch(branch.to_string()))
    }

    /// The branch with this id or name.
    pub fn find_branch(&self, text: &str) -> Result<BranchId, BranchError> {
        let sql = "SELECT id FROM branches WHERE (id = ?1 OR name = ?1) AND dropped_ms IS NULL";
        let conn = self.inner.db.read();
        let found: Option<String> =
            conn.query_row(sql, [text], |row| row.get(0)).optional().map_err(DbError::from)?;
        match found {
            Some(id) => Ok(id.parse().map_err(damaged)?),
            None => Err(dropped(&conn, text)?),
        }
    }

    /// As [`Store::find_branch`]; also a branch that was dropped, by its id, as long as its past can be told.
    pub fn find_past_branch(&self, text: &str) -> Result<BranchId, BranchError> {
        match self.find_branch(text) {
            Err(BranchError::Dropped { id, kept: true, .. }) if id.as_str() == text => Ok(id),
            found => found,
        }
    }

    /// As [`Store::find_branch`]; also the last branch of the name that was dropped, whose rows in the audit stay.
    pub fn find_audited_branch(&self, text: &str) -> Result<BranchId, BranchError> {
        match self.find_branch(text) {
            Err(BranchError::Dropped { id, .. }) => Ok(id),
            found => found,
        }
    }

    /// Mounts the branch, or gives the mount that it has.
    pub fn mount(&self, branch: &BranchId) -> Result<Root, MountError> {
        if let Some(root) = self.inner.live.cached(branch, true) {
            return Ok(root);
        }
        let lock = self.branch_lock(branch);
        let _held = lock.lock().unwrap_or_else(PoisonError::into_inner);
        let root = self.mount_locked(branch)?;
        // The same one, which is now known to be out of our hands.
        Ok(self.inner.live.cached(branch, true).unwrap_or(root))
    }

    /// As [`Store::mount`], for a caller who holds the branch's lock and hands it to nobody who writes.
    pub(crate) fn mount_locked(&self, branch: &BranchId) -> Result<Root, MountError> {
        if let Some(root) = self.inner.live.cached(branch, false) {
            return Ok(root);
        }
        let layers = Layers::of(&self.inner.db.read(), branch)?;
        let layers = layers.ok_or_else(|| MountError::NoBranch(branch.clone()))?;
        let io_error = |source| MountError::Io { branch: branch.clone(), source };
        let engine = self.engine(if layers.copy { "copy" } else { "overlay" });
        let dir = self.inner.layout.branch(branch);
        let mounted = engine.mount(&dir, &self.lower_dirs(&layers.lower)).map_err(io_error)?;
        let root = Root(Arc::new(mounted));
        self.look_after_kill(branch, &root)?;
        self.inner.live.remember(branch, &root);
        Ok(root)
    }

    /// The directories of sealed layers, the last of which is a base's.
    pub(crate) fn lower_dirs(&self, lower: &[LayerId]) -> Vec<std::path::PathBuf> {
        let layout = &self.inner.layout;
        let Some((base, sealed)) = lower.split_last() else { return Vec::new() };
        sealed.iter().map(|layer| layout.layer(layer)).chain([layout.base(base)]).collect()
    }

    /// What the branch itself takes of the disk.
    pub fn branch_disk_use(&self, branch: &BranchId) -> Result<DiskUse, BranchError> {
        let engine = self.branch(branch)?.engine;
        let dir = self.engine(&engine).scanned(&self.inner.layout.branch(branch));
        Ok(crate::beneath::disk_use(&dir)?)
    }
}

/// Whether a branch can have this name.
pub(crate) fn check_name(name: Option<&str>) -> Result<(), NameError> {
    let Some(name) = name else { return Ok(()) };
    let good = |c: u8| c.is_ascii_alphanumeric() || matches!(c, b'.' | b'_' | b'-' | b'/');
    let reason = if name.is_empty() {
        "it is empty"
    } else if name.len() > NAME_BYTES_MAX {
        "it is too long"
    } else if !name.bytes().all(good) {
        "it has a character that names don't have"
    } else if !name.as_bytes()[0].is_ascii_alphanumeric() {
        "it does not begin with a letter or digit"
    } else if name.parse::<BranchId>().is_ok() {
        "it looks like an id"
    } else {
        return Ok(());
    };
    Err(NameError::Bad { name: name.chars().take(NAME_BYTES_MAX).collect(), reason })
}

/// Why there is no branch with this id or name.
fn dropped(conn: &Connection, text: &str) -> Result<BranchError, DbError> {
    let name: String = text.chars().take(NAME_BYTES_MAX).collect();
    // By its name at last: that looks at every row.
    let [by_id, by_name] = ["branch", "detail"].map(|column| {
        format!(
            "SELECT branch, seq, EXISTS (SELECT 1 FROM branches WHERE id = audit.branch) FROM audit
             WHERE op = 'drop' AND {column} = ?1 ORDER BY seq DESC LIMIT 1"
        )
    });
    let sql = if text.parse::<BranchId>().is_ok() { by_id } else { by_name };
    let found: Option<(String, i64, bool)> =
        conn.query_row(&sql, [text], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?))).optional()?;
    let Some((id, seq, kept)) = found else { return Ok(BranchError::NoBranch(name)) };
    let id = id.parse().map_err(damaged)?;
    Ok(BranchError::Dropped { name, id, seq: seq.cast_unsigned(), kept })
}

const SELECT: &str = "SELECT b.id, b.name, b.base, b.parent, b.engine, l.depth, b.created_ms,
    (SELECT max(seq) FROM audit WHERE branch = b.id)
    FROM branches b JOIN layers l ON l.id = b.layer WHERE b.dropped_ms IS NULL";

fn info(row: &Row<'_>) -> Result<BranchInfo, DbError> {
    let text = |n: usize| row.get::<_, String>(n);
    let number = |n: usize| row.get::<_, Option<i64>>(n).map(|n| n.unwrap_or_default().cast_unsigned());
    let parent: Option<String> = row.get(3)?;
    let depth: u32 = row.get(5)?;
    Ok(BranchInfo {
        id: text(0)?.parse().map_err(damaged)?,
        name: row.get(1)?,
        base: text(2)?.parse().map_err(damaged)?,
        parent: parent.map(|parent| parent.parse()).transpose().map_err(damaged)?,
        engine: text(4)?,
        depth: depth.saturating_sub(1),
        created_ms: number(6)?,
        audit_seq: number(7)?,
    })
}

pub(crate) fn damaged(error: IdError) -> DbError {
    DbError::Damaged(error.to_string())
}

fn base_layer(conn: &Connection, base: &BaseId) -> Result<LayerId, CreateError> {
    let mut statement =
        conn.prepare_cached("SELECT layer FROM bases WHERE id = ?1").map_err(DbError::from)?;
    let found: Option<String> =
        statement.query_row([base.as_str()], |row| row.get(0)).optional().map_err(DbError::from)?;
    let found = found.ok_or_else(|| CreateError::NoBase(base.clone()))?;
    Ok(found.parse().map_err(damaged)?)
}

/// The bytes of a new id.
pub(crate) fn random() -> io::Result<[u8; 10]> {
    let mut bytes = [0; 10];
    getrandom::fill(&mut bytes).map_err(|error| io::Error::other(error.to_string()))?;
    Ok(bytes)
}

/// Whether writers may live on a branch that is being forked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ForkBusy<'a> {
    /// Nothing has it mounted but this store.
    Quiet,
    /// What runs on it is frozen, and goes on afterwards. What was written last is this one's.
    Frozen(&'a Actor),
}

impl ForkBusy<'_> {
    pub(crate) fn writers(self) -> Writers {
        match self {
            ForkBusy::Quiet => Writers::Gone,
            ForkBusy::Frozen(_) => Writers::MayLive,
        }
    }
}
