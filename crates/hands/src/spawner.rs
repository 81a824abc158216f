//! The one thread that spawns hands. The kernel ties a hand's life to the thread that spawned it, so this thread lives as
//! long as the runner, and ends, with every hand, when the last handle to it is dropped.

use std::thread;

use sys::spawn::{Child, Plan, SpawnError, Spawner};
use tokio::sync::{mpsc, oneshot};

use crate::limits::SPAWN_QUEUE_MAX;

type Job = (Plan, oneshot::Sender<Result<Child, SpawnError>>);

/// A handle to the thread.
#[derive(Clone, Debug)]
pub(crate) struct SpawnThread(mpsc::Sender<Job>);

/// The thread is gone, which happens only while the process ends.
#[derive(Debug, thiserror::Error)]
pub enum SpawnThreadError {
    /// It could not be started.
    #[error("the spawning thread can't be started")]
    Start(#[source] std::io::Error),
    /// It did not answer.
    #[error("the spawning thread is gone")]
    Gone,
    /// It tried.
    #[error(transparent)]
    Spawn(#[from] SpawnError),
}

impl SpawnThread {
    pub fn start() -> Result<Self, SpawnThreadError> {
        let (sender, mut jobs) = mpsc::channel::<Job>(SPAWN_QUEUE_MAX);
        let run = move || {
            let mut spawner = Spawner::new();
            while let Some((plan, reply)) = jobs.blocking_recv() {
                let _ = reply.send(spawner.spawn(plan));
            }
        };
        thread::Builder::new().name("spawn".into()).spawn(run).map_err(SpawnThreadError::Start)?;
        Ok(SpawnThread(sender))
    }

    /// Spawns, from the thread. The future must be driven to its end: a child for which nobody waits is nobody's.
    pub async fn spawn(&self, plan: Plan) -> Result<Child, SpawnThreadError> {
        let (reply, answer) = oneshot::channel();
        self.0.send((plan, reply)).await.map_err(|_| SpawnThreadError::Gone)?;
        answer.await.map_err(|_| SpawnThreadError::Gone)?.map_err(SpawnThreadError::Spawn)
    }
}
