//! What a running store holds of its branches besides the database: their mounts, their engines, what is still to be
//! removed, and which branches no scan has looked at since an unclean stop.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use proto::ids::BranchId;

use crate::engine::{Engine, Engines, Mounted, Released, Root};
use crate::store::Store;

/// How long a fork or drop waits for those who still have the branch mounted.
const RELEASE_MAX: Duration = Duration::from_secs(2);
/// When it is tried again to flatten a chain that could not be.
const FLATTEN_AGAIN_AFTER: Duration = Duration::from_secs(600);
/// Removals that wait; who drops more branches at once waits with them.
const REMOVALS_MAX: usize = 1_024;

/// See the module.
#[derive(Default)]
pub(crate) struct Live {
    mounts: Mutex<HashMap<BranchId, Cached>>,
    /// Branches whose mount somebody outside got, who may have written through it.
    handed_out: Mutex<HashSet<BranchId>>,
    released: Arc<Released>,
    engines: OnceLock<Engines>,
    /// Branches that nobody scanned since the runner was killed.
    pub(crate) unscanned: Mutex<HashSet<BranchId>>,
    pub(crate) report: OnceLock<crate::recover::RecoveryReport>,
    /// Branches whose chain could not be flattened, and when that was tried.
    unflattened: Mutex<HashMap<BranchId, Instant>>,
    reaper: Reaper,
    #[cfg(test)]
    pub(crate) faults: Faults,
}

struct Cached {
    mounted: Arc<Mounted>,
    used: Instant,
}

impl Live {
    fn mounts(&self) -> MutexGuard<'_, HashMap<BranchId, Cached>> {
        self.mounts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn unscanned(&self) -> MutexGuard<'_, HashSet<BranchId>> {
        self.unscanned.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The branch's mount, if it has one. `hand_out`: it leaves this crate.
    pub(crate) fn cached(&self, branch: &BranchId, hand_out: bool) -> Option<Root> {
        let mut mounts = self.mounts();
        let cached = mounts.get_mut(branch)?;
        cached.used = Instant::now();
        let root = Root(Arc::clone(&cached.mounted));
        if hand_out {
            self.handed_out().insert(branch.clone());
        }
        Some(root)
    }

    pub(crate) fn handed_out(&self) -> MutexGuard<'_, HashSet<BranchId>> {
        self.handed_out.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Remembers a new mount.
    pub(crate) fn remember(&self, branch: &BranchId, root: &Root) {
        let cached = Cached { mounted: Arc::clone(&root.0), used: Instant::now() };
        self.mounts().insert(branch.clone(), cached);
    }

    fn unflattened(&self) -> MutexGuard<'_, HashMap<BranchId, Instant>> {
        self.unflattened.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it is time to try and flatten the branch's chain.
    pub(crate) fn may_flatten(&self, branch: &BranchId) -> bool {
        self.unflattened().get(branch).is_none_or(|tried| tried.elapsed() > FLATTEN_AGAIN_AFTER)
    }

    /// That was tried and failed.
    pub(crate) fn not_flattened(&self, branch: &BranchId) {
        self.unflattened().insert(branch.clone(), Instant::now());
    }

    /// Whether somebody may have written to the branch other than by recorded edits.
    pub(crate) fn may_be_written(&self, branch: &BranchId) -> bool {
        self.handed_out().contains(branch)
    }

    /// All that was written to the branch is recorded, and nobody has it mounted.
    pub(crate) fn not_written(&self, branch: &BranchId) {
        self.handed_out().remove(branch);
    }

    /// Ends the branch's mount and waits for all who use it. `false`: somebody goes on using it.
    pub(crate) fn release(&self, branch: &BranchId) -> bool {
        let Some(cached) = self.mounts().remove(branch) else { return true };
        let Cached { mounted, used } = cached;
        let ended = mounted.ended();
        let weak = Arc::downgrade(&mounted);
        drop(mounted);
        if self.released.wait_until(RELEASE_MAX, || ended.load(Ordering::Acquire)) {
            return true;
        }
        if let Some(mounted) = weak.upgrade() {
            self.mounts().entry(branch.clone()).or_insert(Cached { mounted, used });
            return false;
        }
        // It ends now, or has.
        self.released.wait_until(RELEASE_MAX, || ended.load(Ordering::Acquire))
    }

    /// Whether the branch is mounted.
    pub(crate) fn is_mounted(&self, branch: &BranchId) -> bool {
        self.mounts().contains_key(branch)
    }

    /// Removes a directory that has already left its place, in the background.
    pub(crate) fn remove_later(&self, dir: PathBuf) {
        self.reaper.send(Removal::Dir(dir));
    }

    /// Waits until everything that was to be removed is.
    #[cfg(test)]
    pub(crate) fn removed(&self) {
        let (sender, receiver) = sync_channel(1);
        self.reaper.send(Removal::Tell(sender));
        receiver.recv().unwrap();
    }

    /// A point at which a test may kill the runner.
    pub(crate) fn step(&self, name: &'static str) {
        #[cfg(test)]
        self.faults.step(name);
        #[cfg(not(test))]
        let _ = name;
    }

    /// Whether a test killed the runner.
    pub(crate) fn is_killed(&self) -> bool {
        #[cfg(test)]
        return self.faults.is_killed();
        #[cfg(not(test))]
        false
    }
}

impl Store {
    /// The lock of a branch: who holds it may change the branch's files and what is recorded of them.
    pub(crate) fn branch_lock(&self, branch: &BranchId) -> Arc<Mutex<()>> {
        self.inner.capture.lock(branch)
    }

    /// The engines, tried at the first use.
    pub(crate) fn engines(&self) -> &Engines {
        let inner = &*self.inner;
        inner.live.engines.get_or_init(|| {
            let (tmp, mounts) = (inner.layout.tmp(), inner.layout.mounts());
            Engines::probe(inner.options.engine, inner.options.owner, &tmp, &mounts, &inner.live.released)
        })
    }

    pub(crate) fn engine(&self, word: &str) -> &dyn Engine {
        self.engines().of(word)
    }

    /// Why overlays can't be mounted on this host; `None` if they can.
    pub fn no_overlay(&self) -> Option<&str> {
        self.engines().no_overlay()
    }

    /// Ends the mounts that nobody has used for `idle`. Returns how many. To be called now and then.
    pub fn unmount_idle(&self, idle: Duration) -> usize {
        let mut ended = Vec::new();
        self.inner.live.mounts().retain(|_, cached| {
            let keep = Arc::strong_count(&cached.mounted) > 1 || cached.used.elapsed() < idle;
            if !keep {
                ended.push(Arc::clone(&cached.mounted));
            }
            keep
        });
        // Here, not under the lock: the end of a mount writes out what it has dirty.
        ended.len()
    }
}

enum Removal {
    Dir(PathBuf),
    #[cfg(test)]
    Tell(SyncSender<()>),
}

/// A thread that removes directories, started when there is one to remove.
#[derive(Default)]
struct Reaper(Mutex<Option<(SyncSender<Removal>, JoinHandle<()>)>>);

impl Reaper {
    fn send(&self, removal: Removal) {
        let mut running = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if running.is_none() {
            let (sender, receiver) = sync_channel(REMOVALS_MAX);
            let work = move || receiver.iter().for_each(remove);
            match std::thread::Builder::new().name("reaper".into()).spawn(work) {
                Ok(thread) => *running = Some((sender, thread)),
                Err(_) => return remove(removal),
            }
        }
        if let Some((sender, _)) = &*running {
            // It ends only when the sender does.
            let _ = sender.send(removal);
        }
    }
}

impl Drop for Reaper {
    fn drop(&mut self) {
        if let Some((sender, thread)) = self.0.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            drop(sender);
            let _ = thread.join();
        }
    }
}

fn remove(removal: Removal) {
    match removal {
        Removal::Dir(dir) => {
            if let Err(error) = crate::base::remove_tree(&dir) {
                tracing::warn!(dir = %dir.display(), %error, "a dropped directory could not be removed");
            }
        }
        #[cfg(test)]
        Removal::Tell(sender) => sender.send(()).unwrap(),
    }
}

/// Kills the runner of a test at a chosen step: by unwinding, so that no error is handled and nothing cleaned up.
#[cfg(test)]
pub(crate) struct Faults(Mutex<FaultState>);

#[cfg(test)]
thread_local! {
    /// After how many steps the next runner of this thread is killed, counted from its start.
    pub(crate) static KILL_NEXT: std::cell::Cell<Option<usize>> = const { std::cell::Cell::new(None) };
}

#[cfg(test)]
impl Default for Faults {
    fn default() -> Self {
        Self(Mutex::new(FaultState { left: KILL_NEXT.take(), killed: None }))
    }
}

#[cfg(test)]
struct FaultState {
    /// Steps that are still to pass.
    left: Option<usize>,
    killed: Option<&'static str>,
}

#[cfg(test)]
impl Faults {
    /// Lets `steps` steps pass and kills at the next.
    pub(crate) fn kill_after(&self, steps: Option<usize>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).left = steps;
    }

    fn step(&self, name: &'static str) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut state.left {
            None => return,
            Some(0) => {}
            Some(left) => {
                *left -= 1;
                return;
            }
        }
        state.killed = Some(name);
        drop(state);
        std::panic::resume_unwind(Box::new(name));
    }

    /// The step at which the runner was killed.
    pub(crate) fn killed(&self) -> Option<&'static str> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).killed
    }

    /// Marks it killed without a step.
    pub(crate) fn kill(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).killed.get_or_insert("kill");
    }

    fn is_killed(&self) -> bool {
        self.killed().is_some()
    }
}
