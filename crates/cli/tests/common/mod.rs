//! Drives the real `tendon`, which starts the real `tendond`, over a state directory of the test's own.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;
use testkit::process::command;
use testkit::{Need, binary, have_all, temp_dir};

/// Whether this machine can run a verify at all.
pub fn can_run() -> bool {
    have_all(&[Need::UserNs, Need::Bwrap, Need::Git])
}

/// A `tendon` with its own state directory and no configuration; its runner is stopped at the end.
pub struct Tendon {
    pub dir: TempDir,
}

impl Tendon {
    pub fn new() -> Self {
        Self { dir: temp_dir("tendon") }
    }

    pub fn state(&self) -> PathBuf {
        self.dir.path().join("state")
    }

    /// A command that is killed when it hangs. `--foreground`, as `timeout` passes a signal on twice without: to its child,
    /// and to the group that it makes.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = command("timeout");
        command.args(["--foreground", "--signal=KILL", "120"]).arg(binary("tendon")).args(args);
        command.env("TENDON_STATE_DIR", self.state()).env("XDG_CONFIG_HOME", self.dir.path().join("config"));
        command.current_dir(self.dir.path()).stdin(Stdio::null());
        command
    }

    /// Runs it to its end.
    pub fn run(&self, args: &[&str]) -> Ran {
        Ran::new(self.command(args).output().unwrap(), args)
    }

    /// Runs it with standard input.
    pub fn run_with(&self, args: &[&str], stdin: &[u8]) -> Ran {
        use std::io::Write as _;
        let mut child = self.start(args);
        let (mut pipe, stdin) = (child.stdin.take().unwrap(), stdin.to_vec());
        // Beside the output, which may be as much; a command that reads no more breaks the pipe.
        let writer = std::thread::spawn(move || drop(pipe.write_all(&stdin)));
        let ran = Ran::new(child.wait_with_output().unwrap(), args);
        writer.join().unwrap();
        ran
    }

    /// Starts it with pipes.
    pub fn start(&self, args: &[&str]) -> Child {
        let mut command = self.command(args);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    /// Runs it, expects success, and returns its output without the last newline.
    pub fn text(&self, args: &[&str]) -> String {
        let ran = self.run(args);
        ran.expect(0);
        ran.stdout.trim_end().to_owned()
    }

    /// Runs it with `--json`, expects `status`, and returns the record.
    pub fn json(&self, status: i32, args: &[&str]) -> Value {
        let ran = self.run(&[args, &["--json"]].concat());
        ran.expect(status);
        serde_json::from_str(&ran.stdout).unwrap_or_else(|error| panic!("{error}: {}", ran.stdout))
    }
}

impl Drop for Tendon {
    fn drop(&mut self) {
        let mut stop = self.command(&["runner", "stop"]);
        let _ = stop.stdout(Stdio::null()).stderr(Stdio::null()).status();
    }
}

/// What a command did.
#[derive(Debug)]
pub struct Ran {
    pub args: Vec<String>,
    pub status: i32,
    pub stdout: String,
    pub bytes: Vec<u8>,
    pub stderr: String,
}

impl Ran {
    pub fn new(output: Output, args: &[&str]) -> Self {
        Self {
            args: args.iter().map(|arg| (*arg).to_owned()).collect(),
            status: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            bytes: output.stdout,
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    #[track_caller]
    pub fn expect(&self, status: i32) -> &Self {
        assert_eq!(
            self.status, status,
            "{:?}\n--- stdout\n{}\n--- stderr\n{}",
            self.args, self.stdout, self.stderr
        );
        self
    }

    #[track_caller]
    pub fn says(&self, text: &str) -> &Self {
        assert!(self.stderr.contains(text), "{:?}: no `{text}` in\n{}", self.args, self.stderr);
        self
    }
}

/// A signal to a program that `timeout` runs: `timeout` passes it on.
pub fn signal(child: &Child, name: &str) {
    let status = command("kill").args([&format!("-{name}"), &child.id().to_string()]).status().unwrap();
    assert!(status.success());
}

/// Waits for a file.
pub fn wait_for(path: &Path) {
    testkit::wait_until(&format!("{} appears", path.display()), Duration::from_secs(60), || path.exists());
}

/// A command that sleeps for more than an hour, and that no other test of this machine runs.
pub fn long_sleep() -> String {
    static NEXT: AtomicUsize = AtomicUsize::new(4321);
    // The unit ends the number: no such line begins another's.
    format!("sleep {}.{}s", NEXT.fetch_add(1, Ordering::Relaxed), std::process::id())
}

/// Whether a process runs whose command line begins so.
pub fn runs(line: &str) -> bool {
    command("pgrep").args(["-f", &format!("^{line}")]).output().unwrap().status.success()
}
