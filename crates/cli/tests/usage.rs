//! What bad usage gets: an error that names the thing, a hint, exit status 2; and no runner is started for it.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::{Ran, Tendon};

fn refused(args: &[&str], says: &[&str]) {
    let tendon = Tendon::new();
    std::fs::write(tendon.dir.path().join("file"), "x").unwrap();
    std::fs::write(tendon.dir.path().join("typo.toml"), "check = [\"true\"]").unwrap();
    std::fs::write(tendon.dir.path().join("bad.toml"), "checks = [").unwrap();
    let mut command = tendon.command(args);
    command.env("TENDON_TENDOND", "/nonexistent/tendond");
    let ran = Ran::new(command.output().unwrap(), args);
    ran.expect(2);
    assert_eq!(ran.stdout, "", "{args:?}");
    for text in says {
        ran.says(text);
    }
    assert!(!tendon.state().exists(), "{args:?} started something");
}

#[test]
fn a_verify_that_makes_no_sense() {
    refused(&["verify", "--repo", "."], &["error: there is nothing to check", "hint: add --check"]);
    refused(&["verify", "--check", "true"], &["error: no source is named", "hint: give --repo"]);
    refused(&["verify", "--repo", ".", "--check", ""], &["error: the command is empty"]);
    refused(&["verify", "--repo", ".", "--check", "  "], &["error: the command is empty"]);
    refused(&["verify", "--repo", ".", "--check", "a | b"], &["the operator `|`", "hint:", "sh -c 'a | b'"]);
    refused(&["verify", "--repo", ".", "--check", "ls *.rs"], &["the pattern `*`"]);
    refused(
        &["verify", "--repo", ".", "--setup", "A=1 b", "--check", "c"],
        &["the assignment `A=1` in front"],
    );
    refused(&["verify", "--repo", ".", "--check", "echo 'a"], &["a quote that does not end"]);
    refused(&["verify", "--repo", "nowhere", "--check", "true"], &["nowhere", "caused by: No such file"]);
    refused(&["verify", "--repo", "file", "--check", "true"], &["is not a directory"]);
    refused(&["verify", "--files", "nowhere", "--check", "true"], &["nowhere"]);
    refused(&["verify", "--repo", "", "--check", "true"], &["--repo is empty"]);
    refused(&["verify", "--repo", ".", "--check", "true", "--memory", "much"], &["not a size", "2GiB"]);
    refused(&["verify", "--repo", ".", "--check", "true", "--timeout", "soon"], &["not a duration"]);
    refused(&["verify", "--repo", ".", "--check", "true", "--cpus", "0"], &["not a number of CPUs"]);
    refused(&["verify", "--repo", ".", "--check", "true", "--env", "A"], &["NAME=VALUE"]);
    refused(&["verify", "--repo", ".", "--files", ".", "--check", "true"], &["cannot be used with"]);
    refused(
        &["verify", "--repo", ".", "--ref", "x", "--include-ignored", "--check", "true"],
        &["needs a directory"],
    );
}

#[test]
fn a_spec_that_makes_no_sense() {
    refused(&["verify", "--spec", "typo.toml"], &["unknown key `check`", "hint: did you mean `checks`?"]);
    refused(&["verify", "--spec", "bad.toml"], &["the spec is not TOML"]);
    refused(&["verify", "--spec", "nowhere.toml"], &["cannot read the spec", "No such file"]);
    refused(&["verify", "--spec", "typo.toml", "--check", "true"], &["cannot be used with"]);
}

#[test]
fn a_command_that_is_none() {
    refused(&["verfiy"], &["unrecognized subcommand", "verify"]);
    refused(&["branch", "exec", "x"], &["required"]);
    refused(&[], &["Usage"]);
}

#[test]
fn help_teaches_and_completions_complete() {
    let tendon = Tendon::new();
    for (args, text) in [
        (&["--help"][..], "tendon verify --repo . --check \"cargo test\""),
        (&["verify", "--help"], "No shell is implied"),
        (&["branch", "exec", "--help"], "tendon branch exec fix -- cargo test"),
        (&["completions", "bash"], "_tendon"),
        (&["--version"], "tendon 0."),
    ] {
        let ran = tendon.run(args);
        ran.expect(0);
        assert!(ran.stdout.contains(text), "{args:?}: {}", ran.stdout);
    }
}

#[test]
fn a_missing_runner_is_the_hosts_fault() {
    let tendon = Tendon::new();
    tendon.run(&["runner", "status"]).expect(4).says("error: no runner listens on").says("hint: start one");
    let mut command = tendon.command(&["doctor"]);
    command.env("TENDON_TENDOND", "/nonexistent/tendond");
    Ran::new(command.output().unwrap(), &["doctor"])
        .expect(4)
        .says("cannot start the runner `/nonexistent/tendond`");
    let mut command = tendon.command(&["doctor"]);
    command.env("TENDON_TENDOND", "/bin/false");
    Ran::new(command.output().unwrap(), &["doctor"]).expect(4).says("the runner ended before it listened");
}
