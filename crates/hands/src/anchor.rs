//! Mounts for kernels before Linux 6.15, which neither clone a detached mount nor take one as a layer of an overlay: they
//! are attached in the runner's own mount namespace, below the state directory.

use std::fs;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen,
};

/// Where mounts are attached. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Anchor {
    /// `None`: the kernel handles detached mounts.
    dir: Option<PathBuf>,
}

/// A mount that is attached as long as this lives, where the kernel needs it.
#[derive(Debug)]
pub struct Attached(Option<PathBuf>);

impl Anchor {
    /// Finds out what the kernel needs. The place is shared with the branches' mounts, and what is left there is removed
    /// when the next runner starts.
    pub fn new(state_dir: &Path) -> io::Result<Self> {
        let detached = sys::mount::clone(tmpfs(4096)?.as_fd()).is_ok();
        Ok(if detached { Anchor { dir: None } } else { Anchor::below(state_dir) })
    }

    fn below(state_dir: &Path) -> Self {
        Anchor { dir: Some(state_dir.join("mnt")) }
    }

    /// Whether this kernel needs it.
    pub fn is_needed(&self) -> bool {
        self.dir.is_some()
    }

    /// Attaches a detached directory mount if the kernel needs that.
    pub fn attach(&self, mount: BorrowedFd<'_>) -> io::Result<Attached> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let Some(dir) = &self.dir else { return Ok(Attached(None)) };
        fs::create_dir_all(dir)?;
        let target = dir.join(format!("hand-{}", NEXT.fetch_add(1, Ordering::Relaxed)));
        fs::create_dir(&target)?;
        let attached = Attached(Some(target.clone()));
        sys::mount::attach(mount, &target)?;
        Ok(attached)
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        if let Some(target) = &self.0 {
            // Not mounted is as good as unmounted; a directory that stays is removed at the next start.
            let _ = sys::mount::detach(target);
            let _ = fs::remove_dir(target);
        }
    }
}

/// A detached tmpfs.
pub fn tmpfs(bytes_max: u64) -> io::Result<OwnedFd> {
    let fs = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(fs.as_fd(), "size", bytes_max.to_string())?;
    fsconfig_set_string(fs.as_fd(), "mode", "0755")?;
    fsconfig_create(fs.as_fd())?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    Ok(fsmount(fs.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)?)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;

    use testkit::{Need, have, user::private_mounts};

    use super::*;
    use crate::generated::Tmpfs;
    use crate::tier::mounts::{Owners, clone_fd};

    #[test]
    fn older_kernels_get_their_mounts_attached() {
        if !have(Need::Root) {
            return;
        }
        private_mounts("anchor::tests::older_kernels_get_their_mounts_attached", || {
            let mounts = || fs::read_to_string("/proc/self/mountinfo").unwrap();
            let dir = testkit::temp_dir("anchor");
            let below = dir.path().join("below");
            fs::create_dir(&below).unwrap();
            fs::write(below.join("file"), "below").unwrap();
            let anchor = Anchor::below(dir.path());
            let scratch = Tmpfs::new(1 << 20, &anchor).unwrap();
            assert!(mounts().contains("mnt/hand-"), "{}", mounts());
            let overlay = Owners::new(None, anchor).copy_on_write(&below, &scratch, "0").unwrap();
            let seen = format!("/proc/self/fd/{}/file", overlay.as_raw_fd());
            fs::write(&seen, "above").unwrap();
            assert_eq!(fs::read_to_string(below.join("file")).unwrap(), "below");
            let clone = clone_fd(scratch.fd().as_fd()).unwrap();
            assert_eq!(
                mounts().matches("mnt/hand-").count(),
                1,
                "the lower one is attached no longer than needed"
            );
            drop(scratch);
            assert!(!mounts().contains("mnt/hand-"), "{}", mounts());
            // What was cloned and mounted lives on.
            assert_eq!(fs::read_to_string(&seen).unwrap(), "above");
            let upper = format!("/proc/self/fd/{}/0/upper/file", clone.as_raw_fd());
            assert_eq!(fs::read_to_string(upper).unwrap(), "above");
            assert_eq!(fs::read_dir(dir.path().join("mnt")).unwrap().count(), 0);
        });
    }
}
