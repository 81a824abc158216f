//! Runs git, with a clean environment and no configuration but ours. This and its `run` are all of this crate that starts
//! processes.
//!
//! A repository that somebody else wrote can name commands in its configuration: hooks, fsmonitor, filters, textconv,
//! aliases, ssh and credential commands. So the system's and the user's configuration are not read, what a
//! repository's own could name is overridden, and callers keep to this rule: **only `fetch` and `ls-remote` (which run
//! `git upload-pack` there) and an export's `push` (which runs `git receive-pack` there) look into a repository that isn't
//! ours**: git made these two for strangers. A freeze reads through a `base::view`, without that repository's configuration. Everything else runs in a git directory that this crate made, with at most
//! the user's work tree beside it.

mod run;

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use proto::error::{Code, Coded};

use self::run::Bounded;

use crate::base::Cancel;

/// Longest run of one command.
const RUN_MAX: Duration = Duration::from_secs(60 * 60);
/// Longest silence of a command that talks to a network.
const SILENCE_MAX: Duration = Duration::from_secs(180);
/// Bytes that [`Git::run`] takes from standard output.
const STDOUT_BYTES_MAX: usize = 1 << 30;
/// Bytes of standard error that an error keeps: the last ones.
const STDERR_BYTES_MAX: usize = 4096;
/// How often a command that says nothing is looked at, whether it was cancelled.
const CANCEL_EVERY: Duration = Duration::from_millis(50);

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
    cancel: Cancel,
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
            cancel: Cancel::default(),
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

    /// Ends it when that is cancelled.
    #[must_use]
    pub fn until(mut self, cancel: &Cancel) -> Self {
        self.cancel = cancel.clone();
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

#[cfg(test)]
mod tests {
    use std::time::Instant;

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
