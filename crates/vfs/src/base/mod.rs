//! Bases: immutable snapshots that branches start from, one per content, shared by all branches.
//!
//! A base is built in `tmp/`, synced, renamed to `bases/LAYER` and then gets its rows: a base that has a row is
//! complete after a power cut, and a directory without a row is what [`Store::sweep_bases`] removes.

mod cancel;
mod copy;
mod dir;
mod dotgit;
mod files;
mod gc;
mod git;
mod index;
mod list;
mod repo;
mod seal;
mod view;

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use proto::api::BaseInfo;
use proto::error::{Code, Coded};
use proto::ids::{BaseId, LayerId};
use proto::path::{PathError, TreePath};
use rusqlite::{Connection, OptionalExtension, Row, params};

use crate::db::DbError;
use crate::entries::{self, Class, Entry, Kind};
use crate::git::{Git, GitError};
use crate::store::Store;
use crate::tree::TreeHasher;

pub(crate) use crate::beneath::remove_tree;
pub use cancel::Cancel;
pub use dir::DirSource;
pub use gc::{GcError, GcReport};
pub use git::GitSource;
pub(crate) use git::some;
pub(crate) use repo::Repo;

/// Threads that hash and copy.
const THREADS: usize = 2;
/// How long a base that was handed out is safe from `gc` although no branch stands on it yet.
const LEASE_MS: u64 = 10_000;

/// A source that can't be frozen.
#[derive(Debug, thiserror::Error)]
pub enum FreezeError {
    /// There is no such repository or directory.
    #[error("there is no {what} at `{path}`")]
    NotFound {
        /// `repository` or `directory`.
        what: &'static str,
        /// What was asked for.
        path: String,
    },
    /// The repository has no such ref or commit.
    #[error("the repository `{repo}` has no ref or commit `{rev}`")]
    NoRev {
        /// The repository.
        repo: String,
        /// What was asked for.
        rev: String,
    },
    /// The source is of a kind that can't be used.
    #[error("can't use `{path}`: {reason}")]
    Unusable {
        /// What was asked for.
        path: String,
        /// Why not.
        reason: String,
        /// What to do about it.
        hint: &'static str,
    },
    /// A file or directory of the source can't be read.
    #[error("can't read `{path}`")]
    Read {
        /// Which.
        path: String,
        /// Why.
        source: io::Error,
    },
    /// A file changed each time that it was copied.
    #[error("`{0}` changed while it was copied, again and again")]
    Changed(TreePath),
    /// A path that a branch can't have.
    #[error("a path of the source can't be used")]
    Path(#[from] PathError),
    /// An inline file that makes no sense.
    #[error("the inline file `{path}` {problem}")]
    Inline {
        /// Which.
        path: TreePath,
        /// What is wrong with it.
        problem: String,
    },
    /// It was stopped, and nothing of it is left.
    #[error("the freeze was cancelled")]
    Cancelled,
    /// git failed.
    #[error("git could not read the source")]
    Git(#[from] GitError),
    /// Our own directory can't be written.
    #[error("can't write the base")]
    Store(#[source] io::Error),
    /// The database failed.
    #[error("can't record the base")]
    Db(#[from] DbError),
}

impl Coded for FreezeError {
    fn code(&self) -> Code {
        match self {
            FreezeError::NotFound { .. } | FreezeError::NoRev { .. } => Code::NotFound,
            FreezeError::Unusable { .. } | FreezeError::Read { .. } | FreezeError::Path(_) => Code::BadInput,
            FreezeError::Inline { .. } => Code::Usage,
            FreezeError::Changed(_) => Code::Conflict,
            FreezeError::Cancelled => Code::Cancelled,
            FreezeError::Git(source) => source.code(),
            FreezeError::Store(source) if source.kind() == io::ErrorKind::StorageFull => Code::NoSpace,
            FreezeError::Store(_) => Code::HostBroken,
            FreezeError::Db(source) => source.code(),
        }
    }
    fn hint(&self) -> Option<String> {
        Some(match self {
            FreezeError::NotFound { .. } => "check the path, or give the URL of a repository".into(),
            FreezeError::NoRev { repo, .. } => format!("list what there is: git ls-remote {repo}"),
            FreezeError::Unusable { hint, .. } => (*hint).to_owned(),
            FreezeError::Read { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => {
                "make it readable for the user that runs tendon, or let .gitignore name it".into()
            }
            FreezeError::Changed(_) => "stop what writes to it, or let .gitignore name it".into(),
            FreezeError::Git(source) => return source.hint(),
            FreezeError::Store(source) if source.kind() == io::ErrorKind::StorageFull => {
                "free some space: tendon base gc, tendon branch drop".into()
            }
            FreezeError::Read { .. }
            | FreezeError::Path(_)
            | FreezeError::Inline { .. }
            | FreezeError::Cancelled
            | FreezeError::Store(_)
            | FreezeError::Db(_) => return None,
        })
    }
}

/// A base that can't be shown.
#[derive(Debug, thiserror::Error)]
pub enum BaseError {
    /// There is no such base.
    #[error("there is no base {0}")]
    NotFound(BaseId),
    /// The database failed.
    #[error("can't read the bases")]
    Db(#[from] DbError),
}

impl Coded for BaseError {
    fn code(&self) -> Code {
        match self {
            BaseError::NotFound(_) => Code::NotFound,
            BaseError::Db(source) => source.code(),
        }
    }
    fn hint(&self) -> Option<String> {
        matches!(self, BaseError::NotFound(_)).then(|| "list them: tendon base list".into())
    }
}

/// When each base was last handed out, so that `gc` doesn't take it before its first branch is made.
#[derive(Default)]
pub(crate) struct Leases(Mutex<HashMap<BaseId, u64>>);

impl Leases {
    fn take(&self, base: &BaseId, now_ms: u64) {
        let mut leases = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        leases.retain(|_, at| now_ms.saturating_sub(*at) < LEASE_MS);
        leases.insert(base.clone(), now_ms);
    }

    /// When it was handed out, if that was a short while ago.
    fn get(&self, base: &BaseId, now_ms: u64) -> Option<u64> {
        let leases = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        leases.get(base).copied().filter(|at| now_ms.saturating_sub(*at) < LEASE_MS)
    }
}

/// A base that is being built, in `tmp/`. Goes away with all that it holds unless it is kept.
struct Draft {
    dir: PathBuf,
    /// Stops what makes it.
    cancel: Cancel,
}

/// What is known of a base apart from its files.
struct About {
    /// Digest of all that decides its content.
    content: String,
    source: String,
    git_head: Option<String>,
    mirror: Option<String>,
    warnings: Vec<String>,
}

impl Draft {
    fn new(store: &Store, cancel: &Cancel) -> Result<Self, FreezeError> {
        let tmp = store.inner.layout.tmp();
        spread(&tmp);
        let dir = tmp.join(format!("base-{}", LayerId::from_random(random()?)));
        std::fs::create_dir(&dir).map_err(FreezeError::Store)?;
        std::fs::create_dir(dir.join("tree")).map_err(FreezeError::Store)?;
        Ok(Self { dir, cancel: cancel.clone() })
    }

    fn tree(&self) -> PathBuf {
        self.dir.join("tree")
    }

    fn git_dir(&self) -> PathBuf {
        self.dir.join("tree/.git")
    }

    /// git in the draft's repository, with its tree.
    fn git(&self) -> Git {
        Git::at(&self.git_dir()).work_tree(&self.tree()).until(&self.cancel)
    }

    /// The time of the file system that bases lie on, in whole seconds: that is what git compares.
    fn now_s(&self) -> Result<i64, FreezeError> {
        let probe = self.dir.join("now");
        let time =
            std::fs::File::create(&probe).and_then(|file| file.metadata()).map_err(FreezeError::Store)?;
        std::fs::remove_file(&probe).map_err(FreezeError::Store)?;
        Ok(std::os::unix::fs::MetadataExt::mtime(&time))
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if let Err(error) = remove_tree(&self.dir)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(dir = %self.dir.display(), %error, "a draft of a base could not be removed");
        }
    }
}

impl Store {
    /// All bases, oldest first.
    pub fn bases(&self) -> Result<Vec<BaseInfo>, BaseError> {
        let conn = self.inner.db.read();
        let sql = format!("{SELECT} ORDER BY created_ms, id");
        let mut statement = conn.prepare_cached(&sql).map_err(DbError::from)?;
        let rows = statement.query_and_then([], info).map_err(DbError::from)?;
        Ok(rows.collect::<Result<_, DbError>>()?)
    }

    /// One base.
    pub fn base(&self, id: &BaseId) -> Result<BaseInfo, BaseError> {
        let found = find(&self.inner.db.read(), "id", id.as_str())?;
        found.ok_or_else(|| BaseError::NotFound(id.clone()))
    }

    /// The base with this content, kept from `gc` for a while.
    fn lease(&self, content: &str) -> Result<Option<BaseInfo>, DbError> {
        // The lease is taken while the connection is held: gc looks at leases inside its transaction.
        let conn = self.inner.db.read();
        let found = find(&conn, "content", content)?;
        if let Some(base) = &found {
            self.inner.leases.take(&base.id, self.inner.options.clock.now_ms());
        }
        Ok(found)
    }

    /// Makes a draft a base: hashes what has no hash yet, hands all to the owner, syncs, moves, records.
    fn keep(
        &self,
        draft: &Draft,
        mut about: About,
        how: &seal::How<'_>,
        progress: &dyn Fn(&str),
    ) -> Result<BaseInfo, FreezeError> {
        progress("hashing");
        let sealed = seal::seal(&draft.tree(), how, self.inner.options.owner, &draft.cancel)?;
        if sealed.lfs_pointers > 0 {
            let files = if sealed.lfs_pointers == 1 { "file is" } else { "files are" };
            about.warnings.push(format!(
                "{} {files} kept in Git LFS: pointers, not the content, are in the tree",
                sealed.lfs_pointers
            ));
        }
        progress("writing to disk");
        let layer = LayerId::from_random(random()?);
        let dir = self.inner.layout.base(&layer);
        let place = || -> io::Result<()> {
            let tree = std::fs::File::open(draft.tree())?;
            rustix::fs::syncfs(&tree)?;
            draft.cancel.check()?;
            std::fs::rename(draft.tree(), &dir)?;
            std::fs::File::open(self.inner.layout.root().join("bases"))?.sync_all()
        };
        place().map_err(FreezeError::Store)?;
        progress("recording");
        let recorded = draft.cancel.check().map_err(FreezeError::Store);
        let recorded = recorded.and_then(|()| self.record(&layer, &about, &sealed.entries));
        // Nobody else may have frozen the same meanwhile: then theirs is the base, and this directory is in the way.
        if !matches!(&recorded, Ok((_, true))) {
            let _ = remove_tree(&dir);
        }
        recorded.map(|(base, _)| base)
    }

    /// Inserts the rows; `false`: the content was there already.
    fn record(
        &self,
        layer: &LayerId,
        about: &About,
        entries: &[(TreePath, Entry)],
    ) -> Result<(BaseInfo, bool), FreezeError> {
        let id = BaseId::from_random(random()?);
        let now_ms = self.inner.options.clock.now_ms();
        let totals = Totals::of(entries);
        let warnings =
            serde_json::to_string(&about.warnings).map_err(|error| DbError::Damaged(error.to_string()))?;
        self.inner.db.write(|tx| {
            if let Some(base) = find(tx, "content", &about.content)? {
                self.inner.leases.take(&base.id, now_ms);
                return Ok((base, false));
            }
            let fail = |error: rusqlite::Error| FreezeError::Db(error.into());
            let created = now_ms.cast_signed();
            tx.execute(
                "INSERT INTO layers (id, parent, base, depth, state, engine, created_ms)
                 VALUES (?1, NULL, ?2, 0, 'sealed', 'base', ?3)",
                params![layer.as_str(), id.as_str(), created],
            )
            .map_err(fail)?;
            tx.execute(
                "INSERT INTO bases (id, layer, content, source, tree, git_head, files, bytes, warnings, created_ms)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)",
                params![
                    id.as_str(),
                    layer.as_str(),
                    about.content,
                    about.source,
                    totals.tree,
                    about.git_head,
                    totals.files.cast_signed(),
                    totals.bytes.cast_signed(),
                    warnings,
                    created
                ],
            )
            .map_err(fail)?;
            if let Some(mirror) = &about.mirror {
                tx.execute(
                    "INSERT INTO meta (key, value) VALUES (?1, ?2)",
                    params![gc::mirror_key(&id), mirror.as_bytes()],
                )
                .map_err(fail)?;
            }
            for (path, entry) in entries {
                entries::put(tx, layer, path, entry)?;
            }
            self.inner.leases.take(&id, now_ms);
            let base = find(tx, "id", id.as_str())?;
            base.map(|base| (base, true))
                .ok_or_else(|| DbError::Damaged("a base that was just inserted is gone".into()).into())
        })
    }
}

/// What the tree's entries come to.
struct Totals {
    tree: String,
    files: u64,
    bytes: u64,
}

impl Totals {
    fn of(entries: &[(TreePath, Entry)]) -> Self {
        let mut hasher = TreeHasher::default();
        let mut out = Totals { tree: String::new(), files: 0, bytes: 0 };
        for (path, entry) in entries {
            hasher.add(path, entry);
            if entry.class == Class::Tree && matches!(entry.kind, Kind::File | Kind::Symlink) {
                out.files += 1;
                out.bytes += entry.size;
            }
        }
        out.tree = hasher.finish();
        out
    }
}

const SELECT: &str = "SELECT id, source, tree, git_head, files, bytes, created_ms, warnings,
    (SELECT count(*) FROM branches WHERE branches.base = bases.id AND dropped_ms IS NULL) FROM bases";

fn find(conn: &Connection, column: &'static str, value: &str) -> Result<Option<BaseInfo>, DbError> {
    let mut statement = conn.prepare_cached(&format!("{SELECT} WHERE {column} = ?1"))?;
    statement.query_row([value], |row| Ok(info(row))).optional()?.transpose()
}

fn info(row: &Row<'_>) -> Result<BaseInfo, DbError> {
    let number = |n: usize| row.get::<_, i64>(n).map(i64::cast_unsigned);
    let id: String = row.get(0)?;
    let warnings: String = row.get(7)?;
    Ok(BaseInfo {
        id: id.parse().map_err(|error: proto::ids::IdError| DbError::Damaged(error.to_string()))?,
        source: row.get(1)?,
        tree: row.get(2)?,
        git_head: row.get(3)?,
        files: number(4)?,
        bytes: number(5)?,
        created_ms: number(6)?,
        branches: number(8)?,
        warnings: serde_json::from_str(&warnings).map_err(|error| DbError::Damaged(error.to_string()))?,
    })
}

/// Whatever ended a freeze that was stopped, that it was stopped is the reason.
fn unless_cancelled<T>(done: Result<T, FreezeError>, cancel: &Cancel) -> Result<T, FreezeError> {
    done.map_err(|error| if cancel.is_cancelled() { FreezeError::Cancelled } else { error })
}

/// The bytes of a new id.
fn random() -> Result<[u8; 10], FreezeError> {
    let mut bytes = [0; 10];
    getrandom::fill(&mut bytes).map_err(|error| FreezeError::Store(io::Error::other(error.to_string())))?;
    Ok(bytes)
}

/// Lets ext4 put each directory in `dir` where there is room: beside thousands of files that were just deleted, new ones
/// take several times as long. Only a matter of speed.
fn spread(dir: &Path) {
    let Ok(file) = std::fs::File::open(dir) else { return };
    if let Ok(flags) = rustix::fs::ioctl_getflags(&file)
        && !flags.contains(rustix::fs::IFlags::TOPDIR)
    {
        let _ = rustix::fs::ioctl_setflags(&file, flags | rustix::fs::IFlags::TOPDIR);
    }
}

/// Runs `work` where rayon's parallel iterators use [`THREADS`] threads, not all of the machine's.
fn on_threads<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    static POOL: std::sync::OnceLock<Option<rayon::ThreadPool>> = std::sync::OnceLock::new();
    let make = || rayon::ThreadPoolBuilder::new().num_threads(THREADS).build().ok();
    match POOL.get_or_init(make) {
        Some(pool) => pool.install(work),
        None => work(),
    }
}

/// A path for messages: control characters and what is not UTF-8 escaped.
fn shown(path: &Path) -> String {
    proto::path::shown(path.as_os_str().as_encoded_bytes())
}

#[cfg(test)]
mod tests;
