//! Whole directories: removed, copied, measured. Goes down by descriptors, without recursion, and enters nothing but
//! directories of the same file system, through no link.

use std::collections::HashSet;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use proto::path::TreePath;
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, RenameFlags, ResolveFlags, Uid};
use rustix::io::Errno;

use super::staged::Staged;
use super::{BeneathError, FileKind, LOOK, NEW, OPEN_DIR, fail, names, parent, reopen};

/// The most files and directories that one removal takes.
const REMOVE_NAMES_MAX: u64 = 5_000_000;

/// The deepest directory that is followed below the one that was named: each level takes a descriptor.
const DEPTH_MAX: usize = 700;

/// Levels of a tree that are held open while it is measured or removed.
const OPEN_LEVELS_MAX: usize = 64;

/// What a file counts for at least when disk space is measured.
const ENTRY_BYTES_MIN: u64 = 4096;

/// How often a path is written down once it is captured: in the branch's entries, the audit, and their indices.
const PATH_COPIES: u64 = 4;

/// A path of so many bytes counts as one file more: paths are what a capture holds in memory.
const PATH_BYTES_PER_FILE: u64 = 512;

/// Levels of a tree of ours that are removed in one go.
const TREE_DEPTH_MAX: usize = 64;

/// Names that are looked at in one go where many are removed.
const REMOVE_BATCH: usize = 10_000;
/// How often a directory that got new files meanwhile is emptied again.
const REMOVE_TRIES: u32 = 100;

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
pub(super) fn remove_at(parent: BorrowedFd<'_>, name: &CStr, shown: &TreePath) -> Result<(), BeneathError> {
    let fail = fail("remove", shown);
    match rustix::fs::unlinkat(parent, name, AtFlags::empty()) {
        Err(Errno::ISDIR | Errno::PERM) => {}
        done => return done.map_err(fail),
    }
    let too = |what, max| BeneathError::TooLarge { path: shown.to_string(), what, max };
    let racing = || BeneathError::Racing(shown.to_string());
    let mut left = REMOVE_NAMES_MAX;
    let mut stack = vec![Removed::enter(parent, name).map_err(&fail)?];
    while let Some(level) = stack.last_mut() {
        let Some(child) = level.inside.pop() else {
            let Some(Removed { dir, name, .. }) = stack.pop() else { break };
            if let (Some(dir), Some(above)) = (dir, stack.last_mut()) {
                above.reopen(dir.as_fd()).map_err(&fail)?;
            }
            let above = match stack.last() {
                Some(above) => above.dir.as_ref().ok_or_else(racing)?.as_fd(),
                None => parent,
            };
            match rustix::fs::unlinkat(above, &*name, AtFlags::REMOVEDIR) {
                Ok(()) | Err(Errno::NOENT) => {}
                // Somebody makes files in it while it is removed.
                Err(Errno::NOTEMPTY) => return Err(racing()),
                Err(errno) => return Err(fail(errno)),
            }
            continue;
        };
        left = left.checked_sub(1).ok_or_else(|| too("more names", REMOVE_NAMES_MAX))?;
        let dir = level.dir.as_ref().ok_or_else(racing)?;
        match rustix::fs::unlinkat(dir, &*child, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(Errno::ISDIR | Errno::PERM) => {
                let entered = Removed::enter(dir.as_fd(), &child).map_err(&fail)?;
                stack.push(entered);
                if let Some(far) = stack.len().checked_sub(OPEN_LEVELS_MAX + 1) {
                    stack[far].dir = None;
                }
            }
            Err(errno) => return Err(fail(errno)),
        }
    }
    Ok(())
}

/// A directory that is being removed.
struct Removed {
    /// Closed while what is removed lies deep below it.
    dir: Option<OwnedFd>,
    id: (u64, u64),
    name: CString,
    /// The names in it that are still to go.
    inside: Vec<CString>,
}

impl Removed {
    fn enter(dir: BorrowedFd<'_>, name: &CStr) -> Result<Self, Errno> {
        let fd = enter(dir, name)?;
        let stat = rustix::fs::fstat(&fd)?;
        let inside = names(fd.as_fd(), usize::MAX - 1)?;
        Ok(Self { dir: Some(fd), id: (stat.st_dev, stat.st_ino), name: name.to_owned(), inside })
    }

    /// Opens it again from a directory in it, which nobody may have moved elsewhere.
    fn reopen(&mut self, inside: BorrowedFd<'_>) -> Result<(), Errno> {
        if self.dir.is_none() {
            self.dir = Some(above(inside, self.id)?);
        }
        Ok(())
    }
}

/// The directory above an open one, if it is the one that it was.
fn above(dir: BorrowedFd<'_>, id: (u64, u64)) -> Result<OwnedFd, Errno> {
    let above = rustix::fs::openat(dir, c"..", OPEN_DIR, Mode::empty())?;
    let stat = rustix::fs::fstat(&above)?;
    if (stat.st_dev, stat.st_ino) == id { Ok(above) } else { Err(Errno::BUSY) }
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

/// Copies the directory `from` to `to`, where nothing may be: all of it appears there at once. Files get their owner,
/// mode and times; several names of one file become several files.
pub(crate) fn copy_dir(root: BorrowedFd<'_>, from: &TreePath, to: &TreePath) -> Result<(), BeneathError> {
    let fail = fail("copy", from);
    let source = super::open(root, Some(from), OFlags::RDONLY | OFlags::DIRECTORY).map_err(&fail)?;
    let mut staged = Staged::dir(root, to)?;
    let copied = staged.open_dir().and_then(|target| copy_inside(source, target)).and_then(|()| {
        // Only where nothing is: what came there meanwhile is somebody's.
        staged.restore(to)
    });
    if let Err(errno) = copied {
        let _ = staged.discard(to);
        return Err(fail(errno));
    }
    Ok(())
}

/// A directory, its copy, and the names that are still to be copied.
type Level = (OwnedFd, OwnedFd, Vec<CString>);

fn copy_inside(source: OwnedFd, target: OwnedFd) -> Result<(), Errno> {
    let level = |source: OwnedFd, target: OwnedFd| -> Result<Level, Errno> {
        let inside = names(source.as_fd(), usize::MAX - 1)?;
        Ok((source, target, inside))
    };
    let mut stack = vec![level(source, target)?];
    loop {
        let depth = stack.len();
        let Some((from, to, inside)) = stack.last_mut() else { return Ok(()) };
        let Some(name) = inside.pop() else {
            look_like(from.as_fd(), to.as_fd())?;
            stack.pop();
            continue;
        };
        let at = rustix::fs::openat(&*from, &*name, LOOK, Mode::empty())?;
        let stat = rustix::fs::fstat(&at)?;
        match FileKind::of(stat.st_mode) {
            FileKind::Dir if depth >= DEPTH_MAX => return Err(Errno::NAMETOOLONG),
            FileKind::Dir => {
                let below = enter(from.as_fd(), &name)?;
                rustix::fs::mkdirat(&*to, &*name, Mode::RWXU)?;
                let made = rustix::fs::openat(&*to, &*name, OPEN_DIR, Mode::empty())?;
                stack.push(level(below, made)?);
            }
            FileKind::File => copy_file(at.as_fd(), to.as_fd(), &name, stat.st_size.cast_unsigned())?,
            FileKind::Symlink => {
                let link = rustix::fs::readlinkat(&at, "", Vec::new())?;
                rustix::fs::symlinkat(&*link, &*to, &*name)?;
                own_like(to.as_fd(), &name, &stat)?;
            }
            FileKind::Other => {
                let kind = FileType::from_raw_mode(stat.st_mode);
                rustix::fs::mknodat(
                    &*to,
                    &*name,
                    kind,
                    Mode::from_raw_mode(stat.st_mode & 0o7777),
                    stat.st_rdev,
                )?;
                own_like(to.as_fd(), &name, &stat)?;
            }
        }
    }
}

fn own_like(dir: BorrowedFd<'_>, name: &CStr, stat: &rustix::fs::Stat) -> Result<(), Errno> {
    let (uid, gid) = (Some(Uid::from_raw(stat.st_uid)), Some(Gid::from_raw(stat.st_gid)));
    rustix::fs::chownat(dir, name, uid, gid, AtFlags::SYMLINK_NOFOLLOW)
}

fn copy_file(at: BorrowedFd<'_>, to: BorrowedFd<'_>, name: &CStr, size: u64) -> Result<(), Errno> {
    let source = reopen(at, OFlags::RDONLY)?;
    let target = File::from(rustix::fs::openat(to, name, NEW, Mode::RUSR | Mode::WUSR)?);
    sys::reflink::copy(&source, &target, size)
        .map_err(|error| error.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error))?;
    look_like(source.as_fd(), target.as_fd())
}

fn look_like(from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> Result<(), Errno> {
    let stat = rustix::fs::fstat(from)?;
    rustix::fs::fchown(to, Some(Uid::from_raw(stat.st_uid)), Some(Gid::from_raw(stat.st_gid)))?;
    rustix::fs::fchmod(to, Mode::from_raw_mode(stat.st_mode & 0o7777))?;
    rustix::fs::futimens(to, &crate::engine::times(&stat))
}

/// What a directory takes of a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskUse {
    /// Space, of everything at least one block, and what it takes to record its path.
    pub bytes: u64,
    /// Files and directories, those with long paths for several.
    pub files: u64,
}

impl std::ops::AddAssign for DiskUse {
    fn add_assign(&mut self, other: Self) {
        self.bytes += other.bytes;
        self.files += other.files;
    }
}

impl DiskUse {
    /// Adds one name. Of a file with several names, `blocks` of 512 bytes are the first one's alone.
    pub(crate) fn add(&mut self, path_len: usize, blocks: Option<u64>) {
        let path_len = path_len as u64;
        self.files += 1 + path_len / PATH_BYTES_PER_FILE;
        self.bytes += path_len * PATH_COPIES;
        if let Some(blocks) = blocks {
            // An empty file takes an inode, of which a disk has as few.
            self.bytes += (blocks * 512).max(ENTRY_BYTES_MIN);
        }
    }
}

/// What a directory and all that is in it take. What changes meanwhile is
/// counted or not. However deep directories are nested, it needs few descriptors: those far above are opened again by `..`,
/// and if that leads elsewhere, because somebody moves them, it fails.
pub(crate) fn disk_use(dir: &Path) -> io::Result<DiskUse> {
    let mut linked = HashSet::new();
    let mut total = DiskUse::default();
    let top = rustix::fs::open(dir, OPEN_DIR, Mode::empty())?;
    let mut stack = vec![Measured::enter(top, 0, &mut linked, &mut total)?];
    while let Some(level) = stack.last_mut() {
        let Some(name) = level.below.pop() else {
            let left = stack.pop().and_then(|level| level.dir);
            if let (Some(left), Some(above)) = (left, stack.last_mut())
                && above.dir.is_none()
            {
                above.dir = Some(self::above(left.as_fd(), above.id)?);
            }
            continue;
        };
        let Some(dir) = &level.dir else { return Err(io::Error::from(io::ErrorKind::ResourceBusy)) };
        // What can't be entered is gone, or closed to its owner too, who then can't write in it.
        let Ok(fd) = rustix::fs::openat(dir, &*name, OPEN_DIR, Mode::empty()) else { continue };
        let path_len = level.path_len + name.as_bytes().len() + 1;
        stack.push(Measured::enter(fd, path_len, &mut linked, &mut total)?);
        if let Some(far) = stack.len().checked_sub(OPEN_LEVELS_MAX + 1).filter(|far| *far > 0) {
            stack[far].dir = None;
        }
    }
    Ok(total)
}

/// A directory that is being measured.
struct Measured {
    /// Closed while what is measured lies deep below it.
    dir: Option<OwnedFd>,
    id: (u64, u64),
    /// Of its path, with a slash at its end.
    path_len: usize,
    /// Directories in it that are still to be measured.
    below: Vec<CString>,
}

impl Measured {
    /// Adds up what is in one directory.
    fn enter(
        dir: OwnedFd,
        path_len: usize,
        linked: &mut HashSet<u64>,
        total: &mut DiskUse,
    ) -> Result<Self, Errno> {
        let stat = rustix::fs::fstat(&dir)?;
        let mut below = Vec::new();
        for name in names(dir.as_fd(), usize::MAX - 1)? {
            let Ok(stat) = rustix::fs::statat(&dir, &*name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
            let is_dir = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
            let counts = is_dir || stat.st_nlink < 2 || linked.insert(stat.st_ino);
            total.add(path_len + name.as_bytes().len(), counts.then_some(stat.st_blocks.cast_unsigned()));
            if is_dir {
                below.push(name);
            }
        }
        Ok(Self { dir: Some(dir), id: (stat.st_dev, stat.st_ino), path_len, below })
    }
}

/// Removes a directory of ours, which nobody else can reach, with all that is in it. However deep guests nested their
/// directories, it needs few descriptors and no stack: what lies too deep is moved up first.
pub(crate) fn remove_tree(dir: &Path) -> io::Result<()> {
    let top = enter_closed(rustix::fs::CWD, dir)?;
    let (mut moved, mut tries) = (0_u64, 0);
    loop {
        let inside = names(top.as_fd(), REMOVE_BATCH)?;
        if inside.is_empty() {
            break;
        }
        for name in inside {
            match remove_below(top.as_fd(), &name, &mut moved) {
                // A process of a runner that was killed just now may still be writing there.
                Err(Errno::NOTEMPTY) if tries < REMOVE_TRIES => tries += 1,
                done => done?,
            }
        }
    }
    std::fs::remove_dir(dir)
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
    let location = rustix::fs::openat(dir, name, LOOK | OFlags::DIRECTORY, Mode::empty())?;
    if rustix::fs::fstat(&location)?.st_mode & 0o700 != 0o700 {
        let own = format!("/proc/self/fd/{}", location.as_raw_fd());
        rustix::fs::chmod(&own, Mode::RWXU)?;
    }
    Ok(reopen(location.as_fd(), OFlags::RDONLY | OFlags::DIRECTORY)?.into())
}
