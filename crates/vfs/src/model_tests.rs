//! Random operations on a store against a model that is a map, with kills between any two steps.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use proto::ids::BranchId;
use testkit::process::variable;

use crate::edit::EditError;
use crate::engine::tests::{Fixture, me, on_all, open, path};
use crate::entries::Kind;
use crate::world::{Shown, shown};
use crate::{AuditFilter, EngineChoice, ForkBusy};

/// Every path that the operations use; parents before children.
const PATHS: &[&str] = &["a", "b", "d", "d/a", "d/b", "d/e", "d/e/a", "x", "x/y", "x/y/z"];
const BASE: &[(&str, &str)] = &[("a", "base"), ("d/a", "base"), ("d/e/a", "base")];
/// Unless `MODEL_CASES` says another number.
const CASES: u32 = 12;

#[derive(Clone, Debug, PartialEq, Eq)]
enum Node {
    Dir(u32),
    File(u32, String),
    Symlink(String),
}

type Tree = BTreeMap<String, Node>;

#[derive(Clone, Debug)]
enum FileOp {
    Write(usize, u8),
    Mkdir(usize),
    Remove(usize),
    Rename(usize, usize),
    Symlink(usize, u8),
    Chmod(usize, bool),
}

#[derive(Clone, Debug)]
enum Op {
    /// By a process that has the branch mounted: found by the next scan.
    Raw(usize, FileOp),
    Edit(usize, FileOp),
    Create,
    Fork(usize, bool),
    Scan(usize),
    Drop(usize),
    At(usize),
    Flatten,
    Idle,
    Reopen,
    /// The same, killed after so many steps.
    Kill(Box<Op>, usize),
}

fn file_op() -> impl Strategy<Value = FileOp> {
    let path = 0..PATHS.len();
    prop_oneof![
        4 => (path.clone(), any::<u8>()).prop_map(|(p, n)| FileOp::Write(p, n)),
        2 => path.clone().prop_map(FileOp::Mkdir),
        3 => path.clone().prop_map(FileOp::Remove),
        3 => (path.clone(), path.clone()).prop_map(|(a, b)| FileOp::Rename(a, b)),
        1 => (path.clone(), any::<u8>()).prop_map(|(p, n)| FileOp::Symlink(p, n)),
        1 => (path, any::<bool>()).prop_map(|(p, x)| FileOp::Chmod(p, x)),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    let branch = || 0_usize..6;
    let one = prop_oneof![
        8 => (branch(), file_op()).prop_map(|(b, op)| Op::Raw(b, op)),
        6 => (branch(), file_op()).prop_map(|(b, op)| Op::Edit(b, op)),
        1 => Just(Op::Create),
        4 => (branch(), any::<bool>()).prop_map(|(b, frozen)| Op::Fork(b, frozen)),
        3 => branch().prop_map(Op::Scan),
        1 => branch().prop_map(Op::Drop),
        1 => branch().prop_map(Op::At),
        1 => Just(Op::Flatten),
        1 => Just(Op::Idle),
        1 => Just(Op::Reopen),
    ];
    let one = one.boxed();
    prop_oneof![
        6 => one.clone(),
        1 => (one, 0_usize..7).prop_map(|(op, steps)| Op::Kill(Box::new(op), steps)),
    ]
}

fn below<'a>(tree: &'a Tree, dir: &'a str) -> impl Iterator<Item = String> + 'a {
    let prefix = format!("{dir}/");
    tree.keys().filter(move |at| at.starts_with(&prefix)).cloned()
}

fn has_parent(tree: &Tree, at: &str) -> bool {
    at.rsplit_once('/').is_none_or(|(dir, _)| matches!(tree.get(dir), Some(Node::Dir(_))))
}

/// What the operation makes of the tree; `None`: it does not apply there.
fn apply(tree: &Tree, op: &FileOp) -> Option<Tree> {
    let mut out = tree.clone();
    let free = |at: usize| has_parent(tree, PATHS[at]) && !tree.contains_key(PATHS[at]);
    match *op {
        FileOp::Write(at, n) => {
            let mode = match tree.get(PATHS[at]) {
                None if free(at) => 0o644,
                Some(Node::File(mode, _)) => *mode,
                Some(Node::Dir(_) | Node::Symlink(_)) | None => return None,
            };
            out.insert(PATHS[at].into(), Node::File(mode, content(n)));
        }
        FileOp::Mkdir(at) if free(at) => drop(out.insert(PATHS[at].into(), Node::Dir(0o755))),
        FileOp::Symlink(at, n) if free(at) => {
            out.insert(PATHS[at].into(), Node::Symlink(content(n)));
        }
        FileOp::Remove(at) => {
            out.remove(PATHS[at])?;
            below(tree, PATHS[at]).for_each(|at| drop(out.remove(&at)));
        }
        FileOp::Rename(from, to) => {
            if !free(to) || PATHS[to].starts_with(&format!("{}/", PATHS[from])) {
                return None;
            }
            let node = out.remove(PATHS[from])?;
            out.insert(PATHS[to].into(), node);
            for at in below(tree, PATHS[from]) {
                let new = format!("{}{}", PATHS[to], &at[PATHS[from].len()..]);
                let node = out.remove(&at)?;
                out.insert(new, node);
            }
        }
        FileOp::Chmod(at, closed) => match out.get_mut(PATHS[at])? {
            Node::Dir(mode) => *mode = if closed { 0o700 } else { 0o755 },
            Node::File(mode, _) => *mode = if closed { 0o600 } else { 0o755 },
            Node::Symlink(_) => return None,
        },
        FileOp::Mkdir(_) | FileOp::Symlink(..) => return None,
    }
    Some(out)
}

fn content(n: u8) -> String {
    format!("content {n} {}", "x".repeat(usize::from(n)))
}

fn as_tree(shown: &Shown) -> Tree {
    let node = |(kind, mode, bytes): &(Kind, u32, Vec<u8>)| {
        let text = || String::from_utf8(bytes.clone()).unwrap();
        match kind {
            Kind::Dir => Node::Dir(*mode),
            Kind::File => Node::File(*mode, text()),
            Kind::Symlink => Node::Symlink(text()),
            Kind::Other | Kind::Whiteout => panic!("nothing makes such files"),
        }
    };
    shown.iter().map(|(path, shown)| (path.to_string(), node(shown))).collect()
}

struct Model {
    fixture: Fixture,
    engine: EngineChoice,
    base: Tree,
    branches: BTreeMap<BranchId, Tree>,
    /// States that scans recorded: branch, sequence number, tree.
    past: Vec<(BranchId, u64, Tree)>,
    kills: BTreeMap<&'static str, u32>,
}

impl Model {
    fn new(engine: EngineChoice) -> Self {
        let fixture = Fixture::new(engine, BASE);
        let first = fixture.create().id;
        let base = as_tree(&shown(&fixture.at(&first).join("")));
        let branches = BTreeMap::from([(first, base.clone())]);
        Self { fixture, engine, base, branches, past: Vec::new(), kills: BTreeMap::new() }
    }

    /// By age: ids are random.
    fn pick(&self, n: usize) -> Option<BranchId> {
        let mut all: Vec<_> = self.branches.keys().collect();
        let first = |id: &BranchId| {
            let filter = AuditFilter { branch: Some(id.clone()), limit: Some(1), ..AuditFilter::default() };
            self.fixture.store().audit_log(&filter).unwrap()[0].seq
        };
        all.sort_by_key(|id| first(id));
        all.get(n.checked_rem(all.len())?).map(|id| (*id).clone())
    }

    fn seen(&self, branch: &BranchId) -> Tree {
        as_tree(&shown(&self.fixture.at(branch).join("")))
    }

    fn run(&mut self, op: &Op) {
        match op {
            Op::Raw(n, op) => self.raw(*n, op),
            Op::Edit(n, op) => self.edit(*n, op),
            Op::Create => {
                let branch = self.fixture.create().id;
                self.branches.insert(branch, self.base.clone());
            }
            Op::Fork(n, frozen) => {
                let Some(parent) = self.pick(*n) else { return };
                let writer = me();
                let busy = if *frozen { ForkBusy::Frozen(&writer) } else { ForkBusy::Quiet };
                let child = self.fixture.fork(&parent, busy).id;
                self.branches.insert(child, self.branches[&parent].clone());
            }
            Op::Scan(n) => {
                let Some(branch) = self.pick(*n) else { return };
                self.fixture.at(&branch);
                self.fixture.scan(&branch);
                let seq = self.fixture.store().branch(&branch).unwrap().audit_seq;
                self.past.push((branch.clone(), seq, self.branches[&branch].clone()));
            }
            Op::Drop(n) => {
                let Some(branch) = self.pick(*n) else { return };
                self.fixture.store().drop_branch(&branch, &me()).unwrap();
                self.branches.remove(&branch);
            }
            Op::At(n) => {
                let Some(at) = n.checked_rem(self.past.len()) else { return };
                let (branch, seq, tree) = self.past[at].clone();
                let made = self.fixture.store().branch_at(&branch, seq, None, &me()).unwrap().0;
                self.branches.insert(made.id, tree);
            }
            Op::Flatten => {
                self.fixture.store().unmount_idle(std::time::Duration::ZERO);
                for branch in self.branches.keys() {
                    let lock = self.fixture.store().branch_lock(branch);
                    let _held = lock.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                    self.fixture.store().flatten_locked(branch, 1).unwrap();
                }
            }
            Op::Idle => drop(self.fixture.store().unmount_idle(std::time::Duration::ZERO)),
            Op::Reopen => self.fixture.reopen(),
            Op::Kill(op, steps) => self.kill(op, *steps),
        }
    }

    fn raw(&mut self, n: usize, op: &FileOp) {
        let Some(branch) = self.pick(n) else { return };
        let Some(after) = apply(&self.branches[&branch], op) else { return };
        let at = self.fixture.at(&branch);
        let done = match *op {
            FileOp::Write(p, n) => std::fs::write(at.join(PATHS[p]), content(n)),
            FileOp::Mkdir(p) => std::fs::create_dir(at.join(PATHS[p])),
            FileOp::Symlink(p, n) => std::os::unix::fs::symlink(content(n), at.join(PATHS[p])),
            FileOp::Rename(from, to) => std::fs::rename(at.join(PATHS[from]), at.join(PATHS[to])),
            FileOp::Remove(p) if at.join(PATHS[p]).symlink_metadata().unwrap().is_dir() => {
                std::fs::remove_dir_all(at.join(PATHS[p]))
            }
            FileOp::Remove(p) => std::fs::remove_file(at.join(PATHS[p])),
            FileOp::Chmod(p, _) => {
                let (Node::Dir(mode) | Node::File(mode, _)) = after[PATHS[p]] else { return };
                std::fs::set_permissions(
                    at.join(PATHS[p]),
                    std::os::unix::fs::PermissionsExt::from_mode(mode),
                )
            }
        };
        match done {
            Ok(()) => drop(self.branches.insert(branch, after)),
            // Directories of lower layers, without root's rights.
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::CrossesDevices, "{op:?}"),
        }
    }

    fn edit(&mut self, n: usize, op: &FileOp) {
        let Some(branch) = self.pick(n) else { return };
        let Some(after) = apply(&self.branches[&branch], op) else { return };
        let editor = self.fixture.store().edit(&branch, &me()).unwrap();
        let at = |p: usize| path(PATHS[p]);
        let done: Result<(), EditError> = match *op {
            FileOp::Write(p, n) => editor.write(&at(p), content(n).as_bytes(), None),
            FileOp::Mkdir(p) => editor.mkdir(&at(p)),
            FileOp::Symlink(p, n) => editor.symlink(&at(p), content(n).as_bytes()),
            FileOp::Rename(from, to) => editor.rename(&at(from), &at(to)),
            FileOp::Remove(p) => editor.remove(&at(p)),
            FileOp::Chmod(p, _) => {
                let (Node::Dir(mode) | Node::File(mode, _)) = after[PATHS[p]] else { return };
                editor.chmod(&at(p), mode)
            }
        };
        done.unwrap_or_else(|error| panic!("{op:?}: {error:?}"));
        self.branches.insert(branch, after);
    }

    /// Runs `op`, killed after some steps; then opens the store again and sees what is there.
    fn kill(&mut self, op: &Op, steps: usize) {
        let before = self.branches.clone();
        let past = self.past.len();
        self.fixture.store().inner.live.faults.kill_after(Some(steps));
        let done = catch_unwind(AssertUnwindSafe(|| self.run(op)));
        let Some(step) = self.fixture.store().inner.live.faults.killed() else {
            self.fixture.store().inner.live.faults.kill_after(None);
            if let Err(panic) = done {
                std::panic::resume_unwind(panic);
            }
            return;
        };
        *self.kills.entry(step).or_default() += 1;
        // Not acknowledged.
        self.past.truncate(past);
        self.branches = before.clone();
        self.fixture.store = None;
        self.fixture.store = Some(open(&self.fixture.state(), self.engine));
        let now: Vec<_> = self.fixture.store().branches().unwrap().into_iter().map(|info| info.id).collect();
        let target = match op {
            Op::Edit(n, op) => self.pick(*n).map(|branch| (branch.clone(), apply(&before[&branch], op))),
            Op::Raw(..)
            | Op::Create
            | Op::Fork(..)
            | Op::Scan(_)
            | Op::Drop(_)
            | Op::At(_)
            | Op::Flatten
            | Op::Idle
            | Op::Reopen
            | Op::Kill(..) => None,
        };
        for branch in &now {
            let seen = self.seen(branch);
            match self.branches.get(branch) {
                // A new one: of the base, of what it was forked from, or of some past state.
                None => {
                    let known = seen == self.base
                        || before.values().any(|tree| *tree == seen)
                        || self.past.iter().any(|(.., tree)| *tree == seen);
                    assert!(known, "{step}: {seen:#?}");
                }
                Some(tree) if seen == *tree => {}
                Some(tree) => {
                    let (edited, after) =
                        target.clone().unwrap_or_else(|| panic!("{step} changed {tree:#?} to {seen:#?}"));
                    assert_eq!(branch, &edited, "{step}");
                    // Half of it may be there where a directory can't be renamed or removed in one step.
                    let whole = after.as_ref() == Some(&seen);
                    let half = seen.keys().all(|at| {
                        tree.contains_key(at) || after.as_ref().is_some_and(|a| a.contains_key(at))
                    });
                    assert!(whole || half, "{step}: {tree:#?} to {seen:#?}");
                }
            }
            self.branches.insert(branch.clone(), seen);
        }
        let gone: Vec<_> = self.branches.keys().filter(|branch| !now.contains(branch)).cloned().collect();
        for branch in gone {
            assert!(matches!(op, Op::Drop(_) | Op::At(_)), "{step}: {branch} is gone after {op:?}");
            self.branches.remove(&branch);
        }
    }

    fn check(&self) {
        for (branch, tree) in &self.branches {
            assert_eq!(&self.seen(branch), tree, "{branch}");
            self.fixture.scan(branch);
            self.fixture.check(branch);
        }
        assert_eq!(self.fixture.store().audit_verify().unwrap().problem, None);
        self.fixture.store().inner.live.removed();
        let count = |dir: &str| std::fs::read_dir(self.fixture.state().join(dir)).unwrap().count();
        assert_eq!((count("branches"), count("tmp")), (self.branches.len(), 0));
        let sealed: u32 = self
            .fixture
            .store()
            .inner
            .db
            .read()
            .query_row("SELECT count(*) FROM layers WHERE state = 'sealed' AND engine = 'overlay'", [], |r| {
                r.get(0)
            })
            .unwrap();
        assert_eq!(count("layers"), sealed as usize);
    }
}

#[test]
fn stores_behave_like_maps_whatever_happens() {
    on_all("model_tests::stores_behave_like_maps_whatever_happens", |engine| {
        let config = ProptestConfig {
            cases: variable("MODEL_CASES").and_then(|cases| cases.parse().ok()).unwrap_or(CASES),
            max_shrink_iters: 300,
            failure_persistence: None,
            ..ProptestConfig::default()
        };
        let ops = proptest::collection::vec(op(), 10..40);
        let done = TestRunner::new(config).run(&ops, |ops| {
            let mut model = Model::new(engine);
            for op in &ops {
                model.run(op);
            }
            model.check();
            Ok(())
        });
        done.unwrap_or_else(|error| panic!("{engine:?}: {error}"));
    });
}
