//! Runs the real hand as an ordinary child, with its two descriptors laid as the runner would.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::fs::File;
use std::io::{Seek, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use hands::link::{Exec, ExecEvent, ExecSpec, Link};
use proto::hand::BootConfig;
use proto::ids::ExecId;
use proto::verify::Outcome;
use tempfile::TempDir;

/// A hand, its branch's directory, and the link to it.
pub struct Kit {
    /// None once taken.
    pub link: Option<Link>,
    /// The branch's root.
    pub dir: TempDir,
    child: Child,
}

/// Starts the binary.
pub fn start(config: &[u8]) -> (Child, UnixStream) {
    start_as(config, &[env!("CARGO_BIN_EXE_hand")])
}

/// Starts a command line that ends in the binary. The shell lays the descriptors, which safe code can't.
pub fn start_as(config: &[u8], line: &[&str]) -> (Child, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut memory: File = rustix::fs::memfd_create("boot", rustix::fs::MemfdFlags::CLOEXEC).unwrap().into();
    memory.write_all(config).unwrap();
    memory.rewind().unwrap();
    let child = Command::new("/bin/sh")
        .args(["-c", "exec 3<&0 4<&1 0</dev/null 1>&2; exec \"$0\" \"$@\""])
        .args(line)
        .env_clear()
        .env("PATH", "/usr/bin:/bin")
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .stdout(Stdio::from(OwnedFd::from(memory)))
        .spawn()
        .unwrap();
    (child, ours)
}

impl Kit {
    /// A hand on an empty directory.
    pub async fn new() -> Kit {
        Kit::with(|_| {}).await
    }

    /// The same, with another configuration.
    pub async fn with(change: impl FnOnce(&mut BootConfig)) -> Kit {
        let dir = tempfile::tempdir().unwrap();
        let mut config = BootConfig::new(dir.path().to_str().unwrap());
        change(&mut config);
        let (child, channel) = start(&config.to_json().unwrap());
        Kit { link: Some(Link::connect(channel).await.unwrap()), dir, child }
    }

    /// A hand that is process 1 of its own namespaces and has no capability, as a tier would boot it. None, aloud: this host
    /// gives no user namespaces. `before` is what runs the hand, inside.
    pub async fn confined(before: &[&str]) -> Option<Kit> {
        if !testkit::have(testkit::Need::UserNs) {
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let binary = dir.path().join("hand");
        std::fs::copy(env!("CARGO_BIN_EXE_hand"), &binary).unwrap();
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o777);
        std::fs::set_permissions(dir.path(), open).unwrap();
        let mut line =
            vec!["unshare", "--user", "--map-user=1000", "--map-group=1000", "--pid", "--net", "--ipc"];
        line.extend(["--fork", "--kill-child", "--mount-proc"]);
        if rustix::process::getuid().is_root() {
            line.splice(
                0..0,
                ["setpriv", "--reuid=60600", "--regid=60600", "--clear-groups", "--no-new-privs"],
            );
        }
        line.extend(before);
        line.push(binary.to_str().unwrap());
        let config = BootConfig::new(dir.path().to_str().unwrap()).to_json().unwrap();
        let (child, channel) = start_as(&config, &line);
        Some(Kit { link: Some(Link::connect(channel).await.unwrap()), dir, child })
    }

    /// The link.
    pub fn link(&self) -> &Link {
        self.link.as_ref().unwrap()
    }

    /// The hand's process id.
    pub fn pid(&self) -> i32 {
        self.child.id().cast_signed()
    }

    /// Resident memory of the hand.
    pub fn rss_kb(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        line.split_ascii_whitespace().nth(1).unwrap().parse().unwrap()
    }

    /// Starts a command.
    pub async fn exec(&self, spec: ExecSpec) -> Exec {
        self.link().exec(id(), spec).await.unwrap()
    }

    /// Runs a shell line to its end.
    pub async fn sh(&self, line: &str) -> Ran {
        run(self.exec(sh(line)).await).await
    }

    /// Waits until the hand has ended by itself.
    pub fn ends_within(&mut self, patience: Duration) -> bool {
        ends_within(&mut self.child, patience)
    }
}

/// Waits for a child.
pub fn ends_within(child: &mut Child, patience: Duration) -> bool {
    let since = Instant::now();
    while since.elapsed() < patience {
        if child.try_wait().unwrap().is_some() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    false
}

impl Drop for Kit {
    fn drop(&mut self) {
        // The hand ends with its channel, and takes all that runs in it along.
        self.link = None;
        if !ends_within(&mut self.child, Duration::from_secs(2)) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// A new id.
pub fn id() -> ExecId {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let mut random = [0; 10];
    random[..8].copy_from_slice(&NEXT.fetch_add(1, Ordering::Relaxed).to_le_bytes());
    ExecId::from_random(random)
}

/// A command of words.
pub fn argv(words: &[&str]) -> ExecSpec {
    ExecSpec {
        argv: words.iter().map(|word| word.as_bytes().to_vec()).collect(),
        env: vec![("PATH".into(), "/usr/local/bin:/usr/bin:/bin".into())],
        ..ExecSpec::default()
    }
}

/// A shell line.
pub fn sh(line: &str) -> ExecSpec {
    argv(&["sh", "-c", line])
}

/// What a command did.
#[derive(Debug)]
pub struct Ran {
    /// How it ended.
    pub outcome: Outcome,
    /// Its standard output.
    pub stdout: Vec<u8>,
    /// Its standard error.
    pub stderr: Vec<u8>,
    /// Wall time.
    pub wall_ms: u64,
    /// CPU time.
    pub cpu_ms: u64,
    /// Background processes live on.
    pub lingering: bool,
}

impl Ran {
    /// Standard output as text, trimmed.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).trim().to_owned()
    }
}

/// Reads an exec to its end.
pub async fn run(mut exec: Exec) -> Ran {
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    loop {
        let event = tokio::time::timeout(Duration::from_secs(30), exec.next_event()).await;
        match event.expect("something within 30 s").expect("an end") {
            ExecEvent::Output { fd: 1, bytes } => stdout.extend_from_slice(&bytes),
            ExecEvent::Output { bytes, .. } => stderr.extend_from_slice(&bytes),
            ExecEvent::Ended { outcome, cpu_ms, wall_ms, lingering, .. } => {
                return Ran { outcome, stdout, stderr, wall_ms, cpu_ms, lingering };
            }
        }
    }
}

/// Waits until a condition holds.
pub async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    for _ in 0..500 {
        if holds() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{what} did not come true in 5 s");
}

/// Whether a process exists and is not a zombie.
pub fn lives(pid: i32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| !stat.rsplit(')').next().unwrap_or("").trim_start().starts_with('Z'))
}
