//! Where the bytes of an entry are: a blob, the base's tree, or the layer that holds the file.

use std::cell::OnceCell;
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use proto::error::{Code, Coded};
use proto::ids::{BranchId, LayerId};
use proto::path::TreePath;
use rusqlite::Connection;

use crate::beneath::{LOOK, READ};
use crate::blobs::BlobError;
use crate::db::DbError;
use crate::entries::{self, Entry, Kind};
use crate::store::Store;
use crate::walk::open_beneath;

/// Content that can't be had.
#[derive(Debug, thiserror::Error)]
pub enum ContentError {
    /// It was not kept, or is gone.
    #[error("the content of {path} was not kept")]
    NotKept {
        /// Which file.
        path: TreePath,
    },
    /// What lies there is not what the entry says.
    #[error("the content of {path} is not what was recorded")]
    Differs {
        /// Which file.
        path: TreePath,
    },
    /// It can't be read.
    #[error("can't read the content of {path}")]
    Io {
        /// Which file.
        path: TreePath,
        /// Why.
        source: io::Error,
    },
    /// Its blob can't be read.
    #[error("can't read the content of {path}")]
    Blob {
        /// Which file.
        path: TreePath,
        /// Why.
        source: BlobError,
    },
    /// The database failed.
    #[error("can't find the content")]
    Db(#[from] DbError),
}

impl ContentError {
    /// Whether it is this file's content that is not to be had, and not the host that fails.
    pub(crate) fn is_of_file(&self) -> bool {
        match self {
            ContentError::NotKept { .. } | ContentError::Differs { .. } | ContentError::Blob { .. } => true,
            ContentError::Io { .. } | ContentError::Db(_) => false,
        }
    }
}

impl Coded for ContentError {
    fn code(&self) -> Code {
        match self {
            ContentError::NotKept { .. } => Code::NotFound,
            ContentError::Differs { .. } | ContentError::Blob { .. } => Code::StateBad,
            ContentError::Io { .. } => Code::HostBroken,
            ContentError::Db(error) => error.code(),
        }
    }
    fn hint(&self) -> Option<String> {
        match self {
            ContentError::NotKept { .. } => {
                Some("content of ignored files and of files above 256 MiB is recorded by hash only".into())
            }
            ContentError::Differs { .. }
            | ContentError::Blob { .. }
            | ContentError::Io { .. }
            | ContentError::Db(_) => None,
        }
    }
}

/// Content and its expected digest, which is checked when the end is reached.
pub struct Content {
    inner: Box<dyn Read + Send>,
    hasher: blake3::Hasher,
    expected: blake3::Hash,
    /// Whose blob is read, if it is one.
    store: Option<Store>,
}

impl Content {
    fn read_checked(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buffer)?;
        if n == 0 && !buffer.is_empty() && self.hasher.finalize() != self.expected {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the content is not what was recorded"));
        }
        self.hasher.update(&buffer[..n]);
        Ok(n)
    }
}

impl Read for Content {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.read_checked(buffer);
        if let (Err(_), Some(store)) = (&read, &self.store) {
            store.inner.blobs.doubt(&self.expected);
        }
        read
    }
}

/// Looks for content as seen from one chain.
pub(crate) struct Contents<'a> {
    pub(crate) store: &'a Store,
    pub(crate) conn: &'a Connection,
    /// The branch whose open layer is the top of `chain`.
    pub(crate) branch: Option<&'a BranchId>,
    /// Topmost layer first, the base's last.
    pub(crate) chain: &'a [LayerId],
    /// Where the base has which content, once that is asked for: a look for each file would read the whole list each time.
    in_base: OnceCell<HashMap<(blake3::Hash, Kind), TreePath>>,
}

impl<'a> Contents<'a> {
    pub(crate) fn new(
        store: &'a Store,
        conn: &'a Connection,
        branch: Option<&'a BranchId>,
        chain: &'a [LayerId],
    ) -> Self {
        Self { store, conn, branch, chain, in_base: OnceCell::new() }
    }
}

impl Contents<'_> {
    /// The content of `entry`, which was or is at `path`.
    pub(crate) fn open(&self, path: &TreePath, entry: &Entry) -> Result<Content, ContentError> {
        let not_kept = || ContentError::NotKept { path: path.clone() };
        let hash = entry.hash.ok_or_else(not_kept)?;
        let blobs = &self.store.inner.blobs;
        let content = |inner, store| Content { inner, hasher: blake3::Hasher::new(), expected: hash, store };
        let blob = blobs.has(&hash).then(|| blobs.open(&hash)).transpose();
        if let Ok(Some(blob)) = blob {
            return Ok(content(Box::new(blob), Some(self.store.clone())));
        }
        // Without a blob that can be read there may still be the file.
        if let Some((dir, at)) = self.find(path, entry, &hash)? {
            let file = open_in(&dir, &at, entry);
            return Ok(content(
                file.map_err(|source| ContentError::Io { path: path.clone(), source })?,
                None,
            ));
        }
        match blob {
            Err(source) => Err(ContentError::Blob { path: path.clone(), source }),
            Ok(_) => Err(not_kept()),
        }
    }

    /// All of the content.
    pub(crate) fn read(&self, path: &TreePath, entry: &Entry) -> Result<Vec<u8>, ContentError> {
        let mut out = Vec::new();
        match self.open(path, entry)?.read_to_end(&mut out) {
            Ok(_) => Ok(out),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                Err(ContentError::Differs { path: path.clone() })
            }
            Err(source) => Err(ContentError::Io { path: path.clone(), source }),
        }
    }

    /// A directory and a path in it that hold the content: at the same path first, then wherever the base has it.
    fn find(
        &self,
        path: &TreePath,
        entry: &Entry,
        hash: &blake3::Hash,
    ) -> Result<Option<(PathBuf, TreePath)>, DbError> {
        for layer in self.chain {
            let own = entries::get(self.conn, layer, path)?;
            if own.is_some_and(|own| own.hash == Some(*hash) && own.kind == entry.kind) {
                let dir = self.dir(layer);
                // A copied or linked file may lie in any of the layers that name it.
                let there = File::open(&dir).ok().and_then(|dir| open_beneath(dir.as_fd(), path, LOOK).ok());
                if there.is_some() {
                    return Ok(Some((dir, path.clone())));
                }
            }
        }
        let Some(base) = self.chain.last() else { return Ok(None) };
        if self.in_base.get().is_none() {
            let all = entries::of_layer(self.conn, base, None)?;
            let by_hash = all.into_iter().filter_map(|(path, entry)| Some(((entry.hash?, entry.kind), path)));
            let _ = self.in_base.set(by_hash.collect());
        }
        let at = self.in_base.get().and_then(|known| known.get(&(*hash, entry.kind)));
        Ok(at.map(|at| (self.store.inner.layout.base(base), at.clone())))
    }

    fn dir(&self, layer: &LayerId) -> PathBuf {
        let layout = &self.store.inner.layout;
        if self.chain.last() == Some(layer) {
            return layout.base(layer);
        }
        match self.branch {
            Some(branch) if self.chain.first() == Some(layer) => layer_dir(&layout.branch(branch)),
            Some(_) | None => layout.layer(layer),
        }
    }
}

/// The directory of a branch that holds its files.
pub(crate) fn layer_dir(branch: &Path) -> PathBuf {
    let upper = branch.join("upper");
    if upper.is_dir() { upper } else { branch.join("tree") }
}

fn open_in(dir: &Path, at: &TreePath, entry: &Entry) -> io::Result<Box<dyn Read + Send>> {
    let dir = File::open(dir)?;
    if entry.kind == Kind::Symlink {
        let link = open_beneath(dir.as_fd(), at, LOOK)?;
        let target = rustix::fs::readlinkat(&link, "", Vec::new())?.into_bytes();
        return Ok(Box::new(io::Cursor::new(target)));
    }
    let file = File::from(open_beneath(dir.as_fd(), at, READ)?);
    if !file.metadata()?.is_file() {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    Ok(Box::new(file.take(entry.size)))
}
