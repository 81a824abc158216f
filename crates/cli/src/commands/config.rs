//! `tendon config`: the runner's settings and where each came from.

use clap::{Args, Subcommand};
use proto::client::ClientError;
use proto::http::ConfigReply;

use super::App;
use crate::Outcome;

/// Settings of the runner.
#[derive(Args)]
#[command(after_help = "Example:\n  tendon config list")]
pub(crate) struct ConfigArgs {
    #[command(subcommand)]
    command: ConfigCommand,
}

#[derive(Subcommand)]
enum ConfigCommand {
    /// List each setting, its value and where it came from
    ///
    /// Layers, later ones win: built-in, /etc/tendon/config.toml, $XDG_CONFIG_HOME/tendon/config.toml, the environment
    /// (TENDON_ and the name in capitals with _ for each dot: TENDON_LIMITS_PIDS_MAX), and the file named by tendond --config. Nothing in
    /// a branch or a repository is ever read as configuration.
    #[command(
        after_help = "Examples:\n  tendon config list\n  TENDON_LIMITS_PIDS_MAX=256 tendon config list     (a runner that runs already keeps its own)"
    )]
    List,
}

pub(crate) async fn run(args: ConfigArgs, app: &App<'_>) -> Outcome {
    let ConfigCommand::List = args.command;
    let reply: ConfigReply = app.client().await?.get("/v1/config").await.map_err(ClientError::into_body)?;
    if app.output.json {
        app.output.json(&reply);
        return Ok(0);
    }
    let rows = reply
        .values
        .iter()
        .map(|value| vec![value.key.clone(), value.origin.clone(), value.value.to_string()]);
    app.output.table(&["SETTING", "FROM", "VALUE"], &rows.collect::<Vec<_>>());
    Ok(0)
}
