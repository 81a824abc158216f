//! `POST /v1/branches/BRANCH/exec`: a command's events out, its standard input, signals and window sizes in.

use axum::body::{Body, BodyDataStream};
use axum::extract::{Path, State};
use axum::response::Response;
use proto::http::{ExecInput, ExecRequest};
use tokio::sync::mpsc;
use tokio_stream::StreamExt as _;

use super::branch_id;
use crate::listen::App;
use crate::reply::{Problem, events};

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
    let first = lines.next().await?.ok_or_else(|| Problem::usage("the body is empty"))?;
    let request: ExecRequest = serde_json::from_slice(&first)
        .map_err(|error| Problem::usage(format!("the body makes no sense: {error}")))?;
    let (sender, input) = mpsc::channel(INPUTS_MAX);
    tokio::spawn(async move {
        // A broken line, like a broken connection, is the end of the input.
        while let Ok(Some(line)) = lines.next().await {
            let Ok(input) = serde_json::from_slice::<ExecInput>(&line) else { break };
            if sender.send(input).await.is_err() {
                break;
            }
        }
    });
    Ok(events(app.runner.exec(branch, request, input)))
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
