//! Lists a branch's own directory: an overlay's upper or a whole tree. Never follows a symlink, opens nothing but
//! directories, and takes whatever happens meanwhile as data.

use std::collections::HashSet;
use std::ffi::CStr;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use proto::path::TreePath;
use rayon::prelude::*;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, RawDir, ResolveFlags, Statx, StatxFlags};
use rustix::io::Errno;

use crate::beneath::{DiskUse, OPEN_DIR, READ};
use crate::entries::StatId;

/// Bytes of directory entries that one system call gives.
const DIR_BUFFER_BYTES: usize = 32 * 1024;
/// What could not be seen is listed up to here.
const UNSEEN_MAX: usize = 10_000;
/// Bytes of memory that one walk may take for what it saw: about eight million files.
const SEEN_BYTES_MAX: u64 = 2 << 30;

/// A directory that can't be listed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WalkError {
    /// It holds more than fits in memory.
    #[error("it holds more files than can be looked at: their paths and properties would take more than {} GiB of memory", SEEN_BYTES_MAX >> 30)]
    TooLarge,
    /// This host fails.
    #[error(transparent)]
    Os(#[from] Errno),
}

impl From<WalkError> for io::Error {
    fn from(error: WalkError) -> Self {
        match error {
            WalkError::TooLarge => io::Error::new(io::ErrorKind::FileTooLarge, error),
            WalkError::Os(errno) => errno.into(),
        }
    }
}

/// How the layer marks what it deletes, by the extended attributes of its overlay mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Marks {
    /// `trusted.overlay.*`: mounted by root.
    Trusted,
    /// `user.overlay.*`: mounted with `userxattr`.
    User,
    /// A plain tree: a device is a device.
    None,
}

impl Marks {
    fn name(self, what: &str) -> Option<String> {
        match self {
            Marks::Trusted => Some(format!("trusted.overlay.{what}")),
            Marks::User => Some(format!("user.overlay.{what}")),
            Marks::None => None,
        }
    }
}

/// Which directory of the layers below shows through a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Below {
    /// The one at the same path.
    Same,
    /// None: it is opaque, or lies in one that is.
    Nothing,
    /// Another one: it was renamed.
    Moved(TreePath),
}

/// What lies at a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum What {
    File,
    Dir(Below),
    Symlink,
    Other,
    Whiteout,
}

/// One path as it was seen.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) what: What,
    pub(crate) mode: u32,
    pub(crate) size: u64,
    pub(crate) stat: StatId,
}

/// All that was seen.
#[derive(Default)]
pub(crate) struct Walk {
    /// By path, bytewise.
    pub(crate) seen: Vec<(TreePath, Seen)>,
    /// What could not be looked at: nothing is known of what is there, or below it.
    pub(crate) closed: Vec<TreePath>,
    /// The same for people, and what has no path that can be recorded.
    pub(crate) unseen: Vec<Unseen>,
    /// What all of it takes of the disk.
    pub(crate) disk: DiskUse,
}

/// Something that could not be seen.
#[derive(Clone, Debug)]
pub(crate) struct Unseen {
    /// The nearest directory that has a path that can be recorded.
    pub(crate) dir: Option<TreePath>,
    pub(crate) note: String,
}

impl Walk {
    pub(crate) fn get(&self, path: &TreePath) -> Option<&Seen> {
        let at = self.seen.binary_search_by(|(other, _)| other.cmp(path)).ok()?;
        Some(&self.seen[at].1)
    }

    /// What was not seen is counted no further than people are told of it.
    fn note(&mut self, unseen: Unseen) {
        if self.unseen.len() < UNSEEN_MAX {
            self.unseen.push(unseen);
        }
    }
}

/// Lists everything below `root`, on the threads of the current pool.
pub(crate) fn walk(root: BorrowedFd<'_>, marks: Marks) -> Result<Walk, WalkError> {
    walk_within(root, marks, SEEN_BYTES_MAX)
}

fn walk_within(root: BorrowedFd<'_>, marks: Marks, bytes_max: u64) -> Result<Walk, WalkError> {
    let totals = Totals { memory_left: AtomicU64::new(bytes_max), linked: Mutex::default() };
    let mut out = Walk::default();
    let mut level = out.take(list(root, None, &Below::Same, marks, &totals)?);
    while !level.is_empty() {
        let listed: Vec<_> = level
            .into_par_iter()
            .with_min_len(16)
            .map(|dir| (list(root, Some(&dir.path), &dir.parent, marks, &totals), dir))
            .collect();
        level = Vec::new();
        for (listing, dir) in listed {
            match listing {
                Ok(listing) => {
                    out.seen[dir.at].1.what = What::Dir(listing.below.clone());
                    level.append(&mut out.take(listing));
                }
                // Gone or replaced since its parent was listed.
                Err(WalkError::Os(Errno::NOENT | Errno::NOTDIR | Errno::LOOP)) => {}
                Err(WalkError::Os(errno)) if !is_ours(errno) => {
                    let note = format!("can't list {}: {errno}", dir.path);
                    out.note(Unseen { dir: Some(dir.path.clone()), note });
                    out.closed.push(dir.path);
                }
                Err(error) => return Err(error),
            }
        }
    }
    out.seen.sort_by(|(a, _), (b, _)| a.cmp(b));
    out.closed.sort();
    Ok(out)
}

/// What the threads of one walk count together.
struct Totals {
    /// Bytes that it may still take.
    memory_left: AtomicU64,
    /// Files of several names that were seen.
    linked: Mutex<HashSet<u64>>,
}

impl Totals {
    fn take_memory(&self, path: &TreePath) -> Result<(), WalkError> {
        let bytes = (size_of::<(TreePath, Seen)>() + path.as_bytes().len()) as u64;
        let take = |left: u64| left.checked_sub(bytes);
        let taken = self.memory_left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
        taken.map(drop).map_err(|_| WalkError::TooLarge)
    }

    /// Whether a file is seen for the first time.
    fn is_first(&self, stat: &Statx) -> bool {
        let is_dir = FileType::from_raw_mode(u32::from(stat.stx_mode)) == FileType::Directory;
        let linked = || self.linked.lock().unwrap_or_else(PoisonError::into_inner);
        is_dir || stat.stx_nlink < 2 || linked().insert(stat.stx_ino)
    }
}

/// Whether an error is this host's and says nothing about the branch.
pub(crate) fn is_ours(errno: Errno) -> bool {
    matches!(errno, Errno::IO | Errno::NOMEM | Errno::MFILE | Errno::NFILE)
}

/// A directory that is still to be listed.
struct Pending {
    /// Its place in `seen`.
    at: usize,
    path: TreePath,
    /// What shows through its parent.
    parent: Below,
}

struct Listing {
    below: Below,
    seen: Vec<(TreePath, Seen)>,
    closed: Vec<TreePath>,
    unseen: Vec<Unseen>,
    disk: DiskUse,
}

impl Walk {
    /// Takes a listing and returns the directories that are to be listed next.
    fn take(&mut self, listing: Listing) -> Vec<Pending> {
        let mut dirs = Vec::new();
        for (path, seen) in listing.seen {
            if matches!(seen.what, What::Dir(_)) {
                let parent = listing.below.clone();
                dirs.push(Pending { at: self.seen.len(), path: path.clone(), parent });
            }
            self.seen.push((path, seen));
        }
        self.closed.extend(listing.closed);
        self.disk += listing.disk;
        listing.unseen.into_iter().for_each(|unseen| self.note(unseen));
        dirs
    }
}

fn list(
    root: BorrowedFd<'_>,
    path: Option<&TreePath>,
    parent: &Below,
    marks: Marks,
    totals: &Totals,
) -> Result<Listing, WalkError> {
    let fd = open_dir(root, path)?;
    let opaque = xattr(fd.as_fd(), marks.name("opaque").as_deref());
    let below = match path {
        None => Below::Same,
        Some(_) if opaque.as_deref() == Some(b"y") => Below::Nothing,
        Some(path) => below(path, parent, xattr(fd.as_fd(), marks.name("redirect").as_deref()), marks),
    };
    // A directory marked so may hold whiteouts that are plain files with a mark of their own.
    let marks = Marked { marks, files: opaque.as_deref() == Some(b"x") };
    let mut out =
        Listing { below, seen: Vec::new(), closed: Vec::new(), unseen: Vec::new(), disk: DiskUse::default() };
    let mut buffer = vec![MaybeUninit::uninit(); DIR_BUFFER_BYTES];
    let mut dir = RawDir::new(&fd, &mut buffer);
    while let Some(entry) = dir.next() {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if matches!(name, b"." | b"..") {
            continue;
        }
        let child = match path.map_or_else(|| TreePath::new(name), |path| path.join(name)) {
            Ok(child) => child,
            Err(error) => {
                let note = format!("passed over a name: {error}");
                out.unseen.push(Unseen { dir: path.cloned(), note });
                continue;
            }
        };
        totals.take_memory(&child)?;
        match look(fd.as_fd(), entry.file_name(), &marks) {
            Ok((seen, stat)) => {
                let blocks = totals.is_first(&stat).then_some(stat.stx_blocks);
                out.disk.add(child.as_bytes().len(), blocks);
                out.seen.push((child, seen));
            }
            Err(Errno::NOENT) => {}
            Err(errno) if is_ours(errno) => return Err(errno.into()),
            Err(errno) => {
                out.unseen
                    .push(Unseen { dir: path.cloned(), note: format!("can't look at {child}: {errno}") });
                out.closed.push(child);
            }
        }
    }
    Ok(out)
}

/// The marks that hold in one directory.
struct Marked {
    marks: Marks,
    /// Whether a whiteout may be an empty file with an attribute.
    files: bool,
}

fn look(dir: BorrowedFd<'_>, name: &CStr, marked: &Marked) -> Result<(Seen, Statx), Errno> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
    let stat = rustix::fs::statx(dir, name, flags, StatxFlags::BASIC_STATS)?;
    let whiteout = stat.stx_rdev_major == 0 && stat.stx_rdev_minor == 0 && marked.marks != Marks::None;
    let what = match FileType::from_raw_mode(u32::from(stat.stx_mode)) {
        FileType::RegularFile if marked.files && stat.stx_size == 0 && is_marked(dir, name, marked.marks) => {
            What::Whiteout
        }
        FileType::RegularFile => What::File,
        FileType::Symlink => What::Symlink,
        FileType::Directory => What::Dir(Below::Nothing),
        FileType::CharacterDevice if whiteout => What::Whiteout,
        FileType::CharacterDevice
        | FileType::BlockDevice
        | FileType::Fifo
        | FileType::Socket
        | FileType::Unknown => What::Other,
    };
    let sized = matches!(what, What::File | What::Symlink);
    let seen = Seen {
        what,
        mode: u32::from(stat.stx_mode) & 0o7777,
        size: if sized { stat.stx_size } else { 0 },
        stat: stat_id(&stat),
    };
    Ok((seen, stat))
}

/// What shows through a directory that is not opaque, by what shows through its parent and by its own redirect:
/// absolute from the root of the layers below, or another name in what shows through its parent.
fn below(path: &TreePath, parent: &Below, redirect: Option<Vec<u8>>, marks: Marks) -> Below {
    if marks == Marks::None {
        return Below::Nothing;
    }
    let name = redirect.as_deref().unwrap_or(path.file_name());
    let shown = match (name.strip_prefix(b"/"), parent) {
        (Some(absolute), _) => TreePath::new(absolute).ok(),
        (None, Below::Nothing) => None,
        (None, Below::Same) => path.parent().map_or_else(|| TreePath::new(name), |dir| dir.join(name)).ok(),
        (None, Below::Moved(dir)) => dir.join(name).ok(),
    };
    match shown {
        None => Below::Nothing,
        Some(shown) if shown == *path => Below::Same,
        Some(shown) => Below::Moved(shown),
    }
}

fn is_marked(dir: BorrowedFd<'_>, name: &CStr, marks: Marks) -> bool {
    let Ok(fd) = rustix::fs::openat(dir, name, READ, Mode::empty()) else { return false };
    xattr(fd.as_fd(), marks.name("whiteout").as_deref()).is_some()
}

fn open_dir(root: BorrowedFd<'_>, path: Option<&TreePath>) -> Result<OwnedFd, Errno> {
    match path {
        None => rustix::fs::openat(root, ".", OPEN_DIR, Mode::empty()),
        Some(path) => open_beneath(root, path, OPEN_DIR),
    }
}

/// Opens `path` below `root` through no symlink, no mount point and no magic link.
pub(crate) fn open_beneath(root: BorrowedFd<'_>, path: &TreePath, flags: OFlags) -> Result<OwnedFd, Errno> {
    open_beneath_mode(root, path, flags, Mode::empty())
}

/// As [`open_beneath`], of a file that is made if the flags say so, with `mode`.
pub(crate) fn open_beneath_mode(
    root: BorrowedFd<'_>,
    path: &TreePath,
    flags: OFlags,
    mode: Mode,
) -> Result<OwnedFd, Errno> {
    let resolve = ResolveFlags::BENEATH
        | ResolveFlags::NO_SYMLINKS
        | ResolveFlags::NO_MAGICLINKS
        | ResolveFlags::NO_XDEV;
    loop {
        match rustix::fs::openat2(root, path.as_path(), flags, mode, resolve) {
            // A rename elsewhere made the kernel doubt: it asks to try again.
            Err(Errno::AGAIN | Errno::INTR) => {}
            opened => return opened,
        }
    }
}

/// A file's identity, by `statx`.
pub(crate) fn stat_id(stat: &Statx) -> StatId {
    let ns = |time: rustix::fs::StatxTimestamp| {
        time.tv_sec.saturating_mul(1_000_000_000).saturating_add(i64::from(time.tv_nsec))
    };
    StatId { ctime_ns: ns(stat.stx_ctime), mtime_ns: ns(stat.stx_mtime), ino: stat.stx_ino }
}

fn xattr(fd: BorrowedFd<'_>, name: Option<&str>) -> Option<Vec<u8>> {
    let mut value = [0; proto::path::PATH_BYTES_MAX + 2];
    let len = rustix::fs::fgetxattr(fd, name?, &mut value[..]).ok()?;
    Some(value[..len].to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_would_take_too_much_memory_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let long = "n".repeat(200);
        for n in 0..100 {
            std::fs::write(dir.path().join(format!("{long}{n}")), "").unwrap();
        }
        let root = std::fs::File::open(dir.path()).unwrap();
        let within = |bytes| walk_within(root.as_fd(), Marks::None, bytes);
        assert_eq!(within(100_000).unwrap().seen.len(), 100);
        // Names count, too.
        assert!(matches!(within(20_000), Err(WalkError::TooLarge)));
    }

    #[test]
    fn a_walk_measures_as_the_watch_does() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::create_dir_all(at("d/e")).unwrap();
        std::fs::write(at("d/one"), vec![1; 300_000]).unwrap();
        std::fs::hard_link(at("d/one"), at("d/e/two")).unwrap();
        std::os::unix::fs::symlink("nowhere", at("link")).unwrap();
        std::fs::File::create(at(&format!("d/{}", "n".repeat(250)))).unwrap().set_len(1 << 30).unwrap();
        let root = std::fs::File::open(dir.path()).unwrap();
        let measured = crate::beneath::disk_use(dir.path()).unwrap();
        assert_eq!(walk(root.as_fd(), Marks::None).unwrap().disk, measured);
        assert!(measured.files == 6 && measured.bytes > 300_000, "{measured:?}");
    }
}
