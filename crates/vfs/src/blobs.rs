//! Kept content: one zstd file per BLAKE3 hash of the plain content, durable before its name exists.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Level 1: capture must not slow the commands that it follows.
const ZSTD_LEVEL: i32 = 1;

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
    /// The stored bytes don't have the hash that names them.
    #[error("the blob {0} is damaged")]
    Damaged(blake3::Hash),
}

impl BlobError {
    /// Whether the disk is full.
    pub(crate) fn is_full(&self) -> bool {
        matches!(self, BlobError::Io { source, .. } if source.kind() == io::ErrorKind::StorageFull)
    }
}

/// The `blobs` directory.
pub(crate) struct Blobs {
    dir: PathBuf,
    next_tmp: AtomicU64,
}

impl Blobs {
    pub(crate) fn new(dir: PathBuf) -> Self {
        Self { dir, next_tmp: AtomicU64::new(0) }
    }

    fn path(&self, hash: &blake3::Hash) -> PathBuf {
        let hex = hash.to_hex();
        self.dir.join(&hex[..2]).join(&hex[2..])
    }

    pub(crate) fn has(&self, hash: &blake3::Hash) -> bool {
        self.path(hash).exists()
    }

    /// Stores what `content` yields and returns its hash and size. On return it survives a power cut, unless
    /// `sync` is [`Sync::Later`]: then the caller calls [`Blobs::sync_all`] before it commits a row that names it.
    pub(crate) fn store(&self, content: &mut dyn Read, sync: Sync) -> Result<(blake3::Hash, u64), BlobError> {
        let zero = blake3::Hash::from_bytes([0; 32]);
        let fail = |what, hash| move |source| BlobError::Io { what, hash, source };
        let tmp = self.dir.join(format!("tmp-{}", self.next_tmp.fetch_add(1, Ordering::Relaxed)));
        let file = File::create(&tmp).map_err(fail("store", zero))?;
        let written = write_blob(content, &file, sync);
        let (hash, size) =
            written.inspect_err(|_| drop(std::fs::remove_file(&tmp))).map_err(fail("store", zero))?;
        self.publish(&tmp, &hash, sync)
            .inspect_err(|_| drop(std::fs::remove_file(&tmp)))
            .map_err(fail("store", hash))?;
        Ok((hash, size))
    }

    fn publish(&self, tmp: &Path, hash: &blake3::Hash, sync: Sync) -> io::Result<()> {
        let path = self.path(hash);
        let Some(parent) = path.parent() else { return Ok(()) };
        if path.exists() {
            return std::fs::remove_file(tmp);
        }
        match std::fs::DirBuilder::new().mode(0o700).create(parent) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            Ok(()) if sync == Sync::Now => File::open(&self.dir)?.sync_all()?,
            _ => {}
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

    /// The whole content of a blob, checked against its hash.
    pub(crate) fn read(&self, hash: &blake3::Hash) -> Result<Vec<u8>, BlobError> {
        let mut out = Vec::new();
        let fail = |source| BlobError::Io { what: "read", hash: *hash, source };
        self.open(hash)?.read_to_end(&mut out).map_err(fail)?;
        if blake3::hash(&out) == *hash { Ok(out) } else { Err(BlobError::Damaged(*hash)) }
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
