//! The audit: rows, check, questions.

use axum::extract::{RawQuery, State};
use proto::api::AuditRow;
use proto::http::{AuditCheckReply, SqlReply, SqlRequest, query_bytes};
use proto::ids::BranchId;
use vfs::AuditFilter;

use crate::listen::App;
use crate::reply::{Input, Json, Problem, Reply};

pub(crate) async fn log(State(app): State<App>, RawQuery(query): RawQuery) -> Reply<Vec<AuditRow>> {
    let query = query.unwrap_or_default();
    let text = |name: &str| query_bytes(&query, name).and_then(|bytes| String::from_utf8(bytes).ok());
    let number = |name: &str, default: u64| match text(name) {
        None => Ok(default),
        Some(text) => text.parse::<u64>().map_err(|_| Problem::usage(format!("{name} must be a number"))),
    };
    let branch = match text("branch") {
        // Of an id that no branch has any more there may still be rows.
        Some(text) => Some(match text.parse::<BranchId>() {
            Ok(id) => id,
            Err(_) => app.runner.with_store(move |store| store.find_audited_branch(&text)).await?,
        }),
        None => None,
    };
    let filter = AuditFilter {
        branch,
        since: Some(number("since", 0)?),
        limit: Some(number("limit", 1000)?),
        ..AuditFilter::default()
    };
    Ok(Json(app.runner.with_store(move |store| store.audit_log(&filter)).await?))
}

pub(crate) async fn check(State(app): State<App>) -> Reply<AuditCheckReply> {
    let check = app.runner.with_store(|store| store.audit_verify()).await?;
    Ok(Json(AuditCheckReply { rows: check.rows, problem: check.problem }))
}

pub(crate) async fn sql(State(app): State<App>, Input(request): Input<SqlRequest>) -> Reply<SqlReply> {
    let table = app.runner.with_store(move |store| store.audit_sql(&request.query)).await?;
    Ok(Json(SqlReply { columns: table.columns, rows: table.rows, truncated: table.truncated }))
}
