//! What runs here: the execs, their supervisors, and killing.

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use proto::hand::{RunningExec, StatusReply};
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus};
use sys::supervise::{Command, Spawner};
use tokio::net::unix::pipe;
use tokio::sync::{mpsc, watch};

use crate::limits::KILL_PATIENCE;
use crate::tree;

/// Why an exec is brought to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cause {
    /// Its time was up: the limit.
    TimedOut(u64),
    /// The runner said so.
    Cancelled,
    /// The runner dropped the call: nobody hears the outcome.
    Dropped,
    /// Something beyond this exec went wrong.
    Lost(String),
}

/// All that runs in this hand.
#[derive(Debug)]
pub struct Table {
    /// Where the branch is mounted.
    pub root: PathBuf,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    spawner: Spawner,
    execs: HashMap<String, Running>,
    supervisors: HashMap<i32, Supervisor>,
}

/// An exec whose outcome was not yet reported.
#[derive(Debug)]
struct Running {
    command: Option<i32>,
    since: Instant,
    causes: mpsc::Sender<Cause>,
    terminal: Option<Arc<pipe::Sender>>,
}

#[derive(Debug)]
struct Supervisor {
    /// Its command runs; afterwards whatever lives below it lingers.
    busy: bool,
    /// We killed it ourselves.
    doomed: bool,
    gone: watch::Sender<bool>,
}

/// A started exec, as its task knows it.
#[derive(Debug)]
pub struct Ticket {
    /// Its id.
    pub exec: String,
    /// Its supervisor's process id.
    pub supervisor: i32,
    /// Why it is to end.
    pub causes: mpsc::Receiver<Cause>,
    /// True once the supervisor, and so every descendant, is gone.
    pub gone: watch::Receiver<bool>,
}

impl Ticket {
    /// Whether nothing of this exec lives.
    pub fn is_gone(&self) -> bool {
        *self.gone.borrow()
    }
}

impl Table {
    /// An empty one.
    pub fn new(root: PathBuf, spawner: Spawner) -> Self {
        let inner = Inner { spawner, execs: HashMap::new(), supervisors: HashMap::new() };
        Table { root, inner: Mutex::new(inner) }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether an exec of this id runs.
    pub fn is_running(&self, exec: &str) -> bool {
        self.lock().execs.contains_key(exec)
    }

    /// Whether commands are killed before this process when memory runs out.
    pub fn raises_oom_score(&self) -> bool {
        self.lock().spawner.raises_oom_score()
    }

    /// Starts a command and enters it.
    pub fn spawn(
        &self,
        exec: &str,
        command: &Command,
        stdio: [BorrowedFd<'_>; 3],
        report: BorrowedFd<'_>,
        terminal: Option<Arc<pipe::Sender>>,
    ) -> std::io::Result<Ticket> {
        let mut inner = self.lock();
        let supervisor = inner.spawner.spawn(command, stdio, report)?;
        let (gone_in, gone) = watch::channel(false);
        let (causes_in, causes) = mpsc::channel(4);
        inner.supervisors.insert(supervisor, Supervisor { busy: true, doomed: false, gone: gone_in });
        let running = Running { command: None, since: Instant::now(), causes: causes_in, terminal };
        inner.execs.insert(exec.to_owned(), running);
        Ok(Ticket { exec: exec.to_owned(), supervisor, causes, gone })
    }

    /// Notes the command's process id.
    pub fn started(&self, exec: &str, pid: i32) {
        if let Some(running) = self.lock().execs.get_mut(exec) {
            running.command = Some(pid);
        }
    }

    /// Notes that the command is over: it can't be signalled any more, since its process id may be used again.
    pub fn command_over(&self, ticket: &Ticket) {
        let mut inner = self.lock();
        if let Some(running) = inner.execs.get_mut(&ticket.exec) {
            running.command = None;
        }
        if let Some(supervisor) = inner.supervisors.get_mut(&ticket.supervisor) {
            supervisor.busy = false;
        }
    }

    /// Forgets the exec.
    pub fn remove(&self, ticket: &Ticket) {
        self.lock().execs.remove(&ticket.exec);
    }

    /// Tells a running exec to end. False: there is none of this id.
    pub fn stop(&self, exec: &str, cause: Cause) -> bool {
        let inner = self.lock();
        let Some(running) = inner.execs.get(exec) else { return false };
        let _ = running.causes.try_send(cause);
        true
    }

    /// Signals the command's process group. False: nothing of this id runs.
    pub fn signal(&self, exec: &str, signal: Signal) -> bool {
        let command = self.lock().execs.get(exec).and_then(|running| running.command);
        let Some(group) = command.and_then(Pid::from_raw) else { return false };
        rustix::process::kill_process_group(group, signal).is_ok()
    }

    /// The terminal of a running exec.
    pub fn terminal(&self, exec: &str) -> Option<Arc<pipe::Sender>> {
        self.lock().execs.get(exec).and_then(|running| running.terminal.clone())
    }

    /// What runs now.
    pub fn status(&self) -> StatusReply {
        let inner = self.lock();
        let execs = inner.execs.iter().map(|(exec, running)| RunningExec {
            exec: exec.clone(),
            pid: running.command.unwrap_or(0),
            wall_ms: u64::try_from(running.since.elapsed().as_millis()).unwrap_or(u64::MAX),
        });
        let idle = inner.supervisors.iter().filter(|(_, supervisor)| !supervisor.busy);
        let lingering: usize = idle.map(|(pid, _)| tree::descendants(*pid).len()).sum();
        StatusReply {
            execs: execs.collect(),
            lingering: u32::try_from(lingering).unwrap_or(u32::MAX),
            pid: std::process::id(),
        }
    }

    /// Tells every running exec why it ends, then kills every process but this one. Returns how many execs had any.
    pub fn kill_everything(&self, cause: &Cause) -> usize {
        let count = {
            let mut inner = self.lock();
            for running in inner.execs.values() {
                let _ = running.causes.try_send(cause.clone());
            }
            for supervisor in inner.supervisors.values_mut() {
                supervisor.doomed = true;
            }
            inner.supervisors.len()
        };
        if !sys::supervise::kill_namespace() {
            let me = std::process::id().cast_signed();
            for _ in 0..crate::limits::STRIKE_ROUNDS_MAX {
                if tree::strike_now(me) == 0 {
                    break;
                }
                self.reap();
            }
        }
        count
    }

    /// Returns when no process but this one is left, or after a while in spite of one that can't be killed.
    pub async fn until_empty(&self) {
        let since = Instant::now();
        let me = std::process::id().cast_signed();
        while !tree::descendants(me).is_empty() && since.elapsed() < KILL_PATIENCE {
            self.reap();
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
    }

    /// Waits for every dead child. One that is a supervisor which did not end by itself was killed by the code that ran
    /// here: nothing holds that exec's processes together any more, so all of them are killed.
    pub fn reap(&self) -> bool {
        let mut murdered = false;
        // `wait`, not rustix's `waitpid(None)`: that is only for children of one's own process group.
        while let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) {
            if let Some(supervisor) = self.lock().supervisors.remove(&pid.as_raw_nonzero().get()) {
                supervisor.gone.send_replace(true);
                murdered |= ended_badly(status) && !supervisor.doomed;
            }
        }
        murdered
    }

    /// Reaps for ever: `signal` is SIGCHLD as a descriptor, from `sys::supervise::child_signal`.
    pub async fn reap_all(&self, signal: pipe::Receiver) -> std::io::Result<()> {
        let mut info = [0; 512];
        loop {
            signal.readable().await?;
            match signal.try_read(&mut info) {
                Ok(_) => {}
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => continue,
                Err(error) => return Err(error),
            }
            if self.reap() {
                self.kill_everything(&Cause::Lost(MURDERED.into()));
            }
        }
    }

    /// Kills all below an exec's supervisor, and returns when that is done. Where it can't be done, everything is killed.
    pub async fn kill_tree(&self, exec: &str, supervisor: i32, mut gone: watch::Receiver<bool>) {
        let since = Instant::now();
        let mut pause_ms = 1;
        while !*gone.borrow() {
            if since.elapsed() > KILL_PATIENCE {
                self.kill_everything(&Cause::Lost(UNKILLABLE.into()));
                tree::signal(supervisor, Signal::KILL);
                return;
            }
            // Most of what a command starts stays in its group, which dies at once.
            let command = self.lock().execs.get(exec).and_then(|running| running.command);
            if let Some(group) = command {
                tree::signal_group(group, Signal::KILL);
            }
            let limit = KILL_PATIENCE.saturating_sub(since.elapsed());
            let _ = tokio::time::timeout(limit, tree::strike(supervisor)).await;
            let pause = std::time::Duration::from_millis(pause_ms);
            let _ = tokio::time::timeout(pause, gone.changed()).await;
            pause_ms = (pause_ms * 2).min(50);
        }
    }
}

/// What every exec is told when the code that ran killed a supervisor.
pub const MURDERED: &str = "a supervisor process of this hand was killed, by the code that ran in it or because memory \
                            ran out: every process of the hand was killed";
const UNKILLABLE: &str = "a process could not be killed for 3 s: every process of the hand was killed";

fn ended_badly(status: WaitStatus) -> bool {
    status.exit_status() != Some(0)
}
