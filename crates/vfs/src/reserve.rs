//! A file that takes some of the disk so long as nobody needs it: on a full disk it is given up, so that what makes room can
//! be recorded first.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use rustix::fs::FallocateFlags;

use crate::store::Store;

/// As much as recording a removal takes at most; a 20th of a smaller disk.
const RESERVE_BYTES: u64 = 8 << 20;

/// Makes the file. A disk that has no room for it, or can't keep room for a file, has none.
pub(crate) fn make(path: &Path) {
    if let Err(error) = allocate(path) {
        tracing::warn!(%error, "no room can be kept for a full disk");
        let _ = std::fs::remove_file(path);
    }
}

fn allocate(path: &Path) -> io::Result<()> {
    let disk = rustix::fs::statvfs(path.parent().unwrap_or(path))?;
    let bytes = RESERVE_BYTES.min(disk.f_blocks.saturating_mul(disk.f_frsize) / 20);
    let file = File::options().write(true).create(true).truncate(false).mode(0o600).open(path)?;
    if file.metadata()?.len() == bytes {
        return Ok(());
    }
    file.set_len(0)?;
    Ok(rustix::fs::fallocate(file.as_fd(), FallocateFlags::empty(), 0, bytes)?)
}

impl Store {
    /// Does what makes room; once more, with the reserve given up, if the disk is too full to record it.
    pub(crate) fn making_room<T, E>(
        &self,
        work: impl Fn() -> Result<T, E>,
        is_full: impl Fn(&E) -> bool,
    ) -> Result<T, E> {
        let path = self.inner.layout.reserve();
        let done = match work() {
            Err(error) if is_full(&error) && std::fs::remove_file(&path).is_ok() => {
                tracing::warn!("the disk is full: what was kept for that is used");
                work()
            }
            done => done,
        };
        if done.is_ok() && !path.exists() {
            make(&path);
        }
        done
    }
}
