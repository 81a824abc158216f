//! The agent inside every hand. It takes no arguments: the runner passes its channel and configuration as descriptors.

#![forbid(unsafe_code)]

use std::error::Error;
use std::io::Write;
use std::process::ExitCode;

fn main() -> ExitCode {
    match hand::boot::run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let mut text = format!("hand: {error}");
            let mut source = error.source();
            while let Some(cause) = source {
                text.push_str(&format!(": {cause}"));
                source = cause.source();
            }
            // Nothing is left to be done if nobody listens there either.
            let _ = writeln!(std::io::stderr(), "{text}");
            ExitCode::from(4)
        }
    }
}
