//! Whether a file's times tell of every write to it. A file that is mapped is written to without a system call: a file system
//! notes a time when a page becomes dirty, or, if it is one of memory, not at all.

use std::path::Path;

/// File systems that note a time when a mapped page becomes dirty: ext4, XFS, Btrfs, F2FS, bcachefs, ZFS.
const TRUSTED: [u64; 6] = [0xEF53, 0x5846_5342, 0x9123_683E, 0xF2F5_2010, 0xCA45_1A4E, 0x2FC1_2FC1];
/// A page stays dirty at most about so long, with the kernel's defaults.
const DIRTY_NS_MIN: i64 = 60_000_000_000;

/// See the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Times {
    /// Files that look as they did are as they were, once nobody writes to them any more.
    pub(crate) trusted: bool,
    /// While somebody may, so are those that did not change for so long.
    pub(crate) dirty_ns: i64,
}

impl Times {
    /// Of the file system that `dir` is on.
    pub(crate) fn of(dir: &Path) -> Self {
        let kind = rustix::fs::statfs(dir).map_or(0, |stat| stat.f_type.cast_unsigned() & 0xFFFF_FFFF);
        let centis = |name: &str| -> Option<i64> {
            std::fs::read_to_string(format!("/proc/sys/vm/{name}")).ok()?.trim().parse().ok()
        };
        Self {
            trusted: TRUSTED.contains(&kind),
            dirty_ns: dirty_ns(centis("dirty_expire_centisecs"), centis("dirty_writeback_centisecs")),
        }
    }
}

fn dirty_ns(expire: Option<i64>, every: Option<i64>) -> i64 {
    match (expire, every) {
        // Nothing is written back by age.
        (_, Some(0)) => i64::MAX,
        (Some(expire), Some(every)) => {
            DIRTY_NS_MIN.max(expire.saturating_add(every).saturating_mul(10_000_000 * 3 / 2))
        }
        (None, _) | (_, None) => i64::MAX,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::tests::{Fixture, options};
    use crate::{EngineChoice, Store};

    #[test]
    fn a_file_system_of_memory_is_not_trusted() {
        assert!(!Times::of(Path::new("/dev/shm")).trusted);
        assert!(!Times::of(Path::new("/proc")).trusted);
        assert!(!Times::of(Path::new("/nowhere")).trusted);
    }

    #[test]
    fn a_disk_that_writes_late_is_waited_for() {
        assert_eq!(dirty_ns(Some(3_000), Some(500)), DIRTY_NS_MIN);
        assert_eq!(dirty_ns(Some(60_000), Some(1_000)), 915_000_000_000);
        assert_eq!(dirty_ns(Some(3_000), Some(0)), i64::MAX);
        assert_eq!(dirty_ns(None, None), i64::MAX);
    }

    /// A page that was read through a mapping before it is written through it: a file system of memory notes no time.
    #[test]
    fn what_is_written_through_a_mapping_in_memory_is_found() {
        if !testkit::have_all(&[testkit::Need::Root, testkit::Need::Python]) {
            return;
        }
        testkit::user::private_mounts(
            "times::tests::what_is_written_through_a_mapping_in_memory_is_found",
            || {
                let dir = testkit::temp_dir("memory");
                let flags = rustix::mount::MountFlags::empty();
                rustix::mount::mount("tmpfs", dir.path(), "tmpfs", flags, c"size=64m").unwrap();
                for engine in [EngineChoice::Overlay, EngineChoice::Copy] {
                    let store =
                        Store::open(&dir.path().join(format!("{engine:?}")), options(engine)).unwrap();
                    assert!(store.slow_because().is_some());
                    let fixture = Fixture::with(store, engine, &[("a", "base")]);
                    let branch = fixture.create().id;
                    let at = fixture.at(&branch);
                    at.write("f", &"x".repeat(8192));
                    // Old enough for its identity to be kept, if any is.
                    std::thread::sleep(std::time::Duration::from_millis(50));
                    fixture.scan(&branch);
                    let script = "import mmap,os,sys\nf=os.open(sys.argv[1],os.O_RDWR)\nm=mmap.mmap(f,8192)\nm[0]\n\
                              before=os.stat(sys.argv[1]).st_ctime_ns\nm[0]=121\n\
                              assert os.stat(sys.argv[1]).st_ctime_ns==before";
                    let file = at
                        .join("f")
                        .to_str()
                        .unwrap()
                        .replace("/proc/self/", &format!("/proc/{}/", std::process::id()));
                    let written = testkit::process::command("python3").args(["-c", script, &file]).status();
                    assert!(written.unwrap().success(), "the file system notes a time after all");
                    assert!(fixture.scan(&branch).first_seq.is_some(), "{engine:?}");
                    fixture.check(&branch);
                    drop(at);
                    drop(fixture);
                }
                sys::mount::detach(dir.path()).unwrap();
            },
        );
    }
}
