//! File operations below a branch's root that nothing in the branch can lead out of it, or make hang.
//!
//! **No symbolic link is ever followed**, neither in a path's middle nor at its end. A link that is followed makes the
//! audit name a path that is not the one that changed, an absolute link means one thing in a hand and another here, and
//! a link that leads beneath today may be swapped tomorrow between two looks. Who wants to follow a link reads its
//! target and names the path that it means. No mount point is crossed and no magic link passed. Files are opened as a
//! location first, looked at, and only a regular file is then opened for good, through the location that was looked at:
//! a fifo or device is never opened, so nothing blocks. What replaces a file is made beside it and renamed over it, so
//! that a hardlink is broken and never written through. All of it holds while the branch's processes rename things as
//! fast as they can: the kernel resolves each path in one go (openat2), and when it can't, it says so and is asked
//! again a bounded number of times.

mod staged;
mod tree;

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read, Seek};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use proto::error::{Code, Coded};
use proto::path::TreePath;
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, RawDir, RenameFlags, ResolveFlags, Stat, Uid};
use rustix::io::Errno;

/// How often the kernel is asked again to resolve a path under which directories are renamed.
const RESOLVE_TRIES: usize = 128;
/// The most bytes that one read gives.
pub(crate) const READ_BYTES_MAX: u64 = 256 * 1024 * 1024;
/// The most names that one listing gives.
pub(crate) const LIST_NAMES_MAX: usize = 200_000;
const DIR_BUFFER_BYTES: usize = 32 * 1024;

/// A file operation that was not done.
#[derive(Debug, thiserror::Error)]
pub enum BeneathError {
    /// There is nothing there.
    #[error("there is no `{0}`")]
    NotFound(String),
    /// The path leads through a symbolic link, or ends in one where none can be.
    #[error("`{0}` is, or leads through, a symbolic link")]
    Symlink(String),
    /// A part of the path that has to be a directory is none.
    #[error("in `{0}` something else stands where a directory is wanted")]
    NotDir(String),
    /// A directory, where a file is wanted.
    #[error("`{0}` is a directory")]
    IsDir(String),
    /// A fifo, socket or device, where a file is wanted.
    #[error("`{0}` is not a regular file")]
    NotFile(String),
    /// Something is there already.
    #[error("`{0}` exists already")]
    Exists(String),
    /// It is larger than what one call may move.
    #[error("`{path}` has {what} than {max}")]
    TooLarge {
        /// Which.
        path: String,
        /// `more bytes`, `more names`, …
        what: &'static str,
        /// The limit.
        max: u64,
    },
    /// Others went on changing it.
    #[error("`{0}` changes all the time")]
    Racing(String),
    /// The file system failed, or refused.
    #[error("can't {what} `{path}`")]
    Io {
        /// `read`, `write`, …
        what: &'static str,
        /// Which.
        path: String,
        /// Why.
        source: io::Error,
    },
}

impl Coded for BeneathError {
    fn code(&self) -> Code {
        match self {
            BeneathError::NotFound(_) => Code::NotFound,
            BeneathError::Symlink(_)
            | BeneathError::NotDir(_)
            | BeneathError::IsDir(_)
            | BeneathError::NotFile(_)
            | BeneathError::TooLarge { .. } => Code::BadInput,
            BeneathError::Exists(_) | BeneathError::Racing(_) => Code::Conflict,
            BeneathError::Io { source, .. } if source.kind() == io::ErrorKind::InvalidFilename => {
                Code::BadInput
            }
            BeneathError::Io { source, .. } => crate::branch::io_code(source),
        }
    }
    fn hint(&self) -> Option<String> {
        match self {
            BeneathError::Symlink(_) => {
                Some("symbolic links are not followed: name the path that it leads to".into())
            }
            BeneathError::TooLarge { .. } => Some("take it in parts".into()),
            BeneathError::Racing(_) => Some("try again when what runs on the branch has ended".into()),
            BeneathError::NotFound(_) | BeneathError::NotDir(_) => {
                Some("see what there is: tendon branch ls BRANCH".into())
            }
            BeneathError::IsDir(_) => Some("list it: tendon branch ls BRANCH DIR".into()),
            BeneathError::NotFile(_) | BeneathError::Exists(_) | BeneathError::Io { .. } => None,
        }
    }
}

/// Gives an error number the meaning that it has for a path.
pub(crate) fn fail(what: &'static str, path: &TreePath) -> impl Fn(Errno) -> BeneathError {
    let path = path.to_string();
    move |errno| error(what, &path, errno)
}

fn error(what: &'static str, path: &str, errno: Errno) -> BeneathError {
    let path = path.to_owned();
    match errno {
        Errno::NOENT => BeneathError::NotFound(path),
        Errno::LOOP | Errno::XDEV if what != "rename" => BeneathError::Symlink(path),
        Errno::LOOP => BeneathError::Symlink(path),
        Errno::NOTDIR => BeneathError::NotDir(path),
        Errno::ISDIR => BeneathError::IsDir(path),
        Errno::EXIST => BeneathError::Exists(path),
        Errno::AGAIN => BeneathError::Racing(path),
        _ => BeneathError::Io { what, path, source: errno.into() },
    }
}

/// What lies at a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// A regular file.
    File,
    /// A directory.
    Dir,
    /// A symbolic link.
    Symlink,
    /// A fifo, socket or device.
    Other,
}

impl FileKind {
    fn of(raw_mode: u32) -> Self {
        match FileType::from_raw_mode(raw_mode) {
            FileType::RegularFile => FileKind::File,
            FileType::Directory => FileKind::Dir,
            FileType::Symlink => FileKind::Symlink,
            FileType::Fifo
            | FileType::Socket
            | FileType::CharacterDevice
            | FileType::BlockDevice
            | FileType::Unknown => FileKind::Other,
        }
    }
}

/// What is known of a path without opening it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileStat {
    /// What lies there.
    pub kind: FileKind,
    /// Permission bits.
    pub mode: u32,
    /// Bytes of a file; length of a symlink's target.
    pub size: u64,
    /// Modification time, nanoseconds since the Unix epoch.
    pub mtime_ns: i64,
}

impl FileStat {
    fn of(stat: &Stat) -> Self {
        let ns = i64::try_from(stat.st_mtime_nsec).unwrap_or(0);
        Self {
            kind: FileKind::of(stat.st_mode),
            mode: stat.st_mode & 0o7777,
            size: stat.st_size.cast_unsigned(),
            mtime_ns: stat.st_mtime.saturating_mul(1_000_000_000).saturating_add(ns),
        }
    }
}

/// Opens `path` (`None`: the root itself) below `root`. Follows nothing.
pub(crate) fn open(root: BorrowedFd<'_>, path: Option<&TreePath>, flags: OFlags) -> Result<OwnedFd, Errno> {
    let resolve = ResolveFlags::BENEATH
        | ResolveFlags::NO_SYMLINKS
        | ResolveFlags::NO_MAGICLINKS
        | ResolveFlags::NO_XDEV;
    let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let path = path.map_or(Path::new("."), TreePath::as_path);
    for _ in 0..RESOLVE_TRIES {
        match rustix::fs::openat2(root, path, flags, Mode::empty(), resolve) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            opened => return opened,
        }
    }
    Err(Errno::AGAIN)
}

/// The location of `path`: a symbolic link at its end is a location too.
fn locate(root: BorrowedFd<'_>, path: &TreePath) -> Result<(OwnedFd, Stat), Errno> {
    // O_PATH | O_NOFOLLOW opens the link itself; RESOLVE_NO_SYMLINKS allows exactly that.
    let fd = open(root, Some(path), OFlags::PATH)?;
    let stat = rustix::fs::fstat(&fd)?;
    Ok((fd, stat))
}

/// The location of the directory that holds `path`.
pub(crate) fn parent(root: BorrowedFd<'_>, path: &TreePath) -> Result<OwnedFd, Errno> {
    open(root, path.parent().as_ref(), OFlags::PATH | OFlags::DIRECTORY)
}

/// Opens what a location stands for: it can't be swapped any more.
fn reopen(location: BorrowedFd<'_>, flags: OFlags) -> Result<File, Errno> {
    let own = format!("/proc/self/fd/{}", location.as_raw_fd());
    let flags = flags | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    Ok(File::from(rustix::fs::open(own, flags, Mode::empty())?))
}

/// What lies at `path`.
pub(crate) fn stat(root: BorrowedFd<'_>, path: &TreePath) -> Result<FileStat, BeneathError> {
    let (_, stat) = locate(root, path).map_err(fail("look at", path))?;
    Ok(FileStat::of(&stat))
}

/// What lies at `path`, if anything does.
pub(crate) fn find(root: BorrowedFd<'_>, path: &TreePath) -> Result<Option<FileStat>, BeneathError> {
    match stat(root, path) {
        Ok(stat) => Ok(Some(stat)),
        Err(BeneathError::NotFound(_)) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Up to `max` bytes of the file at `path`, from `offset` on.
pub(crate) fn read(
    root: BorrowedFd<'_>,
    path: &TreePath,
    offset: u64,
    max: u64,
) -> Result<Vec<u8>, BeneathError> {
    let fail = fail("read", path);
    let io_error = |source| BeneathError::Io { what: "read", path: path.to_string(), source };
    let mut file = open_file(root, path)?;
    let size = rustix::fs::fstat(&file).map_err(&fail)?.st_size.cast_unsigned();
    if offset >= size {
        return Ok(Vec::new());
    }
    file.seek(io::SeekFrom::Start(offset)).map_err(io_error)?;
    let max = max.min(READ_BYTES_MAX);
    let expected = usize::try_from(size.saturating_sub(offset).min(max)).unwrap_or(0);
    let mut out = Vec::with_capacity(expected);
    file.take(max).read_to_end(&mut out).map_err(io_error)?;
    Ok(out)
}

/// Opens the regular file at `path` for reading.
pub(crate) fn open_file(root: BorrowedFd<'_>, path: &TreePath) -> Result<File, BeneathError> {
    let fail = fail("read", path);
    let (location, stat) = locate(root, path).map_err(&fail)?;
    match FileKind::of(stat.st_mode) {
        FileKind::File => reopen(location.as_fd(), OFlags::RDONLY).map_err(fail),
        FileKind::Dir => Err(BeneathError::IsDir(path.to_string())),
        FileKind::Symlink => Err(BeneathError::Symlink(path.to_string())),
        FileKind::Other => Err(BeneathError::NotFile(path.to_string())),
    }
}

/// The target of the symbolic link at `path`.
pub(crate) fn read_link(root: BorrowedFd<'_>, path: &TreePath) -> Result<Vec<u8>, BeneathError> {
    let fail = fail("read", path);
    let (location, stat) = locate(root, path).map_err(&fail)?;
    if FileKind::of(stat.st_mode) != FileKind::Symlink {
        return Err(BeneathError::NotFile(path.to_string()));
    }
    Ok(rustix::fs::readlinkat(&location, "", Vec::new()).map_err(fail)?.into_bytes())
}

/// The names in a directory (`None`: the root), in order, each with what lies there.
pub(crate) fn list(
    root: BorrowedFd<'_>,
    path: Option<&TreePath>,
) -> Result<Vec<(Vec<u8>, FileStat)>, BeneathError> {
    let shown = path.map_or_else(|| ".".to_owned(), ToString::to_string);
    let fail = |errno| error("list", &shown, errno);
    let dir = open(root, path, OFlags::RDONLY | OFlags::DIRECTORY).map_err(fail)?;
    let mut out = Vec::new();
    for name in names(dir.as_fd(), LIST_NAMES_MAX).map_err(fail)? {
        match rustix::fs::statat(&dir, &*name, AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT) {
            Ok(stat) => out.push((name.into_bytes(), FileStat::of(&stat))),
            // Gone since.
            Err(Errno::NOENT) => {}
            Err(errno) => return Err(fail(errno)),
        }
    }
    if out.len() > LIST_NAMES_MAX {
        return Err(BeneathError::TooLarge { path: shown, what: "more names", max: LIST_NAMES_MAX as u64 });
    }
    out.sort_by(|(a, _), (b, _)| a.cmp(b));
    Ok(out)
}

/// The names in an open directory, from its start; at most one more than `max`.
fn names(dir: BorrowedFd<'_>, max: usize) -> Result<Vec<CString>, Errno> {
    rustix::fs::seek(dir, rustix::fs::SeekFrom::Start(0))?;
    let mut buffer = vec![MaybeUninit::uninit(); DIR_BUFFER_BYTES];
    let mut entries = RawDir::new(dir, &mut buffer);
    let mut out = Vec::new();
    while let Some(entry) = entries.next() {
        let name = entry?.file_name().to_owned();
        if !matches!(name.as_bytes(), b"." | b"..") {
            out.push(name);
        }
        if out.len() > max {
            break;
        }
    }
    Ok(out)
}

/// Who new files and directories belong to.
pub(crate) type Owner = Option<(u32, u32)>;

fn own(fd: BorrowedFd<'_>, owner: Owner) -> Result<(), Errno> {
    let Some((uid, gid)) = owner else { return Ok(()) };
    let (uid, gid) = (Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)));
    rustix::fs::chownat(fd, "", uid, gid, AtFlags::EMPTY_PATH)
}

/// Makes the directory `path` and those above it that are missing. Returns those that it made, topmost first.
pub(crate) fn make_dirs(
    root: BorrowedFd<'_>,
    path: &TreePath,
    owner: Owner,
) -> Result<Vec<TreePath>, BeneathError> {
    let mut missing = Vec::new();
    let mut at = Some(path.clone());
    while let Some(dir) = at {
        match open(root, Some(&dir), OFlags::PATH | OFlags::DIRECTORY) {
            Ok(_) => break,
            Err(Errno::NOENT) => {}
            // With O_DIRECTORY and O_PATH a link at the end is not a directory either.
            Err(errno) => return Err(not_dir(root, &dir, errno)),
        }
        at = dir.parent();
        missing.push(dir);
    }
    let mut made = Vec::new();
    for dir in missing.into_iter().rev() {
        match make_dir(root, &dir, owner) {
            Ok(true) => made.push(dir),
            Ok(false) => {}
            Err(errno) => {
                let error = fail("make", &dir)(errno);
                remove_dirs(root, &made);
                return Err(error);
            }
        }
    }
    Ok(made)
}

fn not_dir(root: BorrowedFd<'_>, dir: &TreePath, errno: Errno) -> BeneathError {
    match (errno, locate(root, dir)) {
        (Errno::NOTDIR, Ok((_, stat))) if FileKind::of(stat.st_mode) == FileKind::Symlink => {
            BeneathError::Symlink(dir.to_string())
        }
        _ => fail("make", dir)(errno),
    }
}

/// Makes one directory; `false`: it is there.
fn make_dir(root: BorrowedFd<'_>, dir: &TreePath, owner: Owner) -> Result<bool, Errno> {
    let parent = parent(root, dir)?;
    match rustix::fs::mkdirat(&parent, dir.file_name(), Mode::from_raw_mode(0o755)) {
        Err(Errno::EXIST) => {
            open(root, Some(dir), OFlags::PATH | OFlags::DIRECTORY)?;
            return Ok(false);
        }
        done => done?,
    }
    let made = rustix::fs::openat(&parent, dir.file_name(), OPEN_DIR, Mode::empty())?;
    own(made.as_fd(), owner)?;
    // The process's mask must not decide what it looks like.
    rustix::fs::fchmod(&made, Mode::from_raw_mode(0o755))?;
    Ok(true)
}

pub(crate) use staged::{Replaced, STAGED, Staged, is_staged};
pub use tree::DiskUse;
pub(crate) use tree::{copy_dir, disk_use, remove, remove_tree};

/// Opens a directory to list it.
pub(crate) const OPEN_DIR: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
/// Opens a file to read it. A fifo in its place opens at once, too: look at what was opened.
pub(crate) const READ: OFlags = OFlags::RDONLY
    .union(OFlags::NOFOLLOW)
    .union(OFlags::NONBLOCK)
    .union(OFlags::NOCTTY)
    .union(OFlags::CLOEXEC);
/// Makes a file where nothing is.
pub(crate) const NEW: OFlags =
    OFlags::WRONLY.union(OFlags::CREATE).union(OFlags::EXCL).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
/// Opens whatever lies there, a symbolic link itself, only to look at it.
pub(crate) const LOOK: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Removes directories that were just made, if they are still empty.
pub(crate) fn remove_dirs(root: BorrowedFd<'_>, made: &[TreePath]) {
    for dir in made.iter().rev() {
        if let Ok(parent) = parent(root, dir) {
            let _ = rustix::fs::unlinkat(&parent, dir.file_name(), AtFlags::REMOVEDIR);
        }
    }
}

/// Renames `from` to `to`, where nothing may be.
pub(crate) fn rename(root: BorrowedFd<'_>, from: &TreePath, to: &TreePath) -> Result<(), Errno> {
    let (source, target) = (parent(root, from)?, parent(root, to)?);
    rustix::fs::renameat_with(&source, from.file_name(), &target, to.file_name(), RenameFlags::NOREPLACE)?;
    Ok(())
}

/// Makes the names in the directories of these paths durable.
pub(crate) fn sync_parents(root: BorrowedFd<'_>, paths: &[&TreePath]) -> Result<(), Errno> {
    for path in paths {
        rustix::fs::fsync(open(root, path.parent().as_ref(), OFlags::RDONLY | OFlags::DIRECTORY)?)?;
    }
    Ok(())
}

/// Gives a file or directory permission bits; returns those that it had.
pub(crate) fn chmod(root: BorrowedFd<'_>, path: &TreePath, mode: u32) -> Result<u32, BeneathError> {
    let fail = fail("change the mode of", path);
    let (location, stat) = locate(root, path).map_err(&fail)?;
    match FileKind::of(stat.st_mode) {
        FileKind::File | FileKind::Dir => {}
        FileKind::Symlink => return Err(BeneathError::Symlink(path.to_string())),
        FileKind::Other => return Err(BeneathError::NotFile(path.to_string())),
    }
    let own = format!("/proc/self/fd/{}", location.as_raw_fd());
    rustix::fs::chmod(own, Mode::from_raw_mode(mode & 0o7777)).map_err(fail)?;
    Ok(stat.st_mode & 0o7777)
}

#[cfg(test)]
mod tests;
