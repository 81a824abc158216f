//! pjdfstest, a public suite of POSIX file system tests, on a mounted branch: it passes what the file system below passes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use proto::verify::InlineFile;
use rustix::fs::CWD;
use rustix::mount::{MoveMountFlags, move_mount};
use testkit::process::{command, run};
use testkit::{Need, have_all, private_mounts, temp_dir};
use vfs::{Actor, EngineChoice, Store, StoreOptions};

/// The suite, from the crate registry.
const VERSION: &str = "0.2.2";
/// Users that every Debian has, for the tests that change who they are.
const CONFIGURATION: &str = "\
[features]
posix_fallocate = {}
utime_now = {}
utimensat = {}

[settings]
naptime = 0.01

[dummy_auth]
entries = [[\"nobody\", \"nogroup\"], [\"daemon\", \"daemon\"]]
";
/// The suite has this many cases at least; fewer outcomes mean that they were not read.
const CASES_MIN: usize = 350;

#[test]
fn overlay_branches_pass_pjdfstest() {
    if have_all(&[Need::Root, Need::Overlay, Need::Registry]) {
        private_mounts("overlay_branches_pass_pjdfstest", || {
            let differences = compare(EngineChoice::Overlay);
            let unknown: Vec<&String> = differences.iter().filter(|line| !overlay_may(line)).collect();
            assert!(unknown.is_empty(), "{unknown:#?}");
        });
    }
}

#[test]
fn copy_branches_pass_pjdfstest() {
    if have_all(&[Need::Root, Need::Registry]) {
        private_mounts("copy_branches_pass_pjdfstest", || {
            let differences = compare(EngineChoice::Copy);
            assert!(differences.is_empty(), "{differences:#?}");
        });
    }
}

/// What overlayfs is known for: the suite's character device is 0:0, which is overlayfs's own mark for a removed name and
/// refused; and the most links that a file may have are not told.
fn overlay_may(line: &str) -> bool {
    line.contains("char") || line.starts_with("link::link_count_max ")
}

/// Cases whose outcome on a branch is not the one on the file system below.
fn compare(engine: EngineChoice) -> Vec<String> {
    let program = install();
    let dir = temp_dir("pjdfstest");
    let (plain, mounted) = (dir.path().join("plain"), dir.path().join("mounted"));
    for place in [&plain, &mounted] {
        std::fs::create_dir(place).expect("mkdir");
    }
    let configuration = dir.path().join("pjdfstest.toml");
    std::fs::write(&configuration, CONFIGURATION).expect("write");

    let options = StoreOptions { engine, owner: Some((60600, 60600)), clock: Arc::new(vfs::SystemClock) };
    let store = Store::open(&dir.path().join("state"), options).expect("a store");
    let file = InlineFile {
        path: "readme".parse().expect("a path"),
        content: proto::path::JsonBytes::new(b"x"),
        executable: false,
    };
    let base = store.freeze_files(&[file]).expect("a base");
    let branch = store.create_branch(&base.id, None, &Actor::cli(0)).expect("a branch");
    let root = store.mount(&branch.id).expect("a mount");
    let mount = root.mount_clone().expect("a mount to attach");
    move_mount(&mount, "", CWD, &mounted, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH).expect("it is attached");

    let expected = outcomes(&program, &configuration, &plain);
    let found = outcomes(&program, &configuration, &mounted);
    assert!(expected.len() >= CASES_MIN, "only {} cases", expected.len());
    assert_eq!(expected.len(), found.len(), "as many cases");
    let differ = expected.iter().filter(|(case, outcome)| found.get(*case) != Some(outcome));
    differ
        .map(|(case, outcome)| format!("{case} {outcome} below, {:?} on the branch", found.get(case)))
        .collect()
}

/// The suite's program, installed once per checkout.
fn install() -> PathBuf {
    let target = testkit::process::target_dir();
    let tools = target.join("tools");
    let program = tools.join("bin/pjdfstest");
    if !program.exists() {
        let mut install = command("cargo");
        install
            .args(["install", "--quiet", "--locked", "--version", VERSION, "pjdfstest", "--root"])
            .arg(&tools);
        // From outside the workspace, whose build settings are not this program's.
        run(install.arg("--target-dir").arg(target.join("tools-build")).current_dir("/"));
    }
    program
}

/// `ok`, `FAILED` or `skipped` by case.
fn outcomes(program: &Path, configuration: &Path, place: &Path) -> BTreeMap<String, String> {
    let output =
        command(program).arg("-c").arg(configuration).arg("-p").arg(place).output().expect("it starts");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let word = |line: &str| {
        let mut words = line.split_whitespace();
        let (case, outcome) = (words.next()?, words.next_back()?);
        let known = case.contains("::") && matches!(outcome, "ok" | "FAILED" | "skipped");
        known.then(|| (case.to_owned(), outcome.to_owned()))
    };
    text.lines().filter_map(word).collect()
}
