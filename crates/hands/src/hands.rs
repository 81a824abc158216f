//! What makes hands: prepares what they have in common once, and boots each.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{self, Read as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use policy::{Grant, HandConfig, HostCaps, Limits, Missing};
use proto::error::{Code, Coded};
use proto::path::JsonBytes;
use proto::verify::Confinement;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use sys::spawn::Ids;
use tokio::io::AsyncReadExt as _;
use tokio::net::unix::pipe::Receiver;
use tokio::time::timeout;

use crate::anchor::Anchor;
use crate::cgroup::{CgroupError, Cgroups, Group};
use crate::generated::cpus;
use crate::hand::{Hand, Process, set};
use crate::limits::{BOOT_PATIENCE, STDERR_BYTES_MAX};
use crate::link::{Link, LinkError};
use crate::selftest::{Expect, NAMESPACES, judge};
use crate::spawner::{SpawnThread, SpawnThreadError};
use crate::tier::bwrap::BWRAP;
use crate::tier::sandbox::{PrepareError, Prepared, Sandbox, Wanted};
use crate::toolchains::{self, Toolchains};
use crate::warden::{Warden, WardenError};

/// What hands are made from.
#[derive(Clone, Debug)]
pub struct HandsOptions {
    /// The agent's binary, static.
    pub hand_binary: PathBuf,
    /// The runner's state directory: names its control groups, and must be closed to hands.
    pub state_dir: PathBuf,
    /// The operator's wishes.
    pub config: HandConfig,
    /// Whose toolchains are shown.
    pub home: Option<PathBuf>,
    /// The runner's environment, for variables that say where toolchains are and those that configuration passes on.
    pub env: BTreeMap<String, String>,
    /// A command that calls [`crate::warden::run`].
    pub warden: Option<Vec<OsString>>,
}

impl HandsOptions {
    /// The plainest: no toolchains, no warden.
    pub fn new(hand_binary: impl Into<PathBuf>, state_dir: impl Into<PathBuf>) -> Self {
        HandsOptions {
            hand_binary: hand_binary.into(),
            state_dir: state_dir.into(),
            config: HandConfig::default(),
            home: None,
            env: BTreeMap::new(),
            warden: None,
        }
    }
}

/// Why hands can't be made at all.
#[derive(Debug, thiserror::Error)]
pub enum HandsError {
    /// What they have in common.
    #[error(transparent)]
    Prepare(#[from] PrepareError),
    /// The thread that spawns them.
    #[error(transparent)]
    Thread(#[from] SpawnThreadError),
    /// The warden.
    #[error(transparent)]
    Warden(#[from] WardenError),
    /// The host.
    #[error("the runner can't look at itself")]
    Own(#[source] io::Error),
}

impl Coded for HandsError {
    fn code(&self) -> Code {
        Code::HostBroken
    }
    fn hint(&self) -> Option<String> {
        Some("see what is missing with: tendon doctor".into())
    }
}

/// One hand to boot.
#[derive(Debug)]
pub struct HandSpec {
    /// The branch's root: a detached mount (`vfs::Root::mount_clone`).
    pub root: OwnedFd,
    /// Policy's decision.
    pub grant: Grant,
    /// More environment for every command.
    pub env: Vec<(String, String)>,
}

/// Why a hand did not boot. Nothing of it is left.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// What it is made of.
    #[error("the sandbox can't be prepared")]
    Prepare(#[from] PrepareError),
    /// Its control group.
    #[error("the limits can't be put in force")]
    Cgroup(#[from] CgroupError),
    /// bubblewrap could not be started.
    #[error("the sandbox can't be started")]
    Spawn(#[from] SpawnThreadError),
    /// The kernel's descriptors.
    #[error("the sandbox can't be watched")]
    Watch(#[source] io::Error),
    /// It ended before it answered.
    #[error("the sandbox ended while it started: {reason}")]
    Died {
        /// How, with the last lines that it wrote.
        reason: String,
    },
    /// It did not answer in time.
    #[error("the sandbox did not answer within {} s: {words}", BOOT_PATIENCE.as_secs())]
    Slow {
        /// The last lines that it wrote.
        words: String,
    },
    /// It does not hold.
    #[error("the sandbox was destroyed because it leaks: {}", problems.join("; "))]
    SelfTest {
        /// Each leak.
        problems: Vec<String>,
    },
    /// The process is ending.
    #[error("the runner is ending")]
    Ending,
}

impl Coded for BootError {
    fn code(&self) -> Code {
        match self {
            Self::SelfTest { .. } => Code::Refused,
            Self::Ending => Code::Cancelled,
            Self::Prepare(_)
            | Self::Cgroup(_)
            | Self::Spawn(_)
            | Self::Watch(_)
            | Self::Died { .. }
            | Self::Slow { .. } => Code::HostBroken,
        }
    }
    fn hint(&self) -> Option<String> {
        Some("see what this host can do with: tendon doctor".into())
    }
}

/// Makes hands. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Hands {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    sandbox: Sandbox,
    anchor: Anchor,
    cgroups: Cgroups,
    thread: SpawnThread,
    caps: HostCaps,
    expect: Expect,
    env: Vec<(String, String)>,
    /// CPUs that the runner may use.
    cpus: Vec<usize>,
    next_cpu: AtomicUsize,
    toolchains: Vec<&'static str>,
    options: HandsOptions,
    _warden: Option<Warden>,
}

impl Hands {
    /// Prepares. Removes what an earlier runner on the same state directory left in control groups. The process must be
    /// in a private mount namespace ([`sys::ns::enter_private`]), or be root.
    pub async fn new(options: HandsOptions) -> Result<Self, HandsError> {
        let prepared = tokio::task::spawn_blocking(move || Self::prepare(options)).await;
        prepared.map_err(|_| HandsError::Own(io::ErrorKind::Interrupted.into()))?
    }

    fn prepare(options: HandsOptions) -> Result<Self, HandsError> {
        // First: whenever this process is killed, somebody knows what to remove.
        let name = Cgroups::name(&options.state_dir);
        let candidates = Cgroups::candidates(&name);
        let warden = match &options.warden {
            Some(command) if !candidates.is_empty() => Some(Warden::start(command.clone(), candidates)?),
            Some(_) | None => None,
        };
        let cgroups = Cgroups::find(&options.state_dir, &name);
        let warden = warden.filter(|_| cgroups.mechanism().is_some());
        let swept = cgroups.sweep();
        if swept > 0 {
            tracing::info!(groups = swept, "removed control groups of an earlier runner");
        }
        let config = &options.config;
        let toolchains = match &options.home {
            Some(home) if config.toolchains => toolchains::find(home, &options.env),
            Some(_) | None => Toolchains::none(),
        };
        let found = toolchains.found.clone();
        let root = rustix::process::geteuid().is_root();
        let ids = root.then_some(Ids { uid: config.uid, gid: config.gid });
        let denied = denied_paths(&options.state_dir);
        let anchor = Anchor::new(&options.state_dir).map_err(HandsError::Own)?;
        let hand = options.hand_binary.clone();
        let sandbox = Sandbox::new(hand, config.clone(), toolchains, denied, ids, anchor.clone())?;
        let mut env = sandbox.env();
        for name in &config.env_pass {
            if let Some(value) = options.env.get(name) {
                set(&mut env, name.clone(), value.clone());
            }
        }
        let cpus = own_cpus().map_err(HandsError::Own)?;
        let inner = Inner {
            sandbox,
            anchor,
            caps: caps(&cgroups, cpus.len(), &options.hand_binary),
            cgroups,
            thread: SpawnThread::start()?,
            expect: Expect { namespaces: own_namespaces(), tolerate: config.tolerate.clone() },
            env,
            cpus,
            next_cpu: AtomicUsize::new(0),
            toolchains: found,
            options,
            _warden: warden,
        };
        Ok(Hands { inner: Arc::new(inner) })
    }

    /// What this host can enforce, for policy.
    pub fn caps(&self) -> HostCaps {
        self.inner.caps.clone()
    }

    /// Toolchains and caches that hands see.
    pub fn toolchains(&self) -> &[&'static str] {
        &self.inner.toolchains
    }

    /// Boots a hand and has it prove its confinement. Dropping the future kills what was spawned.
    pub async fn boot(&self, spec: HandSpec) -> Result<Hand, BootError> {
        let HandSpec { root, grant, env: more } = spec;
        let (hands, limits) = (self.clone(), grant.numbers);
        let dev = rustix::fs::fstat(&root).map_err(|error| BootError::Watch(error.into()))?.st_dev;
        // A task, so that it is never left halfway: what it made for a caller who is gone is killed.
        let spawned = tokio::spawn(async move { hands.spawn_one(root, limits).await });
        let Spawned { booting, process, channel, info, degraded } =
            spawned.await.map_err(|_| BootError::Ending)??;
        let (link, findings) = first_words(&process, channel, info).await?;
        let mut judgement = judge(&findings, &self.inner.expect);
        if !judgement.problems.is_empty() {
            return Err(BootError::SelfTest { problems: judgement.problems });
        }
        judgement.degraded.extend(degraded);
        let confinement = Confinement {
            tier: grant.tier.clone(),
            policy_digest: grant.digest.clone(),
            limits: grant.limits.clone(),
            self_test: findings,
            degraded: judgement.degraded,
        };
        let mut env = self.inner.env.clone();
        more.into_iter().for_each(|(name, value)| set(&mut env, name, value));
        booting.done();
        Ok(Hand::new(link, process, &grant, confinement, env, dev))
    }

    async fn spawn_one(&self, root: OwnedFd, limits: Limits) -> Result<Spawned, BootError> {
        let hands = self.clone();
        let prepared = tokio::task::spawn_blocking(move || hands.prepare_one(root, &limits));
        let (prepared, group) = prepared.await.map_err(|_| BootError::Ending)??;
        let Prepared { plan, channel, stderr, info, degraded } = prepared;
        let child = match self.inner.thread.spawn(plan).await {
            Ok(child) => child,
            Err(error) => {
                remove_later(group);
                return Err(error.into());
            }
        };
        let process = Process::watch(child.pidfd, group, self.inner.thread.clone());
        let booting = Booting(Some(Arc::clone(&process)));
        tokio::spawn(listen(Arc::clone(&process), stderr));
        Ok(Spawned { booting, process, channel, info, degraded })
    }

    fn prepare_one(&self, root: OwnedFd, limits: &Limits) -> Result<(Prepared, Option<Group>), BootError> {
        let cpus = self.choose_cpus(cpus(limits));
        let group = self.inner.cgroups.create(&hand_name()?, limits, &cpus)?;
        match self.inner.sandbox.prepare(Wanted { root, limits, cpus, group: group.as_ref() }) {
            Ok(prepared) => Ok((prepared, group)),
            Err(error) => {
                if let Some(group) = group {
                    group.remove();
                }
                Err(error.into())
            }
        }
    }

    /// CPUs for a hand that gets fewer than there are, each hand the next ones.
    fn choose_cpus(&self, count: usize) -> Vec<usize> {
        let all = &self.inner.cpus;
        if count >= all.len() {
            return Vec::new();
        }
        let first = self.inner.next_cpu.fetch_add(count, Ordering::Relaxed);
        let mut chosen: Vec<usize> = (0..count).map(|n| all[(first + n) % all.len()]).collect();
        chosen.sort_unstable();
        chosen
    }

    pub(crate) fn options(&self) -> &HandsOptions {
        &self.inner.options
    }

    pub(crate) fn anchor(&self) -> &Anchor {
        &self.inner.anchor
    }

    pub(crate) fn cgroups(&self) -> &Cgroups {
        &self.inner.cgroups
    }
}

/// A hand of which nothing is known yet.
struct Spawned {
    booting: Booting,
    process: Arc<Process>,
    channel: UnixStream,
    info: OwnedFd,
    degraded: Vec<String>,
}

/// Kills a hand whose boot is not completed.
struct Booting(Option<Arc<Process>>);

impl Booting {
    fn done(mut self) {
        self.0 = None;
    }
}

impl Drop for Booting {
    fn drop(&mut self) {
        if let Some(process) = &self.0 {
            process.kill();
        }
    }
}

/// Connects, learns which process is the first inside, and asks for the self-test.
async fn first_words(
    process: &Process,
    channel: UnixStream,
    info: OwnedFd,
) -> Result<(Link, Vec<(String, String)>), BootError> {
    let talk = async {
        if let Some((pid, first)) = first_process(info).await.map_err(BootError::Watch)? {
            process.set_first(pid, first);
        }
        let link = Link::connect(channel).await.map_err(lost)?;
        let findings = link.self_test().await.map_err(lost)?;
        Ok::<_, BootError>((link, findings))
    };
    let talked = tokio::select! {
        talked = timeout(BOOT_PATIENCE, talk) => talked,
        reason = process.gone() => return Err(BootError::Died { reason }),
    };
    match talked {
        Ok(Err(BootError::Died { reason })) => {
            // The channel's end is seen before the process's.
            let known = timeout(Duration::from_secs(2), process.gone()).await;
            Err(BootError::Died { reason: known.unwrap_or(reason) })
        }
        Ok(done) => done,
        Err(_) => {
            Err(BootError::Slow { words: process.last_words().unwrap_or_else(|| "it wrote nothing".into()) })
        }
    }
}

fn lost(error: LinkError) -> BootError {
    BootError::Died { reason: error.to_string() }
}

/// bubblewrap writes `{ "child-pid": N, … }` and closes.
async fn first_process(info: OwnedFd) -> io::Result<Option<(i32, OwnedFd)>> {
    let mut text = Vec::new();
    Receiver::from_owned_fd(info)?.take(4096).read_to_end(&mut text).await?;
    let value: serde_json::Value = serde_json::from_slice(&text).unwrap_or_default();
    let pid = value["child-pid"].as_i64().and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw);
    // If it is gone already the channel will tell.
    Ok(pid.and_then(|pid| Some((pid.as_raw_pid(), pidfd_open(pid, PidfdFlags::empty()).ok()?))))
}

/// Keeps what is written to standard error until everybody has closed it.
async fn listen(process: Arc<Process>, stderr: OwnedFd) {
    let Ok(mut pipe) = Receiver::from_owned_fd(stderr) else { return };
    let mut buffer = [0u8; 4096];
    while let Ok(count @ 1..) = pipe.read(&mut buffer).await {
        process.note_stderr(&buffer[..count], STDERR_BYTES_MAX);
    }
}

fn remove_later(group: Option<Group>) {
    if let Some(group) = group {
        tokio::task::spawn_blocking(move || group.remove());
    }
}

fn hand_name() -> Result<String, BootError> {
    let mut random = [0u8; 8];
    getrandom::fill(&mut random).map_err(|_| BootError::Ending)?;
    Ok(format!("hand-{:016x}", u64::from_ne_bytes(random)))
}

/// What the self-test must find closed.
fn denied_paths(state_dir: &Path) -> Vec<JsonBytes> {
    let known = ["/root/.ssh", "/etc/shadow", "/var/run/docker.sock", "/run/dbus"];
    [JsonBytes::of_path(state_dir)].into_iter().chain(known.map(JsonBytes::from)).collect()
}

fn own_cpus() -> io::Result<Vec<usize>> {
    let set = rustix::thread::sched_getaffinity(None)?;
    Ok((0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect())
}

fn own_namespaces() -> Vec<(String, String)> {
    let link = |kind: &str| std::fs::read_link(format!("/proc/self/ns/{kind}"));
    let name =
        |kind: &&str| (kind.to_string(), link(kind).map(|to| to.display().to_string()).unwrap_or_default());
    NAMESPACES.iter().map(name).collect()
}

fn caps(cgroups: &Cgroups, cpus: usize, hand_binary: &Path) -> HostCaps {
    let can = cgroups.controllers();
    let by = |has: bool| cgroups.mechanism().filter(|_| has).map(str::to_owned);
    let missing = if !Path::new(BWRAP).exists() {
        let fix = Some("apt-get install bubblewrap".to_owned());
        Some(Missing { what: format!("{BWRAP} does not exist"), fix })
    } else if !hand_binary.exists() {
        let what = format!("the agent's binary {} does not exist", hand_binary.display());
        Some(Missing { what, fix: Some("install tendon's `hand` beside `tendond`".into()) })
    } else {
        None
    };
    HostCaps {
        cpus: u32::try_from(cpus).unwrap_or(u32::MAX),
        memory_bytes: memory_bytes(),
        cpu_by: by(can.cpu),
        memory_by: by(can.memory),
        pids_by: by(can.pids),
        sandbox_missing: missing,
    }
}

fn memory_bytes() -> u64 {
    let mut text = String::new();
    let read =
        std::fs::File::open("/proc/meminfo").and_then(|file| file.take(4096).read_to_string(&mut text));
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:")).filter(|_| read.is_ok());
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kib.map_or(0, |kib| kib * 1024)
}
