//! What this host can do, found by trying, for `tendon doctor`.

use std::ffi::CString;
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use policy::Config;
use proto::http::{DoctorCheck, DoctorState};
use proto::verify::LimitsAsked;
use rustix::pipe::{PipeFlags, pipe_with};
use sys::spawn::{Ended, Ids, Plan, Spawner, reap};

use crate::anchor::Anchor;
use crate::generated::Tmpfs;
use crate::hands::{HandSpec, Hands};
use crate::limits::PROBE_OUTPUT_BYTES_MAX;
use crate::tier::bwrap::BWRAP;
use crate::tier::mounts::{Owners, clone_fd, clone_tree};

/// How a trial went: what was found, or what is wrong and what would help.
type Tried = Result<String, (String, Option<String>)>;

impl Hands {
    /// Tries everything. Takes about a second at most; leaves nothing behind.
    pub async fn probe(&self) -> Vec<DoctorCheck> {
        let hands = self.clone();
        let mut checks = tokio::task::spawn_blocking(move || hands.probe_host()).await.unwrap_or_default();
        checks.insert(0, check("tier sandbox", DoctorState::Broken, self.probe_boot().await));
        checks
    }

    fn probe_host(&self) -> Vec<DoctorCheck> {
        let options = self.options();
        let root = rustix::process::geteuid().is_root();
        let ids = root.then_some(Ids { uid: options.config.uid, gid: options.config.gid });
        let place = match options.state_dir.join("tmp") {
            tmp if tmp.is_dir() => tmp,
            _ => options.state_dir.clone(),
        };
        let landlock_missing = if options.config.tolerate.iter().any(|name| name == "landlock") {
            DoctorState::Degraded
        } else {
            DoctorState::Broken
        };
        let mut checks = vec![
            check("bubblewrap", DoctorState::Broken, bwrap_version()),
            check("namespaces", DoctorState::Broken, namespaces(ids)),
            check("seccomp", DoctorState::Broken, seccomp()),
            check("landlock", landlock_missing, landlock()),
            check("engine overlay", DoctorState::Degraded, overlay(&place, ids, self.anchor())),
            check("detached mounts", DoctorState::Degraded, detached(self.anchor())),
            check("engine copy, by reflink", DoctorState::Degraded, reflink(&place)),
        ];
        checks.extend(self.probe_limits());
        let found = self.toolchains().join(", ");
        let toolchains =
            if found.is_empty() { Ok("none in the home of the runner's user".into()) } else { Ok(found) };
        checks.push(check("toolchains", DoctorState::Works, toolchains));
        checks
    }

    fn probe_limits(&self) -> Vec<DoctorCheck> {
        let cgroups = self.cgroups();
        let can = cgroups.controllers();
        let by = cgroups.mechanism().unwrap_or("nothing");
        let why = |what: &str| {
            let tried: Vec<&str> = cgroups.tried.iter().map(String::as_str).collect();
            let tried = if tried.is_empty() {
                "no control group of this runner has it".into()
            } else {
                tried.join("; ")
            };
            let fix = "start the runner as root, or with: systemd-run --user --scope -p Delegate=yes tendond";
            Err((format!("{what}: {tried}"), Some(fix.to_owned())))
        };
        let limit = |name: &str, has: bool, what: &str| {
            let tried = if has { Ok(format!("by {by}")) } else { why(what) };
            check(name, DoctorState::Missing, tried)
        };
        vec![
            limit("limit memory", can.memory, "memory can't be limited"),
            limit("limit cpu", can.cpu, "CPU time can't be limited"),
            limit("limit pids", can.pids, "the number of processes can't be limited"),
            check("limit disk", DoctorState::Works, Ok("by looking at the branch while commands run".into())),
            check("limit wall time", DoctorState::Works, Ok("by a deadline per command".into())),
            limit("fork of a branch in use", can.freezer, "a running hand can't be frozen"),
        ]
    }

    /// Boots a hand on an empty directory and has it prove its confinement.
    async fn probe_boot(&self) -> Tried {
        let failed = |what: String| (what, Some("see the other lines".to_owned()));
        let caps = self.caps();
        let grant = policy::grant(&LimitsAsked::default(), &Config::default(), &caps)
            .map_err(|refusal| (refusal.reason, refusal.allow))?;
        let options = self.options();
        let dir = Scratch::new(&options.state_dir).map_err(|error| failed(error.to_string()))?;
        if rustix::process::geteuid().is_root() {
            let given = chown(&dir.0, Some(options.config.uid), Some(options.config.gid));
            given.map_err(|error| failed(error.to_string()))?;
        }
        let (root, _) = clone_tree(&dir.0).map_err(|error| failed(error.to_string()))?;
        let start = Instant::now();
        let booted = self.boot(HandSpec { root, grant, env: Vec::new() }).await;
        let hand = booted.map_err(|error| failed(chain(&error)))?;
        let took = start.elapsed().as_millis();
        let degraded = hand.confinement().degraded;
        hand.stop().await;
        let without =
            if degraded.is_empty() { String::new() } else { format!(", degraded: {}", degraded.join(", ")) };
        Ok(format!("a hand booted and proved its confinement in {took} ms{without}"))
    }
}

fn check(name: &str, otherwise: DoctorState, tried: Tried) -> DoctorCheck {
    let (state, detail, fix) = match tried {
        Ok(detail) => (DoctorState::Works, detail, None),
        Err((detail, fix)) => (otherwise, detail, fix),
    };
    DoctorCheck { name: name.into(), state, detail, fix }
}

fn chain(error: &dyn std::error::Error) -> String {
    let parts = std::iter::successors(Some(error), |error| error.source());
    parts.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

/// A directory that goes when this is dropped.
struct Scratch(PathBuf);

impl Scratch {
    fn new(below: &Path) -> io::Result<Self> {
        let mut random = [0u8; 8];
        getrandom::fill(&mut random).map_err(|_| io::ErrorKind::Other)?;
        let dir = below.join(format!("doctor-{:016x}", u64::from_ne_bytes(random)));
        fs::create_dir(&dir)?;
        Ok(Scratch(dir))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Runs a program without input; its status and the end of what it wrote.
fn run(argv: &[&str], ids: Option<Ids>) -> io::Result<(Ended, String)> {
    let null = OwnedFd::from(File::open("/dev/null")?);
    let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
    let argv =
        argv.iter().map(|arg| CString::new(*arg)).collect::<Result<_, _>>().map_err(io::Error::other)?;
    let fds = vec![(0, null), (1, write.try_clone()?), (2, write)];
    let child = Spawner::new().spawn(Plan { argv, fds, ids, ..Plan::default() }).map_err(io::Error::other)?;
    let mut text = String::new();
    File::from(read).take(PROBE_OUTPUT_BYTES_MAX).read_to_string(&mut text)?;
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        match reap(child.pidfd.as_fd())? {
            Some(ended) => return Ok((ended, text.trim().to_owned())),
            None if Instant::now() > deadline => return Err(io::ErrorKind::TimedOut.into()),
            None => std::thread::sleep(Duration::from_millis(2)),
        }
    }
}

fn bwrap_version() -> Tried {
    let install = || Some("apt-get install bubblewrap".to_owned());
    match run(&[BWRAP, "--version"], None) {
        Ok((Ended::Exited(0), text)) => Ok(text),
        Ok((ended, text)) => Err((format!("{BWRAP} --version: {ended:?}: {text}"), install())),
        Err(error) => Err((chain(&error), install())),
    }
}

/// As the user that hands run as.
fn namespaces(ids: Option<Ids>) -> Tried {
    let argv = [
        BWRAP,
        "--unshare-all",
        "--ro-bind",
        "/",
        "/",
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        "--",
        "/bin/true",
    ];
    let who = if ids.is_some() { "the hands' user, started by root" } else { "this user" };
    match run(&argv, ids) {
        Ok((Ended::Exited(0), _)) => Ok(format!("{who} can make all of them")),
        Ok((_, text)) => Err((format!("{who} can't make them: {text}"), Some(namespaces_fix().into()))),
        Err(error) => Err((chain(&error), Some("apt-get install bubblewrap".into()))),
    }
}

/// What would let a user who is not root make namespaces here: the usual switches that forbid it, looked up one by one.
pub fn namespaces_fix() -> &'static str {
    let is = |path: &str, value: &str| fs::read_to_string(path).is_ok_and(|text| text.trim() == value);
    if is("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1") {
        "AppArmor restricts them (Ubuntu 23.10 and later): sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, \
         or load AppArmor profiles that let tendond and /usr/bin/bwrap use userns"
    } else if is("/proc/sys/kernel/unprivileged_userns_clone", "0") {
        "sudo sysctl -w kernel.unprivileged_userns_clone=1"
    } else if is("/proc/sys/user/max_user_namespaces", "0") {
        "sudo sysctl -w user.max_user_namespaces=15000"
    } else {
        "in a container: give it its own /proc without masked parts, or run the runner outside"
    }
}

fn seccomp() -> Tried {
    let fix = || Some("boot a kernel with CONFIG_SECCOMP_FILTER".to_owned());
    match fs::read_to_string("/proc/sys/kernel/seccomp/actions_avail") {
        Ok(text) if text.split_ascii_whitespace().any(|action| action == "errno") => {
            let own = crate::seccomp::Filter::compile();
            own.map(|_| "filters, and the list compiles".into()).map_err(|error| (chain(&error), None))
        }
        Ok(text) => Err((format!("the kernel has only: {}", text.trim()), fix())),
        Err(error) => Err((format!("the kernel has none: {error}"), fix())),
    }
}

fn landlock() -> Tried {
    sys::facts::landlock_abi().map(|abi| format!("generation {abi}")).map_err(|error| {
        let fix = match error.raw_os_error() {
            Some(95) => "it is built in but not enabled: add `landlock` to the boot parameter lsm=",
            _ => "boot a kernel with CONFIG_SECURITY_LANDLOCK (5.13 or later)",
        };
        (error.to_string(), Some(fix.to_owned()))
    })
}

/// Mounts one over a directory of the state directory, as branches are, and writes through it.
fn overlay(place: &Path, ids: Option<Ids>, anchor: &Anchor) -> Tried {
    let tried = (|| {
        let dir = Scratch::new(place)?;
        fs::write(dir.0.join("below"), "below")?;
        let upper = Tmpfs::new(1 << 20, anchor)?;
        let mount = Owners::new(ids, anchor.clone()).copy_on_write(&dir.0, &upper, "upper")?;
        let seen = PathBuf::from(format!("/proc/self/fd/{}", mount.as_raw_fd()));
        fs::write(seen.join("below"), "above")?;
        let kept = fs::read_to_string(dir.0.join("below"))? == "below";
        if kept { Ok(()) } else { Err(io::Error::other("a write reached the lower directory")) }
    })();
    let how = if ids.is_some() {
        "as root"
    } else {
        "in a user namespace (renaming a directory of the base fails there)"
    };
    match tried {
        Ok(()) => Ok(format!("mounts {how}")),
        Err(error) => {
            let fix =
                "modprobe overlay; without root it takes Linux 5.11. Branches are plain copies until then";
            Err((format!("does not mount {how}: {error}"), Some(fix.into())))
        }
    }
}

fn detached(anchor: &Anchor) -> Tried {
    let tried = Tmpfs::new(1 << 20, anchor).and_then(|mount| clone_fd(mount.fd().as_fd()));
    let how = if anchor.place().is_some() {
        "can be made, and are attached in the runner's own namespace, since before Linux 6.15 they can't be cloned"
    } else {
        "can be made and cloned"
    };
    tried.map(|_| how.to_owned()).map_err(|error| (error.to_string(), None))
}

fn reflink(place: &Path) -> Tried {
    let tried = (|| {
        let dir = Scratch::new(place)?;
        fs::write(dir.0.join("a"), [1u8; 8192])?;
        let (a, b) = (File::open(dir.0.join("a"))?, File::create(dir.0.join("b"))?);
        rustix::fs::ioctl_ficlone(&b, &a)?;
        Ok::<_, io::Error>(())
    })();
    tried.map(|()| "copies share their blocks".to_owned()).map_err(|error| {
        let fix = "put the state directory on XFS or btrfs for cheap copies; overlay branches don't need it";
        (format!("the state directory's file system has none: {error}"), Some(fix.to_owned()))
    })
}
