//! A tiny process beside the runner that removes the runner's control groups when the runner is gone, however it went:
//! the kernel removes mounts and processes by itself, but not these.

use std::ffi::{CString, OsString};
use std::fs::File;
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt as _;
use std::path::PathBuf;

use rustix::pipe::{PipeFlags, pipe_with};
use serde::{Deserialize, Serialize};
use sys::spawn::{Plan, Spawner};

use crate::cgroup;
use crate::limits::WARDEN_BYTES_MAX;

/// What a warden is told, as one line of JSON on its standard input, which then stays open as long as the runner lives.
#[derive(Debug, Serialize, Deserialize)]
struct Orders {
    /// Directories whose subdirectories are the runner's groups.
    places: Vec<PathBuf>,
}

/// Why there is no warden.
#[derive(Debug, thiserror::Error)]
pub enum WardenError {
    /// It could not be spawned.
    #[error("the warden can't be started")]
    Spawn(#[from] sys::spawn::SpawnError),
    /// It could not be told.
    #[error("the warden can't be told what to do")]
    Orders(#[from] io::Error),
    /// A NUL byte in its command.
    #[error("the warden's command holds a NUL byte")]
    Nul(#[from] std::ffi::NulError),
}

/// The runner's side: the warden acts when this is dropped, or when the process ends.
#[derive(Debug)]
pub struct Warden {
    _stdin: File,
}

impl Warden {
    /// Starts `command`, which must call [`run`].
    pub fn start(command: Vec<OsString>, places: Vec<PathBuf>) -> Result<Self, WardenError> {
        let (theirs, ours) = pipe_with(PipeFlags::CLOEXEC).map_err(io::Error::from)?;
        let null = OwnedFd::from(File::options().write(true).open("/dev/null")?);
        let argv = command.into_iter().map(|arg| CString::new(arg.into_vec())).collect::<Result<_, _>>()?;
        let fds = vec![(0, theirs), (1, null.try_clone()?), (2, null)];
        Spawner::new().spawn(Plan { argv, fds, outlives: true, ..Plan::default() })?;
        let mut stdin = File::from(ours);
        let mut line = serde_json::to_vec(&Orders { places }).map_err(io::Error::other)?;
        line.push(b'\n');
        stdin.write_all(&line)?;
        Ok(Warden { _stdin: stdin })
    }
}

/// The warden's whole life: reads its orders, waits for the end of its standard input, sweeps. For a hidden subcommand of
/// the runner's binary. Returns how many groups it removed.
pub fn run() -> usize {
    let mut input = BufReader::new(io::stdin().lock().take(WARDEN_BYTES_MAX));
    let mut line = String::new();
    let orders = input.read_line(&mut line).ok().and_then(|_| serde_json::from_str::<Orders>(&line).ok());
    let Some(orders) = orders else { return 0 };
    let mut rest = [0u8; 64];
    while input.read(&mut rest).is_ok_and(|count| count > 0) {}
    cgroup::sweep(&orders.places)
}
