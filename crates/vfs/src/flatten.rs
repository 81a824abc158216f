//! Flattening: the sealed layers of a long chain become one. Files are hardlinked (sealed layers never change), not
//! copied; what a rename of a directory only points to is copied. A branch is moved onto the flat layer while nothing
//! has it mounted.
//!
//! The flat layer holds what the chain shows above the base: entries are the chain's, and the directory is built from
//! them and compared, file by file, with what the kernel shows of the chain. If anything differs the chain stays.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use proto::error::{Code, Coded};
use proto::ids::{BranchId, LayerId};
use proto::path::TreePath;
use rusqlite::params;
use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;

use crate::beneath::READ;
use crate::branch::{damaged, io_code, random};
use crate::db::DbError;
use crate::engine::times;
use crate::entries::{self, Chain, Entry, Kind};
use crate::hashing;
use crate::scan::Layers;
use crate::store::Store;
use crate::walk::{Marks, Walk, What, open_beneath, walk};

/// Chains with more sealed layers than this are flattened in the background.
const LAYERS_MAX: u32 = 16;
/// Chains with more than this are flattened before a fork returns. The kernel takes 500.
pub(crate) const LAYERS_HARD_MAX: u32 = 200;
/// A chain with as many can't be forked: the mount of the fork would fail.
pub(crate) const LAYERS_MOUNT_MAX: usize = 480;
/// Branches that one call looks at.
const BRANCHES_MAX: u32 = 64;

/// A chain that was not flattened. It goes on as it is.
#[derive(Debug, thiserror::Error)]
pub enum FlattenError {
    /// The flat layer can't be built.
    #[error("can't flatten the layers of {branch}")]
    Io {
        /// Which branch.
        branch: BranchId,
        /// Why.
        source: io::Error,
    },
    /// The flat layer would not show the same.
    #[error("the layers of {branch} can't be flattened: {path} would not be the same")]
    Differs {
        /// Which branch.
        branch: BranchId,
        /// The first path that differs, or why the layers can't be read.
        path: String,
    },
    /// The database failed.
    #[error("can't record the flat layer")]
    Db(#[from] DbError),
}

impl Coded for FlattenError {
    fn code(&self) -> Code {
        match self {
            FlattenError::Io { source, .. } => io_code(source),
            FlattenError::Differs { .. } => Code::Internal,
            FlattenError::Db(error) => error.code(),
        }
    }
}

impl Store {
    /// Flattens the chains that have grown long, of branches that nobody uses now. Returns how many branches got a
    /// shorter one. To be called in the background now and then.
    pub fn flatten_some(&self) -> Result<u64, FlattenError> {
        let long = "SELECT b.id FROM branches b JOIN layers l ON l.id = b.layer
                    WHERE b.dropped_ms IS NULL AND l.depth > ?1 ORDER BY l.depth DESC LIMIT ?2";
        let long: Vec<BranchId> = {
            let conn = self.inner.db.reader()?;
            let mut statement = conn.prepare_cached(long).map_err(DbError::from)?;
            let rows = statement
                .query_and_then(params![LAYERS_MAX + 1, BRANCHES_MAX], |row| {
                    row.get::<_, String>(0).map_err(DbError::from)?.parse().map_err(damaged)
                })
                .map_err(DbError::from)?;
            rows.collect::<Result<_, DbError>>()?
        };
        let mut flattened = 0;
        for branch in long {
            let lock = self.branch_lock(&branch);
            let Ok(_held) = lock.try_lock() else { continue };
            if self.inner.live.is_mounted(&branch) || !self.inner.live.may_flatten(&branch) {
                continue;
            }
            // One that can't be flattened goes on as it is, and keeps no other from it.
            match self.flatten_locked(&branch, LAYERS_MAX) {
                Ok(count) => flattened += count,
                Err(error) => {
                    self.inner.live.not_flattened(&branch);
                    tracing::warn!(%branch, error = &error as &dyn std::error::Error, "a long chain of layers can't be flattened");
                }
            }
        }
        Ok(flattened)
    }

    /// Flattens the chain of a branch with more than `max` sealed layers, which is not mounted and whose lock the caller
    /// holds, and moves the unused branches that stand on the same layers too. Returns how many were moved.
    pub(crate) fn flatten_locked(&self, branch: &BranchId, max: u32) -> Result<u64, FlattenError> {
        let layers = Layers::of(&self.inner.db.read(), branch)?;
        let Some(Layers { lower, copy, .. }) = layers else { return Ok(0) };
        // An earlier one of this round may have moved it.
        if lower.len() <= max as usize + 1 || lower.len() < 3 {
            return Ok(0);
        }
        let io_error = |source| FlattenError::Io { branch: branch.clone(), source };
        let flat = LayerId::from_random(random().map_err(io_error)?);
        let said = self.flat_entries(&lower)?;
        if !copy {
            let draft = self.inner.layout.tmp().join(format!("flat-{flat}"));
            let built = self.build(branch, &lower, &said, &draft);
            built.inspect_err(|_| drop(crate::base::remove_tree(&draft)))?;
            self.inner.live.step("flatten: built");
            let place = || -> io::Result<()> {
                std::fs::rename(&draft, self.inner.layout.layer(&flat))?;
                File::open(self.inner.layout.layers())?.sync_all()
            };
            place().map_err(io_error)?;
            self.inner.live.step("flatten: placed");
        }
        let top = &lower[0];
        let recorded = self.record_flat(&flat, &lower, copy, &said);
        recorded.inspect_err(|_| drop(crate::base::remove_tree(&self.inner.layout.layer(&flat))))?;
        let mut moved = self.move_onto(&flat, top, branch)?;
        self.inner.live.step("flatten: moved");
        for other in self.standing_on(top)? {
            let lock = self.branch_lock(&other);
            let Ok(_held) = lock.try_lock() else { continue };
            if !self.inner.live.is_mounted(&other) {
                moved += self.move_onto(&flat, top, &other)?;
            }
        }
        self.release_layers(top)?;
        Ok(moved)
    }

    /// What a chain of sealed layers says above its base: whiteouts only of what the base has.
    fn flat_entries(&self, lower: &[LayerId]) -> Result<BTreeMap<TreePath, Entry>, DbError> {
        let conn = self.inner.db.reader()?;
        let Some((base, sealed)) = lower.split_last() else { return Ok(BTreeMap::new()) };
        let mut said = BTreeMap::new();
        for layer in sealed.iter().rev() {
            said.append(&mut entries::of_layer(&conn, layer, None)?);
        }
        let mut out = BTreeMap::new();
        for (path, entry) in said {
            if entry.kind != Kind::Whiteout || entries::get(&conn, base, &path)?.is_some() {
                out.insert(path, entry);
            }
        }
        Ok(out)
    }

    fn record_flat(
        &self,
        flat: &LayerId,
        lower: &[LayerId],
        copy: bool,
        said: &BTreeMap<TreePath, Entry>,
    ) -> Result<(), DbError> {
        let now = self.inner.options.clock.now_ms().cast_signed();
        let Some(base) = lower.last() else { return Ok(()) };
        self.inner.db.write(|tx| {
            tx.execute(
                "INSERT INTO layers (id, parent, base, depth, state, engine, created_ms)
                 SELECT ?1, ?2, base, 1, 'sealed', ?3, ?4 FROM layers WHERE id = ?2",
                params![flat.as_str(), base.as_str(), if copy { "copy" } else { "overlay" }, now],
            )?;
            said.iter().try_for_each(|(path, entry)| entries::put(tx, flat, path, entry))
        })
    }

    /// Puts a branch whose open layer stands on `top` onto `flat`, which shows the same.
    fn move_onto(&self, flat: &LayerId, top: &LayerId, branch: &BranchId) -> Result<u64, DbError> {
        let sql = "UPDATE layers SET parent = ?1, depth = 2 WHERE parent = ?2 AND id =
                   (SELECT layer FROM branches WHERE id = ?3)";
        let moved = self
            .inner
            .db
            .write(|tx| Ok::<_, DbError>(tx.execute(sql, [flat.as_str(), top.as_str(), branch.as_str()])?))?;
        Ok(moved as u64)
    }

    fn standing_on(&self, layer: &LayerId) -> Result<Vec<BranchId>, DbError> {
        let conn = self.inner.db.reader()?;
        let sql = "SELECT b.id FROM layers l JOIN branches b ON b.layer = l.id
                   WHERE l.parent = ?1 AND b.dropped_ms IS NULL";
        let mut statement = conn.prepare_cached(sql)?;
        let rows = statement
            .query_and_then([layer.as_str()], |row| row.get::<_, String>(0)?.parse().map_err(damaged))?;
        rows.collect()
    }

    /// Builds the directory of the flat layer at `draft`, durable, and compares what it shows.
    fn build(
        &self,
        branch: &BranchId,
        lower: &Chain,
        said: &BTreeMap<TreePath, Entry>,
        draft: &Path,
    ) -> Result<(), FlattenError> {
        let io_error = |source| FlattenError::Io { branch: branch.clone(), source };
        let differs = |path: String| FlattenError::Differs { branch: branch.clone(), path };
        let dirs = self.lower_dirs(lower);
        let view = self.engines().mount_layers(&dirs).map_err(io_error)?;
        let shown = shown(view.fd()).map_err(io_error)?;
        // What the kernel shows and no entry names would be lost.
        let recorded = entries::merged(&*self.inner.db.reader()?, lower, None)?;
        if let Some(path) = difference(&shown, &recorded) {
            return Err(differs(path));
        }
        let (base, sealed) = dirs.split_last().ok_or_else(|| io_error(io::ErrorKind::NotFound.into()))?;
        let top = sealed.first().map(|top| top.symlink_metadata()).transpose().map_err(io_error)?;
        std::fs::create_dir(draft).map_err(io_error)?;
        let root = File::open(draft).map_err(io_error)?;
        let build = Build { view: view.fd(), sealed, root: root.as_fd(), said };
        build.all().map_err(io_error)?;
        if let Some(top) = top {
            std::os::unix::fs::chown(draft, Some(meta_uid(&top)), Some(meta_gid(&top))).map_err(io_error)?;
            std::fs::set_permissions(draft, top.permissions()).map_err(io_error)?;
        }
        let again = self.engines().mount_layers(&[draft.to_owned(), base.clone()]).map_err(io_error)?;
        if let Some(path) = unlike(&shown, &self::shown(again.fd()).map_err(io_error)?) {
            return Err(differs(path));
        }
        rustix::fs::syncfs(&root).map_err(|errno| io_error(errno.into()))
    }
}

fn meta_uid(meta: &std::fs::Metadata) -> u32 {
    std::os::unix::fs::MetadataExt::uid(meta)
}

fn meta_gid(meta: &std::fs::Metadata) -> u32 {
    std::os::unix::fs::MetadataExt::gid(meta)
}

fn shown(root: BorrowedFd<'_>) -> io::Result<Walk> {
    let seen = hashing::pool().install(|| walk(root, Marks::None))?;
    match seen.unseen.first() {
        Some(unseen) => Err(io::Error::new(io::ErrorKind::InvalidData, unseen.note.clone())),
        None => Ok(seen),
    }
}

/// The first path that is seen and not recorded as such, or the other way round.
fn difference(seen: &Walk, recorded: &BTreeMap<TreePath, Entry>) -> Option<String> {
    for (path, seen) in &seen.seen {
        let kind = match seen.what {
            What::File => Kind::File,
            What::Dir(_) => Kind::Dir,
            What::Symlink => Kind::Symlink,
            What::Other | What::Whiteout => Kind::Other,
        };
        if recorded.get(path).is_none_or(|entry| entry.kind != kind) {
            return Some(path.to_string());
        }
    }
    recorded.keys().find(|path| seen.get(path).is_none()).map(ToString::to_string)
}

/// The first path at which two views differ.
fn unlike(a: &Walk, b: &Walk) -> Option<String> {
    if a.seen.len() != b.seen.len() {
        let missing = a.seen.iter().find(|(path, _)| b.get(path).is_none());
        let more = || b.seen.iter().find(|(path, _)| a.get(path).is_none());
        return Some(missing.or_else(more).map_or_else(String::new, |(path, _)| path.to_string()));
    }
    let same = a.seen.iter().zip(&b.seen).find(|((path, one), (other_path, other))| {
        let content = one.size != other.size || one.stat.mtime_ns != other.stat.mtime_ns;
        let dir = matches!(one.what, What::Dir(_));
        path != other_path || one.what != other.what || one.mode != other.mode || (!dir && content)
    });
    same.map(|((path, _), _)| path.to_string())
}

struct Build<'a> {
    /// What the chain shows.
    view: BorrowedFd<'a>,
    /// The directories of the sealed layers, topmost first.
    sealed: &'a [PathBuf],
    /// The flat layer's directory.
    root: BorrowedFd<'a>,
    said: &'a BTreeMap<TreePath, Entry>,
}

impl Build<'_> {
    fn all(&self) -> io::Result<()> {
        let mut dirs = Vec::new();
        for (path, entry) in self.said {
            self.parents(path, &mut dirs)?;
            match entry.kind {
                Kind::Dir => self.dir(path, &mut dirs)?,
                Kind::Whiteout => self.whiteout(path)?,
                Kind::File | Kind::Symlink | Kind::Other => self.leaf(path)?,
            }
        }
        // Deepest first: what is made in a directory changes its times, and its mode may forbid to.
        dirs.sort();
        for dir in dirs.iter().rev() {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let (from, to) = (open_beneath(self.view, dir, flags)?, open_beneath(self.root, dir, flags)?);
            look_like(from.as_fd(), to.as_fd())?;
        }
        Ok(())
    }

    /// Directories that only the base names but that must be there for what lies in them.
    fn parents(&self, path: &TreePath, dirs: &mut Vec<TreePath>) -> io::Result<()> {
        let Some(parent) = path.parent() else { return Ok(()) };
        if self.said.contains_key(&parent) {
            return Ok(());
        }
        self.parents(&parent, dirs)?;
        self.dir(&parent, dirs)
    }

    fn dir(&self, path: &TreePath, dirs: &mut Vec<TreePath>) -> io::Result<()> {
        match rustix::fs::mkdirat(self.root, path.as_path(), Mode::RWXU) {
            Ok(()) => dirs.push(path.clone()),
            Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno.into()),
        }
        Ok(())
    }

    /// Only the topmost of what is gone is marked: what lay below it is hidden with it.
    fn whiteout(&self, path: &TreePath) -> io::Result<()> {
        let above = path.parent().and_then(|parent| self.said.get(&parent));
        if above.is_some_and(|above| above.kind != Kind::Dir) {
            return Ok(());
        }
        rustix::fs::mknodat(self.root, path.as_path(), FileType::CharacterDevice, Mode::empty(), 0)?;
        Ok(())
    }

    fn leaf(&self, path: &TreePath) -> io::Result<()> {
        let wanted = rustix::fs::statat(self.view, path.as_path(), AtFlags::SYMLINK_NOFOLLOW)?;
        for dir in self.sealed {
            let at = dir.join(path.as_path());
            let Ok(found) = rustix::fs::statat(CWD, &at, AtFlags::SYMLINK_NOFOLLOW) else { continue };
            let look = |s: &rustix::fs::Stat| (s.st_mode, s.st_size, s.st_mtime, s.st_mtime_nsec);
            if look(&found) != look(&wanted) {
                break;
            }
            match rustix::fs::linkat(CWD, &at, self.root, path.as_path(), AtFlags::empty()) {
                Ok(()) => return Ok(()),
                Err(Errno::MLINK | Errno::PERM | Errno::XDEV) => break,
                Err(errno) => return Err(errno.into()),
            }
        }
        self.copy(path, &wanted)
    }

    /// What lies elsewhere in the layers: below a directory that was renamed.
    fn copy(&self, path: &TreePath, stat: &rustix::fs::Stat) -> io::Result<()> {
        let kind = FileType::from_raw_mode(stat.st_mode);
        if kind == FileType::RegularFile {
            let source = File::from(open_beneath(self.view, path, READ)?);
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
            let made: OwnedFd =
                rustix::fs::openat(self.root, path.as_path(), flags, Mode::RUSR | Mode::WUSR)?;
            let target = File::from(made);
            sys::reflink::copy(&source, &target, stat.st_size.cast_unsigned())?;
            return look_like(source.as_fd(), target.as_fd());
        }
        if kind == FileType::Symlink {
            let target = rustix::fs::readlinkat(self.view, path.as_path(), Vec::new())?;
            rustix::fs::symlinkat(&*target, self.root, path.as_path())?;
        } else {
            let mode = Mode::from_raw_mode(stat.st_mode & 0o7777);
            rustix::fs::mknodat(self.root, path.as_path(), kind, mode, stat.st_rdev)?;
        }
        let (uid, gid) = (Some(Uid::from_raw(stat.st_uid)), Some(Gid::from_raw(stat.st_gid)));
        rustix::fs::chownat(self.root, path.as_path(), uid, gid, AtFlags::SYMLINK_NOFOLLOW)?;
        Ok(rustix::fs::utimensat(self.root, path.as_path(), &times(stat), AtFlags::SYMLINK_NOFOLLOW)?)
    }
}

fn look_like(from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> io::Result<()> {
    let stat = rustix::fs::fstat(from)?;
    rustix::fs::fchown(to, Some(Uid::from_raw(stat.st_uid)), Some(Gid::from_raw(stat.st_gid)))?;
    rustix::fs::fchmod(to, Mode::from_raw_mode(stat.st_mode & 0o7777))?;
    Ok(rustix::fs::futimens(to, &times(&stat))?)
}

#[cfg(test)]
#[path = "flatten_tests.rs"]
mod tests;
