//! Kept content: one zstd file per BLAKE3 hash of the plain content, durable before its name exists.

use std::collections::{BTreeSet, HashSet};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rayon::prelude::*;

/// Level 1: capture must not slow the commands that it follows.
const ZSTD_LEVEL: i32 = 1;
/// Up to so many new blobs are synced one by one; more by syncing the file system once, which also writes whatever
/// else is dirty on it.
const SYNC_EACH_MAX: usize = 256;

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
    /// Stored with [`Sync::Later`] and not synced yet, by whichever scan.
    unsynced: Mutex<HashSet<blake3::Hash>>,
}

impl Blobs {
    pub(crate) fn new(dir: PathBuf) -> Self {
        Self { dir, next_tmp: AtomicU64::new(0), unsynced: Mutex::default() }
    }

    fn path(&self, hash: &blake3::Hash) -> PathBuf {
        let hex = hash.to_hex();
        self.dir.join(&hex[..2]).join(&hex[2..])
    }

    pub(crate) fn has(&self, hash: &blake3::Hash) -> bool {
        self.path(hash).exists()
    }

    fn unsynced(&self) -> MutexGuard<'_, HashSet<blake3::Hash>> {
        self.unsynced.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes blobs of an earlier runner durable that was killed before it could: their names exist, and no power cut
    /// may take what a row is about to rely on.
    pub(crate) fn settle(&self) -> io::Result<()> {
        Ok(rustix::fs::syncfs(File::open(&self.dir)?)?)
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

    /// Makes durable those of `hashes` that are not yet.
    pub(crate) fn sync_all(&self, hashes: &[blake3::Hash]) -> Result<(), BlobError> {
        let mut new: Vec<_> = {
            let unsynced = self.unsynced();
            hashes.iter().filter(|hash| unsynced.contains(hash)).copied().collect()
        };
        new.sort_unstable_by_key(|hash| *hash.as_bytes());
        new.dedup();
        let Some(first) = new.first().copied() else { return Ok(()) };
        let fail = |hash| move |source| BlobError::Io { what: "sync", hash, source };
        if new.len() > SYNC_EACH_MAX {
            self.settle().map_err(fail(first))?;
        } else {
            new.par_iter().try_for_each(|hash| sync_path(&self.path(hash)).map_err(fail(*hash)))?;
            let dirs: BTreeSet<PathBuf> =
                new.iter().filter_map(|hash| self.path(hash).parent().map(Path::to_owned)).collect();
            dirs.iter().chain([&self.dir]).try_for_each(|dir| sync_path(dir)).map_err(fail(first))?;
        }
        let mut unsynced = self.unsynced();
        new.iter().for_each(|hash| {
            unsynced.remove(hash);
        });
        Ok(())
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
        if path.exists() {
            std::fs::remove_file(tmp)?;
            if sync == Sync::Now && self.unsynced().contains(hash) {
                sync_path(&path)?;
                sync_path(parent)?;
                return sync_path(&self.dir);
            }
            return Ok(());
        }
        // The directory may also be new and not yet synced by whoever stores later.
        if (make_dir(parent)? || !self.unsynced().is_empty()) && sync == Sync::Now {
            sync_path(&self.dir)?;
        }
        if sync == Sync::Later {
            // Before the name: whoever finds it must also find that it is not durable.
            self.unsynced().insert(*hash);
        }
        std::fs::rename(tmp, &path)?;
        if sync == Sync::Now { File::open(parent)?.sync_all() } else { Ok(()) }
    }

    /// Opens a blob for reading plain content. The caller checks the hash if it needs to: see [`Blobs::read`].
    pub(crate) fn open(&self, hash: &blake3::Hash) -> Result<impl Read + use<>, BlobError> {
        let fail = |source| BlobError::Io { what: "read", hash: *hash, source };
        let file = File::open(self.path(hash)).map_err(fail)?;
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
        assert_eq!(blobs.unsynced().len(), 2);
        blobs.sync_all(&[hash, small, hash]).unwrap();
        assert!(blobs.unsynced().is_empty());
        let read = |hash| std::io::read_to_string(blobs.open(hash).unwrap()).unwrap().into_bytes();
        assert_eq!(read(&hash), big);
        assert_eq!(read(&small), b"small");
    }
}
