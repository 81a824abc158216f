//! The runner's life: started by need, alone on its state directory, ended by a signal, a client or idleness.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::process::Stdio;
use std::time::Duration;

use common::{Ran, Tendon, can_run, long_sleep, runs};
use testkit::process::command;
use testkit::{binary, wait_until};

#[test]
fn a_second_runner_is_refused_and_told_by_whom() {
    if !can_run() {
        return;
    }
    let tendon = Tendon::new();
    let status = tendon.json(4, &["runner", "status"]);
    assert_eq!(status["error"]["code"], "host_broken");
    tendon.text(&["base", "list"]);
    let pid = tendon.json(0, &["runner", "status"])["runner"]["pid"].to_string();
    let second = || {
        let mut second = command("timeout");
        second.args(["--signal=KILL", "30"]).arg(binary("tendond")).arg("--state-dir").arg(tendon.state());
        second.stdin(Stdio::null());
        second
    };
    let refused = Ran::new(second().output().unwrap(), &["tendond"]);
    refused
        .expect(4)
        .says("error: the state directory")
        .says(&format!("pid {pid}"))
        .says("hint: stop that runner");
    let refused = Ran::new(second().arg("--private").output().unwrap(), &["tendond", "--private"]);
    refused.expect(4);
    assert!(refused.stdout.contains("\"code\":\"state_busy\""), "{}", refused.stdout);
    assert_eq!(
        tendon.json(0, &["runner", "status"])["runner"]["pid"].to_string(),
        pid,
        "the first one lives on"
    );
}

#[test]
fn many_clients_at_once_share_one_runner() {
    if !can_run() {
        return;
    }
    let tendon = Tendon::new();
    let children: Vec<_> = (0..8).map(|_| tendon.start(&["base", "list"])).collect();
    for child in children {
        Ran::new(child.wait_with_output().unwrap(), &["base", "list"]).expect(0);
    }
}

#[test]
fn stop_ends_it_and_the_next_call_starts_another() {
    if !can_run() {
        return;
    }
    let tendon = Tendon::new();
    tendon.text(&["base", "list"]);
    let first = tendon.json(0, &["runner", "status"])["runner"]["pid"].clone();
    tendon.text(&["runner", "stop"]);
    tendon.run(&["runner", "status"]).expect(4);
    tendon.text(&["base", "list"]);
    assert_ne!(tendon.json(0, &["runner", "status"])["runner"]["pid"], first);
}

#[test]
fn stop_returns_when_the_runner_has_ended() {
    if !can_run() {
        return;
    }
    let (tendon, repo, sleep) = (Tendon::new(), testkit::GitRepo::new(), long_sleep());
    // It takes its time to end: only a kill ends it.
    let child = verify_for_ever(&tendon, &repo, &format!("sh -c \"trap '' TERM; exec {sleep}\""), &sleep);
    let pid = tendon.json(0, &["runner", "status"])["runner"]["pid"].to_string();
    tendon.text(&["runner", "stop"]);
    let state = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    assert!(state.is_empty() || state.contains(") Z "), "it lives: {state}");
    assert!(!runs(&sleep));
    // The next one has the state directory at once, without waiting for anybody.
    std::fs::File::open(tendon.state().join("lock")).unwrap().try_lock().unwrap();
    Ran::new(child.wait_with_output().unwrap(), &["verify"]).expect(130);
}

#[test]
fn a_command_waits_for_a_runner_that_is_ending() {
    if !can_run() {
        return;
    }
    let (tendon, repo, sleep) = (Tendon::new(), testkit::GitRepo::new(), long_sleep());
    let child = verify_for_ever(&tendon, &repo, &format!("sh -c \"trap '' TERM; exec {sleep}\""), &sleep);
    let first = tendon.json(0, &["runner", "status"])["runner"]["pid"].clone();
    let stop = tendon.start(&["runner", "stop"]);
    wait_until("nobody listens any more", Duration::from_secs(30), || {
        !tendon.state().join("run/tendond.sock").exists()
    });
    assert_ne!(tendon.json(0, &["config", "list"]), serde_json::Value::Null);
    assert_ne!(tendon.json(0, &["runner", "status"])["runner"]["pid"], first);
    // Whose end it waits for is the first one's, though another listens now.
    Ran::new(stop.wait_with_output().unwrap(), &["runner", "stop"]).expect(0);
    Ran::new(child.wait_with_output().unwrap(), &["verify"]).expect(130);
}

#[test]
fn a_private_runner_ends_when_nobody_needs_it() {
    if !can_run() {
        return;
    }
    let tendon = Tendon::new();
    tendon.text(&["base", "list"]);
    let pid = tendon.json(0, &["runner", "status"])["runner"]["pid"].to_string();
    let lives = || std::path::Path::new("/proc").join(&pid).join("exe").exists();
    assert!(lives());
    wait_until("the runner ends by itself", Duration::from_secs(30), || !lives());
    assert!(!tendon.state().join("run/tendond.sock").exists());
}

#[test]
fn a_state_directory_that_cannot_be_is_refused() {
    if !can_run() {
        return;
    }
    let tendon = Tendon::new();
    let at = |name: &str| tendon.dir.path().join(name);
    std::fs::write(at("file"), "a file").unwrap();
    let long = at(&"x".repeat(300));
    for dir in [at("file"), at("file/below"), "/proc/nowhere".into(), long] {
        let mut command = tendon.command(&["base", "list"]);
        let ran = Ran::new(command.env("TENDON_STATE_DIR", &dir).output().unwrap(), &[]);
        ran.expect(4).says("error: cannot write a log in the state directory").says("hint: name a directory");
        let mut command = tendon.command(&["runner", "status"]);
        Ran::new(command.env("TENDON_STATE_DIR", &dir).output().unwrap(), &[])
            .expect(4)
            .says("no runner listens");
    }
    // Long, but not too long for a socket that is reached by its directory.
    let deep = at(&"d".repeat(150));
    for args in [&["base", "list"][..], &["base", "list"], &["runner", "stop"]] {
        Ran::new(tendon.command(args).env("TENDON_STATE_DIR", &deep).output().unwrap(), args).expect(0);
    }
}

#[test]
fn a_read_only_or_full_disk_below_the_state_directory_is_told() {
    if !can_run() || !testkit::have(testkit::Need::Root) {
        return;
    }
    let tendon = Tendon::new();
    let tendon_binary = binary("tendon");
    let dir = tendon.dir.path().join("disk");
    std::fs::create_dir(&dir).unwrap();
    for (options, says) in [("ro,size=1m", "Read-only file system"), ("size=64k", "hint: make room")] {
        // In a mount namespace of its own, so that nothing is left of it.
        let script = "mount -t tmpfs -o \"$1\" none \"$2\" && \"$3\" base list --state-dir \"$2/state\"";
        let mut shell = command("unshare");
        shell
            .args(["--mount", "timeout", "60", "sh", "-c", script, "sh", options])
            .arg(&dir)
            .arg(&tendon_binary);
        Ran::new(shell.output().unwrap(), &[options]).expect(4).says(says).says("hint:");
    }
}

#[test]
fn a_branch_can_be_dropped_on_a_full_disk() {
    if !can_run() || !testkit::have(testkit::Need::Root) {
        return;
    }
    let (tendon, repo) = (Tendon::new(), testkit::GitRepo::new());
    repo.file("a", "a").commit("first");
    let disk = tendon.dir.path().join("disk");
    std::fs::create_dir(&disk).unwrap();
    let script = "set -e; mount -t tmpfs -o size=64m none disk; export TENDON_STATE_DIR=$PWD/disk/state
        \"$1\" branch create --repo \"$2\" --name fix; \"$1\" runner stop
        cat /dev/zero > disk/rest || echo full
        \"$1\" branch drop fix; \"$1\" branch list --json; \"$1\" runner stop";
    let mut shell = command("unshare");
    shell.args(["--mount", "timeout", "60", "sh", "-c", script, "sh"]).arg(binary("tendon")).arg(repo.path());
    let ran = Ran::new(shell.current_dir(tendon.dir.path()).output().unwrap(), &["full"]);
    ran.expect(0);
    assert!(ran.stdout.contains("full") && ran.stdout.contains("\"branches\": []"), "{}", ran.stdout);
}

#[test]
fn configuration_has_layers_and_typos_are_named() {
    if !can_run() {
        return;
    }
    let tendon = Tendon::new();
    let file = tendon.dir.path().join("config/tendon/config.toml");
    std::fs::create_dir_all(file.parent().unwrap()).unwrap();
    let shown = file.display().to_string();
    testkit::process::run(testkit::process::command("mkfifo").arg(&file));
    tendon
        .run(&["config", "list"])
        .expect(2)
        .says(&format!("error: the configuration {shown} is not a file"));
    std::fs::remove_file(&file).unwrap();
    for (text, says, hint) in [
        (
            "[runner]\nwarm_hand_max = 3",
            "unknown key `runner.warm_hand_max` in FILE, line 2",
            "did you mean `runner.warm_hands_max`?",
        ),
        (
            "[limits]\nwall_ms_max = 0",
            "`limits.wall_ms_max` in FILE, line 2 is 0, less than the smallest value, 1",
            "write 1 or more",
        ),
        (
            "\n[limits]\npids_max = \"x\"",
            "`limits.pids_max` in FILE, line 3 is \"x\"",
            "write a whole number from 16 to 4294967295",
        ),
        ("[limits", "the configuration FILE is not TOML: line 1, column 8: ", ""),
    ] {
        std::fs::write(&file, text).unwrap();
        let ran = tendon.run(&["config", "list"]);
        ran.expect(2).says(&format!("error: {}", says.replace("FILE", &shown)));
        ran.says(&if hint.is_empty() { String::new() } else { format!("hint: {hint}\n") });
    }
    std::fs::write(&file, "[runner]\nwarm_hands_max = 3\nengine = \"auto\"").unwrap();
    let mut list = tendon.command(&["config", "list", "--json"]);
    list.env("TENDON_RUNNER_ENGINE", "copy");
    let ran = Ran::new(list.output().unwrap(), &["config", "list"]);
    ran.expect(0);
    let reply: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
    let of = |key: &str| {
        let value = reply["values"].as_array().unwrap().iter().find(|value| value["key"] == key).unwrap();
        (value["value"].to_string(), value["origin"].as_str().unwrap().to_owned())
    };
    assert_eq!(of("runner.warm_hands_max"), ("3".into(), file.to_str().unwrap().to_owned()));
    assert_eq!(of("runner.engine"), ("\"copy\"".into(), "environment TENDON_RUNNER_ENGINE".into()));
    assert_eq!(of("runner.warm_idle_ms_max").1, "built-in");
}

#[test]
fn too_few_open_files_are_named_and_a_soft_limit_is_none() {
    if !can_run() {
        return;
    }
    let tendon = Tendon::new();
    let limited = |option: &str| {
        let ready = tendon.command(&["branch", "list"]);
        let mut shell = testkit::process::command("sh");
        shell.args(["-c", &format!("ulimit {option} && exec \"$@\""), "sh"]).arg(ready.get_program());
        shell.args(ready.get_args()).envs(ready.get_envs().filter_map(|(name, value)| Some((name, value?))));
        Ran::new(shell.output().unwrap(), &[option])
    };
    limited("-n 20")
        .expect(4)
        .says("the runner may open only 20 files, and needs 512")
        .says("hint: raise the limit");
    limited("-Sn 20").expect(0);
}

#[test]
fn a_host_that_can_run_nothing_is_the_hosts_fault_wherever_it_shows() {
    if !can_run() {
        return;
    }
    let tendon = Tendon::new();
    let mut child = tendon.command(&["verify", "--files", ".", "--check", "true"]);
    let ran = Ran::new(child.env("TENDON_HAND", "/nonexistent/hand").output().unwrap(), &["verify"]);
    ran.expect(4).says("/nonexistent/hand does not exist").says("hint: install tendon's `hand`");
    tendon.run(&["doctor"]).expect(4);
    tendon.run(&["runner", "stop"]).expect(0);
}

#[test]
fn doctor_tells_what_the_host_can_do() {
    if !can_run() {
        return;
    }
    let tendon = Tendon::new();
    let reply = tendon.json(0, &["doctor"]);
    let checks = reply["checks"].as_array().unwrap();
    let sandbox = checks.iter().find(|check| check["name"] == "tier sandbox").unwrap();
    assert_eq!(sandbox["state"], "works", "{reply}");
    assert!(tendon.text(&["doctor"]).contains("tier sandbox"));
}

/// Starts a verify of `command`, which runs for ever; returns when `line` of it runs.
fn verify_for_ever(
    tendon: &Tendon,
    repo: &testkit::GitRepo,
    command: &str,
    line: &str,
) -> std::process::Child {
    repo.file("a", "a").commit("first");
    tendon.text(&["base", "list"]);
    let child =
        tendon.start(&["verify", "--repo", repo.path().to_str().unwrap(), "--check", command, "--json"]);
    wait_until("the command runs", Duration::from_secs(60), || runs(line));
    child
}

#[test]
fn a_runner_that_is_told_to_end_cancels_and_reports() {
    if !can_run() {
        return;
    }
    let (tendon, repo, sleep) = (Tendon::new(), testkit::GitRepo::new(), long_sleep());
    let child = verify_for_ever(&tendon, &repo, &sleep, &sleep);
    let pid = tendon.json(0, &["runner", "status"])["runner"]["pid"].to_string();
    testkit::process::run(command("kill").args(["-TERM", &pid]));
    let ran = Ran::new(child.wait_with_output().unwrap(), &["verify"]);
    ran.expect(130);
    let report: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(report["cancelled"], true);
    assert!(!runs(&sleep));
    wait_until("the runner is gone", Duration::from_secs(20), || {
        !std::path::Path::new("/proc").join(&pid).exists()
    });
    assert_eq!(tendon.json(0, &["branch", "list"])["branches"].as_array().unwrap().len(), 0);
}

#[test]
fn a_killed_runner_leaves_nothing_running_and_the_next_one_tidies_up() {
    if !can_run() {
        return;
    }
    let (tendon, repo, sleep) = (Tendon::new(), testkit::GitRepo::new(), long_sleep());
    let child = verify_for_ever(&tendon, &repo, &sleep, &sleep);
    let pid = tendon.json(0, &["runner", "status"])["runner"]["pid"].to_string();
    testkit::process::run(command("kill").args(["-KILL", &pid]));
    let ran = Ran::new(child.wait_with_output().unwrap(), &["verify"]);
    let error = &serde_json::from_str::<serde_json::Value>(&ran.expect(4).stdout).unwrap()["error"];
    assert_eq!(error["message"], "the runner ended in the middle of its work");
    assert!(error["causes"].is_null(), "{error}");
    let log = tendon.state().join("logs/tendond.log");
    assert!(log.exists() && error["hint"].as_str().unwrap().contains(log.to_str().unwrap()), "{error}");
    wait_until("the command is gone", Duration::from_secs(20), || !runs(&sleep));
    assert_eq!(tendon.json(0, &["branch", "list"])["branches"].as_array().unwrap().len(), 0);
    assert_eq!(tendon.json(0, &["audit", "verify"])["intact"], true);
}

#[test]
fn a_state_directory_without_its_database_is_left_alone() {
    if !can_run() {
        return;
    }
    let (tendon, repo) = (Tendon::new(), testkit::GitRepo::new());
    repo.file("a", "a").commit("first");
    tendon.text(&["branch", "create", "--repo", repo.path().to_str().unwrap(), "--name", "fix"]);
    tendon.run_with(&["branch", "write", "fix", "new"], b"work").expect(0);
    tendon.text(&["runner", "stop"]);
    let (db, away) = (tendon.state().join("tendon.db"), tendon.dir.path().join("away"));
    std::fs::rename(&db, &away).unwrap();
    for empty in [false, true] {
        if empty {
            std::fs::write(&db, "").unwrap();
        }
        let refused = tendon.run(&["branch", "list"]);
        refused.expect(4).says("its database is missing").says("hint: put `tendon.db`");
    }
    std::fs::rename(&away, &db).unwrap();
    assert_eq!(tendon.text(&["branch", "read", "fix", "new"]), "work");
    assert_eq!(tendon.text(&["branch", "exec", "fix", "--", "cat", "a", "new"]), "awork");
}

#[test]
fn no_state_directory_is_made_of_a_directory_in_use() {
    use std::os::unix::fs::PermissionsExt as _;
    if !can_run() {
        return;
    }
    let tendon = Tendon::new();
    let precious = tendon.state().join("tmp/precious");
    std::fs::create_dir_all(precious.parent().unwrap()).unwrap();
    std::fs::write(&precious, "x").unwrap();
    for entries in 1..=2 {
        tendon.run(&["branch", "list"]).expect(2).says("is not a state directory of tendon, and not empty");
        assert!(precious.exists());
        assert_eq!(
            std::fs::read_dir(tendon.state()).unwrap().count(),
            entries,
            "not even a log is made there"
        );
        // A file that others have, too, makes it none.
        std::fs::write(tendon.state().join("lock"), "").unwrap();
    }
    // Nor does a file of the name of ours make it one.
    std::fs::write(tendon.state().join("lock"), "").unwrap();
    tendon.run(&["branch", "list"]).expect(2).says("is not a state directory of tendon, and not empty");
    assert!(precious.exists());
    // An empty one may be anybody's to read; what is made in it is not.
    std::fs::remove_dir_all(tendon.state()).unwrap();
    std::fs::create_dir(tendon.state()).unwrap();
    std::fs::set_permissions(tendon.state(), std::fs::Permissions::from_mode(0o755)).unwrap();
    tendon.text(&["branch", "list"]);
    assert_eq!(std::fs::metadata(tendon.state()).unwrap().permissions().mode() & 0o777, 0o700);
    for entry in std::fs::read_dir(tendon.state()).unwrap().map(Result::unwrap) {
        let mode = entry.metadata().unwrap().permissions().mode();
        assert!(mode & 0o077 == 0 || entry.file_name() == "lock", "{entry:?}: {mode:o}");
    }
}
