//! `POST /v1/branches/BRANCH/exec`: a command's events out, its standard input in; `POST /v1/execs/EXEC`: the rest.

use axum::body::{Body, BodyDataStream};
use axum::extract::{Path, State};
use axum::response::Response;
use proto::http::{ExecControl, ExecInput, ExecRequest};
use proto::ids::ExecId;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::StreamExt as _;

use super::{BODY_MAX, branch_id};
use crate::listen::App;
use crate::reply::{Input, Json, Problem, Reply, events};

/// The longest line of the request's body.
const LINE_BYTES_MAX: usize = 4 * 1024 * 1024;
/// Inputs that wait for the command to read.
const INPUTS_MAX: usize = 16;

pub(crate) async fn exec(
    State(app): State<App>,
    Path(branch): Path<String>,
    body: Body,
) -> Result<Response, Problem> {
    let branch = branch_id(&app, branch).await?;
    let mut lines = Lines { stream: body.into_data_stream(), buffer: Vec::new() };
    let first =
        timeout(BODY_MAX, lines.next()).await.map_err(|_| Problem::usage("the body does not come"))?;
    let first = first?.ok_or_else(|| Problem::usage("the body is empty"))?;
    let request: ExecRequest = serde_json::from_slice(&first)
        .map_err(|error| Problem::usage(format!("the body makes no sense: {error}")))?;
    let (sender, input) = mpsc::channel(INPUTS_MAX);
    tokio::spawn(async move {
        let mut sender = Some(sender);
        // A broken line, like a broken connection, is the end of the input. What comes after the command has ended is still
        // read: a body that nobody reads breaks the connection, and the last events with it.
        while let Ok(Some(line)) = lines.next().await {
            let bytes =
                serde_json::from_slice::<ExecInput>(&line).ok().and_then(|input| input.stdin.decode().ok());
            let sent = match (&sender, bytes) {
                (Some(sender), Some(bytes)) => sender.send(bytes).await.is_ok(),
                (Some(_) | None, _) => false,
            };
            if !sent {
                sender = None;
            }
        }
    });
    Ok(events(app.runner.exec(branch, request, input)))
}

pub(crate) async fn control(
    State(app): State<App>,
    Path(exec): Path<String>,
    Input(control): Input<ExecControl>,
) -> Reply<serde_json::Value> {
    let exec = exec.parse::<ExecId>().map_err(|error| Problem::usage(error.to_string()))?;
    if app.runner.control(&exec, control).await {
        Ok(Json(serde_json::json!({})))
    } else {
        Err(Problem::not_found(format!("no exec {exec} runs")))
    }
}

/// A body by lines.
struct Lines {
    stream: BodyDataStream,
    buffer: Vec<u8>,
}

impl Lines {
    async fn next(&mut self) -> Result<Option<Vec<u8>>, Problem> {
        loop {
            if let Some(at) = self.buffer.iter().position(|byte| *byte == b'\n') {
                let rest = self.buffer.split_off(at + 1);
                return Ok(Some(std::mem::replace(&mut self.buffer, rest)));
            }
            if self.buffer.len() > LINE_BYTES_MAX {
                return Err(Problem::usage("a line of the body is too long"));
            }
            match self.stream.next().await {
                Some(Ok(bytes)) => self.buffer.extend_from_slice(&bytes),
                Some(Err(error)) => return Err(Problem::usage(format!("the body can't be read: {error}"))),
                None if self.buffer.is_empty() => return Ok(None),
                None => return Ok(Some(std::mem::take(&mut self.buffer))),
            }
        }
    }
}
