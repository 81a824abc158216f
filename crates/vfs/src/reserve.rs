//! A file that keeps some of the disk for when it is full, so that what makes room can be recorded. Touches that file alone.

use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use proto::error::{Code, Coded};
use rustix::fs::FallocateFlags;

use crate::store::Store;

const NAME: &str = "reserve";
/// Enough to record some drops.
const BYTES: u64 = 4 << 20;
/// A disk with less than so many times as much has none to spare.
const PLENTY: u64 = 2;

/// Makes it, where there is plenty of room.
pub(crate) fn keep(state_dir: &Path) {
    if let Err(error) = try_keep(state_dir) {
        tracing::warn!(%error, "nothing can be kept in reserve for a full disk");
    }
}

fn try_keep(state_dir: &Path) -> io::Result<()> {
    let path = state_dir.join(NAME);
    let disk = rustix::fs::statvfs(state_dir)?;
    let there = std::fs::symlink_metadata(&path).map_or(0, |meta| meta.len());
    if there >= BYTES || disk.f_bavail.saturating_mul(disk.f_frsize) < BYTES * PLENTY {
        return Ok(());
    }
    let file = File::options().write(true).create(true).truncate(false).mode(0o600).open(&path)?;
    match rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, BYTES) {
        // On such a file system it can't be had.
        Err(rustix::io::Errno::OPNOTSUPP) => std::fs::remove_file(&path),
        done => Ok(done?),
    }
}

/// Gives it up if the disk is full, so that a runner can start that is to make room.
pub fn release_reserve_to_start(state_dir: &Path) {
    let full = |disk: rustix::fs::StatVfs| disk.f_bavail.saturating_mul(disk.f_frsize) < BYTES / 4;
    if rustix::fs::statvfs(state_dir).is_ok_and(full) && !crate::is_foreign(state_dir) {
        release(state_dir);
    }
}

/// The next start makes it again. `false` if there is none.
fn release(state_dir: &Path) -> bool {
    std::fs::remove_file(state_dir.join(NAME)).is_ok()
}

impl Store {
    /// Does something that makes room: once more with the reserve if the disk is too full to record it.
    pub(crate) fn making_room<T, E: Coded>(&self, work: impl Fn() -> Result<T, E>) -> Result<T, E> {
        match work() {
            Err(error) if error.code() == Code::NoSpace && release(self.dir()) => {
                tracing::warn!("the disk is full: the reserve is used up");
                work()
            }
            done => done,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::sync::Arc;

    use proto::verify::InlineFile;
    use testkit::{Need, have, temp_dir};

    use super::*;
    use crate::{Actor, EngineChoice, StoreOptions, SystemClock};

    #[test]
    fn a_full_disk_keeps_nobody_from_making_room() {
        if !have(Need::Root) {
            return;
        }
        testkit::private_mounts("reserve::tests::a_full_disk_keeps_nobody_from_making_room", || {
            let dir = temp_dir("full");
            let mut mount = testkit::process::command("mount");
            mount.args(["-t", "tmpfs", "-o", "size=48m", "tmpfs"]).arg(dir.path());
            testkit::process::run(&mut mount);
            let options =
                || StoreOptions { engine: EngineChoice::Copy, owner: None, clock: Arc::new(SystemClock) };
            let store = Store::open(dir.path(), options()).unwrap();
            let file = |text: &str| InlineFile {
                path: "a".parse().unwrap(),
                content: proto::path::JsonBytes::new(text.as_bytes()),
                executable: false,
            };
            let branches: Vec<_> = ["one", "two"]
                .map(|text| {
                    let base = store.freeze_files(&[file(text)]).unwrap();
                    store.create_branch(&base.id, None, &Actor::cli(7)).unwrap().id
                })
                .into();
            let mut rest = File::create(dir.path().join("tmp/rest")).unwrap();
            while rest.write_all(&[1; 4096]).is_ok() {}
            for branch in &branches {
                store.drop_branch(branch, &Actor::cli(7)).unwrap();
            }
            assert_eq!(store.branches().unwrap().len(), 0);
            assert!(!dir.path().join(NAME).exists(), "it was needed");
            store.base_gc().unwrap();
            drop((rest, store));
            let store = Store::open(dir.path(), options()).unwrap();
            assert_eq!((store.branches().unwrap().len(), store.bases().unwrap().len()), (0, 0));
            assert_eq!(std::fs::metadata(dir.path().join(NAME)).unwrap().len(), BYTES);
        });
    }
}
