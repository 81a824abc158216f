//! `tendon`: the command line, a client of the runner's socket like any other.

#![forbid(unsafe_code)]

mod commands;
mod environment;
mod life;
mod output;
mod runner;

use std::process::ExitCode;

use clap::Parser as _;
use clap::error::ErrorKind;
use proto::error::{Code, ErrorBody};

use crate::commands::{FAILED, Tendon};
use crate::output::Output;

/// What a command returns: the exit status, or the error to print.
pub(crate) type Outcome = Result<u8, ErrorBody>;

fn main() -> ExitCode {
    let tendon = match Tendon::try_parse() {
        Ok(tendon) => tendon,
        Err(error) => return bad_usage(&error),
    };
    let output = Output::new(tendon.global.json);
    let exec = tendon.is_exec();
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
    ExitCode::from(status.unwrap_or_else(|error| {
        output.error(&error);
        error_status(&error, exec)
    }))
}

/// The exit status of an error. That of `branch exec` is the command's: what goes wrong before it ends has one of its own.
fn error_status(error: &ErrorBody, exec: bool) -> u8 {
    if exec && error.code != Code::Cancelled { FAILED } else { error.code.exit_status() }
}

/// Help and versions, and arguments that make no sense: with `--json` among them the error is a record, too.
fn bad_usage(error: &clap::Error) -> ExitCode {
    let json = std::env::args_os().take_while(|word| word != "--").any(|word| word == "--json");
    let output = Output::new(json);
    if !error.use_stderr() {
        output.written(error.print());
        return ExitCode::from(output.finish(0).unwrap_or_else(|error| {
            output.error(&error);
            error_status(&error, false)
        }));
    }
    let text = error.render().to_string();
    if json {
        output.error_record(&usage_record(error.kind(), &text));
    }
    // What was typed is part of the text, and may be anything.
    if text.chars().any(|c| c != '\n' && proto::path::steers(c)) {
        output.note(text.trim_end());
    } else {
        let _ = error.print();
    }
    ExitCode::from(error_status(&commands::usage("", None), Tendon::looks_like_exec()))
}

/// The parser's text as a record: its first paragraph is the message, its tip the hint.
fn usage_record(kind: ErrorKind, text: &str) -> ErrorBody {
    if kind == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        return commands::usage("no command is given", Some("see: tendon --help"));
    }
    let lines = |from: &str| from.lines().map(str::trim).collect::<Vec<_>>().join(" ");
    let (first, rest) = text.split_once("\n\n").unwrap_or((text, ""));
    let tip = rest.split("\n\n").find_map(|part| part.trim().strip_prefix("tip: "));
    let message = lines(first.trim_start_matches("error: "));
    commands::usage(message, Some(&tip.map_or_else(|| "add --help to see what it takes".to_owned(), lines)))
}
