//! A mixed workload: direct edits, commands that leave processes behind, forks and verifies, at the same time.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use testkit::GitRepo;

use crate::acks::{Ack, Acks};
use crate::random::Random;
use crate::tendon::Tendon;

/// The branches that the workload works on.
pub const BRANCHES: &[&str] = &["edited", "executed"];

/// One workload over one state directory; its counters make every path unique, over many runs too.
pub struct Workload {
    tendon: Tendon,
    repo: String,
    counter: AtomicUsize,
    seed: u64,
    /// What was acknowledged.
    pub acks: Acks,
}

impl Workload {
    /// Makes a repository at `repo` and, with a runner that must run, the two branches on it.
    pub fn new(tendon: &Tendon, repo: &Path, seed: u64) -> Self {
        let git = GitRepo::at(repo);
        testkit::tree_of_files(git.path(), 100);
        git.file("check.sh", "sleep 0.2; cat */*/* | wc -c\n").commit("base");
        let repo = repo.to_string_lossy().into_owned();
        for branch in BRANCHES {
            tendon.text(&["branch", "create", "--repo", &repo, "--name", branch]);
        }
        let acks = Acks::default();
        Self { tendon: tendon.only_with_runner(), repo, counter: AtomicUsize::new(0), seed, acks }
    }

    /// Runs until `duration` has passed or `stop` is set. Calls may fail (the runner may be dead); they may not hang.
    /// `position` is asked after each acknowledgement.
    pub fn run(&self, duration: Duration, stop: &AtomicBool, position: &(dyn Fn() -> usize + Sync)) {
        let end = Instant::now() + duration;
        let go = || Instant::now() < end && !stop.load(Ordering::Relaxed);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while go() {
                    self.edit(position)
                }
            });
            scope.spawn(|| {
                while go() {
                    self.edit(position)
                }
            });
            scope.spawn(|| {
                while go() {
                    self.exec(position)
                }
            });
            scope.spawn(|| {
                while go() {
                    self.fork(position)
                }
            });
            scope.spawn(|| {
                while go() {
                    self.verify()
                }
            });
        });
    }

    fn next(&self) -> (usize, Random) {
        let n = self.counter.fetch_add(1, Ordering::Relaxed);
        (n, Random::new(self.seed ^ (n as u64) << 20))
    }

    fn edit(&self, position: &dyn Fn() -> usize) {
        let (n, mut random) = self.next();
        let (path, content) = (format!("edits/{n}"), random_text(&mut random));
        if self.tendon.call_with(&["branch", "write", "edited", &path], content.as_bytes()).is_ok() {
            let at = position();
            self.acks.note(at, Ack::Audited { path: path.clone() });
            self.acks.note(at, Ack::File { branch: "edited".to_owned(), path, content });
        }
    }

    fn exec(&self, position: &dyn Fn() -> usize) {
        let (n, mut random) = self.next();
        let (path, content) = (format!("execs/{n}"), random.text(40));
        // Now and then a grandchild in a session of its own and a plain background process outlive the command.
        let linger = if n % 8 == 0 { "setsid sleep 300 & sleep 301 & exit 0" } else { "" };
        let script = format!("mkdir -p execs; printf %s {content} > {path}; {linger}");
        if self.tendon.call(&["branch", "exec", "executed", "--", "sh", "-c", &script]).is_ok() {
            let at = position();
            self.acks.note(at, Ack::Audited { path: path.clone() });
            self.acks.note(at, Ack::File { branch: "executed".to_owned(), path, content });
        }
    }

    fn fork(&self, position: &dyn Fn() -> usize) {
        let (n, _) = self.next();
        let name = format!("fork-{n}");
        // The second one has processes that write or linger: its fork is another way through the code.
        let parent = BRANCHES[n % 2];
        if self.tendon.call(&["branch", "fork", parent, "--name", &name]).is_err() {
            return;
        }
        // Half of them stay; the others are dropped, so that dropping is interrupted too.
        if n % 4 < 2 {
            self.acks.note(position(), Ack::Branch(name));
        } else {
            let _ = self.tendon.call(&["branch", "drop", &name]);
        }
    }

    fn verify(&self) {
        let _ = self.tendon.call(&["verify", "--repo", &self.repo, "--check", "sh check.sh"]);
    }
}

/// Short text most times, 200 KiB now and then.
fn random_text(random: &mut Random) -> String {
    if random.below(20) == 0 { random.text(4096).repeat(50) } else { random.text(64) }
}
