//! Mounts for kernels before Linux 6.15, which neither clone a detached mount nor take one as a layer of an overlay: they
//! are attached in the runner's own mount namespace, below one mount in the state directory, which no hand gets a copy of.

use std::fs;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen,
};

use crate::limits::ANCHOR_BYTES_MAX;

/// Where mounts are attached. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Anchor(Option<Arc<Attached>>);

/// A mount that is attached as long as this lives.
#[derive(Debug)]
pub struct Attached(PathBuf);

impl Anchor {
    /// Finds out what the kernel needs. The place is shared with the branches' mounts.
    pub fn new(state_dir: &Path) -> io::Result<Self> {
        match sys::mount::clone(tmpfs(ANCHOR_BYTES_MAX)?.as_fd()) {
            Ok(_) => Ok(Anchor(None)),
            Err(_) => Anchor::below(state_dir),
        }
    }

    fn below(state_dir: &Path) -> io::Result<Self> {
        let dir = state_dir.join("mnt");
        fs::create_dir_all(&dir)?;
        let mount = tmpfs(ANCHOR_BYTES_MAX)?;
        sys::mount::attach(mount.as_fd(), &dir)?;
        Ok(Anchor(Some(Arc::new(Attached(dir)))))
    }

    /// The mount that nobody else is to have a copy of.
    pub fn place(&self) -> Option<&Path> {
        self.0.as_ref().map(|attached| attached.0.as_path())
    }

    /// Attaches a detached directory mount if the kernel needs that.
    pub fn attach(&self, mount: BorrowedFd<'_>) -> io::Result<Option<Attached>> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let Some(dir) = self.place() else { return Ok(None) };
        let target = dir.join(format!("hand-{}", NEXT.fetch_add(1, Ordering::Relaxed)));
        fs::create_dir(&target)?;
        let attached = Attached(target);
        sys::mount::attach(mount, &attached.0)?;
        Ok(Some(attached))
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        // Not mounted is as good as unmounted; a directory that stays is in memory, or removed at the next start.
        let _ = sys::mount::detach(&self.0);
        let _ = fs::remove_dir(&self.0);
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
    use std::ffi::CString;
    use std::fs::File;
    use std::io::Read as _;
    use std::os::fd::AsRawFd as _;
    use std::os::unix::ffi::OsStrExt as _;

    use sys::spawn::{Kind, Plan, Spawner};
    use testkit::{Need, have, user::private_mounts};

    use super::*;
    use crate::generated::Tmpfs;
    use crate::tier::mounts::{Owners, clone_fd};

    /// The lines of a table of mounts that are about this test.
    fn ours(mountinfo: &str) -> String {
        mountinfo.lines().filter(|line| line.contains("tendon-anchor")).collect()
    }

    fn mounts() -> String {
        ours(&fs::read_to_string("/proc/self/mountinfo").unwrap())
    }

    #[test]
    fn older_kernels_get_their_mounts_attached() {
        if !have(Need::Root) {
            return;
        }
        private_mounts("anchor::tests::older_kernels_get_their_mounts_attached", || {
            let dir = testkit::temp_dir("anchor");
            let below = dir.path().join("below");
            fs::create_dir(&below).unwrap();
            fs::write(below.join("file"), "below").unwrap();
            let anchor = Anchor::below(dir.path()).unwrap();
            let scratch = Tmpfs::new(1 << 20, &anchor).unwrap();
            let overlay = Owners::new(None, anchor.clone()).copy_on_write(&below, &scratch, "0").unwrap();
            let seen = format!("/proc/self/fd/{}/file", overlay.as_raw_fd());
            fs::write(&seen, "above").unwrap();
            assert_eq!(fs::read_to_string(below.join("file")).unwrap(), "below");
            let clone = clone_fd(scratch.fd().as_fd()).unwrap();
            assert_eq!(
                mounts().matches("mnt/hand-").count(),
                1,
                "the lower one is attached no longer than needed"
            );
            assert_eq!(seen_by_a_child(&anchor, &clone), "");
            drop((scratch, anchor));
            assert_eq!(mounts(), "");
            // What was cloned and mounted lives on.
            assert_eq!(fs::read_to_string(&seen).unwrap(), "above");
            let upper = format!("/proc/self/fd/{}/0/upper/file", clone.as_raw_fd());
            assert_eq!(fs::read_to_string(upper).unwrap(), "above");
        });
    }

    /// The mounts of a program that is spawned as hands are.
    fn seen_by_a_child(anchor: &Anchor, staged: &OwnedFd) -> String {
        let null = || OwnedFd::from(File::open("/dev/null").unwrap());
        let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let plan = Plan {
            argv: vec![c"/bin/cat".into(), c"/proc/self/mountinfo".into()],
            staged: vec![(staged.try_clone().unwrap(), Kind::Dir)],
            forgotten: anchor.place().map(|place| CString::new(place.as_os_str().as_bytes()).unwrap()),
            fds: vec![(0, null()), (1, write), (2, null())],
            ..Plan::default()
        };
        Spawner::new().spawn(plan).unwrap();
        let mut text = String::new();
        File::from(read).read_to_string(&mut text).unwrap();
        assert!(text.contains("/tmp/0"), "{text}");
        ours(&text)
    }
}
