//! Starting programs from tests, finding the workspace's own binaries, and waiting for a condition.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

/// A command with the caller's environment; tests may change it as they like. It is found where root finds it, too:
/// `mkfs` is in no user's `PATH` on Debian.
#[expect(clippy::disallowed_methods, reason = "tests start programs here, and nowhere else")]
pub fn command(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command.env(
        "PATH",
        with_sbin(&variable("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".to_owned())),
    );
    command
}

/// A search path, with the directories of programs for root at its end.
fn with_sbin(path: &str) -> String {
    let missing = ["/usr/sbin", "/sbin"].into_iter().filter(|dir| path.split(':').all(|known| known != *dir));
    std::iter::once(path).chain(missing).collect::<Vec<_>>().join(":")
}

/// An environment variable of the test run.
#[expect(clippy::disallowed_methods, reason = "the one place where tests read the environment")]
pub fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Runs a command to its end and returns its output; panics with all that it wrote unless it exits 0.
pub fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?} does not start: {error}"));
    assert!(
        output.status.success(),
        "{command:?} ended with {}\n--- stdout\n{}\n--- stderr\n{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    output
}

/// Where cargo put a binary of this workspace (`tendon`, `tendond`, `hand`): beside the running test's own directory.
/// Panics when it has not been built: `cargo xtask test` builds all of them first.
pub fn binary(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("a test knows its own path");
    let found = test.ancestors().skip(1).take(3).map(|dir| dir.join(name)).find(|path| path.is_file());
    found.unwrap_or_else(|| {
        panic!("`{name}` is not built beside {}: run `cargo build --workspace --bins` first", test.display())
    })
}

/// Waits until `condition` holds, looking every 10 ms; panics with `what` when `limit` has passed.
pub fn wait_until(what: &str, limit: Duration, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < limit, "{what}: not within {limit:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Cargo's target directory, for what tests build or fetch once per checkout.
pub fn target_dir() -> PathBuf {
    let test = std::env::current_exe().expect("a test knows its own path");
    // TARGET/HOST/PROFILE/deps/TEST
    let target = test.ancestors().nth(4).expect("a test is deep in the target directory");
    target.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_for_root_are_found_by_users() {
        assert_eq!(with_sbin("/usr/bin:/bin"), "/usr/bin:/bin:/usr/sbin:/sbin");
        assert_eq!(with_sbin("/sbin:/usr/bin:/usr/sbin"), "/sbin:/usr/bin:/usr/sbin");
    }
}
