//! Kept content: one zstd file per BLAKE3 hash of the plain content, durable before it has that name. Until then it has the
//! name with `.new` at its end, which no start takes over.

use std::collections::{BTreeSet, HashSet};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rayon::prelude::*;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;

/// Level 1: capture must not slow the commands that it follows.
const ZSTD_LEVEL: i32 = 1;
/// Up to so many new blobs are synced one by one; more by syncing the file system once, which also writes whatever
/// else is dirty on it.
const SYNC_EACH_MAX: usize = 256;

/// The end of a name whose content is not yet durable.
const PENDING: &str = "new";

/// Content that can't be stored or given back.
#[derive(Debug, thiserror::Error)]
pub enum BlobError {
    /// The file system failed.
    #[error("can't {what} the blob {hash}")]
    Io {
        /// `store`, `read`, …
        what: &'static str,
        /// Which blob.
        hash: blake3::Hash,
        /// Why.
        source: io::Error,
    },
    /// New content can't be written; its hash is known only at its end.
    #[error("can't store a blob")]
    Store(#[source] io::Error),
}

impl BlobError {
    /// Whether the disk is full.
    pub(crate) fn is_full(&self) -> bool {
        let (BlobError::Io { source, .. } | BlobError::Store(source)) = self;
        source.kind() == io::ErrorKind::StorageFull
    }
}

/// The `blobs` directory.
pub(crate) struct Blobs {
    dir: PathBuf,
    next_tmp: AtomicU64,
    unsure: Mutex<Unsure>,
}

/// Blobs that are not just there.
#[derive(Default)]
struct Unsure {
    /// Stored with [`Sync::Later`] and not synced yet, by whichever scan: under their pending names.
    unsynced: HashSet<blake3::Hash>,
    /// What could not be synced and was not stored again: others may rely on it.
    lost: HashSet<blake3::Hash>,
}

impl Blobs {
    pub(crate) fn new(dir: PathBuf) -> Self {
        Self { dir, next_tmp: AtomicU64::new(0), unsure: Mutex::default() }
    }

    fn path(&self, hash: &blake3::Hash) -> PathBuf {
        let hex = hash.to_hex();
        self.dir.join(&hex[..2]).join(&hex[2..])
    }

    /// The name of content that is not yet durable.
    fn pending(&self, hash: &blake3::Hash) -> PathBuf {
        self.path(hash).with_extension(PENDING)
    }

    pub(crate) fn has(&self, hash: &blake3::Hash) -> bool {
        {
            let unsure = self.unsure();
            if unsure.lost.contains(hash) {
                return false;
            }
            if unsure.unsynced.contains(hash) {
                return true;
            }
        }
        // What is lost from here on, its name already given, [`Blobs::sync_all`] says to all who rely on it.
        self.path(hash).exists()
    }

    fn unsure(&self) -> MutexGuard<'_, Unsure> {
        self.unsure.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the names of blobs durable that an earlier runner gave and was killed before it could: no power cut may take
    /// what a row is about to rely on.
    pub(crate) fn settle(&self) -> io::Result<()> {
        Ok(rustix::fs::syncfs(File::open(&self.dir)?)?)
    }

    /// Removes what an earlier runner began to store. Reads every directory of blobs, so only after a runner that did not end in
    /// order: what one leaves that did is stored anew before it is relied on.
    pub(crate) fn sweep(&self) -> io::Result<()> {
        let begun = |name: &std::ffi::OsStr| {
            let path = Path::new(name);
            path.extension().is_some_and(|end| end == PENDING) || name.as_encoded_bytes().starts_with(b"tmp-")
        };
        for entry in std::fs::read_dir(&self.dir)? {
            let entry = entry?;
            if begun(&entry.file_name()) {
                std::fs::remove_file(entry.path())?;
            } else if entry.file_type()?.is_dir() {
                for entry in std::fs::read_dir(entry.path())? {
                    let entry = entry?;
                    if begun(&entry.file_name()) {
                        std::fs::remove_file(entry.path())?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Stores bytes whose hash is known, unless it has them. Not durable until [`Blobs::sync_all`].
    pub(crate) fn store_known(&self, hash: &blake3::Hash, bytes: &[u8]) -> Result<(), BlobError> {
        if self.has(hash) {
            return Ok(());
        }
        let fail = |source| BlobError::Io { what: "store", hash: *hash, source };
        let packed = zstd::bulk::compress(bytes, ZSTD_LEVEL).map_err(fail)?;
        // In the directory where it stays: file systems lay files out by the directory that they are made in.
        let tmp = self.path(hash).with_file_name(self.tmp_name());
        let write = || match std::fs::write(&tmp, &packed) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                make_dir(tmp.parent().unwrap_or(&self.dir))?;
                std::fs::write(&tmp, &packed)
            }
            written => written,
        };
        write()
            .and_then(|()| self.publish(&tmp, hash, Sync::Later))
            .inspect_err(|_| drop(std::fs::remove_file(&tmp)))
            .map_err(fail)
    }

    /// Makes durable those of `hashes` that are not yet. What can't be is forgotten: it has to be stored again, since a
    /// second attempt to sync it would tell of a success that there was not.
    pub(crate) fn sync_all(&self, hashes: &[blake3::Hash]) -> Result<(), BlobError> {
        let (mut new, known): (Vec<_>, Vec<_>) = {
            let unsure = self.unsure();
            hashes.iter().copied().partition(|hash| unsure.unsynced.contains(hash))
        };
        new.sort_unstable_by_key(|hash| *hash.as_bytes());
        new.dedup();
        let synced = self.sync_new(&new);
        {
            // All of it in one go: who stores the same meanwhile does it before, and fails with this, or after.
            let mut unsure = self.unsure();
            for hash in &new {
                unsure.unsynced.remove(hash);
                if synced.is_err() {
                    unsure.lost.insert(*hash);
                    let _ = std::fs::remove_file(self.pending(hash));
                }
            }
        }
        synced?;
        // Another scan may have failed to sync what this one relied on.
        let unsure = self.unsure();
        match known.iter().find(|hash| unsure.lost.contains(hash)) {
            Some(hash) => {
                Err(BlobError::Io { what: "find", hash: *hash, source: io::ErrorKind::NotFound.into() })
            }
            None => Ok(()),
        }
    }

    fn sync_new(&self, new: &[blake3::Hash]) -> Result<(), BlobError> {
        let Some(first) = new.first().copied() else { return Ok(()) };
        let fail = |hash| move |source| BlobError::Io { what: "sync", hash, source };
        let many = new.len() > SYNC_EACH_MAX;
        if many {
            self.settle().map_err(fail(first))?;
        }
        new.par_iter().try_for_each(|hash| {
            let (pending, path) = (self.pending(hash), self.path(hash));
            let place = || -> io::Result<()> {
                if !many {
                    sync_path(&pending)?;
                }
                std::fs::rename(&pending, &path)
            };
            match place() {
                // Another scan, which stored the same, was faster.
                Err(error) if error.kind() == io::ErrorKind::NotFound && path.exists() => Ok(()),
                placed => placed.map_err(fail(*hash)),
            }
        })?;
        if many {
            return self.settle().map_err(fail(first));
        }
        let dirs: BTreeSet<PathBuf> =
            new.iter().filter_map(|hash| self.path(hash).parent().map(Path::to_owned)).collect();
        dirs.iter().chain([&self.dir]).try_for_each(|dir| sync_path(dir)).map_err(fail(first))
    }

    fn tmp_name(&self) -> String {
        format!("tmp-{}", self.next_tmp.fetch_add(1, Ordering::Relaxed))
    }

    /// Stores what `content` yields and returns its hash and size. On return it survives a power cut, unless
    /// `sync` is [`Sync::Later`]: then the caller calls [`Blobs::sync_all`] before it commits a row that names it.
    pub(crate) fn store(&self, content: &mut dyn Read, sync: Sync) -> Result<(blake3::Hash, u64), BlobError> {
        let tmp = self.dir.join(self.tmp_name());
        let file = File::create(&tmp).map_err(BlobError::Store)?;
        let written = write_blob(content, &file, sync);
        let (hash, size) =
            written.inspect_err(|_| drop(std::fs::remove_file(&tmp))).map_err(BlobError::Store)?;
        self.publish(&tmp, &hash, sync)
            .inspect_err(|_| drop(std::fs::remove_file(&tmp)))
            .map_err(|source| BlobError::Io { what: "store", hash, source })?;
        Ok((hash, size))
    }

    fn publish(&self, tmp: &Path, hash: &blake3::Hash, sync: Sync) -> io::Result<()> {
        let path = self.path(hash);
        let Some(parent) = path.parent() else { return Ok(()) };
        make_dir(parent)?;
        match sync {
            Sync::Now => {
                // Over the same content, if that is there already.
                std::fs::rename(tmp, &path)?;
                sync_path(parent)?;
                sync_path(&self.dir)?;
                self.unsure().lost.remove(hash);
                Ok(())
            }
            Sync::Later => {
                let mut unsure = self.unsure();
                if path.exists() && !unsure.lost.contains(hash) {
                    return std::fs::remove_file(tmp);
                }
                unsure.lost.remove(hash);
                if unsure.unsynced.insert(*hash) {
                    // Over what an earlier scan left, which nobody may have synced.
                    return std::fs::rename(tmp, self.pending(hash));
                }
                // Not over what another scan is syncing now.
                match renameat_with(CWD, tmp, CWD, self.pending(hash), RenameFlags::NOREPLACE) {
                    Err(Errno::EXIST) => std::fs::remove_file(tmp),
                    renamed => Ok(renamed?),
                }
            }
        }
    }

    /// Takes a blob that turned out to be damaged for one that is not there, so that the next who has the content stores it.
    pub(crate) fn doubt(&self, hash: &blake3::Hash) {
        let mut unsure = self.unsure();
        if !unsure.unsynced.contains(hash) {
            unsure.lost.insert(*hash);
        }
    }

    /// Opens a blob for reading plain content. The caller checks the hash.
    pub(crate) fn open(&self, hash: &blake3::Hash) -> Result<impl Read + use<>, BlobError> {
        let fail = |source| BlobError::Io { what: "read", hash: *hash, source };
        let file = File::open(self.path(hash)).or_else(|_| File::open(self.pending(hash))).map_err(fail)?;
        zstd::Decoder::new(file).map_err(fail)
    }
}

/// When stored content becomes durable.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sync {
    /// Before `store` returns.
    Now,
    /// The caller syncs many at once.
    Later,
}

/// Makes a directory; whether it was missing.
fn make_dir(path: &Path) -> io::Result<bool> {
    match std::fs::DirBuilder::new().mode(0o700).create(path) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        Err(error) => Err(error),
    }
}

fn sync_path(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

fn write_blob(content: &mut dyn Read, file: &File, sync: Sync) -> io::Result<(blake3::Hash, u64)> {
    let mut hasher = blake3::Hasher::new();
    let mut encoder = zstd::Encoder::new(file, ZSTD_LEVEL)?;
    let mut buffer = vec![0; 128 * 1024];
    let mut size = 0;
    loop {
        let n = content.read(&mut buffer)?;
        if n == 0 {
            break;
        }
        hasher.update(&buffer[..n]);
        encoder.write_all(&buffer[..n])?;
        size += n as u64;
    }
    encoder.finish()?;
    if sync == Sync::Now {
        file.sync_all()?;
    }
    Ok((hasher.finalize(), size))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_stored_is_given_back() {
        let dir = tempfile::tempdir().unwrap();
        let blobs = Blobs::new(dir.path().to_owned());
        let big = vec![7; 300_000];
        let (hash, size) = blobs.store(&mut &big[..], Sync::Later).unwrap();
        assert_eq!((hash, size), (blake3::hash(&big), 300_000));
        let small = blake3::hash(b"small");
        blobs.store_known(&small, b"small").unwrap();
        blobs.store(&mut &b"small"[..], Sync::Now).unwrap();
        assert_eq!(blobs.unsure().unsynced.len(), 2);
        assert!(!blobs.path(&hash).exists(), "not durable, so without its name");
        blobs.sync_all(&[hash, small, hash]).unwrap();
        assert!(blobs.unsure().unsynced.is_empty());
        let read = |hash| std::io::read_to_string(blobs.open(hash).unwrap()).unwrap().into_bytes();
        assert_eq!(read(&hash), big);
        assert_eq!(read(&small), b"small");
    }

    #[test]
    fn what_was_not_synced_is_not_taken_over() {
        let dir = tempfile::tempdir().unwrap();
        let blobs = Blobs::new(dir.path().to_owned());
        let (hash, kept) = (blake3::hash(b"lost"), blake3::hash(b"kept"));
        blobs.store_known(&hash, b"lost").unwrap();
        blobs.store_known(&kept, b"kept").unwrap();
        blobs.sync_all(&[kept]).unwrap();
        std::fs::write(dir.path().join("tmp-3"), "begun").unwrap();
        // The power goes: what was not synced has its name and nothing in it.
        std::fs::write(blobs.pending(&hash), "").unwrap();
        let next = Blobs::new(dir.path().to_owned());
        next.sweep().unwrap();
        assert_eq!((next.has(&hash), next.has(&kept)), (false, true));
        assert!(!blobs.pending(&hash).exists() && !dir.path().join("tmp-3").exists());
        next.store_known(&hash, b"lost").unwrap();
        next.sync_all(&[hash]).unwrap();
        assert_eq!(std::io::read_to_string(next.open(&hash).unwrap()).unwrap(), "lost");
    }

    #[test]
    fn what_an_earlier_runner_left_unsynced_is_written_anew() {
        let dir = tempfile::tempdir().unwrap();
        let hash = blake3::hash(b"x");
        Blobs::new(dir.path().to_owned()).store_known(&hash, b"x").unwrap();
        // That runner ended in order, so nothing is swept.
        let next = Blobs::new(dir.path().to_owned());
        std::fs::write(next.pending(&hash), "torn").unwrap();
        assert!(!next.has(&hash));
        next.store_known(&hash, b"x").unwrap();
        next.sync_all(&[hash]).unwrap();
        assert_eq!(std::io::read_to_string(next.open(&hash).unwrap()).unwrap(), "x");
    }

    #[test]
    fn what_can_not_be_synced_is_an_error_for_all_who_rely_on_it() {
        let dir = tempfile::tempdir().unwrap();
        let blobs = Blobs::new(dir.path().to_owned());
        let hash = blake3::hash(b"x");
        blobs.store_known(&hash, b"x").unwrap();
        // A second scan finds it stored.
        blobs.store_known(&hash, b"x").unwrap();
        std::fs::remove_file(blobs.pending(&hash)).unwrap();
        assert!(blobs.sync_all(&[hash]).is_err());
        assert!(blobs.sync_all(&[hash]).is_err());
        blobs.store_known(&hash, b"x").unwrap();
        blobs.sync_all(&[hash]).unwrap();
        // One that failed after it had its name is stored again, too.
        blobs.unsure().lost.insert(hash);
        assert!(!blobs.has(&hash) && blobs.sync_all(&[hash]).is_err());
        blobs.store_known(&hash, b"x").unwrap();
        blobs.sync_all(&[hash]).unwrap();
        assert!(blobs.has(&hash));
    }
}
