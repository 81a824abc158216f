//! What a hand's channel is made of: hyper's one connection over a watched stream, and a timer that stands still while the
//! hand does.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use hyper::client::conn::http2::SendRequest;
use hyper::rt::{Sleep, Timer};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tokio::sync::watch;
use tonic::codegen::http::{Request, Response};

/// The client's transport: hyper's one connection, without tonic's balancing and buffering in between.
#[derive(Clone, Debug)]
pub(crate) struct Connection(pub(crate) SendRequest<tonic::body::Body>);

impl tower::Service<Request<tonic::body::Body>> for Connection {
    type Response = Response<hyper::body::Incoming>;
    type Error = hyper::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: Request<tonic::body::Body>) -> Self::Future {
        Box::pin(self.0.send_request(request))
    }
}

/// The stream, and whether its other side was seen to be closed.
#[derive(Debug)]
pub(crate) struct Watched {
    pub(crate) stream: UnixStream,
    pub(crate) closed: Arc<AtomicBool>,
}

impl Watched {
    fn note<T>(&self, polled: Poll<io::Result<T>>, end: impl FnOnce(&T) -> bool) -> Poll<io::Result<T>> {
        let closed = match &polled {
            Poll::Ready(Ok(value)) => end(value),
            Poll::Ready(Err(_)) => true,
            Poll::Pending => false,
        };
        if closed {
            self.closed.store(true, Ordering::Relaxed);
        }
        polled
    }
}

impl AsyncRead for Watched {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(cx, buf);
        self.note(polled, |()| buf.filled().len() == before)
    }
}

impl AsyncWrite for Watched {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.note(polled, |_| false)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write_vectored(cx, parts);
        self.note(polled, |_| false)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Whether a hand stands still, and how often it was thawed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stillness {
    pub(crate) frozen: bool,
    pub(crate) thaws: u64,
}

/// A timer for questions to a hand: the time in which it stands still does not count, and after it all starts anew.
#[derive(Clone, Debug)]
pub(crate) struct Patience(pub(crate) watch::Receiver<Stillness>);

impl Timer for Patience {
    fn sleep(&self, duration: Duration) -> Pin<Box<dyn Sleep>> {
        Box::pin(Waiting(Box::pin(wait(self.0.clone(), duration))))
    }

    fn sleep_until(&self, deadline: Instant) -> Pin<Box<dyn Sleep>> {
        self.sleep(deadline.saturating_duration_since(Instant::now()))
    }
}

/// Returns when `duration` has passed in which the hand did not stand still.
pub(crate) async fn wait(mut hand: watch::Receiver<Stillness>, duration: Duration) {
    loop {
        let before = hand.borrow_and_update().thaws;
        tokio::time::sleep(duration).await;
        // Without a sender nobody freezes it any more.
        let now = hand.wait_for(|hand| !hand.frozen).await.map(|hand| hand.thaws);
        if now.unwrap_or(before) == before {
            return;
        }
    }
}

struct Waiting(Pin<Box<dyn Future<Output = ()> + Send + Sync>>);

impl Future for Waiting {
    type Output = ();
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        self.0.as_mut().poll(cx)
    }
}

impl Sleep for Waiting {}
