//! What a hand's processes hold and have written, read from the host's `/proc`. Reads only, and opens nothing of a hand's.

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use crate::cgroup::Group;

/// The processes of a group, or without one of the pid namespace in which `first` is.
pub(crate) fn pids(group: Option<&Group>, first: Option<i32>) -> Vec<i32> {
    if let Some(group) = group {
        return group.pids();
    }
    let namespace = |pid: i32| fs::read_link(format!("/proc/{pid}/ns/pid")).ok();
    let Some(wanted) = first.and_then(namespace) else { return Vec::new() };
    let Ok(all) = fs::read_dir("/proc") else { return Vec::new() };
    let all = all.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    all.filter(|pid| namespace(*pid).as_ref() == Some(&wanted)).collect()
}

/// Disk space of files of the file system `dev` that these processes have open and that have no name any more.
pub(crate) fn unlinked_bytes(pids: &[i32], dev: u64) -> u64 {
    let mut seen = HashSet::new();
    let mut total = 0;
    for pid in pids {
        // It may have ended.
        let Ok(open) = fs::read_dir(format!("/proc/{pid}/fd")) else { continue };
        for entry in open.flatten() {
            // Through the link, to the open file itself: it need have no name for that.
            let Ok(file) = fs::metadata(entry.path()) else { continue };
            if file.is_file() && file.nlink() == 0 && file.dev() == dev && seen.insert(file.ino()) {
                total += file.blocks() * 512;
            }
        }
    }
    total
}

/// Bytes that these processes, and those of their children that have ended, sent to disks.
pub(crate) fn written_bytes(pids: &[i32]) -> u64 {
    pids.iter().filter_map(|pid| written_by(&Path::new("/proc").join(pid.to_string()))).sum()
}

fn written_by(process: &Path) -> Option<u64> {
    let text = fs::read_to_string(process.join("io")).ok()?;
    text.lines().find_map(|line| line.strip_prefix("write_bytes: "))?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn a_file_without_a_name_is_counted_once_and_one_with_a_name_is_not() {
        let dir = tempfile::tempdir().expect("a directory");
        let dev = fs::metadata(dir.path()).expect("a directory").dev();
        let me = [i32::try_from(std::process::id()).expect("a pid")];
        let mut file = fs::File::create(dir.path().join("f")).expect("a file");
        file.write_all(&vec![1; 1 << 20]).and_then(|()| file.sync_all()).expect("a write");
        let before = unlinked_bytes(&me, dev);
        let again = file.try_clone().expect("a descriptor");
        fs::remove_file(dir.path().join("f")).expect("a removal");
        assert_eq!(unlinked_bytes(&me, dev) - before, 1 << 20);
        assert!(written_bytes(&me) >= 1 << 20);
        drop((file, again));
    }
}
