//! Files that are open, mapped, renamed or removed behave on a branch as they do on the file system below it.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use heavy::tendon::Tendon;
use testkit::process::{command, run};
use testkit::{Need, fixtures::write, have_all, temp_dir};

const PROGRAM: &str = include_str!("../src/semantics.c");
const FILES: &[&str] = &[
    "unlinked",
    "renamed",
    "reader",
    "mapped",
    "mapped-before",
    "appended",
    "replaced",
    "locked",
    "attributes",
    "links",
];
/// Entries of the directory that is listed while it is emptied.
const ENTRIES: usize = 20_000;

/// Where overlayfs is known to differ: a read-only shared mapping of a base's file that was made before the file's first write
/// keeps showing the base's pages.
const KNOWN_TO_DIFFER: &[&str] = &["mapped-before, file of the base: read-only map sees"];

#[test]
fn open_files_on_a_branch_behave_as_on_the_file_system_below() {
    if !have_all(&[Need::Bwrap]) {
        return;
    }
    let dir = temp_dir("open-files");
    let (plain, source) = (dir.path().join("plain"), dir.path().join("source"));
    fill(&source);
    run(command("cp").arg("--archive").arg(&source).arg(&plain));
    let expected = run(command("./semantics").current_dir(&plain));
    let expected = String::from_utf8_lossy(&expected.stdout).into_owned();
    assert!(expected.lines().count() > 150, "{expected}");

    let tendon = Tendon::new(&dir.path().join("state"));
    let _runner = tendon.start_runner();
    let branch = tendon.text(&["branch", "create", "--files", &source.to_string_lossy()]);
    let found = tendon.text(&["branch", "exec", &branch, "--", "./semantics"]);
    let differences = differences(expected.trim_end(), &found);
    assert!(
        differences.is_empty(),
        "on the branch, against the file system below:\n{}",
        differences.join("\n")
    );
}

/// Lines of one that the other lacks, less the known ones.
fn differences(expected: &str, found: &str) -> Vec<String> {
    let known = |line: &&str| !KNOWN_TO_DIFFER.iter().any(|known| line.starts_with(known));
    let lines = |text| -> BTreeSet<&str> { str::lines(text).filter(known).collect() };
    let (left, right) = (lines(expected), lines(found));
    let missing = left.difference(&right).map(|line| format!("- {line}"));
    missing.chain(right.difference(&left).map(|line| format!("+ {line}"))).collect()
}

fn fill(source: &Path) {
    for name in FILES {
        write(&source.join("base").join(name), "content of the base");
    }
    write(&source.join("base/dir/inner/file"), "content of the base");
    for n in 0..ENTRIES {
        write(&source.join(format!("base/list/entry-{n:05}")), "");
    }
    let program = source.join("semantics.c");
    write(&program, PROGRAM);
    run(command("cc").args(["-O1", "-w", "-static", "-o"]).arg(source.join("semantics")).arg(&program));
    std::fs::set_permissions(source.join("semantics"), std::fs::Permissions::from_mode(0o755))
        .expect("chmod");
}
