//! Copies a directory tree of ours with all that capture looks at: kinds, modes, owners, modification times, holes,
//! hardlinks, and where asked for the attributes and devices that overlays mark things with.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Mutex;

use proto::path::TreePath;
use rayon::prelude::*;
use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, OFlags, Timespec, Timestamps, Uid, XattrFlags};
use rustix::io::Errno;

use crate::beneath::READ;
use crate::hashing;
use crate::walk::{Marks, What, open_beneath, walk};

/// Longest attribute that is copied.
const ATTRIBUTE_BYTES_MAX: usize = 64 * 1024;
/// Attributes that tie a file to the inode that it was copied up from, or to its place: a copy has others.
const NOT_COPIED: &[&str] = &["overlay.origin", "overlay.impure", "overlay.uuid", "overlay.nlink"];

/// How a tree is copied.
pub(crate) struct CopyOptions {
    /// Extended attributes too.
    pub(crate) attributes: bool,
    /// The copy survives a power cut when the call returns.
    pub(crate) durable: bool,
}

/// Copies the directory `from`, which nothing changes meanwhile, to `to`, which does not exist.
pub(crate) fn copy_tree(from: &Path, to: &Path, options: &CopyOptions) -> io::Result<()> {
    let root = File::open(from)?;
    let walked = hashing::pool().install(|| walk(root.as_fd(), Marks::None))?;
    if let Some(unseen) = walked.unseen.first() {
        return Err(io::Error::new(io::ErrorKind::InvalidData, unseen.note.clone()));
    }
    let made = |dir: &Path| -> io::Result<OwnedFd> {
        rustix::fs::mkdirat(CWD, dir, Mode::from_raw_mode(0o700))?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(rustix::fs::openat(CWD, dir, flags, Mode::empty())?)
    };
    let target = made(to)?;
    let job = Job { from: root.as_fd(), to: target.as_fd(), options, linked: Mutex::default() };
    let (dirs, leaves): (Vec<_>, Vec<_>) =
        walked.seen.iter().partition(|(_, seen)| matches!(seen.what, What::Dir(_)));
    for (path, _) in &dirs {
        rustix::fs::mkdirat(job.to, path.as_path(), Mode::from_raw_mode(0o700))?;
    }
    hashing::pool()
        .install(|| leaves.par_iter().with_max_len(64).try_for_each(|(path, _)| job.leaf(path)))?;
    job.links()?;
    // Deepest first: what is made in a directory changes its times, and its mode may forbid to.
    for (path, _) in dirs.iter().rev() {
        let fd = open_beneath(job.from, path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC)?;
        let made = open_beneath(job.to, path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC)?;
        job.look_like(fd.as_fd(), made.as_fd())?;
    }
    job.look_like(job.from, job.to)?;
    if options.durable {
        rustix::fs::syncfs(&target)?;
    }
    Ok(())
}

struct Job<'a> {
    from: BorrowedFd<'a>,
    to: BorrowedFd<'a>,
    options: &'a CopyOptions,
    /// Paths of files with several names, each with its inode.
    linked: Mutex<Vec<(TreePath, u64)>>,
}

impl Job<'_> {
    fn leaf(&self, path: &TreePath) -> io::Result<()> {
        let stat = rustix::fs::statat(self.from, path.as_path(), AtFlags::SYMLINK_NOFOLLOW)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile if stat.st_nlink > 1 => {
                let mut linked = self.linked.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                linked.push((path.clone(), stat.st_ino));
                return Ok(());
            }
            FileType::RegularFile => return self.file(path),
            // It was something else when it was listed: nothing may change the tree meanwhile.
            FileType::Directory => return Err(io::Error::from(io::ErrorKind::IsADirectory)),
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(self.from, path.as_path(), Vec::new())?;
                rustix::fs::symlinkat(target.as_c_str(), self.to, path.as_path())?;
            }
            kind @ (FileType::Fifo
            | FileType::Socket
            | FileType::CharacterDevice
            | FileType::BlockDevice
            | FileType::Unknown) => {
                let mode = Mode::from_raw_mode(stat.st_mode & 0o7777);
                rustix::fs::mknodat(self.to, path.as_path(), kind, mode, stat.st_rdev)?;
                rustix::fs::chmodat(self.to, path.as_path(), mode, AtFlags::empty())?;
            }
        }
        self.own(path, &stat)?;
        let times = times(&stat);
        Ok(rustix::fs::utimensat(self.to, path.as_path(), &times, AtFlags::SYMLINK_NOFOLLOW)?)
    }

    fn file(&self, path: &TreePath) -> io::Result<()> {
        let source = File::from(open_beneath(self.from, path, READ)?);
        let stat = rustix::fs::fstat(&source)?;
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let target = rustix::fs::openat(self.to, path.as_path(), flags, Mode::from_raw_mode(0o600))?;
        let target = File::from(target);
        sys::reflink::copy(&source, &target, stat.st_size.cast_unsigned())?;
        self.look_like(source.as_fd(), target.as_fd())
    }

    /// Copies each file with several names once, and gives it the others.
    fn links(&self) -> io::Result<()> {
        let mut linked =
            std::mem::take(&mut *self.linked.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
        linked.sort();
        let mut first: HashMap<u64, TreePath> = HashMap::new();
        for (path, inode) in linked {
            let again = match first.get(&inode) {
                None => Err(Errno::NOENT),
                Some(other) => {
                    rustix::fs::linkat(self.to, other.as_path(), self.to, path.as_path(), AtFlags::empty())
                }
            };
            match again {
                Ok(()) => {}
                // The first, or one more than the file system allows.
                Err(Errno::NOENT | Errno::MLINK) => {
                    self.file(&path)?;
                    first.insert(inode, path);
                }
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    /// Owner, attributes, mode and times, in this order: each may change the next.
    fn look_like(&self, from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> io::Result<()> {
        let stat = rustix::fs::fstat(from)?;
        let made = rustix::fs::fstat(to)?;
        if (stat.st_uid, stat.st_gid) != (made.st_uid, made.st_gid) {
            rustix::fs::fchown(to, Some(Uid::from_raw(stat.st_uid)), Some(Gid::from_raw(stat.st_gid)))?;
        }
        if self.options.attributes {
            copy_attributes(from, to)?;
        }
        rustix::fs::fchmod(to, Mode::from_raw_mode(stat.st_mode & 0o7777))?;
        Ok(rustix::fs::futimens(to, &times(&stat))?)
    }

    fn own(&self, path: &TreePath, stat: &rustix::fs::Stat) -> io::Result<()> {
        let made = rustix::fs::statat(self.to, path.as_path(), AtFlags::SYMLINK_NOFOLLOW)?;
        if (stat.st_uid, stat.st_gid) != (made.st_uid, made.st_gid) {
            let (uid, gid) = (Uid::from_raw(stat.st_uid), Gid::from_raw(stat.st_gid));
            rustix::fs::chownat(self.to, path.as_path(), Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
        }
        Ok(())
    }
}

pub(crate) fn times(stat: &rustix::fs::Stat) -> Timestamps {
    let time = |tv_sec: i64, ns: u64| Timespec { tv_sec, tv_nsec: i64::try_from(ns).unwrap_or(0) };
    Timestamps {
        last_access: time(stat.st_atime, stat.st_atime_nsec),
        last_modification: time(stat.st_mtime, stat.st_mtime_nsec),
    }
}

pub(crate) fn copy_attributes(from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> io::Result<()> {
    let mut names = Vec::with_capacity(1024);
    match rustix::fs::flistxattr(from, rustix::buffer::spare_capacity(&mut names)) {
        Ok(0) => return Ok(()),
        Ok(_) => {}
        Err(Errno::RANGE) => {
            names.reserve(ATTRIBUTE_BYTES_MAX);
            rustix::fs::flistxattr(from, rustix::buffer::spare_capacity(&mut names))?;
        }
        Err(Errno::OPNOTSUPP) => return Ok(()),
        Err(errno) => return Err(errno.into()),
    }
    for name in names.split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        let text = String::from_utf8_lossy(name);
        let copied = text.starts_with("user.") || text.starts_with("trusted.overlay.");
        if !copied || NOT_COPIED.iter().any(|not| text.ends_with(not)) {
            continue;
        }
        let mut value = Vec::with_capacity(ATTRIBUTE_BYTES_MAX);
        rustix::fs::fgetxattr(from, name, rustix::buffer::spare_capacity(&mut value))?;
        rustix::fs::fsetxattr(to, name, &value, XattrFlags::empty())?;
    }
    Ok(())
}
