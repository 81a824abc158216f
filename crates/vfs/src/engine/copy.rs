//! The copy engine: a branch is a whole tree of its own, sharing blocks where the file system can. For hosts that
//! allow no mount.

use std::fs::{DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::tree::{CopyOptions, copy_tree};
use super::{Engine, How, Mounted, Released};

/// See the module. A sealed layer has no directory here: every branch holds all of its files.
pub(crate) struct CopyEngine {
    owner: Option<(u32, u32)>,
    released: Arc<Released>,
}

impl CopyEngine {
    pub(crate) fn new(owner: Option<(u32, u32)>, released: Arc<Released>) -> Self {
        Self { owner, released }
    }

    fn fill(&self, dir: &Path, from: &Path) -> io::Result<()> {
        DirBuilder::new().mode(0o700).create(dir)?;
        let tree = dir.join("tree");
        copy_tree(from, &tree, &CopyOptions { attributes: true, durable: false })?;
        if let Some((uid, gid)) = self.owner {
            std::os::unix::fs::chown(&tree, Some(uid), Some(gid))?;
        }
        // Later than every file of the copy: what changes from now on has a change time that is not before its own.
        File::create(dir.join("made")).map(drop)
    }
}

impl Engine for CopyEngine {
    fn word(&self) -> &'static str {
        "copy"
    }

    fn create(&self, dir: &Path, base: &Path) -> io::Result<()> {
        self.fill(dir, base)
    }

    fn mount(&self, dir: &Path, _lowers: &[PathBuf]) -> io::Result<Mounted> {
        let tree = File::open(dir.join("tree"))?;
        Ok(Mounted::new(tree.into(), How::Dir, &self.released))
    }

    fn can_seal(&self) -> bool {
        false
    }

    fn seal(&self, _dir: &Path, _layer: &Path) -> io::Result<()> {
        Err(io::Error::from(io::ErrorKind::Unsupported))
    }

    fn unseal(&self, _dir: &Path, _layer: &Path) -> io::Result<()> {
        Ok(())
    }

    fn copy_sealed(&self, dir: &Path, _layer: &Path, child: &Path) -> io::Result<()> {
        self.fill(child, &dir.join("tree"))
    }

    fn scanned(&self, dir: &Path) -> PathBuf {
        dir.join("tree")
    }
}
