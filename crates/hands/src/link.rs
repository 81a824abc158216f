//! The runner's end of a hand's channel: one HTTP/2 connection that carries every exec, file and question.
//!
//! A hand that died is known at once, since its end of the channel closes. One that is stuck is known
//! [`PING_INTERVAL`] + [`PING_PATIENCE`] after it stopped answering, as long as anything is asked of it. Every running exec then ends with
//! [`Outcome::HandLost`] and the cause.

use std::io;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hyper::client::conn::http2::Builder;
use hyper_util::rt::{TokioExecutor, TokioIo};
use proto::error::{Code, Coded};
use proto::hand::control_request::Action;
use proto::hand::exec_input::Input;
use proto::hand::exec_output::Output;
use proto::hand::exited::How;
use proto::hand::hand_client::HandClient;
use proto::hand::put_input::Input as PutMessage;
use proto::hand::{
    CHUNK_BYTES_MAX, Cancelled, ControlRequest, EnvVar, ExecInput, ExecOutput, Exited, GetRequest,
    KillAllRequest, MESSAGE_BYTES_MAX, PutInput, PutOpen, SelfTestRequest, Start, StatusReply, StatusRequest,
    WindowSize,
};
use proto::ids::ExecId;
use proto::verify::Outcome;
use tokio::net::UnixStream;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt};
use tonic::codegen::http::Uri;
use tonic::{Status, Streaming};

use crate::limits::REASON_BYTES_MAX;
use crate::transport::{self, Connection, Patience, Stillness, Watched};

/// How often a hand that has something to do is asked whether it lives.
pub const PING_INTERVAL: Duration = Duration::from_secs(2);
/// How long it may take to answer.
pub const PING_PATIENCE: Duration = Duration::from_secs(5);
/// How long a call may take that asks little of a hand. A hand that answers pings and not this is as good as stuck.
pub const CALL_PATIENCE: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 15 });
/// The same for one that asks much: a file, or the self-test, whose caller has a limit of its own.
const LONG_PATIENCE: Duration = Duration::from_secs(120);
/// Output of one exec that was received and not yet taken: beyond it the command waits.
const STREAM_WINDOW_BYTES: u32 = 256 * 1024;
/// Largest HTTP/2 frame that is received.
const FRAME_BYTES_MAX: u32 = 128 * 1024;
/// Stdin chunks that wait for the hand.
const STDIN_CHUNKS_MAX: usize = 2;

/// The connection to a hand. Cheap to clone; the channel closes, and the hand ends, when the last clone is gone.
#[derive(Clone, Debug)]
pub struct Link {
    client: HandClient<Connection>,
    lost: watch::Sender<Option<String>>,
    still: Arc<watch::Sender<Stillness>>,
}

/// A terminal's size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Lines.
    pub rows: u16,
    /// Columns.
    pub cols: u16,
}

/// What a command reads.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Stdin {
    /// Nothing: `/dev/null`.
    #[default]
    Null,
    /// What is written to [`Exec::take_stdin`], until that is dropped.
    Piped,
}

/// A command to run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExecSpec {
    /// The program and its arguments.
    pub argv: Vec<Vec<u8>>,
    /// Where; relative to the branch's root, which is the default.
    pub cwd: Option<Vec<u8>>,
    /// The whole environment.
    pub env: Vec<(String, String)>,
    /// What it reads.
    pub stdin: Stdin,
    /// A terminal instead of pipes.
    pub pty: Option<Size>,
    /// When it is killed, with all that it started.
    pub wall_ms_max: Option<u64>,
}

/// What an exec tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExecEvent {
    /// It wrote.
    Output {
        /// 1 or 2; a terminal's output is all 1.
        fd: u8,
        /// At most 64 KiB.
        bytes: Bytes,
    },
    /// It is over; nothing follows.
    Ended {
        /// How.
        outcome: Outcome,
        /// Of the command and all that it started and waited for.
        cpu_ms: u64,
        /// From its start to its end.
        wall_ms: u64,
        /// Background processes live on in the hand.
        lingering: bool,
        /// Largest resident set of one of its processes.
        rss_bytes_max: u64,
        /// It could not be started because the hand has as many processes as it may have.
        processes_full: bool,
    },
}

/// Why a hand could not be asked.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// It is gone, or stuck.
    #[error("the hand is lost: {reason}")]
    Lost {
        /// The cause, as far as the channel tells.
        reason: String,
    },
    /// There is no such file.
    #[error("{message}")]
    NotFound {
        /// In the hand's words.
        message: String,
    },
    /// It said no.
    #[error("{message}")]
    Refused {
        /// In the hand's words.
        message: String,
    },
    /// The channel can't be used.
    #[error("the hand's channel can't be used")]
    Channel(#[source] io::Error),
}

impl Coded for LinkError {
    fn code(&self) -> Code {
        match self {
            LinkError::Lost { .. } => Code::HandLost,
            LinkError::NotFound { .. } => Code::NotFound,
            LinkError::Refused { .. } => Code::BadInput,
            LinkError::Channel(_) => Code::HostBroken,
        }
    }
}

/// A file that a hand returned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileContent {
    /// Its content, cut at the limit that was given.
    pub bytes: Vec<u8>,
    /// Its size.
    pub size: u64,
    /// Its permission bits.
    pub mode: u32,
}

impl Link {
    /// Takes the runner's end of a hand's channel. Call it within a tokio runtime.
    pub async fn connect(channel: StdUnixStream) -> Result<Link, LinkError> {
        channel.set_nonblocking(true).map_err(LinkError::Channel)?;
        let stream = UnixStream::from_std(channel).map_err(LinkError::Channel)?;
        let closed = Arc::new(AtomicBool::new(false));
        let (still, stillness) = watch::channel(Stillness::default());
        let watched = Watched { stream, closed: Arc::clone(&closed) };
        let handshake = Builder::new(TokioExecutor::new())
            .timer(Patience(stillness))
            .keep_alive_interval(PING_INTERVAL)
            .keep_alive_timeout(PING_PATIENCE)
            .keep_alive_while_idle(false)
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            // Each exec has its own window; a shared one would let an exec that is not read stop all others.
            .initial_connection_window_size((1 << 31) - 1)
            .max_frame_size(FRAME_BYTES_MAX)
            .handshake(TokioIo::new(watched))
            .await;
        let (sender, connection) =
            handshake.map_err(|error| LinkError::Channel(io::Error::other(error.to_string())))?;
        let lost = watch::Sender::new(None);
        let (ended, mut told) = (lost.clone(), lost.subscribe());
        tokio::spawn(async move {
            tokio::select! {
                done = connection => lose(&ended, reason(done.err(), closed.load(Ordering::Relaxed))),
                // Given up: the channel closes, and every stream on it ends.
                _ = told.wait_for(Option::is_some) => {}
            }
        });
        let client = HandClient::with_origin(Connection(sender), Uri::from_static("http://hand"))
            .max_decoding_message_size(MESSAGE_BYTES_MAX);
        Ok(Link { client, lost, still: Arc::new(still) })
    }

    /// Runs a command. What can't be started ends with [`Outcome::NotStarted`].
    pub async fn exec(&self, id: ExecId, spec: ExecSpec) -> Result<Exec, LinkError> {
        self.exec_start(spec.into_start(&id)).await
    }

    /// [`Link::exec`] in the protocol's own terms: arguments and environment of any bytes, output caps.
    pub async fn exec_start(&self, (start, stdin): (Start, Stdin)) -> Result<Exec, LinkError> {
        let id = start.exec.clone();
        let wall_ms_max = start.wall_ms_max;
        let (input, stdin) = inputs(start, stdin);
        let mut client = self.client.clone();
        let stream = self.within(CALL_PATIENCE, client.exec(input)).await?.into_inner();
        let control = ExecControl { id, link: self.clone() };
        let (started, _) = watch::channel(false);
        Ok(Exec { control, stdin, stream, wall_ms_max, started, over: false })
    }

    /// Writes a file below the branch's root, making missing directories. `mode` 0 is 0644.
    pub async fn put(&self, path: &[u8], mode: u32, bytes: Bytes) -> Result<u64, LinkError> {
        let open = PutOpen { path: Bytes::copy_from_slice(path), mode, parents: true };
        let open = PutInput { input: Some(PutMessage::Open(open)) };
        let chunks = chunks(bytes).map(|chunk| PutInput { input: Some(PutMessage::Chunk(chunk)) });
        let input = tokio_stream::once(open).chain(tokio_stream::iter(chunks));
        let mut client = self.client.clone();
        let reply = self.within(LONG_PATIENCE, client.put(input)).await?;
        Ok(reply.into_inner().bytes)
    }

    /// Reads at most `bytes_max` of a file below the branch's root (0: as much as the hand returns).
    pub async fn get(&self, path: &[u8], bytes_max: u64) -> Result<FileContent, LinkError> {
        let request = GetRequest { path: Bytes::copy_from_slice(path), offset: 0, bytes_max };
        let mut client = self.client.clone();
        let reply = self.within(CALL_PATIENCE, client.get(request)).await?;
        let mut stream = reply.into_inner();
        let mut content = FileContent { bytes: Vec::new(), size: 0, mode: 0 };
        let most = if bytes_max == 0 { u64::MAX } else { bytes_max };
        while let Some(chunk) = self.within(CALL_PATIENCE, stream.message()).await? {
            if content.bytes.is_empty() {
                content.size = chunk.size;
                content.mode = chunk.mode;
            }
            content.bytes.extend_from_slice(&chunk.chunk);
            // A hostile hand may send for ever.
            if content.bytes.len() as u64 > most {
                return Err(LinkError::Refused { message: "the hand sent more than was asked for".into() });
            }
        }
        Ok(content)
    }

    /// What the hand finds about its own confinement, as name and value.
    pub async fn self_test(&self) -> Result<Vec<(String, String)>, LinkError> {
        let mut client = self.client.clone();
        let reply = self.within(LONG_PATIENCE, client.self_test(SelfTestRequest {})).await?;
        Ok(reply.into_inner().findings.into_iter().map(|finding| (finding.name, finding.value)).collect())
    }

    /// Asks whether it lives, and what runs in it.
    pub async fn ping(&self) -> Result<StatusReply, LinkError> {
        let mut client = self.client.clone();
        let reply = self.within(CALL_PATIENCE, client.status(StatusRequest {})).await?;
        Ok(reply.into_inner())
    }

    /// Kills every process of every exec, background processes included, and returns when they are gone: how many execs
    /// had any.
    pub async fn kill_all(&self) -> Result<u32, LinkError> {
        let mut client = self.client.clone();
        let reply = self.within(CALL_PATIENCE, client.kill_all(KillAllRequest {})).await?;
        Ok(reply.into_inner().execs)
    }

    /// Tells that the hand was frozen, or thawed: meanwhile it can't answer, and is not lost because of that.
    pub(crate) fn set_frozen(&self, frozen: bool) {
        self.still.send_modify(|still| {
            still.thaws += u64::from(still.frozen && !frozen);
            still.frozen = frozen;
        });
    }

    /// Waits for an answer, not counting the time in which the hand is frozen. Without one in time the hand is lost.
    async fn within<T>(
        &self,
        most: Duration,
        call: impl Future<Output = Result<T, Status>> + Send,
    ) -> Result<T, LinkError> {
        tokio::select! {
            answer = call => answer.map_err(|status| self.error(&status)),
            () = transport::wait(self.still.subscribe(), most) => {
                lose(&self.lost, format!("it did not answer a call for {} s", most.as_secs()));
                Err(LinkError::Lost { reason: self.lost().unwrap_or_default() })
            }
        }
    }

    /// Why the hand is lost, if it is.
    pub fn lost(&self) -> Option<String> {
        self.lost.borrow().clone()
    }

    /// Returns when the hand is lost, and why.
    pub async fn closed(&self) -> String {
        let mut lost = self.lost.subscribe();
        let reason = lost.wait_for(Option::is_some).await.ok().and_then(|reason| reason.clone());
        reason.unwrap_or_else(|| CLOSED.into())
    }

    fn error(&self, status: &Status) -> LinkError {
        let message = status.message().to_owned();
        match status.code() {
            tonic::Code::NotFound => LinkError::NotFound { message },
            tonic::Code::InvalidArgument
            | tonic::Code::AlreadyExists
            | tonic::Code::OutOfRange
            | tonic::Code::FailedPrecondition
            | tonic::Code::ResourceExhausted
            | tonic::Code::DataLoss
            | tonic::Code::PermissionDenied
            | tonic::Code::Unimplemented => LinkError::Refused { message },
            tonic::Code::Ok
            | tonic::Code::Cancelled
            | tonic::Code::Unknown
            | tonic::Code::DeadlineExceeded
            | tonic::Code::Aborted
            | tonic::Code::Internal
            | tonic::Code::Unavailable
            | tonic::Code::Unauthenticated => {
                LinkError::Lost { reason: self.lost().unwrap_or_else(|| CLOSED.into()) }
            }
        }
    }
}

impl ExecSpec {
    fn into_start(self, id: &ExecId) -> (Start, Stdin) {
        let env = self.env.into_iter().map(|(name, value)| EnvVar { name: name.into(), value: value.into() });
        let start = Start {
            exec: id.as_str().to_owned(),
            argv: self.argv.into_iter().map(Bytes::from).collect(),
            cwd: self.cwd.unwrap_or_default().into(),
            env: env.collect(),
            pty: self.pty.map(window),
            stdin: self.stdin != Stdin::Null,
            wall_ms_max: self.wall_ms_max.unwrap_or(0),
        };
        (start, self.stdin)
    }
}

fn window(size: Size) -> WindowSize {
    WindowSize { rows: size.rows.into(), cols: size.cols.into() }
}

/// What an exec's stream sends. A type of its own, since a bare `dyn` keeps the compiler from seeing that calls are `Send`.
struct Inputs(Pin<Box<dyn Stream<Item = ExecInput> + Send>>);

impl Stream for Inputs {
    type Item = ExecInput;
    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<ExecInput>> {
        self.0.as_mut().poll_next(cx)
    }
}

/// The stream that an exec begins with, and where piped stdin is put.
fn inputs(start: Start, stdin: Stdin) -> (Inputs, Option<mpsc::Sender<ExecInput>>) {
    let start = tokio_stream::once(ExecInput { input: Some(Input::Start(start)) });
    match stdin {
        Stdin::Null => (Inputs(Box::pin(start)), None),
        Stdin::Piped => {
            let (sender, receiver) = mpsc::channel(STDIN_CHUNKS_MAX);
            (Inputs(Box::pin(start.chain(ReceiverStream::new(receiver)))), Some(sender))
        }
    }
}

fn chunks(mut bytes: Bytes) -> impl Iterator<Item = Bytes> + Send {
    std::iter::from_fn(move || {
        (!bytes.is_empty()).then(|| {
            let size = bytes.len().min(CHUNK_BYTES_MAX);
            bytes.split_to(size)
        })
    })
}

/// A running command. Dropping it before it ended kills the command, with all that it started.
#[derive(Debug)]
pub struct Exec {
    control: ExecControl,
    stdin: Option<mpsc::Sender<ExecInput>>,
    stream: Streaming<ExecOutput>,
    wall_ms_max: u64,
    started: watch::Sender<bool>,
    over: bool,
}

/// Acts on a running command from elsewhere.
#[derive(Clone, Debug)]
pub struct ExecControl {
    id: String,
    link: Link,
}

/// Where piped stdin goes. Dropping it is the end of stdin.
#[derive(Debug)]
pub struct ExecStdin {
    sender: mpsc::Sender<ExecInput>,
    started: watch::Receiver<bool>,
}

impl Exec {
    /// The next thing that it tells; after `Ended`, `None`. Not calling it makes the command wait, once its output fills
    /// the window.
    pub async fn next_event(&mut self) -> Option<ExecEvent> {
        while !self.over {
            let event = match self.stream.message().await {
                Ok(Some(ExecOutput { output: Some(Output::Stdout(bytes)) })) => {
                    ExecEvent::Output { fd: 1, bytes }
                }
                Ok(Some(ExecOutput { output: Some(Output::Stderr(bytes)) })) => {
                    ExecEvent::Output { fd: 2, bytes }
                }
                Ok(Some(ExecOutput { output: Some(Output::Exited(exited)) })) => self.ended(exited),
                Ok(Some(ExecOutput { output: Some(Output::Started(_)) })) => {
                    self.started.send_replace(true);
                    continue;
                }
                Ok(Some(ExecOutput { output: None })) => continue,
                Ok(None) => self.lost("the hand ended the call without a word".into()),
                Err(status) => {
                    // The stream hears of the channel's end before the cause is known.
                    let grace = Duration::from_millis(200);
                    let closed = tokio::time::timeout(grace, self.control.link.closed()).await;
                    self.lost(
                        closed
                            .unwrap_or_else(|_| format!("the hand broke off the call: {}", status.message())),
                    )
                }
            };
            return Some(event);
        }
        None
    }

    /// Takes stdin away, to be filled by another task.
    pub fn take_stdin(&mut self) -> Option<ExecStdin> {
        self.stdin.take().map(|sender| ExecStdin { sender, started: self.started.subscribe() })
    }

    /// A handle that acts on it from elsewhere.
    pub fn control(&self) -> ExecControl {
        self.control.clone()
    }

    /// Sends a signal to the command's process group. False: it is over.
    pub async fn signal(&self, number: i32) -> Result<bool, LinkError> {
        self.control.signal(number).await
    }

    /// Sets the terminal's size. False: it is over, or has none.
    pub async fn resize(&self, size: Size) -> Result<bool, LinkError> {
        self.control.resize(size).await
    }

    /// Kills it, with all that it started; it ends with [`Outcome::Cancelled`]. False: it is over.
    pub async fn cancel(&self) -> Result<bool, LinkError> {
        self.control.cancel().await
    }

    fn ended(&mut self, exited: Exited) -> ExecEvent {
        self.over = true;
        let outcome = match exited.how {
            Some(How::Code(code)) => Outcome::Exited { code },
            Some(How::Signal(signal)) => Outcome::Signalled { signal },
            Some(How::TimedOut(_)) => Outcome::TimedOut { wall_ms_max: self.wall_ms_max },
            Some(How::NotStarted(reason)) => {
                Outcome::NotStarted { reason, program_missing: exited.program_missing }
            }
            Some(How::Cancelled(Cancelled {})) => Outcome::Cancelled,
            // The hand itself says so, and lives.
            Some(How::Lost(reason)) => Outcome::Killed { reason: cut(reason) },
            None => Outcome::HandLost { reason: "the hand did not say how the command ended".into() },
        };
        ExecEvent::Ended {
            outcome,
            cpu_ms: exited.cpu_ms,
            wall_ms: exited.wall_ms,
            lingering: exited.lingering,
            rss_bytes_max: exited.rss_bytes_max,
            processes_full: exited.processes_full,
        }
    }

    fn lost(&mut self, reason: String) -> ExecEvent {
        self.over = true;
        ExecEvent::Ended {
            outcome: Outcome::HandLost { reason },
            cpu_ms: 0,
            wall_ms: 0,
            lingering: false,
            rss_bytes_max: 0,
            processes_full: false,
        }
    }
}

/// What a hand says of an end is a sentence or two, though it may name a program of any length.
fn cut(mut reason: String) -> String {
    if reason.len() > REASON_BYTES_MAX {
        reason.truncate(reason.floor_char_boundary(REASON_BYTES_MAX));
        reason.push('…');
    }
    reason
}

impl ExecControl {
    /// See [`Exec::signal`].
    pub async fn signal(&self, number: i32) -> Result<bool, LinkError> {
        self.act(Action::Signal(number)).await
    }

    /// See [`Exec::resize`].
    pub async fn resize(&self, size: Size) -> Result<bool, LinkError> {
        self.act(Action::Resize(window(size))).await
    }

    /// See [`Exec::cancel`].
    pub async fn cancel(&self) -> Result<bool, LinkError> {
        self.act(Action::Cancel(Cancelled {})).await
    }

    async fn act(&self, action: Action) -> Result<bool, LinkError> {
        let request = ControlRequest { exec: self.id.clone(), action: Some(action) };
        let mut client = self.link.client.clone();
        let reply = self.link.within(CALL_PATIENCE, client.control(request)).await?;
        Ok(reply.into_inner().found)
    }
}

impl ExecStdin {
    /// Returns when the command has started. False: it is over, and may never have started. It needs [`Exec::next_event`]
    /// to be called meanwhile.
    pub async fn started(&mut self) -> bool {
        self.started.wait_for(|started| *started).await.is_ok()
    }

    /// Puts bytes into the command's stdin; returns when there is room for more. False: it reads no more.
    pub async fn write(&self, bytes: Bytes) -> bool {
        for chunk in chunks(bytes) {
            if self.sender.send(ExecInput { input: Some(Input::Stdin(chunk)) }).await.is_err() {
                return false;
            }
        }
        true
    }
}

/// The first cause counts.
fn lose(lost: &watch::Sender<Option<String>>, reason: String) {
    lost.send_if_modified(|lost| {
        let first = lost.is_none();
        lost.get_or_insert(reason);
        first
    });
}

const CLOSED: &str = "its channel closed: the hand ended or was killed";

/// The connection ends without an error both when the hand is gone and when it does not answer: what was read tells.
fn reason(error: Option<hyper::Error>, closed: bool) -> String {
    match error {
        _ if closed => CLOSED.into(),
        Some(error) if !error.is_timeout() => format!("its channel broke: {error}"),
        Some(_) | None => format!("it did not answer for {} s", PING_PATIENCE.as_secs()),
    }
}

#[cfg(test)]
mod tests {
    use tonic::codegen::http::Response;

    use super::*;

    fn send(_: impl Send) {}

    /// The other side speaks HTTP/2, pings included, and answers no call.
    #[tokio::test]
    async fn a_hand_that_answers_pings_and_no_calls_is_lost() {
        let (ours, theirs) = StdUnixStream::pair().expect("a pair");
        theirs.set_nonblocking(true).expect("a socket");
        let theirs = UnixStream::from_std(theirs).expect("a socket");
        let mute = hyper::service::service_fn(|_| {
            std::future::pending::<Result<Response<tonic::body::Body>, std::convert::Infallible>>()
        });
        let server = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
        let served = tokio::spawn(server.serve_connection(TokioIo::new(theirs), mute));
        let link = Link::connect(ours).await.expect("a connection");
        let error = link.ping().await.expect_err("no answer");
        assert!(matches!(&error, LinkError::Lost { reason } if reason.contains("a call")), "{error:?}");
        assert_eq!(link.closed().await, "it did not answer a call for 1 s");
        // The channel is closed, so that the hand ends.
        let ended = tokio::time::timeout(Duration::from_secs(10), served).await;
        assert!(ended.is_ok(), "the channel is open");
    }

    /// Compiles: every call can be spawned.
    #[expect(dead_code, reason = "never called, only compiled")]
    fn calls_are_send(link: Link, mut exec: Exec, spec: ExecSpec, id: ExecId) {
        send(link.put(b"a", 0, Bytes::new()));
        send(link.get(b"a", 0));
        send(link.self_test());
        send(link.ping());
        send(link.kill_all());
        send(link.closed());
        send(exec.cancel());
        send(exec.next_event());
        send(link.exec(id, spec));
    }
}
