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

use std::collections::HashSet;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{self, Read, Seek, Write};
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
/// The most files and directories that one removal takes.
const REMOVE_NAMES_MAX: u64 = 5_000_000;
/// The deepest directory that is followed below the one that was named: each level takes a descriptor.
const DEPTH_MAX: usize = 700;
/// Levels of a tree of ours that are removed in one go.
const TREE_DEPTH_MAX: usize = 64;
/// Names that are looked at in one go where many are removed.
const REMOVE_BATCH: usize = 10_000;
const DIR_BUFFER_BYTES: usize = 32 * 1024;
/// What the names of files begin with that are about to replace others. Such names are ours: whatever has one after
/// the runner was killed is removed.
pub(crate) const STAGED: &str = ".tendon-edit-";

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
    #[error("a part of `{0}` is not a directory")]
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
            BeneathError::NotFound(_)
            | BeneathError::NotDir(_)
            | BeneathError::IsDir(_)
            | BeneathError::NotFile(_)
            | BeneathError::Exists(_)
            | BeneathError::Io { .. } => None,
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
    if offset > 0 {
        file.seek(io::SeekFrom::Start(offset.min(i64::MAX as u64))).map_err(io_error)?;
    }
    let size = rustix::fs::fstat(&file).map_err(&fail)?.st_size.cast_unsigned();
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

/// The names in an open directory; at most one more than `max`.
fn names(dir: BorrowedFd<'_>, max: usize) -> Result<Vec<CString>, Errno> {
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

const OPEN_DIR: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Removes directories that were just made, if they are still empty.
pub(crate) fn remove_dirs(root: BorrowedFd<'_>, made: &[TreePath]) {
    for dir in made.iter().rev() {
        if let Ok(parent) = parent(root, dir) {
            let _ = rustix::fs::unlinkat(&parent, dir.file_name(), AtFlags::REMOVEDIR);
        }
    }
}

/// Something new that is not at its place yet.
pub(crate) struct Staged {
    parent: OwnedFd,
    name: CString,
    placed: bool,
}

impl Staged {
    /// A file beside `path` with this content, durable. Keeps the owner of what it will replace.
    pub(crate) fn file(
        root: BorrowedFd<'_>,
        path: &TreePath,
        content: &mut dyn Read,
        mode: u32,
        owner: Owner,
    ) -> Result<Self, BeneathError> {
        let fail = fail("write", path);
        let io_error = |source: io::Error| match source.raw_os_error() {
            Some(code) => fail(Errno::from_raw_os_error(code)),
            None => BeneathError::Io { what: "write", path: path.to_string(), source },
        };
        let parent = parent(root, path).map_err(&fail)?;
        let owner = match rustix::fs::statat(&parent, path.file_name(), AtFlags::SYMLINK_NOFOLLOW) {
            Ok(old) if owner.is_some() => Some((old.st_uid, old.st_gid)),
            Ok(_) | Err(_) => owner,
        };
        let name = staged_name().map_err(io_error)?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(&parent, &*name, flags, Mode::from_raw_mode(0o600)).map_err(&fail)?;
        let staged = Self { parent, name, placed: false };
        let mut file = File::from(fd);
        io::copy(content, &mut file).map_err(io_error)?;
        file.flush().map_err(io_error)?;
        own(file.as_fd(), owner).map_err(&fail)?;
        // After the owner: a change of owner takes setuid bits away.
        rustix::fs::fchmod(&file, Mode::from_raw_mode(mode)).map_err(&fail)?;
        file.sync_all().map_err(io_error)?;
        Ok(staged)
    }

    /// A symbolic link beside `path`.
    pub(crate) fn symlink(
        root: BorrowedFd<'_>,
        path: &TreePath,
        target: &[u8],
        owner: Owner,
    ) -> Result<Self, BeneathError> {
        let fail = fail("write", path);
        let parent = parent(root, path).map_err(&fail)?;
        let name = staged_name().map_err(|source| BeneathError::Io {
            what: "write",
            path: path.to_string(),
            source,
        })?;
        rustix::fs::symlinkat(target, &parent, &*name).map_err(&fail)?;
        let staged = Self { parent, name, placed: false };
        if let Some((uid, gid)) = owner {
            let (uid, gid) = (Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)));
            rustix::fs::chownat(&staged.parent, &*staged.name, uid, gid, AtFlags::SYMLINK_NOFOLLOW)
                .map_err(&fail)?;
        }
        Ok(staged)
    }

    /// Moves what lies at `path` out of its place; what is returned can put it back or remove it.
    pub(crate) fn take(root: BorrowedFd<'_>, path: &TreePath) -> Result<Self, Errno> {
        let parent = parent(root, path)?;
        let name = staged_name().map_err(|_| Errno::IO)?;
        rustix::fs::renameat_with(&parent, path.file_name(), &parent, &*name, RenameFlags::NOREPLACE)?;
        Ok(Self { parent, name, placed: false })
    }

    /// Puts it in the place of what lies at `path`, which then has the staged name; or where nothing is.
    pub(crate) fn place(&mut self, path: &TreePath) -> Result<Replaced, Errno> {
        let to = path.file_name();
        for _ in 0..RESOLVE_TRIES {
            let exchanged =
                rustix::fs::renameat_with(&self.parent, &*self.name, &self.parent, to, RenameFlags::EXCHANGE);
            match exchanged {
                Ok(()) => return Ok(Replaced::Staged),
                Err(Errno::NOENT) => {}
                Err(errno) => return Err(errno),
            }
            let flags = RenameFlags::NOREPLACE;
            match rustix::fs::renameat_with(&self.parent, &*self.name, &self.parent, to, flags) {
                Ok(()) => {
                    self.placed = true;
                    return Ok(Replaced::Nothing);
                }
                Err(Errno::EXIST) => {}
                Err(errno) => return Err(errno),
            }
        }
        Err(Errno::AGAIN)
    }

    /// Takes back what [`Staged::place`] did.
    pub(crate) fn put_back(&mut self, path: &TreePath, replaced: Replaced) -> Result<(), Errno> {
        let at = path.file_name();
        match replaced {
            Replaced::Staged => {
                rustix::fs::renameat_with(&self.parent, at, &self.parent, &*self.name, RenameFlags::EXCHANGE)
            }
            Replaced::Nothing => {
                let back = rustix::fs::renameat_with(
                    &self.parent,
                    at,
                    &self.parent,
                    &*self.name,
                    RenameFlags::NOREPLACE,
                );
                self.placed = false;
                back
            }
        }
    }

    /// Puts what was taken away back at its place, where nothing is now.
    pub(crate) fn restore(&mut self, path: &TreePath) -> Result<(), Errno> {
        let flags = RenameFlags::NOREPLACE;
        rustix::fs::renameat_with(&self.parent, &*self.name, &self.parent, path.file_name(), flags)?;
        self.placed = true;
        Ok(())
    }

    /// Makes the change of names durable.
    pub(crate) fn sync(&self) -> Result<(), Errno> {
        let dir = rustix::fs::openat(&self.parent, ".", OPEN_DIR, Mode::empty())?;
        rustix::fs::fsync(dir)
    }

    /// Removes what has the staged name, whatever it is.
    pub(crate) fn discard(mut self, path: &TreePath) -> Result<(), BeneathError> {
        let staged = std::mem::replace(&mut self.placed, true);
        if staged { Ok(()) } else { remove_at(self.parent.as_fd(), &self.name, path) }
    }

    /// The staged name as a path beside `path`.
    pub(crate) fn path(&self, path: &TreePath) -> Option<TreePath> {
        match path.parent() {
            Some(dir) => dir.join(self.name.as_bytes()).ok(),
            None => TreePath::new(self.name.as_bytes()).ok(),
        }
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        // Only what an error left: a test that kills the runner must find what a kill leaves.
        if !self.placed && !std::thread::panicking() {
            let _ = rustix::fs::unlinkat(&self.parent, &*self.name, AtFlags::empty());
        }
    }
}

/// What was at the place that something was put in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Replaced {
    /// Nothing.
    Nothing,
    /// What has the staged name now.
    Staged,
}

fn staged_name() -> io::Result<CString> {
    let id = proto::ids::LayerId::from_random(crate::branch::random()?);
    let digits = id.as_str().trim_start_matches(proto::ids::LayerId::PREFIX);
    Ok(CString::new(format!("{STAGED}{digits}"))?)
}

/// Whether a name is one that [`Staged`] gives.
pub(crate) fn is_staged(name: &[u8]) -> bool {
    name.strip_prefix(STAGED.as_bytes()).is_some_and(|digits| digits.len() == 16)
}

/// Removes what lies at `path`, with all that is in it.
pub(crate) fn remove(root: BorrowedFd<'_>, path: &TreePath) -> Result<(), BeneathError> {
    let parent = parent(root, path).map_err(fail("remove", path))?;
    let name = CString::new(path.file_name()).map_err(|error| BeneathError::Io {
        what: "remove",
        path: path.to_string(),
        source: error.into(),
    })?;
    remove_at(parent.as_fd(), &name, path)
}

/// Removes a name of an open directory, with all that is below it. Goes down by descriptors, without recursion, and
/// enters nothing but directories of the same file system.
fn remove_at(parent: BorrowedFd<'_>, name: &CStr, shown: &TreePath) -> Result<(), BeneathError> {
    let fail = fail("remove", shown);
    match rustix::fs::unlinkat(parent, name, AtFlags::empty()) {
        Err(Errno::ISDIR | Errno::PERM) => {}
        done => return done.map_err(fail),
    }
    let too = |what, max| BeneathError::TooLarge { path: shown.to_string(), what, max };
    let mut left = REMOVE_NAMES_MAX;
    // Each open directory, its own name, and the names in it that are still to go.
    let mut stack: Vec<(OwnedFd, CString, Vec<CString>)> = Vec::new();
    let enter = |dir: BorrowedFd<'_>, name: &CStr| -> Result<(OwnedFd, CString, Vec<CString>), Errno> {
        let fd = enter(dir, name)?;
        let inside = names(fd.as_fd(), usize::MAX - 1)?;
        Ok((fd, name.to_owned(), inside))
    };
    stack.push(enter(parent, name).map_err(&fail)?);
    while let Some((dir, _, inside)) = stack.last_mut() {
        let Some(child) = inside.pop() else {
            let Some((_, own_name, _)) = stack.pop() else { break };
            let above = stack.last().map_or(parent, |(dir, ..)| dir.as_fd());
            match rustix::fs::unlinkat(above, &*own_name, AtFlags::REMOVEDIR) {
                Ok(()) | Err(Errno::NOENT) => {}
                // Somebody makes files in it while it is removed.
                Err(Errno::NOTEMPTY) => return Err(BeneathError::Racing(shown.to_string())),
                Err(errno) => return Err(fail(errno)),
            }
            continue;
        };
        left = left.checked_sub(1).ok_or_else(|| too("more names", REMOVE_NAMES_MAX))?;
        match rustix::fs::unlinkat(&*dir, &*child, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(Errno::ISDIR | Errno::PERM) => {
                let entered = enter(dir.as_fd(), &child).map_err(&fail)?;
                stack.push(entered);
                if stack.len() > DEPTH_MAX {
                    return Err(too("more directories in each other", DEPTH_MAX as u64));
                }
            }
            Err(errno) => return Err(fail(errno)),
        }
    }
    Ok(())
}

/// Opens a directory of an open one, also one that denies that to its owner.
fn enter(dir: BorrowedFd<'_>, name: &CStr) -> Result<OwnedFd, Errno> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    match rustix::fs::openat2(dir, name, OPEN_DIR, Mode::empty(), resolve) {
        Err(Errno::ACCESS) => {
            let location = rustix::fs::openat(
                dir,
                name,
                OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
                Mode::empty(),
            )?;
            let own = format!("/proc/self/fd/{}", location.as_raw_fd());
            rustix::fs::chmod(&own, Mode::RWXU)?;
            Ok(reopen(location.as_fd(), OFlags::RDONLY | OFlags::DIRECTORY)?.into())
        }
        opened => opened,
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

/// Disk space of a directory and all that is in it. What changes meanwhile is counted or not. Fails for directories
/// nested deeper than can be followed.
pub(crate) fn disk_bytes(dir: &Path) -> io::Result<u64> {
    let mut linked = HashSet::new();
    let mut total = 0;
    let mut stack = vec![inside(rustix::fs::open(dir, OPEN_DIR, Mode::empty())?, &mut linked, &mut total)?];
    while let Some((dir, below)) = stack.last_mut() {
        let Some(name) = below.pop() else {
            stack.pop();
            continue;
        };
        // What can't be entered is gone, or closed to its owner too, who then can't write in it.
        let Ok(fd) = rustix::fs::openat(&*dir, &*name, OPEN_DIR, Mode::empty()) else { continue };
        let entered = inside(fd, &mut linked, &mut total)?;
        stack.push(entered);
        if stack.len() > DEPTH_MAX {
            return Err(io::Error::from(io::ErrorKind::QuotaExceeded));
        }
    }
    Ok(total)
}

/// Adds up what is in one directory; returns it with the names of the directories in it.
fn inside(
    dir: OwnedFd,
    linked: &mut HashSet<u64>,
    total: &mut u64,
) -> Result<(OwnedFd, Vec<CString>), Errno> {
    let mut below = Vec::new();
    for name in names(dir.as_fd(), usize::MAX - 1)? {
        let Ok(stat) = rustix::fs::statat(&dir, &*name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
        let is_dir = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        if is_dir || stat.st_nlink < 2 || linked.insert(stat.st_ino) {
            *total += stat.st_blocks.cast_unsigned() * 512;
        }
        if is_dir {
            below.push(name);
        }
    }
    Ok((dir, below))
}

/// Removes a directory of ours, which nobody else can reach, with all that is in it. However deep guests nested their
/// directories, it needs few descriptors and no stack: what lies too deep is moved up first.
pub(crate) fn remove_tree(dir: &Path) -> io::Result<()> {
    let top = enter_closed(rustix::fs::CWD, dir)?;
    let mut moved = 0_u64;
    loop {
        let inside = names(top.as_fd(), REMOVE_BATCH)?;
        if inside.is_empty() {
            break;
        }
        for name in inside {
            remove_below(top.as_fd(), &name, &mut moved)?;
        }
    }
    Ok(std::fs::remove_dir(dir)?)
}

/// Removes a name in `top`; directories that lie too deep in it become names in `top` themselves.
fn remove_below(top: BorrowedFd<'_>, name: &CStr, moved: &mut u64) -> Result<(), Errno> {
    let unlink = |dir: BorrowedFd<'_>, name: &CStr| match rustix::fs::unlinkat(dir, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(true),
        Err(Errno::ISDIR | Errno::PERM) => Ok(false),
        Err(errno) => Err(errno),
    };
    if unlink(top, name)? {
        return Ok(());
    }
    let mut stack: Vec<(OwnedFd, CString, Vec<CString>)> = Vec::new();
    let open = |dir: BorrowedFd<'_>, name: &CStr| {
        let fd = enter_closed(dir, name)?;
        let inside = names(fd.as_fd(), usize::MAX - 1)?;
        Ok::<_, Errno>((fd, name.to_owned(), inside))
    };
    stack.push(open(top, name)?);
    loop {
        let depth = stack.len();
        let Some((dir, _, inside)) = stack.last_mut() else { return Ok(()) };
        let Some(child) = inside.pop() else {
            let Some((_, own, _)) = stack.pop() else { return Ok(()) };
            let above = stack.last().map_or(top, |(dir, ..)| dir.as_fd());
            rustix::fs::unlinkat(above, &*own, AtFlags::REMOVEDIR)?;
            continue;
        };
        if unlink(dir.as_fd(), &child)? {
            continue;
        }
        if depth < TREE_DEPTH_MAX {
            let opened = open(dir.as_fd(), &child)?;
            stack.push(opened);
            continue;
        }
        // A directory that denies writing can't be moved to another one.
        drop(enter_closed(dir.as_fd(), &*child)?);
        loop {
            *moved += 1;
            let up = format!("deep-{moved}");
            let flags = RenameFlags::NOREPLACE;
            match rustix::fs::renameat_with(&*dir, &*child, top, up.as_str(), flags) {
                Err(Errno::EXIST) => {}
                done => break done?,
            }
        }
    }
}

/// Opens a directory of a directory of ours, made accessible if it denies that to its owner.
fn enter_closed<P: rustix::path::Arg + Copy>(dir: BorrowedFd<'_>, name: P) -> Result<OwnedFd, Errno> {
    let stat = rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
        return Err(Errno::NOTDIR);
    }
    if stat.st_mode & 0o700 != 0o700 {
        rustix::fs::chmodat(dir, name, Mode::RWXU, AtFlags::empty())?;
    }
    rustix::fs::openat(dir, name, OPEN_DIR, Mode::empty())
}

#[cfg(test)]
#[path = "beneath_tests.rs"]
mod tests;
