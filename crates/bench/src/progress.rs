//! What the benchmark prints: the table on standard output, progress on standard error.

use std::fmt::Display;

/// Says on standard error what is being done; figures take minutes.
#[expect(clippy::print_stderr, reason = "the one place that prints progress")]
pub(crate) fn say(text: impl Display) {
    eprintln!("bench: {text}");
}

/// Prints a result on standard output.
#[expect(clippy::print_stdout, reason = "the one place that prints results")]
pub(crate) fn print(text: impl Display) {
    println!("{text}");
}
