//! Bases: list, freeze, collect.

use axum::extract::State;
use axum::response::Response;
use proto::api::BaseInfo;
use proto::error::Coded as _;
use proto::http::{FreezeEvent, GcReply};
use proto::verify::Source;
use tokio::sync::mpsc;

use super::verify::bounded;
use crate::listen::App;
use crate::reply::{Input, Json, Problem, Reply, events};

/// Events that wait for a slow client.
const EVENTS_MAX: usize = 16;

pub(crate) async fn list(State(app): State<App>) -> Reply<Vec<BaseInfo>> {
    Ok(Json(app.runner.with_store(|store| store.bases()).await?))
}

pub(crate) async fn freeze(
    State(app): State<App>,
    Input(source): Input<Source>,
) -> Result<Response, Problem> {
    bounded(&source)?;
    if matches!(source, Source::Branch { .. }) {
        return Err(Problem::usage("a branch is no source of a base: fork it instead"));
    }
    let (sender, receiver) = mpsc::channel(EVENTS_MAX);
    tokio::spawn(async move {
        let progress = sender.clone();
        // Progress is for people: what a slow client misses does not matter.
        let tell = move |message| drop(progress.try_send(FreezeEvent::Progress { message }));
        // A client that goes away ends it.
        let frozen = tokio::select! {
            frozen = app.runner.freeze(source, tell) => frozen,
            () = sender.closed() => return,
        };
        let last = match frozen {
            Ok(base) => FreezeEvent::Done { base },
            Err(error) => FreezeEvent::Failed { error: error.body() },
        };
        let _ = sender.send(last).await;
    });
    Ok(events(receiver))
}

pub(crate) async fn gc(State(app): State<App>) -> Reply<GcReply> {
    let report = app.runner.with_store(|store| store.base_gc()).await?;
    Ok(Json(GcReply { removed: report.removed, bytes: report.bytes }))
}
