//! Real hands on plain directories, for tests.

#![allow(dead_code, clippy::unwrap_used, reason = "each test file uses a part of it; it is for tests")]

use std::os::fd::OwnedFd;
use std::os::unix::fs::chown;
use std::path::Path;

use hands::{Exec, ExecEvent, ExecSpec, Hand, HandSpec, Hands, HandsOptions};
use policy::{Config, Grant};
use proto::ids::ExecId;
use proto::verify::{LimitsAsked, Outcome};
use rustix::mount::{OpenTreeFlags, open_tree};
use tempfile::TempDir;
use testkit::{Need, have_all};

/// Whether hands can be booted here. As root: a test process has threads, so that it can't enter a private namespace.
pub fn possible() -> bool {
    have_all(&[Need::Root, Need::Bwrap])
}

/// A branch's directory and what makes hands for it.
pub struct Kit {
    pub hands: Hands,
    pub state: TempDir,
    pub branch: TempDir,
}

/// How a command ended and what it wrote.
#[derive(Debug)]
pub struct Ran {
    pub outcome: Outcome,
    pub stdout: String,
    pub stderr: String,
    pub cpu_ms: u64,
}

impl Kit {
    pub async fn new() -> Kit {
        Kit::with(|_| {}).await
    }

    pub async fn with(change: impl FnOnce(&mut HandsOptions)) -> Kit {
        let state = testkit::temp_dir("state");
        let branch = testkit::temp_dir("branch");
        if rustix::process::geteuid().is_root() {
            chown(branch.path(), Some(60600), Some(60600)).unwrap();
        }
        let mut options = HandsOptions::new(testkit::binary("hand"), state.path());
        change(&mut options);
        Kit { hands: Hands::new(options).await.unwrap(), state, branch }
    }

    pub fn grant(&self, asked: &LimitsAsked) -> Grant {
        policy::grant(asked, &Config::default(), &self.hands.caps()).unwrap()
    }

    pub async fn boot(&self) -> Hand {
        self.boot_with(&LimitsAsked::default()).await
    }

    pub async fn boot_with(&self, asked: &LimitsAsked) -> Hand {
        self.hands.boot(self.spec(asked)).await.unwrap()
    }

    pub fn spec(&self, asked: &LimitsAsked) -> HandSpec {
        HandSpec { root: mount(self.branch.path()), grant: self.grant(asked), env: Vec::new() }
    }
}

/// A clone of a directory, as a branch's root comes.
pub fn mount(dir: &Path) -> OwnedFd {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    open_tree(rustix::fs::CWD, dir, flags).unwrap()
}

pub fn id() -> ExecId {
    let mut random = [0u8; 10];
    getrandom::fill(&mut random).unwrap();
    ExecId::from_random(random)
}

/// Runs a command to its end.
pub async fn run(hand: &Hand, argv: &[&str]) -> Ran {
    run_for(hand, argv, 120_000).await
}

pub async fn run_for(hand: &Hand, argv: &[&str], wall_ms_max: u64) -> Ran {
    let argv = argv.iter().map(|arg| arg.as_bytes().to_vec()).collect();
    let spec = ExecSpec { argv, wall_ms_max: Some(wall_ms_max), ..ExecSpec::default() };
    finish(hand.exec(id(), spec).await.unwrap()).await
}

pub async fn sh(hand: &Hand, script: &str) -> Ran {
    run(hand, &["/bin/sh", "-c", script]).await
}

pub async fn finish(mut exec: Exec) -> Ran {
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    while let Some(event) = exec.next_event().await {
        match event {
            ExecEvent::Output { fd: 1, bytes } => stdout.extend_from_slice(&bytes),
            ExecEvent::Output { bytes, .. } => stderr.extend_from_slice(&bytes),
            ExecEvent::Ended { outcome, cpu_ms, .. } => {
                let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
                return Ran { outcome, stdout: text(stdout), stderr: text(stderr), cpu_ms };
            }
        }
    }
    panic!("the exec ended without a word");
}

impl Ran {
    /// Standard output, if it passed.
    #[track_caller]
    pub fn ok(self) -> String {
        assert!(self.outcome.passed(), "{self:?}");
        self.stdout
    }
}
