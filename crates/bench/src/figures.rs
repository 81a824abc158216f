//! The figures, one module for each kind.

mod branches;
mod capture;
mod cli;
pub(crate) mod memory;
mod starts;
mod work;

use clap::ValueEnum;

use crate::context::Bench;
use crate::error::Result;
use crate::report::Row;

/// What can be measured, by the name that `--only` takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Figure {
    /// Creating and mounting branches, in the runner
    Branch,
    /// Creating a branch through the command line
    Cli,
    /// A command in a warm hand, and booting one
    Start,
    /// git clone and git status in a hand
    Git,
    /// Extracting an archive in a hand
    Tar,
    /// npm ci in a hand
    Npm,
    /// cargo build in a hand, and its capture
    Build,
    /// Capture of a large branch
    Capture,
    /// Memory of idle branches and hands
    Memory,
}

impl Figure {
    /// All of them, the quick ones first.
    pub(crate) const ALL: &[Figure] = &[
        Figure::Branch,
        Figure::Cli,
        Figure::Start,
        Figure::Git,
        Figure::Tar,
        Figure::Npm,
        Figure::Build,
        Figure::Capture,
        Figure::Memory,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Figure::Branch => "branch",
            Figure::Cli => "cli",
            Figure::Start => "start",
            Figure::Git => "git",
            Figure::Tar => "tar",
            Figure::Npm => "npm",
            Figure::Build => "build",
            Figure::Capture => "capture",
            Figure::Memory => "memory",
        }
    }

    /// Measures it.
    pub(crate) fn measure(self, bench: &Bench) -> Result<Vec<Row>> {
        match self {
            Figure::Branch => branches::measure(bench),
            Figure::Cli => cli::measure(bench),
            Figure::Start => starts::measure(bench),
            Figure::Git => work::git(bench),
            Figure::Tar => work::tar(bench),
            Figure::Npm => work::npm(bench),
            Figure::Build => work::build(bench),
            Figure::Capture => capture::measure(bench),
            Figure::Memory => memory::measure(bench),
        }
    }
}
