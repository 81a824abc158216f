//! `tendon verify`, end to end.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use common::{Ran, Tendon, can_run, long_sleep, runs, signal};
use proto::client::Client;
use proto::path::JsonBytes;
use serde_json::{Value, json};
use testkit::{GitRepo, Need, have_all};

fn project() -> GitRepo {
    let repo = GitRepo::new();
    repo.file("check.sh", "test \"$(cat answer)\" = 42\n")
        .file("answer", "42\n")
        .file(".gitignore", "ignored\n");
    repo.commit("first");
    repo
}

fn path(repo: &GitRepo) -> &str {
    repo.path().to_str().unwrap()
}

fn outcomes(report: &Value) -> Vec<String> {
    let commands = report["commands"].as_array().unwrap();
    let how = |command: &Value| match command["outcome"]["code"].as_i64() {
        None => command["outcome"]["how"].as_str().unwrap().to_owned(),
        Some(code) => format!("exited {code}"),
    };
    commands.iter().map(how).collect()
}

fn changed(report: &Value) -> Vec<String> {
    let paths = report["changed"]["paths"].as_array().unwrap();
    paths.iter().map(|change| format!("{} {}", change["status"].as_str().unwrap(), change["path"])).collect()
}

#[test]
fn a_passing_check_passes_and_the_source_is_untouched() {
    if !can_run() {
        return;
    }
    let (tendon, repo) = (Tendon::new(), project());
    let report = tendon.json(
        0,
        &[
            "verify",
            "--repo",
            path(&repo),
            "--check",
            "sh check.sh",
            "--check",
            "sh -c 'echo 43 > answer; echo new > made; echo x > ignored'",
        ],
    );
    assert_eq!(report["version"], 1);
    assert_eq!(
        (&report["passed"], &report["cancelled"], &report["branch_kept"]),
        (&true.into(), &false.into(), &false.into())
    );
    assert_eq!(outcomes(&report), ["exited 0", "exited 0"]);
    assert_eq!(changed(&report), ["M \"answer\"", "A \"made\""]);
    assert_eq!(report["changed"]["other_total"], 1);
    assert_eq!(report["confinement"]["tier"], "sandbox");
    assert_ne!(report["tree_before"], report["tree_after"]);
    assert_eq!(repo.git(&["status", "--porcelain", "--ignored"]), "");
    assert_eq!(tendon.json(0, &["branch", "list"])["branches"], Value::Array(vec![]));
    assert_eq!(tendon.json(0, &["audit", "verify"])["intact"], true);
}

#[test]
fn a_failing_check_fails_and_shows_why() {
    if !can_run() {
        return;
    }
    let (tendon, repo) = (Tendon::new(), project());
    repo.file("answer", "41\n");
    let ran = tendon.run(&[
        "verify",
        "--repo",
        path(&repo),
        "--check",
        "sh -c 'echo so wrong >&2; sh check.sh'",
        "--check",
        "true",
    ]);
    ran.expect(1);
    for text in ["✗ sh -c", "exit status 1", "so wrong", "– true", "skipped", "failed in", "log "] {
        assert!(ran.stdout.contains(text), "no `{text}` in\n{}", ran.stdout);
    }
    let report = tendon.json(
        1,
        &["verify", "--repo", path(&repo), "--check", "sh check.sh", "--check", "true", "--keep-going"],
    );
    assert_eq!(outcomes(&report), ["exited 1", "exited 0"]);
    let report = tendon
        .json(1, &["verify", "--repo", path(&repo), "--setup", "false", "--check", "true", "--keep-going"]);
    assert_eq!(outcomes(&report), ["exited 1", "skipped"]);
    let report =
        tendon.json(0, &["verify", "--repo", path(&repo), "--ref", "main", "--check", "sh check.sh"]);
    assert_eq!(report["git_head"], repo.git(&["rev-parse", "main"]));
}

#[test]
fn a_check_that_kills_what_holds_the_hand_together_has_failed() {
    if !can_run() {
        return;
    }
    let (tendon, repo) = (Tendon::new(), project());
    let kill = "sh -c 'kill -9 $PPID; sleep 60'";
    let report = tendon
        .json(1, &["verify", "--repo", path(&repo), "--check", kill, "--check", "true", "--keep-going"]);
    let told = &report["commands"][0]["outcome"];
    assert_eq!(told["how"], "killed", "{report}");
    assert!(told["reason"].as_str().unwrap().contains("a supervisor process"), "{report}");
    assert_eq!(report["commands"][1]["outcome"]["code"], 0, "the hand goes on: {report}");
    tendon.text(&["branch", "create", "--repo", path(&repo), "--name", "fix"]);
    tendon
        .run(&["branch", "exec", "fix", "--", "sh", "-c", "kill -9 $PPID; sleep 60"])
        .expect(137)
        .says("killed: a supervisor");
}

#[test]
fn long_names_do_not_make_a_report_too_long_to_read() {
    if !can_run() || !testkit::have(testkit::Need::Python) {
        return;
    }
    let (tendon, repo) = (Tendon::new(), project());
    // In JSON each byte of these paths is six.
    let script = "import os\nd = '/'.join(['\\1' * 250] * 11)\nos.makedirs(d)\nfor n in range(1000): open(d + '/' + str(n) + '\\1' * 250, 'w')";
    let check = format!("python3 -c \"{script}\"");
    let report = tendon.json(0, &["verify", "--repo", path(&repo), "--check", &check]);
    for changed in [&report["changed"], &report["commands"][0]["changed"]] {
        assert_eq!(changed["tree_total"], 1000);
        let listed = changed["paths"].as_array().unwrap().len();
        assert!((10..1000).contains(&listed), "{listed}");
    }
}

#[test]
fn each_source_and_the_spec() {
    if !can_run() {
        return;
    }
    let (tendon, repo) = (Tendon::new(), project());
    repo.file("ignored", "x");
    let has = |file: &str| format!("test -e {file}");
    tendon.run(&["verify", "--repo", path(&repo), "--check", &has("ignored")]).expect(1);
    tendon.run(&["verify", "--repo", path(&repo), "--include-ignored", "--check", &has("ignored")]).expect(0);
    tendon.run(&["verify", "--files", path(&repo), "--check", &has("ignored")]).expect(0);
    repo.file("uncommitted", "x");
    tendon.run(&["verify", "--repo", path(&repo), "--check", &has("uncommitted")]).expect(0);
    tendon.run(&["verify", "--repo", path(&repo), "--ref", "HEAD", "--check", &has("uncommitted")]).expect(1);
    let spec = repo.path().join("verify.toml");
    std::fs::write(&spec, "setup = [\"touch made\"]\nchecks = [\"test -e made\", [\"sh\", \"-c\", \"test $A = 1\"]]\nenv = { A = \"1\" }").unwrap();
    tendon.run(&["verify", "--spec", spec.to_str().unwrap()]).expect(0);
    std::fs::write(
        &spec,
        "checks = [\"sh run.sh\"]\nsource = { files = { \"run.sh\" = \"test -e run.sh\" } }",
    )
    .unwrap();
    tendon.run(&["verify", "--spec", spec.to_str().unwrap()]).expect(0);
}

#[test]
fn a_path_means_what_it_means_to_who_names_it() {
    if !can_run() {
        return;
    }
    let (tendon, repo) = (Tendon::new(), project());
    repo.file("verify.toml", "checks = [\"sh check.sh\"]\nsource = { repo = \"/proc/self/cwd\" }\n");
    repo.file("piped.toml", "checks = [\"sh check.sh\"]\n");
    // The runner's current directory and its descriptors are others.
    tendon.text(&["branch", "create", "--files", "."]);
    let script = |script: &str| {
        let command = tendon.command(&[]);
        let mut shell = testkit::process::command("sh");
        for (name, value) in command.get_envs() {
            shell.env(name, value.unwrap());
        }
        shell.args(["-c", script]).arg(command.get_args().nth(3).unwrap()).current_dir(repo.path());
        let ran = Ran::new(shell.output().unwrap(), &[script]);
        ran.expect(0);
        serde_json::from_str::<Value>(&ran.stdout).unwrap()
    };
    for args in [
        "verify --repo /proc/self/cwd --check 'sh check.sh'",
        "verify --files /dev/fd/9 --check 'sh check.sh' 9<.",
        "verify --repo . --check 'sh check.sh'",
        "verify --spec verify.toml",
        "verify --spec /dev/stdin < piped.toml",
        "verify --spec /dev/fd/9 9<piped.toml",
        "cat piped.toml | \"$0\" verify --json --spec /dev/stdin; true",
    ] {
        let args = if args.contains("$0") { args.to_owned() } else { format!("\"$0\" --json {args}") };
        assert_eq!(script(&args)["source"], path(&repo), "{args}");
    }
    let by_ref = script("\"$0\" --json verify --repo /proc/self/cwd/. --ref main --check 'sh check.sh'");
    assert_eq!(by_ref["source"], format!("{} at main", path(&repo)));
    let branch = script("\"$0\" --json branch create --repo .")["branch"]["id"].as_str().unwrap().to_owned();
    script(&format!(
        "\"$0\" branch write {branch} more < answer && \"$0\" --json branch export {branch} --git /proc/self/cwd out"
    ));
    assert!(repo.git(&["show", "--stat", "out"]).contains("more"));
    script(
        "\"$0\" --json --state-dir /proc/self/cwd/ignored branch list; \"$0\" --state-dir ignored runner stop",
    );
    assert!(repo.path().join("ignored/run").exists());
}

#[test]
fn what_fails_for_want_of_a_network_says_what_would_help() {
    if !can_run() {
        return;
    }
    let (tendon, repo) = (Tendon::new(), project());
    let warned = |script: &str, status: i32| {
        let check = format!("sh -c '{script}'");
        let report = tendon.json(status, &["verify", "--repo", path(&repo), "--check", &check]);
        report["warnings"]
            .as_array()
            .unwrap()
            .iter()
            .map(|text| text.as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    for (says, hint) in [
        ("ERROR: No matching distribution found for flask", "pip download"),
        ("npm ERR! code ENOTCACHED", "npm ci"),
        ("As a reminder, you are using offline mode", ""),
        ("error: attempting to make an HTTP request, but --offline was specified", "cargo fetch"),
    ] {
        let warnings = warned(&format!("echo \"{says}\" >&2; exit 1"), 1);
        assert_eq!(warnings.len(), usize::from(!hint.is_empty()), "{warnings:?}");
        assert!(warnings.iter().all(|warning| warning.contains(hint)), "{warnings:?}");
        assert!(warned(&format!("echo \"{says}\""), 0).is_empty());
    }
    if testkit::have(Need::Pip) {
        let warnings = warned("python3 -m pip install package-that-is-nowhere", 1);
        assert!(warnings.len() == 1 && warnings[0].contains("~/.cache/tendon/wheels"), "{warnings:?}");
    }
}

#[test]
fn bases_of_past_verifies_are_collected() {
    if !can_run() {
        return;
    }
    let (tendon, repo) = (Tendon::new(), project());
    let verify = |answer: &str| {
        repo.file("answer", answer);
        let args = ["verify", "--repo", path(&repo), "--check", "true"];
        let mut command = tendon.command(&args);
        Ran::new(command.env("TENDON_RUNNER_BASES_BYTES_MAX", "1").output().unwrap(), &args).expect(0);
    };
    verify("42\n");
    tendon.text(&["branch", "create", "--repo", path(&repo), "--name", "mine"]);
    for answer in ["43\n", "44\n", "45\n"] {
        verify(answer);
    }
    // That of the branch, and the latest.
    testkit::wait_until("two bases are left", std::time::Duration::from_secs(60), || {
        tendon.json(0, &["base", "list"])["bases"].as_array().unwrap().len() == 2
    });
    assert_eq!(tendon.text(&["branch", "read", "mine", "answer"]), "42");
    verify("45\n");
}

#[test]
fn a_branch_is_verified_without_being_changed() {
    if !can_run() {
        return;
    }
    let (tendon, repo) = (Tendon::new(), project());
    tendon.text(&["branch", "create", "--repo", path(&repo), "--name", "fix"]);
    tendon.run_with(&["branch", "write", "fix", "answer"], b"41\n").expect(0);
    tendon.run(&["verify", "--branch", "fix", "--check", "sh check.sh"]).expect(1);
    let report = tendon.json(
        0,
        &["verify", "--branch", "fix", "--check", "sh -c 'echo 42 > answer; sh check.sh'", "--keep-branch"],
    );
    assert_eq!(tendon.text(&["branch", "read", "fix", "answer"]), "41");
    let kept = report["branch"].as_str().unwrap();
    assert_eq!(tendon.text(&["branch", "read", kept, "answer"]), "42");
}

#[test]
fn what_is_not_there_is_named() {
    if !can_run() {
        return;
    }
    let (tendon, repo) = (Tendon::new(), project());
    let plain = tendon.dir.path().join("plain");
    std::fs::create_dir(&plain).unwrap();
    let verify = |args: &[&str]| tendon.run(&[&["verify", "--check", "true"], args].concat());
    verify(&["--repo", path(&repo), "--ref", "nosuch"]).expect(2).says("nosuch");
    verify(&["--repo", plain.to_str().unwrap(), "--ref", "main"]).expect(2).says("plain");
    verify(&["--branch", "nosuch"]).expect(2).says("nosuch");
    let report = tendon.json(1, &["verify", "--repo", path(&repo), "--check", "no-such-program --x"]);
    assert_eq!(outcomes(&report), ["not_started"]);
    assert!(
        report["commands"][0]["outcome"]["reason"].as_str().unwrap().contains("no-such-program"),
        "{report}"
    );
    assert!(
        report["commands"][0]["outcome"]["reason"].as_str().unwrap().contains("hand.read_only"),
        "{report}"
    );
}

#[test]
fn odd_names_and_binary_output_survive() {
    if !can_run() {
        return;
    }
    let (tendon, repo) = (Tendon::new(), project());
    let odd = [&b"new\nline"[..], b"\xff\xfe", b" ", b"-rf", "grüße".as_bytes()];
    for name in odd {
        std::fs::write(repo.path().join(Path::new(std::ffi::OsStr::from_bytes(name))), "x").unwrap();
    }
    std::os::unix::fs::symlink("loop", repo.path().join("loop")).unwrap();
    let count = "sh -c 'test $(ls -A | tr -cd \"\\n\" | wc -c) = 11 && for f in *; do rm -- \"$f\"; done; printf \"\\\\000\\\\377\"'";
    let report = tendon.json(0, &["verify", "--repo", path(&repo), "--check", count]);
    assert_eq!(report["commands"][0]["stdout"]["tail"]["base64"], "AP8=", "{report}");
    assert_eq!(report["changed"]["tree_total"], 8, "{report}");
}

#[test]
fn a_flood_of_output_is_bounded() {
    if !can_run() {
        return;
    }
    let (tendon, repo) = (Tendon::new(), project());
    let report = tendon
        .json(0, &["verify", "--repo", path(&repo), "--check", "sh -c 'yes | head -c 100000000; echo end'"]);
    let stdout = &report["commands"][0]["stdout"];
    assert_eq!((&stdout["bytes_total"], &stdout["truncated"]), (&100_000_004.into(), &true.into()));
    assert!(stdout["tail"].as_str().unwrap().ends_with("y\nend\n"));
    let log = std::fs::metadata(stdout["log"].as_str().unwrap()).unwrap();
    assert_eq!(log.len(), 64 << 20);
}

#[test]
fn a_large_output_does_not_travel() {
    if !can_run() {
        return;
    }
    let (tendon, repo) = (Tendon::new(), project());
    tendon.text(&["base", "list"]);
    let client = Client::new(tendon.state().join("run/tendond.sock"));
    let runtime = tokio::runtime::Runtime::new().unwrap();
    for (output, most) in [("recent", 10 << 20), ("none", 0)] {
        let request = json!({
            "source": { "kind": "directory", "path": path(&repo), "include_ignored": false },
            "checks": [["head", "-c", "100000000", "/dev/zero"]],
            "output": output,
        });
        let (mut sent, mut skipped, mut report) = (0, 0, Value::Null);
        runtime.block_on(async {
            let mut events = client.events::<Value>("/v1/verify", &request).await.unwrap();
            while report.is_null() {
                let event = events.next().await.unwrap();
                assert_ne!(event["event"], "failed", "{event}");
                if event["event"] == "output" {
                    let bytes: JsonBytes = serde_json::from_value(event["bytes"].clone()).unwrap();
                    sent += bytes.decode().unwrap().len() as u64;
                    skipped += event["skipped"].as_u64().unwrap();
                }
                if event["event"] == "done" {
                    report = event["report"].clone();
                }
            }
        });
        let stdout = &report["commands"][0]["stdout"];
        assert_eq!(stdout["bytes_total"], 100_000_000);
        assert_eq!(std::fs::metadata(stdout["log"].as_str().unwrap()).unwrap().len(), 64 << 20);
        assert!(sent <= most, "{output}: {sent} bytes");
        assert_eq!(sent + skipped, if output == "none" { 0 } else { 100_000_000 });
    }
}

#[test]
fn a_command_that_runs_too_long_is_killed_with_all_it_started() {
    if !can_run() {
        return;
    }
    let (tendon, repo, sleep) = (Tendon::new(), project(), long_sleep());
    let report = tendon.json(
        1,
        &[
            "verify",
            "--repo",
            path(&repo),
            "--timeout",
            "2s",
            "--check",
            &format!("sh -c 'setsid {sleep} & {sleep}'"),
        ],
    );
    assert_eq!(outcomes(&report), ["timed_out"]);
    let left = testkit::process::command("pgrep").args(["-f", &sleep]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&left.stdout), "");
}

#[test]
fn what_a_setup_left_is_ended_when_no_check_can_start() {
    if !can_run() || !have_all(&[Need::Cgroup]) {
        return;
    }
    let (tendon, repo) = (Tendon::new(), project());
    let fill = "trap 'exit 0' EXIT; while true; do sleep 1000 > /dev/null 2>&1 < /dev/null & done";
    let fill = format!("sh -c \"{fill}\"");
    let args = ["verify", "--repo", path(&repo), "--pids", "24", "--setup", &fill, "--check", "echo hi"];
    let report = tendon.json(0, &args);
    assert_eq!(outcomes(&report), ["exited 0", "exited 0"]);
    assert!(report["warnings"][0].as_str().unwrap().contains("were ended"), "{}", report["warnings"]);
}

#[test]
fn the_first_interrupt_cancels_and_still_reports() {
    if !can_run() {
        return;
    }
    let (tendon, repo, sleep) = (Tendon::new(), project(), long_sleep());
    tendon.text(&["base", "list"]);
    let args =
        ["verify", "--repo", path(&repo), "--json", "--check", "true", "--check", &sleep, "--check", "true"];
    let child = tendon.start(&args);
    testkit::wait_until("the command runs", std::time::Duration::from_secs(60), || runs(&sleep));
    signal(&child, "INT");
    let ran = Ran::new(child.wait_with_output().unwrap(), &args);
    ran.expect(130);
    let report: Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!((&report["cancelled"], &report["passed"]), (&true.into(), &false.into()), "{report}");
    assert_eq!(outcomes(&report), ["exited 0", "cancelled", "skipped"]);
    assert_eq!(tendon.json(0, &["branch", "list"])["branches"], Value::Array(vec![]));
}

#[test]
fn an_interrupt_stops_the_freezing_too() {
    if !can_run() {
        return;
    }
    let (tendon, dir) = (Tendon::new(), testkit::temp_dir("large"));
    // A hole is hashed like any content: this takes many minutes.
    std::fs::File::create(dir.path().join("large")).unwrap().set_len(1 << 40).unwrap();
    tendon.text(&["base", "list"]);
    let args = ["verify", "--files", dir.path().to_str().unwrap(), "--check", "true"];
    let child = tendon.start(&args);
    let tmp = tendon.state().join("tmp");
    let freezing =
        || std::fs::read_dir(&tmp).unwrap().any(|entry| entry.unwrap().path().join("tree/large").exists());
    testkit::wait_until("the file is copied", std::time::Duration::from_secs(60), freezing);
    signal(&child, "INT");
    Ran::new(child.wait_with_output().unwrap(), &args).expect(130);
    assert_eq!(std::fs::read_dir(&tmp).unwrap().count(), 0);
    assert_eq!(tendon.json(0, &["base", "list"])["bases"], Value::Array(vec![]));
}

#[test]
fn the_branch_of_a_verify_that_runs_is_its_own() {
    if !can_run() {
        return;
    }
    let (tendon, repo) = (Tendon::new(), project());
    tendon.text(&["base", "list"]);
    let script = "echo x > up; while [ ! -e go ]; do sleep 0.1; done";
    let args = ["verify", "--repo", path(&repo), "--keep-branch", "--check", &format!("sh -c '{script}'")];
    let child = tendon.start(&args);
    let mut branch = String::new();
    testkit::wait_until("the command runs", std::time::Duration::from_secs(60), || {
        let list = tendon.json(0, &["branch", "list"]);
        branch = list["branches"][0]["id"].as_str().unwrap_or_default().to_owned();
        !branch.is_empty() && tendon.run(&["branch", "read", &branch, "up"]).status == 0
    });
    for args in [
        &["branch", "fork", &branch][..],
        &["branch", "drop", &branch],
        &["branch", "exec", &branch, "--", "true"],
    ] {
        let status = if args.contains(&"exec") { 125 } else { 2 };
        tendon.run(args).expect(status).says("something runs on branch");
    }
    tendon.run_with(&["branch", "write", &branch, "go"], b"").expect(0);
    Ran::new(child.wait_with_output().unwrap(), &args).expect(0);
    let rows =
        tendon.json(0, &["audit", "sql", "select path from audit where actor = 'unknown'"])["rows"].clone();
    assert_eq!(rows, Value::Array(vec![]));
    tendon.text(&["branch", "drop", &branch]);
}

#[test]
fn a_client_that_vanishes_leaves_nothing() {
    if !can_run() {
        return;
    }
    let (tendon, repo, sleep) = (Tendon::new(), project(), long_sleep());
    tendon.text(&["base", "list"]);
    let mut child = tendon.start(&["verify", "--repo", path(&repo), "--check", &sleep]);
    testkit::wait_until("the command runs", std::time::Duration::from_secs(60), || runs(&sleep));
    // `timeout` and `tendon` are one group's parent and child: both go.
    let client = testkit::process::command("pgrep").args(["-P", &child.id().to_string()]).output().unwrap();
    let client = String::from_utf8(client.stdout).unwrap();
    testkit::process::run(testkit::process::command("kill").args(["-KILL", client.trim()]));
    child.wait().unwrap();
    testkit::wait_until("the command is gone", std::time::Duration::from_secs(20), || !runs(&sleep));
    testkit::wait_until("the branch is gone", std::time::Duration::from_secs(20), || {
        tendon.json(0, &["branch", "list"])["branches"] == Value::Array(vec![])
    });
}

#[test]
fn paths_of_any_bytes_are_taken_and_carried_whole() {
    if !can_run() {
        return;
    }
    let tendon = Tendon::new();
    let odd = |name: &[u8]| tendon.dir.path().join(Path::new(std::ffi::OsStr::from_bytes(name)));
    let (state, repo_dir, files, spec) =
        (odd(b"sta\xffte"), odd(b"re\xfepo"), odd(b"fi\xff\nles"), odd(b"sp\xffec.toml"));
    let repo = GitRepo::at(&repo_dir);
    repo.file("a", "1\n").commit("first");
    std::fs::create_dir(&files).unwrap();
    std::fs::write(files.join("a"), "2\n").unwrap();
    std::fs::write(&spec, "checks = [\"false\"]\nsource = { repo = \"re\u{fffd}po\" }").unwrap();
    let run = |args: &[&std::ffi::OsStr]| {
        let mut command = tendon.command(&[]);
        Ran::new(command.arg("--state-dir").arg(&state).args(args).output().unwrap(), &[])
    };
    let os = |text: &'static str| std::ffi::OsStr::new(text);
    for source in [
        &[os("--repo"), repo_dir.as_os_str()][..],
        &[os("--repo"), repo_dir.as_os_str(), os("--ref"), os("main")],
        &[os("--files"), files.as_os_str()],
    ] {
        let check = [os("verify"), os("--json"), os("--check"), os("sh -c 'echo out; test -s a; exit 1'")];
        let ran = run(&[&check, source].concat());
        let report: Value = serde_json::from_str(&ran.expect(1).stdout).unwrap();
        assert_eq!(outcomes(&report), ["exited 1"], "{source:?}");
        assert!(report["source"].as_str().unwrap().contains("\\xf"), "{report}");
        let log: proto::path::JsonBytes =
            serde_json::from_value(report["commands"][0]["stdout"]["log"].clone()).unwrap();
        assert_eq!(std::fs::read(log.decode_path().unwrap()).unwrap(), b"out\n");
    }
    // A spec is text, so it names such a directory only by where it lies itself.
    run(&[os("verify"), os("--spec"), spec.as_os_str()]).expect(2).says("re\u{fffd}po");
    let inside = repo_dir.join("verify.toml");
    std::fs::write(&inside, "checks = [\"cat a\"]\nsource = { repo = \".\", ref = \"main\" }").unwrap();
    run(&[os("verify"), os("--spec"), inside.as_os_str()]).expect(0);

    let created =
        run(&[os("branch"), os("create"), os("--repo"), repo_dir.as_os_str(), os("--name"), os("fix")]);
    created.expect(0);
    run(&[os("branch"), os("exec"), os("fix"), os("--"), os("sh"), os("-c"), os("echo 3 >a")]).expect(0);
    run(&[os("branch"), os("export"), os("fix"), os("--git"), repo_dir.as_os_str(), os("fixed")]).expect(0);
    assert_eq!(repo.git(&["show", "fixed:a"]), "3");
    let status = run(&[os("runner"), os("status"), os("--json")]);
    let status: Value = serde_json::from_str(&status.expect(0).stdout).unwrap();
    let carried: proto::path::JsonBytes =
        serde_json::from_value(status["runner"]["state_dir"].clone()).unwrap();
    assert_eq!(carried.decode_path().unwrap(), state);
    run(&[os("runner"), os("stop")]).expect(0);
}
