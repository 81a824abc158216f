//! The last walk over a base that is built: hashes what has no hash yet, hands everything to its owner, and says what
//! lies there. It walks our own directory, which nobody else can reach.

use std::collections::HashMap;
use std::fs::{File, Metadata, Permissions};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;

use proto::path::TreePath;
use rayon::prelude::*;
use rustix::fs::{AtFlags, CWD, Timespec, Timestamps};

use super::{Cancel, FreezeError};
use crate::entries::{Class, Entry, Kind, StatId};

/// Files up to this size are read in one piece.
const SMALL_BYTES: u64 = 1 << 20;
/// Read and hashed at a time of larger ones.
const CHUNK_BYTES: usize = 4 << 20;
/// A Git LFS pointer has this first line and at most [`LFS_BYTES_MAX`] bytes.
const LFS_LINE: &[u8] = b"version https://git-lfs.github.com/spec/v1\n";
const LFS_BYTES_MAX: usize = 1024;

/// How a base is sealed.
#[derive(Default)]
pub(super) struct How<'a> {
    /// Hashes that are known.
    pub(super) hashes: Option<&'a HashMap<TreePath, blake3::Hash>>,
    /// What directories shall look like.
    pub(super) dirs: Option<&'a HashMap<TreePath, DirLook>>,
    /// The modification time (seconds) of everything in the tree; `None` leaves it.
    pub(super) mtime_s: Option<i64>,
}

/// Mode and modification time of a source's directory.
#[derive(Clone, Copy)]
pub(super) struct DirLook {
    pub(super) mode: u32,
    pub(super) mtime: Timespec,
}

/// What a sealed base holds.
pub(super) struct Sealed {
    /// By path.
    pub(super) entries: Vec<(TreePath, Entry)>,
    /// Files of the tree that are Git LFS pointers.
    pub(super) lfs_pointers: u64,
}

struct Walk<'a> {
    root: &'a Path,
    how: &'a How<'a>,
    owner: Option<(u32, u32)>,
    cancel: &'a Cancel,
}

pub(super) fn seal(
    root: &Path,
    how: &How<'_>,
    owner: Option<(u32, u32)>,
    cancel: &Cancel,
) -> Result<Sealed, FreezeError> {
    let walk = Walk { root, how, owner, cancel };
    let found = super::on_threads(|| walk.all())?;
    let lfs_pointers = found.iter().filter(|found| found.lfs).count() as u64;
    let mut entries: Vec<_> = found.into_iter().map(|found| (found.path, found.entry)).collect();
    entries.sort_unstable_by(|a, b| a.0.cmp(&b.0));
    Ok(Sealed { entries, lfs_pointers })
}

struct Found {
    path: TreePath,
    entry: Entry,
    lfs: bool,
}

impl Walk<'_> {
    /// Level by level: a source may be nested deeper than a stack takes.
    fn all(&self) -> Result<Vec<Found>, FreezeError> {
        let (mut found, mut dirs) = (Vec::new(), Vec::new());
        let mut level: Vec<Option<TreePath>> = vec![None];
        while !level.is_empty() {
            let listed: Result<Vec<_>, FreezeError> =
                level.par_iter().map(|dir| self.dir(dir.as_ref())).collect();
            dirs.append(&mut level);
            for (mut leaves, below) in listed? {
                found.append(&mut leaves);
                level.extend(below.into_iter().map(Some));
            }
        }
        // What is finished may have lost the right to be written in.
        let finished: Result<Vec<_>, FreezeError> =
            dirs.into_par_iter().rev().map(|dir| self.finish(dir)).collect();
        found.extend(finished?.into_iter().flatten());
        Ok(found)
    }

    /// The files in a directory, and the directories in it.
    fn dir(&self, dir: Option<&TreePath>) -> Result<(Vec<Found>, Vec<TreePath>), FreezeError> {
        let names: Vec<_> = std::fs::read_dir(self.at(dir))
            .and_then(Iterator::collect::<io::Result<Vec<std::fs::DirEntry>>>)
            .map_err(FreezeError::Store)?;
        let mut below = Vec::new();
        let mut leaves = Vec::new();
        for entry in names {
            let name = entry.file_name();
            let path = match dir {
                Some(dir) => dir.join(name.as_bytes())?,
                None => TreePath::new(name.as_bytes())?,
            };
            let is_dir = entry.file_type().map_err(FreezeError::Store)?.is_dir();
            if is_dir { below.push(path) } else { leaves.push((entry.path(), path)) }
        }
        let found: Result<Vec<Found>, FreezeError> =
            leaves.into_par_iter().map(|(at, path)| self.leaf(&at, path)).collect();
        Ok((found?, below))
    }

    fn at(&self, dir: Option<&TreePath>) -> std::path::PathBuf {
        dir.map_or_else(|| self.root.to_owned(), |dir| self.root.join(dir.as_path()))
    }

    fn finish(&self, dir: Option<TreePath>) -> Result<Option<Found>, FreezeError> {
        let meta = self.finish_dir(&self.at(dir.as_ref()), dir.as_ref()).map_err(FreezeError::Store)?;
        Ok(dir.map(|path| {
            let entry = self.entry(&path, &meta, Kind::Dir, None);
            Found { path, entry, lfs: false }
        }))
    }

    fn finish_dir(&self, at: &Path, path: Option<&TreePath>) -> io::Result<Metadata> {
        let look = path.and_then(|path| self.how.dirs?.get(path));
        let mode = look.map_or(0o755, |look| (look.mode & 0o777) | 0o700);
        std::fs::set_permissions(at, Permissions::from_mode(mode))?;
        self.own(at)?;
        match (look, self.how.mtime_s) {
            (Some(look), _) => touch(at, look.mtime)?,
            (None, Some(seconds)) => touch(at, Timespec { tv_sec: seconds, tv_nsec: 0 })?,
            (None, None) => {}
        }
        std::fs::symlink_metadata(at)
    }

    fn leaf(&self, at: &Path, path: TreePath) -> Result<Found, FreezeError> {
        let one = || -> io::Result<Found> {
            self.cancel.check()?;
            self.own(at)?;
            let class = class(&path);
            if let (Class::Tree, Some(seconds)) = (class, self.how.mtime_s) {
                touch(at, Timespec { tv_sec: seconds, tv_nsec: 0 })?;
            }
            let known = self.how.hashes.and_then(|hashes| hashes.get(&path).copied());
            let meta = std::fs::symlink_metadata(at)?;
            if meta.is_symlink() {
                let target = std::fs::read_link(at)?;
                let hash = blake3::hash(target.as_os_str().as_bytes());
                return Ok(Found {
                    entry: self.entry(&path, &meta, Kind::Symlink, Some(hash)),
                    path,
                    lfs: false,
                });
            }
            let (hash, lfs) = match known {
                Some(hash) => (hash, false),
                None => hash_file(&File::open(at)?, meta.len(), self.cancel)?,
            };
            let lfs = lfs && class == Class::Tree;
            Ok(Found { entry: self.entry(&path, &meta, Kind::File, Some(hash)), path, lfs })
        };
        one().map_err(FreezeError::Store)
    }

    fn own(&self, at: &Path) -> io::Result<()> {
        match self.owner {
            Some((uid, gid)) => std::os::unix::fs::lchown(at, Some(uid), Some(gid)),
            None => Ok(()),
        }
    }

    fn entry(&self, path: &TreePath, meta: &Metadata, kind: Kind, hash: Option<blake3::Hash>) -> Entry {
        let ns = |s: i64, ns: i64| s.saturating_mul(1_000_000_000).saturating_add(ns);
        Entry {
            kind,
            class: class(path),
            mode: meta.mode() & 0o7777,
            size: if kind == Kind::Dir { 0 } else { meta.len() },
            hash,
            kept: true,
            stat: StatId {
                ctime_ns: ns(meta.ctime(), meta.ctime_nsec()),
                mtime_ns: ns(meta.mtime(), meta.mtime_nsec()),
                ino: meta.ino(),
            },
        }
    }
}

/// Everything in a base belongs to the tree, also what git would ignore, except the repository itself.
fn class(path: &TreePath) -> Class {
    if path.components().next() == Some(b".git") { Class::Git } else { Class::Tree }
}

pub(super) fn touch(at: &Path, mtime: Timespec) -> io::Result<()> {
    let times = Timestamps { last_access: mtime, last_modification: mtime };
    Ok(rustix::fs::utimensat(CWD, at, &times, AtFlags::SYMLINK_NOFOLLOW)?)
}

/// The hash of a file of ours, and whether it is a Git LFS pointer. Holes are not read.
pub(super) fn hash_file(file: &File, size: u64, cancel: &Cancel) -> io::Result<(blake3::Hash, bool)> {
    if size > SMALL_BYTES {
        return Ok((hash_large(file, size, cancel)?, false));
    }
    let mut content = Vec::with_capacity(usize::try_from(size).unwrap_or_default() + 1);
    (&*file).read_to_end(&mut content)?;
    Ok((blake3::hash(&content), is_lfs_pointer(&content)))
}

pub(super) fn is_lfs_pointer(content: &[u8]) -> bool {
    content.len() <= LFS_BYTES_MAX && content.starts_with(LFS_LINE)
}

fn hash_large(file: &File, size: u64, cancel: &Cancel) -> io::Result<blake3::Hash> {
    static ZEROS: [u8; CHUNK_BYTES] = [0; CHUNK_BYTES];
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; CHUNK_BYTES];
    let mut at = 0;
    while at < size {
        let (data, hole) = sys::reflink::next_data(file, at, size)?;
        while at < data {
            cancel.check()?;
            let n = chunk(data - at);
            hasher.update_rayon(&ZEROS[..n]);
            at += n as u64;
        }
        while at < hole {
            cancel.check()?;
            let n = chunk(hole - at);
            file.read_exact_at(&mut buffer[..n], at)?;
            hasher.update_rayon(&buffer[..n]);
            at += n as u64;
        }
    }
    Ok(hasher.finalize())
}

fn chunk(left: u64) -> usize {
    usize::try_from(left).unwrap_or(usize::MAX).min(CHUNK_BYTES)
}

#[cfg(test)]
mod tests {
    use std::io::{Seek, Write};

    use super::*;

    #[test]
    fn a_large_file_is_not_hashed_to_its_end_when_that_is_cancelled() {
        let file = tempfile::tempfile().unwrap();
        // All of this would take many minutes.
        file.set_len(1 << 40).unwrap();
        let cancel = Cancel::default();
        cancel.cancel();
        hash_file(&file, 1 << 40, &cancel).unwrap_err();
    }

    #[test]
    fn a_file_with_holes_has_the_hash_of_its_bytes() {
        let mut file = tempfile::tempfile().unwrap();
        let mut bytes = vec![0; 9 << 20];
        bytes[5 << 20..(5 << 20) + 3].copy_from_slice(b"abc");
        file.seek(io::SeekFrom::Start(5 << 20)).unwrap();
        file.write_all(b"abc").unwrap();
        file.set_len(9 << 20).unwrap();
        assert_eq!(hash_file(&file, 9 << 20, &Cancel::default()).unwrap().0, blake3::hash(&bytes));
    }
}
