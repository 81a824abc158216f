//! Where everything lies in the state directory. Makes the directories; knows nothing of their content.

use std::fs::{DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

use proto::ids::{BranchId, LayerId};

/// What lies in it from the start.
const DIRS: [&str; 8] = ["run", "blobs", "bases", "layers", "branches", "mirrors", "logs", "tmp"];

/// The paths of a state directory.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    root: PathBuf,
}

/// Whether a directory is somebody else's, so that [`crate::Store::open`] will refuse it. One that can't be read is not known to be.
pub fn is_foreign(dir: &Path) -> bool {
    foreign(dir).unwrap_or(false)
}

fn foreign(root: &Path) -> io::Result<bool> {
    let used =
        |name: &str| std::fs::metadata(root.join(name)).is_ok_and(|meta| meta.is_file() && meta.len() > 0);
    let locked = root.join("lock").is_file();
    if locked && (used("audit.key") || used("tendon.db")) {
        return Ok(false);
    }
    for entry in std::fs::read_dir(root)? {
        let name = entry?.file_name();
        // A first start that was killed has made no more than this.
        let begun =
            locked && name.to_str().is_some_and(|name| name == "lock" || name.starts_with("tendon.db"));
        let made = locked && DIRS.iter().any(|dir| name == *dir);
        let ours = begun || name == "logs" || name == "lost+found" || (made && is_empty(&root.join(name))?);
        if !ours {
            return Ok(true);
        }
    }
    Ok(false)
}

fn is_empty(dir: &Path) -> io::Result<bool> {
    Ok(dir.is_dir() && std::fs::read_dir(dir)?.next().is_none())
}

impl Layout {
    /// Makes the directory itself, if it is missing.
    pub(crate) fn create(root: &Path) -> io::Result<Self> {
        DirBuilder::new().recursive(true).mode(0o700).create(root)?;
        Ok(Self { root: root.canonicalize()? })
    }

    /// Whether somebody keeps something else here. What no row names is removed from a state directory, so none is made of
    /// a directory that is in use. The runner's log is opened before its store, and a file
    /// system of its own has a directory for what is found.
    pub(crate) fn is_foreign(&self) -> io::Result<bool> {
        foreign(&self.root)
    }

    /// Makes the directories that are missing. Nobody but the owner can read them.
    pub(crate) fn make_dirs(&self) -> io::Result<()> {
        for name in DIRS {
            let path = self.root.join(name);
            match DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    std::fs::set_permissions(&path, Permissions::from_mode(0o700))?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }
    pub(crate) fn lock(&self) -> PathBuf {
        self.root.join("lock")
    }
    pub(crate) fn db(&self) -> PathBuf {
        self.root.join("tendon.db")
    }
    pub(crate) fn audit_key(&self) -> PathBuf {
        self.root.join("audit.key")
    }
    pub(crate) fn blobs(&self) -> PathBuf {
        self.root.join("blobs")
    }
    pub(crate) fn tmp(&self) -> PathBuf {
        self.root.join("tmp")
    }
    /// Where mounts are attached that the kernel can't handle detached.
    pub(crate) fn mounts(&self) -> PathBuf {
        self.root.join("mnt")
    }
    pub(crate) fn layers(&self) -> PathBuf {
        self.root.join("layers")
    }
    pub(crate) fn branches(&self) -> PathBuf {
        self.root.join("branches")
    }
    pub(crate) fn mirrors(&self) -> PathBuf {
        self.root.join("mirrors")
    }
    pub(crate) fn logs(&self) -> PathBuf {
        self.root.join("logs")
    }
    /// A base's tree, by its layer.
    pub(crate) fn base(&self, layer: &LayerId) -> PathBuf {
        self.root.join("bases").join(layer.as_str())
    }
    /// A sealed layer's upper (overlay) or whole tree (copy).
    pub(crate) fn layer(&self, layer: &LayerId) -> PathBuf {
        self.root.join("layers").join(layer.as_str())
    }
    /// A branch's directory: `upper` and `work`, or `tree`.
    pub(crate) fn branch(&self, branch: &BranchId) -> PathBuf {
        self.root.join("branches").join(branch.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_in_use_is_foreign_and_a_start_that_was_killed_is_not() {
        let check = |entries: &[&str], want: bool| {
            let dir = tempfile::tempdir().unwrap();
            for entry in entries {
                let path = dir.path().join(entry.trim_end_matches('/'));
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                if entry.ends_with('/') {
                    std::fs::create_dir(path).unwrap();
                } else {
                    std::fs::write(path, "1").unwrap();
                }
            }
            assert_eq!(foreign(dir.path()).unwrap(), want, "{entries:?}");
        };
        check(&[], false);
        check(&["logs/tendond.log", "lost+found/"], false);
        check(&["notes"], true);
        check(&["tmp/"], true);
        check(&["lock"], false);
        check(&["lock", "run/", "tmp/", "bases/", "tendon.db-wal", "logs/x"], false);
        check(&["lock", "tmp/mine"], true);
        check(&["lock", "Cargo.toml"], true);
        check(&["lock", "bases"], true);
        check(&["lock/", "audit.key"], true);
        check(&["lock", "audit.key", "tmp/x", "notes", "bases/b/"], false);
        check(&["lock", "tendon.db", "bases/b/"], false);
    }
}
