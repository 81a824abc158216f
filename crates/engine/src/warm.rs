//! One warm hand per branch for execs: booted when first needed, kept while it is used, ended when idle.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hands::{Hand, HandSpec};
use policy::Grant;
use proto::error::{Code, Coded};
use proto::ids::BranchId;
use proto::verify::LimitInForce;
use tokio::sync::OwnedMutexGuard;
use tokio::task::JoinSet;
use tokio::time::{Instant, interval};
use vfs::{Actor, Root, Writers};

use crate::below::Below;
use crate::config::RunnerConfig;
use crate::disk::{self, Watched};
use crate::limits::{CAPTURE_EVERY, DISK_WATCH_EVERY, MOUNT_IDLE_MAX, WITNESS_EVERY};
use crate::meter::{chain, ended_leftovers};
use crate::runner::Runner;

/// Something runs on the branch.
#[derive(Debug, thiserror::Error)]
#[error("something runs on branch {branch}")]
pub struct BusyError {
    /// The branch.
    pub branch: BranchId,
}

impl Coded for BusyError {
    fn code(&self) -> Code {
        Code::Conflict
    }
    fn hint(&self) -> Option<String> {
        Some("wait until it has ended, or stop it".into())
    }
}

/// Why there is no hand for an exec.
#[derive(Debug, thiserror::Error)]
pub enum LeaseError {
    /// The branch's hand has other limits and is in use.
    #[error("something runs on the branch with other limits")]
    Limits(#[source] BusyError),
    /// The branch can't be mounted, or the hand can't be booted.
    #[error(transparent)]
    Below(Below),
}

impl Coded for LeaseError {
    fn code(&self) -> Code {
        match self {
            Self::Limits(error) => error.code(),
            Self::Below(error) => error.code(),
        }
    }
    fn hint(&self) -> Option<String> {
        match self {
            Self::Limits(_) => Some("run it with the same limits, or wait until the other has ended".into()),
            Self::Below(error) => error.hint(),
        }
    }
}

fn below(error: impl Coded + Send + Sync + 'static) -> LeaseError {
    LeaseError::Below(Below::new(error))
}

/// The warm hands.
pub(crate) struct WarmHands {
    slots: Mutex<HashMap<BranchId, Warm>>,
    /// Branches on which a verify runs, in a hand of its own.
    taken: Mutex<HashSet<BranchId>>,
    /// What became of background processes, for the next who runs something on the branch.
    notices: Mutex<HashMap<BranchId, Vec<String>>>,
    /// Held while a branch's hand starts or ends, or the branch is forked or dropped.
    turns: Mutex<HashMap<BranchId, Arc<tokio::sync::Mutex<()>>>>,
    idle_max: Duration,
    hands_max: usize,
}

struct Warm {
    hand: Hand,
    limits: Vec<LimitInForce>,
    /// The execs that run, oldest first.
    running: Vec<Actor>,
    used: Instant,
    /// Whose background processes may still write.
    lingering: Vec<Actor>,
    /// The branch may not be larger than this: set by the last exec that started.
    disk_end: disk::End,
    watched: Arc<Watched>,
    /// The branch stays mounted as long as its hand lives.
    _root: Root,
}

impl Warm {
    /// The execs that run, and those that left something running.
    fn may_write(&self) -> Option<Actor> {
        any_of(self.running.iter().chain(&self.lingering))
    }
}

/// A place on a branch's hand for one exec.
pub(crate) struct Lease {
    runner: Runner,
    branch: BranchId,
    actor: Actor,
    pub(crate) hand: Hand,
    pub(crate) watched: Arc<Watched>,
}

impl Lease {
    /// Sets how large the branch may be, for what the exec leaves running, too.
    pub(crate) fn set_disk_end(&self, end: disk::End) {
        if let Some(warm) = self.runner.inner.warm.slots().get_mut(&self.branch) {
            warm.disk_end = end;
        }
    }

    /// Notes that the exec left processes behind.
    pub(crate) fn lingering(&self) {
        if let Some(warm) = self.runner.inner.warm.slots().get_mut(&self.branch) {
            // More than a row names need not be remembered.
            if warm.lingering.len() <= vfs::ACTORS_MAX && !warm.lingering.contains(&self.actor) {
                warm.lingering.push(self.actor.clone());
            }
        }
    }

    /// Ends what earlier execs left running in the hand, and captures what that wrote last; `false` if there is nothing, or
    /// if another exec runs there.
    pub(crate) async fn end_leftovers(&self) -> bool {
        let warm = &self.runner.inner.warm;
        let _turn = warm.turn(&self.branch).await;
        let lingering = match warm.slots().get(&self.branch) {
            Some(warm) if warm.running.len() == 1 => any_of(&warm.lingering),
            Some(_) | None => return false,
        };
        if !ended_leftovers(&self.hand).await {
            return false;
        }
        if let Some(actor) = lingering
            && capture(&self.runner, &self.branch, &actor, Writers::Gone).await
        {
            warm.forget_background(&self.branch);
        }
        true
    }

    /// Whether no other exec runs in the hand.
    pub(crate) fn is_alone(&self) -> bool {
        self.runner.inner.warm.slots().get(&self.branch).is_none_or(|warm| warm.running.len() == 1)
    }

    /// Who may have written what is found on the branch now: the exec, those that run beside it, and what was left behind.
    pub(crate) fn may_have_written(&self) -> Actor {
        let slots = self.runner.inner.warm.slots();
        match slots.get(&self.branch) {
            Some(warm) => self.actor.clone().or(warm.running.iter().chain(&warm.lingering)),
            None => self.actor.clone(),
        }
    }

    /// Captures what those wrote who may write before the exec starts, so that it is not taken for the exec's.
    pub(crate) async fn capture_others(&self) {
        let others = {
            let slots = self.runner.inner.warm.slots();
            let Some(warm) = slots.get(&self.branch) else { return };
            let running = warm.running.iter().filter(|actor| **actor != self.actor);
            any_of(running.chain(&warm.lingering))
        };
        if let Some(others) = others {
            capture(&self.runner, &self.branch, &others, Writers::MayLive).await;
        }
    }

    /// Whether other processes may write to the branch: another exec's, or what an earlier one left behind.
    pub(crate) fn writers(&self) -> Writers {
        if self.hand.is_gone() {
            return Writers::Gone;
        }
        if self.hand.lost().is_some() {
            return Writers::MayLive;
        }
        let slots = self.runner.inner.warm.slots();
        match slots.get(&self.branch) {
            Some(warm) if warm.running.len() > 1 || !warm.lingering.is_empty() => Writers::MayLive,
            Some(_) | None => Writers::Gone,
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(warm) = self.runner.inner.warm.slots().get_mut(&self.branch) {
            warm.running.retain(|actor| *actor != self.actor);
            warm.used = Instant::now();
        }
    }
}

/// See [`WarmHands::take`].
pub(crate) struct Taken {
    runner: Runner,
    branch: BranchId,
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.runner.inner.warm.taken().remove(&self.branch);
    }
}

impl WarmHands {
    pub(crate) fn new(config: &RunnerConfig) -> Self {
        Self {
            slots: Mutex::default(),
            taken: Mutex::default(),
            notices: Mutex::default(),
            turns: Mutex::default(),
            idle_max: Duration::from_millis(config.warm_idle_ms_max),
            hands_max: config.warm_hands_max as usize,
        }
    }

    /// Execs that run now.
    pub(crate) fn running(&self) -> usize {
        self.slots().values().map(|warm| warm.running.len()).sum()
    }

    /// Hands whose background processes may still be at work.
    pub(crate) fn lingering(&self) -> usize {
        self.slots().values().filter(|warm| !warm.lingering.is_empty()).count()
    }

    /// The branch's hand, if something runs in it, in the background too, and who may write there. The caller holds the
    /// branch's turn.
    pub(crate) async fn running_hand(&self, branch: &BranchId) -> Option<(Hand, Actor)> {
        if self.stands_still(branch).await {
            return None;
        }
        let slots = self.slots();
        let warm = slots.get(branch)?;
        Some((warm.hand.clone(), warm.may_write()?))
    }

    /// Who may write to the branch, or have written what no scan has seen; `None` if nobody known.
    pub(crate) fn may_write(&self, branch: &BranchId) -> Option<Actor> {
        self.slots().get(branch)?.may_write()
    }

    /// Whether no process can write to the branch any more. The caller holds the branch's turn.
    async fn stands_still(&self, branch: &BranchId) -> bool {
        let hand = match self.slots().get(branch) {
            Some(warm) if warm.running.is_empty() => warm.hand.clone(),
            Some(_) | None => return false,
        };
        match hand.link().ping().await {
            Ok(status) => status.execs.is_empty() && status.lingering == 0,
            Err(_) if hand.lost().is_some() => {
                // Of no use any more: whatever still runs in it ends now.
                hand.stop().await;
                true
            }
            Err(_) => false,
        }
    }

    fn forget_background(&self, branch: &BranchId) {
        if let Some(warm) = self.slots().get_mut(branch) {
            warm.lingering.clear();
        }
    }

    /// Waits until nothing else starts, ends, forks or drops on the branch.
    pub(crate) async fn turn(&self, branch: &BranchId) -> OwnedMutexGuard<()> {
        self.turn_lock(branch).lock_owned().await
    }

    fn turn_lock(&self, branch: &BranchId) -> Arc<tokio::sync::Mutex<()>> {
        let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
        turns.retain(|_, turn| Arc::strong_count(turn) > 1);
        turns.entry(branch.clone()).or_default().clone()
    }

    /// A place on the branch's hand, which is booted if there is none, or if it is idle and has other limits.
    pub(crate) async fn lease(
        &self,
        runner: &Runner,
        branch: &BranchId,
        grant: Grant,
        actor: &Actor,
    ) -> Result<Lease, LeaseError> {
        let _turn = self.turn(branch).await;
        self.check_free(branch).map_err(below)?;
        if let Some(lease) = self.join(runner, branch, &grant.limits, actor) {
            return Ok(lease);
        }
        self.end(runner, branch).await.map_err(LeaseError::Limits)?;
        self.make_room(runner).await;
        let (root, mount) = runner.root(branch).await.map_err(LeaseError::Below)?;
        let limits = grant.limits.clone();
        // Each exec brings its own.
        let numbers = policy::Limits { wall_ms_max: u64::MAX, ..grant.numbers };
        let spec = HandSpec { root: mount, grant: Grant { numbers, ..grant }, env: Vec::new() };
        let hand = runner.hands().boot(spec).await.map_err(below)?;
        let watched = runner.inner.disk.watch(runner, branch, &hand);
        let warm = Warm {
            hand: hand.clone(),
            limits,
            running: vec![actor.clone()],
            used: Instant::now(),
            lingering: Vec::new(),
            disk_end: disk::End::NONE,
            watched: watched.clone(),
            _root: root,
        };
        self.slots().insert(branch.clone(), warm);
        Ok(Lease { runner: runner.clone(), branch: branch.clone(), actor: actor.clone(), hand, watched })
    }

    fn join(
        &self,
        runner: &Runner,
        branch: &BranchId,
        limits: &[LimitInForce],
        actor: &Actor,
    ) -> Option<Lease> {
        let mut slots = self.slots();
        let warm = slots.get_mut(branch)?;
        let ends = warm.hand.lost().is_some() || warm.watched.starved.is_cancelled();
        if ends || !same_hand(&warm.limits, limits) {
            return None;
        }
        warm.running.push(actor.clone());
        let (runner, branch, actor) = (runner.clone(), branch.clone(), actor.clone());
        Some(Lease { runner, branch, actor, hand: warm.hand.clone(), watched: warm.watched.clone() })
    }

    /// Ends the branch's hand, if it is idle. The caller holds the branch's turn.
    pub(crate) async fn end(&self, runner: &Runner, branch: &BranchId) -> Result<(), BusyError> {
        self.check_free(branch)?;
        let warm = {
            let mut slots = self.slots();
            match slots.get(branch) {
                None => return Ok(()),
                Some(warm) if !warm.running.is_empty() && warm.hand.lost().is_none() => {
                    return Err(BusyError { branch: branch.clone() });
                }
                Some(_) => slots.remove(branch),
            }
        };
        if let Some(warm) = warm {
            stop(runner, branch, warm).await;
        }
        Ok(())
    }

    /// Keeps execs, forks and drops away from a branch until the guard is gone.
    pub(crate) fn take(&self, runner: &Runner, branch: &BranchId) -> Taken {
        self.taken().insert(branch.clone());
        Taken { runner: runner.clone(), branch: branch.clone() }
    }

    fn check_free(&self, branch: &BranchId) -> Result<(), BusyError> {
        if self.taken().contains(branch) { Err(BusyError { branch: branch.clone() }) } else { Ok(()) }
    }

    fn taken(&self) -> MutexGuard<'_, HashSet<BranchId>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends all hands, whatever runs in them.
    pub(crate) async fn end_all(&self, runner: &Runner) {
        let mut all = JoinSet::new();
        for (branch, warm) in self.slots().drain() {
            let runner = runner.clone();
            all.spawn(async move { stop(&runner, &branch, warm).await });
        }
        all.join_all().await;
    }

    /// Ends the hand that was idle longest when there are as many as may be.
    async fn make_room(&self, runner: &Runner) {
        let mut idle: Vec<(Instant, BranchId)> = {
            let slots = self.slots();
            if slots.len() < self.hands_max {
                return;
            }
            let idle = slots.iter().filter(|(_, warm)| warm.running.is_empty());
            idle.map(|(branch, warm)| (warm.used, branch.clone())).collect()
        };
        idle.sort_by_key(|(used, _)| *used);
        for (_, branch) in idle {
            // One whose turn another has is in use; waiting for it could be waiting for each other.
            let Ok(_turn) = self.turn_lock(&branch).try_lock_owned() else { continue };
            if self.end(runner, &branch).await.is_ok() {
                return;
            }
        }
    }

    /// Notes what became of background processes of the branch.
    fn notice(&self, branch: &BranchId, text: String) {
        let mut notices = self.notices.lock().unwrap_or_else(PoisonError::into_inner);
        notices.entry(branch.clone()).or_default().push(text);
    }

    /// What there is to tell the next who runs something on the branch.
    pub(crate) fn take_notices(&self, branch: &BranchId) -> Vec<String> {
        self.notices.lock().unwrap_or_else(PoisonError::into_inner).remove(branch).unwrap_or_default()
    }

    fn slots(&self) -> MutexGuard<'_, HashMap<BranchId, Warm>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whoever of them it was.
pub(crate) fn any_of<'a>(actors: impl IntoIterator<Item = &'a Actor>) -> Option<Actor> {
    let mut actors = actors.into_iter();
    let first = actors.next()?.clone();
    Some(first.or(actors))
}

/// The limits of the hand itself; wall time is an exec's own.
fn same_hand(a: &[LimitInForce], b: &[LimitInForce]) -> bool {
    let of_hand = |limit: &&LimitInForce| limit.name != "wall_ms_max";
    a.iter().filter(of_hand).eq(b.iter().filter(of_hand))
}

/// Ends a hand, and captures what its background processes wrote last.
async fn stop(runner: &Runner, branch: &BranchId, warm: Warm) {
    warm.hand.stop().await;
    if let Some(actor) = any_of(&warm.lingering) {
        capture(runner, branch, &actor, Writers::Gone).await;
    }
}

/// Captures what background processes wrote; when none is left any more, for the last time.
async fn capture_background(runner: &Runner, branch: &BranchId, actor: &Actor) {
    let warm = &runner.inner.warm;
    // Nothing can start on the branch meanwhile, so that what looks like the last time is.
    let turn = warm.turn(branch).await;
    if warm.stands_still(branch).await {
        if capture(runner, branch, actor, Writers::Gone).await {
            warm.forget_background(branch);
        }
        return;
    }
    drop(turn);
    capture(runner, branch, actor, Writers::MayLive).await;
}

/// Returns whether that could be done.
async fn capture(runner: &Runner, branch: &BranchId, actor: &Actor, writers: Writers) -> bool {
    let (id, actor) = (branch.clone(), actor.clone());
    let scan = runner.with_store(move |store| match writers {
        Writers::MayLive => store.scan_live(&id, &actor, None),
        Writers::Gone => store.scan(&id, &actor, None),
    });
    match scan.await {
        Ok(_) => true,
        Err(error) => {
            tracing::error!(%branch, error = chain(&error), "background changes can't be captured");
            false
        }
    }
}

/// Ends hands whose background processes make their branch too large, until the runner ends.
pub(crate) async fn watch_background(runner: Runner) {
    let mut tick = interval(DISK_WATCH_EVERY);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    // Those that were too large a tick ago: what runs beside them has had the time to end by itself.
    let mut before = HashSet::new();
    loop {
        tokio::select! {
            _ = tick.tick() => {}
            () = runner.inner.stopping.cancelled() => return,
        }
        let warm = &runner.inner.warm;
        let lingering: Vec<(BranchId, Hand, disk::End)> = {
            let slots = warm.slots();
            let lingering = slots.iter().filter(|(_, warm)| !warm.lingering.is_empty());
            lingering.map(|(branch, warm)| (branch.clone(), warm.hand.clone(), warm.disk_end)).collect()
        };
        let mut over = HashSet::new();
        for (branch, hand, end) in lingering {
            if hand.lost().is_some()
                || matches!(disk::used(&runner, &branch, &hand).await, Ok(used) if end.exceeded(&used).is_none())
            {
                continue;
            }
            if before.contains(&branch) {
                tracing::warn!(%branch, "{BACKGROUND_OUTGREW}");
                warm.notice(&branch, BACKGROUND_OUTGREW.to_owned());
                hand.stop().await;
            }
            over.insert(branch);
        }
        before = over;
    }
}

/// What people are told of that.
const BACKGROUND_OUTGREW: &str =
    "background processes of earlier commands made the branch larger than it may be and were ended";

/// Captures what background processes write, and ends idle hands, until the runner ends.
pub(crate) async fn keep(runner: Runner) {
    let mut witnessed = Instant::now();
    let mut tick = interval(CAPTURE_EVERY);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = tick.tick() => {}
            () = runner.inner.stopping.cancelled() => return,
        }
        let warm = &runner.inner.warm;
        runner.with_store(|store| store.unmount_idle(MOUNT_IDLE_MAX)).await;
        if let Err(error) = runner.with_store(vfs::Store::flatten_some).await {
            tracing::error!(error = chain(&error), "long chains of layers can't be flattened");
        }
        if witnessed.elapsed() > WITNESS_EVERY {
            witnessed = Instant::now();
            if let Err(error) = runner.with_store(vfs::Store::witness).await {
                tracing::error!(error = chain(&error), "the end of the audit can't be noted");
            }
        }
        let lingering: Vec<(BranchId, Actor)> = {
            let slots = warm.slots();
            slots
                .iter()
                .filter_map(|(branch, warm)| Some((branch.clone(), any_of(&warm.lingering)?)))
                .collect()
        };
        for (branch, actor) in lingering {
            capture_background(&runner, &branch, &actor).await;
        }
        let idle: Vec<BranchId> = {
            let slots = warm.slots();
            let idle = slots
                .iter()
                .filter(|(_, held)| held.running.is_empty() && held.used.elapsed() > warm.idle_max);
            idle.map(|(branch, _)| branch.clone()).collect()
        };
        for branch in idle {
            let _turn = warm.turn(&branch).await;
            // It is in use again: then it is not idle.
            let _ = warm.end(&runner, &branch).await;
        }
    }
}
