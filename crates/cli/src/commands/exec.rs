//! `tendon branch exec`: one command on a branch, with its standard streams.

use std::io::{IsTerminal as _, Read as _};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use clap::Args;
use proto::client::{Client, ClientError, Events, LineSender};
use proto::error::{Code, ErrorBody};
use proto::http::{ExecControl, ExecInput, ExecLine, ExecReport, ExecRequest, PtySize};
use proto::ids::ExecId;
use proto::path::JsonBytes;
use proto::verify::{LimitsAsked, Outcome as Ended};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use super::source::branch_path;
use super::verify::summary;
use super::{App, LimitArgs, branch_text, env_pair, host, tree_path, usage};
use crate::Outcome;
use crate::output::{Cleaner, Output};

/// Bytes of standard input per message.
const STDIN_CHUNK: usize = 64 * 1024;

#[derive(Args)]
pub(crate) struct ExecArgs {
    /// The branch, by id or name
    #[arg(value_parser = branch_text)]
    branch: String,
    /// A directory of the branch to run in [default: the branch's top]
    #[arg(long, value_name = "DIR")]
    cwd: Option<PathBuf>,
    /// An environment variable. May be repeated
    #[arg(long, value_name = "NAME=VALUE", value_parser = env_pair)]
    env: Vec<(String, String)>,
    /// Give the command a terminal. Without it, escape sequences in what it writes are not passed on to yours
    #[arg(long, short)]
    tty: bool,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    argv: Vec<std::ffi::OsString>,
    #[command(flatten)]
    limits: LimitArgs,
}

pub(crate) async fn run(args: ExecArgs, app: &App<'_>) -> Outcome {
    if args.argv.first().is_none_or(|first| first.is_empty()) {
        return Err(usage("the command is empty", Some("name a program, like: -- cargo test")));
    }
    let mut limits = LimitsAsked::default();
    args.limits.apply(&mut limits);
    let cwd = args.cwd.filter(|dir| dir != Path::new(".")).map(|dir| tree_path(&dir));
    let request = ExecRequest {
        argv: args.argv.iter().map(|word| JsonBytes::new(word.as_bytes())).collect(),
        cwd: cwd.transpose()?,
        env: args.env,
        limits,
        stdin: args.tty || !std::io::stdin().is_terminal(),
        pty: args.tty.then(window),
    };
    let client = &app.client().await?;
    let path = format!("{}/exec", branch_path(&args.branch));
    let (sender, events) = client.duplex(&path, &request).await.map_err(ClientError::into_body)?;
    let raw = args.tty.then(RawTerminal::enter).flatten();
    let ended = follow(client, &request, sender, events, app).await;
    drop(raw);
    let report = ended?;
    for warning in &report.warnings {
        app.output.note(&format!("warning: {warning}"));
    }
    if app.output.json {
        app.output.json(&report);
    } else {
        // As `verify` says it. What is missing is the host's, so it stands beside the command's own output.
        for (word, text) in summary::weaknesses(&report.confinement) {
            app.output.note(&format!("{word} {text}"));
        }
    }
    Ok(status(&report, app))
}

/// The exit status of tendon's own failures here, as docker and env have it: the command's own is passed on.
pub(crate) const FAILED: u8 = 125;

/// The exit status of the command, as a shell would show it; see the help of `branch exec`.
fn status(report: &ExecReport, app: &App<'_>) -> u8 {
    let tell = |code: Code, message: String| {
        app.output.complain(&ErrorBody { code, message, causes: Vec::new(), hint: None });
    };
    match &report.outcome {
        Ended::Exited { code } => u8::try_from(*code).unwrap_or(1),
        Ended::Signalled { signal } => {
            app.output.note(&format!("ended by signal {signal}"));
            u8::try_from(128 + *signal).unwrap_or(1)
        }
        Ended::TimedOut { wall_ms_max } => {
            app.output.note(&format!("timed out after {}", proto::units::show_millis(*wall_ms_max)));
            124
        }
        Ended::LimitExceeded { limit } => {
            app.output.note(&format!("went over the {limit} limit"));
            137
        }
        Ended::Killed { reason } => {
            app.output.note(&format!("killed: {reason}"));
            137
        }
        Ended::NotStarted { reason, program_missing } => {
            tell(Code::BadInput, reason.clone());
            if *program_missing { 127 } else { 126 }
        }
        Ended::HandLost { reason } => {
            tell(Code::HandLost, format!("the hand was lost: {reason}"));
            FAILED
        }
        Ended::Cancelled | Ended::Skipped => Code::Cancelled.exit_status(),
    }
}

async fn follow(
    client: &Client,
    request: &ExecRequest,
    sender: LineSender<ExecInput>,
    mut events: Events<ExecLine>,
    app: &App<'_>,
) -> Result<ExecReport, ErrorBody> {
    // Beside the output: a command that writes before it has read all must not wait for itself.
    let feeder = tokio::spawn(feed(sender, request.stdin));
    let _feeder = AbortOnDrop(feeder);
    let broken = |error: std::io::Error| host(format!("signals can't be received: {error}"));
    let mut interrupt = signal(SignalKind::interrupt()).map_err(broken)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(broken)?;
    let mut hangup = signal(SignalKind::hangup()).map_err(broken)?;
    let mut resized = signal(SignalKind::window_change()).map_err(broken)?;
    let mut screen = Screen { output: app.output, own: request.pty.is_some(), cleaners: Default::default() };
    let (mut interrupts, mut ending) = (0, false);
    let mut closed = false;
    let mut id = None;
    loop {
        // An interrupt is for the command first; whoever ends tendon means both.
        let mut end = false;
        tokio::select! {
            event = events.next() => match event.map_err(ClientError::into_body)? {
                ExecLine::Started { exec } => id = Some(exec),
                ExecLine::Output { fd, bytes } => {
                    let bytes = bytes.decode().map_err(|error| ClientError::Answer(error).into_body())?;
                    screen.show(fd, &bytes);
                    // As a pipe does to a command that nobody reads: without this one might run for ever.
                    if app.output.closed() && !closed {
                        closed = true;
                        if let Some(id) = &id {
                            control(client, id, &ExecControl::Cancel {}).await;
                        }
                    }
                }
                ExecLine::Done { report } => return Ok(*report),
                ExecLine::Failed { error } => return Err(error),
            },
            _ = interrupt.recv() => {
                interrupts += 1;
                match &id {
                    Some(id) if interrupts == 1 => control(client, id, &ExecControl::Signal { signal: 2 }).await,
                    Some(_) | None => end = true,
                }
            }
            _ = terminate.recv() => end = true,
            _ = hangup.recv() => end = true,
            _ = resized.recv(), if request.pty.is_some() => {
                if let Some(id) = &id {
                    control(client, id, &ExecControl::Resize { size: window() }).await;
                }
            }
        }
        match &id {
            // Its record still comes.
            Some(id) if end && !ending => {
                ending = true;
                control(client, id, &ExecControl::Cancel {}).await;
            }
            Some(_) | None if end => return Err(cancelled()),
            Some(_) | None => {}
        }
    }
}

pub(super) fn cancelled() -> ErrorBody {
    ErrorBody { code: Code::Cancelled, message: "cancelled".into(), causes: Vec::new(), hint: None }
}

/// Acts on the exec. If it has ended meanwhile, its end comes as an event.
async fn control(client: &Client, exec: &ExecId, control: &ExecControl) {
    let _ = client.post::<serde_json::Value>(&format!("/v1/execs/{exec}"), control).await;
}

/// Sends standard input on. Its end, or a command that takes no more, ends the request's body.
async fn feed(sender: LineSender<ExecInput>, wanted: bool) {
    if !wanted {
        return;
    }
    let mut stdin = read_stdin();
    while let Some(bytes) = stdin.recv().await {
        if sender.send(&ExecInput { stdin: JsonBytes::new(&bytes) }).await.is_err() {
            return;
        }
    }
}

/// Where a command's output goes. Only a terminal that was given to the command (`--tty`) is its own to steer.
struct Screen<'a> {
    output: &'a Output,
    own: bool,
    cleaners: [Cleaner; 2],
}

impl Screen<'_> {
    fn show(&mut self, fd: u8, bytes: &[u8]) {
        let err = fd == 2 || self.output.json;
        let terminal = if err { self.output.terminal_err } else { self.output.terminal };
        let cleaned = (terminal && !self.own).then(|| self.cleaners[usize::from(fd == 2)].next(bytes));
        let bytes = cleaned.as_ref().map_or(bytes, String::as_bytes);
        if err { self.output.raw_err(bytes) } else { self.output.raw(bytes) }
    }
}

struct AbortOnDrop(tokio::task::JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Standard input in a thread of its own: it may block for ever, also when the command has long ended.
fn read_stdin() -> mpsc::Receiver<Vec<u8>> {
    let (sender, receiver) = mpsc::channel(4);
    std::thread::spawn(move || {
        let mut stdin = std::io::stdin().lock();
        let mut buffer = vec![0; STDIN_CHUNK];
        while let Ok(read @ 1..) = stdin.read(&mut buffer) {
            if sender.blocking_send(buffer[..read].to_vec()).is_err() {
                break;
            }
        }
    });
    receiver
}

fn window() -> PtySize {
    let size = tcgetwinsize(std::io::stdout()).ok().filter(|size| size.ws_row > 0 && size.ws_col > 0);
    size.map_or(PtySize { rows: 24, cols: 80 }, |size| PtySize { rows: size.ws_row, cols: size.ws_col })
}

/// The terminal passes every key on while this lives.
struct RawTerminal(Termios);

impl RawTerminal {
    fn enter() -> Option<Self> {
        let before = tcgetattr(std::io::stdin()).ok()?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(std::io::stdin(), OptionalActions::Now, &raw).ok()?;
        Some(Self(before))
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, &self.0);
    }
}
