//! The cases. Each is told on the serial line: `case NAME ok`, or `case NAME FAIL` and why.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::host::{CGROUPS, Groups, Session, USER};
use crate::leftovers::{command_lines, groups_named};

type Case = Result<(), String>;

/// How long what was killed may take to vanish.
const VANISH_MAX: Duration = Duration::from_secs(15);
/// How long a runner or a hand may take to be there.
const START_MAX: Duration = Duration::from_secs(40);
/// Eats far more memory than it may.
const GLUTTON: &[&str] = &["--memory", "64MiB", "--check", "dd if=/dev/zero of=/dev/null bs=200M count=1"];
/// Starts more processes than it may. The next command is started when they have ended.
const BREEDER: &[&str] = &[
    "--pids",
    "20",
    "--check",
    "sh -c '(n=0; while [ $n -lt 40 ]; do sleep 2 & n=$((n+1)); done) || exec sleep 4'",
    "--check",
    "true",
];

macro_rules! ensure {
    ($holds:expr, $($why:tt)+) => { if !$holds { return Err(format!($($why)+)); } };
}

/// Runs all of them.
pub fn run() {
    let groups = Groups::make();
    root(&groups);
    not_delegated(&groups);
    delegated(&groups);
    no_namespaces(&groups);
}

fn tell(name: &str, case: impl FnOnce() -> Case) {
    let start = Instant::now();
    let how = match case() {
        Ok(()) => format!("ok {:.1} s", start.elapsed().as_secs_f32()),
        Err(why) => format!("FAIL {}", why.replace('\n', " | ")),
    };
    let _ = writeln!(std::io::stdout(), "case {name} {how}");
}

fn root(groups: &Groups) {
    let root = Session::new("of-root", 0, &groups.root);
    tell("root-doctor", || everything_is_enforced(&root));
    tell("root-report", || report_is_filled(&root));
    tell("root-memory", || memory_is_limited(&root));
    tell("root-pids", || processes_are_limited(&root));
    tell("root-timeout", || {
        let check = "sh -c 'setsid sleep 4321 & sleep 4321'";
        let report = root.verify(1, &["--timeout", "2s", "--check", check])?;
        ensure!(outcome(&report, 0)["how"] == "timed_out", "{report}");
        nothing_left(&["sleep 4321"])
    });
    root.stop();
    tell("root-killed", || killed_runner_leaves_nothing(&root, Path::new(CGROUPS)));
    tell("root-is-where-it-was", || untouched(&groups.root));
}

fn not_delegated(groups: &Groups) {
    let user = Session::new("of-login", USER, &groups.login);
    tell("login-doctor", || {
        let doctor = user.doctor()?;
        ensure!(doctor.code == Some(0), "status {:?}, broken: {:?}", doctor.code, doctor.named("broken"));
        for name in ["limit memory", "limit cpu", "limit pids"] {
            let check = doctor.check(name);
            ensure!(check.starts_with("missing"), "{name}: {check}");
            let wanted = ["cgroup2", "session-2.scope", "systemd-run --user --scope -p Delegate=yes"];
            ensure!(wanted.iter().all(|word| check.contains(word)), "{name}: {check}");
            ensure!(!check.contains("cpuacct"), "version 1 is not what is missing: {check}");
        }
        Ok(())
    });
    tell("login-limit-refused", || {
        for limit in [["--memory", "256MiB"], ["--pids", "100"]] {
            let ended = user.verify_ends(&[&limit[..], &["--check", "true"]].concat());
            let words = ["can't be enforced on this host", "tendon doctor"];
            let said = words.iter().all(|word| ended.stdout.contains(word) || ended.stderr.contains(word));
            ensure!(ended.code == Some(3) && said, "{limit:?}: {}", ended.text());
        }
        Ok(())
    });
    tell("login-default-named", || {
        let report = user.verify(0, &["--check", "true"])?;
        for name in ["memory_bytes_max", "pids_max"] {
            let by = enforced_by(&report, name);
            ensure!(by == "nothing", "{name} is said to be enforced by {by}");
        }
        Ok(())
    });
    user.stop();
}

fn delegated(groups: &Groups) {
    let scope = Session::new("of-scope", USER, &groups.scope);
    tell("scope-doctor", || everything_is_enforced(&scope));
    tell("scope-report", || report_is_filled(&scope));
    tell("scope-memory", || memory_is_limited(&scope));
    tell("scope-pids", || processes_are_limited(&scope));
    scope.stop();
    tell("scope-killed", || killed_runner_leaves_nothing(&scope, &groups.scope));
    // A shell in the scope: the first call moves it aside, and the second one starts where it was moved to.
    tell("scope-shell", || {
        let call = "tendon doctor --json && tendon runner stop";
        let ended = scope.run(&["sh", "-c", &format!("{call} >/dev/null; {call}")]);
        ensure!(ended.code == Some(0), "{}", ended.text());
        let count = ended.stdout.matches("by cgroup2").count();
        ensure!(count >= 3, "{}", ended.text());
        let aside = groups.scope.join("tendon-aside");
        wait("the runner's group is gone", VANISH_MAX, || {
            groups_named(&groups.scope, "tendon-") == [aside.clone()]
        })?;
        untouched(&aside)
    });
    for (name, group, place) in
        [("terminal", &groups.terminal, &groups.manager), ("given", &groups.given, &groups.given)]
    {
        let session = Session::new(name, USER, group);
        tell(&format!("{name}-doctor"), || everything_is_enforced(&session));
        tell(&format!("{name}-memory"), || memory_is_limited(&session));
        session.stop();
        tell(&format!("{name}-killed"), || killed_runner_leaves_nothing(&session, place));
    }
    // Root by sudo in the user's terminal: what was given to the user is not root's place.
    let sudo = Session::new("sudo", 0, &groups.terminal);
    tell("sudo-killed", || killed_runner_leaves_nothing(&sudo, Path::new(CGROUPS)));
    tell("terminal-is-where-it-was", || {
        untouched(&groups.terminal)?;
        let left = groups_named(&groups.manager, "tendon-");
        let left: Vec<_> = left.iter().filter(|path| !path.starts_with(&groups.scope)).collect();
        ensure!(left.is_empty(), "the runner left {left:?}");
        Ok(())
    });
}

fn no_namespaces(groups: &Groups) {
    let switch = "/proc/sys/kernel/unprivileged_userns_clone";
    let hint = "kernel.unprivileged_userns_clone=1";
    fs::write(switch, "0").expect("Debian's switch");
    let user = Session::new("without", USER, &groups.scope);
    tell("userns-off-doctor", || refused(&user.run(&["tendon", "doctor"]), hint));
    tell("userns-off-verify", || refused(&user.verify_ends(&["--check", "true"]), hint));
    let root = Session::new("root-without", 0, &groups.root);
    tell("userns-off-root-doctor", || {
        let doctor = root.doctor()?;
        let (tier, namespaces) = (doctor.check("tier sandbox"), doctor.check("namespaces"));
        ensure!(doctor.code == Some(4) && tier.starts_with("broken"), "{:?} {tier}", doctor.code);
        ensure!(namespaces.starts_with("broken") && namespaces.contains(hint), "{namespaces}");
        Ok(())
    });
    tell("userns-off-root-verify", || refused(&root.verify_ends(&["--check", "true"]), "tendon doctor"));
    root.stop();
    fs::write(switch, "1").expect("Debian's switch");
}

fn refused(ended: &super::host::Ended, hint: &str) -> Case {
    let said = ended.stdout.contains(hint) || ended.stderr.contains(hint);
    ensure!(ended.code == Some(4) && said && !ended.stdout.contains("tree_before"), "{}", ended.text());
    Ok(())
}

fn everything_is_enforced(session: &Session) -> Case {
    let doctor = session.doctor()?;
    let broken = doctor.named("broken");
    ensure!(doctor.code == Some(0) && broken.is_empty(), "status {:?}, broken: {broken:?}", doctor.code);
    // Debian 12's kernel does all of it, and ext4 has no reflinks.
    ensure!(
        doctor.named("degraded") == ["\"engine copy, by reflink\""],
        "degraded: {:?}",
        doctor.named("degraded")
    );
    for name in ["limit memory", "limit cpu", "limit pids", "fork of a branch in use"] {
        let check = doctor.check(name);
        ensure!(check.starts_with("works: by cgroup2"), "{name}: {check}");
    }
    Ok(())
}

fn report_is_filled(session: &Session) -> Case {
    let spin = "sh -c 'n=0; while [ $n -lt 3000 ]; do n=$((n+1)); done'";
    let limits = ["--memory", "256MiB", "--pids", "100", "--cpus", "0.5"];
    let report = session.verify(0, &[&limits[..], &["--check", spin]].concat())?;
    for (name, value) in [("memory_bytes_max", 256 << 20), ("pids_max", 100), ("cpu_milli", 500)] {
        let by = enforced_by(&report, name);
        ensure!(by == "cgroup2", "{name} is enforced by {by}");
        let found = limit(&report, name)["value"].as_u64();
        ensure!(found == Some(value), "{name} is {found:?}");
    }
    let command = &report["commands"][0];
    let peak = command["memory_bytes_peak"].as_u64().unwrap_or(0);
    ensure!((100_000..256 << 20).contains(&peak), "the peak of memory is {peak}");
    ensure!(command["cpu_ms"].as_u64().is_some_and(|ms| ms > 0), "no CPU time: {command}");
    Ok(())
}

fn memory_is_limited(session: &Session) -> Case {
    let report = session.verify(1, GLUTTON)?;
    let how = outcome(&report, 0);
    ensure!(how["how"] == "limit_exceeded" && how["limit"] == "memory", "{how}");
    Ok(())
}

fn processes_are_limited(session: &Session) -> Case {
    let report = session.verify(0, BREEDER)?;
    let words = report["commands"][0]["stderr"]["tail"].to_string();
    ensure!(words.to_lowercase().contains("fork"), "no refusal: {}", report["commands"][0]);
    Ok(())
}

/// Kills a runner under which a command and a grandchild of it run, after a look at the hand's group, which must lie in
/// `place`.
fn killed_runner_leaves_nothing(session: &Session, place: &Path) -> Case {
    let mut runner = Background::start(session, &["tendond"]);
    wait("the runner answers", START_MAX, || session.run(&["tendon", "runner", "status"]).code == Some(0))?;
    let source = session.source();
    let check = "sh -c 'setsid sleep 9876 & sleep 9876'";
    let limits = ["--memory", "128MiB", "--pids", "50", "--cpus", "1"];
    let argv = [&["tendon", "verify", "--files", &source, "--check", check], &limits[..]].concat();
    let client = Background::start(session, &argv);
    let two = || command_lines().iter().filter(|line| line.as_str() == "sleep 9876").count() == 2;
    let seen = wait("the command runs", START_MAX, two).and_then(|()| one_hand(place));
    runner.kill();
    drop(client);
    seen?;
    nothing_left(&["sleep 9876", "bwrap", "hand", "tendond"])?;
    let mounts = read(Path::new("/proc/self/mountinfo"));
    let state = session.state().to_string_lossy().into_owned();
    ensure!(!mounts.contains(&state) && !mounts.contains("overlay"), "mounts are left: {mounts}");
    Ok(())
}

/// A group that was given to nobody: nothing may be made, moved or enabled in it.
fn untouched(group: &Path) -> Case {
    let (enabled, kind) = (read(&group.join("cgroup.subtree_control")), read(&group.join("cgroup.type")));
    let inside = groups_named(group, "tendon-");
    ensure!(
        enabled.trim().is_empty() && kind.trim() == "domain" && inside.is_empty(),
        "{}: {kind}, passes on {enabled:?}, holds {inside:?}",
        group.display()
    );
    Ok(())
}

/// A command that runs until it is killed by SIGKILL, at the latest when this is dropped.
struct Background(Child);

impl Background {
    fn start(session: &Session, argv: &[&str]) -> Self {
        let mut command = session.command(argv);
        Background(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("a command starts"))
    }

    fn kill(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Looks at the only hand's group: that its limits are the kernel's, and that its processes are in it.
fn one_hand(place: &Path) -> Case {
    let found = groups_named(Path::new(CGROUPS), "hand-");
    let [hand] = &found[..] else { return Err(format!("not one hand: {found:?}")) };
    ensure!(hand.ancestors().nth(2) == Some(place), "{} is not in {}", hand.display(), place.display());
    let get = |name: &str| read(&hand.join(name)).trim().to_owned();
    ensure!(get("memory.max") == (128 << 20).to_string(), "memory.max is {}", get("memory.max"));
    ensure!(get("memory.swap.max") == "0" || get("memory.swap.max").is_empty(), "swap is allowed");
    ensure!(get("pids.max").parse().is_ok_and(|max: u32| (50..60).contains(&max)), "{}", get("pids.max"));
    ensure!(get("cpu.max") == "100000 100000", "cpu.max is {}", get("cpu.max"));
    // A user's service manager is given no cpuset; root has it, and affinity holds in both cases.
    let pinned = get("cpuset.cpus");
    ensure!(pinned.len() == 1 || !hand.join("cpuset.cpus").exists(), "cpuset.cpus is {pinned:?}");
    ensure!(hand.join("cpuset.cpus").exists() || hand.starts_with("/sys/fs/cgroup/user.slice"), "no cpuset");
    let inside = get("cgroup.procs");
    ensure!(inside.lines().count() >= 4, "only these processes are in the group: {inside}");
    for pid in inside.lines() {
        // A copy of the runner's mounts would keep branches of others alive.
        let mounts = read(Path::new(&format!("/proc/{pid}/mountinfo")));
        let copied: Vec<&str> = mounts.lines().filter(|line| line.contains("state/mnt")).collect();
        ensure!(copied.is_empty(), "process {pid} has the runner's mounts: {copied:?}");
    }
    Ok(())
}

/// Waits until no such command line and none of our groups is there, but the one that what the user runs was moved to.
fn nothing_left(names: &[&str]) -> Case {
    let left = || {
        let ours = |line: &String| {
            let program = line.split(' ').next().and_then(|path| path.rsplit('/').next());
            names.iter().any(|name| line == name || program == Some(name))
        };
        command_lines().into_iter().filter(ours).collect::<Vec<_>>()
    };
    wait("the processes are gone", VANISH_MAX, || left().is_empty())
        .map_err(|why| format!("{why}: {:?}", left()))?;
    if !names.contains(&"tendond") {
        return Ok(());
    }
    let groups = || -> Vec<PathBuf> {
        let all = groups_named(Path::new(CGROUPS), "tendon-");
        all.into_iter().filter(|path| !path.ends_with("tendon-aside")).collect()
    };
    wait("the groups are gone", VANISH_MAX, || groups().is_empty())
        .map_err(|why| format!("{why}: {:?}", groups()))
}

fn wait(what: &str, limit: Duration, mut condition: impl FnMut() -> bool) -> Case {
    let start = Instant::now();
    while !condition() {
        ensure!(start.elapsed() < limit, "{what}: not within {limit:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

fn outcome(report: &Value, command: usize) -> &Value {
    &report["commands"][command]["outcome"]
}

fn limit<'a>(report: &'a Value, name: &str) -> &'a Value {
    let limits = report["confinement"]["limits"].as_array();
    limits.into_iter().flatten().find(|limit| limit["name"] == name).unwrap_or(&Value::Null)
}

/// What enforces a limit, `nothing` where the report says so.
fn enforced_by(report: &Value, name: &str) -> String {
    match limit(report, name).get("enforced_by") {
        Some(Value::String(by)) => by.clone(),
        Some(Value::Null) => "nothing".into(),
        Some(_) | None => format!("not in the report: {}", report["confinement"]["limits"]),
    }
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_default()
}
