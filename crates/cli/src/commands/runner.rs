//! `tendon runner`: the daemon behind the commands.

use std::time::Duration;

use clap::{Args, Subcommand};
use proto::units::{counted, show_millis};
use serde_json::json;

use super::{App, host};
use crate::Outcome;
use crate::runner::{running, stop};

/// How long a runner may take to end: hands are stopped and what they did is recorded, for which it gives itself less.
const STOP_MAX: Duration = Duration::from_secs(60);

/// The runner: the daemon that owns the state directory. Other commands start one when none runs.
#[derive(Args)]
#[command(after_help = "Example:\n  tendon runner status")]
pub(crate) struct RunnerArgs {
    #[command(subcommand)]
    command: RunnerCommand,
}

#[derive(Subcommand)]
enum RunnerCommand {
    /// Show the runner of the state directory; none is started. Exit status 4: none runs
    #[command(after_help = "Example:\n  tendon runner status")]
    Status,
    /// End it, and wait until it has ended: what runs is cancelled and recorded
    #[command(after_help = "Example:\n  tendon runner stop")]
    Stop,
}

pub(crate) async fn run(args: RunnerArgs, app: &App<'_>) -> Outcome {
    let (client, info) = running(&app.state_dir).await?;
    match args.command {
        RunnerCommand::Status if app.output.json => app.output.json(&json!({ "version": 1, "runner": info })),
        RunnerCommand::Status => {
            let kind = if info.private { "private runner" } else { "runner" };
            app.output.line(format!(
                "{kind} {} (pid {}), up {}",
                info.version,
                info.pid,
                show_millis(info.uptime_ms)
            ));
            app.output.line(format!("state    {}", info.state_dir));
            app.output.line(format!("clients  {}", info.clients.saturating_sub(1)));
            app.output.line(format!("running  {}", info.running));
            if info.lingering > 0 {
                let hands = counted(info.lingering.into(), "hand");
                app.output.line(format!("         and background processes in {hands}"));
            }
        }
        RunnerCommand::Stop => {
            app.output.progress("waiting for the runner to end");
            if !stop(&client, STOP_MAX).await? {
                return Err(host(format!(
                    "the runner (pid {}) did not end within {} s",
                    info.pid,
                    STOP_MAX.as_secs()
                )));
            }
            app.output.clear_progress();
            if app.output.json {
                app.output.json(&json!({ "version": 1, "stopped": info.pid }));
            }
        }
    }
    Ok(0)
}
