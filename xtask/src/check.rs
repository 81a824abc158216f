//! The test suite, and exactly what CI runs.

use std::path::PathBuf;

use crate::setup::{For, setup};
use crate::shell::{Failure, cargo, program, root, run, say, step};

/// Set-up, build, every test. `args` go to the test runner.
pub fn test(args: &[String]) -> Result<(), Failure> {
    setup(For::Tests)?;
    tests(args)
}

/// What CI runs.
pub fn ci() -> Result<(), Failure> {
    setup(For::Tests)?;
    step("Formatting");
    run(&mut cargo(&["fmt", "--all", "--check"]))?;
    step("Layering");
    crate::layering::check()?;
    step("Lints");
    run(&mut cargo(&["clippy", "--workspace", "--all-targets", "--quiet", "--", "--deny", "warnings"]))?;
    step("Documentation");
    let mut doc = cargo(&["doc", "--workspace", "--no-deps", "--quiet"]);
    run(doc.env("RUSTDOCFLAGS", "--deny warnings"))?;
    tests(&[])
}

fn tests(args: &[String]) -> Result<(), Failure> {
    step("Build of the binaries");
    run(&mut cargo(&["build", "--workspace", "--bins"]))?;
    step("Tests");
    let skips = fresh_skips()?;
    let result = run(runner().args(args).env("TEST_SKIPS", &skips));
    let skipped = std::fs::read_to_string(&skips).unwrap_or_default();
    if !skipped.is_empty() {
        step("Skipped, because this machine lacks what they need");
        say(skipped.trim_end());
    }
    result
}

/// nextest where it is installed, else cargo's own runner.
fn runner() -> std::process::Command {
    if nextest() {
        return cargo(&["nextest", "run", "--workspace"]);
    }
    say(
        "cargo-nextest is not installed: using cargo test, which is slower (cargo install --locked cargo-nextest)",
    );
    cargo(&["test", "--workspace"])
}

/// Whether cargo-nextest is installed.
pub fn nextest() -> bool {
    program("cargo").args(["nextest", "--version"]).output().is_ok_and(|output| output.status.success())
}

/// The file in which tests note what they skipped, empty.
fn fresh_skips() -> Result<PathBuf, Failure> {
    let path = root().join("target/skipped-tests.txt");
    std::fs::create_dir_all(root().join("target"))?;
    std::fs::write(&path, "")?;
    Ok(path)
}
