//! What starting a process takes on both sides of a fork: signals held back, and the last error. Safe between fork and
//! exec: nothing here allocates or locks.

#![expect(unsafe_code, reason = "signal masks, and the last error")]

pub(crate) fn errno() -> i32 {
    // SAFETY: always succeeds.
    let location = unsafe { libc::__errno_location() };
    // SAFETY: the location is valid as long as the thread is.
    unsafe { *location }
}

pub(crate) fn no_signals() -> libc::sigset_t {
    // SAFETY: `sigset_t` is plain bits, of which zero is the empty set on Linux.
    unsafe { std::mem::zeroed() }
}

pub(crate) fn set_signal_mask(mask: &libc::sigset_t) {
    // SAFETY: the pointer is valid; the old mask is not asked for.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, mask, std::ptr::null_mut()) };
}

pub(crate) fn block_all_signals() -> libc::sigset_t {
    let mut all = no_signals();
    let mut old = no_signals();
    // SAFETY: the pointer is valid.
    unsafe { libc::sigfillset(&mut all) };
    // SAFETY: both pointers are valid.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut old) };
    old
}
