//! Starting a command under a supervisor: a forked process that is the subreaper of all that the command starts, reports
//! how it ended, and lingers while descendants live.
//!
//! ```text
//! hand ──fork──► supervisor (subreaper, all signals blocked) ──vfork──► command (own session)
//!   ▲                 │ records of RECORD_BYTES bytes
//!   └─────pipe────────┘
//! ```
//! After the fork only async-signal-safe calls are made, on memory that was prepared before.

#![expect(unsafe_code, reason = "fork, vfork and what happens between them and execve")]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use crate::child::{block_all_signals, errno, no_signals, set_signal_mask};

/// Size of one encoded [`Report`]: far below `PIPE_BUF`, so that a record arrives whole.
pub const RECORD_BYTES: usize = 40;
/// Stack of the vforked child until it executes the command.
const STACK_BYTES: usize = 64 * 1024;
/// Where the supervisor keeps its end of the report pipe.
const REPORT_FD: RawFd = 3;

/// A command, ready to be executed: the path was looked up, and everything is terminated by NUL.
#[derive(Debug)]
pub struct Command {
    /// What to execute. A relative path is taken from `cwd`.
    pub exe: CString,
    /// Its arguments, its own name first.
    pub argv: Vec<CString>,
    /// Its whole environment, as `NAME=value`.
    pub env: Vec<CString>,
    /// The directory to start in.
    pub cwd: CString,
    /// Whether standard input is a terminal that becomes the controlling one.
    pub terminal: bool,
}

/// The step at which a command failed to start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Making the process.
    Fork,
    /// Taking the terminal.
    Terminal,
    /// Entering the directory.
    Cwd,
    /// Executing the program.
    Exec,
}

/// What a supervisor tells, in this order: `Started` then `Exited`, or `Failed` alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Report {
    /// The program runs.
    Started {
        /// The command's process.
        pid: i32,
    },
    /// It could not be started.
    Failed {
        /// At which step.
        stage: Stage,
        /// Why.
        errno: i32,
    },
    /// The command is over.
    Exited {
        /// As `wait` gives it.
        status: i32,
        /// CPU time of it and of all that it waited for, in microseconds.
        cpu_us: u64,
        /// Largest resident set among those.
        rss_bytes_max: u64,
        /// From start to end, in microseconds.
        wall_us: u64,
        /// Whether descendants live on.
        lingering: bool,
    },
}

impl Report {
    /// The record as it crosses the pipe.
    pub fn encode(&self) -> [u8; RECORD_BYTES] {
        let (kind, flag, number, words) = match *self {
            Report::Started { pid } => (1, 0, pid, [0; 3]),
            Report::Failed { stage, errno } => (2, stage as u8, errno, [0; 3]),
            Report::Exited { status, cpu_us, rss_bytes_max, wall_us, lingering } => {
                (3, u8::from(lingering), status, [cpu_us, rss_bytes_max, wall_us])
            }
        };
        let mut out = [0; RECORD_BYTES];
        out[0] = kind;
        out[1] = flag;
        out[4..8].copy_from_slice(&number.to_le_bytes());
        for (slot, word) in out[8..].chunks_exact_mut(8).zip(words) {
            slot.copy_from_slice(&word.to_le_bytes());
        }
        out
    }

    /// Decodes a record; `None` if it is none.
    pub fn decode(bytes: &[u8; RECORD_BYTES]) -> Option<Report> {
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(word)
        };
        let number = i32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
        match bytes[0] {
            1 => Some(Report::Started { pid: number }),
            2 => {
                let stages = [Stage::Fork, Stage::Terminal, Stage::Cwd, Stage::Exec];
                Some(Report::Failed { stage: *stages.get(usize::from(bytes[1]))?, errno: number })
            }
            3 => Some(Report::Exited {
                status: number,
                cpu_us: word(8),
                rss_bytes_max: word(16),
                wall_us: word(24),
                lingering: bytes[1] != 0,
            }),
            _ => None,
        }
    }
}

/// Starts commands. There is one per process, which must have a single thread.
#[derive(Debug)]
pub struct Spawner {
    stack: Vec<u8>,
    oom: Option<OomScore>,
}

/// The process's own `oom_score_adj`, opened before it became undumpable (afterwards only root may open it).
#[derive(Debug)]
struct OomScore {
    file: std::fs::File,
    own: Vec<u8>,
}

impl Spawner {
    /// Call it before the process is made undumpable. What it starts is killed first when memory runs out.
    pub fn new() -> Self {
        Spawner { stack: vec![0; STACK_BYTES], oom: OomScore::open().ok() }
    }

    /// Whether commands get a higher `oom_score_adj` than this process.
    pub fn raises_oom_score(&self) -> bool {
        self.oom.is_some()
    }

    /// Forks the supervisor, which starts the command, and returns its process id. `EAGAIN`: the process limit is
    /// reached. All descriptors must be above 3: below, the supervisor lays its own.
    pub fn spawn(
        &mut self,
        command: &Command,
        stdio: [BorrowedFd<'_>; 3],
        report: BorrowedFd<'_>,
    ) -> io::Result<i32> {
        let stdio = stdio.map(|fd| fd.as_raw_fd());
        let report = report.as_raw_fd();
        if stdio.iter().chain([&report]).any(|fd| *fd <= REPORT_FD) {
            return Err(io::Error::from_raw_os_error(libc::EBADF));
        }
        let argv = pointers(&command.argv);
        let env = pointers(&command.env);
        let mut plan = Plan {
            exe: &command.exe,
            argv: argv.as_ptr(),
            env: env.as_ptr(),
            cwd: &command.cwd,
            terminal: command.terminal,
            failed: None,
        };
        // Past the end of the stack's memory, aligned as the ABI wants it.
        let end = self.stack.as_mut_ptr_range().end.cast::<c_void>();
        let stack_top = end.wrapping_byte_sub(end as usize % 16);
        let parent = std::process::id().cast_signed();

        let mask = block_all_signals();
        if let Some(oom) = &self.oom {
            oom.write(b"1000");
        }
        // SAFETY: the process has one thread, so the child may go on with the memory it has; it makes only
        // async-signal-safe calls and never returns.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            supervise(&mut plan, stack_top, stdio, report, parent);
        }
        let error = io::Error::last_os_error();
        if let Some(oom) = &self.oom {
            oom.write(&oom.own);
        }
        set_signal_mask(&mask);
        if pid < 0 { Err(error) } else { Ok(pid) }
    }
}

impl Default for Spawner {
    fn default() -> Self {
        Self::new()
    }
}

impl OomScore {
    fn open() -> io::Result<Self> {
        let own = std::fs::read("/proc/self/oom_score_adj")?;
        let file = std::fs::OpenOptions::new().write(true).open("/proc/self/oom_score_adj")?;
        Ok(OomScore { file, own })
    }

    /// Best effort: raising is always allowed, and so is going back to what it was.
    fn write(&self, value: &[u8]) {
        let _ = rustix::io::pwrite(&self.file, value, 0);
    }
}

/// What the supervisor and the vforked child share.
struct Plan<'a> {
    exe: &'a CStr,
    argv: *const *const c_char,
    env: *const *const c_char,
    cwd: &'a CStr,
    terminal: bool,
    failed: Option<(Stage, i32)>,
}

fn pointers(strings: &[CString]) -> Vec<*const c_char> {
    strings.iter().map(|s| s.as_ptr()).chain([std::ptr::null()]).collect()
}

/// The supervisor's whole life.
fn supervise(
    plan: &mut Plan<'_>,
    stack_top: *mut c_void,
    stdio: [RawFd; 3],
    report: RawFd,
    parent: i32,
) -> ! {
    become_reaper(parent);
    for (to, from) in (0..).zip(stdio) {
        // SAFETY: dup2 touches descriptors only, and this process uses none that it overwrites.
        unsafe { libc::dup2(from, to) };
    }
    // SAFETY: as above; what was on 3 (the hand's channel) must not be kept open here anyway.
    unsafe { libc::dup3(report, REPORT_FD, libc::O_CLOEXEC) };
    close_range(REPORT_FD.cast_unsigned() + 1, u32::MAX);

    let start = monotonic_us();
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
    let arg = std::ptr::from_mut(plan).cast::<c_void>();
    // SAFETY: `stack_top` ends memory that nothing else uses; CLONE_VFORK suspends this process until the child has
    // executed or exited, so that `plan` and the stack are used by one of the two at a time.
    let pid = unsafe { libc::clone(run_command, stack_top, flags, arg) };
    if pid < 0 {
        plan.failed = Some((Stage::Fork, errno()));
    }
    // The command alone holds its pipes, so that their end can be seen.
    close_range(0, 2);
    match plan.failed {
        Some((stage, errno)) => tell(Report::Failed { stage, errno }),
        None => {
            tell(Report::Started { pid });
            reap(pid, start);
        }
    }
    exit_now(0)
}

fn become_reaper(parent: i32) {
    // SAFETY: PR_SET_NAME reads a static string of less than 16 bytes.
    unsafe { libc::prctl(libc::PR_SET_NAME, c"hand: exec".as_ptr()) };
    // SAFETY: no pointer is involved.
    unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1) };
    // SAFETY: no pointer is involved.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    // SAFETY: getppid always succeeds.
    if unsafe { libc::getppid() } != parent {
        exit_now(1);
    }
}

/// In the vforked child: everything between the fork and the program.
extern "C" fn run_command(arg: *mut c_void) -> c_int {
    // SAFETY: `arg` is the `Plan` that `supervise` passed; it is suspended, so that this is the only reference in use.
    let plan = unsafe { &mut *arg.cast::<Plan<'_>>() };
    // SAFETY: no pointer is involved; it can't fail in a process that was just made.
    unsafe { libc::setsid() };
    if plan.terminal {
        // SAFETY: TIOCSCTTY takes an integer.
        if unsafe { libc::ioctl(0, libc::TIOCSCTTY, 0) } < 0 {
            return fail(plan, Stage::Terminal);
        }
    }
    // SAFETY: `cwd` ends with NUL.
    if unsafe { libc::chdir(plan.cwd.as_ptr()) } < 0 {
        return fail(plan, Stage::Cwd);
    }
    // SAFETY: SIG_DFL is a valid disposition; Rust's runtime had set this signal to be ignored. Dispositions are not
    // shared with the supervisor (no CLONE_SIGHAND).
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
    set_signal_mask(&no_signals());
    // SAFETY: path, argv and env end with NUL, and outlive the call.
    unsafe { libc::execve(plan.exe.as_ptr(), plan.argv, plan.env) };
    fail(plan, Stage::Exec)
}

fn fail(plan: &mut Plan<'_>, stage: Stage) -> c_int {
    plan.failed = Some((stage, errno()));
    exit_now(127)
}

/// Waits until no descendant is left, and reports the command's end when it comes.
fn reap(command: i32, start_us: u64) {
    loop {
        let Some((pid, status, usage)) = wait(0) else { return };
        if pid != command {
            continue;
        }
        let wall_us = monotonic_us().saturating_sub(start_us);
        // Orphans of the command became ours before it could be waited for: reap the dead, see whether any lives.
        let lingering = loop {
            match wait(libc::WNOHANG) {
                Some((0, ..)) => break true,
                Some(_) => {}
                None => break false,
            }
        };
        let cpu_us = micros(usage.ru_utime) + micros(usage.ru_stime);
        let rss_bytes_max = usage.ru_maxrss.cast_unsigned().saturating_mul(1024);
        tell(Report::Exited { status, cpu_us, rss_bytes_max, wall_us, lingering });
    }
}

/// `None`: no child is left. Process id 0: none is dead yet.
fn wait(flags: c_int) -> Option<(i32, c_int, libc::rusage)> {
    let mut status = 0;
    // SAFETY: `rusage` is plain numbers, for which zero is a value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers are valid for the call.
    let pid = unsafe { libc::wait4(-1, &mut status, flags | libc::__WALL, &mut usage) };
    (pid >= 0).then_some((pid, status, usage))
}

fn tell(report: Report) {
    let record = report.encode();
    // SAFETY: the buffer is valid for its length. If nobody reads any more, nobody has to be told.
    unsafe { libc::write(REPORT_FD, record.as_ptr().cast(), record.len()) };
}

fn close_range(first: u32, last: u32) {
    // SAFETY: closes descriptors of this process only, which uses none of them.
    let done = unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
    if done < 0 {
        for fd in first..last.min(4096) {
            // SAFETY: as above.
            unsafe { libc::close(fd.cast_signed()) };
        }
    }
}

fn monotonic_us() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is valid for the call.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    now.tv_sec.cast_unsigned() * 1_000_000 + now.tv_nsec.cast_unsigned() / 1000
}

fn micros(time: libc::timeval) -> u64 {
    time.tv_sec.cast_unsigned() * 1_000_000 + time.tv_usec.cast_unsigned()
}

fn exit_now(code: c_int) -> ! {
    // SAFETY: ends the process without running anything of it.
    unsafe { libc::_exit(code) }
}

/// Takes a descriptor that whoever started this process left open, and has it closed on exec.
pub fn inherited_fd(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: F_SETFD touches a flag only, and fails if nothing is open there.
    if unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it is open, and the caller says that it is its own to take: it was passed by number.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Sets every signal to its default (SIGPIPE: ignored), so that commands inherit no oddity of whoever started us.
pub fn reset_signals() {
    // The kernel's own structure, all zero: SIG_DFL, no flags, no mask. The library's call leaves out the two signals
    // that it keeps for itself, which some parents ignore.
    let default = [0u64; 4];
    for signal in 1..=libc::SIGRTMAX() {
        let (old, size) = (std::ptr::null_mut::<u64>(), size_of::<u64>());
        // SAFETY: the structure is at least as large as the kernel's, and SIG_DFL runs no code of ours. For signals that
        // can't be set the call fails without effect.
        unsafe { libc::syscall(libc::SYS_rt_sigaction, signal, default.as_ptr(), old, size) };
    }
    // SAFETY: SIG_IGN is a valid disposition.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    set_signal_mask(&no_signals());
}

/// Blocks SIGCHLD in this thread and opens it as a descriptor (signalfd, non-blocking): readable when a child has ended.
pub fn child_signal() -> io::Result<OwnedFd> {
    let mut set = no_signals();
    // SAFETY: the pointer is valid.
    unsafe { libc::sigaddset(&mut set, libc::SIGCHLD) };
    // SAFETY: the pointer is valid; the old mask is not asked for.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut()) };
    // SAFETY: the pointer is valid; -1 asks for a new descriptor.
    let fd = unsafe { libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it was opened above and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The process group of a process (0: of this one). `None`: it is gone, or its group's leader lies outside our namespace.
pub fn process_group(pid: i32) -> Option<i32> {
    // SAFETY: no pointer is involved.
    let group = unsafe { libc::getpgid(pid) };
    (group > 0).then_some(group)
}

/// As the first process of a process id namespace: sends SIGKILL to all others in one step that no fork escapes.
/// Returns false, without doing anything, in any other process: there it would reach strangers.
pub fn kill_namespace() -> bool {
    if std::process::id() != 1 {
        return false;
    }
    // SAFETY: no pointer is involved; -1 spares the caller, and process 1 sees only its namespace.
    unsafe { libc::kill(-1, libc::SIGKILL) };
    true
}

/// Calls the kernel's riskiest entry points with arguments that can't do anything, and tells how each answered: the
/// name of the error, or `allowed`. A filter answers EPERM or ENOSYS where the kernel itself would find the arguments bad.
pub fn risky_syscalls() -> Vec<(&'static str, io::Error)> {
    let bad = -1i64;
    [
        ("keyctl", libc::SYS_keyctl, bad),
        ("io_uring_setup", libc::SYS_io_uring_setup, 0),
        ("userfaultfd", libc::SYS_userfaultfd, bad),
        ("bpf", libc::SYS_bpf, bad),
        ("perf_event_open", libc::SYS_perf_event_open, 0),
        ("mount", libc::SYS_mount, 0),
        ("open_by_handle_at", libc::SYS_open_by_handle_at, bad),
    ]
    .into_iter()
    .map(|(name, number, first)| {
        // SAFETY: null pointers and impossible numbers: the kernel refuses each of these calls with an error.
        let done = unsafe { libc::syscall(number, first, 0i64, 0i64, 0i64, 0i64) };
        let error = if done < 0 { io::Error::last_os_error() } else { io::Error::from_raw_os_error(0) };
        (name, error)
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_survives_its_record() {
        let all = [
            Report::Started { pid: 7 },
            Report::Failed { stage: Stage::Cwd, errno: 2 },
            Report::Exited { status: 256, cpu_us: 1, rss_bytes_max: u64::MAX, wall_us: 3, lingering: true },
        ];
        for report in all {
            assert_eq!(Report::decode(&report.encode()), Some(report));
        }
        assert_eq!(Report::decode(&[9; RECORD_BYTES]), None);
    }
}
