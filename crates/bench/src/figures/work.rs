//! Real work in a hand on a branch, against the same commands on the same disk without any of that.

use std::path::{Path, PathBuf};
use std::time::Instant;

use proto::ids::BaseId;
use vfs::DirSource;

use crate::context::{Bench, SMALL};
use crate::error::{BenchError, Context, Result};
use crate::fixtures;
use crate::lab::{Lab, actor, freeze_repository};
use crate::progress::say;
use crate::report::{Bar, Ratio, Row};
use crate::run::{argv, run, settle, timed};
use crate::stats::{Samples, rotated, show_ratio, show_seconds};

/// A command that is measured in a directory and in a branch of the same content.
struct Work<'a> {
    figure: String,
    directory: &'a Path,
    base: BaseId,
    /// Commands that run first, unmeasured, in each fresh directory and branch.
    first: &'a [&'a [&'a str]],
    command: &'a [&'a str],
    bar: f64,
    rounds: usize,
    /// Rounds that don't count: what is read once for all rounds gets into memory.
    warm_up: usize,
}

/// What the rounds gave; the same place in each is the same round.
#[derive(Default)]
struct Measured {
    ours: Samples,
    ours_cpu: Samples,
    theirs: Samples,
    theirs_cpu: Samples,
    capture: Samples,
    /// Paths that the last capture recorded.
    captured: u64,
}

pub(crate) fn build(bench: &Bench) -> Result<Vec<Row>> {
    let project = bench.scratch.fresh("crate");
    say("fetching crates");
    fixtures::cargo_project(&project)?;
    let lab = Lab::open(&bench.scratch.fresh("state"))?;
    let work = Work {
        figure: "`cargo build`, 16 direct dependencies".into(),
        directory: &project,
        base: freeze_directory(&lab, &project)?,
        first: &[],
        command: &["cargo", "build", "--offline", "--locked"],
        bar: 1.05,
        rounds: bench.times(5, 1),
        warm_up: 0,
    };
    let measured = compare(bench, &lab, &work)?;
    if measured.captured < 100 {
        return Err(BenchError::new(format!("only {} paths were captured after a build", measured.captured)));
    }
    let capture = measured.capture.over(&measured.ours);
    let share = Row {
        figure: "capture after that build ÷ the build".into(),
        ours: format!("{} ({} paths)", show_seconds(measured.capture.median()), measured.captured),
        baseline: show_seconds(measured.ours.median()),
        ratio: Ratio::Of(capture.spread()),
        bar: Bar::AtMost(0.015),
        failure: None,
    };
    Ok(vec![work.row(&measured), share])
}

pub(crate) fn npm(bench: &Bench) -> Result<Vec<Row>> {
    let project = bench.scratch.fresh("package");
    say("fetching npm packages");
    let packages = fixtures::npm_project(&project, &bench.scratch.fresh("package-tried"))?;
    let lab = Lab::open(&bench.scratch.fresh("state"))?;
    let work = Work {
        figure: format!("`npm ci --offline`, {packages} packages"),
        directory: &project,
        base: freeze_directory(&lab, &project)?,
        first: &[],
        command: &["npm", "ci", "--offline", "--no-audit", "--no-fund"],
        bar: 1.5,
        rounds: bench.times(5, 1),
        warm_up: 0,
    };
    Ok(vec![work.row(&compare(bench, &lab, &work)?)])
}

pub(crate) fn git(bench: &Bench) -> Result<Vec<Row>> {
    let repository = bench.small_repository()?;
    let lab = Lab::open(&bench.scratch.fresh("state"))?;
    let status: &[&str] = &["git", "status", "--porcelain"];
    let clone = Work {
        figure: format!("`git clone`, {SMALL} files"),
        directory: repository,
        base: freeze_repository(&lab.store, repository)?,
        first: &[],
        command: &["git", "clone", "--quiet", "--no-local", ".", "clone"],
        bar: 1.5,
        rounds: bench.times(7, 2),
        warm_up: 1,
    };
    let status = Work {
        figure: format!("`git status`, {SMALL} files"),
        base: clone.base.clone(),
        // The copy has new inodes: the first status writes the index anew, as git does after any copy.
        first: &[status, status],
        command: status,
        rounds: bench.times(11, 3),
        ..clone
    };
    let mut rows = Vec::new();
    for work in [clone, status] {
        rows.push(work.row(&compare(bench, &lab, &work)?));
    }
    Ok(rows)
}

pub(crate) fn tar(bench: &Bench) -> Result<Vec<Row>> {
    let directory = bench.scratch.fresh("archive");
    fixtures::archive(&directory, SMALL)?;
    let lab = Lab::open(&bench.scratch.fresh("state"))?;
    let work = Work {
        figure: format!("`tar --extract`, {SMALL} files"),
        directory: &directory,
        base: freeze_directory(&lab, &directory)?,
        first: &[&["mkdir", "out"]],
        command: &["tar", "--extract", "--no-same-owner", "--file", "files.tar", "--directory", "out"],
        bar: 1.5,
        rounds: bench.times(9, 2),
        warm_up: 1,
    };
    Ok(vec![work.row(&compare(bench, &lab, &work)?)])
}

fn freeze_directory(lab: &Lab, path: &Path) -> Result<BaseId> {
    let source = DirSource { path: path.to_owned(), include_ignored: false };
    let base =
        lab.store.freeze_dir(&source, &|_| ()).context(|| format!("can't freeze {}", path.display()))?;
    Ok(base.id)
}

fn compare(bench: &Bench, lab: &Lab, work: &Work<'_>) -> Result<Measured> {
    let mut measured = Measured::default();
    for round in 0..work.warm_up + work.rounds {
        let counts = round >= work.warm_up;
        let mut now = if counts { std::mem::take(&mut measured) } else { Measured::default() };
        for candidate in rotated(2, round) {
            if candidate == 0 {
                in_a_hand(bench, lab, work, &mut now)?;
            } else {
                outside(work, bench.scratch.fresh("plain"), &mut now)?;
            }
        }
        let (ours, theirs) = (show_seconds(now.ours.last()), show_seconds(now.theirs.last()));
        let note = if counts { "" } else { " (not counted)" };
        say(format!("{}: round {}: {ours} in a hand, {theirs} outside{note}", work.figure, round + 1));
        if counts {
            measured = now;
        }
    }
    Ok(measured)
}

fn in_a_hand(bench: &Bench, lab: &Lab, work: &Work<'_>, measured: &mut Measured) -> Result<()> {
    let (branch, hand) = lab.branch_with_hand(&work.base)?;
    for command in work.first {
        lab.exec(&hand, command)?;
    }
    settle(bench.scratch.path())?;
    let done = lab.exec(&hand, work.command)?;
    measured.ours.push(done.wall);
    measured.ours_cpu.push(done.cpu);
    let start = Instant::now();
    let report = lab.store.scan(&branch, &actor(), None).context(|| "the capture failed".into())?;
    measured.capture.push(start.elapsed());
    measured.captured = report.changed.tree_total + report.changed.other_total;
    lab.stop(&hand);
    Ok(())
}

fn outside(work: &Work<'_>, directory: PathBuf, measured: &mut Measured) -> Result<()> {
    let (from, to) = (work.directory.to_string_lossy(), directory.to_string_lossy());
    run(&mut argv(&["cp", "--archive", &from, &to], Path::new("/")))?;
    for command in work.first {
        run(&mut argv(command, &directory))?;
    }
    settle(&directory)?;
    let done = timed(&mut argv(work.command, &directory))?;
    measured.theirs.push(done.wall);
    measured.theirs_cpu.push(done.cpu);
    Ok(())
}

impl Work<'_> {
    fn row(&self, measured: &Measured) -> Row {
        let cpu = measured.ours_cpu.over(&measured.theirs_cpu).median();
        Row {
            figure: self.figure.clone(),
            ours: format!("{} (CPU × {})", show_seconds(measured.ours.median()), show_ratio(cpu)),
            baseline: show_seconds(measured.theirs.median()),
            ratio: Ratio::Of(measured.ours.over(&measured.theirs).spread()),
            bar: Bar::AtMost(self.bar),
            failure: None,
        }
    }
}
