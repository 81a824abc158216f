//! The overlay engine: a branch is an upper directory over the layers below it, mounted by the kernel's overlayfs.

use std::fs::{DirBuilder, File, Permissions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;
use sys::mount::{Overlay, OverlayError, OverlayMarks};

use super::tree::{CopyOptions, copy_tree};
use super::{Engine, How, Mounted, Released};
use crate::walk::Marks;

/// See the module.
pub(crate) struct OverlayEngine {
    owner: Option<(u32, u32)>,
    marks: Marks,
    /// Where mounts are attached that the kernel can't handle detached.
    mounts: PathBuf,
    /// Whether the kernel wants all lower directories in one option string of mount(2).
    old_kernel: bool,
    released: Arc<Released>,
}

impl OverlayEngine {
    pub(crate) fn new(owner: Option<(u32, u32)>, mounts: PathBuf, released: Arc<Released>) -> Self {
        Self { owner, marks: crate::scan::marks(), mounts, old_kernel: false, released }
    }

    /// Mounts a small overlay in `tmp` and does with it what branches need. The error says what did not work.
    pub(crate) fn probe(&mut self, tmp: &Path) -> Result<(), String> {
        let dir = tmp.join("probe-overlay");
        let probed = self.probe_in(&dir);
        let _ = crate::base::remove_tree(&dir);
        probed
    }

    fn probe_in(&mut self, dir: &Path) -> Result<(), String> {
        let fail = |what: &'static str| move |error: io::Error| format!("{what}: {error}");
        std::fs::create_dir(dir).map_err(fail("can't make a directory"))?;
        // Two lowers, as many kernels take one in a way in which they don't take several.
        let lowers = [dir.join("l2"), dir.join("l1")];
        for lower in &lowers {
            std::fs::create_dir_all(lower.join("d")).map_err(fail("can't make a directory"))?;
        }
        std::fs::write(lowers[1].join("d/f"), "f").map_err(fail("can't write a file"))?;
        let branch = dir.join("branch");
        self.create(&branch, &lowers[1]).map_err(fail("can't make a directory"))?;
        let mounted = match self.mount(&branch, &lowers) {
            Err(_) if !self.old_kernel => {
                self.old_kernel = true;
                self.mount(&branch, &lowers).or_else(|_| {
                    self.old_kernel = false;
                    self.mount(&branch, &lowers)
                })
            }
            mounted => mounted,
        };
        let mounted = mounted.map_err(fail("can't mount an overlay"))?;
        let errno = |what: &'static str| move |errno: Errno| fail(what)(errno.into());
        // A merged directory that is removed and made again fails where whiteouts or attributes don't work.
        rustix::fs::unlinkat(mounted.fd(), "d/f", rustix::fs::AtFlags::empty())
            .map_err(errno("can't delete in an overlay"))?;
        rustix::fs::unlinkat(mounted.fd(), "d", rustix::fs::AtFlags::REMOVEDIR)
            .map_err(errno("can't delete a directory in an overlay"))?;
        rustix::fs::mkdirat(mounted.fd(), "d", Mode::from_raw_mode(0o755))
            .map_err(errno("can't make a directory again in an overlay"))?;
        mounted.mount_clone().map_err(fail("can't clone a mount"))?;
        Ok(())
    }

    pub(crate) fn mount_over(
        &self,
        lowers: &[PathBuf],
        upper: Option<(&Path, &Path)>,
    ) -> io::Result<Mounted> {
        let lowers = lowers.iter().map(|path| open_dir(path)).collect::<io::Result<Vec<_>>>()?;
        let upper =
            upper.map(|(upper, work)| Ok::<_, io::Error>((open_dir(upper)?, open_dir(work)?))).transpose()?;
        let overlay = Overlay {
            lowers: &lowers,
            upper: upper.as_ref().map(|(upper, work)| (upper.as_fd(), work.as_fd())),
            marks: match self.marks {
                Marks::Trusted => OverlayMarks::Trusted,
                Marks::User | Marks::None => OverlayMarks::User,
            },
        };
        let io_error = |error: OverlayError| io::Error::new(error.source.kind(), Mounting { error });
        let how = |attached| How::Overlay { mounts: self.mounts.clone(), attached: Mutex::new(attached) };
        if !self.old_kernel {
            let fd = overlay.mount().map_err(io_error)?;
            return Ok(Mounted::new(fd, how(None), &self.released));
        }
        let target = mount_point(&self.mounts)?;
        let mounted = overlay.mount_at(&target).map_err(io_error).and_then(|()| sys::mount::open(&target));
        match mounted {
            Ok(fd) => Ok(Mounted::new(fd, how(Some(target)), &self.released)),
            Err(error) => {
                unmount(&target);
                Err(error)
            }
        }
    }

    fn new_upper(&self, dir: &Path, like: Option<&Path>) -> io::Result<()> {
        let upper = dir.join("upper");
        let look = like.map(Path::symlink_metadata).transpose()?;
        DirBuilder::new().mode(0o700).create(&upper)?;
        let owner = look.as_ref().map_or(self.owner, |look| Some((look.uid(), look.gid())));
        if let Some((uid, gid)) = owner {
            std::os::unix::fs::chown(&upper, Some(uid), Some(gid))?;
        }
        let mode = look.map_or(0o755, |look| look.mode() & 0o7777);
        std::fs::set_permissions(&upper, Permissions::from_mode(mode))
    }
}

impl Engine for OverlayEngine {
    fn word(&self) -> &'static str {
        "overlay"
    }

    fn create(&self, dir: &Path, _base: &Path) -> io::Result<()> {
        let mut private = DirBuilder::new();
        private.mode(0o700);
        private.create(dir)?;
        private.create(dir.join("work"))?;
        self.new_upper(dir, None)
    }

    fn mount(&self, dir: &Path, lowers: &[PathBuf]) -> io::Result<Mounted> {
        self.mount_over(lowers, Some((&dir.join("upper"), &dir.join("work"))))
    }

    fn can_seal(&self) -> bool {
        true
    }

    fn seal(&self, dir: &Path, layer: &Path) -> io::Result<()> {
        std::fs::rename(dir.join("upper"), layer)?;
        self.new_upper(dir, Some(layer))?;
        // The row that says so is committed next: the names must not come later than it.
        sync_dir(layer.parent().unwrap_or(layer))?;
        sync_dir(dir)
    }

    fn unseal(&self, dir: &Path, layer: &Path) -> io::Result<()> {
        if !layer.try_exists()? {
            return Ok(());
        }
        match std::fs::remove_dir(dir.join("upper")) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            Ok(()) | Err(_) => {}
        }
        std::fs::rename(layer, dir.join("upper"))
    }

    fn copy_sealed(&self, dir: &Path, layer: &Path, child: &Path) -> io::Result<()> {
        copy_tree(&dir.join("upper"), layer, &CopyOptions { attributes: true, durable: true })?;
        self.create(child, layer)?;
        let look = layer.symlink_metadata()?;
        std::fs::set_permissions(child.join("upper"), Permissions::from_mode(look.mode() & 0o7777))
    }

    fn scanned(&self, dir: &Path) -> PathBuf {
        dir.join("upper")
    }
}

/// An overlay error as the source of an I/O error.
#[derive(Debug, thiserror::Error)]
#[error("{error}: {}", error.source)]
struct Mounting {
    error: OverlayError,
}

fn open_dir(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(CWD, path, flags, Mode::empty())?)
}

pub(crate) fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// A new directory to mount on. Those that a killed runner left are removed at start.
pub(super) fn mount_point(mounts: &Path) -> io::Result<PathBuf> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    match std::fs::create_dir(mounts) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        Ok(()) | Err(_) => {}
    }
    let target = mounts.join(NEXT.fetch_add(1, Ordering::Relaxed).to_string());
    std::fs::create_dir(&target)?;
    Ok(target)
}

pub(super) fn unmount(target: &Path) {
    // Not mounted is as good as unmounted; a directory that stays is removed at the next start.
    let _ = sys::mount::detach(target);
    let _ = std::fs::remove_dir(target);
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use testkit::{Need, have};

    use super::*;

    fn mounts() -> String {
        std::fs::read_to_string("/proc/self/mountinfo").unwrap()
    }

    #[test]
    fn older_kernels_get_their_mounts_attached() {
        if !have(Need::Root) {
            return;
        }
        testkit::user::private_mounts(
            "engine::overlay::tests::older_kernels_get_their_mounts_attached",
            || {
                let dir = testkit::temp_dir("old");
                let layers: Vec<_> =
                    (0..120).map(|n| dir.path().join(format!("layer-with-a-long-name-{n}"))).collect();
                for layer in &layers {
                    std::fs::create_dir(layer).unwrap();
                }
                std::fs::write(layers[119].join("file"), "below").unwrap();
                for old_kernel in [true, false] {
                    let mut engine = OverlayEngine::new(None, dir.path().join("mnt"), Arc::default());
                    engine.old_kernel = old_kernel;
                    let branch = dir.path().join(format!("branch-{old_kernel}"));
                    engine.create(&branch, &layers[119]).unwrap();
                    let mounted = engine.mount(&branch, &layers).unwrap();
                    assert_eq!(mounts().contains("tendon"), old_kernel);
                    let How::Overlay { mounts: at, attached } = &mounted.how else {
                        panic!("not an overlay")
                    };
                    let clone = mounted.clone_attached(at, attached).unwrap();
                    assert!(mounts().contains("tendon"));
                    let seen = format!("/proc/self/fd/{}", clone.as_raw_fd());
                    std::fs::write(format!("{seen}/new"), "above").unwrap();
                    let root = format!("/proc/self/fd/{}", mounted.fd().as_raw_fd());
                    assert_eq!(std::fs::read_to_string(format!("{root}/new")).unwrap(), "above");
                    assert_eq!(std::fs::read_to_string(format!("{root}/file")).unwrap(), "below");
                    drop((mounted, clone));
                    assert!(!mounts().contains("tendon"), "{}", mounts());
                    assert_eq!(std::fs::read_dir(dir.path().join("mnt")).unwrap().count(), 0);
                }
            },
        );
    }
}
