//! Copies files of a directory that somebody may be writing to, and that somebody else may have written: never through
//! a symbolic link, never a device or fifo, and never half of one version and half of another.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use proto::path::TreePath;
use rayon::prelude::*;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, Stat, Timespec};
use rustix::io::Errno;

use super::seal::{self, DirLook};
use super::{Cancel, FreezeError};
use crate::beneath::NEW;
use crate::walk::open_beneath_mode;

/// Files up to this size are read into memory; larger ones are cloned.
const SMALL_BYTES: u64 = 256 * 1024;
/// How often a file is copied that changes meanwhile.
const TRIES: usize = 3;
/// The kernel copies this much of a large file at a time: a copy can be stopped in between.
const COPIED_AT_ONCE: usize = 64 << 20;

/// One path as it was copied.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Copied {
    /// Permission bits; for a symlink the file type.
    pub(super) mode: u32,
    pub(super) hash: blake3::Hash,
}

/// What came of a copy.
#[derive(Default)]
pub(super) struct Outcome {
    /// Files and symlinks, by path.
    pub(super) leaves: BTreeMap<TreePath, Copied>,
    /// Directories.
    pub(super) dirs: HashMap<TreePath, DirLook>,
    /// Paths that are neither file, directory nor symlink.
    pub(super) special: Vec<TreePath>,
    pub(super) lfs_pointers: u64,
}

/// Opens a directory below `root`, or `root` itself, without following any link.
pub(super) fn open_dir(root: BorrowedFd<'_>, dir: Option<&TreePath>) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let path = dir.map_or(Path::new("."), TreePath::as_path);
    loop {
        match rustix::fs::openat2(root, path, flags, Mode::empty(), resolve) {
            Err(Errno::INTR | Errno::AGAIN) => {}
            done => return done,
        }
    }
}

/// Whether the path is just not there (any more), or leads through a link or a file.
pub(super) fn is_gone(error: Errno) -> bool {
    matches!(error, Errno::NOENT | Errno::NOTDIR | Errno::LOOP)
}

/// Copies `paths` from below `root` to below `to`. Paths that don't exist are left out: they were deleted.
/// Files that are newer than `newest_s` get that modification time.
pub(super) fn copy(
    root: BorrowedFd<'_>,
    paths: Vec<TreePath>,
    to: &Path,
    newest_s: i64,
    cancel: &Cancel,
) -> Result<Outcome, FreezeError> {
    let mut by_dir: BTreeMap<Option<TreePath>, Vec<TreePath>> = BTreeMap::new();
    for path in paths {
        by_dir.entry(path.parent()).or_default().push(path);
    }
    let lfs_pointers = AtomicU64::new(0);
    let to_dir = File::open(to).map_err(FreezeError::Store)?;
    let job = Job { root, to, to_dir: to_dir.as_fd(), newest_s, cancel, lfs_pointers: &lfs_pointers };
    // Directories first, in order: a parent comes before what it holds.
    let mut dirs = HashMap::new();
    let mut groups = Vec::new();
    for (dir, names) in by_dir {
        if job.make_dirs(dir.as_ref(), &mut dirs)? {
            groups.push((dir, names));
        }
    }
    let copied: Vec<Vec<(TreePath, Leaf)>> = super::on_threads(|| {
        groups.into_par_iter().map(|(dir, names)| job.group(dir.as_ref(), names)).collect::<Result<_, _>>()
    })?;
    let mut out = Outcome { dirs, lfs_pointers: lfs_pointers.into_inner(), ..Outcome::default() };
    for (path, leaf) in copied.into_iter().flatten() {
        match leaf {
            Leaf::Copied(copied) => drop(out.leaves.insert(path, copied)),
            Leaf::Dir(look) => drop(out.dirs.insert(path, look)),
            Leaf::Special => out.special.push(path),
        }
    }
    Ok(out)
}

/// What a directory looks like without reading its files: as long as this is the same, so is their content.
pub(super) struct Survey {
    pub(super) digest: blake3::Hash,
    /// The newest change time, seconds. What changes in the same moment as it is looked at may look the same after.
    pub(super) newest_s: i64,
}

/// Looks at `paths` without reading any file. Change times can't be set by programs, so what is rewritten looks new.
pub(super) fn survey(
    root: BorrowedFd<'_>,
    paths: &BTreeSet<TreePath>,
    cancel: &Cancel,
) -> Result<Survey, FreezeError> {
    let mut by_dir: BTreeMap<Option<TreePath>, Vec<&TreePath>> = BTreeMap::new();
    for path in paths {
        by_dir.entry(path.parent()).or_default().push(path);
    }
    let groups: Vec<_> = by_dir.into_iter().collect();
    let looks: Result<Vec<_>, FreezeError> = super::on_threads(|| {
        let look = |(dir, paths): &(Option<TreePath>, Vec<&TreePath>)| {
            cancel.check().map_err(FreezeError::Store)?;
            look_at(root, dir.as_ref(), paths)
        };
        groups.par_iter().map(look).collect()
    });
    let mut hasher = blake3::Hasher::new();
    let mut newest_s = 0;
    for (bytes, newest) in looks? {
        hasher.update(&bytes);
        newest_s = newest.max(newest_s);
    }
    Ok(Survey { digest: hasher.finalize(), newest_s })
}

/// The stats of a directory and of what is asked for in it, as bytes, and the newest change time.
fn look_at(
    root: BorrowedFd<'_>,
    dir: Option<&TreePath>,
    paths: &[&TreePath],
) -> Result<(Vec<u8>, i64), FreezeError> {
    let fd = match open_dir(root, dir) {
        Ok(fd) => fd,
        Err(error) if is_gone(error) => return Ok((Vec::new(), 0)),
        Err(error) => return Err(unreadable(dir, error.into())),
    };
    let mut out = Vec::with_capacity(paths.len() * 128);
    let mut newest_s = 0;
    let mut add = |name: &[u8], stat: &Stat, is_dir: bool| {
        out.extend((name.len() as u64).to_le_bytes());
        out.extend(name);
        // What a directory holds is among the paths; its own times change with things that are ignored.
        let content = if is_dir {
            [0; 6]
        } else {
            [
                stat.st_size,
                stat.st_ctime,
                stat.st_ctime_nsec.cast_signed(),
                stat.st_mtime,
                stat.st_mtime_nsec.cast_signed(),
                stat.st_ino.cast_signed(),
            ]
        };
        out.extend(content.iter().flat_map(|n| n.to_le_bytes()));
        out.extend(stat.st_mode.to_le_bytes());
        if !is_dir {
            newest_s = newest_s.max(stat.st_ctime);
        }
    };
    let own = rustix::fs::fstat(&fd).map_err(|error| unreadable(dir, error.into()))?;
    add(dir.map_or(b"", TreePath::as_bytes), &own, true);
    for path in paths {
        let name = std::ffi::OsStr::from_bytes(path.file_name());
        match rustix::fs::statat(&fd, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => {
                add(path.as_bytes(), &stat, FileType::from_raw_mode(stat.st_mode) == FileType::Directory);
            }
            Err(error) if is_gone(error) => {}
            Err(error) => return Err(unreadable(Some(path), error.into())),
        }
    }
    Ok((out, newest_s))
}

enum Leaf {
    Copied(Copied),
    Dir(DirLook),
    Special,
}

struct Job<'a> {
    root: BorrowedFd<'a>,
    to: &'a Path,
    to_dir: BorrowedFd<'a>,
    newest_s: i64,
    cancel: &'a Cancel,
    lfs_pointers: &'a AtomicU64,
}

impl Job<'_> {
    /// Makes `dir` and those above it, as they look in the source; `false` when the source has none there.
    fn make_dirs(
        &self,
        dir: Option<&TreePath>,
        made: &mut HashMap<TreePath, DirLook>,
    ) -> Result<bool, FreezeError> {
        let mut above: Vec<TreePath> = Vec::new();
        let mut at = dir.cloned();
        while let Some(dir) = at.take_if(|dir| !made.contains_key(dir)) {
            at = dir.parent();
            above.push(dir);
        }
        while let Some(dir) = above.pop() {
            let fd = match open_dir(self.root, Some(&dir)) {
                Ok(fd) => fd,
                Err(error) if is_gone(error) => return Ok(false),
                Err(error) => return Err(unreadable(Some(&dir), error.into())),
            };
            let stat = rustix::fs::fstat(&fd).map_err(|error| unreadable(Some(&dir), error.into()))?;
            self.make_dir(&dir)?;
            made.insert(dir, self.look(&stat));
        }
        Ok(true)
    }

    fn make_dir(&self, dir: &TreePath) -> Result<(), FreezeError> {
        match DirBuilder::new().create(self.to.join(dir.as_path())) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(FreezeError::Store(error)),
            _ => Ok(()),
        }
    }

    fn look(&self, stat: &Stat) -> DirLook {
        DirLook { mode: stat.st_mode & 0o7777, mtime: self.mtime(stat) }
    }

    fn mtime(&self, stat: &Stat) -> Timespec {
        if stat.st_mtime > self.newest_s {
            Timespec { tv_sec: self.newest_s, tv_nsec: 0 }
        } else {
            Timespec { tv_sec: stat.st_mtime, tv_nsec: stat.st_mtime_nsec.cast_signed() }
        }
    }

    fn group(
        &self,
        dir: Option<&TreePath>,
        paths: Vec<TreePath>,
    ) -> Result<Vec<(TreePath, Leaf)>, FreezeError> {
        let fd = match open_dir(self.root, dir) {
            Ok(fd) => fd,
            Err(error) if is_gone(error) => return Ok(Vec::new()),
            Err(error) => return Err(unreadable(dir, error.into())),
        };
        // One large directory is shared between the threads too.
        let leaves: Result<Vec<_>, _> = paths
            .into_par_iter()
            .with_min_len(16)
            .map(|path| self.leaf(&fd, &path).map(|leaf| leaf.map(|leaf| (path, leaf))))
            .collect();
        Ok(leaves?.into_iter().flatten().collect())
    }

    fn leaf(&self, dir: &OwnedFd, path: &TreePath) -> Result<Option<Leaf>, FreezeError> {
        let name = std::ffi::OsStr::from_bytes(path.file_name());
        let fail = |error: Errno| unreadable(Some(path), error.into());
        self.cancel.check().map_err(FreezeError::Store)?;
        for _ in 0..TRIES {
            let stat = match rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => stat,
                Err(error) if is_gone(error) => return Ok(None),
                Err(error) => return Err(fail(error)),
            };
            let leaf = match FileType::from_raw_mode(stat.st_mode) {
                FileType::RegularFile => self.file(dir, name, path)?,
                FileType::Symlink => self.symlink(dir, name, path, &stat)?,
                FileType::Directory => {
                    self.make_dir(path)?;
                    Some(Leaf::Dir(self.look(&stat)))
                }
                FileType::Fifo
                | FileType::Socket
                | FileType::CharacterDevice
                | FileType::BlockDevice
                | FileType::Unknown => Some(Leaf::Special),
            };
            if leaf.is_some() {
                return Ok(leaf);
            }
        }
        Err(FreezeError::Changed(path.clone()))
    }

    /// `None`: it changed meanwhile.
    fn symlink(
        &self,
        dir: &OwnedFd,
        name: &std::ffi::OsStr,
        path: &TreePath,
        stat: &Stat,
    ) -> Result<Option<Leaf>, FreezeError> {
        let target = match rustix::fs::readlinkat(dir, name, Vec::new()) {
            Ok(target) => std::ffi::OsString::from_vec(target.into_bytes()),
            Err(Errno::INVAL | Errno::NOENT) => return Ok(None),
            Err(error) => return Err(unreadable(Some(path), error.into())),
        };
        let at = self.to.join(path.as_path());
        let make = || {
            std::os::unix::fs::symlink(&target, &at)?;
            seal::touch(&at, self.mtime(stat))
        };
        make().map_err(FreezeError::Store)?;
        let hash = blake3::hash(target.as_bytes());
        Ok(Some(Leaf::Copied(Copied { mode: 0o120_000, hash })))
    }

    /// `None`: it changed meanwhile.
    fn file(
        &self,
        dir: &OwnedFd,
        name: &std::ffi::OsStr,
        path: &TreePath,
    ) -> Result<Option<Leaf>, FreezeError> {
        // Not blocking: what is a file now may be a fifo when it is opened.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let source = match rustix::fs::openat(dir, name, flags, Mode::empty()) {
            Ok(fd) => File::from(fd),
            Err(Errno::NOENT | Errno::LOOP | Errno::NXIO) => return Ok(None),
            Err(error) => return Err(unreadable(Some(path), error.into())),
        };
        let fail = |error: io::Error| unreadable(Some(path), error);
        let before = rustix::fs::fstat(&source).map_err(|error| fail(error.into()))?;
        if FileType::from_raw_mode(before.st_mode) != FileType::RegularFile {
            return Ok(None);
        }
        let at = self.to.join(path.as_path());
        let mode = before.st_mode & 0o777;
        // Where nothing is yet, and through no link: whatever a list of files says, nothing is written over.
        let flags = NEW.difference(OFlags::WRONLY).union(OFlags::RDWR);
        let target = open_beneath_mode(self.to_dir, path, flags, Mode::from_raw_mode(mode | 0o600));
        let target = File::from(target.map_err(|errno| FreezeError::Store(errno.into()))?);
        let size = before.st_size.cast_unsigned();
        let (hash, bytes) = if size <= SMALL_BYTES {
            let mut content = Vec::with_capacity(usize::try_from(size).unwrap_or_default() + 1);
            (&source).take(SMALL_BYTES + 1).read_to_end(&mut content).map_err(fail)?;
            (&target).write_all(&content).map_err(FreezeError::Store)?;
            if seal::is_lfs_pointer(&content) {
                self.lfs_pointers.fetch_add(1, Ordering::Relaxed);
            }
            (blake3::hash(&content), content.len() as u64)
        } else {
            clone(&source, &target, size, self.cancel).map_err(|error| match error {
                CloneError::Read(error) => fail(error),
                CloneError::Write(error) => FreezeError::Store(error),
            })?;
            // The copy is hashed, so what the hash says is what the base has.
            (seal::hash_file(&target, size, self.cancel).map_err(FreezeError::Store)?.0, size)
        };
        let after = rustix::fs::fstat(&source).map_err(|error| fail(error.into()))?;
        if !is_same(&before, &after) || bytes != size {
            // What is there next may be of another kind.
            std::fs::remove_file(&at).map_err(FreezeError::Store)?;
            return Ok(None);
        }
        let finish = || {
            target.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(mode))?;
            seal::touch(&at, self.mtime(&before))
        };
        finish().map_err(FreezeError::Store)?;
        Ok(Some(Leaf::Copied(Copied { mode, hash })))
    }
}

fn is_same(before: &Stat, after: &Stat) -> bool {
    let id = |s: &Stat| (s.st_size, s.st_mtime, s.st_mtime_nsec, s.st_ctime, s.st_ctime_nsec, s.st_mode);
    id(before) == id(after)
}

fn unreadable(path: Option<&TreePath>, source: io::Error) -> FreezeError {
    FreezeError::Read { path: path.map_or_else(|| ".".into(), ToString::to_string), source }
}

enum CloneError {
    Read(io::Error),
    Write(io::Error),
}

/// Shares the content where the file system can, else copies what is not a hole.
fn clone(source: &File, target: &File, size: u64, cancel: &Cancel) -> Result<(), CloneError> {
    if rustix::fs::ioctl_ficlone(target, source).is_ok() {
        return Ok(());
    }
    target.set_len(size).map_err(CloneError::Write)?;
    let mut at = 0;
    while at < size {
        let (data, hole) = sys::reflink::next_data(source, at, size).map_err(CloneError::Read)?;
        copy_range(source, target, (data, hole), cancel)?;
        at = hole;
    }
    Ok(())
}

fn copy_range(
    source: &File,
    target: &File,
    (from, to): (u64, u64),
    cancel: &Cancel,
) -> Result<(), CloneError> {
    let (mut read_at, mut write_at) = (from, from);
    while read_at < to {
        cancel.check().map_err(CloneError::Write)?;
        let left = usize::try_from(to - read_at).unwrap_or(usize::MAX).min(COPIED_AT_ONCE);
        match rustix::fs::copy_file_range(source, Some(&mut read_at), target, Some(&mut write_at), left) {
            // The file is shorter than it was: its stat will tell.
            Ok(0) => return Ok(()),
            Ok(_) | Err(Errno::INTR) => {}
            Err(Errno::XDEV | Errno::NOSYS | Errno::INVAL | Errno::OPNOTSUPP) => {
                return read_write(source, target, (read_at, to), cancel);
            }
            Err(error @ (Errno::NOSPC | Errno::DQUOT | Errno::FBIG)) => {
                return Err(CloneError::Write(error.into()));
            }
            Err(error) => return Err(CloneError::Read(error.into())),
        }
    }
    Ok(())
}

fn read_write(
    source: &File,
    target: &File,
    (from, to): (u64, u64),
    cancel: &Cancel,
) -> Result<(), CloneError> {
    let mut buffer = vec![0; 1 << 20];
    let mut at = from;
    while at < to {
        cancel.check().map_err(CloneError::Write)?;
        let want = usize::try_from(to - at).unwrap_or(usize::MAX).min(buffer.len());
        let n = source.read_at(&mut buffer[..want], at).map_err(CloneError::Read)?;
        if n == 0 {
            break;
        }
        target.write_all_at(&buffer[..n], at).map_err(CloneError::Write)?;
        at += n as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_written_over_and_no_link_is_followed() {
        let (from, to, outside) =
            (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        for path in [".git/config", "link/file"] {
            std::fs::create_dir_all(from.path().join(path).parent().unwrap()).unwrap();
            std::fs::write(from.path().join(path), "theirs").unwrap();
        }
        std::fs::create_dir(to.path().join(".git")).unwrap();
        std::fs::write(to.path().join(".git/config"), "ours").unwrap();
        std::os::unix::fs::symlink(outside.path(), to.path().join("link")).unwrap();
        let root = File::open(from.path()).unwrap();
        for path in [".git/config", "link/file"] {
            let copied =
                copy(root.as_fd(), vec![path.parse().unwrap()], to.path(), i64::MAX, &Cancel::default());
            assert!(copied.is_err(), "{path}");
        }
        assert_eq!(std::fs::read_to_string(to.path().join(".git/config")).unwrap(), "ours");
        assert_eq!(std::fs::read_dir(outside.path()).unwrap().count(), 0);
    }
}
