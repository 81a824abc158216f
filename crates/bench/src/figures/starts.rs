//! Starting things: a command in a warm hand against a plain `posix_spawn`, and booting a hand against bubblewrap alone.

use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::time::Instant;

use proto::ids::BaseId;

use crate::context::Bench;
use crate::error::{Context, Result};
use crate::lab::{HAND_UID, Lab, actor, freeze_repository, is_root};
use crate::progress::say;
use crate::report::{Bar, Ratio, Row};
use crate::run::{Spawner, program, timed};
use crate::stats::{Samples, rotated, show_seconds};

/// Blocks whose ratios are compared, so that a disturbance shows as spread.
const BLOCKS: usize = 10;

pub(crate) fn measure(bench: &Bench) -> Result<Vec<Row>> {
    let lab = Lab::open(&bench.scratch.fresh("state"))?;
    let base = freeze_repository(&lab.store, bench.small_repository()?)?;
    Ok(vec![exec(bench, &lab, &base)?, boot(bench, &lab, &base)?])
}

fn exec(bench: &Bench, lab: &Lab, base: &BaseId) -> Result<Row> {
    let (_, hand) = lab.branch_with_hand(base)?;
    let mut spawner = Spawner::start(&["true"])?;
    for _ in 0..20 {
        lab.exec(&hand, &["true"])?;
        spawner.once()?;
    }
    let per_block = bench.times(50, 10);
    say(format!("{} × true in a warm hand, and spawned", per_block * BLOCKS));
    let row = blocks("`true` in a warm hand ÷ `posix_spawn` of `true`", per_block, |candidate| {
        if candidate == 0 {
            return Ok(lab.exec(&hand, &["true"])?.wall.as_secs_f64());
        }
        Ok(spawner.once()?.as_secs_f64())
    });
    lab.stop(&hand);
    row
}

fn boot(bench: &Bench, lab: &Lab, base: &BaseId) -> Result<Row> {
    let per_block = bench.times(5, 1);
    say(format!("{} × a hand booted, and bubblewrap alone", per_block * BLOCKS));
    blocks("cold boot of a hand ÷ `bwrap … true`", per_block, |candidate| {
        if candidate != 0 {
            return Ok(timed(&mut bubblewrap())?.wall.as_secs_f64());
        }
        let branch =
            lab.store.create_branch(base, None, &actor()).context(|| "can't make a branch".into())?;
        let root = lab.store.mount(&branch.id).context(|| "can't mount a branch".into())?;
        let start = Instant::now();
        let hand = lab.boot(&root)?;
        let wall = start.elapsed();
        lab.stop(&hand);
        Ok(wall.as_secs_f64())
    })
}

/// Measures two candidates in turns, `per_block` times in each block. 0 is ours, 1 the baseline.
fn blocks(figure: &str, per_block: usize, mut once: impl FnMut(usize) -> Result<f64>) -> Result<Row> {
    let (mut ours, mut theirs, mut ratio) = (Samples::default(), Samples::default(), Samples::default());
    for _ in 0..BLOCKS {
        let mut block = [Samples::default(), Samples::default()];
        for round in 0..per_block {
            for candidate in rotated(2, round) {
                block[candidate].push_value(once(candidate)?);
            }
        }
        ratio.push_value(block[0].median() / block[1].median());
        ours.extend(&block[0]);
        theirs.extend(&block[1]);
    }
    let show =
        |s: &Samples| format!("p50 {}, p99 {}", show_seconds(s.median()), show_seconds(s.quantile(0.99)));
    Ok(Row {
        figure: figure.to_owned(),
        ours: show(&ours),
        baseline: show(&theirs),
        ratio: Ratio::Of(ratio.spread()),
        bar: Bar::AtMost(3.0),
        failure: None,
    })
}

/// bubblewrap with the namespaces of a hand and the fewest mounts that run `true`, as the user that hands have.
fn bubblewrap() -> Command {
    let mut command = program("bwrap");
    command.args(["--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]);
    command.args(["--unshare-cgroup", "--die-with-parent", "--ro-bind", "/usr", "/usr"]);
    for name in ["/bin", "/lib", "/lib64"] {
        command.args(["--ro-bind-try", name, name]);
    }
    command.args(["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--", "true"]).current_dir("/");
    if is_root() {
        command.uid(HAND_UID).gid(HAND_UID);
    }
    command
}
