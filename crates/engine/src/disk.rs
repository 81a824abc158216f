//! The disk, while hands write to it: how large each branch becomes, and what the file system has left. Ends what takes too
//! much; reads nothing of a branch but sizes.

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hands::Hand;
use proto::error::{Code, Coded};
use proto::ids::BranchId;
use proto::verify::Outcome;
use tokio::time::{MissedTickBehavior, interval, sleep};
use tokio_util::sync::CancellationToken;
use vfs::DiskUse;

use crate::below::Below;
use crate::limits::{
    CANCEL_GRACE, DISK_BLAME_TIME, DISK_FREE_BYTES_MIN, DISK_FREE_INODES_MIN, DISK_WATCH_EVERY, FILES_MAX,
};
use crate::runner::{Blocking, Runner};

/// The names of limits in an outcome.
const DISK: &str = "disk";
/// See [`FILES_MAX`].
const FILES: &str = "files";
/// See [`Watched::starved`].
pub(crate) const DISK_FREE: &str = "free disk space";

/// How often in a row a branch may fail to be measured: code that moves directories about may disturb that.
const FAILURES_MAX: u32 = 3;

/// The hands that may write now.
#[derive(Default)]
pub(crate) struct Disk {
    hands: Mutex<HashMap<u64, Writer>>,
    next: AtomicU64,
}

#[derive(Clone)]
struct Writer {
    branch: BranchId,
    hand: Hand,
    starved: CancellationToken,
}

/// A hand among those that may write, for as long as it lives.
pub(crate) struct Watched {
    runner: Runner,
    id: u64,
    /// Cancelled when the file system is nearly full and this hand wrote most: its commands are to end, and then it is ended.
    pub(crate) starved: CancellationToken,
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.runner.inner.disk.hands().remove(&self.id);
    }
}

impl Disk {
    fn hands(&self) -> MutexGuard<'_, HashMap<u64, Writer>> {
        self.hands.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Watches a hand of a branch.
    pub(crate) fn watch(&self, runner: &Runner, branch: &BranchId, hand: &Hand) -> Arc<Watched> {
        let (id, starved) = (self.next.fetch_add(1, Ordering::Relaxed), CancellationToken::new());
        let writer = Writer { branch: branch.clone(), hand: hand.clone(), starved: starved.clone() };
        self.hands().insert(id, writer);
        Arc::new(Watched { runner: runner.clone(), id, starved })
    }
}

/// What a branch takes of the disk, files that only have no name any more included.
pub(crate) async fn used(runner: &Runner, branch: &BranchId, hand: &Hand) -> Result<DiskUse, Below> {
    let (branch, hand) = (branch.clone(), hand.clone());
    let measure = move |store: &vfs::Store| {
        let named = store.branch_disk_use(&branch).map_err(Below::new)?;
        Ok(DiskUse { bytes: named.bytes.saturating_add(hand.unlinked_bytes()), ..named })
    };
    runner.with_store(measure).await
}

/// How large a branch may become.
#[derive(Clone, Copy)]
pub(crate) struct End(DiskUse);

impl End {
    /// For a command that starts now, and for what it leaves running.
    pub(crate) async fn from_now(
        runner: &Runner,
        branch: &BranchId,
        hand: &Hand,
        bytes_max: u64,
    ) -> Result<Self, Below> {
        let now = used(runner, branch, hand).await?;
        let (bytes, files) = (now.bytes.saturating_add(bytes_max), now.files.saturating_add(FILES_MAX));
        Ok(Self(DiskUse { bytes, files }))
    }

    /// No end yet.
    pub(crate) const NONE: Self = Self(DiskUse { bytes: u64::MAX, files: u64::MAX });

    /// The name of the limit that this is beyond.
    pub(crate) fn exceeded(&self, used: &DiskUse) -> Option<&'static str> {
        if used.bytes > self.0.bytes {
            Some(DISK)
        } else if used.files > self.0.files {
            Some(FILES)
        } else {
            None
        }
    }
}

/// Returns the name of the limit that the branch has gone beyond. What can't be measured is taken for too large.
pub(crate) async fn outgrown(runner: &Runner, branch: &BranchId, hand: &Hand, end: End) -> &'static str {
    let mut failures = 0;
    loop {
        sleep(DISK_WATCH_EVERY).await;
        match used(runner, branch, hand).await.map(|used| end.exceeded(&used)) {
            Ok(Some(limit)) => return limit,
            Ok(None) => failures = 0,
            Err(error) => {
                failures += 1;
                tracing::warn!(%branch, error = crate::meter::chain(&error), "the size of a branch can't be measured");
                if failures >= FAILURES_MAX {
                    return DISK;
                }
            }
        }
    }
}

/// How a command ended, by what the scan after it found: one that ends between two looks may have gone beyond its limit.
pub(crate) fn last_look(outcome: Outcome, end: End, used: &DiskUse) -> Outcome {
    match (&outcome, end.exceeded(used)) {
        (Outcome::Exited { .. } | Outcome::Signalled { .. }, Some(limit)) => Outcome::exceeded(limit),
        _ => outcome,
    }
}

/// Whether a limit of an outcome is one of the disk's: the branch stays too large.
pub(crate) fn is_disk(limit: &str) -> bool {
    matches!(limit, DISK | FILES | DISK_FREE)
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
        let Some(Writer { branch, hand, starved }) = most_written(&runner).await else { continue };
        tracing::warn!(%branch, error = %full, "a hand is ended");
        starved.cancel();
        // Its commands have a moment to end and tell why.
        sleep(CANCEL_GRACE).await;
        hand.stop().await;
    }
}

/// The hand that writes most now; if none does, the one whose branch is largest.
async fn most_written(runner: &Runner) -> Option<Writer> {
    let hands: Vec<Writer> = {
        let hands = runner.inner.disk.hands();
        hands.values().filter(|writer| !writer.starved.is_cancelled()).cloned().collect()
    };
    let mut before = Vec::new();
    for writer in &hands {
        before.push(taken(runner, writer).await);
    }
    sleep(DISK_BLAME_TIME).await;
    let mut most = None;
    for (writer, before) in hands.into_iter().zip(before) {
        let now = taken(runner, &writer).await;
        let since = now.0.saturating_sub(before.0).max(now.1.saturating_sub(before.1));
        if most.as_ref().is_none_or(|(most, _)| *most < (since, now.0)) {
            most = Some(((since, now.0), writer));
        }
    }
    most.map(|(_, writer)| writer)
}

/// What a branch takes of the disk, and what its hand's processes have written.
async fn taken(runner: &Runner, writer: &Writer) -> (u64, u64) {
    let used = used(runner, &writer.branch, &writer.hand).await.map_or(0, |used| used.bytes);
    let hand = writer.hand.clone();
    (used, Blocking::run(move || hand.written_bytes()).await)
}
