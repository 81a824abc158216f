//! The client of the runner's unix socket: HTTP/1.1, JSON both ways, event streams as one JSON object per line.

use std::convert::Infallible;
use std::fs::File;
use std::marker::PhantomData;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt as _;
use http_body_util::combinators::BoxBody;
use hyper::body::{Body, Frame, Incoming};
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::error::{Code, Coded, ErrorBody};
use crate::http::LINE_BYTES_MAX;

/// The largest JSON answer that is read.
const ANSWER_BYTES_MAX: usize = 256 * 1024 * 1024;
/// How long connecting may take; the socket is local, so a runner that does not accept is stuck.
const CONNECT_MAX: Duration = Duration::from_secs(5);
/// How long a runner whose connection broke may take to be gone.
const DYING: Duration = Duration::from_millis(100);
/// `sun_path` less its NUL.
const SOCKET_PATH_MAX: usize = 107;
/// Chunks of a request body that wait to be sent.
const BODY_CHUNKS_MAX: usize = 16;

/// Why a call of the runner failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody listens on the socket.
    #[error("no runner listens on {}", .0.display())]
    NoRunner(PathBuf),
    /// The socket exists and can't be used.
    #[error("cannot connect to the runner on {}", path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The runner answered with an error.
    #[error("{}", .0.message)]
    Runner(ErrorBody),
    /// The runner is gone, and the answer is not complete.
    #[error("the runner ended in the middle of its work")]
    Died {
        /// Where its log is.
        log: PathBuf,
    },
    /// The runner lives, and broke its answer off.
    #[error("the runner broke off its answer")]
    Ended {
        /// Where its log is.
        log: PathBuf,
    },
    /// The answer is not what the API says.
    #[error("the runner's answer makes no sense: {0}")]
    Answer(String),
}

impl ClientError {
    /// The error as it is printed; the runner's own, if it answered with one.
    pub fn into_body(self) -> ErrorBody {
        match self {
            Self::Runner(body) => body,
            other @ (Self::NoRunner(_)
            | Self::Connect { .. }
            | Self::Died { .. }
            | Self::Ended { .. }
            | Self::Answer(_)) => other.body(),
        }
    }
}

impl Coded for ClientError {
    fn code(&self) -> Code {
        match self {
            Self::Runner(body) => body.code,
            Self::NoRunner(_) | Self::Connect { .. } | Self::Died { .. } | Self::Ended { .. } => {
                Code::HostBroken
            }
            Self::Answer(_) => Code::Internal,
        }
    }
    fn hint(&self) -> Option<String> {
        match self {
            Self::Runner(body) => body.hint.clone(),
            Self::NoRunner(_) => Some("start one with: tendond".into()),
            Self::Connect { .. } => Some(
                "it belongs to the user who started the runner: name a directory of your own with --state-dir or TENDON_STATE_DIR"
                    .into(),
            ),
            Self::Died { log } => Some(format!(
                "run it again: the next runner tidies up, and no acknowledged edit is lost. Why it ended may stand in {}, \
                 or on the standard error of a tendond that was started by hand, or in the kernel's log (dmesg) if it was killed \
                 for want of memory",
                log.display()
            )),
            Self::Ended { log } => Some(format!(
                "the reason stands in {}, or on the standard error of a tendond that was started by hand",
                log.display()
            )),
            Self::Answer(_) => {
                Some("is the runner of the same release? `tendon runner stop` ends an old one".into())
            }
        }
    }
}

/// A client of one runner. Every call is its own connection, and dropping what a call returned ends it there.
#[derive(Clone, Debug)]
pub struct Client {
    socket: PathBuf,
}

type RequestBody = BoxBody<Bytes, Infallible>;

impl Client {
    /// A client of the runner that listens on `socket`. Nothing is connected yet.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into() }
    }

    /// The socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// `GET path`, JSON back.
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.call(Method::GET, path, empty()).await?.json().await
    }

    /// `DELETE path`, JSON back.
    pub async fn delete<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.call(Method::DELETE, path, empty()).await?.json().await
    }

    /// `POST path` with a JSON body, JSON back.
    pub async fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T, ClientError> {
        self.call(Method::POST, path, json(body)?).await?.json().await
    }

    /// `PUT path` with raw bytes, JSON back.
    pub async fn put<T: DeserializeOwned>(&self, path: &str, bytes: Vec<u8>) -> Result<T, ClientError> {
        self.call(Method::PUT, path, full(bytes.into())).await?.json().await
    }

    /// `GET path`, raw bytes back, as they come.
    pub async fn bytes(&self, path: &str) -> Result<Bytestream, ClientError> {
        self.call(Method::GET, path, empty()).await
    }

    /// `POST path` with a JSON body, events back.
    pub async fn events<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<Events<T>, ClientError> {
        Ok(Events::new(self.call(Method::POST, path, json(body)?).await?))
    }

    /// `POST path` with a body that goes on while events come back: the first line is `first`, the sender adds more.
    pub async fn duplex<I: Serialize, T: DeserializeOwned>(
        &self,
        path: &str,
        first: &impl Serialize,
    ) -> Result<(LineSender<I>, Events<T>), ClientError> {
        let (sender, receiver) = mpsc::channel(BODY_CHUNKS_MAX);
        let lines = LineSender { sender, client: self.clone(), kind: PhantomData };
        lines.send_line(first).await?;
        let body = self.call(Method::POST, path, ChannelBody(receiver).boxed()).await?;
        Ok((lines, Events::new(body)))
    }

    /// The process that listens, as it is numbered here; `None` if nobody listens, or if it can't be seen from here.
    pub async fn runner_pid(&self) -> Option<i32> {
        self.connect().await.ok()?.peer_cred().ok()?.pid().filter(|pid| *pid > 0)
    }

    async fn call(&self, method: Method, path: &str, body: RequestBody) -> Result<Bytestream, ClientError> {
        let stream = self.connect().await?;
        let (mut sender, connection) = match hyper::client::conn::http1::handshake(TokioIo::new(stream)).await
        {
            Ok(pair) => pair,
            Err(_) => return Err(self.ended().await),
        };
        let guard = Guard(tokio::spawn(async move {
            // What went wrong shows at the response.
            let _ = connection.await;
        }));
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "tendon")
            .header("content-type", "application/json")
            .body(body)
            .map_err(|error| ClientError::Answer(error.to_string()))?;
        let Ok(response) = sender.send_request(request).await else { return Err(self.ended().await) };
        let status = response.status();
        let stream = Bytestream { response, client: self.clone(), _guard: guard };
        if status.is_success() {
            return Ok(stream);
        }
        let bytes = stream.all(LINE_BYTES_MAX).await?;
        match serde_json::from_slice(&bytes) {
            Ok(body) => Err(ClientError::Runner(body)),
            Err(_) => Err(ClientError::Answer(format!("status {status} for {path}"))),
        }
    }

    /// Why an answer is not complete. What the HTTP library says of it tells people nothing; whether the runner still
    /// listens does.
    async fn ended(&self) -> ClientError {
        let state_dir = self.socket.parent().and_then(Path::parent).unwrap_or(Path::new(""));
        let log = state_dir.join("logs/tendond.log");
        // A process that dies closes its descriptors one by one.
        tokio::time::sleep(DYING).await;
        match self.connect().await {
            Err(_) => ClientError::Died { log },
            Ok(_) => ClientError::Ended { log },
        }
    }

    async fn connect(&self) -> Result<UnixStream, ClientError> {
        let connect = |source| ClientError::Connect { path: self.socket.clone(), source };
        let (path, _dir) = reachable(&self.socket);
        let stream = tokio::time::timeout(CONNECT_MAX, UnixStream::connect(path))
            .await
            .unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()));
        let stream = stream.and_then(|stream| {
            // Whoever else listens there could have any command answered as they like.
            let (peer, own) = (stream.peer_cred()?.uid(), rustix::process::geteuid().as_raw());
            if peer != own && peer != 0 {
                let why = format!("the user {peer} listens there");
                return Err(std::io::Error::new(std::io::ErrorKind::PermissionDenied, why));
            }
            Ok(stream)
        });
        stream.map_err(|error| {
            use std::io::ErrorKind::{
                ConnectionRefused, InvalidFilename, InvalidInput, NotADirectory, NotFound,
            };
            // An invalid input is a path too long for a socket in a directory that is not there.
            if matches!(
                error.kind(),
                NotFound | ConnectionRefused | NotADirectory | InvalidInput | InvalidFilename
            ) {
                ClientError::NoRunner(self.socket.clone())
            } else {
                connect(error)
            }
        })
    }
}

/// A path for `socket` that fits a socket address, which holds 107 bytes: a longer one goes by its directory's
/// descriptor, which must be kept meanwhile. Also for binding.
pub fn reachable(socket: &Path) -> (PathBuf, Option<File>) {
    let short = (socket.to_owned(), None);
    if socket.as_os_str().len() <= SOCKET_PATH_MAX {
        return short;
    }
    let (Some(dir), Some(name)) = (socket.parent(), socket.file_name()) else { return short };
    match File::open(dir) {
        Ok(dir) => (Path::new("/proc/self/fd").join(dir.as_raw_fd().to_string()).join(name), Some(dir)),
        Err(_) => short,
    }
}

/// The body of an answer, as it comes.
#[derive(Debug)]
pub struct Bytestream {
    response: Response<Incoming>,
    client: Client,
    _guard: Guard,
}

impl Bytestream {
    /// The next bytes; `None` at the end.
    pub async fn next(&mut self) -> Result<Option<Bytes>, ClientError> {
        loop {
            match self.response.body_mut().frame().await {
                None => return Ok(None),
                Some(Err(_)) => return Err(self.client.ended().await),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        return Ok(Some(data));
                    }
                }
            }
        }
    }

    /// All bytes; an error if they are more than `max`.
    pub async fn all(mut self, max: usize) -> Result<Vec<u8>, ClientError> {
        let mut out = Vec::new();
        while let Some(data) = self.next().await? {
            if out.len() + data.len() > max {
                return Err(ClientError::Answer(format!("it is longer than {max} bytes")));
            }
            out.extend_from_slice(&data);
        }
        Ok(out)
    }

    async fn json<T: DeserializeOwned>(self) -> Result<T, ClientError> {
        let bytes = self.all(ANSWER_BYTES_MAX).await?;
        serde_json::from_slice(&bytes).map_err(|error| ClientError::Answer(error.to_string()))
    }
}

/// A stream of events. Dropping it ends the call, and the runner cancels what it does for it.
#[derive(Debug)]
pub struct Events<T> {
    stream: Bytestream,
    buffer: BytesMut,
    /// Bytes at the buffer's front that are known to hold no line end.
    scanned: usize,
    kind: PhantomData<fn() -> T>,
}

impl<T: DeserializeOwned> Events<T> {
    fn new(stream: Bytestream) -> Self {
        Self { stream, buffer: BytesMut::new(), scanned: 0, kind: PhantomData }
    }

    /// The next event. The last one says that it is the last, so a stream that ends before it is an error, and so is a line
    /// longer than [`LINE_BYTES_MAX`].
    pub async fn next(&mut self) -> Result<T, ClientError> {
        loop {
            if let Some(at) = self.buffer[self.scanned..].iter().position(|byte| *byte == b'\n') {
                let line = self.buffer.split_to(self.scanned + at + 1);
                self.scanned = 0;
                return serde_json::from_slice(&line).map_err(|error| ClientError::Answer(error.to_string()));
            }
            self.scanned = self.buffer.len();
            if self.scanned > LINE_BYTES_MAX {
                return Err(ClientError::Answer(format!("an event is longer than {LINE_BYTES_MAX} bytes")));
            }
            match self.stream.next().await? {
                Some(data) => self.buffer.extend_from_slice(&data),
                None => return Err(self.stream.client.ended().await),
            }
        }
    }
}

/// Adds lines to the body of a running request. Dropping it ends the body.
#[derive(Debug)]
pub struct LineSender<I> {
    sender: mpsc::Sender<Bytes>,
    client: Client,
    kind: PhantomData<fn(I)>,
}

impl<I: Serialize> LineSender<I> {
    /// Sends one line; waits while the runner does not read.
    pub async fn send(&self, input: &I) -> Result<(), ClientError> {
        self.send_line(input).await
    }

    async fn send_line(&self, line: &impl Serialize) -> Result<(), ClientError> {
        let mut bytes = serde_json::to_vec(line).map_err(|error| ClientError::Answer(error.to_string()))?;
        bytes.push(b'\n');
        match self.sender.send(bytes.into()).await {
            Ok(()) => Ok(()),
            Err(_) => Err(self.client.ended().await),
        }
    }
}

/// A request body fed by a channel.
struct ChannelBody(mpsc::Receiver<Bytes>);

impl Body for ChannelBody {
    type Data = Bytes;
    type Error = Infallible;
    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.get_mut().0.poll_recv(cx).map(|chunk| chunk.map(|chunk| Ok(Frame::data(chunk))))
    }
}

/// Ends the connection's task when the answer is dropped.
#[derive(Debug)]
struct Guard(JoinHandle<()>);

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.abort();
    }
}

fn empty() -> RequestBody {
    full(Bytes::new())
}

fn full(bytes: Bytes) -> RequestBody {
    http_body_util::Full::new(bytes).boxed()
}

fn json(body: &impl Serialize) -> Result<RequestBody, ClientError> {
    let bytes = serde_json::to_vec(body).map_err(|error| ClientError::Answer(error.to_string()))?;
    Ok(full(bytes.into()))
}
