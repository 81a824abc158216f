//! One exec: its pipes or terminal, its output stream, and its end.
//!
//! The stream ends when the command has exited and its output is at its end; if background processes keep a pipe open,
//! `limits::DRAIN` after the command, and what they write later is dropped. Output waits in the pipe, and so does the command, as long as the runner does not read.

use std::cell::RefCell;
use std::ffi::CString;
use std::fmt::Display;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use proto::hand::exec_input::Input;
use proto::hand::exec_output::Output;
use proto::hand::exited::How;
use proto::hand::{CHUNK_BYTES_MAX, Cancelled, ExecInput, ExecOutput, Exited, Started, WindowSize};
use rustix::fs::OFlags;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::pty::OpenptFlags;
use rustix::termios::Winsize;
use sys::supervise::{Command, RECORD_BYTES, Report, Stage};
use tokio::net::unix::pipe;
use tokio::sync::mpsc;
use tokio::time::Sleep;
use tonic::{Status, Streaming};

use crate::limits::{DRAIN, SINK_PAUSE};
use crate::plan::{MORE_OF_THE_HOST, Plan, PlanError};
use crate::table::{Cause, MURDERED, Table, Ticket};

/// No process can be made: a limit is reached.
const EAGAIN: i32 = 11;

type Sender = mpsc::Sender<Result<ExecOutput, Status>>;

/// Why a command could not be started.
pub struct Failure {
    /// In words.
    pub reason: String,
    /// The hand has as many processes as it may have.
    pub processes_full: bool,
    /// There is no such program.
    pub program_missing: bool,
}

impl<T: Display> From<T> for Failure {
    fn from(error: T) -> Self {
        Self { reason: error.to_string(), processes_full: false, program_missing: false }
    }
}

/// Starts a planned exec; its output goes to `out`.
pub fn start(
    table: &Arc<Table>,
    plan: &Plan,
    input: Streaming<ExecInput>,
    null: &OwnedFd,
    out: Sender,
) -> Result<(), Failure> {
    let directory = plan.directory(&table.root);
    let command = Command {
        exe: plan.program(&directory).map_err(|error| {
            let program_missing = matches!(&error, PlanError::NotFound { found, .. } if found.is_empty());
            Failure { program_missing, ..error.into() }
        })?,
        argv: plan.argv.clone(),
        env: plan.env.clone(),
        cwd: CString::new(directory.as_os_str().as_bytes())?,
        terminal: plan.pty.is_some(),
    };
    let plumbing = Plumbing::lay(plan).map_err(|error| format!("the hand can't make pipes: {error}"))?;
    let (report, report_in) =
        open_pipe(Nonblocking::Read).map_err(|error| format!("the hand can't make pipes: {error}"))?;
    let report = readable(report).map_err(|error| format!("the hand can't watch a pipe: {error}"))?;
    let ends = &plumbing.theirs;
    let stdio = [
        ends.stdin.as_ref().unwrap_or(null).as_fd(),
        ends.stdout.as_fd(),
        ends.stderr.as_ref().unwrap_or(&ends.stdout).as_fd(),
    ];
    let terminal = plan.pty.is_some().then(|| plumbing.stdin.clone()).flatten();
    let ticket = table.spawn(&plan.exec, &command, stdio, report_in.as_fd(), terminal).map_err(|error| {
        start_failure(Stage::Fork, error.raw_os_error().unwrap_or(0), &command, &directory)
    })?;
    drop(plumbing.theirs);
    drop(report_in);

    let pump = match plumbing.stdin {
        Some(stdin) if plan.stdin => Some(tokio::spawn(pump_stdin(stdin, input, plan.pty.is_some()))),
        Some(_) | None => None,
    };
    let task = Task {
        table: Arc::clone(table),
        ticket,
        report: Some(report),
        streams: [Stream::new(Some(plumbing.stdout), plan), Stream::new(plumbing.stderr, plan)],
        pending: None,
        cause: None,
        killing: false,
        ended: None,
        failure: Box::new(move |stage, errno| start_failure(stage, errno, &command, &directory)),
        since: Instant::now(),
        deadline: plan.wall_ms_max.map(|ms| (ms, Box::pin(tokio::time::sleep(Duration::from_millis(ms))))),
        drain: None,
        draining: false,
        out,
    };
    tokio::spawn(async move {
        task.run().await;
        if let Some(pump) = pump {
            pump.abort();
        }
    });
    Ok(())
}

/// What became of an attempt to start.
fn start_failure(stage: Stage, errno: i32, command: &Command, directory: &Path) -> Failure {
    let error = io::Error::from_raw_os_error(errno);
    let program = command.exe.to_string_lossy();
    let processes_full = (stage, errno) == (Stage::Fork, EAGAIN);
    let reason = match (stage, errno) {
        (Stage::Fork, EAGAIN) => "the hand's process limit is reached".into(),
        (Stage::Fork, 12) => "the hand's memory limit is reached".into(),
        (Stage::Fork, _) => format!("the hand can't make a process: {error}"),
        (Stage::Terminal, _) => format!("the terminal can't be taken: {error}"),
        (Stage::Cwd, _) => format!("the directory {} can't be entered: {error}", directory.display()),
        (Stage::Exec, 8) => {
            format!("`{program}` is neither a program of this machine nor a script with a #! line")
        }
        (Stage::Exec, 2) if Path::new(&*program).exists() => {
            format!(
                "`{program}` is there, but the interpreter that it names was not found in the sandbox; {MORE_OF_THE_HOST}"
            )
        }
        (Stage::Exec, 2) if program.starts_with('/') => {
            format!("`{program}` was not found in the sandbox; {MORE_OF_THE_HOST}")
        }
        (Stage::Exec, 2) => format!("`{program}` was not found in the sandbox"),
        (Stage::Exec, _) => format!("`{program}` can't be executed: {error}"),
    };
    // What is there and names an interpreter that is not counts as one that can't be executed.
    let program_missing = (stage, errno) == (Stage::Exec, 2) && !Path::new(&*program).exists();
    Failure { reason, processes_full, program_missing }
}

/// Both sides of what connects the command.
struct Plumbing {
    stdin: Option<Arc<pipe::Sender>>,
    stdout: pipe::Receiver,
    stderr: Option<pipe::Receiver>,
    theirs: Ends,
}

/// The command's side.
struct Ends {
    stdin: Option<OwnedFd>,
    stdout: OwnedFd,
    stderr: Option<OwnedFd>,
}

impl Plumbing {
    fn lay(plan: &Plan) -> io::Result<Plumbing> {
        match plan.pty {
            Some(size) => Plumbing::terminal(size),
            None => Plumbing::pipes(plan.stdin),
        }
    }

    fn pipes(with_stdin: bool) -> io::Result<Plumbing> {
        let (stdout, stdout_in) = open_pipe(Nonblocking::Read)?;
        let (stderr, stderr_in) = open_pipe(Nonblocking::Read)?;
        let (mut stdin, mut stdin_out) = (None, None);
        if with_stdin {
            let (theirs, ours) = open_pipe(Nonblocking::Write)?;
            stdin = Some(Arc::new(pipe::Sender::from_owned_fd_unchecked(ours)?));
            stdin_out = Some(theirs);
        }
        let theirs = Ends { stdin: stdin_out, stdout: stdout_in, stderr: Some(stderr_in) };
        Ok(Plumbing { stdin, stdout: readable(stdout)?, stderr: Some(readable(stderr)?), theirs })
    }

    fn terminal(size: WindowSize) -> io::Result<Plumbing> {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let ours = rustix::pty::openpt(flags)?;
        rustix::pty::unlockpt(&ours)?;
        let theirs = rustix::pty::ioctl_tiocgptpeer(&ours, flags)?;
        rustix::fs::fcntl_setfl(&ours, OFlags::RDWR | OFlags::NONBLOCK)?;
        rustix::termios::tcsetwinsize(&ours, winsize(size))?;
        let stdout = readable(ours.try_clone()?)?;
        let stdin = Some(Arc::new(pipe::Sender::from_owned_fd_unchecked(ours)?));
        let theirs = Ends { stdin: Some(theirs.try_clone()?), stdout: theirs, stderr: None };
        Ok(Plumbing { stdin, stdout, stderr: None, theirs })
    }
}

/// The kernel's form of a terminal's size.
pub fn winsize(size: WindowSize) -> Winsize {
    let cut = |n: u32| u16::try_from(n).unwrap_or(u16::MAX);
    Winsize { ws_row: cut(size.rows), ws_col: cut(size.cols), ws_xpixel: 0, ws_ypixel: 0 }
}

enum Nonblocking {
    Read,
    Write,
}

fn open_pipe(ours: Nonblocking) -> io::Result<(OwnedFd, OwnedFd)> {
    let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
    let fd = match ours {
        Nonblocking::Read => &read,
        Nonblocking::Write => &write,
    };
    rustix::io::ioctl_fionbio(fd, true)?;
    Ok((read, write))
}

/// A pipe's end, or a terminal's: tokio only waits for it and reads.
fn readable(fd: OwnedFd) -> io::Result<pipe::Receiver> {
    pipe::Receiver::from_owned_fd_unchecked(fd)
}

/// Carries stdin into the command, a chunk at a time: the next is taken when the last was swallowed.
async fn pump_stdin(fd: Arc<pipe::Sender>, mut input: Streaming<ExecInput>, terminal: bool) {
    let mut open = true;
    while let Ok(Some(ExecInput { input: message })) = input.message().await {
        // A command that closed its stdin does not make the runner wait.
        if let Some(Input::Stdin(bytes)) = message
            && open
        {
            open = write_all(&fd, &bytes).await.is_ok();
        }
    }
    if terminal {
        // A terminal has no end of file, only the character that stands for it.
        let _ = write_all(&fd, b"\x04").await;
    }
}

async fn write_all(fd: &pipe::Sender, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        fd.writable().await?;
        match fd.try_write(bytes) {
            Ok(count) => bytes = &bytes[count..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

async fn read(fd: Option<&pipe::Receiver>) -> io::Result<Bytes> {
    let Some(fd) = fd else { return std::future::pending().await };
    loop {
        fd.readable().await?;
        match with_scratch(|scratch| fd.try_read(scratch)) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            result => return result,
        }
    }
}

/// One read of at most 64 KiB, into memory of exactly its size.
fn with_scratch(read: impl FnOnce(&mut [u8]) -> io::Result<usize>) -> io::Result<Bytes> {
    thread_local! {
        static SCRATCH: RefCell<Vec<u8>> = RefCell::new(vec![0; CHUNK_BYTES_MAX]);
    }
    SCRATCH.with_borrow_mut(|scratch| {
        let count = read(scratch)?;
        Ok(Bytes::copy_from_slice(&scratch[..count]))
    })
}

async fn read_either(first: &Stream, second: &Stream) -> (usize, io::Result<Bytes>) {
    // Not biased: neither stream starves the other.
    tokio::select! {
        chunk = read(first.fd.as_ref()) => (0, chunk),
        chunk = read(second.fd.as_ref()) => (1, chunk),
    }
}

/// False, once, if nobody will ever read; `step` hears of that by itself.
async fn has_room(out: &Sender) -> bool {
    out.reserve().await.is_ok()
}

/// One output stream.
struct Stream {
    fd: Option<pipe::Receiver>,
    /// After the drain: how much may still be taken.
    rest: usize,
    terminal: bool,
}

impl Stream {
    fn new(fd: Option<pipe::Receiver>, plan: &Plan) -> Self {
        Stream { fd, terminal: plan.pty.is_some(), rest: CHUNK_BYTES_MAX }
    }

    /// What of a chunk is passed on. Nothing read, or an error (a terminal's EIO), is the end.
    fn take(&mut self, chunk: io::Result<Bytes>) -> Option<Bytes> {
        let chunk = chunk.unwrap_or_default();
        if chunk.is_empty() {
            self.fd = None;
            return None;
        }
        Some(chunk)
    }

    /// Hears a stream no more that background processes hold. A terminal hangs up; a pipe is read on, for its writers to
    /// live: slowly, so that one that writes for ever does not keep the hand busy.
    fn abandon(&mut self) {
        let Some(fd) = self.fd.take() else { return };
        if self.terminal {
            return;
        }
        tokio::spawn(async move {
            while read(Some(&fd)).await.is_ok_and(|chunk| !chunk.is_empty()) {
                tokio::time::sleep(SINK_PAUSE).await;
            }
        });
    }
}

/// How the command ended.
struct End {
    how: How,
    cpu_us: u64,
    rss_bytes_max: u64,
    wall_us: u64,
    lingering: bool,
    processes_full: bool,
    program_missing: bool,
}

impl End {
    fn without_numbers(how: How) -> Self {
        End {
            how,
            cpu_us: 0,
            rss_bytes_max: 0,
            wall_us: 0,
            lingering: false,
            processes_full: false,
            program_missing: false,
        }
    }
}

/// The life of one exec.
struct Task {
    table: Arc<Table>,
    ticket: Ticket,
    report: Option<pipe::Receiver>,
    streams: [Stream; 2],
    pending: Option<ExecOutput>,
    cause: Option<Cause>,
    killing: bool,
    ended: Option<End>,
    failure: Box<dyn Fn(Stage, i32) -> Failure + Send>,
    since: Instant,
    deadline: Option<(u64, Pin<Box<Sleep>>)>,
    drain: Option<Pin<Box<Sleep>>>,
    /// The time for output is over.
    draining: bool,
    out: Sender,
}

impl Task {
    async fn run(mut self) {
        while !self.is_over() {
            self.step().await;
        }
        self.table.remove(&self.ticket);
        let exited = self.exited();
        let _ = self.out.send(Ok(output(Output::Exited(exited)))).await;
    }

    async fn step(&mut self) {
        let dropped = self.cause == Some(Cause::Dropped);
        let blocked = self.pending.is_some();
        let awaits_gone = self.killing && !self.ticket.is_gone();
        let [stdout, stderr] = &self.streams;
        let rest = self.draining && !blocked && self.streams.iter().any(|stream| stream.fd.is_some());
        tokio::select! {
            biased;
            () = self.out.closed(), if !dropped => self.end_by(Cause::Dropped),
            Some(cause) = self.ticket.causes.recv() => self.end_by(cause),
            ms = expired(&mut self.deadline), if self.ended.is_none() => self.end_by(Cause::TimedOut(ms)),
            _ = self.ticket.gone.changed(), if awaits_gone => {}
            true = has_room(&self.out), if blocked => {
                // This task is the only sender, so the room is still there.
                let _ = self.pending.take().map(|message| self.out.try_send(Ok(message)));
            }
            chunk = read(self.report.as_ref()), if !blocked => self.on_report(chunk),
            () = std::future::ready(()), if rest => self.take_rest(),
            () = elapsed(&mut self.drain), if !self.draining => self.draining = true,
            (index, chunk) = read_either(stdout, stderr), if !blocked && !self.draining => self.on_output(index, chunk),
        }
    }

    /// Nothing is left to say, but the end.
    fn is_over(&self) -> bool {
        let gone = !self.killing || self.ticket.is_gone();
        let dropped = self.cause == Some(Cause::Dropped);
        let quiet = self.pending.is_none() && self.streams.iter().all(|stream| stream.fd.is_none());
        self.ended.is_some() && gone && (quiet || dropped)
    }

    /// The first cause counts.
    fn end_by(&mut self, cause: Cause) {
        if cause == Cause::Dropped {
            self.pending = None;
            self.streams.iter_mut().for_each(|stream| stream.fd = None);
        }
        if self.ended.is_none() || cause == Cause::Dropped {
            self.cause.get_or_insert(cause);
        }
        // The command may be over while its last output is still awaited: what it left running lives on.
        if self.ended.is_none() && !self.killing {
            self.killing = true;
            let (table, exec) = (Arc::clone(&self.table), self.ticket.exec.clone());
            let (supervisor, gone) = (self.ticket.supervisor, self.ticket.gone.clone());
            tokio::spawn(async move { table.kill_tree(&exec, supervisor, gone).await });
        }
    }

    fn on_report(&mut self, chunk: io::Result<Bytes>) {
        let chunk = chunk.unwrap_or_default();
        for record in chunk.chunks(RECORD_BYTES) {
            let report = <&[u8; RECORD_BYTES]>::try_from(record).ok().and_then(Report::decode);
            match report {
                Some(Report::Started { pid }) => {
                    self.table.started(&self.ticket.exec, pid);
                    self.pending = Some(output(Output::Started(Started { pid })));
                }
                Some(Report::Failed { stage, errno }) => {
                    let Failure { reason, processes_full, program_missing } = (self.failure)(stage, errno);
                    let how = How::NotStarted(reason);
                    self.on_end(End { processes_full, program_missing, ..End::without_numbers(how) });
                }
                Some(Report::Exited { status, cpu_us, rss_bytes_max, wall_us, lingering }) => {
                    let how = how(status);
                    let none = End::without_numbers(how);
                    self.on_end(End { cpu_us, rss_bytes_max, wall_us, lingering, ..none });
                }
                None => {}
            }
        }
        if chunk.is_empty() && self.ended.is_none() {
            // The supervisor is gone without a word.
            if self.cause.is_none() {
                self.table.kill_everything(&Cause::Lost(MURDERED.into()));
                self.cause = Some(Cause::Lost(MURDERED.into()));
            }
            let wall_us = u64::try_from(self.since.elapsed().as_micros()).unwrap_or(u64::MAX);
            self.on_end(End { wall_us, ..End::without_numbers(How::Lost(MURDERED.into())) });
        }
    }

    fn on_end(&mut self, end: End) {
        self.report = None;
        self.ended = Some(end);
        self.drain = Some(Box::pin(tokio::time::sleep(DRAIN)));
        self.table.command_over(&self.ticket);
    }

    fn on_output(&mut self, index: usize, chunk: io::Result<Bytes>) {
        let Some(chunk) = self.streams[index].take(chunk) else { return };
        self.pending = Some(output(if index == 0 { Output::Stdout(chunk) } else { Output::Stderr(chunk) }));
    }

    /// The time for output is over: takes what the pipes hold now, then closes them.
    fn take_rest(&mut self) {
        for index in 0..self.streams.len() {
            let stream = &mut self.streams[index];
            let Some(fd) = &stream.fd else { continue };
            if stream.rest == 0 {
                stream.abandon();
                continue;
            }
            let chunk = with_scratch(|scratch| Ok(rustix::io::read(fd, scratch)?));
            if chunk.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock) {
                stream.abandon();
                continue;
            }
            stream.rest = stream.rest.saturating_sub(chunk.as_ref().map_or(0, |bytes| bytes.len()));
            self.on_output(index, chunk);
            if self.pending.is_some() {
                return;
            }
        }
    }

    fn exited(&mut self) -> Exited {
        let gone = self.ticket.is_gone();
        let Some(end) = self.ended.take() else { return Exited::default() };
        let how = match self.cause.take() {
            Some(Cause::TimedOut(ms)) => How::TimedOut(ms),
            Some(Cause::Cancelled | Cause::Dropped) => How::Cancelled(Cancelled {}),
            Some(Cause::Lost(reason)) => How::Lost(reason),
            None => end.how,
        };
        Exited {
            how: Some(how),
            cpu_ms: end.cpu_us.div_ceil(1000),
            rss_bytes_max: end.rss_bytes_max,
            wall_ms: end.wall_us / 1000,
            lingering: end.lingering && !gone,
            processes_full: end.processes_full,
            program_missing: end.program_missing,
        }
    }
}

fn how(status: i32) -> How {
    // The layout of wait(2): the signal in the low seven bits, else the exit status in the next byte.
    match status & 0x7f {
        0 => How::Code((status >> 8) & 0xff),
        signal => How::Signal(signal),
    }
}

fn output(output: Output) -> ExecOutput {
    ExecOutput { output: Some(output) }
}

async fn expired(deadline: &mut Option<(u64, Pin<Box<Sleep>>)>) -> u64 {
    match deadline {
        Some((ms, sleep)) => {
            sleep.await;
            let ms = *ms;
            *deadline = None;
            ms
        }
        None => std::future::pending().await,
    }
}

async fn elapsed(sleep: &mut Option<Pin<Box<Sleep>>>) {
    match sleep {
        Some(sleep) => sleep.await,
        None => std::future::pending().await,
    }
}
