//! The runner's own namespaces: mounts that vanish with the process, and root's place for those who are not root.

#![expect(unsafe_code, reason = "unshare can leave a process half changed: rustix marks it unsafe")]

use std::io;

use rustix::mount::{MountPropagationFlags, mount_change};
use rustix::thread::{UnshareFlags, unshare_unsafe};

/// Which namespaces [`enter_private`] made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Private {
    /// A mount namespace: the process is root.
    Mount,
    /// A user namespace, in which ids are what they were, and a mount namespace that belongs to it.
    UserAndMount,
}

/// The step of [`enter_private`] that failed.
#[derive(Debug, thiserror::Error)]
pub enum EnterError {
    /// Other threads would stay behind.
    #[error("the process has {threads} threads: a private namespace must be entered before any is started")]
    Threads {
        /// How many.
        threads: usize,
    },
    /// The kernel makes none for this user.
    #[error("the kernel refuses a {what} namespace")]
    Unshare {
        /// `mount` or `user and mount`.
        what: &'static str,
        /// Why.
        source: io::Error,
    },
    /// The user and group id can't be kept.
    #[error("the ids of the new user namespace can't be set")]
    Map(#[source] io::Error),
    /// Mounts would still spread to the host.
    #[error("mounts can't be made private")]
    Propagation(#[source] io::Error),
}

/// Moves this process into a mount namespace of its own, and into a user namespace when it is not root. Mounts made
/// afterwards are seen by nobody else and end with the process and its children. Must be called before threads start.
pub fn enter_private() -> Result<Private, EnterError> {
    let threads = std::fs::read_dir("/proc/self/task").map_or(1, Iterator::count);
    if threads != 1 {
        return Err(EnterError::Threads { threads });
    }
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
    let kind = if uid.is_root() { Private::Mount } else { Private::UserAndMount };
    let (flags, what) = match kind {
        Private::Mount => (UnshareFlags::NEWNS, "mount"),
        Private::UserAndMount => (UnshareFlags::NEWNS | UnshareFlags::NEWUSER, "user and mount"),
    };
    // SAFETY: the process has one thread, and no descriptor table is unshared.
    unsafe { unshare_unsafe(flags) }.map_err(|error| EnterError::Unshare { what, source: error.into() })?;
    if kind == Private::UserAndMount {
        write_identity_map(uid.as_raw(), gid.as_raw()).map_err(EnterError::Map)?;
    }
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    mount_change("/", private).map_err(|error| EnterError::Propagation(error.into()))?;
    Ok(kind)
}

fn write_identity_map(uid: u32, gid: u32) -> io::Result<()> {
    std::fs::write("/proc/self/setgroups", "deny")?;
    std::fs::write("/proc/self/uid_map", format!("{uid} {uid} 1"))?;
    std::fs::write("/proc/self/gid_map", format!("{gid} {gid} 1"))
}
