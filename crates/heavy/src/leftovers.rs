//! What a killed runner may have left behind: processes, mounts, control groups.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// A process that still runs.
#[derive(Clone, Debug)]
pub struct Process {
    /// Its id.
    pub pid: u32,
    /// Its name and arguments.
    pub what: String,
}

/// Makes this process the one that orphans below it are given to, so that nothing escapes [`descendants`].
pub fn adopt_orphans() {
    rustix::process::set_child_subreaper(Some(rustix::process::getpid())).expect("prctl");
}

/// Collects the exit status of ended orphans. Only while no other thread waits for a child.
pub fn reap() {
    while let Ok(Some(_)) = rustix::process::wait(rustix::process::WaitOptions::NOHANG) {}
}

/// All processes below this one that still run; zombies don't.
pub fn descendants() -> Vec<Process> {
    let parents = running();
    let own = std::process::id();
    let below = |mut pid: u32| {
        // The chain is bounded: a table read while processes come and go could hold a cycle.
        for _ in 0..64 {
            match parents.get(&pid) {
                Some(parent) if *parent == own => return true,
                Some(parent) => pid = *parent,
                None => return false,
            }
        }
        false
    };
    parents
        .keys()
        .filter(|pid| below(**pid))
        .map(|pid| Process { pid: *pid, what: command_line(*pid) })
        .collect()
}

/// Parent by process, zombies left out.
fn running() -> BTreeMap<u32, u32> {
    let mut parents = BTreeMap::new();
    for entry in std::fs::read_dir("/proc").expect("/proc").filter_map(Result::ok) {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else { continue };
        // The name in brackets may hold anything; what follows the last bracket is fields.
        let Some((_, fields)) = stat.rsplit_once(')') else { continue };
        let mut fields = fields.split_whitespace();
        let (Some(state), Some(parent)) = (fields.next(), fields.next()) else { continue };
        if let (false, Ok(parent)) = (matches!(state, "Z" | "X"), parent.parse()) {
            parents.insert(pid, parent);
        }
    }
    parents
}

fn command_line(pid: u32) -> String {
    let bytes = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&bytes).replace('\0', " ").trim().to_owned()
}

/// Mounts of this process's namespace that lie below `dir`.
pub fn mounts_below(dir: &Path) -> Vec<String> {
    let table = std::fs::read_to_string("/proc/self/mountinfo").expect("mountinfo");
    let place = dir.to_string_lossy().into_owned();
    table.lines().filter(|line| line.contains(&place)).map(str::to_owned).collect()
}

/// How the names of the control groups begin in which processes below this one are: `tendon-` and a word for the state
/// directory. Empty while no hand runs.
pub fn cgroup_prefixes() -> BTreeSet<String> {
    let mut prefixes = BTreeSet::new();
    for process in descendants() {
        let groups = std::fs::read_to_string(format!("/proc/{}/cgroup", process.pid)).unwrap_or_default();
        let names = groups.lines().flat_map(|line| line.split('/'));
        // `tendon-WORD-RUN`: each run of a runner has its own, the word stays.
        let words = names.filter_map(|name| name.strip_prefix("tendon-")?.split('-').next());
        // `tendon-aside` is where a runner puts those who stood in its way, for as long as they live.
        prefixes.extend(words.filter(|word| *word != "aside").map(|word| format!("tendon-{word}")));
    }
    prefixes
}

/// The command lines of all processes that run.
pub fn command_lines() -> Vec<String> {
    running().into_keys().map(command_line).collect()
}

/// Control groups whose names begin with one of `prefixes`.
pub fn cgroups(prefixes: &BTreeSet<String>) -> Vec<PathBuf> {
    below(Path::new("/sys/fs/cgroup"), &|name| prefixes.iter().any(|prefix| name.starts_with(prefix)))
}

/// Control groups below `dir` whose names begin with `prefix`.
pub fn groups_named(dir: &Path, prefix: &str) -> Vec<PathBuf> {
    below(dir, &|name| name.starts_with(prefix))
}

fn below(dir: &Path, wanted: &dyn Fn(&str) -> bool) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut todo = vec![(dir.to_owned(), 0)];
    while let Some((dir, depth)) = todo.pop() {
        for entry in std::fs::read_dir(&dir).into_iter().flatten().filter_map(Result::ok) {
            if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                continue;
            }
            let name = entry.file_name().to_string_lossy().into_owned();
            if wanted(&name) {
                found.push(entry.path());
            } else if depth < 6 {
                todo.push((entry.path(), depth + 1));
            }
        }
    }
    found.sort();
    found
}
