//! `tendon audit`: who changed what.

use clap::{Args, Subcommand};
use proto::api::AuditRow;
use proto::client::ClientError;
use proto::http::{AuditCheckReply, SqlReply, SqlRequest, percent_encode};
use proto::units::counted;
use serde_json::{Value, json};

use super::{App, branch_text, number};
use crate::Outcome;
use crate::output::{Paint, one_line};

/// Rows that the runner is asked for at a time.
const PAGE_ROWS: u64 = 1_000;

/// The audit: every change of every branch, attributed.
#[derive(Args)]
#[command(
    after_help = "Examples:\n  tendon audit log --branch fix\n  tendon audit verify\n  tendon audit sql \"select op, count(*) from audit group by op\""
)]
pub(crate) struct AuditArgs {
    #[command(subcommand)]
    command: AuditCommand,
}

#[derive(Subcommand)]
enum AuditCommand {
    /// Print rows, oldest first
    #[command(
        after_help = "Examples:\n  tendon audit log --branch fix\n  tendon audit log --since 1000 --limit 50 --json"
    )]
    Log(LogArgs),
    /// Check the hash chain. Exit status 1: it is broken
    #[command(after_help = "Example:\n  tendon audit verify && echo nothing was altered")]
    Verify,
    /// Ask with one read-only SQL select
    #[command(
        after_help = "Examples:\n  tendon audit sql \"select op, count(*) from audit group by op\"\n  \
                             tendon audit sql \"select actor, op, path from audit where op = 'delete'\""
    )]
    Sql {
        /// The query
        query: String,
    },
}

#[derive(Args)]
struct LogArgs {
    /// Only this branch, by id or name
    #[arg(long, value_parser = branch_text)]
    branch: Option<String>,
    /// Only rows after this sequence number
    #[arg(long, value_name = "SEQ", default_value_t = 0, value_parser = number::<u64>, allow_negative_numbers = true)]
    since: u64,
    /// At most this many rows
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..), allow_negative_numbers = true)]
    limit: u32,
}

pub(crate) async fn run(args: AuditArgs, app: &App<'_>) -> Outcome {
    match args.command {
        AuditCommand::Log(args) => log(args, app).await,
        AuditCommand::Verify => verify(app).await,
        AuditCommand::Sql { query } => sql(query, app).await,
    }
}

async fn log(args: LogArgs, app: &App<'_>) -> Outcome {
    let client = app.client().await?;
    let mut branch = String::new();
    if let Some(name) = &args.branch {
        branch = format!("&branch={}", percent_encode(name.as_bytes()));
    }
    // The runner gives so many at a time; one more than asked for tells whether there are more.
    let (mut since, mut left, mut all) = (args.since, u64::from(args.limit), Vec::new());
    let more = loop {
        let page = PAGE_ROWS.min(left.saturating_add(1));
        let path = format!("/v1/audit?since={since}&limit={page}{branch}");
        let mut rows: Vec<AuditRow> = client.get(&path).await.map_err(ClientError::into_body)?;
        let (full, more) = (rows.len() as u64 == page, rows.len() as u64 > left);
        rows.truncate(usize::try_from(left).unwrap_or(usize::MAX));
        left -= rows.len() as u64;
        since = rows.last().map_or(since, |row| row.seq);
        if app.output.json {
            all.append(&mut rows);
        } else {
            rows.iter().for_each(|row| app.output.line(log_line(row)));
        }
        if more || !full {
            break more;
        }
    };
    let next = more.then_some(since);
    if app.output.json {
        app.output.json(&json!({ "version": 1, "rows": all, "next": next }));
    } else if let Some(next) = next {
        app.output.note(&format!("there is more: --since {next}"));
    }
    Ok(0)
}

fn log_line(row: &AuditRow) -> String {
    let what = match &row.path {
        Some(path) => path.to_string(),
        None => one_line(row.detail.as_deref().unwrap_or_default()),
    };
    let size = row.size.map(|size| format!(" ({size} B)")).unwrap_or_default();
    let (time, branch) = (show_time(row.time_ms), &row.branch);
    format!(
        "{:>6}  {time}  {branch}  {:<12} {:<8} {}{size}",
        row.seq,
        one_line(&row.actor),
        one_line(&row.op),
        what
    )
}

/// RFC 3339 in UTC, to the second. The calendar is Howard Hinnant's `civil_from_days`.
pub(crate) fn show_time(time_ms: u64) -> String {
    let seconds = time_ms / 1000;
    let (days, in_day) = ((seconds / 86_400) as i64, seconds % 86_400);
    let z = days + 719_468;
    let era = z.div_euclid(146_097);
    let day_of_era = z.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", in_day / 3600, in_day / 60 % 60, in_day % 60)
}

async fn verify(app: &App<'_>) -> Outcome {
    let reply: AuditCheckReply =
        app.client().await?.get("/v1/audit/check").await.map_err(ClientError::into_body)?;
    let good = reply.problem.is_none();
    if app.output.json {
        app.output
            .json(&json!({ "version": 1, "rows": reply.rows, "intact": good, "problem": reply.problem }));
    } else if let Some(problem) = &reply.problem {
        app.output.line(format!("{} {}", app.output.paint(Paint::Red, "broken:"), one_line(problem)));
    } else {
        app.output.line(format!(
            "{} {}",
            app.output.paint(Paint::Green, "intact:"),
            counted(reply.rows, "row")
        ));
    }
    Ok(u8::from(!good))
}

async fn sql(query: String, app: &App<'_>) -> Outcome {
    let reply: SqlReply = app
        .client()
        .await?
        .post("/v1/audit/sql", &SqlRequest { query })
        .await
        .map_err(ClientError::into_body)?;
    if app.output.json {
        app.output.json(&json!({ "version": 1, "columns": reply.columns, "rows": reply.rows, "truncated": reply.truncated }));
        return Ok(0);
    }
    let cell = |value: &Value| match value {
        Value::String(text) => text.clone(),
        Value::Null => String::new(),
        other @ (Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_)) => other.to_string(),
    };
    let rows: Vec<Vec<String>> = reply.rows.iter().map(|row| row.iter().map(cell).collect()).collect();
    app.output.table(&reply.columns.iter().map(String::as_str).collect::<Vec<_>>(), &rows);
    if reply.truncated {
        app.output.note("there are more rows: ask for fewer with limit");
    }
    Ok(0)
}

#[cfg(test)]
mod tests {
    #[test]
    fn times_are_shown_in_utc() {
        for (ms, want) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400_000, "2000-02-29T00:00:00Z"),
            (1_735_689_599_999, "2024-12-31T23:59:59Z"),
            (4_102_444_800_000, "2100-01-01T00:00:00Z"),
        ] {
            assert_eq!(super::show_time(ms), want);
        }
    }
}
