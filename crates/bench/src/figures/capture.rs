//! Capture of a branch with a large upper on which nothing changed: what every command pays at its end.

use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::time::Instant;

use crate::context::{Bench, LARGE};
use crate::error::{BenchError, Context, Result};
use crate::fixtures;
use crate::lab::{actor, freeze_repository, open_store};
use crate::progress::say;
use crate::report::{Bar, Ratio, Row};
use crate::stats::{Samples, rotated, show_seconds};

pub(crate) fn measure(bench: &Bench) -> Result<Vec<Row>> {
    let store = open_store(&bench.scratch.fresh("state"))?;
    let base = freeze_repository(&store, bench.small_repository()?)?;
    let branch = store.create_branch(&base, None, &actor()).context(|| "can't make a branch".into())?.id;
    let root = store.mount(&branch).context(|| "can't mount a branch".into())?;
    say(format!("writing {LARGE} files on a branch, and beside it"));
    fixtures::tree(Path::new(&format!("/proc/self/fd/{}/new", root.fd().as_raw_fd())), LARGE)?;
    let plain = bench.scratch.fresh("plain");
    fixtures::tree(&plain, LARGE)?;
    let scan = || {
        let start = Instant::now();
        let report = store.scan(&branch, &actor(), None).context(|| "the capture failed".into())?;
        Ok::<_, BenchError>((start.elapsed(), report.changed.tree_total + report.changed.other_total))
    };
    let (first, changed) = scan()?;
    say(format!("first capture: {changed} changes in {}", show_seconds(first.as_secs_f64())));
    let (mut ours, mut walks) = (Samples::default(), Samples::default());
    for round in 0..bench.times(15, 3) {
        for candidate in rotated(2, round) {
            let start = Instant::now();
            if candidate == 0 {
                let (time, changed) = scan()?;
                if changed != 0 {
                    return Err(BenchError::new(format!(
                        "{changed} changes were captured where nothing changed"
                    )));
                }
                ours.push(time);
            } else {
                walk(&plain).context(|| format!("can't walk {}", plain.display()))?;
                walks.push(start.elapsed());
            }
        }
    }
    let row = |figure: String, ours: String, walks: String, ratio, bar| Row {
        figure,
        ours,
        baseline: walks,
        ratio,
        bar,
        failure: None,
    };
    let per_file = show_seconds(ours.median() / LARGE as f64);
    Ok(vec![
        row(
            format!("capture when nothing changed, {LARGE} files in the upper ÷ walking them"),
            format!("{} ({per_file} a file)", show_seconds(ours.median())),
            show_seconds(walks.median()),
            Ratio::Of(ours.over(&walks).spread()),
            Bar::None,
        ),
        row(
            format!("first capture of {LARGE} new files, content kept"),
            show_seconds(first.as_secs_f64()),
            "–".into(),
            Ratio::None,
            Bar::None,
        ),
    ])
}

/// Lists a tree and asks for every file's metadata; returns how many there are.
fn walk(dir: &Path) -> std::io::Result<u64> {
    let mut count = 0;
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        count += 1;
        if entry.metadata()?.is_dir() {
            count += walk(&entry.path())?;
        }
    }
    Ok(count)
}
