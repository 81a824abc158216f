//! Bodies of any length, written by work that blocks: what a slow client has not read yet holds the work up.

use std::io::{self, Write};

use axum::body::{Body, Bytes};
use axum::response::Response;
use engine::Runner;
use proto::error::Coded;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use crate::reply::Problem;

/// Chunks that wait for a slow client.
const CHUNKS_MAX: usize = 16;

/// Streams what `work` writes. An error before the first byte is an answer of its own; one after that breaks the
/// connection, so that nobody takes a part for the whole.
pub(crate) async fn stream<T, E>(
    runner: Runner,
    work: impl FnOnce(&vfs::Store, &mut dyn Write) -> Result<T, E> + Send + 'static,
) -> Result<Response, Problem>
where
    T: Send + 'static,
    E: Coded + Send + 'static,
{
    let (sender, mut receiver) = mpsc::channel::<io::Result<Bytes>>(CHUNKS_MAX);
    let mut written = tokio::spawn(async move {
        let end = sender.clone();
        let done = runner.with_store(move |store| {
            let mut writer = io::BufWriter::with_capacity(64 * 1024, ChannelWriter(sender));
            let done = work(store, &mut writer);
            (done, writer.flush())
        });
        let (done, flushed) = done.await;
        if done.is_err() || flushed.is_err() {
            let _ = end.send(Err(io::ErrorKind::BrokenPipe.into())).await;
        }
        done
    });
    let first = tokio::select! {
        biased;
        first = receiver.recv() => first,
        done = &mut written => {
            if let Ok(Err(error)) = done {
                return Err(error.into());
            }
            receiver.recv().await
        }
    };
    match first {
        None => Ok(Response::new(Body::empty())),
        Some(Err(_)) => match written.await {
            Ok(Err(error)) => Err(error.into()),
            Ok(Ok(_)) | Err(_) => Err(Problem::usage("the answer broke off")),
        },
        Some(Ok(first)) => {
            let chunks =
                tokio_stream::StreamExt::chain(tokio_stream::once(Ok(first)), ReceiverStream::new(receiver));
            Ok(Response::new(Body::from_stream(chunks)))
        }
    }
}

/// Writes to a channel; blocks while the client reads slowly, fails when it is gone.
struct ChannelWriter(mpsc::Sender<io::Result<Bytes>>);

impl Write for ChannelWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let sent = self.0.blocking_send(Ok(Bytes::copy_from_slice(bytes)));
        sent.map(|()| bytes.len()).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
