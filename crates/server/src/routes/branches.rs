//! Branches: create, fork, list, show, drop, as of, diff, export.

use std::io::Write;

use axum::Extension;
use axum::extract::{Path, RawQuery, State};
use axum::response::{IntoResponse as _, Response};
use proto::api::BranchInfo;
use proto::http::{BranchAt, BranchAtReply, CreateBranch, ExportGit, ExportReply, ForkBranch, query_bytes};
use proto::ids::VerifyId;
use vfs::{Actor, DiffFormat, ExportTarget, GitRef};

use super::branch_id;
use super::stream::stream;
use crate::listen::{App, Peer};
use crate::reply::{Input, Json, Problem, Reply};

pub(crate) async fn list(State(app): State<App>) -> Reply<Vec<BranchInfo>> {
    Ok(Json(app.runner.with_store(|store| store.branches()).await?))
}

pub(crate) async fn create(
    State(app): State<App>,
    Extension(peer): Extension<Peer>,
    Input(request): Input<CreateBranch>,
) -> Reply<BranchInfo> {
    check_name(request.name.as_deref())?;
    let create = move |store: &vfs::Store| {
        store.create_branch(&request.base, request.name.as_deref(), &Actor::cli(peer.uid))
    };
    Ok(Json(app.runner.with_store(create).await?))
}

pub(crate) async fn show(State(app): State<App>, Path(branch): Path<String>) -> Reply<BranchInfo> {
    let branch = branch_id(&app, branch).await?;
    Ok(Json(app.runner.with_store(move |store| store.branch(&branch)).await?))
}

pub(crate) async fn drop_branch(
    State(app): State<App>,
    Extension(peer): Extension<Peer>,
    Path(branch): Path<String>,
) -> Reply<serde_json::Value> {
    let branch = branch_id(&app, branch).await?;
    app.runner.drop_branch(branch, Actor::cli(peer.uid)).await?;
    Ok(Json(serde_json::json!({})))
}

pub(crate) async fn fork(
    State(app): State<App>,
    Extension(peer): Extension<Peer>,
    Path(branch): Path<String>,
    Input(request): Input<ForkBranch>,
) -> Reply<BranchInfo> {
    check_name(request.name.as_deref())?;
    let branch = branch_id(&app, branch).await?;
    Ok(Json(app.runner.fork(branch, request.name, Actor::cli(peer.uid)).await?))
}

pub(crate) async fn at(
    State(app): State<App>,
    Extension(peer): Extension<Peer>,
    Path(branch): Path<String>,
    Input(request): Input<BranchAt>,
) -> Reply<BranchAtReply> {
    check_name(request.name.as_deref())?;
    let branch = app.runner.with_store(move |store| store.find_past_branch(&branch)).await?;
    let at = move |store: &vfs::Store| {
        store.branch_at(&branch, request.seq, request.name.as_deref(), &Actor::cli(peer.uid))
    };
    let (branch, missing) = app.runner.with_store(at).await?;
    Ok(Json(BranchAtReply { branch, missing }))
}

pub(crate) async fn diff(
    State(app): State<App>,
    Path(branch): Path<String>,
    RawQuery(query): RawQuery,
) -> Result<Response, Problem> {
    let format = match query_bytes(&query.unwrap_or_default(), "format").as_deref() {
        None | Some(b"unified") => DiffFormat::Unified,
        Some(b"name-status") => DiffFormat::NameStatus,
        Some(_) => return Err(Problem::usage("format must be unified or name-status")),
    };
    let branch = branch_id(&app, branch).await?;
    Ok(app.runner.with_store(move |store| store.diff(&branch, format)).await?.into_response())
}

pub(crate) async fn export(
    State(app): State<App>,
    Path(branch): Path<String>,
    RawQuery(query): RawQuery,
) -> Result<Response, Problem> {
    let tar = match query_bytes(&query.unwrap_or_default(), "format").as_deref() {
        Some(b"patch") => false,
        Some(b"tar") => true,
        _other => return Err(Problem::usage("format must be patch or tar")),
    };
    let branch = branch_id(&app, branch).await?;
    let export = move |store: &vfs::Store, out: &mut dyn Write| {
        let target = if tar { ExportTarget::Tar(out) } else { ExportTarget::Patch(out) };
        store.export(&branch, target)
    };
    stream(app, export).await
}

pub(crate) async fn export_git(
    State(app): State<App>,
    Path(branch): Path<String>,
    Input(request): Input<ExportGit>,
) -> Reply<ExportReply> {
    let branch = branch_id(&app, branch).await?;
    let ExportGit { repo, name, message, author } = request;
    let repo = repo.decode_path().map_err(|error| Problem::usage(format!("the repository: {error}")))?;
    let named = name.clone();
    let export = move |store: &vfs::Store| {
        let git = GitRef { repo, name, message, author };
        store.export(&branch, ExportTarget::GitRef(git))
    };
    let report = app.runner.with_store(export).await?;
    Ok(Json(ExportReply { commit: report.commit, name: Some(named), uncommitted: report.uncommitted }))
}

/// Names of the form that the runner gives its own branches are its own: it drops those at its start.
fn check_name(name: Option<&str>) -> Result<(), Problem> {
    match name {
        Some(name) if name.parse::<VerifyId>().is_ok() => {
            Err(Problem::usage("a branch can't be named like a verify, `vf-` and 16 characters"))
        }
        Some(_) | None => Ok(()),
    }
}
