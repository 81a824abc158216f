//! Branches, execs and the audit, end to end.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::time::Duration;

use common::{Ran, Tendon, can_run};
use testkit::{GitRepo, Need, have_all};

fn with_branch() -> (Tendon, GitRepo) {
    let (tendon, repo) = (Tendon::new(), GitRepo::new());
    repo.file("a.txt", "one\n").file("dir/b.txt", "b\n").file(".gitignore", "target\n").commit("first");
    tendon.text(&["branch", "create", "--repo", repo.path().to_str().unwrap(), "--name", "fix"]);
    (tendon, repo)
}

#[test]
fn edits_are_seen_compared_and_taken_out() {
    if !can_run() {
        return;
    }
    let (tendon, repo) = with_branch();
    tendon.run_with(&["branch", "write", "fix", "a.txt"], b"two\n").expect(0);
    tendon.run_with(&["branch", "write", "fix", "new/run.sh", "--executable"], b"#!/bin/sh\n\xff").expect(0);
    tendon.text(&["branch", "rm", "fix", "dir/b.txt"]);
    assert_eq!(tendon.run(&["branch", "read", "fix", "new/run.sh"]).bytes, b"#!/bin/sh\n\xff");
    assert!(tendon.text(&["branch", "ls", "fix"]).contains("a.txt"));
    assert!(tendon.text(&["branch", "ls", "fix", "new"]).contains("0755"));
    let status = tendon.text(&["branch", "diff", "fix", "--name-status"]);
    assert_eq!(status, "M\ta.txt\nD\tdir/b.txt\nA\tnew/run.sh");
    assert!(tendon.text(&["branch", "diff", "fix"]).contains("-one\n+two"));
    let file = tendon.dir.path().join("fix.patch");
    tendon.text(&["branch", "export", "fix", "--patch", file.to_str().unwrap()]);
    repo.git(&["apply", "--check", file.to_str().unwrap()]);
    let git = repo.path().to_str().unwrap();
    let commit = tendon.text(&["branch", "export", "fix", "--git", git, "agent/fix", "--message", "The fix"]);
    assert_eq!(repo.git(&["rev-parse", "agent/fix"]), commit);
    assert_eq!(repo.git(&["show", "agent/fix:a.txt"]), "two");
    assert_eq!(repo.git(&["log", "-1", "--format=%s", "agent/fix"]), "The fix");
    assert_eq!(repo.git(&["status", "--porcelain"]), "");
    let tar = tendon.run(&["branch", "export", "fix", "--tar", "-"]);
    tar.expect(0);
    assert!(tar.stdout.contains("new/run.sh"));
}

#[test]
fn an_exec_has_its_streams_and_its_status() {
    if !can_run() {
        return;
    }
    let (tendon, _repo) = with_branch();
    let ran = tendon
        .run_with(&["branch", "exec", "fix", "--", "sh", "-c", "cat; echo err >&2; exit 7"], b"in\0\xff");
    ran.expect(7);
    assert_eq!((&ran.bytes[..], ran.stderr.lines().next()), (&b"in\0\xff"[..], Some("err")));
    tendon.text(&[
        "branch",
        "exec",
        "fix",
        "--",
        "sh",
        "-c",
        "echo two > a.txt; mkdir -p target; echo x > target/x",
    ]);
    assert_eq!(tendon.text(&["branch", "read", "fix", "a.txt"]), "two");
    assert_eq!(
        tendon.text(&[
            "branch",
            "exec",
            "fix",
            "--cwd",
            "dir",
            "--env",
            "A=b c",
            "--",
            "sh",
            "-c",
            "pwd; echo $A"
        ]),
        "/work/dir\nb c"
    );
    let log = tendon.text(&["audit", "log", "--branch", "fix"]);
    assert!(log.contains("exec:ex-") && log.contains("a.txt"), "{log}");
}

#[test]
fn an_exec_tells_its_own_failures_from_the_commands() {
    if !can_run() {
        return;
    }
    let (tendon, _repo) = with_branch();
    tendon.run_with(&["branch", "write", "fix", "odd", "--executable"], b"#!/nonexistent/sh\n").expect(0);
    for (status, args, outcome, says) in [
        (7, &["--", "sh", "-c", "exit 7"][..], "exited", ""),
        (2, &["--", "sh", "-c", "exit 2"], "exited", ""),
        (143, &["--", "sh", "-c", "kill $$"], "signalled", "ended by signal 15"),
        (124, &["--timeout", "1s", "--", "sleep", "60"], "timed_out", "timed out after 1.0 s"),
        (127, &["--", "no-such-program"], "not_started", "error: `no-such-program` was not found"),
        (127, &["--", "./nowhere"], "not_started", "error: `./nowhere` was not found"),
        (126, &["--", "./a.txt"], "not_started", "error: `./a.txt` can't be executed"),
        (126, &["--", "./odd"], "not_started", "the interpreter that it names"),
        (125, &["--cwd", "../x", "--", "true"], "", "error: "),
        (125, &["--memory", "1", "--", "true"], "", "error: the limit memory"),
        (125, &["--memory", "much", "--", "true"], "", "not a size"),
        (125, &["--env", "A", "--", "true"], "", "NAME=VALUE"),
        (125, &["--", ""], "", "error: the command is empty"),
        (125, &["--frobnicate", "--", "true"], "", "unexpected argument"),
    ] {
        let args = [&["branch", "exec", "fix"], args].concat();
        tendon.run(&args).expect(status).says(says);
        // One document, whatever happens, with its version.
        let at = args.iter().position(|word| *word == "--").unwrap();
        let ran = tendon.run(&[&args[..at], &["--json"], &args[at..]].concat());
        ran.expect(status).says(says);
        let record: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
        assert_eq!(record["version"], 1, "{args:?}");
        assert_eq!(record["outcome"]["how"].as_str().unwrap_or_default(), outcome, "{args:?}: {record}");
        assert_eq!(record["error"].is_object(), outcome.is_empty(), "{args:?}: {record}");
    }
    tendon.run(&["--json", "branch", "exec", "nowhere", "--", "true"]).expect(125).says("no branch");
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let args = ["branch", "exec", "fix", "--json", "--", "echo", "x"];
    let output = tendon.command(&args).stdout(std::process::Stdio::piped()).stderr(full).output().unwrap();
    let ran = Ran::new(output, &args);
    ran.expect(125);
    serde_json::from_str::<serde_json::Value>(&ran.stdout).unwrap();
}

#[test]
fn much_input_and_much_output_do_not_block_each_other() {
    if !can_run() {
        return;
    }
    let (tendon, _repo) = with_branch();
    let input = vec![b'x'; 8 << 20];
    let ran = tendon.run_with(&["branch", "exec", "fix", "--", "cat"], &input);
    ran.expect(0);
    assert_eq!(ran.bytes.len(), input.len());
    // A command that never reads its input ends all the same.
    let mut child = tendon.start(&["branch", "exec", "fix", "--", "true"]);
    let mut stdin = child.stdin.take().unwrap();
    let writer = std::thread::spawn(move || {
        use std::io::Write as _;
        // The pipe breaks when the command has ended.
        let _ = stdin.write_all(&input);
    });
    common::Ran::new(child.wait_with_output().unwrap(), &["branch", "exec"]).expect(0);
    writer.join().unwrap();
}

#[test]
fn forks_stand_alone_and_the_past_can_be_had_again() {
    if !can_run() {
        return;
    }
    let (tendon, _repo) = with_branch();
    tendon.run_with(&["branch", "write", "fix", "a.txt"], b"two\n").expect(0);
    let seq = tendon.json(0, &["branch", "show", "fix"])["branch"]["audit_seq"].to_string();
    tendon.text(&["branch", "fork", "fix", "--name", "other"]);
    tendon.run_with(&["branch", "write", "fix", "a.txt"], b"three\n").expect(0);
    assert_eq!(tendon.text(&["branch", "read", "other", "a.txt"]), "two");
    tendon.text(&["branch", "at", &seq, "--branch", "fix", "--name", "past"]);
    assert_eq!(tendon.text(&["branch", "read", "past", "a.txt"]), "two");
    assert_eq!(tendon.text(&["branch", "read", "fix", "a.txt"]), "three");
    tendon.text(&["branch", "drop", "other"]);
    tendon.run(&["branch", "show", "other"]).expect(2).says("other");
    tendon.run(&["branch", "create", "--base", "base-0000000000000000"]).expect(2);
    tendon.run(&["branch", "at", "99999"]).expect(2).says("99999");
}

#[test]
fn a_branch_in_use_is_forked_and_not_dropped() {
    if !can_run() {
        return;
    }
    let (tendon, _repo) = with_branch();
    let script = "echo started > flag; n=0; while true; do n=$((n+1)); echo $n > count; sleep 0.05; done";
    let mut child = tendon.start(&["branch", "exec", "fix", "--", "sh", "-c", script]);
    testkit::wait_until("the command writes", Duration::from_secs(60), || {
        tendon.run(&["branch", "read", "fix", "count"]).status == 0
    });
    tendon.run(&["branch", "drop", "fix"]).expect(2).says("something runs on branch");
    let forked = tendon.run(&["branch", "fork", "fix", "--name", "live"]);
    // What can't be stopped for a moment can't be forked. With control groups everything can.
    if testkit::have(testkit::Need::Cgroup) {
        forked.expect(0);
        let count = tendon.text(&["branch", "read", "live", "count"]);
        assert!(count.parse::<u32>().is_ok(), "{count}");
        // What was written before the fork is the command's work, in both branches.
        let sql = "select distinct actor from audit where cast(path as text) in ('flag', 'count')";
        let writers = tendon.json(0, &["audit", "sql", sql])["rows"].clone();
        let writers: Vec<&str> = writers.as_array().unwrap().iter().map(|r| r[0].as_str().unwrap()).collect();
        assert!(matches!(writers[..], [writer] if writer.starts_with("exec:ex-")), "{writers:?}");
    } else {
        forked.expect(3).says("freeze");
    }
    common::signal(&child, "INT");
    child.wait().unwrap();
}

#[test]
fn a_fork_and_a_verify_leave_background_processes_alone() {
    if !can_run() || !have_all(&[Need::Cgroup]) {
        return;
    }
    let (tendon, _repo) = with_branch();
    let script = "(while true; do n=$((n+1)); echo $n > count; sleep 0.05; done) > /dev/null 2>&1 &";
    tendon.text(&["branch", "exec", "fix", "--", "sh", "-c", script]);
    let count = || tendon.run(&["branch", "read", "fix", "count"]).stdout;
    testkit::wait_until("it writes", Duration::from_secs(60), || !count().is_empty());
    tendon.text(&["branch", "fork", "fix", "--name", "other"]);
    assert!(tendon.text(&["branch", "read", "other", "count"]).parse::<u32>().is_ok());
    tendon.text(&["verify", "--branch", "fix", "--check", "test -s count"]);
    let before = count();
    testkit::wait_until("it writes on", Duration::from_secs(60), || count() != before);
}

#[test]
fn what_background_processes_write_is_captured_until_the_last_has_ended() {
    if !can_run() {
        return;
    }
    let (tendon, _repo) = with_branch();
    let script = "(sleep 3; echo late > late) > /dev/null 2>&1 &";
    tendon.text(&["branch", "exec", "fix", "--", "sh", "-c", script]);
    let lingering = || tendon.json(0, &["runner", "status"])["runner"]["lingering"].as_u64().unwrap();
    assert_eq!(lingering(), 1);
    testkit::wait_until("nothing is looked for any more", Duration::from_secs(60), || lingering() == 0);
    let sql = "select actor from audit where cast(path as text) = 'late'";
    let rows = tendon.json(0, &["audit", "sql", sql])["rows"].clone();
    assert!(rows[0][0].as_str().unwrap().starts_with("exec:ex-"), "{rows}");
}

#[test]
fn daemons_that_fill_the_process_limit_do_not_keep_the_next_command_from_starting() {
    if !can_run() || !have_all(&[Need::Cgroup]) {
        return;
    }
    let (tendon, _repo) = with_branch();
    let exec = |script: &str, stdin: &[u8]| {
        tendon.run_with(&["branch", "exec", "fix", "--pids", "24", "--", "sh", "-c", script], stdin)
    };
    let fill = "while true; do sleep 1000 > /dev/null 2>&1 < /dev/null & done";
    exec(fill, b"").expect(2);
    let ran = exec("cat", b"its input");
    ran.expect(0).says("filled the process limit and were ended");
    assert_eq!(ran.stdout, "its input");
    // Another command that runs there is left alone.
    let args = ["branch", "exec", "fix", "--pids", "24", "--", "sh", "-c", "echo up > up; read line"];
    let mut child = tendon.start(&args);
    testkit::wait_until("the command runs", Duration::from_secs(60), || {
        tendon.run(&["branch", "read", "fix", "up"]).status == 0
    });
    exec(fill, b"").expect(2);
    exec("true", b"").expect(126).says("process limit is reached");
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), b"go\n").unwrap();
    Ran::new(child.wait_with_output().unwrap(), &args).expect(0);
}

#[test]
fn a_long_chain_is_flattened_while_the_runner_is_up() {
    if !can_run() {
        return;
    }
    let (tendon, _repo) = with_branch();
    let mut last = "fix".to_owned();
    for n in 0..18 {
        tendon.run_with(&["branch", "write", &last, &format!("n{n}")], format!("{n}").as_bytes()).expect(0);
        let next = format!("fork-{n}");
        tendon.text(&["branch", "fork", &last, "--name", &next]);
        last = next;
    }
    testkit::wait_until("the chain is shallow", Duration::from_secs(60), || {
        let depth = tendon.json(0, &["branch", "show", &last])["branch"]["depth"].as_u64().unwrap();
        depth < 16
    });
    for n in 0..18 {
        assert_eq!(tendon.text(&["branch", "read", &last, &format!("n{n}")]), n.to_string());
    }
}

#[test]
fn the_audit_answers_questions_and_takes_no_orders() {
    if !can_run() {
        return;
    }
    let (tendon, _repo) = with_branch();
    tendon.run_with(&["branch", "write", "fix", "a.txt"], b"two\n").expect(0);
    let reply =
        tendon.json(0, &["audit", "sql", "select path, op from audit where cast(path as text) = 'a.txt'"]);
    assert_eq!(reply["rows"][0][0], "a.txt", "{reply}");
    tendon.run(&["audit", "sql", "delete from audit"]).expect(3);
    tendon.run(&["audit", "sql", "nonsense"]).expect(2);
    assert!(tendon.text(&["audit", "verify"]).starts_with("intact:"));
}

#[test]
fn paths_stay_in_the_branch() {
    if !can_run() {
        return;
    }
    let (tendon, _repo) = with_branch();
    for path in ["../x", "/etc/passwd", "a/../../x"] {
        tendon.run(&["branch", "read", "fix", path]).expect(2);
        tendon.run_with(&["branch", "write", "fix", path], b"x").expect(2);
    }
    tendon.text(&["branch", "exec", "fix", "--", "ln", "-s", "/etc/passwd", "link"]);
    let ran = tendon.run(&["branch", "read", "fix", "link"]);
    assert_ne!(ran.status, 0, "{}", ran.stdout);
}

#[test]
fn a_reader_that_goes_away_ends_the_command() {
    if !can_run() {
        return;
    }
    let (tendon, _repo) = with_branch();
    for script in ["yes", "yes >&2"] {
        let mut child = tendon.start(&["branch", "exec", "fix", "--", "sh", "-c", script]);
        drop((child.stdin.take(), child.stdout.take(), child.stderr.take()));
        assert_eq!(child.wait().unwrap().code(), Some(130), "{script}");
    }
    assert_eq!(tendon.json(0, &["runner", "status"])["runner"]["running"], 0);
    let mut child = tendon.start(&["branch", "ls", "fix"]);
    drop(child.stdout.take());
    assert_eq!(child.wait().unwrap().code(), Some(0), "nobody reading is no error of what is only shown");
}

#[test]
fn output_that_cannot_be_written_is_an_error() {
    if !can_run() {
        return;
    }
    let (tendon, _repo) = with_branch();
    for args in [
        &["branch", "read", "fix", "a.txt"][..],
        &["branch", "export", "fix", "--tar", "-"],
        &["branch", "list", "--json"],
        &["branch", "exec", "fix", "--", "echo", "x"],
    ] {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let output = tendon.command(args).stdout(full).stderr(std::process::Stdio::piped()).output().unwrap();
        let status = if args.contains(&"exec") { 125 } else { 4 };
        Ran::new(output, args).expect(status).says("the output could not be written").says("No space left");
    }
}

#[test]
fn an_export_replaces_files_and_nothing_else() {
    if !can_run() {
        return;
    }
    let (tendon, _repo) = with_branch();
    let at = |name: &str| tendon.dir.path().join(name);
    let export = |to: &str| tendon.run(&["branch", "export", "fix", "--tar", to]);
    std::fs::write(at("old"), "old").unwrap();
    std::os::unix::fs::symlink("old", at("link")).unwrap();
    export("link").expect(0);
    assert!(at("link").is_symlink(), "the link still leads to the file");
    assert_ne!(std::fs::read(at("old")).unwrap(), b"old");
    // A device or a pipe is what it was, and got the bytes.
    std::os::unix::fs::symlink("/dev/full", at("full")).unwrap();
    export("full").expect(4).says("No space left");
    assert!(at("full").is_symlink());
    assert!(testkit::process::command("mkfifo").arg(at("pipe")).status().unwrap().success());
    let reader = std::thread::spawn({
        let pipe = at("pipe");
        move || std::fs::read(pipe).unwrap()
    });
    export("pipe").expect(0);
    assert_eq!(reader.join().unwrap(), std::fs::read(at("old")).unwrap());
    export(".").expect(2).says("Is a directory");
    let left: Vec<_> =
        std::fs::read_dir(tendon.dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(!left.iter().any(|name| name.to_string_lossy().contains(".part")), "{left:?}");
}

/// Runs `tendon` on a terminal of its own and returns what that shows.
fn on_terminal(tendon: &Tendon, args: &str) -> String {
    let mut script = testkit::process::command("script");
    let line = format!("{} {args}", testkit::binary("tendon").display());
    script
        .args(["--quiet", "--return", "--command", &line, "/dev/null"])
        .env("TENDON_STATE_DIR", tendon.state());
    script.env("TERM", "xterm").env("NO_COLOR", "1").stdin(std::process::Stdio::null());
    String::from_utf8_lossy(&script.output().unwrap().stdout).into_owned()
}

#[test]
fn what_hostile_code_wrote_does_not_drive_the_terminal() {
    if !can_run() {
        return;
    }
    let (tendon, repo) = with_branch();
    let evil = "printf 'a\\033]0;title\\007\\033[31mb\\302\\2331mc\\342\\200\\256d\\n'";
    let name = "\"$(printf 'x\\033[31m\\ny')\"";
    let make = format!("{evil} >evil; echo >{name}; {evil}; {evil} >&2");
    let ran = tendon.run(&["branch", "exec", "fix", "--", "sh", "-c", &make]);
    ran.expect(0);
    assert!(ran.stdout.contains('\x1b'), "a pipe gets it as it is");
    let check = format!("sh -c {} --x", shlex_quote(&format!("{make}; exit 1")));
    let repo = repo.path().display();
    for args in [
        format!("branch exec fix -- sh -c {}", shlex_quote(evil)),
        format!("branch exec fix -- sh -c {}", shlex_quote(&format!("{evil} >&2"))),
        "branch read fix evil".into(),
        "branch diff fix".into(),
        "branch diff fix --name-status".into(),
        "branch ls fix".into(),
        "audit log".into(),
        "audit sql 'select cast(path as text), detail from audit'".into(),
        format!("verify --repo {repo} --check {}", shlex_quote(&check)),
    ] {
        let shown = on_terminal(&tendon, &args);
        // The progress line's own sequence.
        let shown = shown.replace("\x1b[2K", "");
        assert!(shown.len() > 4, "{args}: nothing is shown");
        let steers = |c: char| !matches!(c, '\n' | '\r' | '\t') && proto::path::steers(c);
        assert!(!shown.contains(steers), "{args}: {shown:?}");
    }
    // A row of the audit is a line.
    let rows = tendon.json(0, &["audit", "log"])["rows"].as_array().unwrap().len();
    assert_eq!(tendon.text(&["audit", "log"]).lines().count(), rows);
    // Who gives the command a terminal, gives it that.
    assert!(on_terminal(&tendon, "branch exec fix --tty -- cat evil").contains("\x1b[31m"));
}

fn shlex_quote(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}

#[test]
fn a_wrong_path_is_told_with_what_to_do() {
    if !can_run() {
        return;
    }
    let (tendon, repo) = with_branch();
    let long = "x".repeat(70_000);
    for path in [".", "/", "/etc/passwd", "../x", "a//b", &long] {
        for verb in ["read", "write", "rm"] {
            tendon
                .run(&["branch", verb, "fix", path])
                .expect(2)
                .says("hint: name a path from the top of the branch");
        }
    }
    tendon.run(&["branch", "ls", "fix", "../x"]).expect(2).says("hint: name a path");
    for top in [".", "./", "/"] {
        assert_eq!(tendon.text(&["branch", "ls", "fix", top]), tendon.text(&["branch", "ls", "fix"]));
    }
    tendon
        .run(&["branch", "exec", "fix", "--cwd", "/etc", "--", "true"])
        .expect(125)
        .says("hint: name a path");
    for path in ["nosuch", "a.txt/x"] {
        tendon.run(&["branch", "read", "fix", path]).expect(2).says("hint: see what there is");
    }
    tendon.run(&["branch", "read", "fix", "dir"]).expect(2).says("hint: list it");
    tendon.run(&["branch", "ls", "fix", "a.txt"]).expect(2).says("where a directory is wanted");
    let export = |repo: &str, name: &str, author: &str| {
        tendon.run(&["branch", "export", "fix", "--git", repo, name, "--author", author])
    };
    let (good, author) = (repo.path().to_str().unwrap(), "A B <a@b>");
    export("", "x", author).expect(2).says("hint: name the directory");
    export("nosuch", "x", author).expect(2).says("hint: check the path");
    for name in ["", "HEAD", "refs/heads/x", "a b"] {
        export(good, name, author).expect(2).says("hint: name a branch");
    }
    export(good, "x", "nobody").expect(2).says("hint: write it as");
    tendon.run(&["verify", "--repo", good, "--pids", "4294967295", "--check", "true"]).expect(0);
    let refused = tendon.run(&["verify", "--repo", good, "--memory", "1", "--check", "true"]);
    refused
        .expect(3)
        .says("the limit memory = 1B is less than the smallest, 32MiB")
        .says("with --memory or limits.memory in a spec");
    let ran = tendon.run(&["verify", "--repo", good, "--ref", &long, "--check", "true"]);
    ran.expect(2).says("no ref");
    assert!(ran.stderr.len() < 1000, "{}", ran.stderr.len());
}

#[test]
fn an_export_that_is_ended_leaves_nothing() {
    if !can_run() {
        return;
    }
    let (tendon, _repo) = with_branch();
    tendon.text(&["branch", "exec", "fix", "--", "truncate", "-s", "1G", "large"]);
    let names = || -> Vec<String> {
        let entries = std::fs::read_dir(tendon.dir.path()).unwrap();
        entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect()
    };
    for signal in ["INT", "TERM", "HUP"] {
        std::fs::write(tendon.dir.path().join("out"), "old").unwrap();
        let mut child = tendon.start(&["branch", "export", "fix", "--tar", "out"]);
        testkit::process::wait_until("it is being written", std::time::Duration::from_secs(30), || {
            assert!(child.try_wait().unwrap().is_none(), "it was too fast");
            names().iter().any(|name| name.contains(".part-"))
        });
        common::signal(&child, signal);
        assert_eq!(child.wait().unwrap().code(), Some(130), "{signal}");
        assert!(!names().iter().any(|name| name.contains(".part-")), "{signal}: {:?}", names());
        assert_eq!(std::fs::read(tendon.dir.path().join("out")).unwrap(), b"old", "{signal}");
    }
    // Of a runner that dies meanwhile nothing is left, either.
    let mut child = tendon.start(&["branch", "export", "fix", "--tar", "out"]);
    testkit::process::wait_until("it is being written", std::time::Duration::from_secs(30), || {
        names().iter().any(|name| name.contains(".part-"))
    });
    let status = tendon.json(0, &["runner", "status"]);
    let pid = status["runner"]["pid"].as_i64().expect("the runner's pid");
    testkit::process::run(testkit::process::command("kill").args(["-9", &pid.to_string()]));
    assert_eq!(child.wait().unwrap().code(), Some(4));
    assert!(!names().iter().any(|name| name.contains(".part-")), "{:?}", names());
}

#[test]
fn a_dropped_branch_comes_back() {
    if !can_run() {
        return;
    }
    let (tendon, _repo) = with_branch();
    let id = tendon.json(0, &["branch", "show", "fix"])["branch"]["id"].as_str().unwrap().to_owned();
    tendon.run_with(&["branch", "write", "fix", "new.txt"], b"work\n").expect(0);
    tendon.text(&["branch", "drop", "fix"]);
    let ran = tendon.run(&["branch", "show", "fix"]);
    ran.expect(2).says("the branch `fix` was dropped at audit row").says("tendon branch at").says(&id);
    // As the hint says.
    let hint = ran.stderr.lines().find_map(|line| line.split_once("tendon branch at ")).unwrap().1;
    let (seq, _) = hint.split_once(' ').unwrap();
    let at = ["branch", "at", seq, "--branch", &id];
    let again = tendon.text(&at);
    assert_eq!(tendon.text(&["branch", "read", &again, "new.txt"]), "work");
    assert_eq!(tendon.text(&["base", "gc"]), "0 bases removed, 0 B freed");
    tendon.text(&["branch", "drop", &again]);
    assert!(tendon.text(&["base", "gc"]).starts_with("1 base removed, "));
    tendon.run(&at).expect(2).says("was dropped at audit row").says("its base");
}

#[test]
fn a_large_file_is_read_whole() {
    if !can_run() {
        return;
    }
    let (tendon, _repo) = with_branch();
    tendon.text(&[
        "branch",
        "exec",
        "fix",
        "--",
        "sh",
        "-c",
        "head -c 70000000 /dev/zero > large; echo end >> large",
    ]);
    let read = tendon.run(&["branch", "read", "fix", "large"]);
    read.expect(0);
    assert_eq!(read.bytes.len(), 70_000_004);
    assert!(read.bytes.ends_with(b"end\n"));
    tendon.run(&["branch", "read", "fix", "dir"]).expect(2).says("is a directory");
}

#[test]
fn every_command_has_a_record() {
    if !can_run() {
        return;
    }
    let (tendon, _repo) = with_branch();
    let file = tendon.dir.path().join("patch");
    for args in [
        &["branch", "write", "fix", "a.txt"][..],
        &["branch", "rm", "fix", "dir"],
        &["branch", "export", "fix", "--patch", file.to_str().unwrap()],
        &["branch", "fork", "fix", "--name", "other"],
        &["branch", "drop", "other"],
    ] {
        assert_eq!(tendon.json(0, args)["version"], 1, "{args:?}");
    }
    assert_eq!(tendon.json(0, &["branch", "read", "fix", "a.txt"])["content"], "");
    let diff = tendon.json(0, &["branch", "diff", "fix", "--name-status"])["diff"].clone();
    assert_eq!(diff, "M\ta.txt\nD\tdir/b.txt\n");
    assert_eq!(tendon.json(2, &["branch", "frobnicate"])["error"]["code"], "usage");
}
