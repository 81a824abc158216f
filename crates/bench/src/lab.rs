//! The runner's parts as the figures use them: a store and hands in this process, called without async.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hands::{ExecEvent, ExecSpec, Hand, HandSpec, Hands, HandsOptions, Stdin};
use proto::ids::{BaseId, BranchId, ExecId};
use proto::verify::LimitsAsked;
use vfs::{Actor, EngineChoice, GitSource, Store, StoreOptions, SystemClock};

use crate::error::{BenchError, Context, Result};
use crate::progress::say;
use crate::run;

/// Who bases, branches and hands belong to when the benchmark is root's, as the runner's default is.
pub(crate) const HAND_UID: u32 = 60_600;
/// The most that a measured command may take.
const WALL_MAX: Duration = Duration::from_secs(900);
/// How much of a failed command's output is shown.
const TAIL_BYTES: usize = 600;

/// What every process that holds a store or hands does first, before it has threads.
pub(crate) fn prepare_process() -> Result<()> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    sys::ns::enter_private().context(|| "can't make a private mount namespace".into())?;
    // Thousands of branches are held mounted, each by a descriptor.
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
        .context(|| "can't raise the limit of files".into())
}

/// Whether this is root: then hands and branches belong to [`HAND_UID`].
pub(crate) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Opens a store on overlayfs at `dir`.
pub(crate) fn open_store(dir: &Path) -> Result<Store> {
    let owner = is_root().then_some((HAND_UID, HAND_UID));
    let options = StoreOptions { engine: EngineChoice::Overlay, owner, clock: Arc::new(SystemClock) };
    Store::open(dir, options).context(|| format!("can't open a store at {}", dir.display()))
}

/// Who the audit names.
pub(crate) fn actor() -> Actor {
    Actor::cli(0)
}

/// Freezes `main` of a repository.
pub(crate) fn freeze_repository(store: &Store, repository: &Path) -> Result<BaseId> {
    say(format!("freezing {}", repository.display()));
    let source = GitSource { repo: repository.as_os_str().to_owned(), rev: "main".into() };
    let base =
        store.freeze_git(&source, &|_| ()).context(|| format!("can't freeze {}", repository.display()))?;
    Ok(base.id)
}

/// A store and what boots hands over its branches.
pub(crate) struct Lab {
    runtime: tokio::runtime::Runtime,
    pub(crate) store: Store,
    hands: Hands,
    execs: AtomicU64,
}

/// How a command in a hand went.
pub(crate) struct Done {
    /// From asking for it to hearing that it ended.
    pub(crate) wall: Duration,
    pub(crate) cpu: Duration,
}

impl Lab {
    /// Opens it with its state at `dir`.
    pub(crate) fn open(dir: &Path) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .build()
            .context(|| "can't start the runtime".into())?;
        let store = open_store(dir)?;
        let env = run::environment();
        let home = env.get("HOME").map(PathBuf::from);
        let options = HandsOptions { home, env, ..HandsOptions::new(crate::binary("hand")?, dir) };
        let hands = runtime.block_on(Hands::new(options)).context(|| "no hands on this host".into())?;
        Ok(Self { runtime, store, hands, execs: AtomicU64::new(0) })
    }

    /// Makes a branch of `base` and boots a hand over it.
    pub(crate) fn branch_with_hand(&self, base: &BaseId) -> Result<(BranchId, Hand)> {
        let branch =
            self.store.create_branch(base, None, &actor()).context(|| "can't make a branch".into())?;
        let root = self.store.mount(&branch.id).context(|| "can't mount a branch".into())?;
        Ok((branch.id, self.boot(&root)?))
    }

    /// Boots a hand over a branch's root.
    pub(crate) fn boot(&self, root: &vfs::Root) -> Result<Hand> {
        // The defaults: all of the host's CPUs, and limits that the measured work does not reach.
        let grant = policy::grant(&LimitsAsked::default(), &policy::Config::default(), &self.hands.caps())
            .context(|| "policy refuses a hand".into())?;
        let root = root.mount_clone().context(|| "can't clone a branch's mount".into())?;
        let spec = HandSpec { root, grant, env: Vec::new() };
        self.runtime.block_on(self.hands.boot(spec)).context(|| "a hand does not boot".into())
    }

    /// Ends a hand.
    pub(crate) fn stop(&self, hand: &Hand) {
        self.runtime.block_on(hand.stop());
    }

    /// Runs a command to its end; one that fails is an error.
    pub(crate) fn exec(&self, hand: &Hand, argv: &[&str]) -> Result<Done> {
        let spec = ExecSpec {
            argv: argv.iter().map(|arg| arg.as_bytes().to_vec()).collect(),
            cwd: None,
            env: Vec::new(),
            stdin: Stdin::Null,
            pty: None,
            wall_ms_max: u64::try_from(WALL_MAX.as_millis()).ok(),
        };
        self.runtime.block_on(exec(hand, self.exec_id(), spec)).and_then(|(done, passed, tail)| {
            if passed {
                return Ok(done);
            }
            Err(BenchError::new(format!(
                "{argv:?} failed in the hand: {}",
                String::from_utf8_lossy(&tail).trim()
            )))
        })
    }
}

impl Lab {
    /// An id that no exec of this process has.
    fn exec_id(&self) -> ExecId {
        let mut bytes = [0; 10];
        bytes[2..].copy_from_slice(&self.execs.fetch_add(1, Ordering::Relaxed).to_be_bytes());
        ExecId::from_random(bytes)
    }
}

async fn exec(hand: &Hand, id: ExecId, spec: ExecSpec) -> Result<(Done, bool, Vec<u8>)> {
    let start = Instant::now();
    let mut exec = hand.exec(id.clone(), spec).await.context(|| "the hand takes no command".into())?;
    let mut tail = Vec::new();
    loop {
        match exec.next_event().await {
            Some(ExecEvent::Output { bytes, .. }) => {
                tail.extend_from_slice(&bytes);
                tail.drain(..tail.len().saturating_sub(TAIL_BYTES));
            }
            Some(ExecEvent::Ended { outcome, cpu_ms, .. }) => {
                let done = Done { wall: start.elapsed(), cpu: Duration::from_millis(cpu_ms) };
                if !outcome.passed() {
                    tail.extend_from_slice(format!(" [{outcome:?}]").as_bytes());
                }
                return Ok((done, outcome.passed(), tail));
            }
            None => return Err(BenchError::new("the hand went away")),
        }
    }
}
