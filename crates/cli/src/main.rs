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
    let tendon = Tendon::parse();
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
    ExitCode::from(status.unwrap_or_else(|error| output.error(&error)))
}
