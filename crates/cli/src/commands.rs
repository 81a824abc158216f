//! The commands, one file each with its `Args` and `run`, and what they share.

mod audit;
mod base;
mod branch;
mod completions;
mod config;
mod doctor;
mod exec;
mod runner;
mod source;
mod verify;

use std::path::PathBuf;

use clap::{Args, CommandFactory as _, Parser, Subcommand};
use proto::client::Client;
use proto::error::{Code, Coded, ErrorBody};

pub(crate) use self::exec::FAILED;
use crate::output::Output;
use crate::{Outcome, environment};

/// Verify a change on a branch, in a sandbox, with an audit.
#[derive(Parser)]
#[command(name = "tendon", version, after_help = EXAMPLES, propagate_version = true)]
pub(crate) struct Tendon {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  tendon doctor                                       can this machine run it?
  tendon verify --repo . --check \"cargo test\"
  tendon verify --repo https://example.org/app.git --ref v2 --setup \"npm ci --offline\" --check \"npm test\"
  tendon branch create --repo . --name fix            then: tendon branch exec fix -- cargo test
  tendon audit log --branch fix

Exit status: 0 passed · 1 a check failed · 2 bad usage or input · 3 refused by policy or a limit ·
             4 the host or the runner is at fault · 70 a defect of tendon · 130 cancelled.
             `tendon branch exec` ends with its command's: see its help.";

/// What every command takes.
#[derive(Args)]
pub(crate) struct Global {
    /// Where the runner keeps its state [env: TENDON_STATE_DIR] [default: $XDG_STATE_HOME/tendon, or ~/.local/state/tendon]
    #[arg(long, global = true, value_name = "DIR", display_order = 900)]
    pub(crate) state_dir: Option<PathBuf>,
    /// Print a versioned JSON record instead of text
    #[arg(long, global = true, display_order = 900)]
    pub(crate) json: bool,
}

#[derive(Subcommand)]
enum Command {
    Verify(Box<verify::VerifyArgs>),
    Base(base::BaseArgs),
    Branch(branch::BranchArgs),
    Audit(audit::AuditArgs),
    Doctor(doctor::DoctorArgs),
    Config(config::ConfigArgs),
    Runner(runner::RunnerArgs),
    Completions(completions::CompletionsArgs),
}

impl Tendon {
    /// Whether it is `branch exec`.
    pub(crate) fn is_exec(&self) -> bool {
        matches!(&self.command, Command::Branch(args) if args.is_exec())
    }

    /// Whether arguments that make no sense are those of `branch exec`.
    pub(crate) fn looks_like_exec() -> bool {
        let parsed = Self::command().ignore_errors(true).try_get_matches().ok();
        let branch = parsed.as_ref().and_then(|parsed| parsed.subcommand_matches("branch"));
        branch.is_some_and(|branch| branch.subcommand_name() == Some("exec"))
    }
}

/// What a command works with.
pub(crate) struct App<'a> {
    pub(crate) output: &'a Output,
    state_dir: PathBuf,
}

impl App<'_> {
    /// A client of the runner, which is started if none runs.
    async fn client(&self) -> Result<Client, ErrorBody> {
        crate::runner::connect(&self.state_dir, self.output).await
    }
}

/// Runs the command that was asked for.
pub(crate) async fn run(tendon: Tendon, output: &Output) -> Outcome {
    if let Command::Completions(args) = tendon.command {
        return completions::run(args, output);
    }
    let app = App { output, state_dir: environment::state_dir(tendon.global.state_dir)? };
    match tendon.command {
        Command::Verify(args) => verify::run(*args, &app).await,
        Command::Base(args) => base::run(args, &app).await,
        Command::Branch(args) => branch::run(args, &app).await,
        Command::Audit(args) => audit::run(args, &app).await,
        Command::Doctor(args) => doctor::run(args, &app).await,
        Command::Config(args) => config::run(args, &app).await,
        Command::Runner(args) => runner::run(args, &app).await,
        Command::Completions(args) => completions::run(args, output),
    }
}

/// An error of usage.
pub(crate) fn usage(message: impl Into<String>, hint: Option<&str>) -> ErrorBody {
    ErrorBody {
        code: Code::Usage,
        message: message.into(),
        causes: Vec::new(),
        hint: hint.map(str::to_owned),
    }
}

/// An error of the host.
pub(crate) fn host(message: impl Into<String>) -> ErrorBody {
    ErrorBody { code: Code::HostBroken, message: message.into(), causes: Vec::new(), hint: None }
}

/// A file of the user that can't be read or written.
fn file_error(what: &str, path: &std::path::Path, error: &std::io::Error) -> ErrorBody {
    use std::io::ErrorKind::{IsADirectory, NotFound, PermissionDenied, StorageFull};
    let known = [
        (NotFound, Code::NotFound, "check the path: a relative one starts in the current directory"),
        (PermissionDenied, Code::BadInput, "check who may read and write it"),
        (IsADirectory, Code::BadInput, "name a file"),
        (StorageFull, Code::NoSpace, "free some space, and run it again"),
    ];
    let found = known.iter().find(|(kind, ..)| *kind == error.kind());
    let (code, hint) = found.map_or((Code::BadInput, None), |(_, code, hint)| (*code, Some(*hint)));
    ErrorBody {
        code,
        message: format!("cannot {what} {}", path.display()),
        causes: vec![error.to_string()],
        hint: hint.map(str::to_owned),
    }
}

fn body(error: impl Coded) -> ErrorBody {
    error.body()
}

/// The longest id or name of a branch that is asked for. None is as long.
const NAME_BYTES_MAX: usize = 256;

/// A path in a branch, with what would help.
fn tree_path(path: &std::path::Path) -> Result<proto::path::TreePath, ErrorBody> {
    use std::os::unix::ffi::OsStrExt as _;
    let bytes = path.as_os_str().as_bytes();
    let bytes = bytes.strip_prefix(b"./").unwrap_or(bytes);
    let bytes = bytes.strip_suffix(b"/").filter(|rest| !rest.is_empty()).unwrap_or(bytes);
    proto::path::TreePath::new(if bytes == b"." { b"" } else { bytes }).map_err(|error| {
        usage(error.to_string(), Some("name a path from the top of the branch, like: src/main.rs"))
    })
}

/// A branch, by id or name: never empty, or the API's path of it would be another one.
fn branch_text(text: &str) -> Result<String, String> {
    if text.is_empty() || text.len() > NAME_BYTES_MAX {
        return Err("give the id or the name of a branch, as `tendon branch list` shows them".into());
    }
    Ok(text.to_owned())
}

/// `A=B` of `--env`.
fn env_pair(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("write NAME=VALUE")?;
    proto::spec::check_env(name, value).map_err(|want| format!("it must be {want}"))?;
    Ok((name.to_owned(), value.to_owned()))
}

/// The limits that verify and exec take.
#[derive(Args, Default)]
#[command(next_help_heading = "Limits (what is not given is the configuration's: tendon config list)")]
struct LimitArgs {
    /// CPUs: 2, 0.5 or 1500m
    #[arg(long, value_name = "N", value_parser = parse_cpus, allow_negative_numbers = true)]
    cpus: Option<u32>,
    /// Memory of all processes together: 2GiB
    #[arg(long, value_name = "SIZE", value_parser = parse_size, allow_negative_numbers = true)]
    memory: Option<u64>,
    /// Processes and threads together: 512
    #[arg(long, value_name = "N", value_parser = number::<u32>, allow_negative_numbers = true)]
    pids: Option<u32>,
    /// Bytes that the commands may add to the branch: 10GiB
    #[arg(long, value_name = "SIZE", value_parser = parse_size, allow_negative_numbers = true)]
    disk: Option<u64>,
    /// Wall time of each command: 90s, 10m, 1h30m
    #[arg(long, value_name = "TIME", value_parser = parse_time, allow_negative_numbers = true)]
    timeout: Option<u64>,
}

impl LimitArgs {
    /// Puts what was given over `limits`.
    fn apply(&self, limits: &mut proto::verify::LimitsAsked) {
        limits.cpu_milli = self.cpus.or(limits.cpu_milli);
        limits.memory_bytes_max = self.memory.or(limits.memory_bytes_max);
        limits.pids_max = self.pids.or(limits.pids_max);
        limits.disk_bytes_max = self.disk.or(limits.disk_bytes_max);
        limits.wall_ms_max = self.timeout.or(limits.wall_ms_max);
    }
}

/// A whole number.
fn number<N: std::str::FromStr>(text: &str) -> Result<N, String> {
    text.parse().map_err(|_| format!("write a whole number of up to {} bits, like 512", size_of::<N>() * 8))
}

fn parse_cpus(text: &str) -> Result<u32, proto::units::UnitError> {
    proto::units::parse_cpu_milli(text)
}
fn parse_size(text: &str) -> Result<u64, proto::units::UnitError> {
    proto::units::parse_bytes(text)
}
fn parse_time(text: &str) -> Result<u64, proto::units::UnitError> {
    proto::units::parse_millis(text)
}
