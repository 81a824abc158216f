//! Set-up, demo, tests, benchmarks and soak of this workspace.

#![forbid(unsafe_code)]

mod check;
mod demo;
mod layering;
mod long;
mod setup;
mod shell;

use std::process::ExitCode;

use crate::shell::{Failure, say};

const USAGE: &str = "\
usage: cargo xtask COMMAND

  demo          install what is missing, build, and verify a real crate twice: as it is, and with a bug in it
  test [ARGS]   install what is missing, build, and run the whole test suite (ARGS go to the test runner)
  ci            what CI runs: formatting, lints, layering, tests, documentation
  bench [ARGS]  measure against peers in the same run (release build); --write updates docs/benchmarks.md
  soak          the heavy tests at full length: 100 power cuts, 200 killed runners, minutes of fuzzing
  fuzz [SECS]   every fuzz target for so long (10 s), without a special compiler; fuzz/ has them for cargo-fuzz
  layering      check which crate links which, and where unsafe code is allowed
  setup         only install what demo, test and ci need
";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (command, rest) = match args.split_first() {
        Some((command, rest)) => (command.as_str(), rest),
        None => ("help", &[] as &[String]),
    };
    let result = match refused(command, rest) {
        Some(text) => Err(Failure::new(text)),
        None => run(command, rest),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            shell::complain(&failure);
            ExitCode::FAILURE
        }
    }
}

/// The commands that pass arguments on.
const TAKE_ARGUMENTS: [&str; 4] = ["test", "bench", "soak", "fuzz"];

/// Why these arguments are not taken.
fn refused(command: &str, rest: &[String]) -> Option<String> {
    let first = rest.first().filter(|first| !is_help(first) && !TAKE_ARGUMENTS.contains(&command))?;
    Some(format!("`{command}` takes no arguments, and `{first}` is given\n\n{USAGE}"))
}

fn is_help(word: &str) -> bool {
    ["help", "--help", "-h"].contains(&word)
}

fn run(command: &str, rest: &[String]) -> Result<(), Failure> {
    if is_help(command) || rest.first().is_some_and(|first| is_help(first)) {
        say(USAGE);
        return Ok(());
    }
    match command {
        "demo" => demo::demo(),
        "test" => check::test(rest),
        "ci" => check::ci(),
        "bench" => long::bench(rest),
        "soak" => long::soak(rest),
        "fuzz" => long::fuzz(rest),
        "layering" => layering::check(),
        "setup" => setup::setup(setup::For::Tests),
        unknown => Err(Failure::new(format!("there is no command `{unknown}`\n\n{USAGE}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn help_runs_nothing_and_needless_arguments_are_refused() {
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        for command in ["demo", "test", "ci", "bench", "soak", "fuzz", "layering", "setup", "help"] {
            for help in ["--help", "-h"] {
                assert_eq!(refused(command, &words(&[help])), None);
                // Were it to run, this test would take minutes, and change the machine.
                run(command, &words(&[help])).unwrap();
            }
        }
        assert!(refused("demo", &words(&["--fast"])).unwrap().starts_with("`demo` takes no arguments"));
        assert_eq!(refused("test", &words(&["-p", "cli"])), None);
    }
}
