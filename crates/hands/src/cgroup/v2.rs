//! Version 2: one directory per hand, below a directory whose controllers are enabled for its children.

use std::fs::{self, File};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use policy::Limits;
use rustix::io::Errno;

use super::mounts::Mount;
use super::{CgroupError, Controllers, Held, cpu_list, field, number, set};
use crate::limits::{CGROUP_ASIDE_ROUNDS, CGROUP_PROCS_MAX, CPU_PERIOD_US, HAND_PIDS};

const WANTED: [&str; 4] = ["cpu", "cpuset", "memory", "pids"];
/// Where the processes are that stood in a group which the runner divides.
const ASIDE: &str = "tendon-aside";

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
    /// Tries the own group and those above it that were given to this user, the nearest first, then the top, which is
    /// root's. The place must bring at least one controller.
    pub fn find(mounts: &[Mount], name: &str, tried: &mut Vec<String>) -> Option<Self> {
        let Some(mount) = mounts.iter().find(|mount| mount.unified) else {
            tried.push("cgroup2: not mounted".into());
            return None;
        };
        let up = mount.own.ancestors().take_while(|dir| dir.starts_with(&mount.top));
        let given: Vec<&Path> = up.filter(|dir| is_delegated(dir)).collect();
        if given.is_empty() {
            tried.push(format!("cgroup2: {} is not delegated to this user", mount.own.display()));
        }
        let top = mount.top.as_path();
        let places = given.iter().map(|dir| (*dir, true)).chain(
            // A part of the tree that a container sees as its whole.
            (!given.contains(&top)).then_some((top, false)),
        );
        for (parent, ours) in places {
            match Self::at(parent, name, ours) {
                Ok(found) => return Some(found),
                Err(error) => tried.push(format!("cgroup2: {}: {error}", parent.display())),
            }
        }
        None
    }

    fn at(parent: &Path, name: &str, ours: bool) -> io::Result<Self> {
        let dir = parent.join(name);
        fs::create_dir(&dir)?;
        let found = pass_on(parent, ours).and_then(|()| {
            pass_on(&dir, false)?;
            Ok(Parent { controllers: controllers(&dir)?, dir: dir.clone() })
        });
        found.inspect_err(|_| {
            let _ = fs::remove_dir(&dir);
        })
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

/// Enables for the children of a group what it has of the controllers that we use. That takes a group without processes of
/// its own, but for the topmost one of the machine: the kernel would refuse some controllers, and by the others turn the
/// group into one of threads. In a group that is ours they are moved to a child of it.
fn pass_on(dir: &Path, ours: bool) -> io::Result<()> {
    let topmost = !dir.join("cgroup.type").exists();
    for _ in 0..CGROUP_ASIDE_ROUNDS {
        let inside = fs::read_to_string(dir.join("cgroup.procs"))?;
        if topmost || inside.is_empty() {
            return enable(dir);
        }
        if !ours {
            return Err(io::Error::other("it has processes, and was not delegated"));
        }
        // Who is forked meanwhile is moved in the next round.
        move_aside(dir, &inside)?;
    }
    Err(io::ErrorKind::ResourceBusy.into())
}

/// Enables each controller by itself, since one that can't be must not stop the others. An error: none is enabled.
fn enable(dir: &Path) -> io::Result<()> {
    let has = fs::read_to_string(dir.join("cgroup.controllers"))?;
    let mut failed = io::Error::other("it has none of the controllers cpu, memory and pids");
    for controller in WANTED.iter().filter(|name| listed(&has, name)) {
        if let Err(error) = fs::write(dir.join("cgroup.subtree_control"), format!("+{controller}")) {
            failed = error;
        }
    }
    let enabled = controllers(dir)?;
    if enabled.memory || enabled.pids || enabled.cpu { Ok(()) } else { Err(failed) }
}

/// What a group passes on to its children.
fn controllers(dir: &Path) -> io::Result<Controllers> {
    let enabled = fs::read_to_string(dir.join("cgroup.subtree_control"))?;
    Ok(Controllers {
        cpu: listed(&enabled, "cpu"),
        cpuset: listed(&enabled, "cpuset"),
        memory: listed(&enabled, "memory"),
        pids: listed(&enabled, "pids"),
        // Every group but the topmost has it, and no controller is needed.
        freezer: true,
    })
}

fn listed(names: &str, name: &str) -> bool {
    names.split_ascii_whitespace().any(|have| have == name)
}

/// Moves the processes of a group into a child, which stays as long as they do: this process is one of them.
fn move_aside(dir: &Path, inside: &str) -> io::Result<()> {
    let aside = dir.join(ASIDE);
    match fs::create_dir(&aside) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        Ok(()) | Err(_) => {}
    }
    for pid in inside.lines().take(CGROUP_PROCS_MAX) {
        match fs::write(aside.join("cgroup.procs"), pid) {
            // It has ended.
            Err(error) if error.raw_os_error() == Some(Errno::SRCH.raw_os_error()) => {}
            done => done?,
        }
    }
    Ok(())
}

/// Whether a group was given to this user to divide further. systemd marks those of units with `Delegate=yes` (since version
/// 251 so that everybody can read it). Without a mark, the topmost one that a user owns was given to that user by somebody.
fn is_delegated(dir: &Path) -> bool {
    let mut value = [0u8; 8];
    let marks = ["user.delegate", "trusted.delegate"];
    let marked = marks
        .iter()
        .any(|mark| rustix::fs::getxattr(dir, *mark, &mut value).is_ok_and(|size| value[..size] == *b"1"));
    let user = rustix::process::geteuid();
    let owns = |dir: &Path| fs::metadata(dir).is_ok_and(|found| found.uid() == user.as_raw());
    owns(dir) && (marked || (!user.is_root() && !dir.parent().is_some_and(owns)))
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

    /// Whether that could be done.
    pub fn memory_peak_reset(&self) -> bool {
        let file = self.peak.as_ref().map(|peak| peak.lock().unwrap_or_else(PoisonError::into_inner));
        file.is_some_and(|mut file| file.write_all(b"reset").is_ok())
    }

    pub fn held(&self) -> Option<Held> {
        let used = ["anon", "shmem"].map(|key| field(&self.dir, "memory.stat", key).unwrap_or(0));
        let cache = number(&self.dir, "memory.current")?.saturating_sub(used.iter().sum());
        Some(Held { cache, full: field(&self.dir, "memory.events", "max")? })
    }

    pub fn oom_kills(&self) -> u64 {
        field(&self.dir, "memory.events", "oom_kill").unwrap_or(0)
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
        write("memory.peak", "4096\n");
        write("cgroup.freeze", "1\n");
        write("cgroup.events", "populated 1\nfrozen 1\n");
        let peak = File::open(dir.path().join("memory.peak")).ok().map(Mutex::new);
        let group = Group { dir: dir.path().to_owned(), peak };
        assert_eq!(group.oom_kills(), 4);
        assert_eq!((group.memory_peak(), group.memory_peak()), (Some(4096), Some(4096)));
        assert!(group.is_frozen().unwrap());
        write("memory.current", "1000000\n");
        write("memory.stat", "anon 200000\nfile 750000\nshmem 50000\n");
        assert_eq!(group.held(), None, "the file of events has no `max` here");
        write("memory.events", "low 0\nhigh 2\nmax 3\n");
        assert_eq!(group.held(), Some(Held { cache: 750_000, full: 3 }));
    }
}
