//! A disk that remembers the order of its writes, so that the power can be cut at any of them afterwards.
//!
//! A FUSE file system with one file, `disk`, is put under a loop device. Each write and each flush that the kernel sends
//! is logged. [`Replay`] then makes the image that a power cut would have left: all that had been flushed, and of the
//! writes after the last flush any subset, cut at 4 KiB, as a disk with a volatile cache may choose.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, UNIX_EPOCH};

use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyOpen,
    ReplyWrite, Request, WriteFlags,
};

use crate::random::Random;

/// The disk's unit: a write is torn at multiples of it.
const BLOCK: usize = 4096;
/// The most that the log may hold; a workload that writes more is a mistake.
const LOG_BYTES_MAX: usize = 3 << 30;
const DISK: INodeNo = INodeNo(2);
const NAME: &str = "disk";
/// How long the kernel may believe an answer: nothing here ever changes.
const TTL: Duration = Duration::from_secs(3600);

enum Event {
    Write { offset: usize, data: Vec<u8> },
    Flush,
}

struct State {
    content: Vec<u8>,
    log: Vec<Event>,
    log_bytes: usize,
}

/// The disk, mounted.
pub struct Disk {
    state: Arc<Mutex<State>>,
    file: PathBuf,
    session: BackgroundSession,
}

impl Disk {
    /// Mounts a disk of `size` bytes (zeros) at the directory `at`. Needs root.
    pub fn mount(at: &Path, size: usize) -> io::Result<Self> {
        let state = Arc::new(Mutex::new(State { content: vec![0; size], log: Vec::new(), log_bytes: 0 }));
        let mut config = Config::default();
        config.mount_options.push(MountOption::FSName("tendon-test-disk".to_owned()));
        let session = fuser::spawn_mount(Server { state: Arc::clone(&state), size }, at, &config)?;
        Ok(Self { state, file: at.join(NAME), session })
    }

    /// The file to put a loop device on.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// How many writes and flushes the disk has seen. What was acknowledged before this call must survive a power cut at
    /// the returned place or later.
    pub fn position(&self) -> usize {
        lock(&self.state).log.len()
    }

    /// Ends the disk and returns the log. A loop device that is still going away keeps it mounted, and keeps nothing else.
    pub fn into_replay(self) -> Replay {
        drop(self.session);
        let mut state = lock(&self.state);
        Replay { log: std::mem::take(&mut state.log), content: vec![0; state.content.len()], applied: 0 }
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes crash images from a disk's log. Points must be asked for in ascending order.
pub struct Replay {
    log: Vec<Event>,
    content: Vec<u8>,
    applied: usize,
}

impl Replay {
    /// How many writes and flushes there are.
    pub fn len(&self) -> usize {
        self.log.len()
    }

    /// Whether nothing was ever written.
    pub fn is_empty(&self) -> bool {
        self.log.is_empty()
    }

    /// Writes to `image` what a power cut after the first `point` events leaves. Returns how many blocks were lost.
    pub fn crash(&mut self, point: usize, random: &mut Random, image: &Path) -> io::Result<usize> {
        let flushed = self.log[..point].iter().rposition(|event| matches!(event, Event::Flush)).unwrap_or(0);
        assert!(flushed >= self.applied, "crash points ascend");
        for event in &self.log[self.applied..flushed] {
            if let Event::Write { offset, data } = event {
                self.content[*offset..*offset + data.len()].copy_from_slice(data);
            }
        }
        self.applied = flushed;
        let (cached, lost) = self.cached(flushed, point, random);
        self.write(&cached, image)?;
        Ok(lost)
    }

    /// What of the disk's cache had reached the medium: by block, the block's bytes.
    fn cached(&self, from: usize, to: usize, random: &mut Random) -> (BTreeMap<usize, Vec<u8>>, usize) {
        let mut cached: BTreeMap<usize, Vec<u8>> = BTreeMap::new();
        let mut lost = 0;
        for event in &self.log[from..to] {
            let Event::Write { offset, data } = event else { continue };
            let mut at = 0;
            while at < data.len() {
                let place = offset + at;
                let len = (BLOCK - place % BLOCK).min(data.len() - at);
                if random.coin() {
                    let start = place - place % BLOCK;
                    let block =
                        cached.entry(start).or_insert_with(|| self.content[start..start + BLOCK].to_vec());
                    block[place - start..place - start + len].copy_from_slice(&data[at..at + len]);
                } else {
                    lost += 1;
                }
                at += len;
            }
        }
        (cached, lost)
    }

    fn write(&self, cached: &BTreeMap<usize, Vec<u8>>, image: &Path) -> io::Result<()> {
        let zeros = [0; BLOCK];
        let file = File::create(image)?;
        file.set_len(self.content.len() as u64)?;
        for (n, block) in self.content.chunks(BLOCK).enumerate() {
            let start = n * BLOCK;
            let block = cached.get(&start).map_or(block, Vec::as_slice);
            if block != &zeros[..block.len()] {
                file.write_all_at(block, start as u64)?;
            }
        }
        Ok(())
    }
}

struct Server {
    state: Arc<Mutex<State>>,
    size: usize,
}

impl Server {
    fn attributes(&self, ino: INodeNo) -> FileAttr {
        let (kind, perm, size) = if ino == DISK {
            (FileType::RegularFile, 0o600, self.size as u64)
        } else {
            (FileType::Directory, 0o755, 0)
        };
        FileAttr {
            ino,
            size,
            blocks: size / 512,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind,
            perm,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            flags: 0,
            blksize: BLOCK as u32,
        }
    }
}

impl Filesystem for Server {
    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        if parent == INodeNo::ROOT && name == NAME {
            reply.entry(&TTL, &self.attributes(DISK), Generation(0));
        } else {
            reply.error(Errno::ENOENT);
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&TTL, &self.attributes(ino));
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        // Without a page cache of its own: a write that the loop device sends is a write that is logged.
        reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO);
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let start = (offset as usize).min(self.size);
        let end = (start + size as usize).min(self.size);
        reply.data(&lock(&self.state).content[start..end]);
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let offset = offset as usize;
        let mut state = lock(&self.state);
        if offset + data.len() > self.size || state.log_bytes + data.len() > LOG_BYTES_MAX {
            return reply.error(Errno::ENOSPC);
        }
        state.content[offset..offset + data.len()].copy_from_slice(data);
        state.log_bytes += data.len();
        state.log.push(Event::Write { offset, data: data.to_vec() });
        drop(state);
        reply.written(data.len() as u32);
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        // A descriptor was closed: that promises nothing about the medium.
        reply.ok();
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        lock(&self.state).log.push(Event::Flush);
        reply.ok();
    }
}
