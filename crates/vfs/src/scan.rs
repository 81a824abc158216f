//! Capture: finds what changed on a branch since it was last looked at, keeps the content, and records it. The scan
//! reads the branch's own directory, compares it with what its open layer says, and commits entries and audit rows in
//! one transaction.

mod compare;
mod record;

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use proto::error::{Code, Coded};
use proto::ids::{BranchId, LayerId};
use proto::path::TreePath;
use proto::verify::ChangedFiles;
use rusqlite::{Connection, OptionalExtension};

pub(crate) use self::record::op;
use crate::audit::Actor;
use crate::beneath::{DiskUse, READ};
use crate::blobs::BlobError;
use crate::content::{Contents, layer_dir};
use crate::db::DbError;
use crate::entries::{self, Chain, Entry, Kind, StatId};
use crate::hashing;
use crate::rules::{RULES_BYTES_MAX, RuleSource};
use crate::store::Store;
use crate::tree::TreeHasher;
use crate::walk::{Marks, Walk, WalkError, What, open_beneath, walk};

/// Changed paths that a report lists.
const PATHS_MAX: usize = 1_000;
/// The most bytes of all of them.
const PATHS_BYTES_MAX: usize = 256 * 1024;
/// Tree hashes that are remembered.
const TREES_MAX: usize = 4_096;
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
    /// What of the tree could not be read or named, for people: the record of the branch is not what it shows.
    pub unscannable: Vec<String>,
    /// What the branch takes of the disk.
    pub disk: DiskUse,
}

impl ScanReport {
    /// [`ScanReport::unscannable`] in a line; `None` if there is nothing.
    pub fn unscannable_told(&self) -> Option<String> {
        Some(format!("the branch holds what can't be captured: {}", record::told(&self.unscannable)?))
    }
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
    /// It holds more than can be captured.
    #[error("the branch {branch} can't be captured: {}", WalkError::TooLarge)]
    TooLarge {
        /// Which branch.
        branch: BranchId,
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
            ScanError::TooLarge { .. } => Code::Refused,
            ScanError::Io { .. } | ScanError::Blob { .. } => Code::HostBroken,
            ScanError::Db(error) => error.code(),
        }
    }
    fn hint(&self) -> Option<String> {
        if matches!(self, ScanError::TooLarge { .. }) {
            return Some("remove files with a command on the branch, or drop it".into());
        }
        (self.code() == Code::NoSpace).then(|| "make room, then run it again: nothing was recorded".into())
    }
}

impl ScanError {
    /// A branch's directory that can't be listed.
    pub(crate) fn of_walk(error: WalkError, branch: &BranchId) -> Self {
        let branch = branch.clone();
        match error {
            WalkError::TooLarge => Self::TooLarge { branch },
            WalkError::Os(errno) => Self::Io { branch, source: errno.into() },
        }
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
        // Where times say little, no file is as it was copied.
        let made_ns = if self.inner.times.trusted { made_ns(&dir.with_file_name("made")) } else { 0 };
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
        let walk = walk.map_err(|error| ScanError::of_walk(error, branch))?;
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

impl RuleSource for Scan<'_> {
    fn rules(&self, path: &TreePath) -> Option<Vec<u8>> {
        if let Some(seen) = self.walk.get(path) {
            if seen.what != What::File || seen.size > RULES_BYTES_MAX {
                return None;
            }
            let file = File::from(open_beneath(self.dir, path, READ).ok()?);
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
        let contents = Contents::new(self.store, self.conn, None, &self.layers.lower);
        contents.read(&path, &entry).ok()
    }
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
