//! A runner's process, seen from outside: whether it lives, and whether it works. Reads `/proc`, and signals nobody.

use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tokio::time::Instant;

/// The least that is work, in ticks of 10 ms: a runner that only waits for clients needs fewer in a minute.
const WORK_TICKS: u64 = 20;

/// A process that lived when this was made.
pub(crate) struct Life {
    pub(crate) pid: i32,
    process: OwnedFd,
    /// Its CPU time when it was last seen to have worked.
    cpu: u64,
    /// When that was.
    worked: Instant,
}

impl Life {
    /// `None` if there is no such process.
    pub(crate) fn of(pid: i32) -> Option<Self> {
        let process = pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?;
        Some(Self { pid, process, cpu: cpu(pid).unwrap_or(0), worked: Instant::now() })
    }

    /// Whether it has ended. Its locks are free then.
    pub(crate) fn ended(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(&self.process, PollFlags::IN)], Some(&now)).is_ok_and(|ready| ready > 0)
    }

    /// How long it has not worked. To be asked every now and then.
    pub(crate) fn idle(&mut self) -> Duration {
        match cpu(self.pid) {
            Some(cpu) if cpu >= self.cpu + WORK_TICKS => (self.cpu, self.worked) = (cpu, Instant::now()),
            Some(_) | None => {}
        }
        self.worked.elapsed()
    }
}

/// The CPU time of all its threads, in ticks: proc_pid_stat(5), fields 14 and 15.
fn cpu(pid: i32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, the second field, may hold anything.
    let mut fields = stat.rsplit_once(") ")?.1.split(' ').skip(11);
    let mut ticks = || fields.next()?.parse::<u64>().ok();
    Some(ticks()? + ticks()?)
}

#[cfg(test)]
mod tests {
    use std::process::Stdio;

    use super::*;

    #[test]
    fn a_process_that_works_is_told_from_one_that_does_not() {
        let mut sleep = testkit::process::command("sleep");
        let mut child = sleep.arg("60").stdin(Stdio::null()).spawn().unwrap();
        let own = i32::try_from(std::process::id()).unwrap();
        let mut still = Life::of(i32::try_from(child.id()).unwrap()).unwrap();
        let mut works = Life::of(own).unwrap();
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_secs(3) {
            works.idle();
            still.idle();
        }
        assert!(works.idle() < Duration::from_secs(2) && !works.ended());
        assert!(still.idle() >= Duration::from_secs(3) && !still.ended());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(still.ended());
        assert!(Life::of(still.pid).is_none());
    }
}
