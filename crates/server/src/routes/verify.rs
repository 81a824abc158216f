//! `POST /v1/verify`: events until the report; a client that vanishes cancels.

use axum::extract::{Path, State};
use axum::response::Response;
use proto::http::INLINE_BYTES_MAX;
use proto::ids::VerifyId;
use proto::verify::{Source, VerifyRequest};

use crate::listen::App;
use crate::reply::{Input, Json, Problem, Reply, events};

pub(crate) async fn verify(
    State(app): State<App>,
    Input(request): Input<VerifyRequest>,
) -> Result<Response, Problem> {
    bounded(&request.source)?;
    Ok(events(app.runner.verify(request)))
}

pub(crate) async fn cancel(State(app): State<App>, Path(id): Path<String>) -> Reply<serde_json::Value> {
    let id = id.parse::<VerifyId>().map_err(|error| Problem::usage(error.to_string()))?;
    if app.runner.cancel_verify(&id) {
        Ok(Json(serde_json::json!({})))
    } else {
        Err(Problem::not_found(format!("no verify {id} runs")))
    }
}

/// Checks the size of inline files.
pub(crate) fn bounded(source: &Source) -> Result<(), Problem> {
    let Source::Files { files } = source else { return Ok(()) };
    let mut total = 0;
    for file in files {
        total +=
            file.content.decode().map_err(|error| Problem::usage(format!("{}: {error}", file.path)))?.len()
                as u64;
        if total > INLINE_BYTES_MAX {
            return Err(Problem::usage(format!(
                "the inline files are larger than {} MiB",
                INLINE_BYTES_MAX >> 20
            )));
        }
    }
    Ok(())
}
