//! Capture: finds what changed on a branch since it was last looked at, keeps the content, and records it. The scan
//! reads the branch's own directory, compares it with what its open layer says, and commits entries and audit rows in
//! one transaction.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use proto::error::{Code, Coded};
use proto::ids::{BranchId, LayerId};
use proto::path::TreePath;
use proto::verify::{Change as ChangedPath, ChangeStatus, ChangedFiles};
use rusqlite::{Connection, OptionalExtension};
use rustix::fs::OFlags;

use crate::audit::{Actor, Appender, NewRow};
use crate::blobs::BlobError;
use crate::content::{Contents, layer_dir};
use crate::db::DbError;
use crate::entries::{self, Chain, Class, Entry, Kind, StatId};
use crate::hashing::{self, Captured, Job, KEPT_BYTES_MAX};
use crate::rules::{RULES_BYTES_MAX, RuleSource, Rules, is_rules};
use crate::store::Store;
use crate::tree::TreeHasher;
use crate::walk::{Below, Marks, NOTES_MAX, Seen, Walk, What, open_beneath, walk};

/// Changed paths that a report lists.
const PATHS_MAX: usize = 1_000;
/// Tree hashes that are remembered.
const TREES_MAX: usize = 4_096;
/// While writers live, a file that changed less than this ago is read again at the next scan: a page that is mapped
/// and dirty takes more writes without a new timestamp until the kernel has written it out, after about 35 s.
const MAPPED_NS_MAX: i64 = 60_000_000_000;

/// Stands for the identity of a file that lies in a sealed layer while the open layer says in which class it is now.
const THROUGH: StatId = StatId { ctime_ns: -1, mtime_ns: 0, ino: 0 };

/// Whether a process that can write to the branch may be alive during a scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writers {
    /// None: the branch stands still.
    Gone,
    /// Background processes.
    MayLive,
}

/// Which changes a scan records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope<'a> {
    /// All.
    All,
    /// Only that patterns have changed: every path is given its class anew.
    Rules,
    /// Those at and below these paths. The others are somebody else's, whose scan is still to come.
    Below(&'a [&'a TreePath]),
}

/// What a scan found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScanReport {
    /// The files that changed.
    pub changed: ChangedFiles,
    /// The first audit row of this scan.
    pub first_seq: Option<u64>,
    /// The last one.
    pub last_seq: Option<u64>,
    /// What could not be read or named, for people; at most 100.
    pub unscannable: Vec<String>,
}

/// A scan that recorded nothing.
#[derive(Debug, thiserror::Error)]
pub enum ScanError {
    /// There is no such branch.
    #[error("there is no branch {0}")]
    NoBranch(BranchId),
    /// The branch's directory can't be read.
    #[error("can't read the directory of the branch {branch}")]
    Io {
        /// Which branch.
        branch: BranchId,
        /// Why.
        source: io::Error,
    },
    /// Content can't be kept.
    #[error("can't keep what changed on the branch {branch}")]
    Blob {
        /// Which branch.
        branch: BranchId,
        /// Why.
        source: BlobError,
    },
    /// The audit can't be written.
    #[error("can't record what changed")]
    Db(#[from] DbError),
}

impl Coded for ScanError {
    fn code(&self) -> Code {
        match self {
            ScanError::NoBranch(_) => Code::NotFound,
            ScanError::Blob { source, .. } if source.is_full() => Code::NoSpace,
            ScanError::Io { .. } | ScanError::Blob { .. } => Code::HostBroken,
            ScanError::Db(error) => error.code(),
        }
    }
    fn hint(&self) -> Option<String> {
        (self.code() == Code::NoSpace).then(|| "make room, then run it again: nothing was recorded".into())
    }
}

/// The layers of a branch.
pub(crate) struct Layers {
    /// The branch's own layer.
    pub(crate) open: LayerId,
    /// What lies below it, topmost first.
    pub(crate) lower: Chain,
    /// Whether the branch is a whole tree.
    pub(crate) copy: bool,
}

impl Layers {
    pub(crate) fn of(conn: &Connection, branch: &BranchId) -> Result<Option<Self>, DbError> {
        let mut statement =
            conn.prepare_cached("SELECT layer, engine FROM branches WHERE id = ?1 AND dropped_ms IS NULL")?;
        let found: Option<(String, String)> =
            statement.query_row([branch.as_str()], |row| Ok((row.get(0)?, row.get(1)?))).optional()?;
        let Some((open, engine)) = found else { return Ok(None) };
        let open: LayerId = open.parse().map_err(|error| DbError::Damaged(format!("{error}")))?;
        let lower = entries::chain(conn, &open)?.split_off(1);
        Ok(Some(Self { open, lower, copy: engine == "copy" }))
    }

    pub(crate) fn base(&self) -> &LayerId {
        self.lower.last().unwrap_or(&self.open)
    }

    pub(crate) fn chain(&self) -> Chain {
        std::iter::once(&self.open).chain(&self.lower).cloned().collect()
    }
}

/// What scans and their readers share.
#[derive(Default)]
pub(crate) struct Shared {
    locks: Mutex<HashMap<BranchId, Weak<Mutex<()>>>>,
    /// Tree hashes by topmost layer, each with the audit sequence number that it holds for.
    trees: Mutex<HashMap<LayerId, (u64, String)>>,
}

impl Shared {
    /// The lock of a branch: who holds it may change the branch's files and what is recorded of them.
    pub(crate) fn lock(&self, branch: &BranchId) -> Arc<Mutex<()>> {
        let mut locks = self.locks.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(lock) = locks.get(branch).and_then(Weak::upgrade) {
            return lock;
        }
        locks.retain(|_, lock| lock.strong_count() > 0);
        let lock = Arc::new(Mutex::new(()));
        locks.insert(branch.clone(), Arc::downgrade(&lock));
        lock
    }
}

impl Store {
    /// Records what changed on a branch, as done by `actor`, with a row of its own for `detail` (a command line). No
    /// process that can write to the branch may be alive: see [`Store::scan_live`].
    pub fn scan(
        &self,
        branch: &BranchId,
        actor: &Actor,
        detail: Option<&str>,
    ) -> Result<ScanReport, ScanError> {
        let lock = self.inner.capture.lock(branch);
        let _held = lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.scan_locked(branch, actor, detail, Writers::Gone)
    }

    /// As [`Store::scan`], while background processes may go on writing.
    pub fn scan_live(
        &self,
        branch: &BranchId,
        actor: &Actor,
        detail: Option<&str>,
    ) -> Result<ScanReport, ScanError> {
        let lock = self.inner.capture.lock(branch);
        let _held = lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.scan_locked(branch, actor, detail, Writers::MayLive)
    }

    /// The tree hash of a branch as of its last scan or direct edit.
    pub fn tree_hash(&self, branch: &BranchId) -> Result<String, ScanError> {
        let conn = self.inner.db.reader()?;
        let layers = Layers::of(&conn, branch)?.ok_or_else(|| ScanError::NoBranch(branch.clone()))?;
        let seq = entries::last_seq(&conn, branch)?;
        let trees = || self.inner.capture.trees.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((at, tree)) = trees().get(&layers.open)
            && *at == seq
        {
            return Ok(tree.clone());
        }
        let mut hasher = TreeHasher::default();
        entries::each_merged(&conn, &layers.chain(), |path, entry| hasher.add(path, entry))?;
        let tree = hasher.finish();
        let mut trees = trees();
        if trees.len() >= TREES_MAX {
            trees.clear();
        }
        trees.insert(layers.open.clone(), (seq, tree.clone()));
        Ok(tree)
    }

    /// Records what changed on a branch, as done by `actor`, with a row of its own for `detail` (a command line).
    /// The caller holds the branch's lock.
    pub(crate) fn scan_locked(
        &self,
        branch: &BranchId,
        actor: &Actor,
        detail: Option<&str>,
        writers: Writers,
    ) -> Result<ScanReport, ScanError> {
        self.scan_scope(branch, actor, detail, writers, Scope::All)
    }

    /// As [`Store::scan_locked`], for a part of what changed.
    pub(crate) fn scan_scope(
        &self,
        branch: &BranchId,
        actor: &Actor,
        detail: Option<&str>,
        writers: Writers,
        scope: Scope<'_>,
    ) -> Result<ScanReport, ScanError> {
        let dir = layer_dir(&self.inner.layout.branch(branch));
        self.scan_dir(branch, &dir, actor, detail, writers, scope)
    }

    /// As [`Store::scan_locked`], when the open layer's files are in `dir`.
    pub(crate) fn scan_dir(
        &self,
        branch: &BranchId,
        dir: &Path,
        actor: &Actor,
        detail: Option<&str>,
        writers: Writers,
        scope: Scope<'_>,
    ) -> Result<ScanReport, ScanError> {
        let conn = self.inner.db.reader()?;
        let layers = Layers::of(&conn, branch)?.ok_or_else(|| ScanError::NoBranch(branch.clone()))?;
        let io_error = |source| ScanError::Io { branch: branch.clone(), source };
        let made_ns = made_ns(&dir.with_file_name("made"));
        let dir = File::open(dir).map_err(io_error)?;
        let marks = if layers.copy { Marks::None } else { marks() };
        let mut seen = None;
        // One thread lists the directory while another reads the database: both take as long.
        let (own, lower) = hashing::pool().in_place_scope(|scope| {
            scope.spawn(|_| seen = Some(walk(dir.as_fd(), marks)));
            let own = entries::of_layer(&conn, &layers.open, None)?;
            let lower = if layers.copy { Some(entries::merged(&conn, &layers.lower, None)?) } else { None };
            Ok::<_, DbError>((own, lower))
        })?;
        let walk = seen.unwrap_or_else(|| Ok(Walk::default()));
        let walk = walk.map_err(|errno| io_error(errno.into()))?;
        let scan = Scan {
            store: self,
            conn: &conn,
            branch,
            layers: &layers,
            dir: dir.as_fd(),
            walk,
            own,
            lower,
            made_ns,
            scope,
            lower_dirs: Dirs::default(),
            base_dirs: Dirs::default(),
        };
        let changes = scan.compare()?;
        scan.record(changes, actor, detail, writers)
    }
}

/// One scan at work.
struct Scan<'a> {
    store: &'a Store,
    conn: &'a Connection,
    branch: &'a BranchId,
    layers: &'a Layers,
    dir: BorrowedFd<'a>,
    walk: Walk,
    /// What the open layer says.
    own: BTreeMap<TreePath, Entry>,
    /// Of a whole tree: all that lies below the open layer.
    lower: Option<BTreeMap<TreePath, Entry>>,
    /// Of a whole tree: when it was made.
    made_ns: i64,
    scope: Scope<'a>,
    lower_dirs: Dirs,
    base_dirs: Dirs,
}

/// Whether directories exist.
type Dirs = RefCell<HashMap<TreePath, bool>>;

/// One path that the open layer is to say something new about.
struct Change {
    before: Option<Entry>,
    after: After,
}

enum After {
    /// This, whose class is still to be found.
    Is(Entry),
    /// What is read from the file.
    Read,
    /// Nothing; the layers below have something there.
    Whiteout,
    /// What the layers below say: the open layer says nothing.
    Lower(Option<Entry>),
    /// What it was, in another class.
    Class(Entry),
}

type Changes = BTreeMap<TreePath, Change>;

impl Scan<'_> {
    fn lower(&self, path: &TreePath) -> Result<Option<Entry>, DbError> {
        match &self.lower {
            Some(lower) => Ok(lower.get(path).cloned()),
            None if !self.has_dir(&self.lower_dirs, path, &self.layers.lower)? => Ok(None),
            None => entries::lookup(self.conn, &self.layers.lower, path),
        }
    }

    /// Whether the layers of `chain` have the directory that `path` is in: asked once for many new files.
    fn has_dir(&self, known: &Dirs, path: &TreePath, chain: &[LayerId]) -> Result<bool, DbError> {
        let Some(parent) = path.parent() else { return Ok(true) };
        if let Some(has) = known.borrow().get(&parent) {
            return Ok(*has);
        }
        let has = entries::lookup(self.conn, chain, &parent)?.is_some_and(|entry| entry.kind == Kind::Dir);
        known.borrow_mut().insert(parent, has);
        Ok(has)
    }

    fn lower_below(&self, dir: &TreePath) -> Result<BTreeMap<TreePath, Entry>, DbError> {
        entries::merged(self.conn, &self.layers.lower, Some(dir))
    }

    /// What was at `path` when it was last looked at.
    fn before(&self, path: &TreePath) -> Result<Option<Entry>, DbError> {
        match self.own.get(path) {
            Some(entry) if entry.kind == Kind::Whiteout => Ok(None),
            Some(entry) => Ok(Some(entry.clone())),
            None => self.lower(path),
        }
    }

    fn compare(&self) -> Result<Changes, DbError> {
        let mut changes = Changes::new();
        let moved = self.moved()?;
        for (path, seen) in &self.walk.seen {
            if !self.unchanged(path, seen) {
                self.changed(&mut changes, path, seen, &moved)?;
            }
        }
        for (path, entry) in &moved {
            let before = self.before(path)?;
            if !self.own.get(path).is_some_and(|own| own.same_content(entry)) {
                let entry = Entry { stat: StatId::default(), ..entry.clone() };
                changes.insert(path.clone(), Change { before, after: After::Is(entry) });
            }
        }
        self.missing(&mut changes, &moved)?;
        Ok(changes)
    }

    /// What shows through directories that were renamed: entries of the layers below, at their new paths.
    fn moved(&self) -> Result<BTreeMap<TreePath, Entry>, DbError> {
        let mut out = BTreeMap::new();
        for (path, seen) in &self.walk.seen {
            let What::Dir(Below::Moved(from)) = &seen.what else { continue };
            for (old, entry) in self.lower_below(from)? {
                let rest = &old.as_bytes()[from.as_bytes().len() + 1..];
                let child = rest.split(|byte| *byte == b'/').next().unwrap_or(rest);
                let hidden = path.join(child).is_ok_and(|child| self.walk.get(&child).is_some());
                if let (false, Ok(new)) = (hidden, path.join(rest)) {
                    out.insert(new, entry);
                }
            }
        }
        Ok(out)
    }

    fn unchanged(&self, path: &TreePath, seen: &Seen) -> bool {
        match self.own.get(path) {
            Some(own) => same(own, seen),
            // A whole tree: a file as it was copied.
            None => self.lower.as_ref().and_then(|lower| lower.get(path)).is_some_and(|lower| {
                lower.mode == seen.mode
                    && match (&seen.what, lower.kind) {
                        (What::Dir(_), Kind::Dir) | (What::Other, Kind::Other) => true,
                        (What::File, Kind::File) | (What::Symlink, Kind::Symlink) => {
                            lower.size == seen.size
                                && lower.stat.mtime_ns == seen.stat.mtime_ns
                                && seen.stat.ctime_ns < self.made_ns
                        }
                        _ => false,
                    }
            }),
        }
    }

    fn changed(
        &self,
        changes: &mut Changes,
        path: &TreePath,
        seen: &Seen,
        moved: &BTreeMap<TreePath, Entry>,
    ) -> Result<(), DbError> {
        let own = self.own.get(path);
        let before = self.before(path)?;
        if seen.what == What::Whiteout && own.is_none() && before.is_none() {
            return Ok(());
        }
        let had_dir = own.is_none_or(|own| own.kind == Kind::Dir);
        let hides = match &seen.what {
            What::Dir(Below::Same) => false,
            What::Dir(below) => {
                let marked = own.is_none_or(|own| own.kind != Kind::Dir || own.stat != dir_stat(below));
                marked && self.parent_shows(path)
            }
            What::File | What::Symlink | What::Other | What::Whiteout => had_dir,
        };
        if hides && self.lower.is_none() && self.lower(path)?.is_some_and(|entry| entry.kind == Kind::Dir) {
            for (below, entry) in self.lower_below(path)? {
                let said = self.own.contains_key(&below) || moved.contains_key(&below);
                if !said && self.walk.get(&below).is_none() {
                    changes.insert(below, Change { before: Some(entry), after: After::Whiteout });
                }
            }
        }
        let after = match &seen.what {
            What::Whiteout => After::Whiteout,
            What::File | What::Symlink => After::Read,
            What::Dir(below) => After::Is(special(Kind::Dir, seen.mode, dir_stat(below))),
            What::Other => After::Is(special(Kind::Other, seen.mode, StatId::default())),
        };
        changes.insert(path.clone(), Change { before, after });
        Ok(())
    }

    /// Whether the directory above `path` shows the layers below at its own path.
    fn parent_shows(&self, path: &TreePath) -> bool {
        path.parent().is_none_or(|parent| {
            self.walk.get(&parent).is_none_or(|seen| seen.what == What::Dir(Below::Same))
        })
    }

    /// Paths that the open layer (or, of a whole tree, any layer) has and the directory has not.
    fn missing(&self, changes: &mut Changes, moved: &BTreeMap<TreePath, Entry>) -> Result<(), DbError> {
        let mut cover: Option<TreePath> = None;
        for (path, own) in &self.own {
            if self.walk.get(path).is_some() || moved.contains_key(path) || self.closed(path) {
                continue;
            }
            if own.kind != Kind::Whiteout {
                let after = match self.lower(path)? {
                    Some(_) if own.stat == THROUGH && self.cover(path).is_none() => continue,
                    Some(_) => After::Whiteout,
                    None => After::Lower(None),
                };
                changes.insert(path.clone(), Change { before: Some(own.clone()), after });
                continue;
            }
            if self.lower.is_some() || cover.as_ref().is_some_and(|cover| path.starts_with(cover)) {
                continue;
            }
            cover = self.cover(path);
            if cover.is_none() {
                let shown = self.lower(path)?;
                changes.insert(path.clone(), Change { before: None, after: After::Lower(shown) });
            }
        }
        for (path, entry) in self.lower.iter().flatten() {
            if self.walk.get(path).is_none() && !self.own.contains_key(path) && !self.closed(path) {
                changes.insert(path.clone(), Change { before: Some(entry.clone()), after: After::Whiteout });
            }
        }
        Ok(())
    }

    /// The path in the directory that hides what the layers below have at `path`.
    fn cover(&self, path: &TreePath) -> Option<TreePath> {
        let mut at = path.parent();
        while let Some(dir) = at {
            if let Some(seen) = self.walk.get(&dir) {
                return (seen.what != What::Dir(Below::Same)).then_some(dir);
            }
            at = dir.parent();
        }
        None
    }

    fn closed(&self, path: &TreePath) -> bool {
        self.walk.closed.iter().any(|dir| path.starts_with(dir) && path != dir)
    }

    /// Where the layers below have what the branch shows at `path`, which is not in its own directory.
    fn below(&self, path: &TreePath) -> Option<TreePath> {
        let mut at = path.parent();
        while let Some(dir) = at {
            if let Some(seen) = self.walk.get(&dir) {
                let What::Dir(below) = &seen.what else { return None };
                let rest = &path.as_bytes()[dir.as_bytes().len() + 1..];
                return match below {
                    Below::Same => Some(path.clone()),
                    Below::Moved(from) => from.join(rest).ok(),
                    Below::Nothing => None,
                };
            }
            at = dir.parent();
        }
        Some(path.clone())
    }

    fn record(
        &self,
        mut changes: Changes,
        actor: &Actor,
        detail: Option<&str>,
        writers: Writers,
    ) -> Result<ScanReport, ScanError> {
        let mut rules = Rules::new(self);
        let asked = |path: &TreePath| match self.scope {
            Scope::All => true,
            Scope::Below(tops) => tops.iter().any(|top| path.starts_with(top)),
            Scope::Rules => false,
        };
        let others: BTreeSet<TreePath> = changes.keys().filter(|path| !asked(path)).cloned().collect();
        if self.scope == Scope::Rules || changes.keys().any(|path| is_rules(path) && asked(path)) {
            self.reclassify(&mut changes, &mut rules)?;
        }
        changes.retain(|path, _| !others.contains(path));
        let mut classes = BTreeMap::new();
        for (path, change) in &changes {
            classes.insert(path, self.class(&mut rules, path, change)?);
        }
        let jobs = self.jobs(&changes, &classes)?;
        let clock_ns = hashing::file_clock_ns();
        let blob_error = |source| ScanError::Blob { branch: self.branch.clone(), source };
        let read = hashing::read_all(self.dir, &self.store.inner.blobs, &jobs).map_err(blob_error)?;
        let mut unscannable = self.walk.notes.clone();
        unscannable.extend(read.iter().flatten().filter_map(|read| read.note.clone()));
        unscannable.truncate(NOTES_MAX);
        let mut read: BTreeMap<TreePath, Captured> =
            jobs.into_iter().zip(read).filter_map(|(job, read)| read.map(|read| (job.path, read))).collect();
        if writers == Writers::MayLive {
            for read in read.values_mut().filter(|read| read.stat.ctime_ns > clock_ns - MAPPED_NS_MAX) {
                read.stat = StatId::default();
            }
        }
        let kept: Vec<_> = read.values().filter(|read| read.kept).filter_map(|read| read.hash).collect();
        hashing::pool().install(|| self.store.inner.blobs.sync_all(&kept)).map_err(blob_error)?;
        let settled: Vec<Settled> = changes
            .iter()
            .filter_map(|(path, change)| settle(path, change, classes[path], read.get(path)))
            .collect();
        self.store.inner.live.step("scan: stored");
        let seqs = self.commit(&settled, actor, detail)?;
        self.store.inner.live.step("scan: recorded");
        let changed = report(&settled);
        let (first_seq, last_seq) = seqs.unzip();
        Ok(ScanReport { changed, first_seq, last_seq, unscannable })
    }

    fn class(&self, rules: &mut Rules<'_>, path: &TreePath, change: &Change) -> Result<Class, DbError> {
        let is_dir = match (&change.after, &change.before) {
            (After::Whiteout | After::Lower(None), Some(before)) => return Ok(before.class),
            (After::Lower(Some(entry)) | After::Class(entry), _) => return Ok(entry.class),
            (After::Is(entry), _) => entry.kind == Kind::Dir,
            (After::Whiteout | After::Lower(None) | After::Read, _) => false,
        };
        self.class_of(rules, path, is_dir)
    }

    fn class_of(&self, rules: &mut Rules<'_>, path: &TreePath, is_dir: bool) -> Result<Class, DbError> {
        let base = match &self.lower {
            Some(lower) if !lower.contains_key(path) => None,
            None if !self.has_dir(&self.base_dirs, path, std::slice::from_ref(self.layers.base()))? => None,
            Some(_) | None => entries::get(self.conn, self.layers.base(), path)?,
        };
        Ok(rules.class(path, is_dir, base.map(|entry| entry.class)))
    }

    /// Patterns changed: whatever the base does not have may have another class now.
    fn reclassify(&self, changes: &mut Changes, rules: &mut Rules<'_>) -> Result<(), DbError> {
        let mut known = self.own.clone();
        let sealed = self.layers.lower.len().saturating_sub(1);
        for layer in &self.layers.lower[..sealed] {
            for (path, entry) in entries::of_layer(self.conn, layer, None)? {
                known.entry(path).or_insert(entry);
            }
        }
        for (path, entry) in known {
            if entry.kind == Kind::Whiteout || changes.contains_key(&path) {
                continue;
            }
            let class = self.class_of(rules, &path, entry.kind == Kind::Dir)?;
            if class != entry.class {
                let stat = if self.walk.get(&path).is_some() { entry.stat } else { THROUGH };
                let after = After::Class(Entry { class, stat, ..entry.clone() });
                changes.insert(path, Change { before: Some(entry), after });
            }
        }
        Ok(())
    }

    fn jobs(&self, changes: &Changes, classes: &BTreeMap<&TreePath, Class>) -> Result<Vec<Job>, ScanError> {
        let mut jobs = Vec::new();
        for (path, change) in changes {
            let keep = classes[path] != Class::Ignored;
            let mut job = Job { path: path.clone(), root: None, keep, kept: None };
            match &change.after {
                After::Read => {
                    let before = change.before.as_ref().filter(|before| before.kept);
                    job.kept = before.and_then(|before| before.hash);
                }
                After::Class(entry) if keep && !entry.kept && reads(entry) => {
                    if self.walk.get(path).is_none() {
                        let Some(root) = self.sealed_dir(path)? else { continue };
                        job.root = Some(root.into());
                    }
                }
                After::Class(_) | After::Is(_) | After::Whiteout | After::Lower(_) => continue,
            }
            jobs.push(job);
        }
        Ok(jobs)
    }

    /// The directory of the sealed layer that holds the file at `path`.
    fn sealed_dir(&self, path: &TreePath) -> Result<Option<File>, DbError> {
        for layer in &self.layers.lower {
            if entries::get(self.conn, layer, path)?.is_some() {
                return Ok(File::open(self.store.inner.layout.layer(layer)).ok());
            }
        }
        Ok(None)
    }

    fn commit(
        &self,
        settled: &[Settled<'_>],
        actor: &Actor,
        detail: Option<&str>,
    ) -> Result<Option<(u64, u64)>, DbError> {
        if settled.is_empty() && detail.is_none() {
            return Ok(None);
        }
        let time_ms = self.store.inner.options.clock.now_ms();
        self.store.inner.db.write(|tx| {
            let mut rows = Appender::begin(tx, &self.store.inner.key, time_ms)?;
            if detail.is_some() {
                rows.push(&NewRow::event(self.branch, actor, "exec", detail))?;
            }
            for one in settled {
                match &one.stored {
                    Some(entry) => entries::put(tx, &self.layers.open, one.path, entry)?,
                    None => entries::forget(tx, &self.layers.open, one.path)?,
                }
                if let Some(op) = one.op {
                    let before = one.before.as_ref();
                    rows.push(&NewRow::change(self.branch, actor, op, one.path, before, &one.now))?;
                }
            }
            rows.finish()
        })
    }
}

impl RuleSource for Scan<'_> {
    fn rules(&self, path: &TreePath) -> Option<Vec<u8>> {
        if let Some(seen) = self.walk.get(path) {
            if seen.what != What::File || seen.size > RULES_BYTES_MAX {
                return None;
            }
            let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
            let file = File::from(open_beneath(self.dir, path, flags).ok()?);
            let mut out = Vec::new();
            let regular = file.metadata().ok()?.is_file();
            let read = io::Read::read_to_end(&mut io::Read::take(file, RULES_BYTES_MAX), &mut out);
            return (regular && read.is_ok()).then_some(out);
        }
        if self.lower.is_some() {
            return None;
        }
        let path = self.below(path)?;
        let entry = self.lower(&path).ok()??;
        if entry.kind != Kind::File || entry.size > RULES_BYTES_MAX {
            return None;
        }
        let contents =
            Contents { store: self.store, conn: self.conn, branch: None, chain: &self.layers.lower };
        contents.read(&path, &entry).ok()
    }
}

/// A change as it is recorded.
struct Settled<'a> {
    path: &'a TreePath,
    before: Option<Entry>,
    /// What is there now, a whiteout for nothing.
    now: Entry,
    /// What the open layer says from now on.
    stored: Option<Entry>,
    /// The audit row's word; none if only the identity is new.
    op: Option<&'static str>,
}

/// Puts together what is known of a change; `None` if the file is gone again.
fn settle<'a>(
    path: &'a TreePath,
    change: &Change,
    class: Class,
    read: Option<&Captured>,
) -> Option<Settled<'a>> {
    let before = change.before.clone();
    let (now, stored) = match &change.after {
        After::Whiteout => {
            let whiteout = Entry::whiteout(class);
            (whiteout.clone(), Some(whiteout))
        }
        After::Lower(shown) => (shown.clone().unwrap_or_else(|| Entry::whiteout(class)), None),
        After::Is(entry) => {
            let entry = Entry { class, ..entry.clone() };
            (entry.clone(), Some(entry))
        }
        After::Class(entry) => {
            let kept = entry.kept || read.is_some_and(|read| read.kept && read.hash == entry.hash);
            let entry = Entry { kept, ..entry.clone() };
            (entry.clone(), Some(entry))
        }
        After::Read => {
            let read = read?;
            let Captured { kind, mode, size, hash, kept, stat, .. } = *read;
            let entry = Entry { kind, class, mode, size, hash, kept, stat };
            (entry.clone(), Some(entry))
        }
    };
    let op = op(before.as_ref(), &now);
    Some(Settled { path, before, now, stored, op })
}

/// The audit row's word for a change; `None` if there is none.
pub(crate) fn op(before: Option<&Entry>, now: &Entry) -> Option<&'static str> {
    let Some(before) = before else {
        return (now.kind != Kind::Whiteout).then_some("add");
    };
    if now.kind == Kind::Whiteout {
        Some("delete")
    } else if before.kind != now.kind {
        Some("type")
    } else if before.hash != now.hash || before.size != now.size {
        Some("modify")
    } else if before.mode != now.mode {
        Some("mode")
    } else if before.class != now.class {
        Some("class")
    } else {
        None
    }
}

fn same(own: &Entry, seen: &Seen) -> bool {
    match (&seen.what, own.kind) {
        (What::Whiteout, Kind::Whiteout) => true,
        (What::File, Kind::File) | (What::Symlink, Kind::Symlink) => {
            own.mode == seen.mode && own.size == seen.size && own.stat == seen.stat
        }
        (What::Dir(below), Kind::Dir) => own.mode == seen.mode && own.stat == dir_stat(below),
        (What::Other, Kind::Other) => own.mode == seen.mode,
        _ => false,
    }
}

/// What is remembered of a directory in place of a file's identity: which directory shows through it. When that
/// changes, what the layers below have at its path is hidden anew.
fn dir_stat(below: &Below) -> StatId {
    let mtime_ns = match below {
        Below::Same => 0,
        Below::Nothing => 1,
        Below::Moved(from) => {
            let digest = blake3::hash(from.as_bytes());
            i64::from_le_bytes(std::array::from_fn(|at| digest.as_bytes()[at])) | 2
        }
    };
    StatId { mtime_ns, ..StatId::default() }
}

pub(crate) fn special(kind: Kind, mode: u32, stat: StatId) -> Entry {
    Entry { kind, class: Class::Tree, mode, size: 0, hash: None, kept: true, stat }
}

fn reads(entry: &Entry) -> bool {
    matches!(entry.kind, Kind::File | Kind::Symlink) && entry.size <= KEPT_BYTES_MAX
}

/// The files of the report: directories show only through what they hold.
fn report(settled: &[Settled<'_>]) -> ChangedFiles {
    let mut out = ChangedFiles::default();
    let in_tree = |entry: &&Entry| entry.class == Class::Tree && is_file(entry);
    for one in settled.iter().filter(|one| one.op.is_some()) {
        let before = one.before.as_ref();
        let status = match (before.filter(in_tree), Some(&one.now).filter(in_tree)) {
            (None, Some(_)) => ChangeStatus::Added,
            (Some(_), None) => ChangeStatus::Deleted,
            (Some(before), Some(now)) if before.kind != now.kind => ChangeStatus::TypeChanged,
            (Some(_), Some(_)) => ChangeStatus::Modified,
            (None, None) => {
                out.other_total += u64::from(before.is_some_and(is_file) || is_file(&one.now));
                continue;
            }
        };
        out.tree_total += 1;
        if out.paths.len() < PATHS_MAX {
            out.paths.push(ChangedPath { status, path: one.path.clone() });
        }
    }
    out
}

fn is_file(entry: &Entry) -> bool {
    matches!(entry.kind, Kind::File | Kind::Symlink)
}

/// When the copy of a whole tree was finished, by the clock of its file system: the change time of a file made after
/// it. Zero if that is not known: then every file is read.
fn made_ns(path: &Path) -> i64 {
    use std::os::unix::fs::MetadataExt;
    path.symlink_metadata()
        .map_or(0, |meta| meta.ctime().saturating_mul(1_000_000_000).saturating_add(meta.ctime_nsec()))
}

/// Which attributes an overlay of this process uses: `trusted` needs the host's root.
pub(crate) fn marks() -> Marks {
    let whole = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    let host: Vec<&str> = whole.split_whitespace().collect();
    let root = rustix::process::geteuid().is_root() && host == ["0", "0", "4294967295"];
    if root { Marks::Trusted } else { Marks::User }
}

#[cfg(test)]
#[path = "scan_tests.rs"]
mod tests;
