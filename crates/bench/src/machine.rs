//! What machine the figures are of.

use std::path::Path;

use serde::Serialize;

use crate::error::{Context, Result};
use crate::run::{program, run};

/// The machine, as far as figures depend on it, and the day.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Machine {
    pub(crate) cpus: usize,
    pub(crate) cpu_model: String,
    pub(crate) memory_bytes: u64,
    pub(crate) kernel: String,
    pub(crate) file_system: String,
    pub(crate) load: String,
    pub(crate) date: String,
}

impl Machine {
    /// Looks. `dir` is where the benchmark works: its file system counts.
    pub(crate) fn look(dir: &Path) -> Result<Self> {
        let read = |path: &str| std::fs::read_to_string(path).context(|| format!("can't read {path}"));
        let field = |text: &str, name: &str| {
            let line = text.lines().find(|line| line.starts_with(name));
            line.and_then(|line| line.split_once(':')).map(|(_, value)| value.trim().to_owned())
        };
        let memory = field(&read("/proc/meminfo")?, "MemTotal").unwrap_or_default();
        let kib: u64 = memory.split_whitespace().next().and_then(|n| n.parse().ok()).unwrap_or(0);
        let dir = dir.canonicalize().context(|| format!("can't resolve {}", dir.display()))?;
        Ok(Self {
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            cpu_model: field(&read("/proc/cpuinfo")?, "model name").unwrap_or_else(|| "unknown CPU".into()),
            memory_bytes: kib * 1024,
            kernel: read("/proc/sys/kernel/osrelease")?.trim().to_owned(),
            file_system: file_system(&read("/proc/self/mountinfo")?, &dir),
            load: read("/proc/loadavg")?.split_whitespace().next().unwrap_or("?").to_owned(),
            date: run(program("date").args(["-u", "+%Y-%m-%d"]))?.trim().to_owned(),
        })
    }

    /// One line for the table's head, without what changes from run to run.
    pub(crate) fn line(&self) -> String {
        format!(
            "Machine: {} × {}, {:.0} GiB memory, Linux {}, {}.",
            self.cpus,
            self.cpu_model,
            self.memory_bytes as f64 / f64::from(1u32 << 30),
            self.kernel,
            self.file_system
        )
    }
}

/// The type of the file system that holds `dir`, from the mount that lies deepest above it.
fn file_system(mountinfo: &str, dir: &Path) -> String {
    let mut best = (0, "unknown file system".to_owned());
    for line in mountinfo.lines() {
        let Some((left, right)) = line.split_once(" - ") else { continue };
        let Some(place) = left.split(' ').nth(4) else { continue };
        let depth = Path::new(place).components().count();
        if dir.starts_with(place) && depth >= best.0 {
            best = (depth, right.split(' ').next().unwrap_or_default().to_owned());
        }
    }
    best.1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_deepest_mount_counts() {
        let info = "1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:5 / /tmp rw shared:1 - tmpfs tmpfs rw\n3 1 8:2 / /tm rw - xfs x rw";
        assert_eq!(file_system(info, Path::new("/tmp/a")), "tmpfs");
        assert_eq!(file_system(info, Path::new("/var/tmp")), "ext4");
    }

    #[test]
    fn this_machine_can_be_described() {
        let machine = Machine::look(Path::new("/")).unwrap();
        assert!(machine.memory_bytes > 0 && machine.cpus > 0 && machine.date.len() == 10, "{machine:?}");
    }
}
