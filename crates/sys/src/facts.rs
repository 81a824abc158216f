//! Questions to the kernel that no safe wrapper asks.

#![expect(unsafe_code, reason = "a system call that rustix does not wrap")]

use std::io;

/// The generation of Landlock that the kernel has and that was enabled at boot.
pub fn landlock_abi() -> io::Result<u32> {
    /// `LANDLOCK_CREATE_RULESET_VERSION` of `linux/landlock.h`.
    const VERSION: u32 = 1;
    let null = std::ptr::null::<u8>();
    // SAFETY: with this flag the call reads no attributes and makes no descriptor: it returns a number.
    let abi = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, null, 0usize, VERSION) };
    u32::try_from(abi).map_err(|_| io::Error::last_os_error())
}
