//! The store: one state directory, owned by one runner, with its database and content.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use proto::error::{Code, Coded};

use crate::audit::KeyError;
use crate::blobs::Blobs;
use crate::clock::Clock;
use crate::db::{Db, DbError};
use crate::key::AuditKey;
use crate::layout::Layout;
use crate::times::Times;

/// Which engine new branches get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineChoice {
    /// overlayfs where it works, else copies.
    Auto,
    /// overlayfs or a refusal.
    Overlay,
    /// Plain copies, with reflink where the file system has it.
    Copy,
}

/// How a store is opened.
#[derive(Clone)]
pub struct StoreOptions {
    /// Which engine new branches get.
    pub engine: EngineChoice,
    /// The uid and gid that bases and branches belong to; `None` keeps the runner's own (it is not root).
    pub owner: Option<(u32, u32)>,
    /// The time.
    pub clock: Arc<dyn Clock>,
}

/// A state directory that can't be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Another runner has it.
    #[error("the state directory {} is in use by another runner (pid {pid})", dir.display())]
    Busy {
        /// The directory.
        dir: PathBuf,
        /// What the lock file says.
        pid: String,
    },
    /// It holds something else.
    #[error("{} is not a state directory of tendon, and not empty", dir.display())]
    Foreign {
        /// The directory.
        dir: PathBuf,
    },
    /// It can't be made or read.
    #[error("can't use the state directory {}", dir.display())]
    Io {
        /// The directory.
        dir: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Its database can't be opened.
    #[error("can't open the state directory {}", dir.display())]
    Db {
        /// The directory.
        dir: PathBuf,
        /// Why.
        source: DbError,
    },
    /// Its audit can't be continued.
    #[error("can't continue the audit in {}", dir.display())]
    Audit {
        /// The directory.
        dir: PathBuf,
        /// Why.
        source: KeyError,
    },
    /// What an earlier runner left can't be put in order.
    #[error("can't recover the state directory {}", dir.display())]
    Recover {
        /// The directory.
        dir: PathBuf,
        /// Why.
        source: crate::recover::RecoverError,
    },
}

impl Coded for OpenError {
    fn code(&self) -> Code {
        match self {
            OpenError::Busy { .. } => Code::StateBusy,
            OpenError::Foreign { .. } => Code::BadInput,
            OpenError::Io { source, .. } if source.kind() == io::ErrorKind::StorageFull => Code::NoSpace,
            OpenError::Io { .. } => Code::HostBroken,
            OpenError::Db { source, .. } | OpenError::Audit { source: KeyError::Db(source), .. } => {
                source.code()
            }
            OpenError::Audit { .. } => Code::StateBad,
            OpenError::Recover { source, .. } => source.code(),
        }
    }
    fn hint(&self) -> Option<String> {
        Some(match self {
            OpenError::Busy { .. } => "stop that runner, or give this one its own --state-dir".into(),
            OpenError::Foreign { .. } => {
                "name a new or an empty directory: what is not tendon's is removed from its own".into()
            }
            OpenError::Io { .. } => "choose another directory with --state-dir or TENDON_STATE_DIR".into(),
            OpenError::Audit { .. } => "put `audit.key` back from a copy, or choose another directory".into(),
            OpenError::Recover { source, .. } => return source.hint(),
            OpenError::Db { source, .. } => return source.hint(),
        })
    }
}

/// A state directory in use. Cheap to clone; the lock is held until the last clone is gone.
#[derive(Clone)]
pub struct Store {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) layout: Layout,
    pub(crate) options: StoreOptions,
    pub(crate) db: Db,
    pub(crate) blobs: Blobs,
    pub(crate) key: AuditKey,
    pub(crate) leases: crate::base::Leases,
    pub(crate) times: Times,
    pub(crate) capture: crate::scan::Shared,
    /// Dropped before the lock: what it still removes belongs to this store.
    pub(crate) live: crate::live::Live,
    /// Held, not read: the kernel lets go of the lock when the runner dies.
    _lock: File,
}

/// What people are told of a state directory whose file system's times say little.
const UNTRUSTED: &str = "the state directory is on a file system whose times don't tell of every write: each capture reads all \
                         that a branch changed";

impl Store {
    /// What is slower than it could be because of where the state directory is.
    pub fn slow_because(&self) -> Option<&'static str> {
        (!self.inner.times.trusted).then_some(UNTRUSTED)
    }

    /// Opens the state directory, which is made if it is missing.
    pub fn open(dir: &Path, options: StoreOptions) -> Result<Self, OpenError> {
        let io_error = |source| OpenError::Io { dir: dir.to_owned(), source };
        let layout = Layout::create(dir).map_err(io_error)?;
        if layout.is_foreign().map_err(io_error)? {
            return Err(OpenError::Foreign { dir: dir.to_owned() });
        }
        layout.claim().map_err(io_error)?;
        let lock = lock(&layout, dir)?;
        layout.make_dirs().map_err(io_error)?;
        empty(&layout.tmp()).map_err(io_error)?;
        let used = layout.is_used().map_err(io_error)?;
        let db =
            Db::open(&layout.db(), used).map_err(|source| OpenError::Db { dir: dir.to_owned(), source })?;
        let key = crate::audit::open_key(&db, &layout.audit_key())
            .map_err(|source| OpenError::Audit { dir: dir.to_owned(), source })?;
        let blobs = Blobs::new(layout.blobs());
        blobs.settle().map_err(io_error)?;
        let leases = crate::base::Leases::default();
        let capture = crate::scan::Shared::default();
        let live = crate::live::Live::default();
        let times = Times::of(layout.root());
        if !times.trusted {
            tracing::warn!("{}", UNTRUSTED);
        }
        let inner = Inner { layout, options, db, blobs, key, leases, times, capture, live, _lock: lock };
        let store = Self { inner: Arc::new(inner) };
        store.recover().map_err(|source| OpenError::Recover { dir: dir.to_owned(), source })?;
        store.witness().map_err(|source| OpenError::Db { dir: dir.to_owned(), source })?;
        crate::reserve::keep(store.dir());
        Ok(store)
    }

    /// The state directory.
    pub fn dir(&self) -> &Path {
        self.inner.layout.root()
    }

    /// Where full logs go: `logs/`.
    pub fn logs_dir(&self) -> PathBuf {
        self.inner.layout.logs()
    }
}

fn lock(layout: &Layout, dir: &Path) -> Result<File, OpenError> {
    let io_error = |source| OpenError::Io { dir: dir.to_owned(), source };
    let mut file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(layout.lock())
        .map_err(io_error)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(std::fs::TryLockError::WouldBlock) => {
            let mut pid = String::new();
            let _ = (&file).take(32).read_to_string(&mut pid);
            return Err(OpenError::Busy { dir: dir.to_owned(), pid: pid.trim().to_owned() });
        }
        Err(std::fs::TryLockError::Error(source)) => return Err(io_error(source)),
    }
    file.set_len(0).map_err(io_error)?;
    file.rewind().map_err(io_error)?;
    writeln!(file, "{}", std::process::id()).map_err(io_error)?;
    Ok(file)
}

fn empty(dir: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            crate::base::remove_tree(&entry.path())?;
        } else {
            std::fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::SystemClock;

    fn options() -> StoreOptions {
        StoreOptions { engine: EngineChoice::Auto, owner: None, clock: Arc::new(SystemClock) }
    }

    #[test]
    fn a_second_runner_is_refused_and_told_by_whom() {
        let dir = tempfile::tempdir().unwrap();
        let first = Store::open(dir.path(), options()).unwrap();
        let Err(error) = Store::open(dir.path(), options()) else { panic!("opened twice") };
        assert_eq!(error.code(), Code::StateBusy);
        assert!(error.to_string().contains(&std::process::id().to_string()), "{error}");
        drop(first);
        Store::open(dir.path(), options()).unwrap();
    }

    #[test]
    fn blobs_are_swept_only_after_a_runner_that_did_not_end_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let begun = dir.path().join("blobs/tmp-9");
        let store = Store::open(dir.path(), options()).unwrap();
        std::fs::write(&begun, "").unwrap();
        drop(store);
        let store = Store::open(dir.path(), options()).unwrap();
        assert!(begun.exists());
        store.inner.live.faults.kill();
        drop(store);
        Store::open(dir.path(), options()).unwrap();
        assert!(!begun.exists());
    }
}
