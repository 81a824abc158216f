//! The sandbox tier: bubblewrap with every namespace, no capability, the seccomp list, and `hand` as its first process,
//! which adds Landlock.

use std::collections::HashMap;
use std::ffi::{CString, OsStr};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use policy::{HandConfig, Limits};
use proto::hand::{BootConfig, BootConfigError, CHANNEL_FD, CONFIG_FD};
use proto::path::JsonBytes;
use rustix::pipe::{PipeFlags, pipe_with};
use sys::spawn::{Ids, Kind, Plan, Rlimit};

use super::bwrap::Bwrap;
use super::mounts::{Owners, clone_fd, clone_tree};
use crate::anchor::Anchor;
use crate::cgroup::{CgroupError, Group};
use crate::generated::{self, AGENT_HOME, PROC_FILES, PROC_HIDDEN, PROC_HIDDEN_DIRS, Tmpfs};
use crate::limits::{ETC_BYTES_MAX, OPEN_FILES_MAX, SHM_BYTES_MAX};
use crate::seccomp::{Filter, SeccompError, sealed};
use crate::toolchains::{Access, Toolchains};

/// Where the branch is.
pub const WORK_DIR: &str = "/work";
/// Where the agent is.
const HAND_PATH: &str = "/run/tendon/hand";
/// bubblewrap tells the first process's id here.
const INFO_FD: i32 = 5;
/// bubblewrap reads the filter here.
const SECCOMP_FD: i32 = 6;
/// Files of one machine's size are small.
const MACHINE_BYTES_MAX: u64 = 16 << 20;
/// Machine sizes that are kept.
const MACHINES_MAX: usize = 64;

/// Why a sandbox can't be prepared.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    /// Something of the host that every hand shows.
    #[error("{} can't be shown in the sandbox", path.display())]
    Host {
        /// What.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The files that are generated.
    #[error("the sandbox's own files can't be made")]
    Generated(#[source] io::Error),
    /// The seccomp filter.
    #[error(transparent)]
    Seccomp(#[from] SeccompError),
    /// Pipes and the like.
    #[error("the sandbox's descriptors can't be made")]
    Descriptors(#[from] io::Error),
    /// What the hand is told.
    #[error(transparent)]
    Config(#[from] BootConfigError),
    /// A path with a NUL byte.
    #[error("a path holds a NUL byte")]
    Nul(#[from] std::ffi::NulError),
    /// Its control group.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
}

/// What all sandboxes of a runner have in common.
#[derive(Debug)]
pub struct Sandbox {
    hand_binary: PathBuf,
    config: HandConfig,
    toolchains: Toolchains,
    denied_paths: Vec<JsonBytes>,
    owners: Owners,
    anchor: Anchor,
    ids: Option<Ids>,
    filter: Filter,
    etc: Tmpfs,
    hidden: Vec<PathBuf>,
    hidden_dirs: Vec<PathBuf>,
    machines: Mutex<HashMap<(u32, u64, u32), Arc<Tmpfs>>>,
}

/// One sandbox, ready to be spawned, and the runner's ends of its descriptors.
#[derive(Debug)]
pub struct Prepared {
    /// For the spawning thread.
    pub plan: Plan,
    /// The channel.
    pub channel: UnixStream,
    /// What bubblewrap and `hand` write.
    pub stderr: OwnedFd,
    /// bubblewrap's JSON with the first process's id.
    pub info: OwnedFd,
    /// Directories that are not shown as they were to be: package caches that can't be written.
    pub degraded: Vec<String>,
}

/// What differs from sandbox to sandbox.
#[derive(Debug)]
pub struct Wanted<'a> {
    /// The branch's root, a detached mount.
    pub root: OwnedFd,
    /// The limits.
    pub limits: &'a Limits,
    /// CPUs to be pinned to; empty: all.
    pub cpus: Vec<usize>,
    /// The control group to be in.
    pub group: Option<&'a Group>,
}

/// What binds the whole sandbox from outside.
struct Outside<'a> {
    limits: &'a Limits,
    cpus: Vec<usize>,
    group: Option<&'a Group>,
}

impl Sandbox {
    /// Prepares what is common. `ids` is whom the code runs as outside, if the runner is root; `anchor` is for mounts.
    pub fn new(
        hand_binary: PathBuf,
        config: HandConfig,
        toolchains: Toolchains,
        denied_paths: Vec<JsonBytes>,
        ids: Option<Ids>,
        anchor: Anchor,
    ) -> Result<Self, PrepareError> {
        let etc = Tmpfs::new(ETC_BYTES_MAX, &anchor).map_err(PrepareError::Generated)?;
        generated::etc(&etc.path(), Path::new("/etc"), &config.etc).map_err(PrepareError::Generated)?;
        let existing = |names: &[&str]| {
            names.iter().map(|name| Path::new("/proc").join(name)).filter(|path| path.exists()).collect()
        };
        Ok(Sandbox {
            hand_binary,
            config,
            toolchains,
            denied_paths,
            owners: Owners::new(ids, anchor.clone()),
            anchor,
            ids,
            filter: Filter::compile()?,
            etc,
            hidden: existing(&PROC_HIDDEN),
            hidden_dirs: existing(&PROC_HIDDEN_DIRS),
            machines: Mutex::default(),
        })
    }

    /// The environment of every command.
    pub fn env(&self) -> Vec<(String, String)> {
        let system = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
        let mut path: Vec<String> =
            self.toolchains.path.iter().map(|dir| dir.to_string_lossy().into_owned()).collect();
        path.push(system.into());
        let pairs = [
            ("PATH", path.join(":")),
            ("HOME", AGENT_HOME.into()),
            ("USER", "agent".into()),
            ("LOGNAME", "agent".into()),
            ("SHELL", "/bin/bash".into()),
            ("LANG", "C.UTF-8".into()),
            ("TERM", "dumb".into()),
            ("TMPDIR", "/tmp".into()),
        ];
        let mut env: Vec<(String, String)> = pairs.map(|(name, value)| (name.to_owned(), value)).into();
        env.extend(self.toolchains.env.iter().cloned());
        env
    }

    /// Makes everything that one sandbox is spawned with. Blocks for a few system calls.
    pub fn prepare(&self, wanted: Wanted<'_>) -> Result<Prepared, PrepareError> {
        let mut bwrap = Bwrap::new();
        let mut boot = BootConfig::new(WORK_DIR);
        self.system(&mut bwrap, &mut boot, wanted.limits)?;
        let tmp_bytes = match self.config.tmp_bytes_max {
            0 => wanted.limits.memory_bytes_max / 2,
            bytes => bytes,
        };
        for (mode, dir) in [("1777", "/tmp"), ("0700", AGENT_HOME)] {
            bwrap.tmpfs(mode, tmp_bytes, dir);
            boot.write_paths.push(dir.into());
        }
        bwrap.symlink("../tmp", "/var/tmp");
        let degraded = self.home(&mut bwrap, &mut boot, tmp_bytes)?;
        let root = bwrap.stage(wanted.root, Kind::Dir);
        bwrap.bind(&root, WORK_DIR);
        boot.write_paths.push(WORK_DIR.into());
        let hand = host(&self.hand_binary)?;
        let hand = bwrap.stage(hand.0, hand.1);
        bwrap.ro_bind(&hand, HAND_PATH);
        boot.read_paths.push("/run".into());
        bwrap.at("--remount-ro", "/");
        bwrap.flags(&[
            "--chdir",
            WORK_DIR,
            "--info-fd",
            &INFO_FD.to_string(),
            "--seccomp",
            &SECCOMP_FD.to_string(),
        ]);
        boot.denied_paths.clone_from(&self.denied_paths);
        self.plan(
            bwrap,
            &boot,
            Outside { limits: wanted.limits, cpus: wanted.cpus, group: wanted.group },
            degraded,
        )
    }

    /// The parts that are the same on every host: `/usr`, `/etc`, `/proc`, `/sys`, `/dev`.
    fn system(&self, bwrap: &mut Bwrap, boot: &mut BootConfig, limits: &Limits) -> Result<(), PrepareError> {
        let (usr, kind) = host(Path::new("/usr"))?;
        let usr = bwrap.stage(usr, kind);
        bwrap.ro_bind(&usr, "/usr");
        for name in ["bin", "sbin", "lib", "lib32", "lib64", "libx32"] {
            let path = Path::new("/").join(name);
            match std::fs::read_link(&path) {
                // On a merged-usr system these are symlinks into /usr; elsewhere, directories of their own.
                Ok(target) => bwrap.symlink(target, &path),
                Err(_) if path.is_dir() => {
                    let (fd, kind) = host(&path)?;
                    let source = bwrap.stage(fd, kind);
                    bwrap.ro_bind(&source, &path);
                }
                Err(_) => continue,
            }
            boot.read_paths.push(path.to_string_lossy().into_owned());
        }
        let etc = bwrap.stage(clone_fd(self.etc.fd().as_fd()).map_err(PrepareError::Generated)?, Kind::Dir);
        bwrap.ro_bind(&etc, "/etc");
        let machine = self.machine(limits).map_err(PrepareError::Generated)?;
        let machine =
            bwrap.stage(clone_fd(machine.fd().as_fd()).map_err(PrepareError::Generated)?, Kind::Dir);
        bwrap.at("--proc", "/proc");
        for name in PROC_FILES {
            bwrap.ro_bind(&machine.join("proc").join(name), Path::new("/proc").join(name));
        }
        self.hidden.iter().for_each(|path| bwrap.ro_bind(&machine.join("empty"), path));
        self.hidden_dirs.iter().for_each(|path| bwrap.ro_bind(&machine.join("empty-dir"), path));
        bwrap.ro_bind(&machine.join("sys"), "/sys");
        bwrap.at("--dev", "/dev");
        bwrap.tmpfs("1777", SHM_BYTES_MAX.min(limits.memory_bytes_max / 2), "/dev/shm");
        bwrap.at("--remount-ro", "/dev");
        // Not writable for commands: what they could change there is a namespace's own, or the agent's.
        boot.read_paths.extend(["/usr", "/etc", "/sys", "/proc"].map(String::from));
        boot.write_paths.push("/dev".into());
        Ok(())
    }

    /// The files that show a machine of this size, made once.
    fn machine(&self, limits: &Limits) -> io::Result<Arc<Tmpfs>> {
        let key = (limits.cpu_milli, limits.memory_bytes_max, limits.pids_max);
        let mut machines = self.machines.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(machine) = machines.get(&key) {
            return Ok(Arc::clone(machine));
        }
        let machine = Arc::new(Tmpfs::new(MACHINE_BYTES_MAX, &self.anchor)?);
        generated::machine(&machine.path(), limits)?;
        if machines.len() >= MACHINES_MAX {
            machines.clear();
        }
        machines.insert(key, Arc::clone(&machine));
        Ok(machine)
    }

    /// Toolchains, caches, and what else the configuration lists. Returns what could not be shown as it should.
    fn home(
        &self,
        bwrap: &mut Bwrap,
        boot: &mut BootConfig,
        bytes: u64,
    ) -> Result<Vec<String>, PrepareError> {
        let mut degraded = Vec::new();
        for dir in &self.toolchains.dirs {
            bwrap.tmpfs("0755", bytes, dir);
            boot.write_paths.push(dir.to_string_lossy().into_owned());
        }
        // Looked for at each boot: tools write them when they fetch.
        let masks = self.toolchains.masks();
        let scratch = self.scratch(bytes, !masks.is_empty())?;
        for (n, bind) in self.toolchains.binds.iter().enumerate() {
            let to = bind.to.to_string_lossy().into_owned();
            let copy = match (bind.access, &scratch) {
                (Access::CopyOnWrite, Some(scratch)) => {
                    self.owners.copy_on_write(&bind.from, scratch, &n.to_string()).ok()
                }
                (Access::CopyOnWrite, None) | (Access::ReadOnly, _) => None,
            };
            if let Some(copy) = copy {
                let source = bwrap.stage(copy, Kind::Dir);
                bwrap.bind(&source, &bind.to);
                boot.write_paths.push(to);
                continue;
            }
            if bind.access == Access::CopyOnWrite {
                degraded.push(format!("{to} is read-only: this host can't mount an overlay over it"));
            }
            let failed = |source| PrepareError::Host { path: bind.from.clone(), source };
            let (fd, kind) = self.owners.read_only(&bind.from).map_err(failed)?;
            let source = bwrap.stage(fd, kind);
            bwrap.ro_bind(&source, &bind.to);
            boot.read_paths.push(to);
        }
        let mut files = self.toolchains.files.clone();
        files.extend(masks);
        if let Some(scratch) = scratch.filter(|_| !files.is_empty()) {
            files_in(bwrap, scratch, &files)?;
        }
        for path in &self.config.read_only {
            let (fd, kind) = host(Path::new(path))?;
            let source = bwrap.stage(fd, kind);
            bwrap.ro_bind(&source, path);
            boot.read_paths.push(path.clone());
        }
        Ok(degraded)
    }

    /// A tmpfs of its own for what the hand writes over read-only directories, and for generated files.
    fn scratch(&self, bytes: u64, masks: bool) -> Result<Option<Tmpfs>, PrepareError> {
        let copies = self.toolchains.binds.iter().any(|bind| bind.access == Access::CopyOnWrite);
        if !copies && !masks && self.toolchains.files.is_empty() {
            return Ok(None);
        }
        Tmpfs::new(bytes, &self.anchor).map(Some).map_err(PrepareError::Generated)
    }

    fn plan(
        &self,
        bwrap: Bwrap,
        boot: &BootConfig,
        outside: Outside<'_>,
        degraded: Vec<String>,
    ) -> Result<Prepared, PrepareError> {
        let (channel, theirs) = UnixStream::pair()?;
        let (stderr, stderr_in) = pipe_with(PipeFlags::CLOEXEC).map_err(io::Error::from)?;
        let (info, info_in) = pipe_with(PipeFlags::CLOEXEC).map_err(io::Error::from)?;
        let null = OwnedFd::from(std::fs::File::options().read(true).write(true).open("/dev/null")?);
        let config = sealed("boot", &boot.to_json()?)?;
        let (argv, staged) = bwrap.finish(&[OsStr::new(HAND_PATH)])?;
        let forgotten =
            self.anchor.place().map(|place| CString::new(place.as_os_str().as_bytes())).transpose()?;
        let plan = Plan {
            argv,
            staged,
            forgotten,
            fds: vec![
                (0, null),
                (1, stderr_in.try_clone()?),
                (2, stderr_in),
                (CHANNEL_FD, theirs.into()),
                (CONFIG_FD, config),
                (INFO_FD, info_in),
                (SECCOMP_FD, self.filter.memfd()?),
            ],
            cgroups: outside.group.map(Group::entrances).transpose()?.unwrap_or_default(),
            rlimits: vec![
                (Rlimit::Core, 0),
                (Rlimit::OpenFiles, OPEN_FILES_MAX),
                (Rlimit::FileSize, outside.limits.disk_bytes_max),
            ],
            cpus: outside.cpus,
            ids: self.ids,
            outlives: false,
        };
        Ok(Prepared { plan, channel, stderr, info, degraded })
    }
}

/// Shows generated files at their paths.
fn files_in(bwrap: &mut Bwrap, scratch: Tmpfs, files: &[(PathBuf, Vec<u8>)]) -> Result<(), PrepareError> {
    let dir = scratch.path().join("files");
    std::fs::create_dir(&dir).map_err(PrepareError::Generated)?;
    for (n, (_, content)) in files.iter().enumerate() {
        std::fs::write(dir.join(n.to_string()), content).map_err(PrepareError::Generated)?;
    }
    let (fd, kind) = clone_tree(&dir).map_err(PrepareError::Generated)?;
    let source = bwrap.stage(fd, kind);
    for (n, (to, _)) in files.iter().enumerate() {
        bwrap.ro_bind(&source.join(n.to_string()), to);
    }
    Ok(())
}

fn host(path: &Path) -> Result<(OwnedFd, Kind), PrepareError> {
    clone_tree(path).map_err(|source| PrepareError::Host { path: path.to_owned(), source })
}
