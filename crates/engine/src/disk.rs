//! The disk, while hands write to it: how large each branch becomes, and what the file system has left. Ends what takes too
//! much; reads nothing of a branch but sizes.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hands::Hand;
use proto::error::{Code, Coded};
use proto::ids::BranchId;
use tokio::time::{MissedTickBehavior, interval, sleep};
use tokio_util::sync::CancellationToken;

use crate::below::Below;
use crate::limits::{
    CANCEL_GRACE, DISK_BLAME_TIME, DISK_FREE_BYTES_MIN, DISK_FREE_INODES_MIN, DISK_WATCH_EVERY,
};
use crate::runner::{Blocking, Runner};

/// The names of limits in an outcome.
pub(crate) const DISK: &str = "disk";
/// See [`Watched::starved`].
pub(crate) const DISK_FREE: &str = "free disk space";

/// How often in a row a branch may fail to be measured: code that moves directories about may disturb that.
const FAILURES_MAX: u32 = 3;

/// The hands that may write now.
#[derive(Default)]
pub(crate) struct Disk {
    hands: Mutex<HashMap<BranchId, Writer>>,
}

struct Writer {
    hand: Hand,
    starved: CancellationToken,
}

/// A hand among those that may write, for as long as it lives.
pub(crate) struct Watched {
    runner: Runner,
    branch: BranchId,
    /// Cancelled when the file system is nearly full and this hand wrote most: its commands are to end, and then it is ended.
    pub(crate) starved: CancellationToken,
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.runner.inner.disk.hands().remove(&self.branch);
    }
}

impl Disk {
    fn hands(&self) -> MutexGuard<'_, HashMap<BranchId, Writer>> {
        self.hands.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Watches the only hand of a branch.
    pub(crate) fn watch(&self, runner: &Runner, branch: &BranchId, hand: &Hand) -> Arc<Watched> {
        let starved = CancellationToken::new();
        let writer = Writer { hand: hand.clone(), starved: starved.clone() };
        self.hands().insert(branch.clone(), writer);
        Arc::new(Watched { runner: runner.clone(), branch: branch.clone(), starved })
    }
}

/// What a branch takes of the disk, files that only have no name any more included.
pub(crate) async fn used(runner: &Runner, branch: &BranchId, hand: &Hand) -> Result<u64, Below> {
    let (branch, hand) = (branch.clone(), hand.clone());
    let measure = move |store: &vfs::Store| {
        let named = store.branch_disk_bytes(&branch).map_err(Below::new)?;
        Ok(named.saturating_add(hand.unlinked_bytes()))
    };
    runner.with_store(measure).await
}

/// Returns when the branch takes more than `end`. What can't be measured is taken for too large.
pub(crate) async fn outgrown(runner: &Runner, branch: &BranchId, hand: &Hand, end: u64) {
    let mut failures = 0;
    loop {
        sleep(DISK_WATCH_EVERY).await;
        match used(runner, branch, hand).await {
            Ok(bytes) if bytes > end => return,
            Ok(_) => failures = 0,
            Err(error) => {
                failures += 1;
                tracing::warn!(%branch, error = crate::meter::chain(&error), "the size of a branch can't be measured");
                if failures >= FAILURES_MAX {
                    return;
                }
            }
        }
    }
}

/// The file system of the state directory is nearly full.
#[derive(Debug, thiserror::Error)]
#[error("the state directory's disk is nearly full: {left} left, and at least {least} are kept free")]
pub struct NearlyFull {
    left: String,
    least: String,
}

impl Coded for NearlyFull {
    fn code(&self) -> Code {
        Code::Refused
    }
    fn hint(&self) -> Option<String> {
        Some("make room, for example with: tendon base gc".into())
    }
}

/// Fails if no command should be started, since the disk has as little left as is kept for the audit.
pub(crate) async fn check_room(runner: &Runner) -> Result<(), NearlyFull> {
    let dir = runner.store().dir().to_owned();
    Blocking::run(move || room(&dir)).await
}

/// Some of the disk is kept free, so that the audit can be written and a drop recorded; little of a small disk.
fn room(dir: &Path) -> Result<(), NearlyFull> {
    // A file system that does not tell has no known end.
    let Ok(stat) = rustix::fs::statvfs(dir) else { return Ok(()) };
    let least = DISK_FREE_BYTES_MIN.min(stat.f_blocks.saturating_mul(stat.f_frsize) / 50);
    let left = stat.f_bavail.saturating_mul(stat.f_frsize);
    if left < least {
        let mib = |bytes: u64| format!("{} MiB", bytes >> 20);
        return Err(NearlyFull { left: mib(left), least: mib(least) });
    }
    let least = DISK_FREE_INODES_MIN.min(stat.f_files / 50);
    if stat.f_favail < least {
        return Err(NearlyFull {
            left: format!("{} inodes", stat.f_favail),
            least: format!("{least} inodes"),
        });
    }
    Ok(())
}

/// Keeps the disk from filling up: ends the hand that writes most when little is left, until the runner ends.
pub(crate) async fn keep_room(runner: Runner) {
    let mut tick = interval(DISK_WATCH_EVERY);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = tick.tick() => {}
            () = runner.inner.stopping.cancelled() => return,
        }
        let Err(full) = check_room(&runner).await else { continue };
        let Some((branch, hand, starved)) = most_written(&runner).await else { continue };
        tracing::warn!(%branch, error = %full, "a hand is ended");
        starved.cancel();
        // Its commands have a moment to end and tell why.
        sleep(CANCEL_GRACE).await;
        hand.stop().await;
    }
}

/// The hand that writes most now; if none does, the one whose branch is largest.
async fn most_written(runner: &Runner) -> Option<(BranchId, Hand, CancellationToken)> {
    let hands: Vec<(BranchId, Hand, CancellationToken)> = {
        let hands = runner.inner.disk.hands();
        let hands = hands.iter().filter(|(_, writer)| !writer.starved.is_cancelled());
        hands.map(|(branch, writer)| (branch.clone(), writer.hand.clone(), writer.starved.clone())).collect()
    };
    let mut before = Vec::new();
    for (branch, hand, _) in &hands {
        before.push(taken(runner, branch, hand).await);
    }
    sleep(DISK_BLAME_TIME).await;
    let mut most = None;
    for (writer, before) in hands.into_iter().zip(before) {
        let now = taken(runner, &writer.0, &writer.1).await;
        let since = now.0.saturating_sub(before.0).max(now.1.saturating_sub(before.1));
        if most.as_ref().is_none_or(|(most, _)| *most < (since, now.0)) {
            most = Some(((since, now.0), writer));
        }
    }
    most.map(|(_, writer)| writer)
}

/// What a branch takes of the disk, and what its hand's processes have written.
async fn taken(runner: &Runner, branch: &BranchId, hand: &Hand) -> (u64, u64) {
    let used = used(runner, branch, hand).await.unwrap_or(0);
    let hand = hand.clone();
    (used, Blocking::run(move || hand.written_bytes()).await)
}
