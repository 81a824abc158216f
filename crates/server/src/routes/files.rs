//! Direct edits of a branch: each is in the audit before it is acknowledged.

use std::io::Write;

use axum::Extension;
use axum::body::Bytes;
use axum::extract::{Path, RawQuery, State};
use axum::response::Response;
use proto::http::{EditRequest, FileEntry, query_bytes};
use proto::path::{JsonBytes, TreePath};
use vfs::{Actor, DirEntry, Editor, FileKind};

use super::branch_id;
use super::stream::stream;
use crate::listen::{App, Peer};
use crate::reply::{Input, Json, Problem, Reply};

pub(crate) async fn read(
    State(app): State<App>,
    Extension(peer): Extension<Peer>,
    Path(branch): Path<String>,
    RawQuery(query): RawQuery,
) -> Result<Response, Problem> {
    let path = path(&query.unwrap_or_default())?;
    let branch = branch_id(&app, branch).await?;
    let read = move |store: &vfs::Store, out: &mut dyn Write| {
        store.edit(&branch, &Actor::cli(peer.uid))?.copy_out(&path, out)
    };
    stream(app, read).await
}

pub(crate) async fn write(
    State(app): State<App>,
    Extension(peer): Extension<Peer>,
    Path(branch): Path<String>,
    RawQuery(query): RawQuery,
    bytes: Bytes,
) -> Reply<serde_json::Value> {
    let query = query.unwrap_or_default();
    let path = path(&query)?;
    let mode = match query_bytes(&query, "mode").as_deref() {
        None => None,
        Some(b"644") => Some(0o644),
        Some(b"755") => Some(0o755),
        Some(_) => return Err(Problem::usage("mode must be 644 or 755")),
    };
    let branch = branch_id(&app, branch).await?;
    let write = move |editor: &Editor| editor.write(&path, &bytes, mode);
    app.runner.edit(branch, Actor::cli(peer.uid), write).await?;
    Ok(Json(serde_json::json!({})))
}

pub(crate) async fn remove(
    State(app): State<App>,
    Extension(peer): Extension<Peer>,
    Path(branch): Path<String>,
    RawQuery(query): RawQuery,
) -> Reply<serde_json::Value> {
    let path = path(&query.unwrap_or_default())?;
    let branch = branch_id(&app, branch).await?;
    app.runner.edit(branch, Actor::cli(peer.uid), move |editor| editor.remove(&path)).await?;
    Ok(Json(serde_json::json!({})))
}

pub(crate) async fn edit(
    State(app): State<App>,
    Extension(peer): Extension<Peer>,
    Path(branch): Path<String>,
    Input(request): Input<EditRequest>,
) -> Reply<serde_json::Value> {
    let branch = branch_id(&app, branch).await?;
    if let EditRequest::Symlink { target, .. } = &request {
        target.decode().map_err(Problem::usage)?;
    }
    let edit = move |editor: &Editor| match request {
        EditRequest::Mkdir { path } => editor.mkdir(&path),
        EditRequest::Rename { from, to } => editor.rename(&from, &to),
        EditRequest::Symlink { path, target } => editor.symlink(&path, &target.decode().unwrap_or_default()),
        EditRequest::Chmod { path, mode } => editor.chmod(&path, mode & 0o7777),
    };
    app.runner.edit(branch, Actor::cli(peer.uid), edit).await?;
    Ok(Json(serde_json::json!({})))
}

pub(crate) async fn list(
    State(app): State<App>,
    Extension(peer): Extension<Peer>,
    Path(branch): Path<String>,
    RawQuery(query): RawQuery,
) -> Reply<Vec<FileEntry>> {
    let query = query.unwrap_or_default();
    let path = match query_bytes(&query, "path").as_deref() {
        None | Some(b"") => None,
        Some(_) => Some(path(&query)?),
    };
    let branch = branch_id(&app, branch).await?;
    let list = move |editor: &Editor| editor.list(path.as_ref());
    let entries = app.runner.edit(branch, Actor::cli(peer.uid), list).await?;
    Ok(Json(entries.into_iter().map(shown).collect()))
}

fn shown(entry: DirEntry) -> FileEntry {
    let kind = match entry.stat.kind {
        FileKind::File => "file",
        FileKind::Dir => "dir",
        FileKind::Symlink => "symlink",
        FileKind::Other => "other",
    };
    let (mode, size) = (entry.stat.mode, entry.stat.size);
    FileEntry { name: JsonBytes::new(&entry.name), kind: kind.to_owned(), mode, size }
}

fn path(query: &str) -> Result<TreePath, Problem> {
    let bytes = query_bytes(query, "path").ok_or_else(|| Problem::usage("the path is missing"))?;
    TreePath::new(bytes).map_err(|error| Problem::usage(error.to_string()))
}
