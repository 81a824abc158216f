//! The runner itself: version, configuration, what the host can enforce, and its end.

use axum::extract::State;
use proto::http::{API_VERSION, ConfigReply, DoctorReply, RunnerInfo};
use proto::path::JsonBytes;

use crate::listen::App;
use crate::reply::{Json, Reply};

pub(crate) async fn version(State(app): State<App>) -> Json<RunnerInfo> {
    Json(RunnerInfo {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        api: API_VERSION,
        pid: std::process::id(),
        private: app.private,
        state_dir: JsonBytes::of_path(app.runner.store().dir()),
        clients: app.clients(),
        running: u32::try_from(app.runner.running()).unwrap_or(u32::MAX),
        lingering: u32::try_from(app.runner.lingering()).unwrap_or(u32::MAX),
        uptime_ms: u64::try_from(app.started.elapsed().as_millis()).unwrap_or(u64::MAX),
    })
}

pub(crate) async fn config(State(app): State<App>) -> Json<ConfigReply> {
    Json(app.runner.settings().list())
}

pub(crate) async fn doctor(State(app): State<App>) -> Reply<DoctorReply> {
    Ok(Json(app.runner.doctor().await))
}

pub(crate) async fn stop(State(app): State<App>) -> Json<serde_json::Value> {
    app.stop.cancel();
    Json(serde_json::json!({}))
}
