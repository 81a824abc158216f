//! `tendon`: the command line, a client of the runner's socket like any other.

#![forbid(unsafe_code)]

mod commands;
mod environment;
mod output;
mod runner;

use std::process::ExitCode;

use clap::Parser as _;
use proto::error::ErrorBody;

use crate::commands::Tendon;
use crate::output::Output;

/// What a command returns: the exit status, or the error to print.
pub(crate) type Outcome = Result<u8, ErrorBody>;

fn main() -> ExitCode {
    let tendon = match Tendon::try_parse() {
        Ok(tendon) => tendon,
        Err(error) => return bad_usage(&error),
    };
    let output = Output::new(tendon.global.json);
    let status = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => {
            let outcome = runtime.block_on(commands::run(tendon, &output));
            // A read of standard input may still be waiting in the blocking pool: don't wait for it.
            runtime.shutdown_background();
            outcome
        }
        Err(error) => Err(commands::host(format!("cannot start: {error}"))),
    };
    let status = status.and_then(|status| output.finish(status));
    ExitCode::from(status.unwrap_or_else(|error| output.error(&error)))
}

/// Help and versions, and arguments that make no sense: with `--json` among them the error is a record, too.
fn bad_usage(error: &clap::Error) -> ExitCode {
    let json = std::env::args_os().take_while(|word| word != "--").any(|word| word == "--json");
    if error.use_stderr() && json {
        let text = error.render().to_string();
        let first = text.lines().next().unwrap_or_default().trim_start_matches("error: ");
        Output::new(true).error_record(&commands::usage(first, None));
    }
    let _ = error.print();
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2))
}
