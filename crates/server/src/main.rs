//! `tendond`: the runner as a daemon on a unix socket.

#![forbid(unsafe_code)]

mod listen;
mod log;
mod output;
mod reply;
mod routes;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use engine::config::{Settings, hand_binary, state_dir};
use engine::{Runner, RunnerOptions};
use proto::error::{Code, Coded, ErrorBody};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::listen::Listener;

/// The runner: owns a state directory, its branches and its hands, and serves them on STATE/run/tendond.sock.
#[derive(Parser)]
#[command(name = "tendond", version)]
struct Args {
    /// Where the state is kept [env: TENDON_STATE_DIR] [default: ~/.local/state/tendon]
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
    /// End when no client has been connected and nothing has run for 10 s; log to STATE/logs/tendond.log
    #[arg(long)]
    private: bool,
    /// A configuration file over all other layers
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

/// Fewer open files are of no use: descriptors of a hand are laid out above the first 256.
const OPEN_FILES_MIN: u64 = 512;
/// How long work that blocks may go on when all else has ended.
const BLOCKED_MAX: Duration = Duration::from_secs(5);
/// The argument that makes this program the warden: see [`hands::warden`].
const WARDEN: &str = "--warden";

fn main() -> ExitCode {
    if std::env::args_os().nth(1).is_some_and(|arg| arg == WARDEN) {
        hands::warden::run();
        return ExitCode::SUCCESS;
    }
    let args = Args::parse();
    // As the user's own namespace names them, for the audit.
    let uid = rustix::process::geteuid().as_raw();
    let private = args.private;
    match start(args, uid) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            output::refuse(&error, private);
            ExitCode::from(error.code.exit_status())
        }
    }
}

fn start(args: Args, uid: u32) -> Result<(), ErrorBody> {
    take_open_files()?;
    // Before any thread: a namespace is a thread's, and the ones that follow inherit it.
    sys::ns::enter_private().map_err(|error| ErrorBody {
        hint: Some(hands::probe::namespaces_fix().into()),
        ..host("cannot make a private mount namespace", &error)
    })?;
    let settings = Settings::load(args.config.as_deref()).map_err(|error| error.body())?;
    let state_dir = state_dir(args.state_dir).ok_or_else(|| ErrorBody {
        code: Code::Usage,
        message: "there is no state directory: HOME is not set".into(),
        causes: vec![],
        hint: Some("give one with --state-dir".into()),
    })?;
    let state_dir =
        std::path::absolute(&state_dir).map_err(|error| host("the state directory has no path", &error))?;
    vfs::release_reserve_to_start(&state_dir);
    // What is not ours gets no log either; opening it tells why.
    let log_dir = args.private.then_some(state_dir.as_path()).filter(|dir| !vfs::is_foreign(dir));
    log::start(log_dir).map_err(|error| ErrorBody {
        hint: Some("name a directory that you may write to, with --state-dir or TENDON_STATE_DIR".into()),
        code: if error.kind() == std::io::ErrorKind::StorageFull { Code::NoSpace } else { Code::HostBroken },
        ..host(&format!("cannot write a log in the state directory {}", state_dir.display()), &error)
    })?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|error| host("cannot start threads", &error))?;
    let ended = runtime.block_on(async {
        let warden = std::env::current_exe().ok().map(|own| vec![own.into(), WARDEN.into()]);
        let options = RunnerOptions { state_dir, settings, hand_binary: hand_binary(), warden };
        let runner = Runner::open(options).await.map_err(|error| error.body())?;
        let listener =
            Listener::bind(runner, args.private, uid).map_err(|error| host("cannot listen", &error))?;
        listener.serve().await
    });
    // Work that blocks can't be cancelled. It ends with the process then, which the state directory is made for.
    runtime.shutdown_timeout(BLOCKED_MAX);
    ended
}

/// Raises the limit of open files as far as it goes. Each mounted branch and each hand holds some.
fn take_open_files() -> Result<(), ErrorBody> {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    if let Some(most) = maximum.filter(|most| *most < OPEN_FILES_MIN) {
        return Err(ErrorBody {
            code: Code::HostBroken,
            message: format!("the runner may open only {most} files, and needs {OPEN_FILES_MIN}"),
            causes: vec![],
            hint: Some(format!(
                "raise the limit: ulimit -Hn {OPEN_FILES_MIN} (or more), which may take a new login"
            )),
        });
    }
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
        .map_err(|error| host("cannot raise the limit of open files", &error))
}

fn host(message: &str, error: &dyn std::error::Error) -> ErrorBody {
    let causes =
        std::iter::successors(Some(error), |error| error.source()).map(ToString::to_string).collect();
    ErrorBody { code: Code::HostBroken, message: message.to_owned(), causes, hint: None }
}
