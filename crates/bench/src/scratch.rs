//! The directory that a run works in: one file system for ours and for the baseline, a fresh directory per sample.

use std::cell::Cell;
use std::path::{Path, PathBuf};

use crate::error::{Context, Result};

/// A directory of this run, removed when it ends. Nothing in it is removed earlier: ext4 is slow for a while where
/// thousands of files were just deleted.
pub(crate) struct Scratch {
    dir: tempfile::TempDir,
    next: Cell<u32>,
}

impl Scratch {
    /// Makes it below `parent`, which must be on the disk that is to be measured.
    pub(crate) fn new(parent: &Path) -> Result<Self> {
        let dir = tempfile::Builder::new()
            .prefix("tendon-bench-")
            .tempdir_in(parent)
            .context(|| format!("can't make a directory in {}", parent.display()))?;
        // Hands run as another user.
        use std::os::unix::fs::PermissionsExt as _;
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755))
            .context(|| format!("can't open {} to others", dir.path().display()))?;
        Ok(Self { dir, next: Cell::new(0) })
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    /// A path that nothing has yet.
    pub(crate) fn fresh(&self, label: &str) -> PathBuf {
        let n = self.next.get();
        self.next.set(n + 1);
        self.dir.path().join(format!("{n:04}-{label}"))
    }
}
