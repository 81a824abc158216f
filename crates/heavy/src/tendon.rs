//! Driving the command line and the runner from a test, as a person and a service manager would.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use testkit::process::{binary, command, wait_until};

/// A call that takes longer hangs, and that is a failure of its own.
const CALL_SECONDS_MAX: u32 = 120;
/// What `timeout` exits with when it had to kill.
const KILLED: i32 = 137;

/// The command line over one state directory.
#[derive(Clone, Debug)]
pub struct Tendon {
    state: PathBuf,
    may_start: bool,
}

impl Tendon {
    /// Over the state directory `state`; a call starts a private runner when none runs.
    pub fn new(state: &Path) -> Self {
        Self { state: state.to_owned(), may_start: true }
    }

    /// The same, and a call fails when no runner runs.
    pub fn only_with_runner(&self) -> Self {
        Self { state: self.state.clone(), may_start: false }
    }

    /// The state directory.
    pub fn state(&self) -> &Path {
        &self.state
    }

    /// A command that ends with status 137 when it hangs.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut timeout = command("timeout");
        timeout.args(["--signal=KILL", &CALL_SECONDS_MAX.to_string()]).arg(binary("tendon")).args(args);
        timeout.env("TENDON_STATE_DIR", &self.state).stdin(Stdio::null());
        if !self.may_start {
            timeout.env("TENDON_TENDOND", "/nonexistent/tendond");
        }
        timeout
    }

    /// Runs a command; its standard output, or what it said about its failure. Panics when it hangs.
    pub fn call(&self, args: &[&str]) -> Result<Vec<u8>, String> {
        self.call_with(args, b"")
    }

    /// [`call`](Self::call) with standard input.
    pub fn call_with(&self, args: &[&str], stdin: &[u8]) -> Result<Vec<u8>, String> {
        let mut command = self.command(args);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(|error| error.to_string())?;
        if let Some(mut pipe) = child.stdin.take() {
            // A program that ends early closes the pipe; its status says why.
            let _ = pipe.write_all(stdin);
        }
        let output = child.wait_with_output().map_err(|error| error.to_string())?;
        assert_ne!(output.status.code(), Some(KILLED), "tendon {args:?} hangs");
        if output.status.success() {
            return Ok(output.stdout);
        }
        Err(format!("tendon {args:?}: {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim()))
    }

    /// Runs a command that must succeed and returns its standard output as text, without the last newline.
    pub fn text(&self, args: &[&str]) -> String {
        let output = self.call(args).unwrap_or_else(|error| panic!("{error}"));
        String::from_utf8_lossy(&output).trim_end().to_owned()
    }

    /// Starts `tendond` and kills it after `moment`, wherever it is then.
    pub fn start_and_kill(&self, moment: Duration) {
        let runner = self.spawn_runner();
        std::thread::sleep(moment);
        runner.kill();
    }

    /// Starts `tendond` and waits until it answers.
    pub fn start_runner(&self) -> Runner {
        let mut runner = self.spawn_runner();
        let status = self.only_with_runner();
        wait_until("the runner answers", Duration::from_secs(60), || {
            if let Ok(Some(ended)) = runner.child.try_wait() {
                panic!("the runner ended at once with {ended}: {}", runner.log());
            }
            status.call(&["runner", "status"]).is_ok()
        });
        runner
    }

    fn spawn_runner(&self) -> Runner {
        let mut child = command(binary("tendond"))
            .arg("--state-dir")
            .arg(&self.state)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("tendond starts");
        let log = collect(child.stderr.take());
        drop(collect(child.stdout.take()));
        Runner { child, log }
    }
}

type Log = std::sync::Arc<std::sync::Mutex<Vec<String>>>;

/// Reads lines in the background, so that a pipe never fills; keeps the last 200.
fn collect(pipe: Option<impl std::io::Read + Send + 'static>) -> Log {
    let log = Log::default();
    let Some(pipe) = pipe else { return log };
    let lines = std::sync::Arc::clone(&log);
    std::thread::spawn(move || {
        for line in BufReader::new(pipe).lines().map_while(Result::ok) {
            let mut lines = lines.lock().expect("log");
            lines.push(line);
            if lines.len() > 200 {
                lines.remove(0);
            }
        }
    });
    log
}

/// A runner of a test's own; killed when dropped.
pub struct Runner {
    child: Child,
    log: Log,
}

impl Runner {
    /// `kill -9`, and the wait for its end.
    pub fn kill(mut self) {
        self.end();
    }

    /// The last lines that it wrote.
    pub fn log(&self) -> String {
        self.log.lock().expect("log").join("\n")
    }

    fn end(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Runner {
    fn drop(&mut self) {
        self.end();
    }
}
