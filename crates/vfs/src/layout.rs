//! Where everything lies in the state directory. Makes the directories; knows nothing of their content.

use std::fs::{DirBuilder, File, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
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

/// The file that says whose directory this is, and what it says.
const MARKER: (&str, &str) = (
    "tendon.state",
    "This is a state directory of tendon, version 1. What tendon does not know in it, it removes.\n",
);

/// Whether it has a whole marker.
fn is_marked(root: &Path) -> bool {
    std::fs::read(root.join(MARKER.0)).is_ok_and(|text| text == MARKER.1.as_bytes())
}

/// It is ours by its marker, or by what only we have; a file that anybody could have says nothing.
fn foreign(root: &Path) -> io::Result<bool> {
    if is_marked(root) || (root.join("tendon.db").exists() && root.join("audit.key").exists()) {
        return Ok(false);
    }
    std::fs::read_dir(root)?.try_fold(false, |foreign, entry| {
        let name = entry?.file_name();
        // A marker that a killed start did not finish says as little as none.
        Ok(foreign || (name != "logs" && name != "lost+found" && name != MARKER.0))
    })
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

    /// Takes the directory over: nobody else's, closed to all others, and marked.
    pub(crate) fn claim(&self) -> io::Result<()> {
        let meta = self.root.symlink_metadata()?;
        if meta.uid() != rustix::process::geteuid().as_raw() {
            let why = format!("it belongs to the user {}", meta.uid());
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        }
        if meta.permissions().mode() & 0o077 != 0 {
            std::fs::set_permissions(&self.root, Permissions::from_mode(0o700))?;
        }
        if is_marked(&self.root) {
            return Ok(());
        }
        let marker = self.root.join(MARKER.0);
        let mut file = File::options().write(true).create(true).truncate(true).mode(0o600).open(marker)?;
        file.write_all(MARKER.1.as_bytes())?;
        file.sync_all()?;
        File::open(&self.root)?.sync_all()
    }

    /// Whether there has been a database: its key is made after it, and no file of a branch before it.
    pub(crate) fn is_used(&self) -> io::Result<bool> {
        if self.audit_key().exists() {
            return Ok(true);
        }
        for name in ["bases", "layers", "branches"] {
            if std::fs::read_dir(self.root.join(name))?.next().is_some() {
                return Ok(true);
            }
        }
        Ok(false)
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
    pub(crate) fn audit_head(&self) -> PathBuf {
        self.root.join("audit.head")
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
        check(&["lock"], true);
        check(&["lock", "tmp/mine"], true);
        check(&[MARKER.0], false);
        check(&[MARKER.0, "Cargo.toml"], true);
        check(&["audit.key", "tmp/x"], true);
        check(&["audit.key", "tendon.db", "tmp/x", "notes"], false);
        let dir = tempfile::tempdir().unwrap();
        Layout::create(dir.path()).unwrap().claim().unwrap();
        std::fs::write(dir.path().join("notes"), "").unwrap();
        assert!(!foreign(dir.path()).unwrap());
    }
}
