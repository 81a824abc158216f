//! Figures of tendon: each a ratio to a peer or to plain ext4 that is measured in the same run, in turns. Run it with
//! `cargo xtask bench`; `docs/benchmarks.md` says what the figures mean.

#![forbid(unsafe_code)]

mod context;
mod error;
mod figures;
mod fixtures;
mod lab;
mod machine;
mod memory;
mod progress;
mod report;
mod run;
mod scratch;
mod stats;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;

use crate::context::Bench;
use crate::error::{BenchError, Context, Result};
use crate::figures::Figure;
use crate::machine::Machine;
use crate::progress::{print, say};
use crate::report::Row;

/// Measure tendon against its peers in the same run, and print the ratios
#[derive(Parser)]
#[command(name = "bench")]
struct Args {
    /// Only these figures (repeatable)
    #[arg(long, value_name = "NAME")]
    only: Vec<Figure>,
    /// Few repetitions: to see that it works, not to cite
    #[arg(long)]
    quick: bool,
    /// Put the table into docs/benchmarks.md
    #[arg(long, conflicts_with = "quick")]
    write: bool,
    /// Print JSON instead of Markdown
    #[arg(long)]
    json: bool,
    /// Where to work: a directory on the disk that is to be measured
    #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
    dir: PathBuf,
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let result = match args.split_first() {
        Some((first, rest)) if first == "--internal" => internal(rest),
        _ => bench(&Args::parse()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(error.chain());
            ExitCode::FAILURE
        }
    }
}

/// Parts that run in a process of their own, started by this same program.
fn internal(args: &[String]) -> Result<()> {
    let (name, rest) = args.split_first().ok_or_else(|| BenchError::new("--internal needs a name"))?;
    match name.as_str() {
        "spawn" => run::serve_spawns(rest),
        name => {
            lab::prepare_process()?;
            figures::memory::internal(name, rest)
        }
    }
}

fn bench(args: &Args) -> Result<()> {
    let document = workspace().join("docs/benchmarks.md");
    lab::prepare_process()?;
    let machine = Machine::look(&args.dir)?;
    let busy: f64 = machine.load.parse().unwrap_or(0.0);
    if busy > 0.5 {
        say(format!("the machine is not idle (load {busy}): expect wide spreads"));
    }
    say("building the release binaries");
    build(&["hand"])?;
    let bench = Bench::new(&args.dir, args.quick)?;
    let figures = if args.only.is_empty() { Figure::ALL } else { &args.only };
    let mut rows: Vec<Row> = Vec::new();
    for figure in figures {
        say(format!("== {}", figure.name()));
        rows.extend(figure.measure(&bench).unwrap_or_else(|error| {
            say(format!("{}: {}", figure.name(), error.chain()));
            vec![Row::failed(figure.name(), &error)]
        }));
    }
    if args.json {
        print(format!("{:#}", report::json(&machine, &rows)));
    } else {
        print(report::markdown(&machine, &rows));
    }
    if args.write {
        report::write(&document, &machine, &rows, args.only.is_empty())?;
        say(format!("written to {}", document.display()));
    }
    say("removing the files of this run");
    drop(bench);
    match rows.iter().find(|row| row.failure.is_some()) {
        Some(row) => Err(BenchError::new(format!("`{}` failed", row.figure))),
        None => Ok(()),
    }
}

/// Builds packages of the workspace as they are released.
fn build(packages: &[&str]) -> Result<()> {
    let mut cargo = run::program("cargo");
    cargo.args(["build", "--quiet", "--release"]).current_dir(workspace());
    for package in packages {
        cargo.args(["--package", package]);
    }
    run::run(&mut cargo).map(drop)
}

fn workspace() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

/// One of the workspace's binaries, beside this program.
fn binary(name: &str) -> Result<PathBuf> {
    let path = run::own_path()?.with_file_name(name);
    path.metadata().context(|| format!("`{}` is not built: run `cargo xtask bench`", path.display()))?;
    Ok(path)
}
