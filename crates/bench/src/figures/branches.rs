//! Making and mounting a branch in the runner, against `git worktree add` of the same repository, and what of it is the
//! disk's: until the branch would outlive a power cut.

use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

use proto::ids::BaseId;
use vfs::{Root, Store};

use crate::context::{Bench, LARGE, SMALL};
use crate::error::{Context, Result};
use crate::lab::{actor, freeze_repository, open_store};
use crate::progress::say;
use crate::report::{Bar, Ratio, Row};
use crate::run::{argv, settle, timed};
use crate::stats::{Samples, rotated, show_seconds};

/// Rounds in which every candidate has its turn.
const ROUNDS: usize = 5;

/// What the log of a small transaction takes.
const LOG_BYTES: usize = 32 << 10;

/// What one round makes.
#[derive(Default)]
struct Round {
    small: Samples,
    large: Samples,
    /// On the disk.
    kept: Samples,
    /// A block appended to a file and synced.
    synced: Samples,
}

pub(crate) fn measure(bench: &Bench) -> Result<Vec<Row>> {
    let repository = bench.large_repository()?;
    let store = open_store(&bench.scratch.fresh("state"))?;
    let small = freeze_repository(&store, bench.small_repository()?)?;
    let large = freeze_repository(&store, repository)?;
    let per_round = bench.times(200, 20);
    let mut maker = Maker { store: &store, mounted: Vec::new() };
    let (mut rounds, mut worktree) = (Vec::new(), Samples::default());
    for round in 0..ROUNDS {
        say(format!(
            "round {} of {ROUNDS}: {per_round} branches of each repository, one worktree",
            round + 1
        ));
        let mut made = Round::default();
        for candidate in rotated(5, round) {
            settle(bench.scratch.path())?;
            match candidate {
                0 => made.small = maker.make(&small, per_round)?,
                1 => made.large = maker.make(&large, per_round)?,
                2 => made.kept = maker.make_kept(&small, per_round / 2)?,
                3 => made.synced = sync_blocks(&bench.scratch.fresh("log"), per_round / 2)?,
                _ => worktree.push(add_worktree(repository, &bench.scratch.fresh("worktree"))?),
            }
        }
        rounds.push(made);
    }
    let mounted = maker.mounted.len();
    say(format!("{} more with {mounted} mounted", per_round * ROUNDS));
    let crowded = maker.make(&large, per_round * ROUNDS)?;
    Ok(rows(&rounds, &worktree, &crowded, mounted))
}

/// Makes branches and keeps them mounted.
struct Maker<'a> {
    store: &'a Store,
    mounted: Vec<Root>,
}

impl Maker<'_> {
    fn make(&mut self, base: &BaseId, count: usize) -> Result<Samples> {
        let mut samples = Samples::default();
        for _ in 0..count {
            let start = Instant::now();
            let branch =
                self.store.begin_branch(base, None, &actor()).context(|| "can't make a branch".into())?;
            let root = self.store.mount(&branch.id).context(|| "can't mount a branch".into())?;
            samples.push(start.elapsed());
            self.mounted.push(root);
        }
        self.store.settle().context(|| "can't sync the branches".into())?;
        Ok(samples)
    }

    /// The same, each on the disk before it counts as made.
    fn make_kept(&mut self, base: &BaseId, count: usize) -> Result<Samples> {
        let mut samples = Samples::default();
        for _ in 0..count {
            let start = Instant::now();
            let branch =
                self.store.create_branch(base, None, &actor()).context(|| "can't make a branch".into())?;
            let root = self.store.mount(&branch.id).context(|| "can't mount a branch".into())?;
            samples.push(start.elapsed());
            self.mounted.push(root);
        }
        Ok(samples)
    }
}

/// What the disk alone takes to keep something.
fn sync_blocks(path: &Path, count: usize) -> Result<Samples> {
    let failed = || format!("can't write {}", path.display());
    let mut samples = Samples::default();
    let mut file = File::create(path).context(failed)?;
    for _ in 0..count {
        let start = Instant::now();
        file.write_all(&[7; LOG_BYTES]).and_then(|()| file.sync_data()).context(failed)?;
        samples.push(start.elapsed());
    }
    Ok(samples)
}

/// The peer: a worktree of its own for an agent, as git makes it.
pub(crate) fn add_worktree(repository: &Path, target: &Path) -> Result<Duration> {
    let target = target.to_string_lossy();
    let command = ["git", "worktree", "add", "--quiet", "--detach", &target, "main"];
    Ok(timed(&mut argv(&command, repository))?.wall)
}

fn rows(rounds: &[Round], worktree: &Samples, crowded: &Samples, mounted: usize) -> Vec<Row> {
    let (mut small, mut large) = (Samples::default(), Samples::default());
    let (mut flat, mut faster, mut disk) = (Samples::default(), Samples::default(), Samples::default());
    let (mut kept, mut synced) = (Samples::default(), Samples::default());
    for (number, round) in rounds.iter().enumerate() {
        small.extend(&round.small);
        large.extend(&round.large);
        flat.push_value(round.large.median() / round.small.median());
        faster.push_value(worktree.nth(number) / round.large.median());
        kept.extend(&round.kept);
        synced.extend(&round.synced);
        disk.push_value(round.kept.median() / round.synced.median());
    }
    let absolute = |what: String, samples: &Samples| Row {
        figure: what,
        ours: quantiles(samples),
        baseline: "–".into(),
        ratio: Ratio::None,
        bar: Bar::Milliseconds { value: samples.median(), max: 1.0 },
        failure: None,
    };
    vec![
        absolute(format!("create and mount a branch, {SMALL} files"), &small),
        absolute(format!("create and mount a branch, {LARGE} files"), &large),
        absolute(format!("create and mount a branch, {LARGE} files, {mounted} mounted"), crowded),
        Row {
            figure: format!("the same, {LARGE} files ÷ {SMALL} files"),
            ours: show_seconds(large.median()),
            baseline: show_seconds(small.median()),
            ratio: Ratio::Of(flat.spread()),
            bar: Bar::AtMost(1.2),
            failure: None,
        },
        Row {
            figure: format!("create and mount a branch against `git worktree add`, {LARGE} files"),
            ours: show_seconds(large.median()),
            baseline: show_seconds(worktree.median()),
            ratio: Ratio::Faster(faster.spread()),
            bar: Bar::AtLeast(100.0),
            failure: None,
        },
        Row {
            figure: format!(
                "create and mount a branch that outlives a power cut ÷ {} KiB appended and synced",
                LOG_BYTES >> 10
            ),
            ours: quantiles(&kept),
            baseline: quantiles(&synced),
            ratio: Ratio::Of(disk.spread()),
            bar: Bar::None,
            failure: None,
        },
    ]
}

fn quantiles(samples: &Samples) -> String {
    format!(
        "p50 {}, p99 {} of {}",
        show_seconds(samples.median()),
        show_seconds(samples.quantile(0.99)),
        samples.len()
    )
}
