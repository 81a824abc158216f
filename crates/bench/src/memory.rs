//! Memory of processes and of the kernel, as `/proc` shows it.

use std::collections::BTreeMap;

use crate::error::{Context, Result};

/// Proportional set size of a process, in bytes: shared pages count by the share.
pub(crate) fn pss(pid: u32) -> Result<u64> {
    let path = format!("/proc/{pid}/smaps_rollup");
    let text = std::fs::read_to_string(&path).context(|| format!("can't read {path}"))?;
    Ok(kib(&text, "Pss:") * 1024)
}

/// Memory that the kernel holds for mounts, namespaces, processes and the like, and can't give back: of the whole machine, so
/// only the difference over many says something.
pub(crate) fn kernel() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").context(|| "can't read /proc/meminfo".into())?;
    Ok(["SUnreclaim:", "KernelStack:", "PageTables:", "Percpu:"]
        .iter()
        .map(|name| kib(&text, name))
        .sum::<u64>()
        * 1024)
}

/// All processes below `ancestor`, itself not included.
pub(crate) fn descendants(ancestor: u32) -> Result<Vec<u32>> {
    let mut children: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for entry in std::fs::read_dir("/proc").context(|| "can't list /proc".into())?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        // A process may have ended meanwhile.
        let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else { continue };
        let parent = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(1)?.parse().ok());
        children.entry(parent.unwrap_or(0)).or_default().push(pid);
    }
    let mut found = children.remove(&ancestor).unwrap_or_default();
    let mut next = 0;
    while let Some(pid) = found.get(next) {
        found.extend(children.remove(pid).unwrap_or_default());
        next += 1;
    }
    Ok(found)
}

/// The number in the line that starts with `name`; 0 where the kernel has no such line.
fn kib(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::program;

    #[test]
    fn this_process_has_memory_and_children() {
        assert!(pss(std::process::id()).unwrap() > 10_000);
        assert!(kernel().unwrap() > 0);
        let mut child = program("sleep").arg("60").spawn().unwrap();
        assert!(descendants(std::process::id()).unwrap().contains(&child.id()));
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
