//! The tree hash: one digest for all that a branch would land, independent of time, owner and what git ignores.

use proto::path::TreePath;

use crate::entries::{Class, Entry, Kind};

/// Hashes the `tree` entries of a branch that are files or symlinks, fed in path order (bytewise). Each is hashed as
/// `MODE SP HASHHEX SP SIZE SP PATH NUL`, MODE one of `100644`, `100755`, `120000`.
#[derive(Default)]
pub struct TreeHasher {
    hasher: blake3::Hasher,
    last: Option<TreePath>,
}

impl TreeHasher {
    /// Adds the next entry; those that don't belong to the tree are passed over.
    ///
    /// # Panics
    /// If paths come out of order: a defect that would make two hashes of one tree differ.
    pub fn add(&mut self, path: &TreePath, entry: &Entry) {
        let mode = match (entry.class, entry.kind) {
            (Class::Tree, Kind::File) if entry.mode & 0o100 != 0 => "100755",
            (Class::Tree, Kind::File) => "100644",
            (Class::Tree, Kind::Symlink) => "120000",
            (Class::Tree | Class::Git | Class::Ignored, _) => return,
        };
        assert!(self.last.as_ref().is_none_or(|last| last < path), "tree entries out of order at {path}");
        let hash = entry.hash.map(|hash| hash.to_hex().to_string()).unwrap_or_default();
        self.hasher.update(format!("{mode} {hash} {} ", entry.size).as_bytes());
        self.hasher.update(path.as_bytes());
        self.hasher.update(&[0]);
        self.last = Some(path.clone());
    }

    /// The tree hash, as `blake3:` and hex.
    pub fn finish(&self) -> String {
        format!("blake3:{}", self.hasher.finalize().to_hex())
    }
}
