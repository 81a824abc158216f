//! The API, version 1: which path is whose.

mod audit;
mod bases;
mod branches;
mod exec;
mod files;
mod host;
pub(crate) mod stream;
mod verify;

use std::time::Duration;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::routing::{get, post};
use proto::http::{FILE_BYTES_MAX, REQUEST_BYTES_MAX};
use proto::ids::BranchId;
use tower_http::timeout::RequestBodyTimeoutLayer;

use crate::listen::App;
use crate::reply::Problem;

/// How long a client may send nothing of a request's body.
const BODY_MAX: Duration = Duration::from_secs(60);

/// All routes.
pub(crate) fn router(app: App) -> Router {
    let timed = timed();
    let branch = Router::new()
        .route("/", get(branches::show).delete(branches::drop_branch))
        .route("/fork", post(branches::fork))
        .route("/at", post(branches::at))
        .route("/diff", get(branches::diff))
        .route("/export", get(branches::export))
        .route("/export-git", post(branches::export_git))
        .route("/edit", post(files::edit))
        .route("/list", get(files::list))
        .route(
            "/files",
            get(files::read)
                .delete(files::remove)
                .put(files::write)
                .layer(DefaultBodyLimit::max(FILE_BYTES_MAX as usize)),
        )
        .layer(timed.clone())
        // Its body is a command's standard input, which comes when it comes.
        .route("/exec", post(exec::exec));
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
        .route("/execs/{exec}", post(exec::control))
        .route("/audit", get(audit::log))
        .route("/audit/check", get(audit::check))
        .route("/audit/sql", post(audit::sql))
        .layer(timed)
        .nest("/branches/{branch}", branch)
        .fallback(async || Problem::not_found("the API has no such path"))
        .method_not_allowed_fallback(async || Problem::usage("the path does not take this method"));
    Router::new().nest("/v1", v1).layer(DefaultBodyLimit::max(REQUEST_BYTES_MAX)).with_state(app)
}

/// Gives up a body that does not come.
fn timed() -> RequestBodyTimeoutLayer {
    RequestBodyTimeoutLayer::new(BODY_MAX)
}

/// The branch that a path's text, an id or a name, means.
async fn branch_id(app: &App, text: String) -> Result<BranchId, Problem> {
    Ok(app.runner.with_store(move |store| store.find_branch(&text)).await?)
}

#[cfg(test)]
mod tests {
    use axum::body::{Body, Bytes};
    use axum::http::{Request, StatusCode};
    use hyper::service::Service as _;
    use hyper_util::service::TowerToHyperService;
    use tokio::time::Instant;

    use super::*;
    use crate::reply::Input;

    #[tokio::test(start_paused = true)]
    async fn a_body_that_does_not_come_is_given_up() {
        let reads = post(async |Input(_): Input<serde_json::Value>| "all of it");
        let router: Router = Router::new().route("/", reads).layer(timed());
        let start = Instant::now();
        let body = Body::from_stream(tokio_stream::pending::<std::io::Result<Bytes>>());
        let request = Request::post("/").body(body).unwrap();
        let response = TowerToHyperService::new(router).call(request).await.unwrap();
        assert_eq!(response.status(), StatusCode::BAD_REQUEST);
        assert_eq!(start.elapsed().as_secs(), BODY_MAX.as_secs());
    }
}
