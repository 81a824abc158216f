//! Version 2: one directory per hand, below a directory whose controllers are enabled for its children.

use std::fs::{self, File};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use policy::Limits;

use super::mounts::Mount;
use super::{CgroupError, Controllers, cpu_list, field, number, set};
use crate::limits::{CPU_PERIOD_US, HAND_PIDS};

/// The runner's directory.
#[derive(Clone, Debug)]
pub(super) struct Parent {
    pub dir: PathBuf,
    pub controllers: Controllers,
}

/// A hand's directory.
#[derive(Debug)]
pub(super) struct Group {
    dir: PathBuf,
    /// Since Linux 6.12 each open file of `memory.peak` has a measurement of its own.
    peak: Option<Mutex<File>>,
}

impl Parent {
    /// The own group (where a service manager delegated it), else the top (as root). It must bring at least one controller.
    pub fn find(mounts: &[Mount], name: &str, tried: &mut Vec<String>) -> Option<Self> {
        let Some(mount) = mounts.iter().find(|mount| mount.unified) else {
            tried.push("cgroup2: not mounted".into());
            return None;
        };
        let mut places = vec![&mount.own, &mount.top];
        places.dedup();
        for parent in places {
            match Self::at(parent, name, parent != &mount.top) {
                Ok(found) if found.controllers.memory || found.controllers.pids || found.controllers.cpu => {
                    return Some(found);
                }
                Ok(found) => {
                    let _ = fs::remove_dir(&found.dir);
                    tried.push(format!("cgroup2: {}: no controller can be enabled", parent.display()));
                }
                Err(error) => tried.push(format!("cgroup2: {}: {error}", parent.display())),
            }
        }
        None
    }

    fn at(parent: &Path, name: &str, may_move: bool) -> io::Result<Self> {
        let dir = parent.join(name);
        match fs::create_dir(&dir) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            Ok(()) | Err(_) => {}
        }
        let delegated = xattr_delegate(parent);
        if may_move && alone_in(parent) && delegated {
            // A group with processes can't pass controllers on: the runner steps aside into a group of its own.
            let aside = parent.join(format!("{name}-runner"));
            let _ = fs::create_dir(&aside);
            let _ = fs::write(aside.join("cgroup.procs"), "0");
        }
        for place in [parent, &dir] {
            for controller in ["cpu", "cpuset", "memory", "pids"] {
                // What is not available or not allowed is simply not there afterwards.
                let _ = fs::write(place.join("cgroup.subtree_control"), format!("+{controller}"));
            }
        }
        let enabled = fs::read_to_string(dir.join("cgroup.subtree_control"))?;
        let has = |controller: &str| enabled.split_ascii_whitespace().any(|name| name == controller);
        let controllers = Controllers {
            cpu: has("cpu"),
            cpuset: has("cpuset"),
            memory: has("memory"),
            pids: has("pids"),
            freezer: dir.join("cgroup.freeze").exists(),
        };
        Ok(Parent { dir, controllers })
    }

    pub fn create(&self, hand: &str, limits: &Limits, cpus: &[usize]) -> Result<Group, CgroupError> {
        let dir = self.dir.join(hand);
        fs::create_dir(&dir).map_err(|source| CgroupError::File { path: dir.clone(), source })?;
        self.fill(&dir, limits, cpus).inspect_err(|_| {
            let _ = fs::remove_dir(&dir);
        })?;
        let peak = File::options().read(true).write(true).open(dir.join("memory.peak"));
        let peak = peak.or_else(|_| File::open(dir.join("memory.peak"))).ok().map(Mutex::new);
        Ok(Group { dir, peak })
    }

    fn fill(&self, dir: &Path, limits: &Limits, cpus: &[usize]) -> Result<(), CgroupError> {
        if self.controllers.memory {
            set(dir, "memory.max", limits.memory_bytes_max)?;
            // Missing where there is no swap.
            let _ = set(dir, "memory.swap.max", 0);
        }
        if self.controllers.pids {
            set(dir, "pids.max", limits.pids_max.saturating_add(HAND_PIDS))?;
        }
        if self.controllers.cpu {
            let quota = u64::from(limits.cpu_milli) * CPU_PERIOD_US / 1000;
            set(dir, "cpu.max", format!("{quota} {CPU_PERIOD_US}"))?;
        }
        if self.controllers.cpuset && !cpus.is_empty() {
            set(dir, "cpuset.cpus", cpu_list(cpus))?;
        }
        Ok(())
    }
}

/// systemd marks what it has given away (`Delegate=yes`).
fn xattr_delegate(dir: &Path) -> bool {
    let mut value = [0u8; 8];
    let marks = ["user.delegate", "trusted.delegate"];
    marks
        .iter()
        .any(|mark| rustix::fs::getxattr(dir, *mark, &mut value).is_ok_and(|size| value[..size] == *b"1"))
}

/// Whether this process is the only one of the group.
fn alone_in(dir: &Path) -> bool {
    let own = std::process::id().to_string();
    fs::read_to_string(dir.join("cgroup.procs")).is_ok_and(|text| text.lines().all(|line| line == own))
}

impl Group {
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub fn memory_peak(&self) -> Option<u64> {
        let mut file = self.peak.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner);
        let mut text = String::new();
        file.rewind().ok()?;
        file.read_to_string(&mut text).ok()?;
        text.trim().parse().ok()
    }

    pub fn memory_peak_reset(&self) {
        if let Some(peak) = &self.peak {
            let _ = peak.lock().unwrap_or_else(PoisonError::into_inner).write_all(b"reset");
        }
    }

    pub fn oom_kills(&self) -> u64 {
        field(&self.dir, "memory.events", "oom_kill").unwrap_or(0)
    }

    pub fn cpu_us(&self) -> Option<u64> {
        field(&self.dir, "cpu.stat", "usage_usec")
    }

    pub fn set_frozen(&self, frozen: bool) -> io::Result<()> {
        fs::write(self.dir.join("cgroup.freeze"), if frozen { "1" } else { "0" })
    }

    pub fn is_frozen(&self) -> io::Result<bool> {
        if number(&self.dir, "cgroup.freeze").is_none() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        Ok(field(&self.dir, "cgroup.events", "frozen") == Some(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory that looks like the kernel's, as far as files go.
    fn parent(dir: &Path) -> Parent {
        let all = Controllers { cpu: true, cpuset: true, memory: true, pids: true, freezer: true };
        Parent { dir: dir.to_owned(), controllers: all }
    }

    #[test]
    fn limits_are_written_as_the_kernel_reads_them() {
        let dir = tempfile::tempdir().unwrap();
        let limits = Limits {
            cpu_milli: 1500,
            memory_bytes_max: 1 << 30,
            pids_max: 100,
            disk_bytes_max: 0,
            wall_ms_max: 0,
        };
        let group = parent(dir.path()).create("h1", &limits, &[0, 3]).unwrap();
        let read = |file: &str| fs::read_to_string(group.dir().join(file)).unwrap();
        assert_eq!(read("cpu.max"), "150000 100000");
        assert_eq!(read("memory.max"), "1073741824");
        assert_eq!(read("memory.swap.max"), "0");
        assert_eq!(read("pids.max"), (100 + HAND_PIDS).to_string());
        assert_eq!(read("cpuset.cpus"), "0,3");
    }

    #[test]
    fn counters_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let write = |file: &str, text: &str| fs::write(dir.path().join(file), text).unwrap();
        write("memory.events", "low 0\nhigh 2\noom 3\noom_kill 4\noom_group_kill 0\n");
        write("cpu.stat", "usage_usec 1234\nuser_usec 1000\n");
        write("memory.peak", "4096\n");
        write("cgroup.freeze", "1\n");
        write("cgroup.events", "populated 1\nfrozen 1\n");
        let peak = File::open(dir.path().join("memory.peak")).ok().map(Mutex::new);
        let group = Group { dir: dir.path().to_owned(), peak };
        assert_eq!((group.oom_kills(), group.cpu_us()), (4, Some(1234)));
        assert_eq!((group.memory_peak(), group.memory_peak()), (Some(4096), Some(4096)));
        assert!(group.is_frozen().unwrap());
    }
}
