//! The guest as systemd would set it up: the groups of logins and of a user's service manager, and commands in them.

use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::fs::{XattrFlags, setxattr};
use serde_json::Value;
use testkit::process::command;

/// Where the groups are.
pub const CGROUPS: &str = "/sys/fs/cgroup";
/// The user who is not root.
pub const USER: u32 = 1000;
/// The argument by which this program enters a group as a user: see [`enter`].
pub const ENTER: &str = "enter";
/// A call that takes longer hangs.
const CALL_MAX: Duration = Duration::from_secs(60);

/// The groups in which commands run.
pub struct Groups {
    /// Root's login.
    pub root: PathBuf,
    /// A user's login over ssh: the group is root's.
    pub login: PathBuf,
    /// The user's service manager, to which everything below was given.
    pub manager: PathBuf,
    /// A unit of it that was started with `Delegate=yes`.
    pub scope: PathBuf,
    /// A unit of it without: a terminal of a desktop.
    pub terminal: PathBuf,
    /// A group that somebody gave to the user by hand.
    pub given: PathBuf,
}

impl Groups {
    /// Makes them as systemd 252 does, extended attributes included.
    pub fn make() -> Self {
        let top = Path::new(CGROUPS);
        let init = top.join("init.scope");
        fs::create_dir(&init).expect("mkdir");
        for pid in ["1", "0"] {
            fs::write(init.join("cgroup.procs"), pid).expect("a process enters init.scope");
        }
        let all = "+cpu +memory +pids";
        let inner = |path: PathBuf| {
            fs::create_dir(&path).expect("mkdir");
            fs::write(path.join("cgroup.subtree_control"), all).expect("controllers are passed on");
            path
        };
        let leaf = |path: PathBuf| {
            fs::create_dir(&path).expect("mkdir");
            path
        };
        fs::write(top.join("cgroup.subtree_control"), all).expect("controllers are passed on");
        let slice = inner(top.join("user.slice"));
        let (of_root, of_user) = (inner(slice.join("user-0.slice")), inner(slice.join("user-1000.slice")));
        let manager = inner(of_user.join("user@1000.service"));
        let apps = inner(manager.join("app.slice"));
        let groups = Groups {
            root: leaf(of_root.join("session-1.scope")),
            login: leaf(of_user.join("session-2.scope")),
            scope: leaf(apps.join("run-r1.scope")),
            terminal: leaf(apps.join("vte-spawn-1.scope")),
            given: leaf(slice.join("given")),
            manager,
        };
        for dir in [&groups.manager, &apps, &groups.scope, &groups.terminal, &groups.given] {
            give(dir);
        }
        mark(&groups.manager, &["user.delegate", "trusted.delegate"]);
        // The user's manager may not set the other one.
        mark(&groups.scope, &["user.delegate"]);
        groups
    }
}

/// What systemd gives to the owner of a delegated group.
fn give(dir: &Path) {
    for path in ["", "cgroup.procs", "cgroup.subtree_control", "cgroup.threads"] {
        chown(dir.join(path), Some(USER), Some(USER)).expect("chown");
    }
}

fn mark(dir: &Path, names: &[&str]) {
    for name in names {
        setxattr(dir, *name, b"1", XattrFlags::empty()).expect("an extended attribute of a group");
    }
}

/// Somebody in a group, with a state directory.
pub struct Session {
    uid: u32,
    group: PathBuf,
    home: PathBuf,
}

/// A command's end.
pub struct Ended {
    /// Its exit status; none: it hung, or was killed.
    pub code: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl Session {
    /// A user in a group. `name` tells the homes apart.
    pub fn new(name: &str, uid: u32, group: &Path) -> Self {
        let home = Path::new("/home").join(name);
        fs::create_dir(&home).expect("mkdir");
        chown(&home, Some(uid), Some(uid)).expect("chown");
        fs::set_permissions(&home, fs::Permissions::from_mode(0o700)).expect("chmod");
        Session { uid, group: group.to_owned(), home }
    }

    /// Where the state is.
    pub fn state(&self) -> PathBuf {
        self.home.join("state")
    }

    /// A command that is not started yet.
    pub fn command(&self, argv: &[&str]) -> std::process::Command {
        let mut command = command("/proc/self/exe");
        command.arg(ENTER).arg(self.uid.to_string()).arg(&self.group).args(argv);
        command.env_clear().env("PATH", "/usr/bin:/usr/sbin").env("HOME", &self.home);
        command.env("TENDON_STATE_DIR", self.state()).stdin(Stdio::null());
        command
    }

    /// Runs a command to its end.
    pub fn run(&self, argv: &[&str]) -> Ended {
        // Files, not pipes: a runner that lives on must not keep the call open.
        let file = |end: &str| self.home.with_extension(end);
        let create = |end: &str| File::create(file(end)).expect("create");
        let mut command = self.command(argv);
        let mut child =
            command.stdout(create("out")).stderr(create("err")).spawn().expect("a command starts");
        let start = Instant::now();
        let code = loop {
            match child.try_wait().expect("wait") {
                Some(status) => break status.code(),
                None if start.elapsed() > CALL_MAX => {
                    let _ = child.kill();
                    let _ = child.wait();
                    break None;
                }
                None => std::thread::sleep(Duration::from_millis(10)),
            }
        };
        let read = |end: &str| String::from_utf8_lossy(&fs::read(file(end)).expect("read")).into_owned();
        Ended { code, stdout: read("out"), stderr: read("err") }
    }

    /// `tendon doctor --json`.
    pub fn doctor(&self) -> Result<Doctor, String> {
        let ended = self.run(&["tendon", "doctor", "--json"]);
        let value = ended.json()?;
        Ok(Doctor { code: ended.code, value })
    }

    /// `tendon verify` of a small directory, and its report. Fails unless the exit status is `code`.
    pub fn verify(&self, code: i32, args: &[&str]) -> Result<Value, String> {
        let ended = self.verify_ends(args);
        if ended.code != Some(code) {
            return Err(format!("not exit status {code}: {}", ended.text()));
        }
        ended.json()
    }

    /// The same, however it ends.
    pub fn verify_ends(&self, args: &[&str]) -> Ended {
        let source = self.source();
        let argv = [&["tendon", "verify", "--json", "--files", &source], args].concat();
        self.run(&argv)
    }

    /// A small directory of the user's.
    pub fn source(&self) -> String {
        let source = self.home.join("source");
        if !source.exists() {
            fs::create_dir(&source).expect("mkdir");
            fs::write(source.join("a-file"), "content\n").expect("write");
            for path in [source.clone(), source.join("a-file")] {
                chown(path, Some(self.uid), Some(self.uid)).expect("chown");
            }
        }
        source.to_string_lossy().into_owned()
    }

    /// Ends the private runner.
    pub fn stop(&self) {
        self.run(&["tendon", "runner", "stop"]);
    }
}

impl Ended {
    /// All of it, on one line.
    pub fn text(&self) -> String {
        format!("status {:?}, stdout {:?}, stderr {:?}", self.code, self.stdout, self.stderr)
    }

    /// Standard output as JSON.
    pub fn json(&self) -> Result<Value, String> {
        serde_json::from_str(&self.stdout).map_err(|error| format!("no JSON ({error}): {}", self.text()))
    }
}

/// What doctor found.
pub struct Doctor {
    /// The exit status.
    pub code: Option<i32>,
    value: Value,
}

impl Doctor {
    /// A check's state, detail and fix, in one text.
    pub fn check(&self, name: &str) -> String {
        let checks = self.value["checks"].as_array().into_iter().flatten();
        let found = checks.clone().find(|check| check["name"] == name);
        let text = |key: &str| found.and_then(|check| check[key].as_str()).unwrap_or("-").to_owned();
        format!("{}: {} (fix: {})", text("state"), text("detail"), text("fix"))
    }

    /// The names of the checks in this state.
    pub fn named(&self, state: &str) -> Vec<String> {
        let checks = self.value["checks"].as_array().into_iter().flatten();
        checks.filter(|check| check["state"] == state).map(|check| check["name"].to_string()).collect()
    }
}

/// Enters a group and becomes a user: `UID GROUP COMMAND ...`.
pub fn enter(args: &[String]) {
    let [uid, group, program, args @ ..] = args else { panic!("UID GROUP COMMAND") };
    let uid: u32 = uid.parse().expect("a user id");
    let procs = Path::new(group).join("cgroup.procs");
    // A group that a runner divides takes no process: who was in it stands aside, and so do the processes that they start.
    let aside = Path::new(group).join("tendon-aside/cgroup.procs");
    fs::write(procs, "0").or_else(|_| fs::write(aside, "0")).expect("the group is entered");
    let error = command(program).args(args).uid(uid).gid(uid).exec();
    panic!("{program}: {error}");
}
