//! Where control groups are mounted, and where this process stands in each hierarchy.

use std::fs;
use std::path::{Path, PathBuf};

/// A mounted hierarchy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mount {
    /// Version 2.
    pub unified: bool,
    /// Version 1: its controllers.
    pub controllers: Vec<String>,
    /// The directory of this process's own group.
    pub own: PathBuf,
    /// The directory that it is mounted at.
    pub top: PathBuf,
}

pub(super) fn read() -> Vec<Mount> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    parse(&mounts, &own)
}

/// `mountinfo` is described in proc(5): `ID PARENT DEV ROOT POINT OPTIONS … - TYPE SOURCE SUPER`.
fn parse(mountinfo: &str, own: &str) -> Vec<Mount> {
    let mut found = Vec::new();
    for line in mountinfo.lines() {
        let Some((before, after)) = line.split_once(" - ") else { continue };
        let (before, after): (Vec<&str>, Vec<&str>) =
            (before.split(' ').collect(), after.split(' ').collect());
        let (Some(root), Some(point), Some(kind)) = (before.get(3), before.get(4), after.first()) else {
            continue;
        };
        let unified = *kind == "cgroup2";
        if !unified && *kind != "cgroup" {
            continue;
        }
        let options = after.get(2).copied().unwrap_or_default();
        let controllers: Vec<String> =
            if unified { Vec::new() } else { options.split(',').map(str::to_owned).collect() };
        let path = own.lines().find_map(|line| {
            let mut parts = line.splitn(3, ':');
            let (_, names, path) = (parts.next()?, parts.next()?, parts.next()?);
            let ours = if unified {
                names.is_empty()
            } else {
                !names.is_empty() && names.split(',').all(|name| controllers.iter().any(|have| have == name))
            };
            ours.then_some(path)
        });
        let Some(path) = path else { continue };
        let below = Path::new(path).strip_prefix(root).unwrap_or(Path::new(""));
        let top = PathBuf::from(point);
        found.push(Mount { unified, controllers, own: top.join(below), top });
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(mountinfo: &str, own: &str, want: &[(&str, &str)]) {
        let got = parse(mountinfo, own);
        let got: Vec<(String, String)> = got
            .iter()
            .map(|mount| {
                let kind = if mount.unified { "2".into() } else { mount.controllers.join(",") };
                (kind, mount.own.display().to_string())
            })
            .collect();
        let got: Vec<(&str, &str)> = got.iter().map(|(kind, own)| (kind.as_str(), own.as_str())).collect();
        assert_eq!(got, want);
    }

    #[test]
    fn a_unified_host() {
        check(
            "29 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n22 1 8:1 / / rw - ext4 /dev/sda rw",
            "0::/user.slice/user-1000.slice/session-2.scope\n",
            &[("2", "/sys/fs/cgroup/user.slice/user-1000.slice/session-2.scope")],
        );
    }

    #[test]
    fn separate_and_joint_hierarchies() {
        check(
            "1 0 0:1 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
             2 0 0:2 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
             3 0 0:3 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw",
            "5:memory:/job/7\n4:cpu,cpuacct:/\n0::/\n",
            &[
                ("rw,memory", "/sys/fs/cgroup/memory/job/7"),
                ("rw,cpu,cpuacct", "/sys/fs/cgroup/cpu,cpuacct/"),
                ("2", "/sys/fs/cgroup/unified/"),
            ],
        );
    }

    #[test]
    fn a_container_sees_its_own_part() {
        check(
            "1 0 0:1 /docker/abc /sys/fs/cgroup/pids ro - cgroup cgroup rw,pids",
            "7:pids:/docker/abc/x\n",
            &[("rw,pids", "/sys/fs/cgroup/pids/x")],
        );
    }
}
