//! The API, version 1: which path is whose.

mod audit;
mod bases;
mod branches;
mod exec;
mod files;
mod host;
mod stream;
mod verify;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::routing::{get, post};
use proto::http::{FILE_BYTES_MAX, REQUEST_BYTES_MAX};
use proto::ids::BranchId;

use crate::listen::App;
use crate::reply::Problem;

/// All routes.
pub(crate) fn router(app: App) -> Router {
    let branch = Router::new()
        .route("/", get(branches::show).delete(branches::drop_branch))
        .route("/fork", post(branches::fork))
        .route("/at", post(branches::at))
        .route("/diff", get(branches::diff))
        .route("/export", get(branches::export))
        .route("/export-git", post(branches::export_git))
        .route("/exec", post(exec::exec))
        .route("/edit", post(files::edit))
        .route("/list", get(files::list))
        .route(
            "/files",
            get(files::read)
                .delete(files::remove)
                .put(files::write)
                .layer(DefaultBodyLimit::max(FILE_BYTES_MAX as usize)),
        );
    let v1 = Router::new()
        .route("/version", get(host::version))
        .route("/doctor", get(host::doctor))
        .route("/config", get(host::config))
        .route("/stop", post(host::stop))
        .route("/verify", post(verify::verify))
        .route("/verify/{id}/cancel", post(verify::cancel))
        .route("/bases", get(bases::list).post(bases::freeze))
        .route("/bases/gc", post(bases::gc))
        .route("/branches", get(branches::list).post(branches::create))
        .nest("/branches/{branch}", branch)
        .route("/execs/{exec}", post(exec::control))
        .route("/audit", get(audit::log))
        .route("/audit/check", get(audit::check))
        .route("/audit/sql", post(audit::sql))
        .fallback(async || Problem::not_found("the API has no such path"))
        .method_not_allowed_fallback(async || Problem::usage("the path does not take this method"));
    Router::new().nest("/v1", v1).layer(DefaultBodyLimit::max(REQUEST_BYTES_MAX)).with_state(app)
}

/// The branch that a path's text, an id or a name, means.
async fn branch_id(app: &App, text: String) -> Result<BranchId, Problem> {
    Ok(app.runner.with_store(move |store| store.find_branch(&text)).await?)
}
