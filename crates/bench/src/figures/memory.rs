//! Memory of idle branches and idle warm hands, each in a process that did nothing else before.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::context::Bench;
use crate::error::{BenchError, Context, Result};
use crate::fixtures;
use crate::lab::{Lab, actor, freeze_repository, open_store};
use crate::memory::{descendants, kernel, pss};
use crate::progress::{print, say};
use crate::report::{Bar, Ratio, Row};
use crate::run::in_fresh_process;
use crate::stats::show_bytes;

/// Files of the repository below: an idle branch's memory must not depend on them.
const FILES: usize = 500;

/// Memory that `count` idle things take, in bytes.
#[derive(Debug, Serialize, Deserialize)]
struct Idle {
    count: u64,
    /// What this process, the runner, grew by.
    runner: i64,
    /// What the kernel of the whole machine grew by.
    kernel: i64,
    /// PSS of all processes that belong to them.
    processes: u64,
}

pub(crate) fn measure(bench: &Bench) -> Result<Vec<Row>> {
    let repository = bench.scratch.fresh("repository");
    fixtures::repository(&repository, FILES)?;
    let mut rows = Vec::new();
    for (name, count, what) in [
        ("idle-branches", bench.times(1_000, 50), "idle branches"),
        ("idle-mounts", bench.times(1_000, 50), "idle branches, mounted"),
        ("idle-hands", bench.times(200, 10), "idle warm hands"),
    ] {
        say(format!("{count} {what}"));
        let state = bench.scratch.fresh("state");
        let text = in_fresh_process(
            name,
            &[&count.to_string(), &state.to_string_lossy(), &repository.to_string_lossy()],
        )?;
        let idle = serde_json::from_str(&text).context(|| format!("the measuring process says {text:?}"))?;
        rows.push(row(what, &idle));
    }
    Ok(rows)
}

fn row(what: &str, idle: &Idle) -> Row {
    let each = |bytes: f64| show_bytes(bytes / idle.count as f64);
    let mut ours = format!("{} each in the runner", each(idle.runner as f64));
    if idle.processes > 0 {
        ours = format!("{} PSS each, {ours}", each(idle.processes as f64));
    }
    Row {
        figure: format!("memory of {} {what}", idle.count),
        ours: format!("{ours}, {} each in the kernel", each(idle.kernel as f64)),
        baseline: "–".into(),
        ratio: Ratio::None,
        bar: Bar::None,
        failure: None,
    }
}

/// The measuring process: `NAME COUNT STATE REPOSITORY`; prints [`Idle`] as JSON.
pub(crate) fn internal(name: &str, args: &[String]) -> Result<()> {
    let [count, state, repository] = args else {
        return Err(BenchError::new("usage: --internal NAME COUNT STATE REPOSITORY"));
    };
    let count: u64 = count.parse().context(|| format!("not a count: {count:?}"))?;
    let (state, repository) = (PathBuf::from(state), PathBuf::from(repository));
    let idle = match name {
        "idle-branches" => branches(count, &state, &repository, false)?,
        "idle-mounts" => branches(count, &state, &repository, true)?,
        "idle-hands" => hands(count, &state, &repository)?,
        unknown => return Err(BenchError::new(format!("nothing internal is called {unknown:?}"))),
    };
    let text = serde_json::to_string(&idle).context(|| "can't write JSON".into())?;
    print(text);
    Ok(())
}

fn branches(count: u64, state: &Path, repository: &Path, mounted: bool) -> Result<Idle> {
    let store = open_store(state)?;
    let base = freeze_repository(&store, repository)?;
    let mut roots = Vec::new();
    let mut one = || {
        let branch = store.create_branch(&base, None, &actor()).context(|| "can't make a branch".into())?;
        if mounted {
            roots.push(store.mount(&branch.id).context(|| "can't mount a branch".into())?);
        }
        Ok::<_, BenchError>(())
    };
    // What is set up once is not a branch's.
    for _ in 0..5 {
        one()?;
    }
    let before = Before::now()?;
    for _ in 0..count {
        one()?;
    }
    before.idle(count, 0)
}

fn hands(count: u64, state: &Path, repository: &Path) -> Result<Idle> {
    let lab = Lab::open(state)?;
    let base = freeze_repository(&lab.store, repository)?;
    let (_, first) = lab.branch_with_hand(&base)?;
    lab.exec(&first, &["true"])?;
    lab.stop(&first);
    let before = Before::now()?;
    let mut hands = Vec::new();
    for _ in 0..count {
        let (_, hand) = lab.branch_with_hand(&base)?;
        // Warm: it has run something.
        lab.exec(&hand, &["true"])?;
        hands.push(hand);
    }
    let mut processes = 0;
    for pid in descendants(std::process::id())? {
        processes += pss(pid)?;
    }
    let idle = before.idle(count, processes);
    for hand in &hands {
        lab.stop(hand);
    }
    idle
}

struct Before {
    runner: u64,
    kernel: u64,
}

impl Before {
    fn now() -> Result<Self> {
        Ok(Self { runner: pss(std::process::id())?, kernel: kernel()? })
    }

    fn idle(&self, count: u64, processes: u64) -> Result<Idle> {
        let now = Self::now()?;
        let growth = |now: u64, before: u64| now.cast_signed() - before.cast_signed();
        Ok(Idle {
            count,
            runner: growth(now.runner, self.runner),
            kernel: growth(now.kernel, self.kernel),
            processes,
        })
    }
}
