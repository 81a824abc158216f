//! What a hand sees instead of the host's own: a small `/etc`, and the files by which programs ask how large the machine is.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};

use policy::Limits;

use crate::anchor::{Anchor, Attached, tmpfs};
use crate::limits::{CPU_PERIOD_US, ETC_BYTES_MAX, ETC_ENTRIES_MAX};

/// The uid and gid of commands, as they see them.
pub const AGENT_ID: u32 = 1000;
/// Their home.
pub const AGENT_HOME: &str = "/home/agent";
/// The name of the machine, as they see it.
pub const HOSTNAME: &str = "tendon";

/// Files below `/proc` that are replaced by generated ones of the same name in `proc`.
pub const PROC_FILES: [&str; 3] = ["meminfo", "cpuinfo", "stat"];
/// Files below `/proc` that show the host and that no program needs: an empty file lies over them.
pub const PROC_HIDDEN: [&str; 5] = ["cmdline", "keys", "key-users", "interrupts", "diskstats"];
/// Directories likewise.
pub const PROC_HIDDEN_DIRS: [&str; 3] = ["bus", "fs", "driver"];

/// A tmpfs in no mount table but perhaps the runner's own, alive as long as its descriptor or a clone of it.
#[derive(Debug)]
pub struct Tmpfs {
    fd: OwnedFd,
    _attached: Option<Attached>,
}

impl Tmpfs {
    /// Mounts one.
    pub fn new(bytes_max: u64, anchor: &Anchor) -> io::Result<Self> {
        let fd = tmpfs(bytes_max)?;
        let attached = anchor.attach(fd.as_fd())?;
        Ok(Tmpfs { fd, _attached: attached })
    }

    /// The mount.
    pub fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// A path to it that works in this process.
    pub fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.fd.as_raw_fd()))
    }
}

/// Fills `etc` with what was generated and with copies of what `names` lists of `host_etc`.
pub fn etc(etc: &Path, host_etc: &Path, names: &[String]) -> io::Result<()> {
    fs::create_dir_all(etc)?;
    let mut copier = Copier { entries: 0, bytes: 0 };
    for name in names {
        for found in matching(host_etc, name) {
            let Ok(below) = found.strip_prefix(host_etc) else { continue };
            let to = etc.join(below);
            if let Some(parent) = to.parent() {
                fs::create_dir_all(parent)?;
            }
            copier.copy(&found, &to)?;
        }
    }
    let write = |name: &str, text: String| fs::write(etc.join(name), text);
    write(
        "passwd",
        format!(
            "root:x:0:0:root:/root:/usr/sbin/nologin\nagent:x:{AGENT_ID}:{AGENT_ID}:agent:{AGENT_HOME}:/bin/bash\n\
             nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
        ),
    )?;
    write("group", format!("root:x:0:\ntty:x:5:\nagent:x:{AGENT_ID}:\nnogroup:x:65534:\n"))?;
    write("hosts", format!("127.0.0.1 localhost {HOSTNAME}\n::1 localhost ip6-localhost\n"))?;
    write("hostname", format!("{HOSTNAME}\n"))?;
    write(
        "nsswitch.conf",
        "passwd: files\ngroup: files\nshadow: files\nhosts: files\nservices: files\nprotocols: files\n"
            .into(),
    )?;
    write("resolv.conf", String::new())?;
    if !etc.join("mtab").exists() {
        symlink("/proc/self/mounts", etc.join("mtab"))?;
    }
    Ok(())
}

/// A name, or all that begin like it when its last part ends with `*`. Only plain names below the directory.
fn matching(dir: &Path, name: &str) -> Vec<PathBuf> {
    let plain = Path::new(name).components().all(|part| matches!(part, std::path::Component::Normal(_)));
    if !plain {
        return Vec::new();
    }
    let Some(prefix) = name.strip_suffix('*') else {
        let path = dir.join(name);
        return if path.symlink_metadata().is_ok() { vec![path] } else { Vec::new() };
    };
    let (parent, start) = match prefix.rsplit_once('/') {
        Some((parent, start)) => (dir.join(parent), start),
        None => (dir.to_owned(), prefix),
    };
    let Ok(entries) = fs::read_dir(parent) else { return Vec::new() };
    let named = entries.flatten().filter(|entry| entry.file_name().to_string_lossy().starts_with(start));
    named.map(|entry| entry.path()).collect()
}

struct Copier {
    entries: usize,
    bytes: u64,
}

impl Copier {
    /// What not everybody may read on the host is left out, and so is what is neither file, directory nor symlink.
    fn copy(&mut self, from: &Path, to: &Path) -> io::Result<()> {
        let Ok(meta) = from.symlink_metadata() else { return Ok(()) };
        self.entries += 1;
        if self.entries > ETC_ENTRIES_MAX {
            return Ok(());
        }
        let everybody = meta.permissions().mode() & 0o004 != 0;
        if meta.is_symlink() {
            if to.symlink_metadata().is_err() {
                symlink(fs::read_link(from)?, to)?;
            }
        } else if meta.is_dir() && everybody {
            fs::create_dir_all(to)?;
            for entry in fs::read_dir(from)?.flatten() {
                self.copy(&entry.path(), &to.join(entry.file_name()))?;
            }
        } else if meta.is_file() && everybody {
            self.bytes = self.bytes.saturating_add(meta.len());
            if self.bytes <= ETC_BYTES_MAX {
                io::copy(&mut File::open(from)?.take(meta.len()), &mut File::create(to)?)?;
                let executable = meta.permissions().mode() & 0o111;
                fs::set_permissions(to, fs::Permissions::from_mode(0o644 | executable))?;
            }
        }
        Ok(())
    }
}

/// CPUs that a program may count on: whole ones, rounded up.
pub fn cpus(limits: &Limits) -> usize {
    limits.cpu_milli.div_ceil(1000).max(1) as usize
}

/// Fills `dir` with `proc/…`, `sys/…` and `empty`, as a machine with these limits would show them.
pub fn machine(dir: &Path, limits: &Limits) -> io::Result<()> {
    let proc = dir.join("proc");
    fs::create_dir_all(&proc)?;
    fs::create_dir_all(dir.join("empty-dir"))?;
    fs::write(dir.join("empty"), "")?;
    let cpus = cpus(limits);
    fs::write(proc.join("meminfo"), meminfo(limits.memory_bytes_max))?;
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    fs::write(proc.join("cpuinfo"), first_cpus(&cpuinfo, cpus))?;
    let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
    fs::write(proc.join("stat"), quiet_stat(&stat, cpus))?;
    sys(&dir.join("sys"), limits, cpus)
}

fn meminfo(bytes: u64) -> String {
    let kib = bytes / 1024;
    let mut text = String::new();
    for (name, value) in [("MemTotal", kib), ("MemFree", kib), ("MemAvailable", kib)] {
        text.push_str(&format!("{:<16}{value:>8} kB\n", format!("{name}:")));
    }
    for name in [
        "Buffers",
        "Cached",
        "SwapCached",
        "Active",
        "Inactive",
        "SwapTotal",
        "SwapFree",
        "Dirty",
        "Writeback",
        "AnonPages",
        "Mapped",
        "Shmem",
        "Slab",
        "SReclaimable",
        "SUnreclaim",
    ] {
        text.push_str(&format!("{:<16}{:>8} kB\n", format!("{name}:"), 0));
    }
    text
}

/// The first blocks of the host's file. They are separated by empty lines.
fn first_cpus(cpuinfo: &str, cpus: usize) -> String {
    let blocks = cpuinfo.split("\n\n").filter(|block| !block.trim().is_empty()).take(cpus);
    blocks.map(|block| format!("{}\n\n", block.trim_end())).collect()
}

/// The lines of the first CPUs, idle for ever, and when the machine was started.
fn quiet_stat(stat: &str, cpus: usize) -> String {
    let idle = "0 0 0 100 0 0 0 0 0 0";
    let mut text = format!("cpu  {idle}\n");
    for cpu in 0..cpus {
        text.push_str(&format!("cpu{cpu} {idle}\n"));
    }
    let started = stat.lines().find(|line| line.starts_with("btime ")).unwrap_or("btime 0");
    text.push_str(&format!("intr 0\nctxt 0\n{started}\nprocesses 1\nprocs_running 1\nprocs_blocked 0\n"));
    text
}

/// The few files of `/sys` by which language runtimes size themselves. No other part of `/sys` exists in a hand.
fn sys(sys: &Path, limits: &Limits, cpus: usize) -> io::Result<()> {
    let cpu_dir = sys.join("devices/system/cpu");
    for cpu in 0..cpus {
        fs::create_dir_all(cpu_dir.join(format!("cpu{cpu}")))?;
    }
    let range = if cpus == 1 { "0\n".to_owned() } else { format!("0-{}\n", cpus - 1) };
    for name in ["online", "possible", "present"] {
        fs::write(cpu_dir.join(name), &range)?;
    }
    let group = sys.join("fs/cgroup");
    let quota = u64::from(limits.cpu_milli) * CPU_PERIOD_US / 1000;
    let (memory, pids) = (limits.memory_bytes_max, limits.pids_max);
    let files = [
        ("cgroup.controllers", "cpu memory pids".to_owned()),
        ("cpu.max", format!("{quota} {CPU_PERIOD_US}")),
        ("memory.max", memory.to_string()),
        ("memory.high", "max".into()),
        ("memory.swap.max", "0".into()),
        ("pids.max", pids.to_string()),
        ("memory/memory.limit_in_bytes", memory.to_string()),
        ("memory/memory.soft_limit_in_bytes", memory.to_string()),
        ("cpu/cpu.cfs_quota_us", quota.to_string()),
        ("cpu/cpu.cfs_period_us", CPU_PERIOD_US.to_string()),
        ("cpu/cpu.shares", "1024".into()),
        ("pids/pids.max", pids.to_string()),
    ];
    for (name, text) in files {
        let path = group.join(name);
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        fs::write(path, text + "\n")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits() -> Limits {
        Limits { cpu_milli: 1500, memory_bytes_max: 1 << 30, pids_max: 64, disk_bytes_max: 0, wall_ms_max: 0 }
    }

    #[test]
    fn etc_holds_no_secret() {
        let dir = tempfile::tempdir().unwrap();
        let host = dir.path().join("host");
        fs::create_dir_all(host.join("ssl/certs")).unwrap();
        fs::create_dir_all(host.join("ssh")).unwrap();
        let write = |name: &str, mode: u32| {
            fs::write(host.join(name), name).unwrap();
            fs::set_permissions(host.join(name), fs::Permissions::from_mode(mode)).unwrap();
        };
        for (name, mode) in [
            ("shadow", 0o640),
            ("ssl/certs/a.pem", 0o644),
            ("ssl/certs/key", 0o600),
            ("ssh/key", 0o644),
            ("java-17", 0o644),
        ] {
            write(name, mode);
        }
        symlink("ssl/certs/a.pem", host.join("javalink")).unwrap();
        let to = dir.path().join("etc");
        let names = ["ssl", "java*", "shadow", "../host/ssh", "missing"].map(str::to_owned);
        etc(&to, &host, &names).unwrap();
        assert_eq!(fs::read_to_string(to.join("ssl/certs/a.pem")).unwrap(), "ssl/certs/a.pem");
        assert!(to.join("java-17").exists() && to.join("javalink").is_symlink());
        for absent in ["shadow", "ssl/certs/key", "ssh"] {
            assert!(!to.join(absent).exists(), "{absent}");
        }
        assert!(fs::read_to_string(to.join("passwd")).unwrap().contains("agent:x:1000:1000"));
    }

    #[test]
    fn the_machine_is_as_large_as_the_limits() {
        let dir = tempfile::tempdir().unwrap();
        machine(dir.path(), &limits()).unwrap();
        let read = |name: &str| fs::read_to_string(dir.path().join(name)).unwrap();
        assert!(
            read("proc/meminfo").starts_with("MemTotal:        1048576 kB\n"),
            "{}",
            read("proc/meminfo")
        );
        assert_eq!(read("sys/devices/system/cpu/online"), "0-1\n");
        assert_eq!(read("sys/fs/cgroup/cpu.max"), "150000 100000\n");
        assert!(read("proc/cpuinfo").matches("processor").count() <= 2);
        assert_eq!(read("proc/stat").lines().filter(|line| line.starts_with("cpu")).count(), 3);
    }
}
