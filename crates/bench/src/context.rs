//! What the figures of one run share: the directory, the number of repetitions, and fixtures that several use.

use std::cell::OnceCell;
use std::path::{Path, PathBuf};

use crate::error::Result;
use crate::fixtures;
use crate::progress::say;
use crate::scratch::Scratch;

/// Files of the smaller repository.
pub(crate) const SMALL: usize = 5_000;
/// Files of the larger one.
pub(crate) const LARGE: usize = 50_000;

/// One run of the benchmark.
pub(crate) struct Bench {
    pub(crate) scratch: Scratch,
    quick: bool,
    small: OnceCell<PathBuf>,
    large: OnceCell<PathBuf>,
}

impl Bench {
    pub(crate) fn new(parent: &Path, quick: bool) -> Result<Self> {
        let scratch = Scratch::new(parent)?;
        say(format!("working in {}", scratch.path().display()));
        Ok(Self { scratch, quick, small: OnceCell::new(), large: OnceCell::new() })
    }

    /// So many repetitions, or fewer when it is to be quick.
    pub(crate) fn times(&self, full: usize, quick: usize) -> usize {
        if self.quick { quick } else { full }
    }

    /// A repository of [`SMALL`] files.
    pub(crate) fn small_repository(&self) -> Result<&Path> {
        self.repository(&self.small, SMALL)
    }

    /// A repository of [`LARGE`] files.
    pub(crate) fn large_repository(&self) -> Result<&Path> {
        self.repository(&self.large, LARGE)
    }

    fn repository<'a>(&'a self, cell: &'a OnceCell<PathBuf>, count: usize) -> Result<&'a Path> {
        if cell.get().is_none() {
            say(format!("making a repository of {count} files"));
            let dir = self.scratch.fresh("repository");
            fixtures::repository(&dir, count)?;
            let _ = cell.set(dir);
        }
        Ok(cell.get().expect("it was just set"))
    }
}
