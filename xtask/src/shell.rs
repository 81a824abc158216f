//! Starting programs, printing what is done, and the one error type of this program.

use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Why a command of this program ended early. Printed as it is.
#[derive(Debug)]
pub struct Failure(String);

impl Failure {
    /// A failure with its full text.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self(error.to_string())
    }
}

/// Prints for the person who runs this.
#[expect(clippy::print_stdout, reason = "this program talks to a person; all its output passes here")]
pub fn say(text: impl fmt::Display) {
    println!("{text}");
}

/// Prints a headline.
pub fn step(text: impl fmt::Display) {
    say(format_args!("\n== {text}"));
}

/// Prints the failure that ends the program.
#[expect(clippy::print_stderr, reason = "the last word of this program")]
pub fn complain(failure: &Failure) {
    eprintln!("error: {failure}");
}

/// A program with the environment of this one, less what cargo set for it.
#[expect(clippy::disallowed_methods, reason = "this program starts all of its children here")]
pub fn program(name: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(name);
    for (variable, _) in std::env::vars_os() {
        let text = variable.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&variable);
        }
    }
    command
}

/// `cargo` in the workspace's root.
pub fn cargo(args: &[&str]) -> Command {
    let mut command = program("cargo");
    command.args(args).current_dir(root());
    command
}

/// The workspace's root.
pub fn root() -> PathBuf {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    own.parent().unwrap_or(own).to_owned()
}

/// The directory that cargo puts the binaries of this run's profile into: where this program is itself.
pub fn binaries() -> Result<PathBuf, Failure> {
    let own = std::env::current_exe()?;
    own.parent().map(Path::to_owned).ok_or_else(|| Failure::new("this program has no directory"))
}

/// A command as a person would type it.
pub fn render(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let quoted = words.map(|word| {
        let text = word.to_string_lossy();
        let plain = text.chars().all(|c| c.is_ascii_alphanumeric() || "-_./=:+@,".contains(c));
        if plain && !text.is_empty() {
            text.into_owned()
        } else {
            format!("'{}'", text.replace('\'', r"'\''"))
        }
    });
    quoted.collect::<Vec<_>>().join(" ")
}

/// Prints a command and runs it with this program's terminal; it must exit 0.
pub fn run(command: &mut Command) -> Result<(), Failure> {
    say(format_args!("$ {}", render(command)));
    match status_of(command)? {
        0 => Ok(()),
        status => Err(Failure::new(format!("`{}` ended with status {status}", render(command)))),
    }
}

/// Runs a command with this program's terminal and returns its exit status. Death by a signal is a failure.
pub fn status_of(command: &mut Command) -> Result<i32, Failure> {
    let status = command.status().map_err(|error| start(command, &error))?;
    status.code().ok_or_else(|| Failure::new(format!("`{}` ended with {status}", render(command))))
}

/// Runs a command without printing it and returns what it wrote; it must exit 0.
pub fn capture(command: &mut Command) -> Result<String, Failure> {
    let output: Output = command.output().map_err(|error| start(command, &error))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(Failure::new(format!("`{}` ended with {}\n{words}", render(command), output.status)))
}

fn start(command: &Command, error: &std::io::Error) -> Failure {
    Failure::new(format!("`{}` does not start: {error}", command.get_program().to_string_lossy()))
}
