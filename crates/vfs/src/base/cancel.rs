//! A flag that stops a freeze: its loops over files and over parts of files look at it, and it ends git.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Stops a freeze early. Clones are one flag.
#[derive(Clone, Debug, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// Stops it.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether it was stopped.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// An error if it was stopped. Which one does not matter: all that a stopped freeze says is that it was.
    pub(super) fn check(&self) -> io::Result<()> {
        if self.is_cancelled() { Err(io::Error::other("cancelled")) } else { Ok(()) }
    }
}
