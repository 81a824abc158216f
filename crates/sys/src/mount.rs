//! Mounts that stand in nobody's mount table: overlays, and clones of mounts and directories, each held by a
//! descriptor. Layers are named by descriptors, so that no name can be swapped and no length limit is met.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags,
};

/// Longest value that `fsconfig` takes as a string.
const CONFIG_BYTES_MAX: usize = 255;
/// Longest option string of mount(2).
const OPTIONS_BYTES_MAX: usize = 4_000;

/// Which extended attributes an overlay keeps its marks in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OverlayMarks {
    /// `trusted.overlay.*`, with redirected directories: for the host's root.
    Trusted,
    /// `user.overlay.*`: in a user namespace. Renaming a directory of a lower layer fails with `EXDEV` there.
    User,
}

/// An overlay to mount.
pub struct Overlay<'a> {
    /// Directories, topmost first, at least one.
    pub lowers: &'a [OwnedFd],
    /// The upper and the work directory; none makes a read-only mount, which needs two lowers.
    pub upper: Option<(BorrowedFd<'a>, BorrowedFd<'a>)>,
    /// How it marks what it hides.
    pub marks: OverlayMarks,
}

/// An overlay that could not be mounted, with what the kernel logged about it.
#[derive(Debug, thiserror::Error)]
#[error("the kernel refused the overlay{log}")]
pub struct OverlayError {
    /// `: ` and the kernel's words, or nothing.
    pub log: String,
    /// The error.
    pub source: io::Error,
}

impl Overlay<'_> {
    /// Mounts it detached, `nosuid` and `nodev`. Needs a kernel that takes layers one by one (Linux 6.5), or few of them.
    pub fn mount(&self) -> Result<OwnedFd, OverlayError> {
        let context = rustix::mount::fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)
            .map_err(|errno| OverlayError { log: String::new(), source: errno.into() })?;
        self.configure(context.as_fd())
            .and_then(|()| {
                let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
                rustix::mount::fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)
            })
            .map_err(|errno| OverlayError { log: log(context.as_fd()), source: errno.into() })
    }

    fn configure(&self, context: BorrowedFd<'_>) -> Result<(), Errno> {
        let set = |key: &str, value: &str| rustix::mount::fsconfig_set_string(context, key, value);
        set("source", "tendon")?;
        self.set_lowers(context)?;
        if let Some((upper, work)) = &self.upper {
            set("upperdir", &name(upper))?;
            set("workdir", &name(work))?;
        }
        for (key, value) in self.options() {
            match value {
                Some(value) => set(key, value)?,
                None => rustix::mount::fsconfig_set_flag(context, *key)?,
            }
        }
        rustix::mount::fsconfig_create(context)
    }

    fn set_lowers(&self, context: BorrowedFd<'_>) -> Result<(), Errno> {
        let set = |key: &str, value: &str| rustix::mount::fsconfig_set_string(context, key, value);
        for (at, lower) in self.lowers.iter().enumerate() {
            match set("lowerdir+", &name(lower)) {
                Err(Errno::INVAL) if at == 0 => {
                    let all = self.lower_names();
                    return if all.len() > CONFIG_BYTES_MAX {
                        Err(Errno::TOOBIG)
                    } else {
                        set("lowerdir", &all)
                    };
                }
                done => done?,
            }
        }
        Ok(())
    }

    fn lower_names(&self) -> String {
        self.lowers.iter().map(name).collect::<Vec<_>>().join(":")
    }

    fn options(&self) -> &'static [(&'static str, Option<&'static str>)] {
        match (self.marks, self.upper.is_some()) {
            (OverlayMarks::Trusted, true) => &[
                ("redirect_dir", Some("on")),
                ("index", Some("off")),
                ("metacopy", Some("off")),
                ("nfs_export", Some("off")),
            ],
            (OverlayMarks::Trusted, false) => {
                &[("redirect_dir", Some("follow")), ("metacopy", Some("off")), ("nfs_export", Some("off"))]
            }
            (OverlayMarks::User, _) => &[("userxattr", None)],
        }
    }

    /// Mounts it at `target` by mount(2): for kernels that don't take layers one by one. `target` must lie in a mount
    /// namespace of this process's own.
    pub fn mount_at(&self, target: &Path) -> Result<(), OverlayError> {
        let mut options = format!("lowerdir={}", self.lower_names());
        if let Some((upper, work)) = &self.upper {
            options.push_str(&format!(",upperdir={},workdir={}", name(upper), name(work)));
        }
        for (key, value) in self.options() {
            options.push(',');
            options.push_str(key);
            if let Some(value) = value {
                options.push('=');
                options.push_str(value);
            }
        }
        let fail = |source: io::Error| OverlayError { log: String::new(), source };
        if options.len() > OPTIONS_BYTES_MAX {
            return Err(fail(io::Error::from(io::ErrorKind::ArgumentListTooLong)));
        }
        let options = CString::new(options).map_err(|error| fail(error.into()))?;
        let flags = MountFlags::NOSUID | MountFlags::NODEV;
        rustix::mount::mount("tendon", target, "overlay", flags, options.as_c_str())
            .map_err(|errno| fail(errno.into()))
    }
}

fn name(fd: &impl AsFd) -> String {
    format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd())
}

/// What the kernel logged in a file system context, for people.
fn log(context: BorrowedFd<'_>) -> String {
    let mut out = String::new();
    let mut buffer = [0; 1024];
    while let Ok(n) = rustix::io::read(context, &mut buffer) {
        if n == 0 || out.len() > 4 * buffer.len() {
            break;
        }
        out.push_str(": ");
        out.push_str(String::from_utf8_lossy(&buffer[..n]).trim_end());
    }
    out
}

/// A clone of the mount or directory that `fd` is the root of, as a detached mount of its own.
pub fn clone(fd: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let flags =
        OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
    Ok(rustix::mount::open_tree(fd, "", flags)?)
}

/// Attaches a detached mount at a directory of this process's mount namespace.
pub fn attach(fd: BorrowedFd<'_>, target: &Path) -> io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    Ok(rustix::mount::move_mount(fd, "", rustix::fs::CWD, target, flags)?)
}

/// Opens the root of what is mounted at `target`.
pub fn open(target: &Path) -> io::Result<OwnedFd> {
    Ok(rustix::mount::open_tree(rustix::fs::CWD, target, OpenTreeFlags::OPEN_TREE_CLOEXEC)?)
}

/// Takes a mount off `target` now; it ends when its last user does.
pub fn detach(target: &Path) -> io::Result<()> {
    Ok(rustix::mount::unmount(target, UnmountFlags::DETACH)?)
}

/// Makes a detached mount `nosuid`, `nodev` and private: nothing that is mounted elsewhere shows up in it.
#[expect(unsafe_code, reason = "no library wraps mount_setattr")]
pub fn restrict(fd: BorrowedFd<'_>) -> io::Result<()> {
    let attributes = libc::mount_attr {
        attr_set: libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV,
        attr_clr: 0,
        propagation: libc::MS_PRIVATE,
        userns_fd: 0,
    };
    // SAFETY: the path is a C string and `attributes` lives, with the size that is given, as long as the call does.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            fd.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attributes,
            size_of::<libc::mount_attr>(),
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
