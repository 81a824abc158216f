//! Reaching the runner: the one that listens on the state directory's socket, or a private one that is started.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use proto::client::{Client, ClientError};
use proto::error::{Code, ErrorBody};
use proto::http::{API_VERSION, RunnerInfo, StartLine};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio::process::Command;
use tokio::time::{Instant, sleep, timeout};

use crate::commands::host;
use crate::environment::tendond;
use crate::life::Life;
use crate::output::Output;

/// How long a runner that starts or ends may do nothing. As long as it works it is waited for: opening a large state
/// directory after a crash restores files.
const IDLE_MAX: Duration = Duration::from_secs(60);
/// How long to wait for a runner that somebody else starts or ends.
const BUSY_MAX: Duration = Duration::from_secs(15 * 60);
/// How often that is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// How often a runner is started again when nobody knows who has the state directory.
const AGAIN_EVERY: Duration = Duration::from_millis(500);
/// How long a runner that ended may take to have its last words read.
const STDERR_MAX: Duration = Duration::from_secs(5);
/// The most that a failed runner's standard error is read.
const STDERR_BYTES_MAX: u64 = 4096;

/// The socket of the runner of `state_dir`.
pub(crate) fn socket(state_dir: &Path) -> PathBuf {
    state_dir.join("run/tendond.sock")
}

/// A client of the runner of `state_dir`; starts a private one when none runs.
pub(crate) async fn connect(state_dir: &Path, output: &Output) -> Result<Client, ErrorBody> {
    let client = Client::new(socket(state_dir));
    let begin = Instant::now();
    loop {
        if let Some(info) = listens(&client).await? {
            output.clear_progress();
            return compatible(info).map(|()| client);
        }
        match start(state_dir, output).await {
            Ok(()) => {}
            // Another call is starting one just now, or one is ending.
            Err(error) if error.code == Code::StateBusy => {
                if !turn_of_another(state_dir, &client, begin, output).await? {
                    return Err(error);
                }
            }
            Err(error) => return Err(error),
        }
    }
}

/// The runner, if one listens.
async fn listens(client: &Client) -> Result<Option<RunnerInfo>, ErrorBody> {
    match client.get::<RunnerInfo>("/v1/version").await {
        Ok(info) => Ok(Some(info)),
        Err(ClientError::NoRunner(_) | ClientError::Died { .. } | ClientError::Ended { .. }) => Ok(None),
        Err(error) => Err(error.into_body()),
    }
}

/// Waits until the runner that holds the state directory listens or is gone; `false` if it does nothing.
async fn turn_of_another(
    state_dir: &Path,
    client: &Client,
    begin: Instant,
    output: &Output,
) -> Result<bool, ErrorBody> {
    sleep(LOOK_EVERY).await;
    let holder = std::fs::read_to_string(state_dir.join("lock")).ok();
    let Some(mut life) = holder.and_then(|pid| Life::of(pid.trim().parse().ok()?)) else {
        // It has not written its process id yet, or has ended just now, or can't be seen from here.
        sleep(AGAIN_EVERY).await;
        return Ok(begin.elapsed() < IDLE_MAX);
    };
    while !life.ended() && listens(client).await?.is_none() {
        if life.idle() > IDLE_MAX || begin.elapsed() > BUSY_MAX {
            return Ok(false);
        }
        output.progress(&format!("waiting for the runner (pid {}), which starts or ends", life.pid));
        sleep(LOOK_EVERY).await;
    }
    Ok(true)
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
async fn start(state_dir: &Path, output: &Output) -> Result<(), ErrorBody> {
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
    let life = child.id().and_then(|pid| Life::of(pid.try_into().ok()?));
    if let (Some(stdout), Some(mut life)) = (child.stdout.take(), life) {
        let mut stdout = BufReader::new(stdout).take(proto::http::LINE_BYTES_MAX as u64);
        let read = stdout.read_line(&mut line);
        tokio::pin!(read);
        while timeout(LOOK_EVERY, &mut read).await.is_err() {
            if life.idle() > IDLE_MAX {
                let _ = child.start_kill();
                return Err(did_nothing(state_dir));
            }
            output.progress("waiting for the runner to start: after a crash it puts its state in order");
        }
    }
    match serde_json::from_str::<StartLine>(&line) {
        Ok(StartLine::Ready { .. }) => Ok(()),
        Ok(StartLine::Refused { error }) => Err(error),
        Err(_) => {
            let mut text = Vec::new();
            if let Some(stderr) = child.stderr.take() {
                let _ = timeout(STDERR_MAX, stderr.take(STDERR_BYTES_MAX).read_to_end(&mut text)).await;
            }
            let text = String::from_utf8_lossy(&text);
            let causes = text.lines().filter(|line| !line.trim().is_empty()).map(str::to_owned).collect();
            Err(ErrorBody { causes, ..host("the runner ended before it listened") })
        }
    }
}

fn did_nothing(state_dir: &Path) -> ErrorBody {
    ErrorBody {
        hint: Some(format!("its log is {}", state_dir.join("logs/tendond.log").display())),
        ..host(format!("the runner did nothing for {} s, and did not listen", IDLE_MAX.as_secs()))
    }
}

/// Tells the runner to end, and waits until it has; `false` if it does not within `max`.
pub(crate) async fn stop(client: &Client, max: Duration) -> Result<bool, ErrorBody> {
    // Before it is told: afterwards the number could be another's.
    let life = client.runner_pid().await.and_then(Life::of);
    match client.post::<serde_json::Value>("/v1/stop", &serde_json::json!({})).await {
        Ok(_) => {}
        // Somebody else told it so, too.
        Err(ClientError::NoRunner(_) | ClientError::Died { .. }) if life.is_some() => {}
        Err(error) => return Err(error.into_body()),
    }
    let deadline = Instant::now() + max;
    loop {
        let gone = match &life {
            Some(life) => life.ended(),
            // It is in a namespace of processes that can't be seen from here.
            None => listens(client).await?.is_none(),
        };
        if gone || Instant::now() > deadline {
            return Ok(gone);
        }
        sleep(LOOK_EVERY).await;
    }
}
