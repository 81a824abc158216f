//! Version 1: one hierarchy per controller, each with its own directory for a hand.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use policy::Limits;

use super::mounts::Mount;
use super::{CgroupError, Controllers, Held, cpu_list, field, number, set};
use crate::limits::{CPU_PERIOD_US, HAND_PIDS};

const WANTED: [&str; 5] = ["memory", "cpu", "cpuset", "pids", "freezer"];

/// The runner's directory in each hierarchy that it can use, by controller. Several controllers may share one.
#[derive(Clone, Debug, Default)]
pub(super) struct Parent {
    places: Vec<(&'static str, PathBuf)>,
}

/// A hand's directories.
#[derive(Debug)]
pub(super) struct Group {
    places: Vec<(&'static str, PathBuf)>,
}

impl Parent {
    pub fn find(mounts: &[Mount], name: &str, tried: &mut Vec<String>) -> Option<Self> {
        let mut places: Vec<(&'static str, PathBuf)> = Vec::new();
        if mounts.iter().all(|mount| mount.unified) {
            tried.push("no hierarchy of version 1 is mounted".into());
            return None;
        }
        for controller in WANTED {
            let mount = mounts.iter().find(|mount| mount.controllers.iter().any(|have| have == controller));
            let Some(mount) = mount else {
                tried.push(format!("{controller}: no hierarchy of version 1 is mounted"));
                continue;
            };
            for parent in [&mount.own, &mount.top] {
                let dir = parent.join(name);
                match make(controller, &dir) {
                    Ok(()) => {
                        places.push((controller, dir));
                        break;
                    }
                    Err(error) => tried.push(format!("{controller}: {}: {error}", dir.display())),
                }
            }
        }
        (!places.is_empty()).then_some(Parent { places })
    }

    pub fn controllers(&self) -> Controllers {
        let has = |controller| self.places.iter().any(|(name, _)| *name == controller);
        Controllers {
            cpu: has("cpu"),
            cpuset: has("cpuset"),
            memory: has("memory"),
            pids: has("pids"),
            freezer: has("freezer"),
        }
    }

    pub fn dirs(&self) -> Vec<PathBuf> {
        unique(&self.places).into_iter().map(Path::to_owned).collect()
    }

    pub fn create(&self, hand: &str, limits: &Limits, cpus: &[usize]) -> Result<Group, CgroupError> {
        let places: Vec<_> = self.places.iter().map(|(name, dir)| (*name, dir.join(hand))).collect();
        let group = Group { places };
        group.fill(limits, cpus).inspect_err(|_| {
            for dir in group.dirs() {
                let _ = fs::remove_dir(dir);
            }
        })?;
        Ok(group)
    }
}

/// Makes a directory; a new one of `cpuset` takes nobody until it has CPUs and memory nodes.
fn make(controller: &str, dir: &Path) -> io::Result<()> {
    match fs::create_dir(dir) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        Ok(()) | Err(_) => {}
    }
    if controller == "cpuset" {
        let parent = dir.parent().unwrap_or(dir);
        for file in ["cpuset.cpus", "cpuset.mems"] {
            fs::write(dir.join(file), fs::read(parent.join(file))?)?;
        }
    }
    Ok(())
}

impl Group {
    fn fill(&self, limits: &Limits, cpus: &[usize]) -> Result<(), CgroupError> {
        for (controller, dir) in &self.places {
            make(controller, dir).map_err(|source| CgroupError::File { path: dir.clone(), source })?;
        }
        if let Some(dir) = self.dir("memory") {
            set(dir, "memory.limit_in_bytes", limits.memory_bytes_max)?;
            // Missing where swap is not accounted.
            let _ = set(dir, "memory.memsw.limit_in_bytes", limits.memory_bytes_max);
            let _ = set(dir, "memory.swappiness", 0);
        }
        if let Some(dir) = self.dir("pids") {
            set(dir, "pids.max", limits.pids_max.saturating_add(HAND_PIDS))?;
        }
        if let Some(dir) = self.dir("cpu") {
            set(dir, "cpu.cfs_period_us", CPU_PERIOD_US)?;
            set(dir, "cpu.cfs_quota_us", u64::from(limits.cpu_milli) * CPU_PERIOD_US / 1000)?;
        }
        if let Some(dir) = self.dir("cpuset").filter(|_| !cpus.is_empty()) {
            set(dir, "cpuset.cpus", cpu_list(cpus))?;
        }
        Ok(())
    }

    fn dir(&self, controller: &str) -> Option<&Path> {
        self.places.iter().find(|(name, _)| *name == controller).map(|(_, dir)| dir.as_path())
    }

    pub fn dirs(&self) -> Vec<&Path> {
        unique(&self.places)
    }

    pub fn memory_peak(&self) -> Option<u64> {
        number(self.dir("memory")?, "memory.max_usage_in_bytes")
    }

    /// Whether that could be done.
    pub fn memory_peak_reset(&self) -> bool {
        self.dir("memory").is_some_and(|dir| set(dir, "memory.max_usage_in_bytes", 0).is_ok())
    }

    pub fn held(&self) -> Option<Held> {
        let dir = self.dir("memory")?;
        let used = ["total_rss", "total_shmem"].map(|key| field(dir, "memory.stat", key).unwrap_or(0));
        let cache = number(dir, "memory.usage_in_bytes")?.saturating_sub(used.iter().sum());
        Some(Held { cache, full: number(dir, "memory.failcnt")? })
    }

    pub fn oom_kills(&self) -> u64 {
        self.dir("memory").and_then(|dir| field(dir, "memory.oom_control", "oom_kill")).unwrap_or(0)
    }

    pub fn set_frozen(&self, frozen: bool) -> io::Result<()> {
        let dir = self.dir("freezer").ok_or(io::ErrorKind::Unsupported)?;
        fs::write(dir.join("freezer.state"), if frozen { "FROZEN" } else { "THAWED" })
    }

    pub fn is_frozen(&self) -> io::Result<bool> {
        let dir = self.dir("freezer").ok_or(io::ErrorKind::Unsupported)?;
        Ok(fs::read_to_string(dir.join("freezer.state"))?.trim() == "FROZEN")
    }
}

fn unique<'a>(places: &'a [(&'static str, PathBuf)]) -> Vec<&'a Path> {
    let mut dirs: Vec<&Path> = places.iter().map(|(_, dir)| dir.as_path()).collect();
    dirs.sort_unstable();
    dirs.dedup();
    dirs
}
