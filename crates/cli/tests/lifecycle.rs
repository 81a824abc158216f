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
