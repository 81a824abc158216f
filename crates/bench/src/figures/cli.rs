//! Making a branch through the whole command line with a runner that is up, against `git worktree add`.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use super::branches::add_worktree;
use crate::context::{Bench, LARGE};
use crate::error::{BenchError, Context, Result};
use crate::progress::say;
use crate::report::{Bar, Ratio, Row};
use crate::run::{program, run, settle, timed};
use crate::stats::{Samples, rotated, show_seconds};

/// Rounds in which both have their turn.
const ROUNDS: usize = 5;
/// How long a runner may take to listen.
const START_MAX: Duration = Duration::from_secs(10);

pub(crate) fn measure(bench: &Bench) -> Result<Vec<Row>> {
    crate::build(&["server", "cli"])?;
    let repository = bench.large_repository()?;
    let runner = Runner::start(bench.scratch.fresh("state"))?;
    say(format!("freezing {}", repository.display()));
    let repo = repository.to_string_lossy();
    let base = run(runner.tendon()?.args(["base", "freeze", "--repo", &repo, "--ref", "main"]))?;
    let per_round = bench.times(40, 5);
    let (mut ours, mut worktree, mut faster) = (Samples::default(), Samples::default(), Samples::default());
    for round in 0..ROUNDS {
        say(format!("round {} of {ROUNDS}: {per_round} branches, one worktree", round + 1));
        let mut batch = Samples::default();
        for candidate in rotated(2, round) {
            settle(bench.scratch.path())?;
            if candidate == 0 {
                for _ in 0..per_round {
                    let mut create = runner.tendon()?;
                    batch.push(timed(create.args(["branch", "create", "--base", base.trim()]))?.wall);
                }
            } else {
                worktree.push(add_worktree(repository, &bench.scratch.fresh("worktree"))?);
            }
        }
        faster.push_value(worktree.last() / batch.median());
        ours.extend(&batch);
    }
    Ok(vec![Row {
        figure: format!("`tendon branch create` against `git worktree add`, {LARGE} files"),
        ours: format!("{}, p99 {}", show_seconds(ours.median()), show_seconds(ours.quantile(0.99))),
        baseline: show_seconds(worktree.median()),
        ratio: Ratio::Faster(faster.spread()),
        bar: Bar::AtLeast(20.0),
        failure: None,
    }])
}

/// A `tendond` of this figure's own, ended with it.
struct Runner {
    state: PathBuf,
    child: Child,
}

impl Runner {
    fn start(state: PathBuf) -> Result<Self> {
        let mut tendond = program(crate::binary("tendond")?);
        let child =
            tendond.arg("--state-dir").arg(&state).spawn().context(|| "tendond does not start".into())?;
        let mut runner = Self { state, child };
        let (socket, begun) = (runner.state.join("run/tendond.sock"), Instant::now());
        while UnixStream::connect(&socket).is_err() {
            if begun.elapsed() > START_MAX || matches!(runner.child.try_wait(), Ok(Some(_))) {
                return Err(BenchError::new("tendond does not listen"));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(runner)
    }

    fn tendon(&self) -> Result<Command> {
        let mut command = program(crate::binary("tendon")?);
        command.arg("--state-dir").arg(&self.state).current_dir(Path::new("/"));
        Ok(command)
    }
}

impl Drop for Runner {
    fn drop(&mut self) {
        let stopped = self.tendon().and_then(|mut tendon| run(tendon.args(["runner", "stop"])));
        if stopped.is_err() {
            let _ = self.child.kill();
        }
        let _ = self.child.wait();
    }
}
