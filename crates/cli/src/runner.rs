//! Reaching the runner: the one that listens on the state directory's socket, or a private one that is started.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use proto::client::{Client, ClientError};
use proto::error::{Code, ErrorBody};
use proto::http::{API_VERSION, RunnerInfo, StartLine};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio::process::Command;
use tokio::time::{Instant, sleep, timeout_at};

use crate::commands::host;
use crate::environment::tendond;

/// How long a runner may take to listen: opening a large state directory after a crash restores files.
const START_MAX: Duration = Duration::from_secs(60);
/// How long to wait for a runner that owns the state directory and does not listen yet, or is ending.
const BUSY_MAX: Duration = Duration::from_secs(15);
/// The most that a failed runner's standard error is read.
const STDERR_BYTES_MAX: u64 = 4096;

/// The socket of the runner of `state_dir`.
pub(crate) fn socket(state_dir: &Path) -> PathBuf {
    state_dir.join("run/tendond.sock")
}

/// A client of the runner of `state_dir`; starts a private one when none runs.
pub(crate) async fn connect(state_dir: &Path) -> Result<Client, ErrorBody> {
    let client = Client::new(socket(state_dir));
    let deadline = Instant::now() + BUSY_MAX;
    loop {
        match client.get::<RunnerInfo>("/v1/version").await {
            Ok(info) => return compatible(info).map(|()| client),
            Err(ClientError::NoRunner(_) | ClientError::Died { .. } | ClientError::Ended { .. }) => {}
            Err(error) => return Err(error.into_body()),
        }
        match start(state_dir).await {
            Ok(()) => {}
            // Another call is starting one just now, or one is ending.
            Err(error) if error.code == Code::StateBusy && Instant::now() < deadline => {
                sleep(Duration::from_millis(50)).await
            }
            Err(error) => return Err(error),
        }
    }
}

/// A client of the runner that runs already.
pub(crate) async fn running(state_dir: &Path) -> Result<(Client, RunnerInfo), ErrorBody> {
    let client = Client::new(socket(state_dir));
    let info = client.get::<RunnerInfo>("/v1/version").await.map_err(ClientError::into_body)?;
    Ok((client, info))
}

fn compatible(info: RunnerInfo) -> Result<(), ErrorBody> {
    if info.api == API_VERSION {
        return Ok(());
    }
    Err(ErrorBody {
        hint: Some("end it with: tendon runner stop".into()),
        ..host(format!(
            "the runner (pid {}) speaks version {} of the API, not {API_VERSION}",
            info.pid, info.api
        ))
    })
}

#[expect(
    clippy::disallowed_methods,
    reason = "the one place of this crate that starts a program: the runner"
)]
async fn start(state_dir: &Path) -> Result<(), ErrorBody> {
    let program = tendond();
    let mut child = Command::from(std::process::Command::new(&program))
        .arg("--state-dir")
        .arg(state_dir)
        .arg("--private")
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        // Ctrl-C is for this program, which tells the runner.
        .process_group(0)
        .spawn()
        .map_err(|error| ErrorBody {
            hint: Some("install tendond next to tendon, or name it with TENDON_TENDOND".into()),
            ..host(format!("cannot start the runner `{}`: {error}", program.display()))
        })?;
    let mut line = String::new();
    if let Some(stdout) = child.stdout.take() {
        let mut stdout = BufReader::new(stdout).take(proto::http::LINE_BYTES_MAX as u64);
        if timeout_at(Instant::now() + START_MAX, stdout.read_line(&mut line)).await.is_err() {
            let _ = child.start_kill();
            return Err(host(format!("the runner did not listen within {} s", START_MAX.as_secs())));
        }
    }
    match serde_json::from_str::<StartLine>(&line) {
        Ok(StartLine::Ready { .. }) => Ok(()),
        Ok(StartLine::Refused { error }) => Err(error),
        Err(_) => {
            let mut text = Vec::new();
            if let Some(stderr) = child.stderr.take() {
                let _ = timeout_at(
                    Instant::now() + BUSY_MAX,
                    stderr.take(STDERR_BYTES_MAX).read_to_end(&mut text),
                )
                .await;
            }
            let causes = String::from_utf8_lossy(&text).lines().map(str::to_owned).collect();
            Err(ErrorBody { causes, ..host("the runner ended before it listened") })
        }
    }
}

/// Waits until nobody listens for `state_dir` any more.
pub(crate) async fn gone(state_dir: &Path, max: Duration) -> bool {
    let client = Client::new(socket(state_dir));
    let deadline = Instant::now() + max;
    while Instant::now() < deadline {
        if matches!(client.get::<RunnerInfo>("/v1/version").await, Err(ClientError::NoRunner(_))) {
            return true;
        }
        sleep(Duration::from_millis(50)).await;
    }
    false
}
