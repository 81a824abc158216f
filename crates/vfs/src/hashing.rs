//! Reads changed files for capture: hashes them on a few threads and keeps the content that is to be kept. What
//! changes under the reading is read again, a bounded number of times.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use proto::ids::BranchId;
use proto::path::TreePath;
use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, StatxFlags};
use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};

use crate::beneath::{LOOK, READ};
use crate::blobs::{BlobError, Blobs, Sync};
use crate::entries::{Kind, StatId};
use crate::scan::ScanError;
use crate::walk::{is_ours, open_beneath, stat_id};

/// Content above this is recorded by hash and not kept.
pub(crate) const KEPT_BYTES_MAX: u64 = 256 * 1024 * 1024;
/// Capture's threads: the commands that run meanwhile need the other cores.
const THREADS: usize = 2;
/// Files up to this are read whole.
const WHOLE_BYTES_MAX: u64 = 4 * 1024 * 1024;
const BUFFER_BYTES: usize = 1024 * 1024;
/// How often a file is read while it goes on changing.
const TRIES: u32 = 3;

/// The threads that walk and hash, shared by all scans.
pub(crate) fn pool() -> &'static ThreadPool {
    static POOL: OnceLock<ThreadPool> = OnceLock::new();
    POOL.get_or_init(|| {
        let named = ThreadPoolBuilder::new().num_threads(THREADS).thread_name(|n| format!("capture-{n}"));
        #[expect(clippy::expect_used, reason = "a process that can't start two threads can do nothing else")]
        named.build().expect("capture's threads can be started")
    })
}

/// Nanoseconds of the clock that file systems take their timestamps from. A change that begins after this was read
/// gets a timestamp that is not below it.
pub(crate) fn file_clock_ns() -> i64 {
    let now = clock_gettime(ClockId::RealtimeCoarse);
    now.tv_sec.saturating_mul(1_000_000_000).saturating_add(now.tv_nsec)
}

/// A file or symlink to read.
pub(crate) struct Job {
    pub(crate) path: TreePath,
    /// The directory that `path` is below, if not the scanned one.
    pub(crate) root: Option<OwnedFd>,
    /// Whether content is kept.
    pub(crate) keep: bool,
    /// Content that need not be stored again: it is kept already.
    pub(crate) kept: Option<blake3::Hash>,
}

/// What was read.
pub(crate) struct Captured {
    pub(crate) kind: Kind,
    pub(crate) mode: u32,
    pub(crate) size: u64,
    /// `None` if it can't be read.
    pub(crate) hash: Option<blake3::Hash>,
    pub(crate) kept: bool,
    /// Zero if a later change might leave the same identity.
    pub(crate) stat: StatId,
    pub(crate) note: Option<String>,
}

/// Holes of files that one scan hashes: they take time and no disk space. A file with more of them can't be captured.
const HOLES_BYTES_MAX: u64 = 16 << 30;

/// Reads all jobs, in order; `None` for what is gone or is no longer a file or symlink.
pub(crate) fn read_all(
    root: BorrowedFd<'_>,
    blobs: &Blobs,
    jobs: &[Job],
) -> Result<Vec<Option<Captured>>, CaptureError> {
    let holes = AtomicU64::new(0);
    pool().install(|| {
        jobs.par_iter()
            .with_max_len(32)
            .map(|job| {
                let root = job.root.as_ref().map_or(root, AsFd::as_fd);
                match read_settled(root, blobs, job, &holes) {
                    Ok(read) => Ok(read),
                    Err(Failed::Store(error)) => Err(CaptureError::Store(error)),
                    Err(Failed::Read(error)) if ours(&error) => Err(CaptureError::Read(error)),
                    Err(Failed::Read(error)) => Ok(unreadable(root, &job.path, &error)),
                }
            })
            .collect()
    })
}

/// A capture that found out nothing.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CaptureError {
    /// Content can't be stored.
    #[error(transparent)]
    Store(BlobError),
    /// This host fails, whatever the file is.
    #[error("files can't be read")]
    Read(#[source] io::Error),
}

impl CaptureError {
    /// As an error of a scan of this branch.
    pub(crate) fn of(self, branch: &BranchId) -> ScanError {
        match self {
            CaptureError::Store(source) => ScanError::Blob { branch: branch.clone(), source },
            CaptureError::Read(source) => ScanError::Io { branch: branch.clone(), source },
        }
    }
}

fn ours(error: &io::Error) -> bool {
    error.raw_os_error().is_some_and(|raw| is_ours(Errno::from_raw_os_error(raw)))
}

enum Failed {
    /// The file can't be read: that is recorded.
    Read(io::Error),
    /// The content can't be stored: the capture fails.
    Store(BlobError),
}

impl From<Errno> for Failed {
    fn from(errno: Errno) -> Self {
        Failed::Read(errno.into())
    }
}

/// Reads until the file stood still meanwhile; what never does is given as it was last seen, with identity zero.
fn read_settled(
    root: BorrowedFd<'_>,
    blobs: &Blobs,
    job: &Job,
    holes: &AtomicU64,
) -> Result<Option<Captured>, Failed> {
    for left in (0..TRIES).rev() {
        let clock = file_clock_ns();
        let path = match open_beneath(root, &job.path, LOOK) {
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(None),
            opened => opened?,
        };
        let before = statx(path.as_fd())?;
        let mode = u32::from(before.stx_mode) & 0o7777;
        let mut out = Captured {
            kind: Kind::File,
            mode,
            size: before.stx_size,
            hash: None,
            kept: false,
            stat: StatId::default(),
            note: None,
        };
        let file_type = FileType::from_raw_mode(u32::from(before.stx_mode));
        if file_type == FileType::Symlink {
            let target = rustix::fs::readlinkat(&path, "", Vec::new())?.into_bytes();
            out.kind = Kind::Symlink;
            out.size = target.len() as u64;
            keep_bytes(blobs, job, &target, &mut out)?;
        } else if file_type == FileType::RegularFile {
            let hole = before.stx_size.saturating_sub(before.stx_blocks.saturating_mul(512));
            if hole > 0 && holes.fetch_add(hole, Ordering::Relaxed).saturating_add(hole) > HOLES_BYTES_MAX {
                let most = HOLES_BYTES_MAX >> 30;
                let why = format!("it is sparse, and a capture reads {most} GiB of holes at most");
                return Err(Failed::Read(io::Error::other(why)));
            }
            let file = open_file(root, job, path.as_fd())?;
            read_file(blobs, job, file, &mut out)?;
        } else {
            return Ok(None);
        }
        let after = statx(path.as_fd())?;
        let still = stat_id(&after) == stat_id(&before) && after.stx_size == before.stx_size;
        if still && stat_id(&before).ctime_ns < clock {
            out.stat = stat_id(&before);
        }
        if still || left == 0 {
            return Ok(Some(out));
        }
    }
    Ok(None)
}

/// Opens for reading what `path` stands for. A file that its owner has closed to itself is opened through a moment
/// of permission.
fn open_file(root: BorrowedFd<'_>, job: &Job, path: BorrowedFd<'_>) -> Result<File, Failed> {
    let opened = match open_beneath(root, &job.path, READ | OFlags::NOATIME) {
        // Not the owner.
        Err(Errno::PERM) => open_beneath(root, &job.path, READ),
        opened => opened,
    };
    let fd = match opened {
        Err(Errno::ACCESS) => {
            let mode = Mode::from_raw_mode(u32::from(statx(path)?.stx_mode) & 0o7777);
            let name = format!("/proc/self/fd/{}", rustix::fd::AsRawFd::as_raw_fd(&path));
            rustix::fs::chmod(&name, mode | Mode::RUSR)?;
            let opened = open_beneath(root, &job.path, READ);
            rustix::fs::chmod(&name, mode)?;
            opened?
        }
        opened => opened?,
    };
    // Replaced since: never read from anything but a regular file.
    let stat = statx(fd.as_fd())?;
    if FileType::from_raw_mode(u32::from(stat.stx_mode)) != FileType::RegularFile {
        return Err(Errno::AGAIN.into());
    }
    Ok(File::from(fd))
}

/// Hashes at most the size that the file had, so that a file that grows for ever ends.
fn read_file(blobs: &Blobs, job: &Job, file: File, out: &mut Captured) -> Result<(), Failed> {
    let size = out.size;
    let mut content = file.take(size);
    if size <= WHOLE_BYTES_MAX {
        let mut bytes = Vec::with_capacity(usize::try_from(size).unwrap_or(0) + 1);
        content.read_to_end(&mut bytes).map_err(Failed::Read)?;
        out.size = bytes.len() as u64;
        return keep_bytes(blobs, job, &bytes, out);
    }
    if job.keep && size <= KEPT_BYTES_MAX && job.kept.is_none() {
        let mut content = Watched { inner: content, failed: None };
        let stored = blobs.store(&mut content, Sync::Later);
        if let Some(error) = content.failed {
            return Err(Failed::Read(error));
        }
        let (hash, size) = stored.map_err(Failed::Store)?;
        (out.hash, out.size, out.kept) = (Some(hash), size, true);
        return Ok(());
    }
    let (hash, size) = hash_stream(&mut content).map_err(Failed::Read)?;
    (out.hash, out.size) = (Some(hash), size);
    if job.keep && size <= KEPT_BYTES_MAX {
        if job.kept == Some(hash) {
            out.kept = true;
            return Ok(());
        }
        let mut file = content.into_inner();
        io::Seek::rewind(&mut file).map_err(Failed::Read)?;
        let (stored, _) = blobs.store(&mut file.take(size), Sync::Later).map_err(Failed::Store)?;
        out.kept = stored == hash;
    }
    Ok(())
}

/// Tells a failure to read apart from one to store.
struct Watched<R> {
    inner: R,
    failed: Option<io::Error>,
}

impl<R: Read> Read for Watched<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.inner.read(buffer).inspect_err(|error| {
            self.failed =
                Some(error.raw_os_error().map_or(error.kind().into(), io::Error::from_raw_os_error));
        })
    }
}

fn keep_bytes(blobs: &Blobs, job: &Job, bytes: &[u8], out: &mut Captured) -> Result<(), Failed> {
    let hash = blake3::hash(bytes);
    out.hash = Some(hash);
    if job.keep {
        if job.kept != Some(hash) {
            blobs.store_known(&hash, bytes).map_err(Failed::Store)?;
        }
        out.kept = true;
    }
    Ok(())
}

/// The hash and size of what `content` yields.
pub(crate) fn hash_stream(content: &mut dyn Read) -> io::Result<(blake3::Hash, u64)> {
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut size = 0;
    loop {
        match content.read(&mut buffer) {
            Ok(0) => return Ok((hasher.finalize(), size)),
            Ok(n) => {
                hasher.update_rayon(&buffer[..n]);
                size += n as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// What is known of a file that can't be read.
fn unreadable(root: BorrowedFd<'_>, path: &TreePath, error: &io::Error) -> Option<Captured> {
    let fd = open_beneath(root, path, LOOK).ok()?;
    let stat = statx(fd.as_fd()).ok()?;
    let kind = match FileType::from_raw_mode(u32::from(stat.stx_mode)) {
        FileType::RegularFile => Kind::File,
        FileType::Symlink => Kind::Symlink,
        FileType::Directory
        | FileType::CharacterDevice
        | FileType::BlockDevice
        | FileType::Fifo
        | FileType::Socket
        | FileType::Unknown => return None,
    };
    Some(Captured {
        kind,
        mode: u32::from(stat.stx_mode) & 0o7777,
        size: stat.stx_size,
        hash: None,
        kept: false,
        stat: StatId::default(),
        note: Some(format!("can't read {path}: {error}")),
    })
}

fn statx(fd: BorrowedFd<'_>) -> Result<rustix::fs::Statx, Errno> {
    rustix::fs::statx(fd, "", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_that_the_next_write_could_repeat_is_not_kept() {
        let dir = tempfile::tempdir().unwrap();
        let blobs = Blobs::new(dir.path().to_owned());
        let file = dir.path().join("f");
        let root = File::open(dir.path()).unwrap();
        let mut young = 0;
        for n in 0..300_u32 {
            std::fs::write(&file, n.to_le_bytes()).unwrap();
            let path: TreePath = "f".parse().unwrap();
            let job = Job { path, root: None, keep: false, kept: None };
            let read = read_all(root.as_fd(), &blobs, &[job]).unwrap().remove(0).unwrap();
            assert_eq!(read.hash, Some(blake3::hash(&n.to_le_bytes())));
            let stat = stat_id(&statx(File::open(&file).unwrap().as_fd()).unwrap());
            // The clock has not passed the file's time even now: a write now could get the same time.
            if stat.ctime_ns >= file_clock_ns() {
                young += 1;
                assert_eq!(read.stat, StatId::default());
            }
        }
        assert!(young > 0, "the machine is too slow for this test to say anything");
        let job = Job { path: "f".parse().unwrap(), root: None, keep: false, kept: None };
        while stat_id(&statx(File::open(&file).unwrap().as_fd()).unwrap()).ctime_ns >= file_clock_ns() {
            std::thread::yield_now();
        }
        let read = read_all(root.as_fd(), &blobs, &[job]).unwrap().remove(0).unwrap();
        assert_ne!(read.stat, StatId::default(), "the identity of a file that is old enough is kept");
    }

    #[test]
    fn a_closed_file_is_read_and_a_missing_one_is_missing() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let blobs = Blobs::new(dir.path().to_owned());
        let root = File::open(dir.path()).unwrap();
        std::fs::write(dir.path().join("closed"), "c").unwrap();
        std::fs::set_permissions(dir.path().join("closed"), std::fs::Permissions::from_mode(0o000)).unwrap();
        let job = |path: &str, keep| Job { path: path.parse().unwrap(), root: None, keep, kept: None };
        let read = read_all(root.as_fd(), &blobs, &[job("closed", true)]).unwrap().remove(0).unwrap();
        assert_eq!((read.hash, read.mode, read.kept), (Some(blake3::hash(b"c")), 0, true));
        let jobs = [job("none", true), job("none/deep", true)];
        assert!(read_all(root.as_fd(), &blobs, &jobs).unwrap().iter().all(Option::is_none));
    }
}
