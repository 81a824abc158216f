//! A host that has control groups of version 2 only, as Debian 12 and Ubuntu 24.04 are: Debian's kernel in QEMU. The guest
//! (`src/bin/v2-guest.rs`) plays init, the service manager and the users, and tells how each case went.

use std::collections::BTreeMap;
use std::time::Duration;

use heavy::guest::init::UP;
use heavy::vm::{Machine, Root};
use testkit::process::binary;
use testkit::{Need, have_all, temp_dir};

/// All cases. What the guest does not mention has failed.
const CASES: [&str; 28] = [
    "root-doctor",
    "root-report",
    "root-memory",
    "root-pids",
    "root-timeout",
    "root-killed",
    "root-is-where-it-was",
    "login-doctor",
    "login-limit-refused",
    "login-default-named",
    "scope-doctor",
    "scope-report",
    "scope-memory",
    "scope-pids",
    "scope-killed",
    "scope-shell",
    "terminal-doctor",
    "terminal-memory",
    "terminal-killed",
    "given-doctor",
    "given-memory",
    "given-killed",
    "sudo-killed",
    "terminal-is-where-it-was",
    "userns-off-doctor",
    "userns-off-verify",
    "userns-off-root-doctor",
    "userns-off-root-verify",
];
/// A boot and all cases take about a minute on a quiet machine.
const PATIENCE: Duration = Duration::from_secs(600);

#[test]
fn a_host_with_version_2_only_holds_every_promise() {
    if !have_all(&[Need::Qemu, Need::Bwrap]) {
        return;
    }
    let dir = temp_dir("v2-host");
    let root = Root::new(&dir.path().join("root"));
    root.write("etc/passwd", "root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n");
    root.write("etc/group", "root:x:0:\nuser:x:1000:\n");
    root.programs(&["sh", "bwrap", "git", "true", "sleep", "setsid", "dd"]);
    for name in ["tendon", "tendond", "hand"] {
        root.install(&binary(name), &format!("usr/bin/{name}"));
    }
    root.install(&binary("v2-guest"), "usr/bin/v2-guest");
    let init = dir.path().join("root/usr/bin/v2-guest");
    let output = Machine::boot(&root, &init, dir.path(), UP).output(PATIENCE);

    let mut went: BTreeMap<&str, &str> = BTreeMap::new();
    for line in &output {
        let mut words = line.splitn(3, ' ');
        if let (Some("case"), Some(name), Some(how)) = (words.next(), words.next(), words.next()) {
            went.insert(name, how);
        }
    }
    let failed: Vec<String> = CASES
        .iter()
        .map(|name| (name, went.get(name).copied().unwrap_or("was not reached")))
        .filter(|(_, how)| !how.starts_with("ok"))
        .map(|(name, how)| format!("{name}: {how}"))
        .collect();
    let all = output.join("\n");
    assert!(failed.is_empty(), "{}\n--- the guest's serial line\n{all}", failed.join("\n"));
    let unknown: Vec<_> = went.keys().filter(|name| !CASES.contains(name)).collect();
    assert!(unknown.is_empty(), "cases that this test does not know: {unknown:?}");
}
