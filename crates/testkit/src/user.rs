//! Running parts of a test as a user without privileges, also when the test run itself is root's.

use std::os::unix::fs::{PermissionsExt as _, chown};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;

use crate::fixtures::temp_dir;
use crate::process::{command, variable};

/// A user id that owns nothing on any machine.
pub const OTHER_UID: u32 = 60999;
/// Its group.
pub const OTHER_GID: u32 = 60999;
/// Set for the copy of a test that [`rootless`] starts: the name of that test.
const CHILD: &str = "TESTKIT_ROOTLESS_TEST";
/// The same for [`private_mounts`].
const PRIVATE: &str = "TESTKIT_PRIVATE_MOUNTS_TEST";

/// Whether this process is root.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Makes `command` run as [`OTHER_UID`] in [`OTHER_GID`] with no other groups. Needs root; without it the command
/// stays the caller's, who has no privileges either.
pub fn as_other_user(command: &mut Command) -> &mut Command {
    if is_root() {
        // The standard library drops supplementary groups itself when root sets a uid.
        command.uid(OTHER_UID).gid(OTHER_GID);
    }
    command
}

/// Runs `body` as a user without privileges. `test` is the full name of the calling test as the test runner knows
/// it (`module::tests::name`, without the crate). Root starts the same test binary again as [`OTHER_UID`], with its own `HOME` and `TMPDIR`.
///
/// ```no_run
/// testkit::rootless("mount::tests::an_overlay_mounts_rootless", || assert!(!testkit::user::is_root()));
/// ```
pub fn rootless(test: &str, body: impl FnOnce()) {
    if !is_root() || variable(CHILD).as_deref() == Some(test) {
        return body();
    }
    let dir = temp_dir("rootless");
    let executable = dir.path().join("test");
    let own = std::env::current_exe().expect("a test knows its own path");
    std::fs::copy(&own, &executable).expect("the test binary can be copied");
    std::fs::set_permissions(&executable, std::fs::Permissions::from_mode(0o755)).expect("chmod");
    // Binaries of the workspace are found beside the test: copy those too, the build directory may be closed to others.
    for name in ["tendon", "tendond", "hand"] {
        let beside = own.ancestors().skip(1).take(3).map(|at| at.join(name)).find(|path| path.is_file());
        if let Some(binary) = beside {
            std::fs::copy(binary, dir.path().join(name)).expect("a binary can be copied");
        }
    }
    give_to_other_user(dir.path());
    let home = dir.path().join("home");
    std::fs::create_dir(&home).expect("mkdir");
    give_to_other_user(&home);
    let mut child = command(&executable);
    child.args(["--exact", test, "--nocapture", "--test-threads=1"]);
    child.env(CHILD, test).env("HOME", &home).env("TMPDIR", &home).current_dir(&home);
    child.env_remove("XDG_STATE_HOME").env_remove("XDG_RUNTIME_DIR");
    passes(test, as_other_user(&mut child));
}

/// Runs `body` as root in a mount namespace of its own, so that whatever it mounts is gone with it. `test` is the full
/// name of the calling test, as for [`rootless`]. Panics when this process is not root: ask for [`crate::Need::Root`] first.
pub fn private_mounts(test: &str, body: impl FnOnce()) {
    assert!(is_root(), "a mount namespace of its own needs root");
    if variable(PRIVATE).as_deref() == Some(test) {
        return body();
    }
    let own = std::env::current_exe().expect("a test knows its own path");
    let mut child = command("unshare");
    child.args(["--mount", "--propagation", "private", "--"]).arg(own);
    child.args(["--exact", test, "--nocapture", "--test-threads=1"]).env(PRIVATE, test);
    passes(test, &mut child);
}

/// Runs a copy of a test, shows what it printed, and panics unless it ran and passed.
#[expect(clippy::print_stderr, reason = "what the copy printed belongs to the test's own output")]
fn passes(test: &str, child: &mut Command) {
    let output = child.output().expect("the copy of the test starts");
    let text =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "the copy of {test} failed:\n{text}");
    assert!(text.contains("1 passed"), "no test is called `{test}`:\n{text}");
    eprintln!("{text}");
}

/// Makes a file or directory [`OTHER_UID`]'s, if this process can.
pub fn give_to_other_user(path: &Path) {
    if is_root() {
        chown(path, Some(OTHER_UID), Some(OTHER_GID)).expect("root can chown");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rootless_body_has_no_privileges() {
        rootless("user::tests::a_rootless_body_has_no_privileges", || {
            assert!(!is_root());
            std::fs::write(temp_dir("mine").path().join("file"), "x").unwrap();
        });
    }
}
