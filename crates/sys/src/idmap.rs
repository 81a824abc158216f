//! Attributes of detached mounts: read-only, and one owner's files shown as another's (`mount_setattr`, Linux 5.12).

#![expect(unsafe_code, reason = "mount_setattr and a forked process that holds a user namespace")]

use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

/// What a detached mount (an `open_tree` clone) is to be like. What is set here by a more privileged namespace can't be
/// undone by a less privileged one.
#[derive(Clone, Copy, Debug, Default)]
pub struct Attributes<'a> {
    /// Nothing below can be written.
    pub read_only: bool,
    /// Ids are shown as this user namespace maps them.
    pub userns: Option<BorrowedFd<'a>>,
}

/// Sets them, and `nosuid` and `nodev` with them, on the mount and all below.
pub fn set_attributes(mount: BorrowedFd<'_>, attributes: Attributes<'_>) -> io::Result<()> {
    let mut attr_set = libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV;
    if attributes.read_only {
        attr_set |= libc::MOUNT_ATTR_RDONLY;
    }
    if attributes.userns.is_some() {
        attr_set |= libc::MOUNT_ATTR_IDMAP;
    }
    let userns_fd = attributes.userns.map_or(0, |fd| u64::from(fd.as_raw_fd().cast_unsigned()));
    let attr = libc::mount_attr { attr_set, attr_clr: 0, propagation: 0, userns_fd };
    // SAFETY: the path is an empty string and `attr` is valid for the size that is passed.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH | libc::AT_RECURSIVE,
            &raw const attr,
            size_of::<libc::mount_attr>(),
        )
    };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The lines of an id map that is the identity, but for `a` and `b`, which change places.
pub fn swapping(a: u32, b: u32) -> String {
    let (low, high) = (a.min(b), a.max(b));
    if low == high {
        return format!("0 0 {}\n", u32::MAX);
    }
    let mut lines = String::new();
    let mut add = |inside: u32, outside: u32, count: u32| {
        if count > 0 {
            lines.push_str(&format!("{inside} {outside} {count}\n"));
        }
    };
    add(0, 0, low);
    add(low, high, 1);
    add(low + 1, low + 1, high - low - 1);
    add(high, low, 1);
    add(high + 1, high + 1, u32::MAX - high - 1);
    lines
}

/// A user namespace with these maps, held by nothing but the descriptor. Needs CAP_SETUID in this one.
pub fn user_namespace(uid_map: &str, gid_map: &str) -> io::Result<OwnedFd> {
    let (ready_read, ready_write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    let flags = libc::CLONE_NEWUSER | libc::SIGCHLD;
    let parent = std::process::id();
    // SAFETY: without CLONE_VM this is fork; the child makes only the async-signal-safe calls below and never returns.
    let pid = unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) };
    if pid == 0 {
        wait_to_be_killed(ready_write.as_raw_fd(), parent);
    }
    if pid < 0 {
        return Err(io::Error::last_os_error());
    }
    drop(ready_write);
    let result = (|| {
        // It has set its parent-death signal.
        File::from(ready_read).read_exact(&mut [0u8; 1])?;
        std::fs::write(format!("/proc/{pid}/uid_map"), uid_map)?;
        std::fs::write(format!("/proc/{pid}/gid_map"), gid_map)?;
        Ok(OwnedFd::from(File::open(format!("/proc/{pid}/ns/user"))?))
    })();
    let pid = i32::try_from(pid).unwrap_or(i32::MAX);
    // SAFETY: `pid` is our child, which was not waited for, so that the number can't be another's.
    unsafe { libc::kill(pid, libc::SIGKILL) };
    // SAFETY: the status is not asked for.
    unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) };
    result
}

fn wait_to_be_killed(ready: i32, parent: u32) -> ! {
    // SAFETY: no pointer is involved.
    unsafe { libc::syscall(libc::SYS_prctl, libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0) };
    // SAFETY: no pointer is involved.
    if unsafe { libc::syscall(libc::SYS_getppid) } != i64::from(parent) {
        // It died before that: nobody would kill us.
        // SAFETY: ends this process and nothing else.
        unsafe { libc::_exit(1) };
    }
    // SAFETY: the buffer is one static byte.
    unsafe { libc::syscall(libc::SYS_write, ready, c"r".as_ptr(), 1) };
    loop {
        // SAFETY: null pointers: pause by polling nothing for ever.
        unsafe { libc::syscall(libc::SYS_ppoll, 0, 0, 0, 0, 0) };
    }
}

#[cfg(test)]
mod tests {
    use super::swapping;

    #[test]
    fn a_swap_covers_every_id_once() {
        for (a, b) in [(0, 60600), (1000, 60600), (60600, 0), (5, 6), (7, 7)] {
            let mut inside: Vec<(u64, u64)> = Vec::new();
            let mut outside: Vec<(u64, u64)> = Vec::new();
            for line in swapping(a, b).lines() {
                let n: Vec<u64> = line.split(' ').map(|word| word.parse().unwrap()).collect();
                inside.push((n[0], n[2]));
                outside.push((n[1], n[2]));
            }
            for mut ranges in [inside, outside] {
                ranges.sort_unstable();
                let end = ranges.iter().fold(0, |at, (start, count)| {
                    assert_eq!(*start, at, "{a} {b}");
                    start + count
                });
                assert_eq!(end, u64::from(u32::MAX));
            }
        }
    }
}
