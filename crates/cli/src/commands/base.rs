//! `tendon base`: immutable snapshots that branches start from.

use clap::{Args, Subcommand};
use proto::api::BaseInfo;
use proto::client::ClientError;
use proto::http::GcReply;
use proto::units::{counted, show_bytes};
use serde_json::json;

use super::source::{SourceArgs, freeze};
use super::{App, usage};
use crate::Outcome;

/// Bases: immutable snapshots that branches start from.
#[derive(Args)]
#[command(
    after_help = "Examples:\n  tendon base freeze --repo . --ref main\n  tendon base list\n  tendon base gc"
)]
pub(crate) struct BaseArgs {
    #[command(subcommand)]
    command: BaseCommand,
}

#[derive(Subcommand)]
enum BaseCommand {
    /// List the bases
    #[command(after_help = "Example:\n  tendon base list")]
    List,
    /// Freeze a source as a base and print its id
    #[command(
        after_help = "Examples:\n  tendon base freeze --repo . --ref main\n  tendon base freeze --files DIR"
    )]
    Freeze(SourceArgs),
    /// Remove the bases that no branch stands on
    #[command(after_help = "Example:\n  tendon base gc")]
    Gc,
}

pub(crate) async fn run(args: BaseArgs, app: &App<'_>) -> Outcome {
    match args.command {
        BaseCommand::List => list(app).await,
        BaseCommand::Freeze(source) => {
            let source = source
                .source()?
                .ok_or_else(|| usage("no source is named", Some("give --repo or --files")))?;
            let base = freeze(&app.client().await?, &source, app).await?;
            for warning in &base.warnings {
                app.output.note(&format!("warning: {warning}"));
            }
            if app.output.json {
                app.output.json(&json!({ "version": 1, "base": base }))
            } else {
                app.output.line(base.id.as_str())
            }
            Ok(0)
        }
        BaseCommand::Gc => {
            let reply: GcReply =
                app.client().await?.post("/v1/bases/gc", &json!({})).await.map_err(ClientError::into_body)?;
            if app.output.json {
                app.output.json(&json!({ "version": 1, "removed": reply.removed, "bytes": reply.bytes }));
            } else {
                let removed = counted(reply.removed.len() as u64, "base");
                app.output.line(format!("{removed} removed, {} freed", show_bytes(reply.bytes)));
            }
            Ok(0)
        }
    }
}

async fn list(app: &App<'_>) -> Outcome {
    let bases: Vec<BaseInfo> = app.client().await?.get("/v1/bases").await.map_err(ClientError::into_body)?;
    if app.output.json {
        app.output.json(&json!({ "version": 1, "bases": bases }));
        return Ok(0);
    }
    let row = |base: &BaseInfo| {
        let (files, branches) = (base.files.to_string(), base.branches.to_string());
        vec![base.id.to_string(), files, show_bytes(base.bytes), branches, base.source.clone()]
    };
    app.output
        .table(&["BASE", "FILES", "SIZE", "BRANCHES", "SOURCE"], &bases.iter().map(row).collect::<Vec<_>>());
    Ok(0)
}
