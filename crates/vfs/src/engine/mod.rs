//! Engines: how a branch's files come to be. `overlay` stacks directories, `copy` copies them. Both serve the same
//! layers and entries, behind one narrow trait, and pass the same tests.

mod copy;
mod overlay;
mod tree;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use crate::store::EngineChoice;

pub(crate) use copy::CopyEngine;
pub(crate) use overlay::OverlayEngine;
pub(crate) use tree::times;

/// Makes, mounts, seals and copies the directories of branches. Knows no database.
pub(crate) trait Engine: Send + Sync {
    /// The engine's word in the database.
    fn word(&self) -> &'static str;

    /// Makes the directory of a new branch that stands on `base`. What an interrupted call leaves is removed by
    /// removing `dir`.
    fn create(&self, dir: &Path, base: &Path) -> io::Result<()>;

    /// Mounts a branch over `lowers`, topmost first, the base's tree last.
    fn mount(&self, dir: &Path, lowers: &[PathBuf]) -> io::Result<Mounted>;

    /// Whether [`Engine::seal`] works: then a fork does not copy.
    fn can_seal(&self) -> bool;

    /// Makes what the branch changed the sealed layer at `layer`, and lets the branch go on with no changes. Nothing may
    /// have the branch mounted.
    fn seal(&self, dir: &Path, layer: &Path) -> io::Result<()>;

    /// Takes back a [`Engine::seal`], also one that was interrupted at any point.
    fn unseal(&self, dir: &Path, layer: &Path) -> io::Result<()>;

    /// Makes the directory `child` of a fork of a branch that nothing writes to meanwhile; what the branch changed is
    /// copied to a sealed layer at `layer` if the engine has such.
    fn copy_sealed(&self, dir: &Path, layer: &Path, child: &Path) -> io::Result<()>;

    /// The directory below a branch's in which its changes are found.
    fn scanned(&self, dir: &Path) -> PathBuf;
}

/// The engines of a store.
pub(crate) struct Engines {
    overlay: OverlayEngine,
    copy: CopyEngine,
    /// Why overlays can't be mounted here, if so.
    no_overlay: Option<String>,
    choice: EngineChoice,
}

impl Engines {
    /// Tries what this host can do, with directories in `tmp`.
    pub(crate) fn probe(
        choice: EngineChoice,
        owner: Option<(u32, u32)>,
        tmp: &Path,
        mounts: &Path,
        released: &Arc<Released>,
    ) -> Self {
        let mut overlay = OverlayEngine::new(owner, mounts.to_owned(), Arc::clone(released));
        let no_overlay = overlay.probe(tmp).err();
        let copy = CopyEngine::new(owner, Arc::clone(released));
        Self { overlay, copy, no_overlay, choice }
    }

    /// The engine for new branches; the error says why the one that was asked for can't be had.
    pub(crate) fn chosen(&self) -> Result<&dyn Engine, &str> {
        match (self.choice, &self.no_overlay) {
            (EngineChoice::Copy, _) | (EngineChoice::Auto, Some(_)) => Ok(&self.copy),
            (EngineChoice::Auto | EngineChoice::Overlay, None) => Ok(&self.overlay),
            (EngineChoice::Overlay, Some(reason)) => Err(reason),
        }
    }

    /// The engine of a branch that exists.
    pub(crate) fn of(&self, word: &str) -> &dyn Engine {
        if word == "copy" { &self.copy } else { &self.overlay }
    }

    /// Why overlays can't be mounted on this host.
    pub(crate) fn no_overlay(&self) -> Option<&str> {
        self.no_overlay.as_deref()
    }

    /// Mounts layers that nothing is written to, topmost first.
    pub(crate) fn mount_layers(&self, lowers: &[PathBuf]) -> io::Result<Mounted> {
        self.overlay.mount_over(lowers, None)
    }

    /// Mounts a sealed layer as if it were a branch's, to repair it.
    pub(crate) fn mount_sealed(&self, layer: &Path, work: &Path, lowers: &[PathBuf]) -> io::Result<Mounted> {
        self.overlay.mount_over(lowers, Some((layer, work)))
    }
}

/// Tells those who wait that a mount has ended.
#[derive(Default)]
pub(crate) struct Released {
    count: Mutex<u64>,
    changed: Condvar,
}

impl Released {
    fn tell(&self) {
        *self.count.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.changed.notify_all();
    }

    /// Waits until `done`, which is asked again whenever a mount has ended, or until `limit`. Returns what it said last.
    pub(crate) fn wait_until(&self, limit: std::time::Duration, mut done: impl FnMut() -> bool) -> bool {
        let count = self.count.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_timeout_while(count, limit, |_| !done());
        drop(waited);
        done()
    }
}

/// The root of a mounted branch. The mount lives as long as any clone of this.
#[derive(Clone)]
pub struct Root(pub(crate) Arc<Mounted>);

impl Root {
    /// A descriptor of the branch's root directory, for operations beneath it.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.fd()
    }

    /// A detached mount of the branch, `nosuid` and `nodev`, for another mount namespace. It shows the same files and
    /// lives on its own: end all of them before the branch is forked or dropped.
    pub fn mount_clone(&self) -> io::Result<OwnedFd> {
        self.0.mount_clone()
    }
}

/// A mounted branch.
pub(crate) struct Mounted {
    /// Given up first: a mount must have no user when it is told to have ended.
    fd: Option<OwnedFd>,
    how: How,
    released: Arc<Released>,
    /// Set when the kernel has ended the mount.
    ended: Arc<AtomicBool>,
}

enum How {
    /// A directory of the state directory as it is.
    Dir,
    /// A detached overlay; with where it has been attached, because the kernel can't clone it otherwise.
    Overlay { mounts: PathBuf, attached: Mutex<Option<PathBuf>> },
}

impl Mounted {
    fn new(fd: OwnedFd, how: How, released: &Arc<Released>) -> Self {
        Self { fd: Some(fd), how, released: Arc::clone(released), ended: Arc::default() }
    }

    pub(crate) fn ended(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.ended)
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        #[expect(clippy::expect_used, reason = "only drop takes it")]
        self.fd.as_ref().expect("a mount holds its descriptor until it is dropped").as_fd()
    }

    fn mount_clone(&self) -> io::Result<OwnedFd> {
        match (&self.how, sys::mount::clone(self.fd())) {
            (How::Dir, clone) => {
                let clone = clone?;
                sys::mount::restrict(clone.as_fd())?;
                Ok(clone)
            }
            (How::Overlay { mounts, attached }, Err(error))
                if error.raw_os_error() == Some(rustix::io::Errno::INVAL.raw_os_error()) =>
            {
                self.clone_attached(mounts, attached)
            }
            (How::Overlay { .. }, clone) => clone,
        }
    }

    /// Before Linux 6.15 a detached mount can't be cloned: it is attached in this process's own mount namespace first.
    fn clone_attached(&self, mounts: &Path, attached: &Mutex<Option<PathBuf>>) -> io::Result<OwnedFd> {
        let mut attached = attached.lock().unwrap_or_else(PoisonError::into_inner);
        if attached.is_none() {
            let target = overlay::mount_point(mounts)?;
            sys::mount::attach(self.fd(), &target).inspect_err(|_| drop(std::fs::remove_dir(&target)))?;
            *attached = Some(target);
        }
        sys::mount::clone(self.fd())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        drop(self.fd.take());
        if let How::Overlay { attached, .. } = &mut self.how
            && let Some(target) = attached.get_mut().unwrap_or_else(PoisonError::into_inner).take()
        {
            overlay::unmount(&target);
        }
        self.ended.store(true, Ordering::Release);
        self.released.tell();
    }
}

#[cfg(test)]
pub(crate) mod tests;
