//! One run of git: carries bytes both ways, with limits of size and time, and ends what does not end.

use std::ffi::OsStr;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};

use super::{CANCEL_EVERY, Git, GitError, STDERR_BYTES_MAX, STDOUT_BYTES_MAX};
use crate::base::Cancel;

impl Git {
    pub(super) fn drive<A: AsRef<OsStr>>(
        &self,
        args: &[A],
        stdin: &[u8],
        stdout: &mut dyn Write,
        progress: &dyn Fn(&str),
    ) -> Result<End, GitError> {
        let name = subcommand(args);
        let from = match &self.input {
            Some(file) => {
                let copied = file.try_clone();
                Stdio::from(copied.map_err(|source| GitError::Io { command: name.clone(), source })?)
            }
            None if stdin.is_empty() => Stdio::null(),
            None => Stdio::piped(),
        };
        let child = self
            .command()
            .args(args)
            .stdin(from)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(GitError::Missing)?;
        let cancel = self.cancel.clone();
        let mut child =
            Running { child, stdin, cancel, stderr: Vec::new(), line: Vec::new(), returned: false };
        let started = Instant::now();
        let pumped = child.pump(stdout, progress, started + self.run_max, self.silence_max);
        let stop = |child: &mut Running<'_>| {
            child.kill();
            said(&child.stderr)
        };
        match pumped {
            Ok(Pumped::Closed) => {}
            Ok(Pumped::Late) => {
                let stderr = stop(&mut child);
                return Err(GitError::TimedOut {
                    command: name,
                    seconds: started.elapsed().as_secs(),
                    stderr,
                });
            }
            Err(error) if error.kind() == io::ErrorKind::FileTooLarge => {
                stop(&mut child);
                return Err(GitError::TooMuch { command: name });
            }
            Err(source) => {
                stop(&mut child);
                return Err(GitError::Io { command: name, source });
            }
        }
        let status = child.child.wait().map_err(|source| GitError::Io { command: name, source })?;
        Ok(End { status, stderr: said(&child.stderr) })
    }
}

/// How a command ended, and the end of what it said.
pub(super) struct End {
    pub(super) status: ExitStatus,
    stderr: String,
}

impl End {
    pub(super) fn failed<A: AsRef<OsStr>>(self, args: &[A]) -> GitError {
        let status = match (self.status.code(), self.status.signal()) {
            (Some(code), _) => format!("exit status {code}"),
            (None, signal) => format!("signal {}", signal.unwrap_or_default()),
        };
        GitError::Failed { command: subcommand(args), status, stderr: self.stderr }
    }
}

enum Pumped {
    Closed,
    Late,
}

struct Running<'a> {
    child: Child,
    stdin: &'a [u8],
    cancel: Cancel,
    stderr: Vec<u8>,
    line: Vec<u8>,
    /// Whether a carriage return came last.
    returned: bool,
}

impl Running<'_> {
    /// Carries bytes both ways until it closed its outputs.
    fn pump(
        &mut self,
        out: &mut dyn Write,
        progress: &dyn Fn(&str),
        end: Instant,
        silence_max: Duration,
    ) -> io::Result<Pumped> {
        let mut stdin = self.child.stdin.take();
        let mut stdout = self.child.stdout.take();
        let mut stderr = self.child.stderr.take();
        if let Some(pipe) = &stdin {
            rustix::io::ioctl_fionbio(pipe, true)?;
        }
        let mut buffer = vec![0; 64 * 1024];
        let mut heard = Instant::now();
        while stdout.is_some() || stderr.is_some() {
            if self.cancel.is_cancelled() {
                return Err(io::Error::other("cancelled"));
            }
            let late = end.min(heard + silence_max);
            let wait = late.saturating_duration_since(Instant::now());
            let ready = wait_for(stdin.as_ref(), stdout.as_ref(), stderr.as_ref(), wait.min(CANCEL_EVERY))?;
            let Some([can_write, can_read, can_hear]) = ready else {
                if wait <= CANCEL_EVERY {
                    return Ok(Pumped::Late);
                }
                continue;
            };
            heard = Instant::now();
            if can_write {
                stdin = stdin.filter(|pipe| self.feed(pipe));
            }
            if can_read && let Some(pipe) = &stdout {
                match rustix::io::read(pipe, &mut buffer)? {
                    0 => stdout = None,
                    n => out.write_all(&buffer[..n])?,
                }
            }
            if can_hear && let Some(pipe) = &stderr {
                match rustix::io::read(pipe, &mut buffer)? {
                    0 => stderr = None,
                    n => self.hear(&buffer[..n], progress),
                }
            }
        }
        Ok(Pumped::Closed)
    }

    /// Writes what fits; `false` when there is no more to write.
    fn feed(&mut self, pipe: impl AsFd) -> bool {
        match rustix::io::write(pipe, &self.stdin[..self.stdin.len().min(64 * 1024)]) {
            Ok(n) => {
                self.stdin = &self.stdin[n..];
                !self.stdin.is_empty()
            }
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => true,
            // It does not want the rest; its exit status tells why.
            Err(_) => false,
        }
    }

    fn hear(&mut self, bytes: &[u8], progress: &dyn Fn(&str)) {
        for byte in bytes {
            // A line that ends in a carriage return alone is a progress display, not part of a message; ssh ends its
            // messages in both.
            if std::mem::take(&mut self.returned) && *byte != b'\n' {
                self.line.clear();
            }
            if !matches!(byte, b'\r' | b'\n') {
                self.line.push(*byte);
                if self.line.len() < STDERR_BYTES_MAX {
                    continue;
                }
            }
            let text = String::from_utf8_lossy(&self.line);
            let text: String = text.trim().chars().filter(|c| !c.is_control()).collect();
            if !text.is_empty() {
                progress(&text);
            }
            if *byte == b'\r' {
                self.returned = true;
                continue;
            }
            self.stderr.append(&mut self.line);
            self.stderr.push(b'\n');
            let over = self.stderr.len().saturating_sub(STDERR_BYTES_MAX);
            self.stderr.drain(..over);
        }
    }

    fn kill(&mut self) {
        if let Some(pid) = rustix::process::Pid::from_raw(self.child.id().cast_signed()) {
            // Its own process group: git's helpers end with it.
            let _ = rustix::process::kill_process_group(pid, rustix::process::Signal::KILL);
        }
        let _ = self.child.wait();
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            self.kill();
        }
    }
}

/// Which of the three pipes can be used now; `None` when none could for so long.
fn wait_for(
    stdin: Option<impl AsFd>,
    stdout: Option<impl AsFd>,
    stderr: Option<impl AsFd>,
    wait: Duration,
) -> io::Result<Option<[bool; 3]>> {
    let fds = [
        stdin.as_ref().map(|fd| (fd.as_fd(), PollFlags::OUT)),
        stdout.as_ref().map(|fd| (fd.as_fd(), PollFlags::IN)),
        stderr.as_ref().map(|fd| (fd.as_fd(), PollFlags::IN)),
    ];
    let mut polled: Vec<PollFd<'_>> =
        fds.iter().flatten().map(|(fd, flags)| PollFd::from_borrowed_fd(*fd, *flags)).collect();
    let timeout = Timespec::try_from(wait).map_err(io::Error::other)?;
    let ready = match rustix::event::poll(&mut polled, Some(&timeout)) {
        Ok(0) => return Ok(None),
        Ok(_) => true,
        Err(rustix::io::Errno::INTR) => false,
        Err(error) => return Err(error.into()),
    };
    let mut polled = polled.iter();
    Ok(Some(fds.map(|fd| fd.is_some() && polled.next().is_some_and(|p| ready && !p.revents().is_empty()))))
}

pub(super) struct Bounded(pub(super) Vec<u8>);

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > STDOUT_BYTES_MAX {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn subcommand<A: AsRef<OsStr>>(args: &[A]) -> String {
    args.first().map(|arg| arg.as_ref().to_string_lossy().into_owned()).unwrap_or_default()
}

fn said(stderr: &[u8]) -> String {
    let text = String::from_utf8_lossy(stderr);
    let lines: Vec<String> = text
        .lines()
        .map(|line| line.trim().chars().filter(|c| !c.is_control()).collect::<String>())
        .filter(|line| !line.is_empty())
        .collect();
    if lines.is_empty() { "it said nothing".into() } else { lines.join("; ") }
}
