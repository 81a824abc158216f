//! A booted hand: what runs in it, what it uses, how it ends.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use policy::Grant;
use proto::error::{Code, Coded};
use proto::ids::ExecId;
use proto::verify::{Confinement, Outcome};
use rustix::process::{Signal, pidfd_send_signal};
use sys::spawn::{Ended, reap};
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use crate::cgroup::Group;
use crate::limits::{FREEZE_PATIENCE, STOP_PATIENCE};
use crate::link::{self, ExecControl, ExecEvent, ExecSpec, ExecStdin, FileContent, Link, LinkError, Size};
use crate::spawner::SpawnThread;
use crate::usage;

/// Sent to a process that writes a file beyond its size limit.
const SIGXFSZ: i32 = 25;

/// A booted hand. Cheap to clone; when the last clone is gone the hand is killed with all that runs in it.
#[derive(Clone, Debug)]
pub struct Hand {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    link: Link,
    process: Arc<Process>,
    confinement: Confinement,
    env: Vec<(String, String)>,
    wall_ms_max: u64,
    /// The file system of its branch.
    dev: u64,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.process.kill();
    }
}

/// The processes of a hand, from the spawn on.
#[derive(Debug)]
pub(crate) struct Process {
    /// bubblewrap's monitor.
    monitor: OwnedFd,
    /// The first process inside.
    first: OnceLock<(i32, OwnedFd)>,
    group: Option<Group>,
    stderr: Mutex<Vec<u8>>,
    stopping: AtomicBool,
    gone: watch::Sender<Option<String>>,
    /// Keeps the thread alive that the processes are tied to.
    _thread: SpawnThread,
}

impl Process {
    /// Takes over a spawned child and watches it to its end.
    pub fn watch(monitor: OwnedFd, group: Option<Group>, thread: SpawnThread) -> Arc<Self> {
        let (gone, _) = watch::channel(None);
        let process = Arc::new(Process {
            monitor,
            first: OnceLock::new(),
            group,
            stderr: Mutex::default(),
            stopping: AtomicBool::new(false),
            gone,
            _thread: thread,
        });
        tokio::spawn(Arc::clone(&process).until_gone());
        process
    }

    /// Tells which process is the first inside.
    pub fn set_first(&self, pid: i32, pidfd: OwnedFd) {
        let _ = self.first.set((pid, pidfd));
    }

    /// Keeps the end of what bubblewrap and the hand write to standard error.
    pub fn note_stderr(&self, bytes: &[u8], bytes_max: usize) {
        let mut kept = self.stderr.lock().unwrap_or_else(PoisonError::into_inner);
        kept.extend_from_slice(bytes);
        let excess = kept.len().saturating_sub(bytes_max);
        kept.drain(..excess);
    }

    /// The last lines of standard error.
    pub fn last_words(&self) -> Option<String> {
        let kept = self.stderr.lock().unwrap_or_else(PoisonError::into_inner);
        let text = String::from_utf8_lossy(&kept);
        let lines: Vec<&str> = text.trim().lines().collect();
        let last = &lines[lines.len().saturating_sub(3)..];
        (!last.is_empty()).then(|| last.join("; "))
    }

    /// Kills all of it, without waiting.
    pub fn kill(&self) {
        self.stopping.store(true, Ordering::Relaxed);
        if let Some(group) = &self.group {
            // A frozen process dies only when it is thawed.
            let _ = group.set_frozen(false);
        }
        self.kill_first();
        let _ = pidfd_send_signal(&self.monitor, Signal::KILL);
    }

    fn kill_first(&self) {
        if let Some((_, first)) = self.first.get() {
            let _ = pidfd_send_signal(first, Signal::KILL);
        }
    }

    /// Returns when no process is left and its control group is removed, and why it ended.
    pub async fn gone(&self) -> String {
        let mut gone = self.gone.subscribe();
        let reason = gone.wait_for(Option::is_some).await.ok().and_then(|reason| reason.clone());
        reason.unwrap_or_default()
    }

    fn gone_already(&self) -> Option<String> {
        self.gone.borrow().clone()
    }

    async fn until_gone(self: Arc<Self>) {
        ended(&self.monitor).await;
        let how = reap(self.monitor.as_fd()).ok().flatten();
        // bubblewrap's parent-death signal does this too, a moment later.
        self.kill_first();
        if let Some((_, first)) = self.first.get() {
            let _ = timeout(STOP_PATIENCE, ended(first)).await;
        }
        let reason = self.reason(how);
        let process = Arc::clone(&self);
        let cleaned = tokio::task::spawn_blocking(move || {
            let Some(group) = &process.group else { return true };
            group.kill();
            group.remove()
        });
        if !cleaned.await.unwrap_or(false) {
            tracing::warn!("a hand's control group can't be removed");
        }
        self.gone.send_replace(Some(reason));
    }

    fn reason(&self, how: Option<Ended>) -> String {
        let killed = self.group.as_ref().map_or(0, Group::oom_kills);
        let words = self.last_words().map(|words| format!(": {words}")).unwrap_or_default();
        match how {
            _ if self.stopping.load(Ordering::Relaxed) => "it was stopped".into(),
            Some(Ended::Exited(137) | Ended::Signalled(9)) if killed > 0 => {
                "its memory limit was reached and the kernel killed it".into()
            }
            // bubblewrap passes a signal on as 128 and its number.
            Some(Ended::Exited(code)) if code > 128 => {
                format!("it was killed by signal {}{words}", code - 128)
            }
            Some(Ended::Exited(code)) => format!("it exited with status {code}{words}"),
            Some(Ended::Signalled(signal)) => format!("it was killed by signal {signal}{words}"),
            None => format!("it ended{words}"),
        }
    }
}

/// The runtime ended before [`Process::until_gone`] did: the same without it, so that nothing is left.
impl Drop for Process {
    fn drop(&mut self) {
        if self.gone_already().is_some() {
            return;
        }
        self.kill();
        let deadline = std::time::Instant::now() + STOP_PATIENCE;
        for pidfd in [Some(&self.monitor), self.first.get().map(|(_, first)| first)].into_iter().flatten() {
            while runs(pidfd) && std::time::Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        let _ = reap(self.monitor.as_fd());
        if let Some(group) = &self.group {
            group.kill();
            group.remove();
        }
    }
}

/// Returns when the process has ended.
#[expect(
    deprecated,
    reason = "an OwnedFd keeps its descriptor open and the same, which is what the newer, unsafe form asks for"
)]
async fn ended(pidfd: &OwnedFd) {
    match pidfd.try_clone().and_then(AsyncFd::new) {
        Ok(fd) => {
            let _ = fd.readable().await;
        }
        Err(error) => {
            tracing::warn!(%error, "a process can't be watched: looking again and again");
            while runs(pidfd) {
                sleep(Duration::from_millis(20)).await;
            }
        }
    }
}

fn runs(pidfd: &OwnedFd) -> bool {
    use rustix::event::{PollFd, PollFlags, poll};
    let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::new(pidfd, PollFlags::IN)], Some(&now)) == Ok(0)
}

impl Hand {
    pub(crate) fn new(
        link: Link,
        process: Arc<Process>,
        grant: &Grant,
        confinement: Confinement,
        env: Vec<(String, String)>,
        dev: u64,
    ) -> Self {
        let wall_ms_max = grant.numbers.wall_ms_max;
        Hand { inner: Arc::new(Inner { link, process, confinement, env, wall_ms_max, dev }) }
    }

    /// Runs a command. Its environment is the hand's, with `spec.env` over it; its wall time is at most the grant's.
    pub async fn exec(&self, id: ExecId, mut spec: ExecSpec) -> Result<Exec, LinkError> {
        let mut env = self.inner.env.clone();
        if spec.pty.is_some() {
            set(&mut env, "TERM".into(), "xterm-256color".into());
        }
        for (name, value) in std::mem::take(&mut spec.env) {
            set(&mut env, name, value);
        }
        spec.env = env;
        let most = self.inner.wall_ms_max;
        spec.wall_ms_max = Some(spec.wall_ms_max.map_or(most, |asked| asked.min(most)));
        let oom_kills = self.oom_kills();
        let exec = self.inner.link.exec(id.clone(), spec).await.map_err(|error| self.explain(error))?;
        Ok(Exec { exec, hand: self.clone(), oom_kills })
    }

    /// Writes a file below the branch's root. See [`Link::put`].
    pub async fn put(&self, path: &[u8], mode: u32, bytes: Bytes) -> Result<u64, LinkError> {
        self.inner.link.put(path, mode, bytes).await.map_err(|error| self.explain(error))
    }

    /// Reads a file below the branch's root. See [`Link::get`].
    pub async fn get(&self, path: &[u8], bytes_max: u64) -> Result<FileContent, LinkError> {
        self.inner.link.get(path, bytes_max).await.map_err(|error| self.explain(error))
    }

    /// The channel itself, for what this type does not wrap.
    pub fn link(&self) -> &Link {
        &self.inner.link
    }

    /// What confines it, as found at boot.
    pub fn confinement(&self) -> Confinement {
        self.inner.confinement.clone()
    }

    /// The environment of every command.
    pub fn env(&self) -> &[(String, String)] {
        &self.inner.env
    }

    /// Highest memory of all its processes together since the last reset, where the host can tell.
    pub fn memory_peak(&self) -> Option<u64> {
        self.group().and_then(Group::memory_peak)
    }

    /// Starts a new measurement of [`Hand::memory_peak`].
    pub fn memory_peak_reset(&self) {
        if let Some(group) = self.group() {
            group.memory_peak_reset();
        }
    }

    /// Disk space of files of its branch that its processes have open and that have no name any more. Blocks.
    pub fn unlinked_bytes(&self) -> u64 {
        usage::unlinked_bytes(&self.pids(), self.inner.dev)
    }

    /// Bytes that its processes sent to disks so far; those count that live, and children that they waited for. Blocks.
    pub fn written_bytes(&self) -> u64 {
        usage::written_bytes(&self.pids())
    }

    fn pids(&self) -> Vec<i32> {
        usage::pids(self.group(), self.inner.process.first.get().map(|(pid, _)| *pid))
    }

    /// Stops every process between two instructions. Returns when all stand still.
    pub async fn freeze(&self) -> Result<(), FreezeError> {
        let frozen = self.set_frozen(true).await;
        if let (Err(_), Some(group)) = (&frozen, self.group()) {
            let _ = group.set_frozen(false);
        }
        frozen
    }

    /// Lets them go on.
    pub async fn thaw(&self) -> Result<(), FreezeError> {
        self.set_frozen(false).await
    }

    async fn set_frozen(&self, frozen: bool) -> Result<(), FreezeError> {
        let group = self.group().ok_or(FreezeError::Unsupported)?;
        // Before it stands still, and after it does not.
        if frozen {
            self.inner.link.set_frozen(true);
        }
        let done = self.change_frozen(group, frozen).await;
        if done.is_ok() != frozen {
            self.inner.link.set_frozen(false);
        }
        done
    }

    async fn change_frozen(&self, group: &Group, frozen: bool) -> Result<(), FreezeError> {
        let deadline = Instant::now() + FREEZE_PATIENCE;
        let mut pause = Duration::from_micros(100);
        group.set_frozen(frozen).map_err(FreezeError::from_io)?;
        while group.is_frozen().map_err(FreezeError::from_io)? != frozen {
            if Instant::now() > deadline {
                return Err(FreezeError::Slow);
            }
            sleep(pause).await;
            pause = (pause * 2).min(Duration::from_millis(20));
            // Version 1 may have to be told again when a process forked meanwhile.
            group.set_frozen(frozen).map_err(FreezeError::from_io)?;
        }
        Ok(())
    }

    /// Kills all of it and returns when nothing is left, or after some seconds: see [`Hand::is_gone`].
    pub async fn stop(&self) {
        self.inner.process.kill();
        if timeout(STOP_PATIENCE, self.inner.process.gone()).await.is_err() {
            tracing::error!("a hand was killed and is not gone");
        }
    }

    /// Whether no process of it is left.
    pub fn is_gone(&self) -> bool {
        self.inner.process.gone_already().is_some()
    }

    /// Why it is lost, if it is.
    pub fn lost(&self) -> Option<String> {
        self.inner.process.gone_already().or_else(|| self.inner.link.lost())
    }

    /// Returns when it is lost, and why.
    pub async fn ended(&self) -> String {
        tokio::select! {
            reason = self.inner.process.gone() => reason,
            reason = self.inner.link.closed() => {
                let known = timeout(Duration::from_millis(500), self.inner.process.gone()).await;
                // A hand that does not answer is of no use.
                self.inner.process.kill();
                known.unwrap_or(reason)
            }
        }
    }

    fn group(&self) -> Option<&Group> {
        self.inner.process.group.as_ref()
    }

    fn oom_kills(&self) -> u64 {
        self.group().map_or(0, Group::oom_kills)
    }

    /// The process's end tells more than the channel's.
    fn explain(&self, error: LinkError) -> LinkError {
        match (error, self.inner.process.gone_already()) {
            (LinkError::Lost { .. }, Some(reason)) => LinkError::Lost { reason },
            (error, _) => error,
        }
    }
}

pub(crate) fn set(env: &mut Vec<(String, String)>, name: String, value: String) {
    env.retain(|(have, _)| *have != name);
    env.push((name, value));
}

/// Why a hand can't be frozen.
#[derive(Debug, thiserror::Error)]
pub enum FreezeError {
    /// No control group of this host can.
    #[error("nothing on this host can freeze a hand")]
    Unsupported,
    /// Some process did not stop, most likely one that waits for a disk.
    #[error("the hand did not stop within {} s", FREEZE_PATIENCE.as_secs())]
    Slow,
    /// The control group.
    #[error("the hand's control group can't be changed")]
    Group(#[source] io::Error),
}

impl FreezeError {
    fn from_io(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::Unsupported { Self::Unsupported } else { Self::Group(error) }
    }
}

impl Coded for FreezeError {
    fn code(&self) -> Code {
        match self {
            Self::Unsupported => Code::Refused,
            Self::Slow | Self::Group(_) => Code::HostBroken,
        }
    }
}

/// A running command. Dropping it before it ended kills the command, with all that it started.
#[derive(Debug)]
pub struct Exec {
    exec: link::Exec,
    hand: Hand,
    oom_kills: u64,
}

impl Exec {
    /// The next thing that it tells. See [`link::Exec::next_event`]. A command that failed while the kernel killed
    /// something of the hand for memory went over its limit; one of a hand that died tells why the hand did.
    pub async fn next_event(&mut self) -> Option<ExecEvent> {
        let event = self.exec.next_event().await?;
        let ExecEvent::Ended { outcome, cpu_ms, wall_ms, lingering, rss_bytes_max, processes_full } = event
        else {
            return Some(event);
        };
        let outcome = match outcome {
            Outcome::Signalled { signal: SIGXFSZ } => Outcome::exceeded("disk"),
            Outcome::Exited { code: 1.. } | Outcome::Signalled { .. } | Outcome::Killed { .. }
                if self.out_of_memory() =>
            {
                Outcome::exceeded("memory")
            }
            Outcome::HandLost { reason } => self.why_lost(reason).await,
            other @ (Outcome::Exited { .. }
            | Outcome::Signalled { .. }
            | Outcome::TimedOut { .. }
            | Outcome::LimitExceeded { .. }
            | Outcome::NotStarted { .. }
            | Outcome::Killed { .. }
            | Outcome::Cancelled
            | Outcome::Skipped) => other,
        };
        Some(ExecEvent::Ended { outcome, cpu_ms, wall_ms, lingering, rss_bytes_max, processes_full })
    }

    async fn why_lost(&self, reason: String) -> Outcome {
        let over = self.out_of_memory();
        match timeout(Duration::from_secs(1), self.hand.inner.process.gone()).await {
            Ok(_) if over => Outcome::exceeded("memory"),
            Ok(reason) => Outcome::HandLost { reason },
            Err(_) => Outcome::HandLost { reason },
        }
    }

    fn out_of_memory(&self) -> bool {
        self.hand.oom_kills() > self.oom_kills
    }

    /// See [`link::Exec::take_stdin`].
    pub fn take_stdin(&mut self) -> Option<ExecStdin> {
        self.exec.take_stdin()
    }

    /// See [`link::Exec::control`].
    pub fn control(&self) -> ExecControl {
        self.exec.control()
    }

    /// See [`link::Exec::signal`].
    pub async fn signal(&self, number: i32) -> Result<bool, LinkError> {
        self.exec.signal(number).await
    }

    /// See [`link::Exec::resize`].
    pub async fn resize(&self, size: Size) -> Result<bool, LinkError> {
        self.exec.resize(size).await
    }

    /// See [`link::Exec::cancel`].
    pub async fn cancel(&self) -> Result<bool, LinkError> {
        self.exec.cancel().await
    }
}
