//! The main job on real input: a crate from the registry is verified as it is, and once more with a bug put in on a branch.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::setup::{For, setup};
use crate::shell::{Failure, binaries, capture, cargo, program, render, root, run, say, status_of, step};

/// A crate with tests of its own and no dependency in them. Pinned, so that the bug below fits.
const CRATE: &str = "semver";
const VERSION: &str = "1.0.26";
/// The file that the bug goes into.
const FILE: &str = "src/parse.rs";
/// The condition that refuses `01.2.3`.
const GOOD: &str = "if value == 0 && len > 0 {";
/// Off by one: it refuses only `001.2.3`.
const BAD: &str = "if value == 0 && len > 1 {";
/// The check: the crate's own tests.
const CHECK: &str = "cargo test";
/// The branch with the bug.
const BRANCH: &str = "with-a-bug";

/// Runs it all; fails when a step does not end as it must.
pub fn demo() -> Result<(), Failure> {
    setup(For::Demo)?;
    step("Build of tendon, its runner and the agent inside the sandbox");
    run(&mut cargo(&["build", "--workspace", "--bins"]))?;
    let place = fresh_place()?;
    let tendon = Tendon { binary: binaries()?.join("tendon"), state: place.join("state") };
    let repo = fetch(&place)?;

    step(format_args!("1. Verify {CRATE} {VERSION} as it is"));
    say(
        "tendon freezes the directory, makes a branch over the frozen tree, boots a sandbox without network on the branch,\n\
         and runs the crate's own tests there. They pass.\n",
    );
    tendon.expect(0, &["verify", "--repo", &text(&repo), "--check", CHECK])?;

    step("2. Make a branch and put a bug in");
    say(
        "A branch is a copy-on-write view: made at once, whatever the size of the repository. The edit is recorded in the audit.\n",
    );
    tendon.expect(0, &["branch", "create", "--repo", &text(&repo), "--name", BRANCH])?;
    break_it(&tendon)?;

    step("3. Verify the branch");
    say(
        "The same check on the branch. The crate's tests find the bug: the verdict is failed, and the exit status is 1.\n",
    );
    tendon.expect(1, &["verify", "--branch", BRANCH, "--check", CHECK])?;

    step("4. What changed on the branch");
    tendon.expect(0, &["branch", "diff", BRANCH])?;

    step("5. Who changed what: the audit, and the proof that no row was altered or removed");
    tendon.expect(0, &["audit", "log", "--branch", BRANCH, "--limit", "12"])?;
    tendon.expect(0, &["audit", "verify"])?;

    step("6. The directory on the host is as it was");
    let status = capture(git(&repo).args(["status", "--porcelain", "--ignored"]))?;
    if !status.is_empty() {
        return Err(Failure::new(format!("the host's directory changed:\n{status}")));
    }
    say("git status has nothing to say: neither the bug nor a build directory is there.");
    next(&tendon, &repo);
    Ok(())
}

/// The command line under demonstration, with a state directory of its own.
struct Tendon {
    binary: PathBuf,
    state: PathBuf,
}

impl Tendon {
    fn command(&self, args: &[&str]) -> Command {
        let mut command = program(&self.binary);
        command.args(args).env("TENDON_STATE_DIR", &self.state);
        command
    }

    /// The command as a person types it once the binaries are installed.
    fn shown(&self, args: &[&str]) -> String {
        let mut command = program("tendon");
        render(command.args(args))
    }

    /// Shows the command, runs it and checks its exit status.
    fn expect(&self, status: i32, args: &[&str]) -> Result<(), Failure> {
        say(format_args!("$ {}", self.shown(args)));
        match status_of(&mut self.command(args))? {
            found if found == status => Ok(()),
            found => Err(Failure::new(format!("exit status {found} where {status} was expected"))),
        }
    }
}

/// A new directory below the build directory; what earlier demos left there is removed.
fn fresh_place() -> Result<PathBuf, Failure> {
    let all = root().join("target/demo");
    if all.exists() {
        // overlayfs leaves directories that even their owner may not list.
        let _ = program("chmod").args(["-R", "u+rwX"]).arg(&all).stderr(Stdio::null()).status();
        std::fs::remove_dir_all(&all)?;
    }
    let place = all.join(std::process::id().to_string());
    std::fs::create_dir_all(&place)?;
    Ok(place)
}

/// Has cargo download the crate, and makes a git repository of its files.
fn fetch(place: &Path) -> Result<PathBuf, Failure> {
    step(format_args!("Download of {CRATE} {VERSION} from the crate registry, into a git repository"));
    let repo = place.join(CRATE);
    testkit::registry::fetch_crate(CRATE, VERSION, &repo).map_err(Failure::new)?;
    run(git(&repo).args(["init", "--quiet", "--initial-branch=main"]))?;
    run(git(&repo).args(["add", "--all"]))?;
    run(git(&repo).args(["commit", "--quiet", "--message", "semver, as published"]))?;
    Ok(repo)
}

fn git(repo: &Path) -> Command {
    let mut git = program("git");
    git.current_dir(repo).envs([("GIT_CONFIG_NOSYSTEM", "1"), ("GIT_CONFIG_GLOBAL", "/dev/null")]);
    for role in ["AUTHOR", "COMMITTER"] {
        git.env(format!("GIT_{role}_NAME"), "tendon demo")
            .env(format!("GIT_{role}_EMAIL"), "demo@example.org");
    }
    git
}

/// Reads the file from the branch, changes one condition and writes it back: what an agent does, without any sandbox.
fn break_it(tendon: &Tendon) -> Result<(), Failure> {
    let source = capture(&mut tendon.command(&["branch", "read", BRANCH, FILE]))?;
    if source.matches(GOOD).count() != 1 {
        return Err(Failure::new(format!("{FILE} does not have `{GOOD}` just once")));
    }
    let mut write = tendon.command(&["branch", "write", BRANCH, FILE]);
    say(format_args!("$ {} < edited-parse.rs", tendon.shown(&["branch", "write", BRANCH, FILE])));
    let mut child = write.stdin(Stdio::piped()).spawn()?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(source.replace(GOOD, BAD).as_bytes())?;
    }
    let status = child.wait()?;
    if status.success() { Ok(()) } else { Err(Failure::new(format!("the edit ended with {status}"))) }
}

fn next(tendon: &Tendon, repo: &Path) {
    step("Try next");
    say(format_args!(
        "  export PATH=\"{bin}:$PATH\" TENDON_STATE_DIR=\"{state}\"\n  \
         tendon verify --repo . --check \"cargo test\"             your own project, uncommitted changes included\n  \
         tendon branch fork {BRANCH} --name second-try      a branch of the branch\n  \
         tendon branch exec {BRANCH} -- cargo test --test test_version\n  \
         tendon audit sql \"select actor, op, path from audit\"\n  \
         tendon doctor                                        what this machine can enforce\n\n\
         The crate is in {repo}; all of it goes with `rm -r target/demo`.",
        bin = tendon.binary.parent().unwrap_or(Path::new(".")).display(),
        state = tendon.state.display(),
        repo = repo.display(),
    ));
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}
