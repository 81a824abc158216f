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

use clap::{Args, Parser, Subcommand};
use proto::client::Client;
use proto::error::{Code, Coded, ErrorBody};

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
  tendon verify --repo . --check \"cargo test\"
  tendon verify --repo https://example.org/app.git --ref v2 --setup \"npm ci\" --check \"npm test\"
  tendon doctor

Exit status: 0 passed · 1 a check failed · 2 bad usage or input · 3 refused by policy or a limit ·
             4 the host or the runner is at fault · 70 a defect of tendon · 130 cancelled";

/// What every command takes.
#[derive(Args)]
pub(crate) struct Global {
    /// Where the runner keeps its state [env: TENDON_STATE_DIR] [default: ~/.local/state/tendon]
    #[arg(long, global = true, value_name = "DIR")]
    pub(crate) state_dir: Option<PathBuf>,
    /// Print a versioned JSON record instead of text
    #[arg(long, global = true)]
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

/// What a command works with.
pub(crate) struct App<'a> {
    pub(crate) output: &'a Output,
    state_dir: PathBuf,
}

impl App<'_> {
    /// A client of the runner, which is started if none runs.
    async fn client(&self) -> Result<Client, ErrorBody> {
        crate::runner::connect(&self.state_dir).await
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
    let kind = error.kind();
    let code = if kind == std::io::ErrorKind::NotFound {
        Code::NotFound
    } else if kind == std::io::ErrorKind::StorageFull {
        Code::NoSpace
    } else {
        Code::BadInput
    };
    ErrorBody {
        code,
        message: format!("cannot {what} {}", path.display()),
        causes: vec![error.to_string()],
        hint: None,
    }
}

fn body(error: impl Coded) -> ErrorBody {
    error.body()
}

/// `A=B` of `--env`.
fn env_pair(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("write NAME=VALUE")?;
    proto::spec::check_env(name, value).map_err(|want| format!("it must be {want}"))?;
    Ok((name.to_owned(), value.to_owned()))
}

/// The limits that verify and exec take.
#[derive(Args, Default)]
#[command(next_help_heading = "Limits")]
struct LimitArgs {
    /// CPUs: 2, 0.5 or 1500m
    #[arg(long, value_name = "N", value_parser = parse_cpus)]
    cpus: Option<u32>,
    /// Memory of all processes together: 2GiB
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    memory: Option<u64>,
    /// Processes and threads
    #[arg(long, value_name = "N")]
    pids: Option<u32>,
    /// Bytes that the commands may add to the branch: 10GiB
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    disk: Option<u64>,
    /// Wall time of each command: 90s, 10m, 1h30m
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
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

fn parse_cpus(text: &str) -> Result<u32, proto::units::UnitError> {
    proto::units::parse_cpu_milli(text)
}
fn parse_size(text: &str) -> Result<u64, proto::units::UnitError> {
    proto::units::parse_bytes(text)
}
fn parse_time(text: &str) -> Result<u64, proto::units::UnitError> {
    proto::units::parse_millis(text)
}
