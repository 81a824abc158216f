//! The socket: who may connect, how many are connected, and when a private runner ends.

use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use axum::{Extension, Router};
use engine::Runner;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use proto::error::ErrorBody;
use tokio::net::{UnixListener, UnixStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{Instant, interval};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::routes::stream::Streams;
use crate::{host, output, routes};

/// How long a private runner stays when nobody needs it.
const IDLE_MAX: Duration = Duration::from_secs(10);
/// How often that is looked at.
const IDLE_EVERY: Duration = Duration::from_millis(500);
/// How long a client may take to send a request's head.
const HEAD_MAX: Duration = Duration::from_secs(30);
/// How long the runner may take to end what runs, and to record what that did.
const DRAIN_MAX: Duration = Duration::from_secs(40);
/// How long answers may take to reach their clients when the runner ends.
const FLUSH_MAX: Duration = Duration::from_secs(3);
/// Connections at one time.
const CLIENTS_MAX: u32 = 1024;

/// What every handler sees.
#[derive(Clone)]
pub(crate) struct App {
    pub(crate) runner: Runner,
    pub(crate) private: bool,
    pub(crate) started: Instant,
    pub(crate) stop: CancellationToken,
    pub(crate) streams: Streams,
    clients: Arc<AtomicU32>,
    /// Connections so far: one may come and go between two looks.
    came: Arc<AtomicU32>,
}

impl App {
    pub(crate) fn clients(&self) -> u32 {
        self.clients.load(Ordering::Relaxed)
    }

    fn in_use(&self) -> bool {
        self.clients() > 0 || self.runner.running() > 0 || self.runner.lingering() > 0
    }
}

/// Who is at the other end of a connection.
#[derive(Clone, Copy)]
pub(crate) struct Peer {
    /// The uid, as the runner's user knows it.
    pub(crate) uid: u32,
}

/// A runner's socket.
pub(crate) struct Listener {
    socket: UnixListener,
    path: PathBuf,
    app: App,
    uid: u32,
}

impl Listener {
    /// Binds the socket of the runner's state directory. `uid` is the runner's, outside of its namespace.
    pub(crate) fn bind(runner: Runner, private: bool, uid: u32) -> io::Result<Self> {
        let path = runner.store().dir().join("run/tendond.sock");
        // The state directory's lock is held: a socket that lies there is a dead runner's.
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            Ok(()) | Err(_) => {}
        }
        let (reachable, _dir) = proto::client::reachable(&path);
        let socket = UnixListener::bind(reachable)?;
        std::fs::set_permissions(&path, Permissions::from_mode(0o600))?;
        let (stop, clients, came) = (CancellationToken::new(), Arc::default(), Arc::default());
        let streams = Streams::new();
        let app = App { runner, private, started: Instant::now(), stop, streams, clients, came };
        Ok(Self { socket, path, app, uid })
    }

    /// Serves until a signal, a client or idleness ends it, then drains.
    pub(crate) async fn serve(self) -> Result<(), ErrorBody> {
        let receive = |kind| signal(kind).map_err(|error| host("signals can't be received", &error));
        let (mut interrupt, mut terminate) =
            (receive(SignalKind::interrupt())?, receive(SignalKind::terminate())?);
        let router = routes::router(self.app.clone());
        let connections = TaskTracker::new();
        tracing::info!(socket = %self.path.display(), pid = std::process::id(), "listening");
        if self.app.private {
            output::ready();
        }
        let app = &self.app;
        let idle = idle(|| app.private.then(|| (app.in_use(), app.came.load(Ordering::Relaxed))));
        tokio::pin!(idle);
        loop {
            tokio::select! {
                accepted = self.socket.accept() => match accepted {
                    Ok((stream, _)) => self.connection(stream, &router, &connections),
                    Err(error) => {
                        // Out of descriptors: give those who have some the time to be done.
                        tracing::error!(%error, "a connection can't be accepted");
                        tokio::time::sleep(Duration::from_millis(100)).await;
                    }
                },
                _ = interrupt.recv() => break,
                _ = terminate.recv() => break,
                () = self.app.stop.cancelled() => break,
                () = &mut idle => break,
            }
        }
        tracing::info!("ending");
        self.app.stop.cancel();
        let _ = std::fs::remove_file(&self.path);
        drop(self.socket);
        if tokio::time::timeout(DRAIN_MAX, self.app.runner.drain()).await.is_err() {
            tracing::error!("what ran did not end in time: the next runner records what it wrote");
        }
        connections.close();
        let _ = tokio::time::timeout(FLUSH_MAX, connections.wait()).await;
        Ok(())
    }

    fn connection(&self, stream: UnixStream, router: &Router, connections: &TaskTracker) {
        let own = rustix::process::geteuid().as_raw();
        let peer = match stream.peer_cred() {
            Ok(peer) if peer.uid() == own => Peer { uid: self.uid },
            Ok(peer) if peer.uid() == 0 => Peer { uid: 0 },
            Ok(peer) => return tracing::warn!(uid = peer.uid(), "a stranger is turned away"),
            Err(error) => return tracing::warn!(%error, "a connection without credentials is turned away"),
        };
        self.app.came.fetch_add(1, Ordering::Relaxed);
        let counted = Counted(self.app.clients.clone());
        if counted.0.fetch_add(1, Ordering::Relaxed) >= CLIENTS_MAX {
            return tracing::warn!("too many connections");
        }
        let service = TowerToHyperService::new(router.clone().layer(Extension(peer)));
        let stop = self.app.stop.clone();
        connections.spawn(async move {
            let _counted = counted;
            let connection = hyper::server::conn::http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEAD_MAX)
                .serve_connection(TokioIo::new(stream), service);
            tokio::pin!(connection);
            let ended = tokio::select! {
                ended = connection.as_mut() => ended,
                () = stop.cancelled() => {
                    connection.as_mut().graceful_shutdown();
                    connection.await
                }
            };
            if let Err(error) = ended {
                // A client may vanish at any time; what it asked for is cancelled.
                tracing::debug!(%error, "a connection broke");
            }
        });
    }
}

/// Takes a connection off the count when it ends.
struct Counted(Arc<AtomicU32>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Ends when a private runner, of which `look` tells whether it is in use and how many clients came so far, has not been
/// needed for [`IDLE_MAX`]; never for another.
async fn idle(look: impl Fn() -> Option<(bool, u32)>) {
    let (mut used, mut clients) = (Instant::now(), 0);
    let mut tick = interval(IDLE_EVERY);
    while used.elapsed() < IDLE_MAX {
        tick.tick().await;
        let Some((in_use, came)) = look() else { return std::future::pending().await };
        if in_use || came != clients {
            (used, clients) = (Instant::now(), came);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_client_between_two_looks_keeps_a_private_runner() {
        let came = AtomicU32::new(0);
        let begin = Instant::now();
        let visits = async {
            // What `tendon` does: a question, and a moment later what it wants.
            tokio::time::sleep(IDLE_MAX - Duration::from_millis(1)).await;
            came.fetch_add(1, Ordering::Relaxed);
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = idle(|| Some((false, came.load(Ordering::Relaxed)))) => {}
            () = visits => {}
        }
        assert!(begin.elapsed() >= IDLE_MAX * 2 - IDLE_EVERY, "{:?}", begin.elapsed());
    }
}
