//! Process trees: finding every descendant of a process, and killing them faster than they fork.

use std::collections::HashSet;

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use sys::supervise::process_group;

use crate::limits::{PROCESSES_MAX, STRIKE_ROUNDS_MAX};

/// Every process below `root`, dead ones that were not waited for included.
pub fn descendants(root: i32) -> Vec<i32> {
    let mut found = Vec::new();
    let mut open = vec![root];
    while let Some(pid) = open.pop() {
        match children(pid) {
            Some(pids) => {
                found.extend(&pids);
                open.extend(pids);
            }
            // Kernels without CONFIG_PROC_CHILDREN.
            None if pid == root => return descendants_by_parent(root),
            None => {}
        }
        if found.len() > PROCESSES_MAX {
            break;
        }
    }
    found
}

/// `None`: the kernel keeps no list of children, or the process is gone.
fn children(pid: i32) -> Option<Vec<i32>> {
    let mut pids = Vec::new();
    let mut listed = false;
    for task in std::fs::read_dir(format!("/proc/{pid}/task")).ok()?.flatten() {
        if let Ok(text) = std::fs::read_to_string(task.path().join("children")) {
            listed = true;
            pids.extend(text.split_ascii_whitespace().filter_map(|word| word.parse::<i32>().ok()));
        }
    }
    listed.then_some(pids)
}

fn descendants_by_parent(root: i32) -> Vec<i32> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let pairs: Vec<(i32, i32)> =
        pids.take(PROCESSES_MAX).filter_map(|pid| Some((pid, parent(pid)?))).collect();
    let mut found = HashSet::from([root]);
    loop {
        let before = found.len();
        for (pid, parent) in &pairs {
            if found.contains(parent) {
                found.insert(*pid);
            }
        }
        if found.len() == before {
            break;
        }
    }
    found.remove(&root);
    found.into_iter().collect()
}

fn parent(pid: i32) -> Option<i32> {
    let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may hold anything; two fields after it stands the parent.
    let after = stat.rsplit(|byte| *byte == b')').next()?;
    std::str::from_utf8(after).ok()?.split_ascii_whitespace().nth(1)?.parse().ok()
}

/// Stops every descendant of `root` until no new one turns up, then kills them all. `root` itself goes on, also if
/// the code had stopped it. Some may escape by a race: strike again until `root` has no child left.
///
/// Whole process groups are signalled where possible: the kernel does that in one step, which a fork can't escape, and a
/// plain fork bomb is one group. Each step gives way to the hand's other work, which a storm must not hold up.
pub async fn strike(root: i32) {
    let mut targets = Targets::default();
    for _ in 0..STRIKE_ROUNDS_MAX {
        let before = targets.pids.len();
        let mut visited = HashSet::new();
        let mut open = vec![root];
        while let Some(pid) = open.pop() {
            // Without a kernel's list of children there is one look at all processes instead.
            let children = match children(pid) {
                Some(children) => children,
                None if pid == root => descendants_by_parent(root),
                None => Vec::new(),
            };
            for child in children {
                targets.stop(child);
                if visited.len() < PROCESSES_MAX && visited.insert(child) {
                    open.push(child);
                }
            }
            tokio::task::yield_now().await;
        }
        if targets.pids.len() == before {
            break;
        }
    }
    targets.kill();
    signal(root, Signal::CONT);
}

/// The same for a root that goes on forking meanwhile itself, without giving way. Returns how many were found.
pub fn strike_now(root: i32) -> usize {
    let mut targets = Targets::default();
    for pid in descendants(root) {
        targets.stop(pid);
    }
    targets.kill();
    targets.pids.len()
}

/// Processes and groups to be killed.
#[derive(Default)]
struct Targets {
    pids: HashSet<i32>,
    groups: HashSet<i32>,
}

impl Targets {
    /// Stops a process, and the group that it is in.
    fn stop(&mut self, pid: i32) {
        if !self.pids.insert(pid) {
            return;
        }
        signal(pid, Signal::STOP);
        // Between its fork and its new session a command is in the hand's own group.
        let group = process_group(pid).filter(|group| Some(*group) != process_group(0));
        if let Some(group) = group
            && self.groups.insert(group)
        {
            signal_group(group, Signal::STOP);
        }
    }

    fn kill(&self) {
        for group in &self.groups {
            signal_group(*group, Signal::KILL);
        }
        for pid in &self.pids {
            signal(*pid, Signal::KILL);
        }
    }
}

/// Best effort: a process that is gone needs no signal.
pub fn signal(pid: i32, signal: Signal) {
    if let Some(pid) = Pid::from_raw(pid) {
        let _ = kill_process(pid, signal);
    }
}

/// Best effort, for a process group.
pub fn signal_group(group: i32, signal: Signal) {
    if let Some(group) = Pid::from_raw(group) {
        let _ = kill_process_group(group, signal);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_to_list_agree() {
        let me = std::process::id().cast_signed();
        let mut listed = descendants(1);
        let mut by_parent = descendants_by_parent(1);
        assert!(listed.contains(&me) == by_parent.contains(&me));
        listed.retain(|pid| *pid == me);
        by_parent.retain(|pid| *pid == me);
        assert_eq!(listed, by_parent);
    }
}
