//! What a hand and its processes go through when clients vanish, do not read, or leave things running.

#![allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a test: it panics when something is off")]

mod common;

use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use common::{Tendon, can_run};
use testkit::{GitRepo, Need, have_all};

fn with_branch() -> (Tendon, GitRepo) {
    let (tendon, repo) = (Tendon::new(), GitRepo::new());
    repo.file("a.txt", "one\n").commit("first");
    tendon.text(&["branch", "create", "--repo", repo.path().to_str().unwrap(), "--name", "fix"]);
    (tendon, repo)
}

#[test]
fn a_fork_whose_client_vanishes_does_not_leave_the_command_frozen() {
    if !can_run() || !have_all(&[Need::Cgroup]) {
        return;
    }
    let (tendon, _repo) = with_branch();
    // Enough files that the copying takes a while.
    let script = "for n in $(seq 2000); do echo $n > file-$n; done; \
                  n=0; while true; do n=$((n+1)); echo $n > count; sleep 0.02; done";
    let mut child = tendon.start(&["branch", "exec", "fix", "--", "sh", "-c", script]);
    let count = || tendon.run(&["branch", "read", "fix", "count"]).stdout;
    testkit::wait_until("the command counts", Duration::from_secs(60), || !count().is_empty());
    for round in 0..8 {
        let mut client = UnixStream::connect(tendon.state().join("run/tendond.sock")).unwrap();
        let request = "POST /v1/branches/fix/fork HTTP/1.1\r\nhost: tendon\r\ncontent-type: application/json\r\n\
                       content-length: 2\r\n\r\n{}";
        client.write_all(request.as_bytes()).unwrap();
        std::thread::sleep(Duration::from_millis(round * 4));
        drop(client);
    }
    let before = count();
    testkit::wait_until("the command goes on", Duration::from_secs(60), || count() != before);
    common::signal(&child, "INT");
    child.wait().unwrap();
}

#[test]
fn a_client_that_is_told_to_end_still_prints_the_record() {
    if !can_run() {
        return;
    }
    let (tendon, _repo) = with_branch();
    for how in ["TERM", "HUP"] {
        let child = tendon.start(&["--json", "branch", "exec", "fix", "--", "sleep", "1000"]);
        let running = || tendon.json(0, &["runner", "status"])["runner"]["running"].as_u64().unwrap();
        testkit::wait_until("the command runs", Duration::from_secs(60), || running() == 1);
        common::signal(&child, how);
        let ran = common::Ran::new(child.wait_with_output().unwrap(), &[how]);
        ran.expect(130);
        let record: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
        assert_eq!(record["outcome"]["how"], "cancelled", "{record}");
        let child = tendon.start(&["--json", "verify", "--branch", "fix", "--check", "sleep 1000"]);
        testkit::wait_until("the check runs", Duration::from_secs(60), || running() == 1);
        common::signal(&child, how);
        let ran = common::Ran::new(child.wait_with_output().unwrap(), &[how]);
        ran.expect(130);
        let record: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
        assert_eq!(record["cancelled"], true, "{record}");
    }
    let status = |name: &str| tendon.text(&["audit", "log", "--branch", name]);
    let before = status("fix");
    tendon.text(&["branch", "drop", "fix"]);
    assert!(status("fix").starts_with(&before), "the rows of a dropped branch are found by its name");
}

/// Writes files of a megabyte for ever.
const GROW: &str = "g=0; while true; do g=$((g+1)); head -c 1000000 /dev/zero > grow$g; sleep 0.02; done";

fn lingering(tendon: &Tendon) -> u64 {
    tendon.json(0, &["runner", "status"])["runner"]["lingering"].as_u64().unwrap()
}

#[test]
fn background_processes_are_held_to_the_disk_limit() {
    if !can_run() {
        return;
    }
    let (tendon, _repo) = with_branch();
    let script = format!("({GROW}) > /dev/null 2>&1 &");
    tendon.text(&["branch", "exec", "fix", "--disk", "20MiB", "--", "sh", "-c", &script]);
    assert_eq!(lingering(&tendon), 1);
    testkit::wait_until("the background process is ended", Duration::from_secs(60), || {
        lingering(&tendon) == 0
    });
    let next = tendon.run(&["branch", "exec", "fix", "--", "true"]);
    next.expect(0).says("made the branch larger than it may be and were ended");
    // It is told once.
    assert!(!tendon.run(&["branch", "exec", "fix", "--", "true"]).stderr.contains("larger than"));
}

#[test]
fn a_client_that_does_not_read_does_not_switch_the_limits_off() {
    if !can_run() {
        return;
    }
    let (tendon, _repo) = with_branch();
    let script = format!("({GROW}) & exec yes");
    let mut child = tendon.start(&["branch", "exec", "fix", "--disk", "20MiB", "--", "sh", "-c", &script]);
    let running = || tendon.json(0, &["runner", "status"])["runner"]["running"].as_u64().unwrap();
    testkit::wait_until("the command runs", Duration::from_secs(60), || running() == 1);
    testkit::wait_until("the command is ended", Duration::from_secs(60), || running() == 0);
    assert_eq!(lingering(&tendon), 0);
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn what_is_hard_to_see_counts_as_disk_space() {
    if !can_run() {
        return;
    }
    let (tendon, _repo) = with_branch();
    let unlinked = "for n in 1 2 3 4 5 6; do (exec 3> u$n; rm u$n; head -c 8000000 /dev/zero >&3; sleep 60) & done; wait";
    let deep = "n=0; while [ $n -lt 1000 ]; do mkdir d; cd -P d; n=$((n+1)); done; \
                while true; do n=$((n+1)); head -c 1000000 /dev/zero > f$n; sleep 0.02; done";
    let empty = "n=0; while true; do n=$((n+1)); : > e$n; done";
    for (what, script) in [("unlinked", unlinked), ("deep", deep), ("empty", empty)] {
        let ran = tendon.run(&["branch", "exec", "fix", "--disk", "20MiB", "--", "sh", "-c", script]);
        assert!(ran.stderr.contains("disk limit"), "{what}: {}", ran.stderr);
        // The branch can be used afterwards.
        tendon.run(&["branch", "exec", "fix", "--", "rm", "-rf", "d"]).expect(0);
    }
}

#[test]
fn a_command_that_is_over_at_once_is_held_to_the_disk_limit() {
    if !can_run() {
        return;
    }
    let (tendon, _repo) = with_branch();
    let exec =
        |script: &str| tendon.run(&["branch", "exec", "fix", "--disk", "1MiB", "--", "sh", "-c", script]);
    let ran = exec("for n in 1 2 3; do head -c 800000 /dev/zero > f$n; done");
    assert!(ran.status != 0 && ran.stderr.contains("disk limit"), "{:?} {}", ran.status, ran.stderr);
    tendon.run(&["branch", "exec", "fix", "--", "sh", "-c", "rm f*"]).expect(0);
    exec("head -c 3000000 /dev/zero > f").expect(137).says("disk limit");
    // Outside of the branch only a file's size is limited: what the number means is told.
    exec("head -c 3000000 /dev/zero > /tmp/f; exit $?").expect(153).says("the disk limit, 1.0 MiB");
}

#[test]
fn what_a_command_wrote_is_its_own_also_where_an_edit_replaces_it() {
    if !can_run() {
        return;
    }
    let (tendon, _repo) = with_branch();
    let script = "echo 1 > mine; mkdir -p dir; echo 2 > dir/mine; echo; until [ -e go ]; do sleep 0.05; done";
    let mut child = tendon.start(&["branch", "exec", "fix", "--", "sh", "-c", script]);
    let read = |path: &str| tendon.run(&["branch", "read", "fix", path]).stdout;
    testkit::wait_until("the command writes", Duration::from_secs(60), || read("dir/mine") == "2\n");
    tendon.run_with(&["branch", "write", "fix", "mine"], b"edited\n").expect(0);
    tendon.text(&["branch", "rm", "fix", "dir"]);
    tendon.run_with(&["branch", "write", "fix", "go"], b"").expect(0);
    child.wait().unwrap();
    let sql =
        "select cast(path as text), op, substr(actor, 1, 4) from audit where path is not null order by seq";
    let rows = tendon.json(0, &["audit", "sql", sql])["rows"].to_string();
    let want =
        r#"[["mine","add","exec"],["mine","modify","cli:"],["dir","add","exec"],["dir/mine","add","exec"]"#;
    assert!(rows.starts_with(want) && rows.contains(r#"["dir","delete","cli:"]"#), "{rows}");
}

#[test]
fn the_disk_is_kept_from_filling_up() {
    if !can_run() || !have_all(&[Need::Root]) {
        return;
    }
    let tendon = Tendon::new();
    let disk = SmallDisk::new(&tendon.state());
    let repo = GitRepo::new();
    repo.file("a.txt", "one\n").commit("first");
    tendon.text(&["branch", "create", "--repo", repo.path().to_str().unwrap(), "--name", "fix"]);
    let script = "n=0; \
                  while [ $(stat -f -c %a .) -gt 1200 ]; do n=$((n+1)); head -c 1000000 /dev/zero > f$n; done; \
                  while true; do n=$((n+1)); head -c 20000 /dev/zero > f$n; sleep 0.1; done";
    let ran = tendon.run(&["branch", "exec", "fix", "--", "sh", "-c", script]);
    assert!(ran.stderr.contains("free disk space"), "{}", ran.stderr);
    // Nothing more is started, and what is dropped can be.
    tendon.run(&["branch", "exec", "fix", "--", "true"]).expect(125).says("nearly full");
    tendon.text(&["branch", "drop", "fix"]);
    tendon.run(&["runner", "stop"]).expect(0);
    drop(disk);
}

/// A file system of 128 MiB.
struct SmallDisk(std::path::PathBuf);

impl SmallDisk {
    fn new(at: &std::path::Path) -> Self {
        std::fs::create_dir_all(at).unwrap();
        let mount = testkit::process::command("mount")
            .args(["-t", "tmpfs", "-o", "size=128m,mode=0700", "small"])
            .arg(at)
            .status();
        assert!(mount.unwrap().success());
        Self(at.to_owned())
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = testkit::process::command("umount").arg("--lazy").arg(&self.0).status();
    }
}

#[test]
fn what_can_not_be_captured_fails_a_verify_and_refuses_a_fork() {
    if !can_run() {
        return;
    }
    let (tendon, repo) = with_branch();
    let nest =
        "n=$(printf 'n%.0s' $(seq 240)); for i in $(seq 14); do mkdir $n; cd -P $n; done; echo hidden > file";
    repo.file("nest.sh", nest);
    let args = ["verify", "--repo", repo.path().to_str().unwrap(), "--check", "sh nest.sh"];
    let shown = tendon.run(&args);
    assert!(shown.expect(1).stdout.contains("holds what can't be captured"), "{}", shown.stdout);
    let report = tendon.json(1, &args);
    assert_eq!(report["passed"], false);
    tendon.run(&["branch", "exec", "fix", "--", "sh", "-c", nest]).expect(0).says("can't be captured");
    tendon.run(&["branch", "fork", "fix"]).expect(3).says("can't be captured");
    tendon.run(&["branch", "export", "fix", "--tar", "-"]).expect(3).says("can't be captured");
    assert!(tendon.text(&["branch", "diff", "fix"]).contains("can't be captured"));
    tendon.text(&["branch", "exec", "fix", "--", "sh", "-c", "rm -rf nnnn*"]);
    tendon.run(&["branch", "fork", "fix"]).expect(0);
}

#[test]
fn what_a_command_left_running_writes_is_not_the_next_ones_alone() {
    if !can_run() {
        return;
    }
    let (tendon, _repo) = with_branch();
    let exec = |script: &str| {
        let ran = tendon.run(&["branch", "exec", "--json", "fix", "--", "sh", "-c", script]);
        let report: serde_json::Value = serde_json::from_str(&ran.expect(0).stdout).unwrap();
        format!("exec:{}", report["report"]["exec"].as_str().or(report["exec"].as_str()).unwrap())
    };
    // Writes one file soon, before the next command, and one while that runs.
    let first = exec(
        "(sleep 0.3; echo 1 > before; until [ -e go ]; do sleep 0.05; done; echo 2 > beside; sleep 60) > /dev/null 2>&1 &",
    );
    std::thread::sleep(Duration::from_millis(800));
    let second = exec("echo > go; until [ -e beside ]; do sleep 0.05; done");
    let sql = "select cast(path as text) as path, actor from audit where op = 'add' and path in \
               (cast('before' as blob), cast('go' as blob), cast('beside' as blob))";
    let rows = tendon.json(0, &["audit", "sql", sql])["rows"].clone();
    let by = |path: &str| {
        let row = rows
            .as_array()
            .unwrap()
            .iter()
            .find(|row| row[0] == path)
            .unwrap_or_else(|| panic!("{path}: {rows}"));
        row[1].as_str().unwrap().to_owned()
    };
    assert_eq!(by("before"), first);
    // Either may have.
    assert_eq!((by("go"), by("beside")), (format!("{second}+{first}"), format!("{second}+{first}")));
}

#[test]
fn a_long_audit_is_printed_whole_or_says_how_to_go_on() {
    if !can_run() {
        return;
    }
    let (tendon, _repo) = with_branch();
    tendon.text(&["branch", "exec", "fix", "--", "sh", "-c", "for n in $(seq 2200); do : > f$n; done"]);
    let all = tendon.json(0, &["audit", "log", "--limit", "100000"]);
    let rows = all["rows"].as_array().unwrap();
    assert!(rows.len() > 2_200 && all["next"].is_null(), "{}", rows.len());
    assert!(rows.iter().enumerate().all(|(n, row)| row["seq"] == n + 1));
    let part = tendon.json(0, &["audit", "log", "--limit", "1500"]);
    assert_eq!((part["rows"].as_array().unwrap().len(), part["next"].as_u64()), (1500, Some(1500)));
    let count = rows.len().to_string();
    let exact = tendon.run(&["audit", "log", "--limit", &count]);
    assert!(!exact.expect(0).stderr.contains("more"), "{}", exact.stderr);
    tendon.run(&["audit", "log", "--limit", "2000"]).expect(0).says("there is more: --since 2000");
}
