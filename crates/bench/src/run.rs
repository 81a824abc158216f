//! Programs: the peers that are measured, and what prepares the fixtures. All with the same clean environment.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use crate::error::{BenchError, Context, Result};

/// What of the caller's environment the programs see; the same for everything that runs outside of a hand.
const KEPT: &[&str] =
    &["PATH", "HOME", "CARGO_HOME", "RUSTUP_HOME", "NVM_DIR", "PYENV_ROOT", "SSL_CERT_FILE"];

/// How a measured program went.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timed {
    pub(crate) wall: Duration,
    /// User and system time of the program and all that it waited for.
    pub(crate) cpu: Duration,
}

/// The part of the caller's environment that programs see.
#[expect(clippy::disallowed_methods, reason = "the one place of this crate that reads the environment")]
pub(crate) fn environment() -> BTreeMap<String, String> {
    let known = KEPT.iter().filter_map(|name| Some(((*name).to_owned(), std::env::var(name).ok()?)));
    known.collect()
}

/// A program with a clean environment and no input.
#[expect(clippy::disallowed_methods, reason = "the one place of this crate that starts programs")]
pub(crate) fn program(name: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new(name);
    command.env_clear().envs(environment());
    command.envs([("LC_ALL", "C.UTF-8"), ("GIT_CONFIG_NOSYSTEM", "1"), ("GIT_CONFIG_GLOBAL", "/dev/null")]);
    command.stdin(Stdio::null());
    command
}

/// A program given as one list, run in `dir`.
pub(crate) fn argv(argv: &[&str], dir: &Path) -> Command {
    let (name, args) = argv.split_first().expect("a command is never empty");
    let mut command = program(name);
    command.args(args).current_dir(dir);
    command
}

/// Runs a program to its end; an error has the end of what it wrote.
pub(crate) fn run(command: &mut Command) -> Result<String> {
    let output = command.output().context(|| format!("{command:?} does not start"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    let tail: Vec<&str> = text.trim().lines().rev().take(3).collect();
    Err(BenchError::new(format!(
        "{command:?} ended with {}: {}",
        output.status,
        tail.into_iter().rev().collect::<Vec<_>>().join(" / ")
    )))
}

/// Runs and measures a program; its output is read and dropped, as the runner does.
pub(crate) fn timed(command: &mut Command) -> Result<Timed> {
    let cpu = children_cpu()?;
    let start = Instant::now();
    run(command)?;
    let wall = start.elapsed();
    Ok(Timed { wall, cpu: children_cpu()?.saturating_sub(cpu) })
}

/// CPU time of all children that this process has waited for, from the kernel's own count.
fn children_cpu() -> Result<Duration> {
    let stat = std::fs::read_to_string("/proc/self/stat").context(|| "can't read /proc/self/stat".into())?;
    // After the name in parentheses: state is field 3, cutime and cstime are 16 and 17 (see proc_pid_stat(5)).
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks: u64 =
        fields.get(13..15).unwrap_or_default().iter().filter_map(|f| f.parse::<u64>().ok()).sum();
    Ok(Duration::from_secs_f64(ticks as f64 / rustix::param::clock_ticks_per_second() as f64))
}

/// Writes what is dirty to the disk, so that one sample does not pay for another's data.
pub(crate) fn settle(dir: &Path) -> Result<()> {
    let file = std::fs::File::open(dir).context(|| format!("can't open {}", dir.display()))?;
    rustix::fs::syncfs(&file).context(|| format!("can't sync {}", dir.display()))
}

/// This program again, as a small process that starts others on request. Its time is that of a plain `posix_spawn`
/// and wait, whatever this process has grown to.
pub(crate) struct Spawner {
    child: Child,
    requests: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Spawner {
    /// Starts it for one command.
    pub(crate) fn start(command: &[&str]) -> Result<Self> {
        let mut child = program(own_path()?)
            .arg("--internal")
            .arg("spawn")
            .args(command)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context(|| "the spawning process does not start".into())?;
        let requests = child.stdin.take().expect("its input is a pipe");
        let answers = BufReader::new(child.stdout.take().expect("its output is a pipe"));
        Ok(Self { child, requests, answers })
    }

    /// Has the command started and waited for once.
    pub(crate) fn once(&mut self) -> Result<Duration> {
        let mut line = String::new();
        self.requests
            .write_all(b"\n")
            .and_then(|()| self.answers.read_line(&mut line))
            .context(|| "the spawning process is gone".into())?;
        let nanos = line.trim().parse().context(|| format!("the spawning process says {line:?}"))?;
        Ok(Duration::from_nanos(nanos))
    }
}

impl Drop for Spawner {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The other side of [`Spawner`]: one start per line of input, the nanoseconds as a line of output.
pub(crate) fn serve_spawns(command: &[String]) -> Result<()> {
    let (name, args) = command.split_first().ok_or_else(|| BenchError::new("no command to spawn"))?;
    let mut output = std::io::stdout();
    for line in std::io::stdin().lines() {
        line.context(|| "can't read requests".into())?;
        let mut command = program(name);
        command.args(args).stdout(Stdio::null()).stderr(Stdio::null());
        let start = Instant::now();
        let status = command.status().context(|| format!("{name} does not start"))?;
        let nanos = start.elapsed().as_nanos();
        if !status.success() {
            return Err(BenchError::new(format!("{name} ended with {status}")));
        }
        writeln!(output, "{nanos}").context(|| "can't answer".into())?;
    }
    Ok(())
}

/// Runs a part of the benchmark in a fresh process, whose memory nothing else has touched; returns what it printed.
pub(crate) fn in_fresh_process(name: &str, args: &[&str]) -> Result<String> {
    run(program(own_path()?).args(["--internal", name]).args(args).stderr(Stdio::inherit()))
}

/// Where this program is.
pub(crate) fn own_path() -> Result<PathBuf> {
    std::env::current_exe().context(|| "this program does not know its own path".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_program_says_what_it_wrote_last() {
        let error =
            run(&mut argv(&["sh", "-c", "echo one >&2; echo two >&2; exit 3"], Path::new("/"))).unwrap_err();
        assert!(error.chain().contains("one / two") && error.chain().contains('3'), "{}", error.chain());
    }

    #[test]
    fn wall_and_cpu_time_are_both_seen() {
        let timed = timed(&mut argv(
            &["sh", "-c", "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done"],
            Path::new("/"),
        ));
        let timed = timed.unwrap();
        // Other tests' children count too, so there is only a lower bound.
        assert!(timed.cpu > Duration::ZERO && timed.wall > Duration::ZERO, "{timed:?}");
    }

    #[test]
    fn the_environment_is_clean() {
        let printed = run(&mut program("env")).unwrap();
        assert!(!printed.contains("CARGO_MANIFEST_DIR"), "{printed}");
        assert!(printed.contains("PATH="), "{printed}");
    }
}
