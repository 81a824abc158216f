//! The runner: one state directory, its branches and its hands.

use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::panic::resume_unwind;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hands::{Hand, Hands};
use proto::api::BranchInfo;
use proto::error::{Code, Coded};
use proto::http::ExecControl;
use proto::ids::{BranchId, ExecId, VerifyId};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use vfs::{Actor, EditError, Editor, ForkBusy, Root, Store};

use crate::below::Below;
use crate::config::Settings;
use crate::disk::Disk;
use crate::limits::RUNNING_MAX;
use crate::warm::WarmHands;

/// How long draining waits for what was cancelled.
const DRAIN_MAX: Duration = Duration::from_secs(20);

/// How a runner is opened.
pub struct RunnerOptions {
    /// The state directory.
    pub state_dir: PathBuf,
    /// The configuration in force.
    pub settings: Settings,
    /// The in-sandbox agent's binary.
    pub hand_binary: PathBuf,
    /// A command that calls [`hands::warden::run`]; without one, a killed runner leaves its control groups to the next.
    pub warden: Option<Vec<OsString>>,
}

/// A runner. Cheap to clone; the state directory is released when the last clone is gone.
#[derive(Clone)]
pub struct Runner {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) store: Store,
    pub(crate) hands: Hands,
    pub(crate) settings: Settings,
    pub(crate) warm: WarmHands,
    pub(crate) disk: Disk,
    verifies: Mutex<HashMap<VerifyId, CancellationToken>>,
    pub(crate) execs: Mutex<HashMap<ExecId, mpsc::Sender<ExecControl>>>,
    /// Cancelled when the runner drains; every run's token is its child.
    pub(crate) stopping: CancellationToken,
    tasks: TaskTracker,
}

/// Runs work that blocks on the pool for it, and hands its panic on.
pub struct Blocking;

impl Blocking {
    /// Runs `work`.
    pub async fn run<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
        match tokio::task::spawn_blocking(work).await {
            Ok(value) => value,
            Err(error) => match error.try_into_panic() {
                Ok(panic) => resume_unwind(panic),
                // Only a runtime that is shut down cancels blocking work, and then nobody waits for this.
                Err(_) => std::future::pending().await,
            },
        }
    }
}

impl Runner {
    /// Opens the state directory and finds out what hands this host can have. Blocks for as long as recovery takes.
    pub async fn open(options: RunnerOptions) -> Result<Self, Below> {
        let (dir, store_options) = (options.state_dir, options.settings.store_options());
        let store = Blocking::run(move || Store::open(&dir, store_options)).await.map_err(Below::new)?;
        let hands =
            Hands::new(options.settings.hands_options(options.hand_binary, store.dir(), options.warden))
                .await
                .map_err(Below::new)?;
        let warm = WarmHands::new(&options.settings.runner);
        let inner = Inner {
            store,
            hands,
            settings: options.settings,
            warm,
            disk: Disk::default(),
            verifies: Mutex::default(),
            execs: Mutex::default(),
            stopping: CancellationToken::new(),
            tasks: TaskTracker::new(),
        };
        let runner = Self { inner: Arc::new(inner) };
        runner.with_store(drop_orphans).await;
        runner.collect();
        runner.spawn(crate::warm::keep(runner.clone()));
        runner.spawn(crate::warm::watch_background(runner.clone()));
        runner.spawn(crate::disk::keep_room(runner.clone()));
        Ok(runner)
    }

    /// The branch store. Its calls block.
    pub fn store(&self) -> &Store {
        &self.inner.store
    }

    /// What makes hands.
    pub fn hands(&self) -> &Hands {
        &self.inner.hands
    }

    /// The configuration in force.
    pub fn settings(&self) -> &Settings {
        &self.inner.settings
    }

    /// Verifies and execs that run now.
    pub fn running(&self) -> usize {
        self.verifies().len() + self.inner.warm.running()
    }

    /// Hands in which background processes of an exec may still be at work.
    pub fn lingering(&self) -> usize {
        self.inner.warm.lingering()
    }

    /// Calls the store on the pool for work that blocks.
    pub async fn with_store<T: Send + 'static>(&self, work: impl FnOnce(&Store) -> T + Send + 'static) -> T {
        let store = self.inner.store.clone();
        Blocking::run(move || work(&store)).await
    }

    /// Runs something as a task of its own, which goes on to its end when the caller goes away, and which draining awaits.
    async fn whole<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> T {
        match self.inner.tasks.spawn(work).await {
            Ok(value) => value,
            Err(error) => match error.try_into_panic() {
                Ok(panic) => resume_unwind(panic),
                // Only a runtime that is shut down cancels tasks.
                Err(_) => std::future::pending().await,
            },
        }
    }

    /// Forks a branch: at once if nothing runs on it, else from a frozen moment. A caller that goes away does not end it.
    pub async fn fork(
        &self,
        branch: BranchId,
        name: Option<String>,
        actor: Actor,
    ) -> Result<BranchInfo, Below> {
        let runner = self.clone();
        self.whole(async move { runner.fork_now(branch, name, actor).await }).await
    }

    async fn fork_now(
        &self,
        branch: BranchId,
        name: Option<String>,
        actor: Actor,
    ) -> Result<BranchInfo, Below> {
        let _turn = self.inner.warm.turn(&branch).await;
        if let Some((hand, writer)) = self.inner.warm.running_hand(&branch).await {
            let frozen = Frozen::new(hand, branch.clone()).await.map_err(FreezeError).map_err(Below::new)?;
            // What runs wrote what is found now, and not who forks.
            let forked = self.with_store(move |store| {
                store.fork_branch(&branch, name.as_deref(), &actor, ForkBusy::Frozen(&writer))
            });
            let forked = forked.await.map_err(Below::new);
            frozen.thaw().await;
            return forked;
        }
        self.inner.warm.end(self, &branch).await.map_err(Below::new)?;
        let fork = move |store: &Store| store.fork_branch(&branch, name.as_deref(), &actor, ForkBusy::Quiet);
        self.with_store(fork).await.map_err(Below::new)
    }

    /// The branch, mounted, and a mount of it for a hand. The hand must be gone before the `Root` is.
    pub(crate) async fn root(&self, branch: &BranchId) -> Result<(Root, OwnedFd), Below> {
        let branch = branch.clone();
        self.with_store(move |store| {
            let root = store.mount(&branch).map_err(Below::new)?;
            let mount = root.mount_clone().map_err(|source| Below::new(CloneError { branch, source }))?;
            Ok((root, mount))
        })
        .await
    }

    /// Reads or edits a branch as `actor`. What commands that run there have made of the same paths meanwhile is recorded first, as
    /// theirs.
    pub async fn edit<T: Send + 'static>(
        &self,
        branch: BranchId,
        actor: Actor,
        work: impl FnOnce(&Editor) -> Result<T, EditError> + Send + 'static,
    ) -> Result<T, EditError> {
        let runner = self.clone();
        let edit = move |store: &Store| {
            let editor = store.edit(&branch, &actor)?;
            work(&editor.beside(move || runner.inner.warm.may_write(&branch)))
        };
        self.with_store(edit).await
    }

    /// Starts to remove bases of past verifies, as far as the configuration has it.
    pub(crate) fn collect(&self) {
        let config = &self.settings().runner;
        let (idle_ms_max, bytes_max) = (config.bases_idle_ms_max, config.bases_bytes_max);
        let runner = self.clone();
        self.spawn(async move {
            match runner.with_store(move |store| store.collect_bases(idle_ms_max, bytes_max)).await {
                Ok(report) if report.removed.is_empty() => {}
                Ok(report) => {
                    tracing::info!(bases = report.removed.len(), bytes = report.bytes, "removed unused bases")
                }
                Err(error) => {
                    tracing::error!(error = crate::meter::chain(&error), "unused bases can't be removed")
                }
            }
        });
    }

    /// Drops a branch on which nothing runs. A caller that goes away does not end it.
    pub async fn drop_branch(&self, branch: BranchId, actor: Actor) -> Result<(), Below> {
        let runner = self.clone();
        let drop = async move {
            let _turn = runner.inner.warm.turn(&branch).await;
            runner.inner.warm.end(&runner, &branch).await.map_err(Below::new)?;
            runner.with_store(move |store| store.drop_branch(&branch, &actor)).await.map_err(Below::new)
        };
        self.whole(drop).await
    }

    /// Cancels a verify; `false` if none of that id runs.
    pub fn cancel_verify(&self, id: &VerifyId) -> bool {
        match self.verifies().get(id) {
            Some(token) => {
                token.cancel();
                true
            }
            None => false,
        }
    }

    /// Cancels what runs, waits for its clean-up, and ends all hands. Nothing can be started afterwards.
    pub async fn drain(&self) {
        self.inner.stopping.cancel();
        self.inner.tasks.close();
        if tokio::time::timeout(DRAIN_MAX, self.inner.tasks.wait()).await.is_err() {
            tracing::error!("what was cancelled did not end in time");
        }
        self.inner.warm.end_all(self).await;
    }

    /// Takes up a verify; `None` if too many run or the runner is ending. The guard gives the place back.
    pub(crate) fn enter(&self, id: &VerifyId) -> Option<Entered> {
        if self.inner.stopping.is_cancelled() || self.running() >= RUNNING_MAX {
            return None;
        }
        let cancel = self.inner.stopping.child_token();
        self.verifies().insert(id.clone(), cancel.clone());
        Some(Entered { runner: self.clone(), id: id.clone(), cancel })
    }

    /// Starts a task that draining waits for.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.inner.tasks.spawn(task);
    }

    /// The verifies that run now.
    pub(crate) fn running_verifies(&self) -> HashSet<String> {
        self.verifies().keys().map(ToString::to_string).collect()
    }

    fn verifies(&self) -> MutexGuard<'_, HashMap<VerifyId, CancellationToken>> {
        self.inner.verifies.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Drops the branches of verifies that a dead runner left. They are named like the verify; no user's branch can be.
fn drop_orphans(store: &Store) {
    let branches = match store.branches() {
        Ok(branches) => branches,
        Err(error) => return tracing::error!(%error, "the branches can't be listed"),
    };
    for branch in branches {
        if branch.name.as_ref().is_some_and(|name| name.parse::<VerifyId>().is_ok()) {
            match store.drop_branch(&branch.id, &Actor::recovery()) {
                Ok(()) => {
                    tracing::info!(branch = %branch.id, "dropped the branch of a verify that died with its runner")
                }
                Err(error) => {
                    tracing::error!(branch = %branch.id, %error, "the branch of a dead verify can't be dropped")
                }
            }
        }
    }
}

/// A verify's place among those that run.
pub(crate) struct Entered {
    runner: Runner,
    id: VerifyId,
    pub(crate) cancel: CancellationToken,
}

impl Drop for Entered {
    fn drop(&mut self) {
        self.runner.verifies().remove(&self.id);
    }
}

/// What runs on a branch can't be stopped for a moment, so the branch can't be forked.
#[derive(Debug, thiserror::Error)]
#[error("what runs on the branch can't be frozen for the fork")]
struct FreezeError(#[source] hands::FreezeError);

impl Coded for FreezeError {
    fn code(&self) -> Code {
        self.0.code()
    }
    fn hint(&self) -> Option<String> {
        Some("wait until the command, and all that it left running, has ended, then fork".into())
    }
}

/// A branch's mount can't be given to a hand.
#[derive(Debug, thiserror::Error)]
#[error("the mount of branch {branch} can't be given to a hand")]
struct CloneError {
    branch: BranchId,
    source: std::io::Error,
}

impl Coded for CloneError {
    fn code(&self) -> Code {
        Code::HostBroken
    }
}

/// A hand that stands still. It is thawed whatever happens to who froze it.
struct Frozen {
    hand: Option<Hand>,
    branch: BranchId,
}

impl Frozen {
    async fn new(hand: Hand, branch: BranchId) -> Result<Self, hands::FreezeError> {
        hand.freeze().await?;
        Ok(Self { hand: Some(hand), branch })
    }

    async fn thaw(mut self) {
        if let Some(hand) = self.hand.take() {
            thaw(&hand, &self.branch).await;
        }
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        if let Some(hand) = self.hand.take() {
            let branch = self.branch.clone();
            tokio::spawn(async move { thaw(&hand, &branch).await });
        }
    }
}

/// A hand that can't be thawed would stand still for ever: it is ended instead, and what ran in it is told so.
async fn thaw(hand: &Hand, branch: &BranchId) {
    if let Err(error) = hand.thaw().await {
        tracing::error!(%branch, error = crate::meter::chain(&error), "a hand can't be thawed: it is ended");
        hand.stop().await;
    }
}
