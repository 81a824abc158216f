//! After a power cut: puts back what is recorded and kept, and is no longer, or no longer whole, in the directories of
//! layers. Capture makes content and rows durable, not the files that commands wrote.
//!
//! What is recorded was acknowledged, so it wins. What lies in its place and was never recorded is kept first: it goes
//! into the history as found by `recovery`. A name that was deleted and shows its old content again is deleted again.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use proto::ids::{BranchId, LayerId};
use proto::path::TreePath;
use rusqlite::{Connection, OptionalExtension, params};

use crate::audit::{Actor, NewRow, append};
use crate::beneath::{self, BeneathError, FileKind, Staged, fail};
use crate::content::{Contents, layer_dir};
use crate::db::DbError;
use crate::entries::{self, Chain, Class, Entry, Kind, StatId};
use crate::hashing::{self, Job};
use crate::recover::{LayerRow, RecoverError, RecoveryReport};
use crate::scan::marks;
use crate::store::Store;
use crate::walk::{Marks, What, is_ours, walk};

/// Losses that are told one by one.
const LOST_MAX: usize = 100;
/// The longest name in a directory.
const NAME_BYTES_MAX: usize = 255;

/// A layer that is being repaired.
struct Repair<'a> {
    store: &'a Store,
    conn: &'a Connection,
    /// The branch whose open layer it is.
    branch: Option<&'a BranchId>,
    /// The layer and those below it.
    chain: Chain,
    /// What it shows.
    root: BorrowedFd<'a>,
    report: &'a mut RecoveryReport,
}

impl Store {
    /// Repairs all layers, lowest first: those above show through to them.
    pub(crate) fn repair(
        &self,
        layers: &[LayerRow],
        report: &mut RecoveryReport,
    ) -> Result<(), RecoverError> {
        for layer in layers {
            // A layer that no live branch has open holds nothing that anybody needs, and a copied one has no directory.
            if (layer.open && layer.branch.is_none()) || (!layer.open && layer.copy) {
                continue;
            }
            let io_error = |source| RecoverError::Io { what: layer.id.to_string(), source };
            self.repair_layer(layer, report).map_err(|failed| match failed {
                Failed::Io(source) => io_error(source),
                Failed::Db(error) => RecoverError::Db(error),
            })?;
        }
        if report.restored > 0 {
            let dir = std::fs::File::open(self.dir());
            let synced = dir.and_then(|dir| Ok(rustix::fs::syncfs(&dir)?));
            synced.map_err(|source| RecoverError::Io { what: "the state directory".into(), source })?;
        }
        Ok(())
    }

    fn repair_layer(&self, layer: &LayerRow, report: &mut RecoveryReport) -> Result<(), Failed> {
        let conn = self.inner.db.reader()?;
        let chain = entries::chain(&conn, &layer.id)?;
        let lowers = self.lower_dirs(&chain[1..]);
        let layout = &self.inner.layout;
        let work = layout.tmp().join(format!("work-{}", layer.id));
        let gone_on = self.has_gone_on(layer);
        let mounted = match &layer.branch {
            Some(branch) if layer.open && !gone_on => {
                let engine = self.engine(if layer.copy { "copy" } else { "overlay" });
                engine.mount(&layout.branch(branch), &lowers)?
            }
            Some(_) | None => {
                let dir = layout.layer(&layer.id);
                if !dir.is_dir() {
                    report.lost(format!("the directory of the sealed layer {}", layer.id));
                    std::fs::create_dir(&dir)?;
                }
                std::fs::create_dir(&work)?;
                self.engines().mount_sealed(&dir, &work, &lowers)?
            }
        };
        let own = if layer.copy {
            entries::merged(&conn, &chain, None)?
        } else {
            entries::of_layer(&conn, &layer.id, None)?
        };
        let branch = layer.branch.as_ref().filter(|_| layer.open);
        let dir = match branch {
            Some(branch) if !gone_on => layer_dir(&layout.branch(branch)),
            Some(_) | None => layout.layer(&layer.id),
        };
        let unknown = self.unknown(&conn, &dir, layer, &own, &chain)?;
        let mut repair = Repair { store: self, conn: &conn, branch, chain, root: mounted.fd(), report };
        repair.all(&own)?;
        for (path, kind) in unknown.iter().rev() {
            let done = repair.unknown(path, *kind);
            repair.or_lost(path, done)?;
        }
        drop(mounted);
        self.inner.live.step("repair: layer");
        if work.exists() {
            crate::base::remove_tree(&work)?;
        }
        Ok(())
    }

    /// What lies in a layer's directory and is not recorded: new since the last scan, or back from the dead.
    fn unknown(
        &self,
        conn: &Connection,
        dir: &std::path::Path,
        layer: &LayerRow,
        own: &BTreeMap<TreePath, Entry>,
        chain: &[LayerId],
    ) -> Result<Vec<(TreePath, FileKind)>, Failed> {
        let dir = std::fs::File::open(dir)?;
        let marks = if layer.copy { Marks::None } else { marks() };
        let seen = hashing::pool().install(|| walk(dir.as_fd(), marks)).map_err(io::Error::from)?;
        let mut out = Vec::new();
        for (path, seen) in seen.seen {
            let kind = match seen.what {
                What::File => FileKind::File,
                What::Symlink => FileKind::Symlink,
                What::Dir(_) => FileKind::Dir,
                What::Other | What::Whiteout => continue,
            };
            // A whole tree: all that lies below is in `own` too.
            let known = own.contains_key(&path)
                || (!layer.copy && entries::lookup(conn, &chain[1..], &path)?.is_some());
            if !known {
                out.push((path, kind));
            }
        }
        Ok(out)
    }
}

impl RecoveryReport {
    fn lost(&mut self, what: String) {
        if self.lost.len() < LOST_MAX {
            self.lost.push(what);
        }
    }
}

/// Whether an error is the host's, so that another start may do better.
fn of_host(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let errno =
        std::iter::successors(error.get_ref().map(|inner| inner as &dyn std::error::Error), |error| {
            error.source()
        })
        .find_map(|error| error.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error));
    let errno = error.raw_os_error().or(errno).map(Errno::from_raw_os_error);
    errno.is_some_and(|errno| is_ours(errno) || matches!(errno, Errno::NOSPC | Errno::DQUOT | Errno::ROFS))
}

enum Failed {
    Io(io::Error),
    Db(DbError),
}

impl From<io::Error> for Failed {
    fn from(error: io::Error) -> Self {
        Failed::Io(error)
    }
}

impl From<DbError> for Failed {
    fn from(error: DbError) -> Self {
        Failed::Db(error)
    }
}

impl From<BeneathError> for Failed {
    fn from(error: BeneathError) -> Self {
        Failed::Io(io::Error::other(error))
    }
}

impl Repair<'_> {
    fn all(&mut self, own: &BTreeMap<TreePath, Entry>) -> Result<(), Failed> {
        // Deepest first: what is to be gone may stand in the way of what is to be there, and is emptied before it goes.
        for (path, _) in own.iter().rev().filter(|(_, entry)| entry.kind == Kind::Whiteout) {
            let gone = self.gone(path).map(drop);
            self.or_lost(path, gone)?;
        }
        for (path, entry) in own {
            let done = match entry.kind {
                Kind::Dir => self.dir(path, entry),
                Kind::File | Kind::Symlink => self.content(path, entry),
                Kind::Other | Kind::Whiteout => Ok(()),
            };
            self.or_lost(path, done)?;
        }
        Ok(())
    }

    /// One path that can't be repaired keeps no other from it, unless it is this host that fails.
    fn or_lost(&mut self, path: &TreePath, done: Result<(), Failed>) -> Result<(), Failed> {
        match done {
            Err(Failed::Io(error)) if !of_host(&error) => {
                tracing::error!(%path, %error, "a path could not be put back");
                self.report.lost(format!("{path}: {error}"));
                Ok(())
            }
            done => done,
        }
    }

    /// What lies at `path`; a part of the path that is no directory means nothing.
    fn there(&self, path: &TreePath) -> Result<Option<FileKind>, Failed> {
        match beneath::find(self.root, path) {
            Ok(stat) => Ok(stat.map(|stat| stat.kind)),
            Err(BeneathError::NotDir(_) | BeneathError::Symlink(_)) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Deletes again what a layer below shows although it was deleted. `false`: it was not deleted, or is another thing.
    fn gone(&mut self, path: &TreePath) -> Result<bool, Failed> {
        let Some(below) = self.hidden(path)? else { return Ok(false) };
        let back = match self.there(path)? {
            None => return Ok(true),
            Some(FileKind::Dir) => below.kind == Kind::Dir && self.is_empty(path)?,
            Some(FileKind::File | FileKind::Symlink) => {
                self.read(path, false)?.and_then(|now| now.hash) == below.hash
            }
            Some(FileKind::Other) => below.kind == Kind::Other,
        };
        if back {
            beneath::remove(self.root, path)?;
            self.step("repair: gone");
            self.report.restored += 1;
        }
        Ok(back)
    }

    /// What a whiteout at `path` hides, if the topmost layer that says anything of it has one.
    fn hidden(&self, path: &TreePath) -> Result<Option<Entry>, DbError> {
        for (at, layer) in self.chain.iter().enumerate() {
            match entries::get(self.conn, layer, path)? {
                None => {}
                Some(entry) if entry.kind == Kind::Whiteout => {
                    return entries::lookup(self.conn, &self.chain[at + 1..], path);
                }
                Some(_) => return Ok(None),
            }
        }
        Ok(None)
    }

    fn is_empty(&self, path: &TreePath) -> Result<bool, Failed> {
        Ok(beneath::list(self.root, Some(path))?.is_empty())
    }

    fn dir(&mut self, path: &TreePath, entry: &Entry) -> Result<(), Failed> {
        match self.there(path)? {
            Some(FileKind::Dir) => return self.mode(path, entry),
            Some(_) => self.keep_and_remove(path)?,
            None => {}
        }
        // With its mode at once: what is there the next start takes for what was written.
        let owner = self.store.inner.options.owner;
        self.make_parent(path)?;
        let mut staged = Staged::dir(self.root, path)?;
        staged.look(path, entry.mode, owner)?;
        self.step("repair: staged");
        staged.place(path).map_err(fail("put back", path))?;
        self.step("repair: placed");
        self.report.restored += 1;
        Ok(())
    }

    fn content(&mut self, path: &TreePath, entry: &Entry) -> Result<(), Failed> {
        let there = self.there(path)?;
        if entry.class == Class::Ignored || !entry.kept {
            if there == Some(FileKind::File) && entry.kind == Kind::File {
                return self.mode(path, entry);
            }
            if there.is_none() {
                self.report.lost(format!("{path}: its content was not kept"));
            }
            return Ok(());
        }
        let now = match there {
            Some(FileKind::File | FileKind::Symlink) => self.read(path, false)?,
            Some(FileKind::Dir | FileKind::Other) | None => None,
        };
        let same = |now: &Entry| now.kind == entry.kind && now.hash == entry.hash;
        if now.as_ref().is_some_and(same) {
            return self.mode(path, entry);
        }
        if entry.hash.is_none() && there.is_some() {
            return Ok(());
        }
        let contents = Contents::new(self.store, self.conn, None, &self.chain);
        let mut content = match contents.open(path, entry) {
            Ok(content) => content,
            Err(error) => {
                tracing::error!(%path, %error, "a file could not be put back");
                self.report.lost(format!("{path}: {error}"));
                return Ok(());
            }
        };
        match there {
            None => {}
            Some(FileKind::Dir | FileKind::Other) => self.keep_and_remove(path)?,
            Some(FileKind::File | FileKind::Symlink) => {
                self.keep(path, entry)?;
            }
        }
        self.make_parent(path)?;
        let owner = self.store.inner.options.owner;
        let mut staged = if entry.kind == Kind::Symlink {
            let mut target = Vec::new();
            io::Read::read_to_end(&mut content, &mut target)?;
            Staged::symlink(self.root, path, &target, owner)?
        } else {
            Staged::file(self.root, path, &mut content, entry.mode, owner)?
        };
        self.step("repair: staged");
        staged.place(path).map_err(fail("put back", path))?;
        self.step("repair: placed");
        staged.discard(path)?;
        self.report.restored += 1;
        Ok(())
    }

    /// Gives what is there the mode that was recorded.
    fn mode(&mut self, path: &TreePath, entry: &Entry) -> Result<(), Failed> {
        if entry.kind == Kind::Symlink || beneath::stat(self.root, path)?.mode == entry.mode {
            return Ok(());
        }
        beneath::chmod(self.root, path, entry.mode)?;
        self.step("repair: mode");
        self.report.restored += 1;
        Ok(())
    }

    fn make_parent(&self, path: &TreePath) -> Result<(), Failed> {
        if let Some(parent) = path.parent() {
            beneath::make_dirs(self.root, &parent, self.store.inner.options.owner)?;
        }
        Ok(())
    }

    fn step(&self, name: &'static str) {
        self.store.inner.live.step(name);
    }

    /// What is there now.
    fn read(&self, path: &TreePath, keep: bool) -> Result<Option<Entry>, Failed> {
        let job = Job { path: path.clone(), root: None, keep, kept: None };
        let read = hashing::read_all(self.root, &self.store.inner.blobs, &[job]);
        let read = read.map_err(io::Error::other)?.into_iter().next().flatten();
        Ok(read.map(|read| Entry {
            kind: read.kind,
            class: Class::Tree,
            mode: read.mode,
            size: read.size,
            hash: read.hash,
            kept: read.kept,
            stat: StatId::default(),
        }))
    }

    /// Puts what was found and never recorded into the branch's history, and right after it what is put back. An empty
    /// file is what a power cut makes of a new one: nobody wrote that.
    fn keep(&self, path: &TreePath, recorded: &Entry) -> Result<(), Failed> {
        let (Some(branch), Some(now)) = (self.branch, self.read(path, true)?) else { return Ok(()) };
        let Some(hash) = now.hash else { return Ok(()) };
        if now.size == 0 && recorded.size != 0 {
            return Ok(());
        }
        let inner = &*self.store.inner;
        inner.blobs.sync_all(&[hash]).map_err(io::Error::other)?;
        if self.is_kept(branch, path, &hash)? {
            return Ok(());
        }
        let now_ms = inner.options.clock.now_ms();
        let actor = Actor::recovery();
        let found = Entry { class: recorded.class, ..now };
        let rows = [
            NewRow::change(branch, &actor, "modify", path, Some(recorded), &found),
            NewRow::change(branch, &actor, "modify", path, Some(&found), recorded),
        ];
        let write = |tx: &rusqlite::Transaction<'_>| -> Result<(), DbError> {
            rows.iter().try_for_each(|row| append(tx, &inner.key, now_ms, row).map(drop))
        };
        inner.db.write(write)?;
        self.step("repair: kept");
        Ok(())
    }

    /// Whether an earlier start, which was killed before it put anything back, has recorded this already.
    fn is_kept(&self, branch: &BranchId, path: &TreePath, found: &blake3::Hash) -> Result<bool, DbError> {
        let sql = "SELECT actor, before FROM audit WHERE branch = ?1 AND path = ?2 ORDER BY seq DESC LIMIT 1";
        let mut statement = self.conn.prepare_cached(sql)?;
        let last: Option<(String, Option<[u8; 32]>)> = statement
            .query_row(params![branch.as_str(), path.as_bytes()], |row| Ok((row.get(0)?, row.get(1)?)))
            .optional()?;
        let same = |before: Option<[u8; 32]>| before.as_ref() == Some(found.as_bytes());
        Ok(last.is_some_and(|(actor, before)| actor == Actor::recovery().as_str() && same(before)))
    }

    /// What stands where something of another kind was recorded. It can't be kept at its place; a directory's files would
    /// each need one: they are moved aside by name instead.
    fn keep_and_remove(&mut self, path: &TreePath) -> Result<(), Failed> {
        for n in 0..LOST_MAX {
            let end = format!(".found-{n}");
            let own = path.file_name();
            let name = [&own[..own.len().min(NAME_BYTES_MAX - end.len())], end.as_bytes()].concat();
            let aside = path.parent().map_or_else(|| TreePath::new(&*name), |dir| dir.join(&name));
            let Ok(aside) = aside else { break };
            match beneath::rename(self.root, path, &aside) {
                Ok(()) => {
                    self.step("repair: aside");
                    return Ok(());
                }
                Err(rustix::io::Errno::EXIST) => {}
                Err(errno) => return Err(io::Error::from(errno).into()),
            }
        }
        self.report.lost(format!("{path}: something of another kind lay there"));
        Ok(beneath::remove(self.root, path)?)
    }

    /// Something that no entry names: deleted again if its deletion was the last that was recorded of it.
    fn unknown(&mut self, path: &TreePath, kind: FileKind) -> Result<(), Failed> {
        let Some(branch) = self.branch else {
            // A sealed layer was recorded whole: it is back from the dead, and nothing would ever record it.
            beneath::remove(self.root, path)?;
            self.step("repair: unknown");
            self.report.restored += 1;
            return Ok(());
        };
        if self.gone(path)? {
            return Ok(());
        }
        let sql = "SELECT kind, before FROM audit WHERE branch = ?1 AND path = ?2 AND kind IS NOT NULL
                   ORDER BY seq DESC LIMIT 1";
        let mut statement = self.conn.prepare_cached(sql).map_err(DbError::from)?;
        let mut rows = statement.query(params![branch.as_str(), path.as_bytes()]).map_err(DbError::from)?;
        let Some(row) = rows.next().map_err(DbError::from)? else { return Ok(()) };
        let last: String = row.get(0).map_err(DbError::from)?;
        let before: Option<[u8; 32]> = row.get(1).map_err(DbError::from)?;
        let back = match kind {
            FileKind::Dir => self.is_empty(path)?,
            FileKind::File | FileKind::Symlink => {
                let now = self.read(path, false)?.and_then(|now| now.hash);
                now.is_some() && now == before.map(blake3::Hash::from_bytes)
            }
            FileKind::Other => false,
        };
        if last == "x" && back {
            beneath::remove(self.root, path)?;
            self.report.restored += 1;
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "repair_tests.rs"]
mod tests;
