//! Bodies of any length, written by work that blocks: what a slow client has not read yet holds the work up, and with it a
//! thread. So there are only so many at a time, and a client that reads nothing for long is given up.

use std::io::{self, Write};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::response::Response;
use proto::error::{Code, Coded, ErrorBody};
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_stream::{Stream, StreamExt as _};

use crate::listen::App;
use crate::reply::Problem;

/// Chunks that wait for a slow client.
const CHUNKS_MAX: usize = 16;
/// The most of a chunk that is written by small pieces.
const CHUNK_BYTES: usize = 64 * 1024;
/// Such answers at one time: an eighth of the threads that may block.
const STREAMS_MAX: usize = 64;
/// How long a client may read nothing; people page through what they asked for.
const STALL_MAX: Duration = Duration::from_secs(10 * 60);

/// The places of the answers that are being written.
#[derive(Clone)]
pub(crate) struct Streams(Arc<Semaphore>);

impl Streams {
    pub(crate) fn new() -> Self {
        Self(Arc::new(Semaphore::new(STREAMS_MAX)))
    }

    fn place(&self) -> Result<OwnedSemaphorePermit, Problem> {
        self.0.clone().try_acquire_owned().map_err(|_| {
            Problem(ErrorBody {
                code: Code::Refused,
                message: format!("{STREAMS_MAX} long answers are being read already"),
                causes: Vec::new(),
                hint: Some("wait until one of them has been read to its end".into()),
            })
        })
    }
}

/// Streams what `work` writes. An error before the first byte is an answer of its own; one after that breaks the
/// connection, so that nobody takes a part for the whole.
pub(crate) async fn stream<T, E>(
    app: App,
    work: impl FnOnce(&vfs::Store, &mut dyn Write) -> Result<T, E> + Send + 'static,
) -> Result<Response, Problem>
where
    T: Send + 'static,
    E: Coded + Send + 'static,
{
    let place = app.streams.place()?;
    let runner = app.runner;
    let blocking = move |store: &vfs::Store, out| {
        let _place = place;
        write(out, |out| work(store, out))
    };
    respond(async move |out| runner.with_store(move |store| blocking(store, out)).await).await
}

async fn respond<F>(work: impl FnOnce(ChannelWriter) -> F) -> Result<Response, Problem>
where
    F: Future<Output = Result<(), Problem>> + Send + 'static,
{
    let (sender, mut receiver) = mpsc::channel(CHUNKS_MAX);
    let written = tokio::spawn(work(ChannelWriter(sender, Handle::current())));
    match receiver.recv().await {
        Some(first) => {
            let rest = Rest { receiver, written: Some(written) };
            Ok(Response::new(Body::from_stream(tokio_stream::once(Ok(first)).chain(rest))))
        }
        None => match written.await {
            Ok(done) => done.map(|()| Response::new(Body::empty())),
            Err(error) => Err(Problem(ErrorBody {
                code: Code::Internal,
                message: "the answer can't be made".into(),
                causes: vec![error.to_string()],
                hint: None,
            })),
        },
    }
}

fn write<T, E: Coded>(
    out: ChannelWriter,
    work: impl FnOnce(&mut dyn Write) -> Result<T, E>,
) -> Result<(), Problem> {
    let mut out = io::BufWriter::with_capacity(CHUNK_BYTES, out);
    if let Err(error) = work(&mut out) {
        // What is still kept here is not sent.
        let _ = out.into_parts();
        return Err(error.into());
    }
    // It fails when the client is gone.
    out.flush().map_err(|_| Problem::usage("nobody reads the answer"))
}

/// The chunks after the first one. They end only when the work says that these are all: work that failed, or panicked, has an
/// error at their end.
struct Rest {
    receiver: mpsc::Receiver<Bytes>,
    written: Option<JoinHandle<Result<(), Problem>>>,
}

impl Stream for Rest {
    type Item = io::Result<Bytes>;
    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(chunk) = ready!(self.receiver.poll_recv(cx)) {
            return Poll::Ready(Some(Ok(chunk)));
        }
        let Some(written) = &mut self.written else { return Poll::Ready(None) };
        let done = ready!(Pin::new(written).poll(cx));
        self.written = None;
        let complete = matches!(done, Ok(Ok(())));
        Poll::Ready((!complete).then(|| Err(io::ErrorKind::BrokenPipe.into())))
    }
}

/// Writes to a channel; blocks while the client reads slowly, fails when it is gone or has read nothing for too long.
struct ChannelWriter(mpsc::Sender<Bytes>, Handle);

impl Write for ChannelWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.1.block_on(async { timeout(STALL_MAX, self.0.reserve()).await }) {
            Ok(Ok(room)) => room.send(Bytes::copy_from_slice(bytes)),
            Ok(Err(_)) => return Err(io::ErrorKind::BrokenPipe.into()),
            Err(_) => return Err(io::ErrorKind::TimedOut.into()),
        }
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use engine::Blocking;
    use http_body_util::BodyExt as _;

    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("it failed")]
    struct Failed;

    impl Coded for Failed {
        fn code(&self) -> Code {
            Code::NotFound
        }
    }

    /// What a client gets of work that writes so many bytes and then does what `end` does.
    async fn check(bytes: usize, end: fn() -> Result<(), Failed>) -> Result<Result<usize, String>, Code> {
        let work = async move |out| {
            Blocking::run(move || {
                write(out, |out| {
                    let _ = out.write_all(&vec![b'x'; bytes]);
                    // The client has all that is to be had by now.
                    std::thread::sleep(Duration::from_millis(20));
                    end()
                })
            })
            .await
        };
        let response = respond(work).await.map_err(|problem| problem.0.code)?;
        let body = response.into_body().collect().await;
        Ok(body.map(|body| body.to_bytes().len()).map_err(|error| error.to_string()))
    }

    #[tokio::test]
    async fn a_part_is_never_taken_for_the_whole() {
        const LONG: usize = 5 * CHUNK_BYTES;
        assert_eq!(check(0, || Ok(())).await, Ok(Ok(0)));
        assert_eq!(check(1, || Ok(())).await, Ok(Ok(1)));
        assert_eq!(check(LONG, || Ok(())).await, Ok(Ok(LONG)));
        assert_eq!(check(0, || Err(Failed)).await, Err(Code::NotFound));
        assert_eq!(check(1, || Err(Failed)).await, Err(Code::NotFound));
        assert!(check(LONG, || Err(Failed)).await.unwrap().is_err());
        assert_eq!(check(0, || panic!("a defect")).await, Err(Code::Internal));
        assert!(check(1, || panic!("a defect")).await.unwrap().is_err());
        assert!(check(LONG, || panic!("a defect")).await.unwrap().is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn one_who_reads_nothing_is_given_up() {
        let (sender, _receiver) = mpsc::channel(CHUNKS_MAX);
        let (tell, told) = tokio::sync::oneshot::channel();
        let mut out = ChannelWriter(sender, Handle::current());
        // Of no pool of the runtime's: its clock stands still while one of those works.
        std::thread::spawn(move || {
            let written = (0..=CHUNKS_MAX).map(|_| out.write(b"x").map_err(|error| error.kind()));
            tell.send(written.collect::<Vec<_>>()).unwrap();
        });
        let written = told.await.unwrap();
        assert!(written[..CHUNKS_MAX].iter().all(Result::is_ok));
        assert_eq!(written[CHUNKS_MAX], Err(io::ErrorKind::TimedOut));
    }

    #[test]
    fn there_are_only_so_many_at_a_time() {
        let streams = Streams::new();
        let mut places: Vec<_> = (0..STREAMS_MAX).map(|_| streams.place().ok().unwrap()).collect();
        assert_eq!(streams.place().err().unwrap().0.code, Code::Refused);
        places.pop();
        assert!(streams.place().is_ok());
    }
}
