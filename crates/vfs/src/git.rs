//! Runs git, with a clean environment and no configuration but ours. The one place of this crate that spawns.
//!
//! A repository that somebody else wrote can name commands in its configuration: hooks, fsmonitor, filters, textconv,
//! aliases, ssh and credential commands. So the system's and the user's configuration are not read, what a
//! repository's own could name is overridden, and callers keep to this rule: **only `fetch` and `ls-remote` (which run
//! `git upload-pack` there, made by git to be safe on a hostile repository) look into a repository that isn't ours**.
//! Everything else runs in a git directory that this crate made, with at most the user's work tree beside it.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use proto::error::{Code, Coded};
use rustix::event::{PollFd, PollFlags, Timespec};

/// Longest run of one command.
const RUN_MAX: Duration = Duration::from_secs(60 * 60);
/// Longest silence of a command that talks to a network.
const SILENCE_MAX: Duration = Duration::from_secs(180);
/// Bytes that [`Git::run`] takes from standard output.
const STDOUT_BYTES_MAX: usize = 1 << 30;
/// Bytes of standard error that an error keeps: the last ones.
const STDERR_BYTES_MAX: usize = 4096;

/// Configuration of every command, stronger than any file's.
const CONFIG: &[(&str, &str)] = &[
    ("safe.directory", "*"),
    ("core.hooksPath", "/dev/null"),
    ("core.fsmonitor", "false"),
    ("core.untrackedCache", "false"),
    ("core.splitIndex", "false"),
    ("core.sshCommand", SSH),
    ("core.askPass", ""),
    ("core.gitProxy", ""),
    ("core.pager", "cat"),
    ("core.editor", "true"),
    ("core.attributesFile", "/dev/null"),
    ("core.alternateRefsCommand", "true"),
    ("credential.helper", ""),
    ("commit.gpgSign", "false"),
    ("tag.gpgSign", "false"),
    ("log.showSignature", "false"),
    ("filter.lfs.required", "false"),
    ("gc.auto", "0"),
    ("maintenance.auto", "false"),
    ("fetch.recurseSubmodules", "false"),
    ("fetch.writeCommitGraph", "false"),
    ("fetch.unpackLimit", "1"),
    ("submodule.recurse", "false"),
    ("protocol.ext.allow", "never"),
    ("protocol.version", "2"),
    ("transfer.bundleURI", "false"),
    ("http.lowSpeedLimit", "1000"),
    ("http.lowSpeedTime", "60"),
    ("advice.detachedHead", "false"),
    ("init.defaultBranch", "main"),
    ("index.version", "2"),
    ("checkout.workers", "2"),
    ("checkout.thresholdForParallelism", "1000"),
];

/// Never asks, and notices a dead peer.
const SSH: &str =
    "ssh -o BatchMode=yes -o ConnectTimeout=30 -o ServerAliveInterval=15 -o ServerAliveCountMax=4";

/// What git that talks to a network is told of the user's environment: who they are, how to get there, and whom they trust.
const NETWORK_VARS: [&str; 8] = [
    "HOME",
    "SSH_AUTH_SOCK",
    "https_proxy",
    "http_proxy",
    "no_proxy",
    "ALL_PROXY",
    "GIT_SSL_CAINFO",
    "GIT_SSL_CAPATH",
];

/// How `fetch` and `ls-remote` start git in another local repository. git takes our configuration out of that child's
/// environment, so what matters there is repeated.
pub(crate) const UPLOAD_PACK: &str = "git -c 'safe.directory=*' -c core.hooksPath=/dev/null -c core.fsmonitor=false \
     -c core.alternateRefsCommand=true upload-pack";

/// A git command that failed.
#[derive(Debug, thiserror::Error)]
pub enum GitError {
    /// There is no git.
    #[error("can't start git")]
    Missing(#[source] io::Error),
    /// Talking to the running git failed.
    #[error("lost touch with `git {command}`")]
    Io {
        /// The subcommand.
        command: String,
        /// Why.
        source: io::Error,
    },
    /// It ended with a failure.
    #[error("`git {command}` failed ({status}): {stderr}")]
    Failed {
        /// The subcommand.
        command: String,
        /// How it ended.
        status: String,
        /// The end of what it said, on one line.
        stderr: String,
    },
    /// It took too long, or was silent for too long.
    #[error("`git {command}` was ended after {seconds} s without a result: {stderr}")]
    TimedOut {
        /// The subcommand.
        command: String,
        /// How long it ran.
        seconds: u64,
        /// The end of what it said, on one line.
        stderr: String,
    },
    /// It wrote more than we take.
    #[error("`git {command}` wrote more than {STDOUT_BYTES_MAX} bytes")]
    TooMuch {
        /// The subcommand.
        command: String,
    },
}

impl Coded for GitError {
    fn code(&self) -> Code {
        match self {
            GitError::Missing(_) | GitError::Io { .. } => Code::HostBroken,
            GitError::Failed { stderr, .. } if stderr.contains("No space left") => Code::NoSpace,
            GitError::Failed { stderr, .. } if is_missing(stderr) => Code::NotFound,
            GitError::Failed { .. } | GitError::TimedOut { .. } | GitError::TooMuch { .. } => Code::BadInput,
        }
    }
    fn hint(&self) -> Option<String> {
        match self {
            GitError::Missing(_) => Some("install git (Debian: apt install git)".into()),
            GitError::TimedOut { .. } => Some("check the network and the repository's address".into()),
            GitError::Failed { stderr, .. } if wants_credentials(stderr) => Some(
                "check that it exists; git is run without a terminal and without your git configuration: use an ssh \
                 address and an ssh agent, or put the credentials in ~/.netrc"
                    .into(),
            ),
            GitError::Failed { stderr, .. } if is_untrusted(stderr) => Some(
                "if its certificate is signed by an authority of your own, name that authority's certificate in \
                 GIT_SSL_CAINFO, and start the runner anew: tendon runner stop"
                    .into(),
            ),
            GitError::Failed { .. } if self.code() == Code::NoSpace => {
                Some("free some space: tendon base gc, tendon branch drop".into())
            }
            GitError::Failed { stderr, .. } if is_unreachable(stderr) => {
                Some("check the address, the network and your rights there".into())
            }
            GitError::Failed { .. } | GitError::Io { .. } | GitError::TooMuch { .. } => None,
        }
    }
}

fn is_unreachable(stderr: &str) -> bool {
    ["unable to access", "unable to connect", "unable to look up", "Could not read from remote repository"]
        .iter()
        .any(|said| stderr.contains(said))
}

/// As libcurl says it, whichever TLS library it has.
fn is_untrusted(stderr: &str) -> bool {
    ["certificate verification failed", "SSL certificate problem", "certificate subject name"]
        .iter()
        .any(|said| stderr.contains(said))
}

fn is_missing(stderr: &str) -> bool {
    ["not found", "does not appear to be a git repository", "Could not resolve host", "unable to look up"]
        .iter()
        .any(|said| stderr.contains(said))
}

fn wants_credentials(stderr: &str) -> bool {
    [
        "could not read Username",
        "Authentication failed",
        "terminal prompts disabled",
        "Permission denied (publickey",
    ]
    .iter()
    .any(|said| stderr.contains(said))
}

/// A git command to be: where it runs and what is set for it.
#[derive(Clone, Debug)]
pub struct Git {
    vars: Vec<(OsString, OsString)>,
    config: Vec<(String, OsString)>,
    cwd: PathBuf,
    network: bool,
    run_max: Duration,
    input: Option<Arc<File>>,
    silence_max: Duration,
}

impl Git {
    /// git outside of any repository: `init`, `config --file`.
    pub fn new() -> Self {
        Self {
            vars: Vec::new(),
            config: CONFIG.iter().map(|(key, value)| ((*key).to_owned(), OsString::from(value))).collect(),
            cwd: PathBuf::from("/"),
            network: false,
            run_max: RUN_MAX,
            input: None,
            silence_max: RUN_MAX,
        }
    }

    /// git in the git directory `git_dir` (`…/.git` or a bare repository). None is searched for.
    pub fn at(git_dir: &Path) -> Self {
        Self::new().env("GIT_DIR", git_dir)
    }

    /// With this work tree, whatever the repository's configuration says.
    #[must_use]
    pub fn work_tree(mut self, dir: &Path) -> Self {
        self.cwd = dir.to_owned();
        self.env("GIT_WORK_TREE", dir)
    }

    /// With a variable of the environment.
    #[must_use]
    pub fn env(mut self, key: &str, value: impl AsRef<OsStr>) -> Self {
        self.vars.push((key.into(), value.as_ref().to_owned()));
        self
    }

    /// With one more configuration value, stronger than any file's. It isn't seen in the process list.
    #[must_use]
    pub fn config(mut self, key: &str, value: impl AsRef<OsStr>) -> Self {
        self.config.push((key.to_owned(), value.as_ref().to_owned()));
        self
    }

    /// Lets it use the user's network identity: the ssh agent, `~/.ssh`, `~/.netrc`, and the certificates that
    /// `GIT_SSL_CAINFO` names. The user's git configuration, and so credential helpers, stay out. Ends it when it is silent
    /// for long.
    #[must_use]
    pub fn network(mut self) -> Self {
        self.network = true;
        self.silence_max(SILENCE_MAX)
    }

    /// With another limit on how long it may run.
    #[must_use]
    pub fn run_max(mut self, max: Duration) -> Self {
        self.run_max = max;
        self
    }

    /// With a file as its standard input, however large it is.
    #[must_use]
    pub fn input(mut self, file: File) -> Self {
        self.input = Some(Arc::new(file));
        self
    }

    /// With another limit on how long it may say nothing.
    #[must_use]
    pub fn silence_max(mut self, max: Duration) -> Self {
        self.silence_max = max;
        self
    }

    /// Runs it and returns its standard output; anything but exit status 0 is an error.
    pub fn run<A: AsRef<OsStr>>(&self, args: &[A]) -> Result<Vec<u8>, GitError> {
        self.run_with(args, &[], &|_| ())
    }

    /// As [`Git::run`], with standard input, and with `progress` called for each line that it says meanwhile.
    pub fn run_with<A: AsRef<OsStr>>(
        &self,
        args: &[A],
        stdin: &[u8],
        progress: &dyn Fn(&str),
    ) -> Result<Vec<u8>, GitError> {
        let mut out = Bounded(Vec::new());
        let end = self.drive(args, stdin, &mut out, progress)?;
        if end.status.success() { Ok(out.0) } else { Err(end.failed(args)) }
    }

    /// As [`Git::run`], but its standard output goes to `out`, however much it is.
    pub fn run_into<A: AsRef<OsStr>>(
        &self,
        args: &[A],
        stdin: &[u8],
        out: &mut dyn Write,
    ) -> Result<(), GitError> {
        let end = self.drive(args, stdin, out, &|_| ())?;
        if end.status.success() { Ok(()) } else { Err(end.failed(args)) }
    }

    /// As [`Git::run`], as text without the white space around it.
    pub fn text<A: AsRef<OsStr>>(&self, args: &[A]) -> Result<String, GitError> {
        Ok(String::from_utf8_lossy(&self.run(args)?).trim().to_owned())
    }

    /// Its standard output on exit status 0, `None` on 1 (git's "no"); anything else is an error.
    pub fn ask<A: AsRef<OsStr>>(&self, args: &[A]) -> Result<Option<Vec<u8>>, GitError> {
        let mut out = Bounded(Vec::new());
        let end = self.drive(args, &[], &mut out, &|_| ())?;
        match end.status.code() {
            Some(0) => Ok(Some(out.0)),
            Some(1) => Ok(None),
            _ => Err(end.failed(args)),
        }
    }

    #[expect(
        clippy::disallowed_methods,
        reason = "the one place of this crate that spawns and that needs the user's environment"
    )]
    fn command(&self) -> Command {
        let var = std::env::var_os;
        let mut command = Command::new("git");
        command.env_clear().current_dir(&self.cwd).process_group(0);
        command.env("PATH", var("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into()));
        command.envs([
            ("HOME", "/nonexistent"),
            ("LC_ALL", "C"),
            ("GIT_CONFIG_NOSYSTEM", "1"),
            ("GIT_CONFIG_GLOBAL", "/dev/null"),
            ("GIT_ATTR_NOSYSTEM", "1"),
            ("GIT_TERMINAL_PROMPT", "0"),
            ("GIT_ASKPASS", ""),
            ("SSH_ASKPASS", ""),
            ("GIT_PAGER", "cat"),
            ("GIT_EDITOR", "true"),
            ("GIT_NO_LAZY_FETCH", "1"),
            ("GIT_OPTIONAL_LOCKS", "0"),
            ("GIT_ALLOW_PROTOCOL", "file:https:http:ssh:git"),
        ]);
        if self.network {
            for name in NETWORK_VARS {
                command.envs(var(name).map(|value| (name, value)));
            }
        }
        command.env("GIT_CONFIG_COUNT", self.config.len().to_string());
        for (n, (key, value)) in self.config.iter().enumerate() {
            command.env(format!("GIT_CONFIG_KEY_{n}"), key).env(format!("GIT_CONFIG_VALUE_{n}"), value);
        }
        command.envs(self.vars.iter().map(|(key, value)| (key, value)));
        command
    }

    fn drive<A: AsRef<OsStr>>(
        &self,
        args: &[A],
        stdin: &[u8],
        stdout: &mut dyn Write,
        progress: &dyn Fn(&str),
    ) -> Result<End, GitError> {
        let name = subcommand(args);
        let from = match &self.input {
            Some(file) => {
                let copied = file.try_clone();
                Stdio::from(copied.map_err(|source| GitError::Io { command: name.clone(), source })?)
            }
            None if stdin.is_empty() => Stdio::null(),
            None => Stdio::piped(),
        };
        let child = self
            .command()
            .args(args)
            .stdin(from)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(GitError::Missing)?;
        let mut child = Running { child, stdin, stderr: Vec::new(), line: Vec::new(), returned: false };
        let started = Instant::now();
        let pumped = child.pump(stdout, progress, started + self.run_max, self.silence_max);
        let stop = |child: &mut Running<'_>| {
            child.kill();
            said(&child.stderr)
        };
        match pumped {
            Ok(Pumped::Closed) => {}
            Ok(Pumped::Late) => {
                let stderr = stop(&mut child);
                return Err(GitError::TimedOut {
                    command: name,
                    seconds: started.elapsed().as_secs(),
                    stderr,
                });
            }
            Err(error) if error.kind() == io::ErrorKind::FileTooLarge => {
                stop(&mut child);
                return Err(GitError::TooMuch { command: name });
            }
            Err(source) => {
                stop(&mut child);
                return Err(GitError::Io { command: name, source });
            }
        }
        let status = child.child.wait().map_err(|source| GitError::Io { command: name, source })?;
        Ok(End { status, stderr: said(&child.stderr) })
    }
}

impl Default for Git {
    fn default() -> Self {
        Self::new()
    }
}

/// Where the user's own git configuration keeps patterns of files to ignore everywhere: `core.excludesFile` of the
/// global configuration, else git's default place.
#[expect(
    clippy::disallowed_methods,
    reason = "the user's home is named by the environment, and this module reads it"
)]
pub(crate) fn user_excludes() -> Option<PathBuf> {
    let home = std::env::var_os("HOME").filter(|home| !home.is_empty()).map(PathBuf::from)?;
    let xdg = std::env::var_os("XDG_CONFIG_HOME").filter(|dir| !dir.is_empty());
    let xdg = xdg.map_or_else(|| home.join(".config"), PathBuf::from).join("git");
    for file in [home.join(".gitconfig"), xdg.join("config")] {
        let args: [&OsStr; 6] = [
            "config".as_ref(),
            "--file".as_ref(),
            file.as_os_str(),
            "--type=path".as_ref(),
            "--get".as_ref(),
            "core.excludesFile".as_ref(),
        ];
        if file.is_file()
            && let Ok(Some(value)) = Git::new().env("HOME", &home).ask(&args)
        {
            let text = value.trim_ascii_end();
            return Some(PathBuf::from(<OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(text)));
        }
    }
    Some(xdg.join("ignore")).filter(|file| file.is_file())
}

/// How a command ended, and the end of what it said.
struct End {
    status: ExitStatus,
    stderr: String,
}

impl End {
    fn failed<A: AsRef<OsStr>>(self, args: &[A]) -> GitError {
        let status = match (self.status.code(), self.status.signal()) {
            (Some(code), _) => format!("exit status {code}"),
            (None, signal) => format!("signal {}", signal.unwrap_or_default()),
        };
        GitError::Failed { command: subcommand(args), status, stderr: self.stderr }
    }
}

enum Pumped {
    Closed,
    Late,
}

struct Running<'a> {
    child: Child,
    stdin: &'a [u8],
    stderr: Vec<u8>,
    line: Vec<u8>,
    /// Whether a carriage return came last.
    returned: bool,
}

impl Running<'_> {
    /// Carries bytes both ways until it closed its outputs.
    fn pump(
        &mut self,
        out: &mut dyn Write,
        progress: &dyn Fn(&str),
        end: Instant,
        silence_max: Duration,
    ) -> io::Result<Pumped> {
        let mut stdin = self.child.stdin.take();
        let mut stdout = self.child.stdout.take();
        let mut stderr = self.child.stderr.take();
        if let Some(pipe) = &stdin {
            rustix::io::ioctl_fionbio(pipe, true)?;
        }
        let mut buffer = vec![0; 64 * 1024];
        while stdout.is_some() || stderr.is_some() {
            let now = Instant::now();
            let wait = silence_max.min(end.saturating_duration_since(now));
            let ready = wait_for(stdin.as_ref(), stdout.as_ref(), stderr.as_ref(), wait)?;
            let Some([can_write, can_read, can_hear]) = ready else { return Ok(Pumped::Late) };
            if can_write {
                stdin = stdin.filter(|pipe| self.feed(pipe));
            }
            if can_read && let Some(pipe) = &stdout {
                match rustix::io::read(pipe, &mut buffer)? {
                    0 => stdout = None,
                    n => out.write_all(&buffer[..n])?,
                }
            }
            if can_hear && let Some(pipe) = &stderr {
                match rustix::io::read(pipe, &mut buffer)? {
                    0 => stderr = None,
                    n => self.hear(&buffer[..n], progress),
                }
            }
        }
        Ok(Pumped::Closed)
    }

    /// Writes what fits; `false` when there is no more to write.
    fn feed(&mut self, pipe: impl AsFd) -> bool {
        match rustix::io::write(pipe, &self.stdin[..self.stdin.len().min(64 * 1024)]) {
            Ok(n) => {
                self.stdin = &self.stdin[n..];
                !self.stdin.is_empty()
            }
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => true,
            // It does not want the rest; its exit status tells why.
            Err(_) => false,
        }
    }

    fn hear(&mut self, bytes: &[u8], progress: &dyn Fn(&str)) {
        for byte in bytes {
            // A line that ends in a carriage return alone is a progress display, not part of a message; ssh ends its
            // messages in both.
            if std::mem::take(&mut self.returned) && *byte != b'\n' {
                self.line.clear();
            }
            if !matches!(byte, b'\r' | b'\n') {
                self.line.push(*byte);
                if self.line.len() < STDERR_BYTES_MAX {
                    continue;
                }
            }
            let text = String::from_utf8_lossy(&self.line);
            let text: String = text.trim().chars().filter(|c| !c.is_control()).collect();
            if !text.is_empty() {
                progress(&text);
            }
            if *byte == b'\r' {
                self.returned = true;
                continue;
            }
            self.stderr.append(&mut self.line);
            self.stderr.push(b'\n');
            let over = self.stderr.len().saturating_sub(STDERR_BYTES_MAX);
            self.stderr.drain(..over);
        }
    }

    fn kill(&mut self) {
        if let Some(pid) = rustix::process::Pid::from_raw(self.child.id().cast_signed()) {
            // Its own process group: git's helpers end with it.
            let _ = rustix::process::kill_process_group(pid, rustix::process::Signal::KILL);
        }
        let _ = self.child.wait();
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            self.kill();
        }
    }
}

/// Which of the three pipes can be used now; `None` when none could for so long.
fn wait_for(
    stdin: Option<impl AsFd>,
    stdout: Option<impl AsFd>,
    stderr: Option<impl AsFd>,
    wait: Duration,
) -> io::Result<Option<[bool; 3]>> {
    let fds = [
        stdin.as_ref().map(|fd| (fd.as_fd(), PollFlags::OUT)),
        stdout.as_ref().map(|fd| (fd.as_fd(), PollFlags::IN)),
        stderr.as_ref().map(|fd| (fd.as_fd(), PollFlags::IN)),
    ];
    let mut polled: Vec<PollFd<'_>> =
        fds.iter().flatten().map(|(fd, flags)| PollFd::from_borrowed_fd(*fd, *flags)).collect();
    let timeout = Timespec::try_from(wait).map_err(io::Error::other)?;
    let ready = match rustix::event::poll(&mut polled, Some(&timeout)) {
        Ok(0) => return Ok(None),
        Ok(_) => true,
        Err(rustix::io::Errno::INTR) => false,
        Err(error) => return Err(error.into()),
    };
    let mut polled = polled.iter();
    Ok(Some(fds.map(|fd| fd.is_some() && polled.next().is_some_and(|p| ready && !p.revents().is_empty()))))
}

struct Bounded(Vec<u8>);

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > STDOUT_BYTES_MAX {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn subcommand<A: AsRef<OsStr>>(args: &[A]) -> String {
    args.first().map(|arg| arg.as_ref().to_string_lossy().into_owned()).unwrap_or_default()
}

fn said(stderr: &[u8]) -> String {
    let text = String::from_utf8_lossy(stderr);
    let lines: Vec<String> = text
        .lines()
        .map(|line| line.trim().chars().filter(|c| !c.is_control()).collect::<String>())
        .filter(|line| !line.is_empty())
        .collect();
    if lines.is_empty() { "it said nothing".into() } else { lines.join("; ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_tells_what_git_said() {
        let dir = tempfile::tempdir().unwrap();
        let error = Git::at(dir.path()).run(&["rev-parse", "HEAD"]).unwrap_err();
        assert!(error.to_string().contains("not a git repository"), "{error}");
        assert_eq!(error.code(), Code::BadInput);
    }

    #[test]
    fn much_input_and_output_go_through_at_once() {
        let dir = tempfile::tempdir().unwrap();
        Git::new().run(&["init".as_ref(), "-q".as_ref(), "--bare".as_ref(), dir.path().as_os_str()]).unwrap();
        let input: String = (0..100_000).map(|n| format!("{n:040x}\n")).collect();
        let out =
            Git::at(dir.path()).run_with(&["cat-file", "--batch-check"], input.as_bytes(), &|_| ()).unwrap();
        assert_eq!(out.iter().filter(|b| **b == b'\n').count(), 100_000);
    }

    #[test]
    fn a_command_that_hangs_is_ended_with_its_children() {
        let dir = tempfile::tempdir().unwrap();
        let started = Instant::now();
        let alias = format!("!sleep 600 & echo $! > {}/pid; wait", dir.path().display());
        let error = Git::new()
            .config("alias.hang", &alias)
            .run_max(Duration::from_millis(300))
            .run(&["hang"])
            .unwrap_err();
        assert!(matches!(error, GitError::TimedOut { .. }), "{error}");
        assert!(started.elapsed() < Duration::from_secs(20));
        let pid = std::fs::read_to_string(dir.path().join("pid")).unwrap();
        // SIGKILL was sent; the process is gone as soon as the kernel has got to it.
        let stat = || std::fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
        while !stat().is_empty() && !stat().contains(") Z ") {
            assert!(started.elapsed() < Duration::from_secs(20), "{}", stat());
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_server_that_says_nothing_is_left() {
        let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("git://127.0.0.1:{}/x", server.local_addr().unwrap().port());
        let error = Git::new()
            .network()
            .silence_max(Duration::from_millis(300))
            .run(&["ls-remote", &url])
            .unwrap_err();
        assert!(matches!(error, GitError::TimedOut { .. }), "{error}");
    }

    #[test]
    fn nothing_of_the_users_configuration_is_seen() {
        let list = Git::new().text(&["config", "--list", "--show-scope"]).unwrap();
        assert!(list.lines().all(|line| line.starts_with("command")), "{list}");
        let ident = Git::new().ask(&["config", "--get", "user.name"]).unwrap();
        assert_eq!(ident, None);
    }
}
