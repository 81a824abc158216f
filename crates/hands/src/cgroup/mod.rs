//! Control groups, version 2 or 1: what limits, measures, freezes and kills all processes of a hand together.
//!
//! A runner's groups are `PARENT/tendon-HASH-RUN/HAND`, HASH being of its state directory and RUN random: another runner's are
//! never touched, and a late warden does not touch those of the next run on the same state directory.

mod mounts;
mod v1;
mod v2;

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use policy::Limits;
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::limits::{CGROUP_KILL_ROUNDS, CGROUP_PROCS_MAX, CGROUP_REMOVE_ROUNDS};

/// Why a hand's group can't be made.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// A directory or file of the control group file system.
    #[error("the control group file {} can't be written", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// What the groups of a host can do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Controllers {
    /// Limit CPU time.
    pub cpu: bool,
    /// Pin to CPUs.
    pub cpuset: bool,
    /// Limit and measure memory.
    pub memory: bool,
    /// Limit processes.
    pub pids: bool,
    /// Stop and resume all processes at once.
    pub freezer: bool,
}

/// The place where a runner's groups are made.
#[derive(Clone, Debug)]
pub struct Cgroups {
    version: Option<Version>,
    /// Where a group was tried and why it failed, for doctor.
    pub tried: Vec<String>,
    /// What the names of all runs on this state directory begin with.
    prefix: String,
    places: Arc<Places>,
}

/// The runner's directories; they go when nobody can make or has a group there any more.
#[derive(Debug)]
struct Places(Vec<PathBuf>);

impl Drop for Places {
    fn drop(&mut self) {
        for place in &self.0 {
            // One that is not empty stays for the warden, or the next runner's sweep.
            let _ = fs::remove_dir(place);
        }
    }
}

#[derive(Clone, Debug)]
enum Version {
    V1(v1::Parent),
    V2(v2::Parent),
}

/// One hand's group. [`Group::remove`] it when its processes are gone.
#[derive(Debug)]
pub struct Group {
    kind: Kind,
    /// What it held when its memory's peak was last reset.
    held: Mutex<Held>,
    _places: Arc<Places>,
}

/// What a group holds besides the memory of its processes and what they keep in memory file systems.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Held {
    /// Bytes of cached files, mostly, which no process needs.
    cache: u64,
    /// How often it had no room, and the kernel looked for some.
    full: u64,
}

#[derive(Debug)]
enum Kind {
    V1(v1::Group),
    V2(v2::Group),
}

impl Cgroups {
    /// A name for the groups of this run on a state directory.
    pub fn name(state_dir: &Path) -> String {
        format!("{}{:08x}", runner_prefix(state_dir), random())
    }

    /// Every directory that [`Cgroups::find`] may make under a name: a warden that knows them before there is one misses none.
    pub fn candidates(name: &str) -> Vec<PathBuf> {
        let mounts = mounts::read();
        let above = mounts
            .iter()
            .flat_map(|mount| mount.own.ancestors().take_while(|dir| dir.starts_with(&mount.top)));
        above.map(|dir| dir.join(name)).collect()
    }

    /// Finds a place by making a group there, with a [`Cgroups::name`] of the state directory.
    pub fn find(state_dir: &Path, name: &str) -> Self {
        let prefix = runner_prefix(state_dir);
        let mounts = mounts::read();
        let mut tried = Vec::new();
        let version = v2::Parent::find(&mounts, name, &mut tried)
            .map(Version::V2)
            .or_else(|| v1::Parent::find(&mounts, name, &mut tried).map(Version::V1));
        let places = match &version {
            Some(Version::V2(parent)) => vec![parent.dir.clone()],
            Some(Version::V1(parent)) => parent.dirs(),
            None => Vec::new(),
        };
        Cgroups { version, tried, prefix, places: Arc::new(Places(places)) }
    }

    /// `cgroup2`, `cgroup1`, or nothing.
    pub fn mechanism(&self) -> Option<&'static str> {
        match &self.version {
            Some(Version::V2(_)) => Some("cgroup2"),
            Some(Version::V1(_)) => Some("cgroup1"),
            None => None,
        }
    }

    /// What they can do here.
    pub fn controllers(&self) -> Controllers {
        match &self.version {
            Some(Version::V2(parent)) => parent.controllers.clone(),
            Some(Version::V1(parent)) => parent.controllers(),
            None => Controllers::default(),
        }
    }

    /// Makes a hand's group with its limits; `cpus` are the CPUs that it is pinned to. `None`: there are no groups here.
    pub fn create(&self, hand: &str, limits: &Limits, cpus: &[usize]) -> Result<Option<Group>, CgroupError> {
        let kind = match &self.version {
            Some(Version::V2(parent)) => Kind::V2(parent.create(hand, limits, cpus)?),
            Some(Version::V1(parent)) => Kind::V1(parent.create(hand, limits, cpus)?),
            None => return Ok(None),
        };
        Ok(Some(Group { kind, held: Mutex::default(), _places: Arc::clone(&self.places) }))
    }

    /// Kills and removes what earlier runs on the same state directory left. Returns how many groups.
    pub fn sweep(&self) -> usize {
        let parents = self.places.0.iter().filter_map(|own| own.parent());
        let entries = parents.filter_map(|parent| fs::read_dir(parent).ok()).flatten().flatten();
        let others: Vec<PathBuf> = entries
            .filter(|entry| entry.file_name().to_string_lossy().starts_with(&self.prefix))
            .map(|entry| entry.path())
            .filter(|path| !self.places.0.contains(path))
            .collect();
        sweep(&others)
    }
}

/// Kills all processes of all groups below these directories and removes them all.
pub fn sweep(places: &[PathBuf]) -> usize {
    let groups: Vec<PathBuf> = places
        .iter()
        .flat_map(fs::read_dir)
        .flatten()
        .flatten()
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| entry.path())
        .collect();
    // A frozen process dies only when it is thawed, and with version 1 that is another hierarchy's matter.
    for group in &groups {
        let _ = fs::write(group.join("freezer.state"), "THAWED");
        let _ = fs::write(group.join("cgroup.freeze"), "0");
    }
    groups.iter().for_each(|group| kill_all(group));
    let removed = groups.iter().filter(|group| remove_dir(group)).count();
    for place in places {
        let _ = fs::remove_dir(place);
    }
    removed
}

impl Group {
    /// Opened files: a process of one thread that writes `0` into all of them is in the group.
    pub fn entrances(&self) -> Result<Vec<OwnedFd>, CgroupError> {
        let file = match &self.kind {
            // Writing to `cgroup.procs` waits until no process of the whole host is being made: 6 to 30 ms each. A thread
            // that moves itself waits for nobody.
            Kind::V1(_) => "tasks",
            Kind::V2(_) => "cgroup.procs",
        };
        self.dirs()
            .iter()
            .map(|dir| {
                let path = dir.join(file);
                rustix::fs::open(&path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())
                    .map_err(|error| CgroupError::File { path, source: error.into() })
            })
            .collect()
    }

    /// Highest memory since the last reset, or of the group's life where the kernel can't reset it. What files were cached
    /// before is not counted, unless the group was full since: then nobody knows how much of that made room.
    pub fn memory_peak(&self) -> Option<u64> {
        let peak = match &self.kind {
            Kind::V1(group) => group.memory_peak(),
            Kind::V2(group) => group.memory_peak(),
        }?;
        let held = *self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let full = self.held().is_none_or(|now| now.full > held.full);
        Some(if full { peak } else { peak.saturating_sub(held.cache) })
    }

    /// Starts a new measurement.
    pub fn memory_peak_reset(&self) {
        let held = self.held().unwrap_or_default();
        let reset = match &self.kind {
            Kind::V1(group) => group.memory_peak_reset(),
            Kind::V2(group) => group.memory_peak_reset(),
        };
        if reset {
            *self.held.lock().unwrap_or_else(PoisonError::into_inner) = held;
        }
    }

    fn held(&self) -> Option<Held> {
        match &self.kind {
            Kind::V1(group) => group.held(),
            Kind::V2(group) => group.held(),
        }
    }

    /// Processes that were killed because the group's memory ran out.
    pub fn oom_kills(&self) -> u64 {
        match &self.kind {
            Kind::V1(group) => group.oom_kills(),
            Kind::V2(group) => group.oom_kills(),
        }
    }

    /// Asks for all processes to be stopped, or to go on. Whether it is done tells [`Group::is_frozen`].
    pub fn set_frozen(&self, frozen: bool) -> io::Result<()> {
        match &self.kind {
            Kind::V1(group) => group.set_frozen(frozen),
            Kind::V2(group) => group.set_frozen(frozen),
        }
    }

    /// Whether every process stands still.
    pub fn is_frozen(&self) -> io::Result<bool> {
        match &self.kind {
            Kind::V1(group) => group.is_frozen(),
            Kind::V2(group) => group.is_frozen(),
        }
    }

    /// Its processes.
    pub fn pids(&self) -> Vec<i32> {
        let dirs = self.dirs();
        let text = dirs.first().and_then(|dir| fs::read_to_string(dir.join("cgroup.procs")).ok());
        text.unwrap_or_default().lines().filter_map(|line| line.parse().ok()).collect()
    }

    /// Kills every process in it. Blocks until it is empty, at most a few seconds.
    pub fn kill(&self) {
        let _ = self.set_frozen(false);
        if let Some(dir) = self.dirs().first() {
            kill_all(dir);
        }
    }

    /// Removes it. Blocks while dead processes leave it, at most a few seconds. False: something is left.
    pub fn remove(&self) -> bool {
        // Every one of them, also when one can't be removed.
        self.dirs().iter().filter(|dir| !remove_dir(dir)).count() == 0
    }

    fn dirs(&self) -> Vec<&Path> {
        match &self.kind {
            Kind::V1(group) => group.dirs(),
            Kind::V2(group) => vec![group.dir()],
        }
    }
}

/// `tendon-`, 16 hex digits of the state directory's canonical path, `-`.
fn runner_prefix(state_dir: &Path) -> String {
    use std::os::unix::ffi::OsStrExt as _;
    let path = fs::canonicalize(state_dir).unwrap_or_else(|_| state_dir.to_owned());
    let hash = blake3::hash(path.as_os_str().as_bytes());
    format!("tendon-{}-", &hash.to_hex()[..16])
}

fn random() -> u32 {
    let mut bytes = [0u8; 4];
    // Without it two runs may share a name, which costs no more than a late warden's confusion.
    let _ = getrandom::fill(&mut bytes);
    u32::from_ne_bytes(bytes)
}

/// SIGKILLs what is in the group until nothing is.
fn kill_all(dir: &Path) {
    if fs::write(dir.join("cgroup.kill"), "1").is_ok() {
        return;
    }
    let name = dir.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    for round in 0..CGROUP_KILL_ROUNDS {
        let Ok(text) = fs::read_to_string(dir.join("cgroup.procs")) else { return };
        if text.is_empty() {
            return;
        }
        for pid in text.lines().filter_map(|line| line.parse().ok()).take(CGROUP_PROCS_MAX) {
            kill_member(pid, &name);
        }
        std::thread::sleep(pause(round));
    }
}

/// By pidfd, and only when the process is still of the group: its number may be another's by now.
fn kill_member(pid: i32, group: &str) {
    let Some(pidfd) = Pid::from_raw(pid).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok()) else {
        return;
    };
    let member = fs::read_to_string(format!("/proc/{pid}/cgroup"))
        .is_ok_and(|text| text.lines().any(|line| line.rsplit('/').next() == Some(group)));
    if member {
        let _ = pidfd_send_signal(&pidfd, Signal::KILL);
    }
}

fn remove_dir(dir: &Path) -> bool {
    for round in 0..CGROUP_REMOVE_ROUNDS {
        match fs::remove_dir(dir) {
            Ok(()) => return true,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return true,
            Err(_) => std::thread::sleep(pause(round)),
        }
    }
    false
}

/// 1 ms at first, 50 ms at most: what is killed is usually gone at once.
fn pause(round: u32) -> Duration {
    Duration::from_millis((1 << round.min(6)).min(50))
}

/// Writes one control file.
fn set(dir: &Path, file: &str, value: impl ToString) -> Result<(), CgroupError> {
    let path = dir.join(file);
    fs::write(&path, value.to_string()).map_err(|source| CgroupError::File { path, source })
}

/// Reads a number; `max` and what is missing are none.
fn number(dir: &Path, file: &str) -> Option<u64> {
    fs::read_to_string(dir.join(file)).ok()?.trim().parse().ok()
}

/// Reads `KEY NUMBER` from a file of such lines.
fn field(dir: &Path, file: &str, key: &str) -> Option<u64> {
    let text = fs::read_to_string(dir.join(file)).ok()?;
    text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok())
}

/// `0,2,3`
fn cpu_list(cpus: &[usize]) -> String {
    cpus.iter().map(usize::to_string).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_belongs_to_one_state_directory() {
        assert_eq!(runner_prefix(Path::new("/a")), runner_prefix(Path::new("/a")));
        assert_ne!(runner_prefix(Path::new("/a")), runner_prefix(Path::new("/b")));
        assert_eq!(runner_prefix(Path::new("/a")).len(), "tendon--".len() + 16);
    }
}
