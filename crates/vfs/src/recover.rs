//! Putting a state directory in order when it is opened: what an interrupted operation left is undone or removed, and
//! after a power cut the files of branches are compared with what is recorded of them.
//!
//! `meta.run` says how the last runner ended: `clean BOOT` or `open BOOT`, BOOT the kernel's id of that boot. Clean:
//! `meta.unscanned` names the branches that something may have written to unrecorded. Open on
//! this boot: it was killed, and all that its processes wrote is there; each branch is scanned when it is first
//! mounted. Open on another boot: the machine went down, and files that were not synced may be gone.

use std::collections::HashSet;
use std::io;
use std::path::Path;
use std::sync::PoisonError;

use proto::error::{Code, Coded};
use proto::ids::{BranchId, LayerId};
use rusqlite::{Connection, OptionalExtension};
use rustix::fs::IFlags;

use crate::audit::Actor;
use crate::base::GcError;
use crate::beneath::{is_staged, remove};
use crate::branch::{MountError, damaged, io_code, random};
use crate::db::DbError;
use crate::engine::Root;
use crate::entries;
use crate::scan::{Layers, ScanError, Scope, Writers};
use crate::store::{Inner, Store};
use crate::walk::{Marks, walk};

/// A state directory that can't be put in order.
#[derive(Debug, thiserror::Error)]
pub enum RecoverError {
    /// A directory can't be read, moved or removed.
    #[error("can't put the directory of {what} in order")]
    Io {
        /// A branch, a layer or the blobs.
        what: String,
        /// Why.
        source: io::Error,
    },
    /// What is left of bases can't be removed.
    #[error("can't remove what is left of bases")]
    Bases(#[from] GcError),
    /// What lies in a layer can't be recorded.
    #[error("can't record what lies in a layer")]
    Scan(#[from] ScanError),
    /// The database failed.
    #[error("can't read what there should be")]
    Db(#[from] DbError),
}

impl Coded for RecoverError {
    fn code(&self) -> Code {
        match self {
            RecoverError::Io { source, .. } => io_code(source),
            RecoverError::Bases(error) => error.code(),
            RecoverError::Scan(error) => error.code(),
            RecoverError::Db(error) => error.code(),
        }
    }
    fn hint(&self) -> Option<String> {
        match self {
            RecoverError::Io { .. } => None,
            RecoverError::Bases(error) => error.hint(),
            RecoverError::Scan(error) => error.hint(),
            RecoverError::Db(error) => error.hint(),
        }
    }
}

/// What was found and done at the start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecoveryReport {
    /// The last runner did not end in order.
    pub unclean: bool,
    /// The machine has been started anew since, without an orderly end.
    pub power_cut: bool,
    /// Forks that were taken back.
    pub undone: u64,
    /// Branches that had gone on after a fork whose rows were lost.
    pub went_on: u64,
    /// Directories that no row names, removed.
    pub removed: u64,
    /// Directories that were missing, made again.
    pub remade: u64,
    /// Files, symlinks and directories put back from kept content.
    pub restored: u64,
    /// What could not be put back, for people; at most 100.
    pub lost: Vec<String>,
}

/// A layer that a row names.
pub(crate) struct LayerRow {
    pub(crate) id: LayerId,
    pub(crate) open: bool,
    pub(crate) copy: bool,
    /// The live branch whose open layer it is.
    pub(crate) branch: Option<BranchId>,
}

impl LayerRow {
    /// Whether it has a directory among the layers' that is to be kept.
    fn is_dir(&self, store: &Store) -> bool {
        store.has_gone_on(self) || (!self.open && !self.copy)
    }
}

impl Store {
    /// What was found and done when the store was opened.
    pub fn recovery(&self) -> RecoveryReport {
        self.inner.live.report.get().cloned().unwrap_or_default()
    }

    /// Called once, at open, before anything else happens.
    pub(crate) fn recover(&self) -> Result<(), RecoverError> {
        let boot = boot_id();
        let last: Option<Vec<u8>> = {
            let conn = self.inner.db.read();
            let sql = "SELECT value FROM meta WHERE key = 'run'";
            conn.query_row(sql, [], |row| row.get(0)).optional().map_err(DbError::from)?
        };
        let last = last.map(|last| String::from_utf8_lossy(&last).into_owned());
        let mut report = RecoveryReport::default();
        if let Some(last) = &last {
            report.unclean = !last.starts_with("clean ");
            report.power_cut = report.unclean && (boot.is_empty() || !last.ends_with(&boot));
        }
        if report.unclean {
            let io_error = |source| RecoverError::Io { what: "the blobs".into(), source };
            self.inner.blobs.sweep().map_err(io_error)?;
        }
        spread(&self.inner.layout.branches());
        self.sweep_bases()?;
        self.inner.live.step("recover: bases");
        let layers = layer_rows(&self.inner.db.read())?;
        self.take_back(&layers, &mut report)?;
        self.sweep(&layers, &mut report)?;
        self.sweep_layers()?;
        self.inner.live.step("recover: swept");
        // Anew: some are gone.
        let layers = layer_rows(&self.inner.db.read())?;
        if report.power_cut {
            self.repair(&layers, &mut report)?;
        }
        for layer in &layers {
            if let Some(branch) = layer.branch.as_ref().filter(|_| self.has_gone_on(layer)) {
                self.go_on(layer, branch)?;
                report.went_on += 1;
            }
        }
        let handed_out = if report.unclean { None } else { Some(unscanned(&self.inner.db.read())?) };
        let all = layers.iter().filter_map(|layer| layer.branch.clone());
        let all = all.filter(|branch| handed_out.as_ref().is_none_or(|some| some.contains(branch.as_str())));
        self.inner.live.unscanned().extend(all);
        self.inner.live.step("recover: done");
        self.record_run(&format!("open {boot}"))?;
        self.inner.live.step("recover: recorded");
        if report != RecoveryReport::default() {
            tracing::info!(?report, "the last runner did not end in order");
        }
        let _ = self.inner.live.report.set(report);
        Ok(())
    }

    /// Forks that were not recorded have moved a branch's upper to a layer's place: back.
    fn take_back(&self, layers: &[LayerRow], report: &mut RecoveryReport) -> Result<(), RecoverError> {
        let layout = &self.inner.layout;
        for layer in layers.iter().filter(|layer| layer.open) {
            let Some(branch) = &layer.branch else { continue };
            let dir = layout.branch(branch);
            let io_error = |source| RecoverError::Io { what: branch.to_string(), source };
            let sealed = layout.layer(&layer.id);
            let moved = !layer.copy && sealed.try_exists().map_err(io_error)?;
            if moved && is_empty(&dir.join("upper")).map_err(io_error)? {
                self.engine("overlay").unseal(&dir, &sealed).map_err(io_error)?;
                self.inner.live.step("recover: taken back");
                report.undone += 1;
            }
            let whole = if layer.copy { &["tree"][..] } else { &["upper", "work"] };
            if whole.iter().any(|name| !dir.join(name).is_dir()) {
                self.remake(branch, layer, &dir).map_err(io_error)?;
                self.inner.live.step("recover: remade");
                report.remade += 1;
            }
        }
        Ok(())
    }

    /// Whether a branch has written more after its open layer was sealed by a fork of which there is no row: a disk that
    /// acknowledged the fork has lost it. What lies in the layer's place and what the branch wrote since are both kept.
    pub(crate) fn has_gone_on(&self, layer: &LayerRow) -> bool {
        // What could be taken back has been.
        layer.open && !layer.copy && layer.branch.is_some() && self.inner.layout.layer(&layer.id).is_dir()
    }

    /// Records such a layer as sealed, with all that lies in it; what the branch wrote since is found when it is first
    /// mounted.
    fn go_on(&self, layer: &LayerRow, branch: &BranchId) -> Result<(), RecoverError> {
        let dir = self.inner.layout.layer(&layer.id);
        self.scan_dir(branch, &dir, &Actor::recovery(), None, Writers::Gone, Scope::All)?;
        self.inner.live.step("recover: layer scanned");
        let io_error = |source| RecoverError::Io { what: branch.to_string(), source };
        let open = LayerId::from_random(random().map_err(io_error)?);
        self.inner.db.write(|tx| -> Result<(), DbError> {
            let (sealed, open) = (layer.id.as_str(), open.as_str());
            tx.execute("UPDATE layers SET state = 'sealed' WHERE id = ?1", [sealed])?;
            tx.execute(
                "INSERT INTO layers (id, parent, base, depth, state, engine, created_ms)
                 SELECT ?2, id, base, depth + 1, 'open', engine, created_ms FROM layers WHERE id = ?1",
                [sealed, open],
            )?;
            tx.execute("UPDATE branches SET layer = ?2 WHERE id = ?1", [branch.as_str(), open])?;
            Ok(())
        })?;
        self.inner.live.step("recover: gone on");
        Ok(())
    }

    /// A recorded branch whose directory is not, or not wholly, there: a power cut came before it was on the disk.
    fn remake(&self, branch: &BranchId, layer: &LayerRow, dir: &Path) -> io::Result<()> {
        let engine = self.engine(if layer.copy { "copy" } else { "overlay" });
        let upper = dir.join("upper");
        if !layer.copy && upper.is_dir() {
            return std::fs::create_dir(dir.join("work"));
        }
        let base: Option<String> = {
            let conn = self.inner.db.read();
            let sql = "SELECT bases.layer FROM branches JOIN bases ON bases.id = branches.base
                       WHERE branches.id = ?1";
            conn.query_row(sql, [branch.as_str()], |row| row.get(0)).optional().map_err(io::Error::other)?
        };
        let base = base.ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
        let base: LayerId = base.parse().map_err(io::Error::other)?;
        // Beside its place first: a part of a copy must not be taken for the whole by the next start.
        let draft = self.inner.layout.tmp().join(format!("remade-{branch}"));
        engine.create(&draft, &self.inner.layout.base(&base))?;
        self.inner.live.step("recover: drafted");
        self.discard(dir, branch.as_str());
        self.inner.live.step("recover: discarded");
        std::fs::rename(draft, dir)
    }

    /// Removes directories that no row names.
    fn sweep(&self, layers: &[LayerRow], report: &mut RecoveryReport) -> Result<(), RecoverError> {
        let branches: HashSet<&str> =
            layers.iter().filter_map(|layer| layer.branch.as_ref()).map(BranchId::as_str).collect();
        let sealed: HashSet<&str> =
            layers.iter().filter(|layer| layer.is_dir(self)).map(|layer| layer.id.as_str()).collect();
        let layout = &self.inner.layout;
        let none = HashSet::new();
        for (dir, known) in
            [(layout.branches(), &branches), (layout.layers(), &sealed), (layout.mounts(), &none)]
        {
            let entries = match std::fs::read_dir(&dir) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                entries => entries,
            };
            let io_error = |source| RecoverError::Io { what: dir.display().to_string(), source };
            for entry in entries.map_err(io_error)? {
                let entry = entry.map_err(io_error)?;
                let name = entry.file_name().to_string_lossy().into_owned();
                if !known.contains(name.as_str()) {
                    let aside = layout.tmp().join(format!("swept-{name}"));
                    std::fs::rename(entry.path(), &aside).map_err(io_error)?;
                    self.inner.live.step("recover: aside");
                    self.inner.live.remove_later(aside);
                    report.removed += 1;
                }
            }
        }
        Ok(())
    }

    /// Removes the rows that an interrupted drop left.
    fn sweep_layers(&self) -> Result<(), DbError> {
        let ids = |sql: &str| -> Result<Vec<LayerId>, DbError> {
            let conn = self.inner.db.read();
            let mut statement = conn.prepare(sql)?;
            let rows = statement.query_map([], |row| row.get::<_, String>(0))?;
            rows.map(|id| id?.parse().map_err(damaged)).collect()
        };
        let dropped = "SELECT id FROM layers WHERE state = 'open' AND id NOT IN
                       (SELECT layer FROM branches WHERE dropped_ms IS NULL)";
        for layer in ids(dropped)? {
            self.forget_entries(&layer)?;
            self.inner.live.step("recover: forgotten");
        }
        let unused = "SELECT id FROM layers WHERE state = 'sealed' AND engine != 'base' AND NOT EXISTS
                      (SELECT 1 FROM layers AS above WHERE above.parent = layers.id)";
        for layer in ids(unused)? {
            self.release_layers(&layer)?;
        }
        Ok(())
    }

    /// Looks at a branch that nobody has looked at since the runner was killed: what an edit had begun is taken back, and the
    /// rest recorded.
    pub(crate) fn recovered(&self, branch: &BranchId) -> Result<(), MountError> {
        if !self.inner.live.unscanned().contains(branch) {
            return Ok(());
        }
        let lock = self.branch_lock(branch);
        let _held = lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.recovered_locked(branch)
    }

    /// As [`Store::recovered`], for who holds the branch's lock.
    pub(crate) fn recovered_locked(&self, branch: &BranchId) -> Result<(), MountError> {
        if !self.inner.live.unscanned().contains(branch) {
            return Ok(());
        }
        let root = self.mount_locked(branch)?;
        // One that was mounted already has not been looked at.
        self.look_after_kill(branch, &root)
    }

    /// At a mount: looks at the branch if nobody has.
    pub(crate) fn look_after_kill(&self, branch: &BranchId, root: &Root) -> Result<(), MountError> {
        if self.inner.live.unscanned().contains(branch) {
            self.scan_after_kill(branch, root)
                .map_err(|source| MountError::Recover { branch: branch.clone(), source: Box::new(source) })?;
            self.inner.live.unscanned().remove(branch);
        }
        Ok(())
    }

    /// At the first mount of a branch after the runner was killed: removes what edits had staged, and records what
    /// nobody recorded.
    fn scan_after_kill(&self, branch: &BranchId, root: &Root) -> Result<(), ScanError> {
        let dir = crate::content::layer_dir(&self.inner.layout.branch(branch));
        let io_error = |source| ScanError::Io { branch: branch.clone(), source };
        let dir = std::fs::File::open(dir).map_err(io_error)?;
        let seen = crate::hashing::pool()
            .install(|| walk(std::os::fd::AsFd::as_fd(&dir), Marks::None))
            .map_err(|error| ScanError::of_walk(error, branch))?;
        let layers = Layers::of(&self.inner.db.read(), branch)?;
        let chain = layers.ok_or_else(|| ScanError::NoBranch(branch.clone()))?.chain();
        for (path, _) in seen.seen.iter().filter(|(path, _)| is_staged(path.file_name())) {
            // What a scan has recorded is a command's.
            if entries::lookup(&self.inner.db.read(), &chain, path)?.is_some() {
                continue;
            }
            // In the upper it may be a whiteout, which is not there for those who look through the mount.
            if let Err(error) = remove(root.fd(), path) {
                tracing::debug!(%branch, %path, %error, "a staged file was not removed");
            }
        }
        let found = self.scan_locked(branch, &Actor::recovery(), None, Writers::Gone)?;
        if !found.unscannable.is_empty() {
            // So that a fork looks, too.
            self.inner.live.handed_out().insert(branch.clone());
        }
        Ok(())
    }

    fn record_run(&self, run: &str) -> Result<(), DbError> {
        self.inner.db.write(|tx| record_run(tx, run))
    }
}

fn record_run(conn: &Connection, run: &str) -> Result<(), DbError> {
    let sql = "INSERT OR REPLACE INTO meta (key, value) VALUES ('run', ?1)";
    conn.prepare_cached(sql)?.execute([run.as_bytes()])?;
    Ok(())
}

impl Drop for Inner {
    /// An orderly end: what was written is on the disk before it is said that nothing has to be looked at.
    fn drop(&mut self) {
        if self.live.is_killed() || self.live.report.get().is_none() || self.blobs.settle().is_err() {
            return;
        }
        let mut unscanned: Vec<_> = self.live.handed_out().iter().map(ToString::to_string).collect();
        unscanned.extend(self.live.unscanned().iter().map(ToString::to_string));
        let run = format!("clean {}", boot_id());
        let _ = self.db.write(|tx| {
            tx.execute(
                "INSERT OR REPLACE INTO meta (key, value) VALUES ('unscanned', ?1)",
                [unscanned.join(" ").as_bytes()],
            )?;
            record_run(tx, &run)
        });
        if let Err(error) = crate::witness::note(&self.db, &self.key, &self.layout) {
            tracing::error!(%error, "the end of the audit can't be noted");
        }
    }
}

/// Branches that the last runner could not vouch for when it ended in order.
fn unscanned(conn: &Connection) -> Result<HashSet<String>, DbError> {
    let sql = "SELECT value FROM meta WHERE key = 'unscanned'";
    let found: Option<Vec<u8>> = conn.query_row(sql, [], |row| row.get(0)).optional()?;
    let found = String::from_utf8_lossy(&found.unwrap_or_default()).into_owned();
    Ok(found.split_whitespace().map(str::to_owned).collect())
}

fn layer_rows(conn: &Connection) -> Result<Vec<LayerRow>, DbError> {
    let sql = "SELECT l.id, l.state, l.engine, b.id FROM layers l
               LEFT JOIN branches b ON b.layer = l.id AND b.dropped_ms IS NULL WHERE l.engine != 'base'
               ORDER BY l.depth";
    let mut statement = conn.prepare(sql)?;
    let rows = statement.query_and_then([], |row| {
        let branch: Option<String> = row.get(3)?;
        Ok(LayerRow {
            id: row.get::<_, String>(0)?.parse().map_err(damaged)?,
            open: row.get::<_, String>(1)? == "open",
            copy: row.get::<_, String>(2)? == "copy",
            branch: branch.map(|branch| branch.parse()).transpose().map_err(damaged)?,
        })
    })?;
    rows.collect()
}

/// Whether nothing is in a directory, or there is none.
fn is_empty(dir: &Path) -> io::Result<bool> {
    match std::fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(true),
        entries => Ok(entries?.next().is_none()),
    }
}

/// The kernel's id of this boot; empty where it can't be read.
fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

/// Lets ext4 spread the branches over the disk: files made where many were just deleted are slow to make.
fn spread(branches: &Path) {
    let Ok(dir) = std::fs::File::open(branches) else { return };
    if let Ok(flags) = rustix::fs::ioctl_getflags(&dir)
        && !flags.contains(IFlags::TOPDIR)
    {
        // Other file systems have no such flag.
        let _ = rustix::fs::ioctl_setflags(&dir, flags | IFlags::TOPDIR);
    }
}
