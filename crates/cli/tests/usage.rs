//! What bad usage gets: an error that names the thing, a hint, exit status 2; and no runner is started for it.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::{Ran, Tendon};

fn refused(args: &[&str], says: &[&str]) {
    let tendon = Tendon::new();
    std::fs::write(tendon.dir.path().join("file"), "x").unwrap();
    std::fs::write(tendon.dir.path().join("typo.toml"), "check = [\"true\"]").unwrap();
    let lost = "checks = [\"true\"]\nsource = { repo = \"nowhere\" }";
    std::fs::write(tendon.dir.path().join("lost.toml"), lost).unwrap();
    std::fs::write(tendon.dir.path().join("good.toml"), "checks = [\"true\"]").unwrap();
    std::fs::write(tendon.dir.path().join("bad.toml"), "checks = [").unwrap();
    let mut command = tendon.command(args);
    command.env("TENDON_TENDOND", "/nonexistent/tendond");
    let ran = Ran::new(command.output().unwrap(), args);
    ran.expect(2);
    if !args.contains(&"--json") {
        assert_eq!(ran.stdout, "", "{args:?}");
    }
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
    refused(&["verify", "--repo", ".", "--ref", "", "--check", "true"], &["--ref is empty", "hint: name"]);
    refused(&["verify", "--repo", ".", "--check", "true", "--memory", "much"], &["not a size", "2GiB"]);
    refused(&["verify", "--repo", ".", "--check", "true", "--timeout", "soon"], &["not a duration"]);
    refused(&["verify", "--repo", ".", "--check", "true", "--cpus", "0"], &["not a number of CPUs"]);
    refused(&["verify", "--repo", ".", "--check", "true", "--env", "A"], &["NAME=VALUE"]);
    refused(&["verify", "--repo", ".", "--files", ".", "--check", "true"], &["cannot be used with"]);
    refused(
        &["verify", "--repo", ".", "--ref", "x", "--include-ignored", "--check", "true"],
        &["needs a directory", "hint: leave out --ref"],
    );
}

#[test]
fn an_option_that_would_mean_nothing_is_refused() {
    let base = "base-0123456789abcdef";
    for flag in [&["--ref", "main"][..], &["--include-ignored"]] {
        let says = [&format!("{} has a meaning only with --repo", flag[0]) as &str, "hint: leave"];
        for args in [
            &["verify", "--check", "true", "--files", "."][..],
            &["verify", "--check", "true", "--branch", "b"],
            &["verify", "--spec", "good.toml"],
            &["base", "freeze", "--files", "."],
            &["branch", "create", "--files", "."],
            &["branch", "create", "--base", base],
            &["branch", "create"],
        ] {
            refused(&[args, flag].concat(), &says);
        }
    }
    for option in [["--message", "x"], ["--author", "A <a@b>"]] {
        for to in ["--patch", "--tar"] {
            let args = ["branch", "export", "b", to, "f"];
            refused(&[&args[..], &option].concat(), &["cannot be used with", to]);
        }
    }
    refused(&["completions", "bash", "--json"], &["a script, not a record"]);
}

#[test]
fn a_spec_that_makes_no_sense() {
    refused(&["verify", "--spec", "typo.toml"], &["unknown key `check`", "hint: did you mean `checks`?"]);
    refused(&["verify", "--spec", "bad.toml"], &["the spec is not TOML: line 1, column 11: unclosed array"]);
    refused(&["verify", "--spec", "nowhere.toml"], &["cannot read the spec", "No such file"]);
    refused(&["verify", "--spec", "typo.toml", "--check", "true"], &["cannot be used with"]);
    refused(&["verify", "--spec", "lost.toml"], &["/nowhere", "hint: check `source` in the spec"]);
}

#[test]
fn a_command_that_is_none() {
    refused(&["verfiy"], &["unrecognized subcommand", "verify"]);
    refused(&["branch", "create"], &["no source is named"]);
    refused(&["branch", "export", "x"], &["export to what?"]);
    refused(&["branch", "export", "x", "--git", "nowhere", "y"], &["nowhere", "No such file"]);
    refused(
        &["branch", "export", "x", "--git", "https://x.test/y", "z"],
        &["not exported to a URL", "hint: name"],
    );
    refused(&["branch", "create", "--base", "base-x"], &["as `tendon base list` shows them"]);
    refused(&["branch", "read", "x", "../y"], &["name a path from the top"]);
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

#[test]
fn every_help_has_an_example() {
    let tendon = Tendon::new();
    let mut todo = vec![Vec::<String>::new()];
    let mut seen = 0;
    while let Some(path) = todo.pop() {
        let args: Vec<&str> = path.iter().map(String::as_str).chain(["--help"]).collect();
        let ran = tendon.run(&args);
        ran.expect(0);
        assert!(ran.stdout.contains("\nExample"), "{args:?}: {}", ran.stdout);
        assert!(ran.stdout.contains(&format!("\n  tendon {}", path.join(" "))), "{args:?}: {}", ran.stdout);
        seen += 1;
        let list = ran.stdout.split("\nCommands:\n").nth(1).and_then(|rest| rest.split("\n\n").next());
        for name in list.unwrap_or_default().lines().filter_map(|line| {
            line.strip_prefix("  ").filter(|name| !name.starts_with(' '))?.split_whitespace().next()
        }) {
            if name != "help" {
                todo.push(path.iter().cloned().chain([name.to_owned()]).collect());
            }
        }
    }
    assert!(seen >= 30, "{seen}");
}

#[test]
fn numbers_that_are_none_are_named() {
    for number in ["", "-1", "x", "99999999999999999999999"] {
        let is = if number.len() > 2 { "too large for a" } else { "not a" };
        for (option, says) in [
            ("--memory", &format!("{is} size") as &str),
            ("--disk", &format!("{is} size")),
            ("--cpus", &format!("{is} number of CPUs")),
            ("--timeout", &format!("{is} duration")),
            ("--pids", "write a whole number"),
        ] {
            let args = ["verify", "--repo", ".", "--check", "true", option, number];
            refused(&args, &[&format!("invalid value '{number}' for '{option}"), says]);
        }
        refused(&["branch", "at", number], &["for '<SEQ>'", "whole number"]);
        refused(&["audit", "log", "--since", number], &["--since", "whole number"]);
        refused(&["audit", "log", "--limit", number], &["--limit"]);
    }
    refused(&["audit", "log", "--limit", "0"], &["--limit"]);
}

#[test]
fn empty_and_endless_words_are_named() {
    let long = "x".repeat(70_000);
    for branch in ["", &long] {
        for args in [
            &["branch", "show", branch][..],
            &["branch", "drop", branch],
            &["branch", "diff", branch],
            &["branch", "fork", branch],
            &["branch", "at", "1", "--branch", branch],
            &["audit", "log", "--branch", branch],
            &["verify", "--branch", branch, "--check", "true"],
        ] {
            refused(args, &["give the id or the name of a branch"]);
        }
    }
    refused(&["--state-dir", "", "branch", "list"], &["a value is required"]);
    refused(&["verify", "--spec", ""], &["a value is required"]);
    refused(&["verify", "--repo", &long, "--check", "true"], &["File name too long"]);
    refused(&["verify", "--repo", ".", "--check", &format!("{long} |")], &["which only a shell understands"]);
}

#[test]
fn what_was_typed_does_not_drive_the_terminal() {
    let evil = "\x1b]0;title\x07\x1b[31m\u{9b}1m\u{202e}\r";
    let tendon = Tendon::new();
    for args in [
        &[evil][..],
        &["branch", "show", "x", &format!("--{evil}")],
        &["verify", "--repo", evil, "--check", "true"],
        &["verify", "--repo", ".", "--check", evil, "--memory", evil],
        &["verify", "--repo", ".", "--check", &format!("{evil} |")],
        &["verify", "--spec", evil],
        &["verify", "--repo", ".", "--check", "true", "--env", evil],
        &["completions", evil],
    ] {
        let ran = tendon.run(args);
        ran.expect(2).says("error:");
        let steers = |c: char| c != '\n' && proto::path::steers(c);
        assert!(!ran.stderr.contains(steers), "{args:?}: {:?}", ran.stderr);
    }
}

#[test]
fn bad_arguments_have_a_whole_record() {
    let tendon = Tendon::new();
    for (args, message, hint) in [
        (&["branch", "drop"][..], "<BRANCH>", "--help"),
        (&["verfiy"], "unrecognized subcommand 'verfiy'", "a similar subcommand exists: 'verify'"),
        (&["branch"], "requires a subcommand", "--help"),
        (&["verify", "--memory", "much"], "`much` is not a size", "--help"),
    ] {
        let error = tendon.json(2, args)["error"].clone();
        assert_eq!(error["code"], "usage");
        assert!(error["message"].as_str().unwrap().contains(message), "{error}");
        assert!(error["hint"].as_str().unwrap().contains(hint), "{error}");
    }
}

#[test]
fn help_that_cannot_be_written_is_an_error_and_nobody_reading_is_none() {
    let tendon = Tendon::new();
    for args in [&["--help"][..], &["verify", "--help"], &["--version"], &["completions", "bash"]] {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let output = tendon.command(args).stdout(full).stderr(std::process::Stdio::piped()).output().unwrap();
        Ran::new(output, args).expect(4).says("the output could not be written");
        let mut child = tendon.start(args);
        drop(child.stdout.take());
        assert_eq!(child.wait().unwrap().code(), Some(0), "{args:?}");
    }
}

#[test]
fn without_a_home_or_a_current_directory_it_says_what_to_do() {
    let tendon = Tendon::new();
    let bare = |args: &[&str], home: Option<&str>| {
        let mut command = tendon.command(args);
        command.env_clear().env("PATH", "/usr/bin:/bin").env("TENDON_TENDOND", "/nonexistent/tendond");
        command.envs(home.map(|home| ("HOME", home)));
        Ran::new(command.output().unwrap(), args)
    };
    for home in [None, Some(""), Some("relative")] {
        bare(&["branch", "list"], home)
            .expect(2)
            .says("HOME is not set")
            .says("hint: give one with --state-dir");
        bare(&["--help"], home).expect(0);
        bare(&["completions", "fish"], home).expect(0);
    }
    // Without TERM, too.
    bare(&["branch", "list", "--state-dir", "/nonexistent/x"], None)
        .expect(4)
        .says("cannot start the runner");

    let mut shell = testkit::process::command("sh");
    let script =
        "mkdir gone && cd gone && rmdir ../gone && \"$@\" runner status --state-dir /nonexistent; echo $?;
                  \"$@\" verify --repo . --check true --state-dir /nonexistent; echo $?";
    shell.args(["-c", script, "sh"]).arg(testkit::binary("tendon")).current_dir(tendon.dir.path());
    let ran = Ran::new(shell.output().unwrap(), &["gone"]);
    assert_eq!(ran.stdout, "4\n2\n", "{}", ran.stderr);
    ran.says("no runner listens").says("hint: change to a directory that exists");
}
