//! Spawning a program in a *staging* mount namespace: everything that it is to bind was opened by the caller and is moved
//! to `/tmp/N` of a namespace that only the new process has. See "Staging" in `docs/design/001-spine.md`.
//!
//! The child borrows the caller's memory until it executes (as with vfork): no page table is copied, however large the
//! caller is, and only raw system calls on memory prepared before are made there.

#![expect(unsafe_code, reason = "clone, and what happens between it and execve")]

use std::ffi::{CStr, CString, c_char, c_int, c_long, c_void};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use crate::child::{block_all_signals, errno, no_signals, set_signal_mask};

/// Where the staged mounts lie: `STAGING/0`, `STAGING/1`, …
pub const STAGING: &str = "/tmp";
/// Most mounts and descriptors of one spawn.
pub const STAGED_MAX: usize = 128;
/// The lowest number that sources of descriptors are moved to, so that laying them out overwrites none.
const SOURCE_FD_MIN: RawFd = 256;
/// Stack of the child until it executes.
const STACK_BYTES: usize = 64 * 1024;

/// What a staged mount shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A directory.
    Dir,
    /// A file, or anything else that is none.
    File,
}

/// Another user for the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ids {
    /// Its user id.
    pub uid: u32,
    /// Its only group.
    pub gid: u32,
}

/// A limit that the kernel keeps per process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rlimit {
    /// Bytes of a core dump.
    Core,
    /// Bytes of a file.
    FileSize,
    /// Open descriptors.
    OpenFiles,
}

impl Rlimit {
    fn number(self) -> u32 {
        match self {
            Rlimit::Core => libc::RLIMIT_CORE,
            Rlimit::FileSize => libc::RLIMIT_FSIZE,
            Rlimit::OpenFiles => libc::RLIMIT_NOFILE,
        }
    }

    /// The value, or the caller's hard limit if that is less.
    fn capped(self, value: u64) -> u64 {
        let resource = match self {
            Rlimit::Core => rustix::process::Resource::Core,
            Rlimit::FileSize => rustix::process::Resource::Fsize,
            Rlimit::OpenFiles => rustix::process::Resource::Nofile,
        };
        rustix::process::getrlimit(resource).maximum.map_or(value, |most| value.min(most))
    }
}

/// A program and all that it gets.
#[derive(Debug, Default)]
pub struct Plan {
    /// What to execute, with its arguments, its own name first. The environment is empty.
    pub argv: Vec<CString>,
    /// Detached mounts (`open_tree` clones), which turn up as `/tmp/0`, `/tmp/1`, …
    pub staged: Vec<(OwnedFd, Kind)>,
    /// A mount of the caller's namespace that the program gets no copy of, nor of those below it, if mounts are staged: a
    /// copy would keep them alive.
    pub forgotten: Option<CString>,
    /// Descriptors by the number that they get. 0, 1 and 2 must be among them; nothing else is inherited.
    pub fds: Vec<(RawFd, OwnedFd)>,
    /// Open `cgroup.procs` or `tasks` files to enter, all of them.
    pub cgroups: Vec<OwnedFd>,
    /// Resource limits, soft and hard alike; never above the caller's own.
    pub rlimits: Vec<(Rlimit, u64)>,
    /// CPUs that it may run on; empty: as the caller.
    pub cpus: Vec<usize>,
    /// The user to become, if the caller is root.
    pub ids: Option<Ids>,
    /// Whether it lives on when the thread that spawned it ends. Everything else is killed then.
    pub outlives: bool,
}

/// A process that was spawned.
#[derive(Debug)]
pub struct Child {
    /// Its process id, valid until it was waited for.
    pub pid: i32,
    /// Readable when it has ended.
    pub pidfd: OwnedFd,
}

/// The step at which a spawn failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[expect(missing_docs, reason = "each is what its text below says")]
pub enum Stage {
    Descriptors,
    Clone,
    Cgroup,
    Namespace,
    Propagation,
    Forget,
    Tmpfs,
    MountPoint,
    MoveMount,
    Layout,
    Rlimit,
    Affinity,
    Ids,
    ParentDeath,
    Exec,
}

impl Stage {
    fn text(self) -> &'static str {
        match self {
            Stage::Descriptors => "prepare its descriptors",
            Stage::Clone => "make the process",
            Stage::Cgroup => "enter its control group",
            Stage::Namespace => "make its mount namespace",
            Stage::Propagation => "make its mounts private",
            Stage::Forget => "let go of this process's own mounts",
            Stage::Tmpfs => "mount its staging directory",
            Stage::MountPoint => "make a mount point in its staging directory",
            Stage::MoveMount => "move a mount to its staging directory",
            Stage::Layout => "lay out its descriptors",
            Stage::Rlimit => "set its resource limits",
            Stage::Affinity => "set its CPUs",
            Stage::Ids => "change to its user",
            Stage::ParentDeath => "tie it to this process",
            Stage::Exec => "execute it",
        }
    }
}

/// Why a program was not spawned.
#[derive(Debug, thiserror::Error)]
#[error("cannot {} ({})", stage.text(), program)]
pub struct SpawnError {
    /// At which step.
    pub stage: Stage,
    /// The program.
    pub program: String,
    /// Why.
    pub source: io::Error,
}

/// Spawns programs. Its thread is their parent: when that thread ends, every one of them is killed (the kernel ties the
/// parent-death signal to the thread), so use one from a thread that lives as long as they should.
#[derive(Debug)]
pub struct Spawner {
    stack: Vec<u8>,
    points: Vec<CString>,
}

impl Default for Spawner {
    fn default() -> Self {
        Self::new()
    }
}

impl Spawner {
    /// One spawner.
    pub fn new() -> Self {
        let points = (0..STAGED_MAX).filter_map(|n| CString::new(format!("{STAGING}/{n}")).ok());
        Spawner { stack: vec![0; STACK_BYTES], points: points.collect() }
    }

    /// Spawns and returns when the program has been executed.
    pub fn spawn(&mut self, plan: Plan) -> Result<Child, SpawnError> {
        let program = plan.argv.first().map(|exe| exe.to_string_lossy().into_owned()).unwrap_or_default();
        let failed = |stage, source| SpawnError { stage, program: program.clone(), source };
        let prepared =
            Prepared::new(&plan, &self.points).map_err(|source| failed(Stage::Descriptors, source))?;
        let mut shared = Shared { plan: &prepared, failed: None };
        let end = self.stack.as_mut_ptr_range().end.cast::<c_void>();
        let stack_top = end.wrapping_byte_sub(end as usize % 16);

        let mut pidfd: RawFd = -1;
        let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD | libc::SIGCHLD;
        let arg = (&raw mut shared).cast::<c_void>();
        let mask = block_all_signals();
        // SAFETY: `stack_top` ends memory that nothing else uses; CLONE_VFORK suspends this thread until the child has
        // executed or exited, so that `shared` and the stack are used by one of the two at a time.
        let pid = unsafe { libc::clone(child, stack_top, flags, arg, &raw mut pidfd) };
        let error = io::Error::last_os_error();
        set_signal_mask(&mask);
        if pid < 0 {
            return Err(failed(Stage::Clone, error));
        }
        // SAFETY: the kernel made this descriptor for us by CLONE_PIDFD; it is close-on-exec.
        let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
        match shared.failed {
            None => Ok(Child { pid, pidfd }),
            Some((stage, errno)) => {
                // SAFETY: the child has exited, and nobody else waits for it.
                unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) };
                Err(failed(stage, io::Error::from_raw_os_error(errno)))
            }
        }
    }
}

/// The plan as raw numbers and pointers, all sources of descriptors above [`SOURCE_FD_MIN`].
struct Prepared<'a> {
    argv: Vec<*const c_char>,
    env: [*const c_char; 1],
    staged: Vec<(OwnedFd, Kind, &'a CStr)>,
    forgotten: Option<&'a CStr>,
    fds: Vec<(RawFd, OwnedFd)>,
    cgroups: Vec<RawFd>,
    rlimits: Vec<(u32, libc::rlimit64)>,
    cpus: Option<libc::cpu_set_t>,
    ids: Option<Ids>,
    /// `None`: it may outlive its parent.
    parent: Option<i32>,
}

struct Shared<'a> {
    plan: &'a Prepared<'a>,
    failed: Option<(Stage, c_int)>,
}

impl<'a> Prepared<'a> {
    fn new(plan: &'a Plan, points: &'a [CString]) -> io::Result<Self> {
        let has = |number| plan.fds.iter().any(|(to, _)| *to == number);
        let sane = plan.fds.iter().all(|(to, _)| (0..SOURCE_FD_MIN).contains(to));
        if plan.argv.is_empty() || !has(0) || !has(1) || !has(2) || !sane || plan.staged.len() > points.len()
        {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let lift = |fd: &OwnedFd| rustix::io::fcntl_dupfd_cloexec(fd.as_fd(), SOURCE_FD_MIN);
        let staged =
            plan.staged.iter().zip(points).map(|((fd, kind), at)| Ok((lift(fd)?, *kind, at.as_c_str())));
        let fds = plan.fds.iter().map(|(to, fd)| Ok((*to, lift(fd)?)));
        Ok(Prepared {
            argv: plan.argv.iter().map(|arg| arg.as_ptr()).chain([std::ptr::null()]).collect(),
            env: [std::ptr::null()],
            staged: staged.collect::<io::Result<_>>()?,
            forgotten: plan.forgotten.as_deref(),
            fds: fds.collect::<io::Result<_>>()?,
            cgroups: plan.cgroups.iter().map(AsRawFd::as_raw_fd).collect(),
            rlimits: plan
                .rlimits
                .iter()
                .map(|(which, value)| {
                    let value = which.capped(*value);
                    (which.number(), libc::rlimit64 { rlim_cur: value, rlim_max: value })
                })
                .collect(),
            cpus: (!plan.cpus.is_empty()).then(|| cpu_set(&plan.cpus)),
            ids: plan.ids,
            parent: (!plan.outlives).then(|| std::process::id().cast_signed()),
        })
    }
}

fn cpu_set(cpus: &[usize]) -> libc::cpu_set_t {
    // SAFETY: `cpu_set_t` is plain bits, of which zero is the empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    for cpu in cpus.iter().filter(|cpu| **cpu < libc::CPU_SETSIZE.cast_unsigned() as usize) {
        // SAFETY: the number is within the set.
        unsafe { libc::CPU_SET(*cpu, &mut set) };
    }
    set
}

/// In the child, with the parent's memory: raw system calls only.
extern "C" fn child(arg: *mut c_void) -> c_int {
    // SAFETY: `arg` is the `Shared` of `spawn`, whose thread is suspended: this is the only reference in use.
    let shared = unsafe { &mut *arg.cast::<Shared<'_>>() };
    let plan = shared.plan;
    shared.failed = prepare_child(plan).err().map(|stage| (stage, errno()));
    if shared.failed.is_none() {
        // SAFETY: path, arguments and environment end with null, and outlive the call.
        unsafe { libc::execve(plan.argv[0], plan.argv.as_ptr(), plan.env.as_ptr()) };
        shared.failed = Some((Stage::Exec, errno()));
    }
    // SAFETY: ends the child without running anything of the parent's.
    unsafe { libc::_exit(127) }
}

fn prepare_child(plan: &Prepared<'_>) -> Result<(), Stage> {
    // SAFETY: no pointer is involved; a new session keeps a terminal's signals away.
    unsafe { libc::syscall(libc::SYS_setsid) };
    for procs in &plan.cgroups {
        // SAFETY: the buffer is static; "0" is the writer itself.
        check(unsafe { libc::syscall(libc::SYS_write, *procs, c"0".as_ptr(), 1) }, Stage::Cgroup)?;
    }
    if !plan.staged.is_empty() {
        stage_mounts(plan)?;
    }
    lay_out(plan)?;
    for (which, limit) in &plan.rlimits {
        let null = std::ptr::null_mut::<libc::rlimit64>();
        // SAFETY: the limit is valid for the call; 0 is the caller itself.
        let set = unsafe { libc::syscall(libc::SYS_prlimit64, 0, *which, &raw const *limit, null) };
        check(set, Stage::Rlimit)?;
    }
    if let Some(cpus) = &plan.cpus {
        let size = size_of::<libc::cpu_set_t>();
        // SAFETY: the set is valid for its size; 0 is the caller itself.
        let set = unsafe { libc::syscall(libc::SYS_sched_setaffinity, 0, size, &raw const *cpus) };
        check(set, Stage::Affinity)?;
    }
    if let Some(ids) = plan.ids {
        become_user(ids)?;
    }
    if let Some(parent) = plan.parent {
        tie_to_parent(parent)?;
    }
    // SAFETY: SIG_DFL is a valid disposition, and dispositions are not shared with the parent (no CLONE_SIGHAND).
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
    set_signal_mask(&no_signals());
    Ok(())
}

fn stage_mounts(plan: &Prepared<'_>) -> Result<(), Stage> {
    // SAFETY: no pointer is involved.
    check(unsafe { libc::syscall(libc::SYS_unshare, libc::CLONE_NEWNS) }, Stage::Namespace)?;
    let flags = libc::MS_REC | libc::MS_PRIVATE;
    let none = std::ptr::null::<c_char>();
    // SAFETY: the strings are static; changing propagation reads no other argument.
    let private = unsafe { libc::syscall(libc::SYS_mount, none, c"/".as_ptr(), none, flags, none) };
    check(private, Stage::Propagation)?;
    if let Some(place) = plan.forgotten {
        // SAFETY: the path ends with NUL.
        let forgotten = unsafe { libc::syscall(libc::SYS_umount2, place.as_ptr(), libc::MNT_DETACH) };
        check(forgotten, Stage::Forget)?;
    }
    let flags = libc::MS_NOSUID | libc::MS_NODEV;
    let (kind, options) = (c"tmpfs", c"mode=0755,size=256k,nr_inodes=256");
    // SAFETY: the strings are static.
    let mounted = unsafe {
        libc::syscall(
            libc::SYS_mount,
            kind.as_ptr(),
            c"/tmp".as_ptr(),
            kind.as_ptr(),
            flags,
            options.as_ptr(),
        )
    };
    check(mounted, Stage::Tmpfs)?;
    for (fd, kind, point) in &plan.staged {
        let point = point.as_ptr();
        let made = match kind {
            // SAFETY: the path ends with NUL.
            Kind::Dir => unsafe { libc::syscall(libc::SYS_mkdirat, libc::AT_FDCWD, point, 0o755) },
            // SAFETY: as above.
            Kind::File => unsafe {
                libc::syscall(libc::SYS_mknodat, libc::AT_FDCWD, point, libc::S_IFREG | 0o644, 0)
            },
        };
        check(made, Stage::MountPoint)?;
        let (from, flags) = (fd.as_raw_fd(), libc::MOVE_MOUNT_F_EMPTY_PATH);
        // SAFETY: both paths end with NUL.
        let moved =
            unsafe { libc::syscall(libc::SYS_move_mount, from, c"".as_ptr(), libc::AT_FDCWD, point, flags) };
        check(moved, Stage::MoveMount)?;
    }
    Ok(())
}

/// Sources lie above all targets, so that nothing is overwritten that is still needed. The rest closes on exec.
fn lay_out(plan: &Prepared<'_>) -> Result<(), Stage> {
    for (to, from) in &plan.fds {
        // SAFETY: the child's table of descriptors is its own (no CLONE_FILES).
        check(unsafe { libc::syscall(libc::SYS_dup3, from.as_raw_fd(), *to, 0) }, Stage::Layout)?;
    }
    let first = plan.fds.iter().fold(3, |first, (to, _)| first.max(to + 1));
    // SAFETY: only sets a flag in the child's own table. Kernels before 5.11 lack it; ours are close-on-exec anyway.
    unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
    Ok(())
}

/// By raw calls: the C library would change every thread of the process, and this child shares its memory.
fn become_user(ids: Ids) -> Result<(), Stage> {
    let (uid, gid) = (ids.uid, ids.gid);
    // SAFETY: no groups: the pointer is not read.
    check(unsafe { libc::syscall(libc::SYS_setgroups, 0, std::ptr::null::<u32>()) }, Stage::Ids)?;
    // SAFETY: no pointer is involved.
    check(unsafe { libc::syscall(libc::SYS_setresgid, gid, gid, gid) }, Stage::Ids)?;
    // SAFETY: no pointer is involved.
    check(unsafe { libc::syscall(libc::SYS_setresuid, uid, uid, uid) }, Stage::Ids)
}

/// After the change of user, which would clear it.
fn tie_to_parent(parent: i32) -> Result<(), Stage> {
    // SAFETY: no pointer is involved.
    let tied = unsafe { libc::syscall(libc::SYS_prctl, libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0) };
    check(tied, Stage::ParentDeath)?;
    // SAFETY: no pointer is involved.
    if unsafe { libc::syscall(libc::SYS_getppid) } != c_long::from(parent) {
        return Err(Stage::ParentDeath);
    }
    Ok(())
}

fn check(result: c_long, stage: Stage) -> Result<(), Stage> {
    if result < 0 { Err(stage) } else { Ok(()) }
}

/// Waits for a child that has ended (its pidfd is readable), without blocking. `None`: it runs. Else what killed it or
/// its exit status.
pub fn reap(child: BorrowedFd<'_>) -> io::Result<Option<Ended>> {
    use rustix::process::{WaitId, WaitIdOptions, waitid};
    let status = waitid(WaitId::PidFd(child), WaitIdOptions::EXITED | WaitIdOptions::NOHANG)?;
    Ok(status.map(|status| match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => Ended::Exited(code),
        (None, signal) => Ended::Signalled(signal.unwrap_or(0)),
    }))
}

/// How a child ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// By itself, with this status.
    Exited(i32),
    /// By this signal.
    Signalled(i32),
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::Read as _;

    fn c(text: &str) -> CString {
        CString::new(text).unwrap()
    }

    /// Runs a plan's program with its output on a pipe.
    fn output(mut plan: Plan) -> (String, Ended) {
        let null = File::open("/dev/null").unwrap();
        let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        plan.fds.push((0, null.into()));
        plan.fds.push((2, write.try_clone().unwrap()));
        plan.fds.push((1, write));
        let child = Spawner::new().spawn(plan).unwrap();
        let mut text = String::new();
        File::from(read).read_to_string(&mut text).unwrap();
        let ended = loop {
            if let Some(ended) = reap(child.pidfd.as_fd()).unwrap() {
                break ended;
            }
            std::thread::yield_now();
        };
        (text, ended)
    }

    #[test]
    fn a_program_gets_its_descriptors_and_no_others() {
        let (extra, _keep) = rustix::pipe::pipe().unwrap();
        let plan = Plan {
            argv: ["/bin/sh", "-c", "echo /proc/self/fd/*; env; exit 3"].map(c).into(),
            fds: vec![(7, extra)],
            ..Plan::default()
        };
        let (text, ended) = output(plan);
        // The shell's glob is expanded in a process that holds the directory itself open, too.
        assert!(text.starts_with("/proc/self/fd/0 /proc/self/fd/1 /proc/self/fd/2 "), "{text}");
        assert!(text.contains("/proc/self/fd/7"), "{text}");
        assert!(!text.contains("HOME="), "{text}");
        assert_eq!(ended, Ended::Exited(3));
    }

    #[test]
    fn a_failure_names_its_step() {
        let null = || OwnedFd::from(File::open("/dev/null").unwrap());
        let plan = Plan {
            argv: vec![c("/there/is/none")],
            fds: vec![(0, null()), (1, null()), (2, null())],
            ..Plan::default()
        };
        let error = Spawner::new().spawn(plan).unwrap_err();
        assert_eq!(error.stage, Stage::Exec);
        assert_eq!(error.source.raw_os_error(), Some(libc::ENOENT));
        assert_eq!(error.to_string(), "cannot execute it (/there/is/none)");
    }

    #[test]
    fn mounts_are_staged_in_a_namespace_of_their_own() {
        if !testkit::have(testkit::Need::Root) {
            return;
        }
        let dir = std::env::temp_dir().join(format!("sys-staging-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        std::fs::write(dir.join("seen"), "yes").unwrap();
        let open = |path: &std::path::Path| {
            use rustix::mount::{OpenTreeFlags, open_tree};
            let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
            open_tree(rustix::fs::CWD, path, flags).unwrap()
        };
        let plan = Plan {
            argv: ["/bin/sh", "-c", "ls /tmp; cat /tmp/0/seen /tmp/1; id -u; id -G"].map(c).into(),
            staged: vec![(open(&dir), Kind::Dir), (open(&dir.join("seen")), Kind::File)],
            ids: Some(Ids { uid: 60600, gid: 60601 }),
            ..Plan::default()
        };
        let (text, _) = output(plan);
        std::fs::remove_dir_all(&dir).unwrap();
        assert_eq!(text, "0\n1\nyesyes60600\n60601\n");
        assert!(!std::fs::read_to_string("/proc/self/mountinfo").unwrap().contains(" /tmp/0 "));
    }

    #[test]
    fn children_die_with_the_thread_that_spawned_them() {
        let child = std::thread::spawn(|| {
            let null = || OwnedFd::from(File::open("/dev/null").unwrap());
            let plan = Plan {
                argv: ["/bin/sleep", "60"].map(c).into(),
                fds: vec![(0, null()), (1, null()), (2, null())],
                ..Plan::default()
            };
            Spawner::new().spawn(plan).unwrap()
        });
        let child = child.join().unwrap();
        let mut polled = [rustix::event::PollFd::new(&child.pidfd, rustix::event::PollFlags::IN)];
        let limit = rustix::time::Timespec { tv_sec: 10, tv_nsec: 0 };
        assert_eq!(rustix::event::poll(&mut polled, Some(&limit)).unwrap(), 1);
        assert_eq!(reap(child.pidfd.as_fd()).unwrap(), Some(Ended::Signalled(libc::SIGKILL)));
    }
}
