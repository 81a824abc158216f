//! Detached mounts for a hand: clones of host directories, and copies on write of them.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{MetadataExt as _, chown};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::{AtFlags, CWD};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, OpenTreeFlags, fsconfig_create, fsconfig_set_flag,
    fsconfig_set_string, fsmount, fsopen, open_tree,
};
use sys::idmap::{Attributes, set_attributes, swapping, user_namespace};
use sys::spawn::{Ids, Kind};

use crate::anchor::Anchor;
use crate::generated::Tmpfs;

/// Clones a mount, with what is mounted below, out of every mount table.
pub fn clone_tree(path: &Path) -> io::Result<(OwnedFd, Kind)> {
    let flags =
        OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_RECURSIVE;
    let fd = open_tree(CWD, path, flags)?;
    kind(&fd).map(|kind| (fd, kind))
}

/// Clones a mount that is held by a descriptor.
pub fn clone_fd(mount: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH
        | OpenTreeFlags::AT_RECURSIVE;
    Ok(open_tree(mount, "", flags)?)
}

/// Whether a mount shows a directory.
pub fn kind(mount: &OwnedFd) -> io::Result<Kind> {
    let stat = rustix::fs::statat(mount, "", AtFlags::EMPTY_PATH)?;
    let dir = rustix::fs::FileType::from_raw_mode(stat.st_mode) == rustix::fs::FileType::Directory;
    Ok(if dir { Kind::Dir } else { Kind::File })
}

/// `None`: the kernel makes none.
type Userns = Option<Arc<OwnedFd>>;

/// Shows the runner's user's files as the hand's user's, so that a home that is closed to others can be read, and its
/// copies written. `None`: they are the same user.
#[derive(Debug)]
pub struct Owners {
    ids: Option<Ids>,
    anchor: Anchor,
    /// One user namespace for each owner that was met.
    maps: Mutex<HashMap<(u32, u32), Userns>>,
}

impl Owners {
    pub fn new(ids: Option<Ids>, anchor: Anchor) -> Self {
        Owners { ids, anchor, maps: Mutex::default() }
    }

    /// A read-only clone of a directory or file of the user.
    pub fn read_only(&self, path: &Path) -> io::Result<(OwnedFd, Kind)> {
        let (fd, kind) = clone_tree(path)?;
        self.attributes(&fd, true)?;
        Ok((fd, kind))
    }

    /// A copy on write of a directory of the user: what is written goes to directories below `scratch/name`.
    pub fn copy_on_write(&self, path: &Path, scratch: &Tmpfs, name: &str) -> io::Result<OwnedFd> {
        let (lower, _) = clone_tree(path)?;
        self.attributes(&lower, true)?;
        // The overlay has a clone of its own afterwards.
        let _attached = self.anchor.attach(lower.as_fd())?;
        let own = scratch.path().join(name);
        let (upper, work) = (own.join("upper"), own.join("work"));
        for dir in [&own, &upper, &work] {
            std::fs::create_dir(dir)?;
            if let Some(ids) = self.ids {
                chown(dir, Some(ids.uid), Some(ids.gid))?;
            }
        }
        let fs = fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
        let fs = fs.as_fd();
        fsconfig_set_string(fs, "source", "overlay")?;
        fsconfig_set_string(fs, "lowerdir", format!("/proc/self/fd/{}", lower.as_raw_fd()))?;
        fsconfig_set_string(fs, "upperdir", &*upper)?;
        fsconfig_set_string(fs, "workdir", &*work)?;
        if self.ids.is_none() {
            fsconfig_set_flag(fs, "userxattr")?;
        }
        fsconfig_create(fs)?;
        let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
        Ok(fsmount(fs, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?)
    }

    /// Not every file system can show other ids; then files are as closed to the hand as they are to others.
    fn attributes(&self, mount: &OwnedFd, read_only: bool) -> io::Result<()> {
        let map = self.map_of(mount);
        let plain = Attributes { read_only, userns: None };
        if let Some(map) = &map
            && set_attributes(mount.as_fd(), Attributes { userns: Some(map.as_fd()), ..plain }).is_ok()
        {
            return Ok(());
        }
        match set_attributes(mount.as_fd(), plain) {
            // Before Linux 5.12; bubblewrap sets the same ones later.
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::NOSYS.raw_os_error()) => Ok(()),
            done => done,
        }
    }

    fn map_of(&self, mount: &OwnedFd) -> Userns {
        let ids = self.ids?;
        let meta = std::fs::metadata(format!("/proc/self/fd/{}", mount.as_raw_fd())).ok()?;
        let owner = (meta.uid(), meta.gid());
        let mut maps = self.maps.lock().unwrap_or_else(PoisonError::into_inner);
        maps.entry(owner)
            .or_insert_with(|| {
                user_namespace(&swapping(owner.0, ids.uid), &swapping(owner.1, ids.gid)).ok().map(Arc::new)
            })
            .clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root() -> bool {
        testkit::have(testkit::Need::Root)
    }

    #[test]
    fn a_closed_directory_can_be_copied_on_write_by_another_user() {
        if !root() {
            return;
        }
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("secretive"), "content").unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
        let anchor = Anchor::new(dir.path()).unwrap();
        let owners = Owners::new(Some(Ids { uid: 60600, gid: 60600 }), anchor.clone());
        let scratch = Tmpfs::new(1 << 20, &anchor).unwrap();
        let overlay = owners.copy_on_write(dir.path(), &scratch, "0").unwrap();
        let seen = std::path::PathBuf::from(format!("/proc/self/fd/{}", overlay.as_raw_fd()));
        let meta = std::fs::metadata(&seen).unwrap();
        assert_eq!((meta.uid(), meta.gid()), (60600, 60600));
        assert_eq!(std::fs::metadata(seen.join("secretive")).unwrap().uid(), 60600);
        std::fs::write(seen.join("secretive"), "changed").unwrap();
        assert_eq!(std::fs::read_to_string(dir.path().join("secretive")).unwrap(), "content");
    }

    #[test]
    fn read_only_is_read_only() {
        if !root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let (fd, kind) = Owners::new(None, Anchor::new(dir.path()).unwrap()).read_only(dir.path()).unwrap();
        assert_eq!(kind, Kind::Dir);
        let error = std::fs::write(format!("/proc/self/fd/{}/file", fd.as_raw_fd()), "x").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ReadOnlyFilesystem);
    }
}
