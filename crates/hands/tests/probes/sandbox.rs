//! The sandbox tier: a real branch of a real store, in a real hand.

use std::sync::Arc;

use hands::{ExecEvent, ExecSpec, Hand, HandSpec, Hands, HandsOptions, Size as TerminalSize};
use policy::{Config, HandConfig};
use proto::ids::{BaseId, ExecId};
use proto::verify::{InlineFile, LimitsAsked};
use tokio::runtime::Runtime;
use vfs::{Actor, EngineChoice, Root, Store, StoreOptions, SystemClock};

use crate::host::Host;
use crate::probe::{Machine, Program, Ran, SMALL_MEMORY_BYTES_MAX, SMALL_PIDS_MAX, Size, Tier, append};

/// Boots hands of the sandbox tier.
pub struct Sandbox {
    runtime: Arc<Runtime>,
    hands: Hands,
    store: Store,
    base: BaseId,
}

impl Sandbox {
    /// Over a store in the host's state directory.
    pub fn new(host: &Host) -> Sandbox {
        let runtime = Arc::new(Runtime::new().expect("a runtime"));
        let owner = HandConfig::default();
        let owner = testkit::user::is_root().then_some((owner.uid, owner.gid));
        let options = StoreOptions { engine: EngineChoice::Auto, owner, clock: Arc::new(SystemClock) };
        // Beside the planted secrets: a store is not made in a directory that holds something else.
        let store = Store::open(&host.state().join("store"), options).expect("a store");
        let base = store.freeze_files(&[base_file()]).expect("a base").id;
        let hands = HandsOptions::new(testkit::binary("hand"), host.state());
        let hands = runtime.block_on(Hands::new(hands)).expect("hands");
        Sandbox { runtime, hands, store, base }
    }
}

fn base_file() -> InlineFile {
    let file = serde_json::json!({ "path": "base.txt", "content": "base\n" });
    serde_json::from_value(file).expect("an inline file")
}

impl Tier for Sandbox {
    fn boot(&self, size: Size) -> Box<dyn Machine> {
        let branch = self.store.create_branch(&self.base, None, &Actor::cli(0)).expect("a branch").id;
        let root = self.store.mount(&branch).expect("a mount");
        let asked = match size {
            Size::Usual => {
                LimitsAsked { pids_max: Some(512), memory_bytes_max: Some(1 << 30), ..LimitsAsked::default() }
            }
            Size::Small => LimitsAsked {
                pids_max: Some(SMALL_PIDS_MAX),
                memory_bytes_max: Some(SMALL_MEMORY_BYTES_MAX),
                ..LimitsAsked::default()
            },
        };
        let grant = policy::grant(&asked, &Config::default(), &self.hands.caps()).expect("a grant");
        let spec = HandSpec { root: root.mount_clone().expect("a clone"), grant, env: Vec::new() };
        let hand = self.runtime.block_on(self.hands.boot(spec)).expect("a hand");
        Box::new(InSandbox { runtime: Arc::clone(&self.runtime), hand: Some(hand), _root: root })
    }
}

struct InSandbox {
    runtime: Arc<Runtime>,
    hand: Option<Hand>,
    _root: Root,
}

impl Machine for InSandbox {
    fn run(&self, program: &Program) -> Ran {
        self.runtime.block_on(self.exec(program))
    }
}

impl InSandbox {
    async fn exec(&self, program: &Program) -> Ran {
        let hand = self.hand.as_ref().expect("a hand until it is dropped");
        let spec = ExecSpec {
            argv: program.argv.iter().map(|part| part.clone().into_bytes()).collect(),
            env: program.env.clone(),
            pty: program.terminal.then_some(TerminalSize { rows: 24, cols: 80 }),
            wall_ms_max: Some(program.wall_ms_max),
            ..ExecSpec::default()
        };
        let mut random = [0; 10];
        getrandom::fill(&mut random).expect("random bytes");
        let mut exec = match hand.exec(ExecId::from_random(random), spec).await {
            Ok(exec) => exec,
            Err(error) => panic!("the hand does not answer: {error}: {:?}", hand.lost()),
        };
        let mut output = Vec::new();
        while let Some(event) = exec.next_event().await {
            match event {
                ExecEvent::Output { bytes, .. } => append(&mut output, &bytes),
                ExecEvent::Ended { outcome, .. } => {
                    return Ran { outcome, output: String::from_utf8_lossy(&output).replace("\r\n", "\n") };
                }
            }
        }
        panic!("an exec ended without a word: {:?}", hand.lost());
    }
}

impl Drop for InSandbox {
    fn drop(&mut self) {
        if let Some(hand) = self.hand.take() {
            self.runtime.block_on(hand.stop());
        }
    }
}

/// Whether hands of this tier can be booted here. As root: a test process has threads, so that it can't enter a private
/// namespace.
pub fn possible() -> bool {
    use testkit::Need::{Bwrap, Cgroup, Python, Root};
    testkit::have_all(&[Root, Bwrap, Cgroup, Python])
}
