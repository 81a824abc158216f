//! Boot: takes the two descriptors, closes the doors behind itself, and serves.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use proto::hand::{BOOT_BYTES_MAX, BootConfig, BootConfigError, CHANNEL_FD, CONFIG_FD};
use rustix::fs::{Mode, OFlags};
use rustix::process::{DumpableBehavior, Resource, Rlimit, getrlimit, setrlimit};
use sys::supervise::{Spawner, child_signal, inherited_fd, reset_signals};
use tokio::net::UnixStream;
use tokio::net::unix::pipe;

use crate::confine;
use crate::limits::SIGNALS_QUEUED_MAX;
use crate::serve::{Server, serve};
use crate::table::{Cause, Table};

/// Why a hand could not start.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// It was not started by a runner.
    #[error("descriptor {fd} is not open: only tendon's runner starts a hand")]
    Descriptor {
        /// Which.
        fd: i32,
        /// Why.
        source: io::Error,
    },
    /// What it was told makes no sense.
    #[error("the boot configuration is bad")]
    Config(#[from] BootConfigError),
    /// The branch is not where it should be.
    #[error("the directory {path} can't be used")]
    WorkDir {
        /// Where.
        path: String,
        /// Why.
        source: io::Error,
    },
    /// The kernel has Landlock and refused the rules.
    #[error("the Landlock rules can't be applied")]
    Landlock(#[from] landlock::RulesetError),
    /// Anything else of the system.
    #[error("{what} failed")]
    Host {
        /// What.
        what: &'static str,
        /// Why.
        source: io::Error,
    },
}

fn host(what: &'static str) -> impl FnOnce(io::Error) -> BootError {
    move |source| BootError::Host { what, source }
}

/// Runs the hand until its channel closes.
pub fn run() -> Result<(), BootError> {
    // A defect must end the hand, loudly for the runner, and not only the task that ran into it.
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        report(info);
        std::process::exit(70);
    }));
    let channel = take(CHANNEL_FD)?;
    let config = read_config(File::from(take(CONFIG_FD)?))?;
    reset_signals();
    let _ = rustix::process::umask(Mode::from_raw_mode(0o022));
    // Before the process becomes undumpable, which closes its own files in /proc to it.
    let spawner = Spawner::new();
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)
        .map_err(|errno| host("prctl(PR_SET_DUMPABLE)")(errno.into()))?;
    // As the first process of a namespace it gets all orphans anyway.
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
        .map_err(|errno| host("prctl(PR_SET_CHILD_SUBREAPER)")(errno.into()))?;
    limit_queues().map_err(host("setrlimit"))?;
    let root = enter(&config.work_dir)?;
    let null = File::options().read(true).open("/dev/null").map_err(host("opening /dev/null"))?;
    let landlock = confine::landlock(&config)?;
    let table = Arc::new(Table::new(config.work_dir.clone().into(), spawner));
    let server = Server {
        table: Arc::clone(&table),
        config,
        root,
        null: null.into(),
        landlock,
        serial: AtomicU64::new(0),
    };

    // One thread: the fork in `Spawner` relies on it, and each hop to another would cost a wake-up per exec.
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(host("tokio"))?;
    let served = runtime.block_on(live(server, Arc::clone(&table), channel));
    table.kill_everything(&Cause::Dropped);
    served
}

async fn live(server: Server, table: Arc<Table>, channel: OwnedFd) -> Result<(), BootError> {
    let signal =
        child_signal().and_then(pipe::Receiver::from_owned_fd_unchecked).map_err(host("signalfd"))?;
    let channel = StdUnixStream::from(channel);
    channel.set_nonblocking(true).map_err(host("the channel"))?;
    let channel = UnixStream::from_std(channel).map_err(host("the channel"))?;
    tokio::select! {
        () = serve(server, channel) => Ok(()),
        result = table.reap_all(signal) => result.map_err(host("reading SIGCHLD")),
    }
}

/// For all commands. Set here and not by the runner: a user namespace would take over a limit that its maker has, as a bound
/// of all that the same user of the host makes.
fn limit_queues() -> io::Result<()> {
    let most =
        |limit: Option<u64>| Some(limit.map_or(SIGNALS_QUEUED_MAX, |limit| limit.min(SIGNALS_QUEUED_MAX)));
    let now = getrlimit(Resource::Sigpending);
    let maximum = most(now.maximum);
    Ok(setrlimit(Resource::Sigpending, Rlimit { current: maximum, maximum })?)
}

fn take(fd: i32) -> Result<OwnedFd, BootError> {
    inherited_fd(fd).map_err(|source| BootError::Descriptor { fd, source })
}

fn read_config(file: File) -> Result<BootConfig, BootError> {
    let mut json = Vec::new();
    // The writer may have left the offset at the end.
    let at = io::Seek::rewind(&mut &file);
    at.and_then(|()| file.take(BOOT_BYTES_MAX).read_to_end(&mut json))
        .map_err(host("reading the configuration"))?;
    Ok(BootConfig::from_json(&json)?)
}

fn enter(work_dir: &str) -> Result<OwnedFd, BootError> {
    let failed = |source: io::Error| BootError::WorkDir { path: work_dir.to_owned(), source };
    if !Path::new(work_dir).is_absolute() {
        return Err(failed(io::ErrorKind::InvalidInput.into()));
    }
    rustix::process::chdir(work_dir).map_err(|errno| failed(errno.into()))?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(work_dir, flags, Mode::empty()).map_err(|errno| failed(errno.into()))
}
