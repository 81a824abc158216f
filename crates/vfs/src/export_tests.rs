//! Tests of diff and export, against git itself.

use std::collections::BTreeMap;
use std::fs::Permissions;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use proptest::prelude::*;
use proto::path::TreePath;

use super::*;
use crate::base::GitSource;
use crate::diff::DiffFormat;
use crate::git::Git;
use crate::world::{Branch, World, as_git, copy_tree, shown};

const NAMES: [&[u8]; 14] = [
    b"a",
    b"b",
    b"d/1",
    b"d/2",
    b"d/e/3",
    b"sp ace",
    b"tab\t",
    b"new\nline",
    b"quo\"te",
    b"back\\slash",
    b"\xff\xfe",
    "grüße".as_bytes(),
    b"-dash",
    b"x/\xc3/y\n",
];

#[derive(Clone, Debug)]
enum Thing {
    File { bytes: Vec<u8>, executable: bool },
    Link(Vec<u8>),
}

type Tree = BTreeMap<usize, Thing>;

fn trees() -> impl Strategy<Value = Tree> {
    let bytes = prop_oneof![
        4 => "[a-c\n]{0,60}".prop_map(String::into_bytes),
        2 => proptest::collection::vec(any::<u8>(), 0..200),
        1 => Just(Vec::new()),
        // Long enough for git to see a rename.
        2 => (0..3_u8).prop_map(|n| format!("line {n}\n").repeat(40).into_bytes()),
    ];
    let thing = prop_oneof![
        6 => (bytes, any::<bool>()).prop_map(|(bytes, executable)| Thing::File { bytes, executable }),
        1 => proptest::collection::vec(1..=255_u8, 1..20).prop_map(Thing::Link),
    ];
    proptest::collection::btree_map(0..NAMES.len(), thing, 0..10)
}

fn make(root: &Path, tree: &Tree) {
    for (n, thing) in tree {
        let at = root.join(std::ffi::OsStr::from_bytes(NAMES[*n]));
        std::fs::create_dir_all(at.parent().unwrap()).unwrap();
        match thing {
            Thing::File { bytes, executable } => {
                std::fs::write(&at, bytes).unwrap();
                let mode = if *executable { 0o755 } else { 0o644 };
                std::fs::set_permissions(&at, Permissions::from_mode(mode)).unwrap();
            }
            Thing::Link(target) => symlink(std::ffi::OsStr::from_bytes(target), &at).unwrap(),
        }
    }
}

fn clear(root: &Path) {
    for entry in std::fs::read_dir(root).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_dir() {
            std::fs::remove_dir_all(entry.path()).unwrap();
        } else {
            std::fs::remove_file(entry.path()).unwrap();
        }
    }
}

fn init(dir: &Path) -> Git {
    Git::new().run(&["init".as_ref(), "-q".as_ref(), dir.as_os_str()]).unwrap();
    Git::at(&dir.join(".git")).work_tree(dir)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_patch_turns_the_base_into_the_branch(before in trees(), after in trees()) {
        let mut world = World::new(|root| make(root, &before));
        let branch = world.copy();
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("target");
        copy_tree(branch.root(), &target);
        clear(branch.root());
        make(branch.root(), &after);
        world.scan(&branch);
        let patch = patch(&world, &branch);
        let git = init(&target);
        if !patch.is_empty() {
            git.run_with(&["apply", "--whitespace=nowarn", "-"], &patch, &|_| ()).unwrap();
        }
        prop_assert_eq!(as_git(&shown(&target)), as_git(&shown(branch.root())));
    }
}

#[test]
fn names_and_letters_are_gits() {
    let mut world = World::new(|root| {
        std::fs::write(root.join("gone"), "line\n".repeat(30)).unwrap();
        std::fs::write(root.join("a"), "a").unwrap();
        std::fs::write(root.join(".gitignore"), "*.log\n").unwrap();
    });
    let branch = world.copy();
    assert_eq!(world.store.diff(&branch.id, DiffFormat::NameStatus).unwrap(), b"");
    std::fs::rename(branch.at("gone"), branch.at("here")).unwrap();
    branch.write("new\nline", "n");
    branch.write("x.log", "ignored");
    std::fs::remove_file(branch.at("a")).unwrap();
    symlink("t", branch.at("a")).unwrap();
    std::fs::create_dir(branch.at("empty")).unwrap();
    world.scan(&branch);
    let said = world.store.diff(&branch.id, DiffFormat::NameStatus).unwrap();
    let mut lines: Vec<_> = std::str::from_utf8(&said).unwrap().lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["A\t\"new\\nline\"", "R100\tgone\there", "T\ta"]);
}

/// The same, short enough to be printed when it differs.
fn hashed(root: &Path) -> BTreeMap<String, (&'static str, blake3::Hash)> {
    let hashed =
        |(path, (mode, bytes)): (TreePath, (_, Vec<u8>))| (path.to_string(), (mode, blake3::hash(&bytes)));
    as_git(&shown(root)).into_iter().map(hashed).collect()
}

fn patch(world: &World, branch: &Branch) -> Vec<u8> {
    let mut out = Vec::new();
    world.store.export(&branch.id, ExportTarget::Patch(&mut out)).unwrap();
    out
}

/// Text that is larger than what is compared.
fn large(what: &str) -> String {
    let line = format!("a line of {what} that says nothing but is long enough to fill a large file\n");
    line.repeat((crate::limits::DIFF_FILE_BYTES_MAX as usize).div_ceil(line.len()))
}

#[test]
fn large_files_are_told_in_a_line_and_carried_whole_by_a_patch() {
    let mut world = World::new(|root| {
        std::fs::create_dir(root.join("d")).unwrap();
        for name in ["d/changed", "gone", "moved", "shrinks", "to a link", "mode", "same"] {
            std::fs::write(root.join(name), large(name)).unwrap();
        }
        std::fs::write(root.join("grows"), "small\n").unwrap();
        std::fs::write(root.join("small"), "one\n").unwrap();
        symlink("target", root.join("link")).unwrap();
    });
    let branch = world.copy();
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("target");
    copy_tree(branch.root(), &target);
    let base = hashed(&target);
    branch.write("d/changed", &(large("d/changed") + "one more\n"));
    branch.write("new\nline", &large("new"));
    branch.write("copy", &large("new"));
    for gone in ["gone", "to a link", "link"] {
        std::fs::remove_file(branch.at(gone)).unwrap();
    }
    std::fs::rename(branch.at("moved"), branch.at("d/there")).unwrap();
    branch.write("shrinks", "small now");
    branch.write("grows", &large("grows"));
    symlink("t", branch.at("to a link")).unwrap();
    branch.write("link", &large("link"));
    std::fs::set_permissions(branch.at("mode"), Permissions::from_mode(0o755)).unwrap();
    branch.write("small", "two\n");
    world.scan(&branch);
    let names = world.store.diff(&branch.id, DiffFormat::NameStatus).unwrap();
    let mut lines: Vec<_> = std::str::from_utf8(&names).unwrap().lines().collect();
    lines.sort_unstable();
    let told = [
        "A\t\"new\\nline\"",
        "A\tcopy",
        "D\tgone",
        "M\td/changed",
        "M\tgrows",
        "M\tmode",
        "M\tshrinks",
        "M\tsmall",
        "R100\tmoved\td/there",
        "T\tlink",
        "T\tto a link",
    ];
    assert_eq!(lines, told);
    let git = init(&target);
    let diff = world.store.diff(&branch.id, DiffFormat::Unified).unwrap();
    let text = std::str::from_utf8(&diff).unwrap();
    assert!(diff.len() < 8_000 && text.contains("-one\n+two\n"), "{text}");
    assert!(text.contains("Files a/d/changed b/d/changed are too large to show and differ\n"), "{text}");
    assert!(text.contains("rename from moved\nrename to d/there\n"), "{text}");
    let apply = ["apply", "--whitespace=nowarn", "-"];
    git.run_with(&apply, &diff, &|_| ()).expect_err("a diff that does not tell all is not applied");
    assert_eq!(hashed(&target), base);
    let patch = patch(&world, &branch);
    git.run_with(&apply, &patch, &|_| ()).unwrap();
    assert_eq!(hashed(&target), hashed(branch.root()));
    git.run_with(&["apply", "--whitespace=nowarn", "-R", "-"], &patch, &|_| ()).unwrap();
    // git takes a file back to a link as a file, also in its own patches.
    let but_link = |mut files: BTreeMap<_, _>| (files.remove("link"), files).1;
    assert_eq!(but_link(hashed(&target)), but_link(base));
}

#[test]
fn a_diff_above_the_limit_is_refused() {
    let mut world = World::new(|root| std::fs::write(root.join("a"), "a").unwrap());
    let branch = world.copy();
    let text = "x".repeat(crate::limits::DIFF_FILE_BYTES_MAX as usize - 1) + "\n";
    for n in 0..5 {
        branch.write(&format!("new-{n}"), &format!("{n}{}", &text[1..]));
    }
    world.scan(&branch);
    let error = world.store.diff(&branch.id, DiffFormat::Unified).unwrap_err();
    assert!(matches!(error, DiffError::TooLarge(_)), "{error:?}");
    assert_eq!(patch(&world, &branch).iter().filter(|byte| **byte == b'\n').count(), 5 * 7);
}

/// What a field of `/proc/self/status` says, in bytes.
fn memory(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
    line.trim_matches([':', '\t', ' ', 'k', 'B']).parse::<u64>().unwrap() * 1024
}

#[test]
fn a_large_file_is_not_held_in_memory() {
    const CHILD: &str = "VFS_TEST_MEMORY";
    if testkit::process::variable(CHILD).is_none() {
        // In a process of its own, whose memory nothing else uses.
        let mut child = testkit::process::command(std::env::current_exe().unwrap());
        child.args(["--exact", "export::tests::a_large_file_is_not_held_in_memory", "--nocapture"]);
        let output = testkit::process::run(child.env(CHILD, "1"));
        assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"));
        return;
    }
    let mut world = World::new(|root| std::fs::write(root.join("a"), "a").unwrap());
    let branch = world.copy();
    let mut file = io::BufWriter::new(std::fs::File::create(branch.at("large")).unwrap());
    for line in 0..300 << 20 >> 5 {
        writeln!(file, "line {line:>24} ").unwrap();
    }
    file.flush().unwrap();
    drop(file);
    world.scan(&branch);
    let before = memory("VmRSS");
    // The peak begins anew.
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    let diff = world.store.diff(&branch.id, DiffFormat::Unified).unwrap();
    assert!(String::from_utf8_lossy(&diff).contains("too large to show"));
    let report = world.store.export(&branch.id, ExportTarget::Patch(&mut io::sink())).unwrap();
    assert_eq!(report.files, 1);
    let grown = memory("VmHWM").saturating_sub(before);
    assert!(grown < 64 << 20, "{} MiB", grown >> 20);
}

#[test]
fn an_archive_depends_on_the_files_alone_and_keeps_every_name() {
    let tar = || {
        let mut world = World::new(|root| std::fs::write(root.join("a"), "a").unwrap());
        let branch = world.copy();
        std::fs::write(branch.root().join(std::ffi::OsStr::from_bytes(b"\xff\n")), "odd").unwrap();
        branch.write(&["long"; 60].join("/"), "long");
        branch.write("run", "#!");
        std::fs::set_permissions(branch.at("run"), Permissions::from_mode(0o775)).unwrap();
        symlink("t".repeat(300), branch.at("link")).unwrap();
        world.scan(&branch);
        let mut out = Vec::new();
        let report = world.store.export(&branch.id, ExportTarget::Tar(&mut out)).unwrap();
        assert_eq!(report.files, 5);
        (out, as_git(&shown(branch.root())))
    };
    let (first, files) = tar();
    assert_eq!(first, tar().0);
    let dir = tempfile::tempdir().unwrap();
    tar::Archive::new(&first[..]).unpack(dir.path()).unwrap();
    assert_eq!(as_git(&shown(dir.path())), files);
}

/// A repository with two commits and a branch on its second; the repository's configuration and hooks would write
/// `pwned` if anything obeyed them.
fn repository(dir: &Path) -> Git {
    let git = init(dir).config("user.name", "t").config("user.email", "t@t");
    std::fs::write(dir.join("a"), "a\n").unwrap();
    std::fs::write(dir.join("crlf.txt"), "one\r\ntwo\r\n").unwrap();
    git.run(&["add", "."]).unwrap();
    git.run(&["commit", "-q", "-m", "one"]).unwrap();
    std::fs::write(dir.join("d"), "d\n").unwrap();
    std::fs::write(dir.join(".gitattributes"), "*.txt text eol=crlf\n").unwrap();
    git.run(&["add", "--renormalize", "."]).unwrap();
    git.run(&["add", "."]).unwrap();
    git.run(&["commit", "-q", "-m", "two"]).unwrap();
    git
}

fn world_of(repo: &Path) -> (World, Branch) {
    let mut world = World::frozen(|store| {
        let source = GitSource { repo: repo.to_str().unwrap().into(), rev: "HEAD".into() };
        store.freeze_git(&source, &|_| ()).unwrap()
    });
    let branch = world.copy();
    (world, branch)
}

fn to(repo: &Path, name: &str) -> GitRef {
    GitRef { repo: repo.into(), name: name.into(), message: "m\n\nbody\n".into(), author: "A B <a@b>".into() }
}

#[test]
fn a_commit_is_made_and_nothing_else_is_touched() {
    let dir = tempfile::tempdir().unwrap();
    let repo = dir.path().join("repo");
    let git = repository(&repo);
    let (world, branch) = world_of(&repo);
    let pwned = dir.path().join("pwned");
    let script = format!("#!/bin/sh\ntouch {}\n", pwned.display());
    for hook in [
        "pre-receive",
        "update",
        "post-receive",
        "reference-transaction",
        "post-update",
        "pre-push",
        "proc-receive",
    ] {
        let at = repo.join(".git/hooks").join(hook);
        std::fs::create_dir_all(at.parent().unwrap()).unwrap();
        std::fs::write(&at, &script).unwrap();
        std::fs::set_permissions(&at, Permissions::from_mode(0o755)).unwrap();
    }
    for (key, value) in [
        ("core.fsmonitor", pwned_command(&pwned)),
        ("core.sshCommand", pwned_command(&pwned)),
        ("filter.x.clean", pwned_command(&pwned)),
        ("core.alternateRefsCommand", pwned_command(&pwned)),
        ("receive.denyCurrentBranch", "updateInstead".into()),
        ("uploadpack.packObjectsHook", pwned_command(&pwned)),
    ] {
        git.run(&["config".as_ref(), key.as_ref(), std::ffi::OsStr::new(&value)]).unwrap();
    }
    std::fs::write(repo.join("a"), "uncommitted\n").unwrap();
    std::fs::write(repo.join("staged"), "staged\n").unwrap();
    git.run(&["add", "staged"]).unwrap();
    let index = std::fs::read(repo.join(".git/index")).unwrap();

    branch.write("new\nfile", "n");
    branch.write("a", "changed\n");
    std::fs::remove_file(branch.at("d")).unwrap();
    world.scan(&branch);
    let report = world.store.export(&branch.id, ExportTarget::GitRef(to(&repo, "x/y"))).unwrap();
    let commit = report.commit.unwrap();
    assert_eq!(git.text(&["rev-parse", "refs/heads/x/y"]).unwrap(), commit);
    assert_eq!(git.text(&["rev-parse", "x/y^"]).unwrap(), git.text(&["rev-parse", "HEAD"]).unwrap());
    let names = git.text(&["diff", "--no-renames", "--name-status", "HEAD", "x/y"]).unwrap();
    assert_eq!(names, "M\ta\nD\td\nA\t\"new\\nfile\"");
    assert_eq!(git.text(&["log", "-1", "--format=%an %ae %cn|%B", "x/y"]).unwrap(), "A B a@b A B|m\n\nbody");
    git.run(&["fsck", "--strict"]).unwrap();
    assert_eq!(std::fs::read(repo.join(".git/index")).unwrap(), index);
    assert_eq!(std::fs::read_to_string(repo.join("a")).unwrap(), "uncommitted\n");
    assert!(!repo.join("new\nfile").exists());
    assert!(!pwned.exists(), "something of the repository was run");

    // What exists is not moved, and a branch that somebody stands on is not made under them.
    let again = |name| world.store.export(&branch.id, ExportTarget::GitRef(to(&repo, name)));
    assert!(matches!(again("x/y"), Err(ExportError::Exists(_))));
    assert!(matches!(again("main"), Err(ExportError::Exists(_))));
    git.run(&["symbolic-ref", "HEAD", "refs/heads/unborn"]).unwrap();
    assert!(matches!(again("unborn"), Err(ExportError::CheckedOut(_))));
    for bad in ["", "..", "a b", "-x", "@", "a..b", "x.lock", "@{", "a~1"] {
        assert!(matches!(again(bad), Err(ExportError::Name(..))), "{bad}");
    }
    assert!(!pwned.exists());
}

fn pwned_command(pwned: &Path) -> String {
    format!("touch {}", pwned.display())
}

#[test]
fn a_repository_that_went_on_is_sent_little_and_one_without_the_commit_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let repo = dir.path().join("repo");
    let git = repository(&repo);
    let (world, branch) = world_of(&repo);
    branch.write("a", "changed\n");
    world.scan(&branch);
    std::fs::write(repo.join("later"), "l").unwrap();
    git.run(&["add", "."]).unwrap();
    git.run(&["commit", "-q", "-m", "three"]).unwrap();
    world.store.export(&branch.id, ExportTarget::GitRef(to(&repo, "x"))).unwrap();
    let counted = git.text(&["count-objects", "-v"]).unwrap();
    assert!(counted.contains("in-pack: 3"), "{counted}");

    let other = dir.path().join("other");
    init(&other);
    let refused = world.store.export(&branch.id, ExportTarget::GitRef(to(&other, "x")));
    assert!(matches!(refused, Err(ExportError::NoParent { .. })), "{refused:?}");
    let refused = world.store.export(&branch.id, ExportTarget::GitRef(to(dir.path(), "x")));
    assert!(matches!(refused, Err(ExportError::Repo { .. })), "{refused:?}");
}

#[test]
fn what_root_makes_in_somebodys_repository_is_theirs() {
    if !testkit::have(testkit::Need::Root) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let repo = dir.path().join("repo");
    repository(&repo);
    for at in everything(&repo) {
        std::os::unix::fs::lchown(at, Some(testkit::OTHER_UID), Some(testkit::OTHER_GID)).unwrap();
    }
    let (world, branch) = world_of(&repo);
    branch.write("a", "changed\n");
    world.scan(&branch);
    world.store.export(&branch.id, ExportTarget::GitRef(to(&repo, "x/y/z"))).unwrap();
    for at in everything(&repo) {
        let uid = std::os::unix::fs::MetadataExt::uid(&at.symlink_metadata().unwrap());
        assert!(uid == testkit::OTHER_UID, "{} is {uid}'s", at.display());
    }
}

fn everything(root: &Path) -> Vec<PathBuf> {
    let mut out = vec![root.to_owned()];
    let mut at = 0;
    while at < out.len() {
        if out[at].is_dir() && !out[at].is_symlink() {
            let children = std::fs::read_dir(&out[at]).unwrap().map(|child| child.unwrap().path());
            out.extend(children.collect::<Vec<_>>());
        }
        at += 1;
    }
    out
}

#[test]
fn uncommitted_work_of_a_frozen_directory_is_in_the_commit() {
    let dir = tempfile::tempdir().unwrap();
    let repo = dir.path().join("repo");
    let git = repository(&repo);
    std::fs::write(repo.join("a"), "uncommitted\n").unwrap();
    std::fs::write(repo.join("untracked"), "u\n").unwrap();
    std::fs::remove_file(repo.join("d")).unwrap();
    let mut world = World::frozen(|store| {
        let source = crate::base::DirSource { path: repo.clone(), include_ignored: false };
        store.freeze_dir(&source, &|_| ()).unwrap()
    });
    let branch = world.copy();
    branch.write("agent", "x\n");
    world.scan(&branch);
    let report = world.store.export(&branch.id, ExportTarget::GitRef(to(&repo, "x"))).unwrap();
    let names = git.text(&["diff", "--no-renames", "--name-status", "HEAD", "x"]).unwrap();
    assert_eq!(names, "M\ta\nA\tagent\nD\td\nA\tuntracked");
    assert_eq!(report.uncommitted, 3);
    // What the branch changed as well is the branch's.
    branch.write("a", "the agent's\n");
    world.scan(&branch);
    let report = world.store.export(&branch.id, ExportTarget::GitRef(to(&repo, "y"))).unwrap();
    assert_eq!(report.uncommitted, 2);
}

/// A repository with attributes of every kind that makes git keep a file otherwise.
fn attributed(repo: &Path) -> Git {
    let git = repository(repo);
    let utf16 = |text: &str| text.encode_utf16().flat_map(u16::to_le_bytes).collect::<Vec<u8>>();
    std::fs::create_dir_all(repo.join("sub/dir")).unwrap();
    // In the commit with both line ends, which `text=auto` leaves alone.
    std::fs::write(repo.join("auto.c"), "int a;\r\nint b;\r\n").unwrap();
    git.run(&["add", "auto.c"]).unwrap();
    git.run(&["commit", "-q", "-m", "with CR"]).unwrap();
    let attributes =
        "*.txt text eol=crlf\n*.id ident\n*.lat working-tree-encoding=UTF-16LE\n*.c text=auto\n*.bin -text\n";
    std::fs::write(repo.join(".gitattributes"), attributes).unwrap();
    std::fs::write(repo.join("sub/.gitattributes"), "*.txt -text\n").unwrap();
    for (name, text) in [
        ("k.id", b"$Id$\n".to_vec()),
        ("u.lat", utf16("h\n")),
        ("b.bin", b"a\r\n".to_vec()),
        ("sub/x.txt", b"a\r\n".to_vec()),
        ("sub/dir/new.c", b"a\n".to_vec()),
    ] {
        std::fs::write(repo.join(name), text).unwrap();
    }
    git.run(&["add", "."]).unwrap();
    git.run(&["commit", "-q", "-m", "attributes"]).unwrap();
    git
}

#[test]
fn files_are_kept_as_git_keeps_them() {
    let dir = tempfile::tempdir().unwrap();
    let repo = dir.path().join("repo");
    let git = attributed(&repo);
    let append = |root: &Path, name: &str, bytes: &[u8]| {
        let mut text = std::fs::read(root.join(name)).unwrap_or_default();
        text.extend(bytes);
        let _ = std::fs::remove_file(root.join(name));
        std::fs::write(root.join(name), text).unwrap();
    };
    let change = |root: &Path, step: usize| {
        append(root, "crlf.txt", b"three\r\n");
        append(root, "new.txt", b"one\r\n");
        append(root, "k.id", b"more\r\n");
        append(root, "u.lat", b"i\0\n\0");
        append(root, "auto.c", b"int c;\r\n");
        append(root, "sub/dir/new.c", b"b\r\n");
        append(root, "b.bin", b"b\r\n");
        append(root, "sub/x.txt", b"b\r\n");
        append(root, "a", b"b\r\n");
        if step == 1 {
            append(root, "sub/.gitattributes", b"*.txt text\n");
            append(root, ".gitattributes", b"a text\n");
        }
    };
    for step in 0..2 {
        let (world, branch) = world_of(&repo);
        change(&branch.at(""), step);
        world.scan(&branch);
        let name = format!("x{step}");
        world.store.export(&branch.id, ExportTarget::GitRef(to(&repo, &name))).unwrap();
        // git's own opinion of the same files.
        let own = dir.path().join(&name);
        let args: [&std::ffi::OsStr; 4] =
            ["clone".as_ref(), "-q".as_ref(), repo.as_os_str(), own.as_os_str()];
        Git::new().run(&args).unwrap();
        change(&own, step);
        let at = Git::at(&own.join(".git")).work_tree(&own);
        at.run(&["add", "-A"]).unwrap();
        let (tree, want) = (git.text(&["rev-parse", &format!("{name}^{{tree}}")]), at.text(&["write-tree"]));
        assert_eq!(tree.unwrap(), want.unwrap(), "{}", git.text(&["diff", "--stat", "HEAD", &name]).unwrap());
        assert!(git.text(&["show", &format!("{name}:k.id")]).unwrap().starts_with("$Id$"));
    }
    // A frozen directory with line ends of its own, by its own configuration.
    git.run(&["config", "core.autocrlf", "true"]).unwrap();
    append(&repo, "uncommitted", b"a\r\nb\r\n");
    let mut world = World::frozen(|store| {
        let source = crate::base::DirSource { path: repo.clone(), include_ignored: false };
        store.freeze_dir(&source, &|_| ()).unwrap()
    });
    let branch = world.copy();
    append(&branch.at(""), "a", b"b\r\n");
    world.scan(&branch);
    world.store.export(&branch.id, ExportTarget::GitRef(to(&repo, "auto"))).unwrap();
    for name in ["a", "uncommitted"] {
        assert!(!git.text(&["show", &format!("auto:{name}")]).unwrap().contains('\r'), "{name}");
    }
}

#[test]
fn what_a_commit_can_not_hold_as_it_is_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let repo = dir.path().join("repo");
    let git = attributed(&repo);
    let module = repo.join("module");
    repository(&module);
    append_line(&repo.join(".gitattributes"), "*.crypt filter=crypt\n");
    std::fs::write(repo.join("s.crypt"), "encrypted").unwrap();
    git.run(&["add", "."]).unwrap();
    git.run(&["commit", "-q", "-m", "more"]).unwrap();
    // As its filter would have it lie there.
    std::fs::write(repo.join("s.crypt"), "the secret").unwrap();
    let mut world = World::frozen(|store| {
        let source = crate::base::DirSource { path: repo.clone(), include_ignored: false };
        store.freeze_dir(&source, &|_| ()).unwrap()
    });
    let branch = world.copy();
    branch.write("a", "changed\n");
    world.scan(&branch);
    world.store.export(&branch.id, ExportTarget::GitRef(to(&repo, "x"))).unwrap();
    assert_eq!(git.text(&["diff", "--name-only", "HEAD", "x"]).unwrap(), "a");
    assert!(git.text(&["ls-tree", "x", "module"]).unwrap().starts_with("160000 commit"));
    let refused = |world: &World, says: &str| {
        let error = world.store.export(&branch.id, ExportTarget::GitRef(to(&repo, "y"))).unwrap_err();
        assert!(error.to_string().contains(says) && error.hint().is_some(), "{error}");
        world.store.export(&branch.id, ExportTarget::Patch(&mut Vec::new())).unwrap();
    };
    branch.write("s.crypt", "another secret");
    world.scan(&branch);
    refused(&world, "git keeps s.crypt through a filter");
    std::fs::remove_file(branch.at("s.crypt")).unwrap();
    branch.write("module/new", "new");
    world.scan(&branch);
    refused(&world, "the submodule module");
}

fn append_line(at: &Path, line: &str) {
    let text = std::fs::read_to_string(at).unwrap();
    std::fs::write(at, text + line).unwrap();
}

#[test]
fn a_name_that_git_takes_nowhere_is_shown_and_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let repo = dir.path().join("repo");
    let git = repository(&repo);
    // Theirs, which git itself leaves out.
    std::fs::create_dir(repo.join(".Git")).unwrap();
    std::fs::write(repo.join(".Git/theirs"), "x").unwrap();
    let mut world = World::frozen(|store| {
        let source = crate::base::DirSource { path: repo.clone(), include_ignored: true };
        store.freeze_dir(&source, &|_| ()).unwrap()
    });
    let branch = world.copy();
    branch.write("good", "x\n");
    branch.write("d1/.GIT/config", "x\n");
    symlink("t", branch.at("git~1")).unwrap();
    world.scan(&branch);
    let said = world.store.diff(&branch.id, DiffFormat::NameStatus).unwrap();
    let mut lines: Vec<_> = std::str::from_utf8(&said).unwrap().lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["A\t\"d1/.GIT/config\"", "A\t\"git~1\"", "A\tgood"]);
    let shown = world.store.diff(&branch.id, DiffFormat::Unified).unwrap();
    let applied = git.run_with(&["apply", "-"], &shown, &|_| ()).unwrap_err().to_string();
    assert!(applied.contains("invalid path"), "{applied}");
    let refusals = [
        world.store.export(&branch.id, ExportTarget::Patch(&mut Vec::new())).unwrap_err(),
        world.store.export(&branch.id, ExportTarget::GitRef(to(&repo, "x"))).unwrap_err(),
    ];
    for refusal in refusals {
        let text = std::error::Error::source(&refusal).map(ToString::to_string).unwrap_or_default();
        assert_eq!(text, r#"git takes no file of the name "d1/.GIT/config", "git~1""#, "{refusal}");
        assert!(refusal.hint().is_some_and(|hint| hint.contains("branch rm")));
    }
    world.store.export(&branch.id, ExportTarget::Tar(&mut Vec::new())).unwrap();
    // Without them all is well.
    std::fs::remove_dir_all(branch.at("d1")).unwrap();
    std::fs::remove_file(branch.at("git~1")).unwrap();
    world.scan(&branch);
    world.store.export(&branch.id, ExportTarget::Patch(&mut Vec::new())).unwrap();
    world.store.export(&branch.id, ExportTarget::GitRef(to(&repo, "x"))).unwrap();
    assert_eq!(git.text(&["diff", "--name-status", "HEAD", "x"]).unwrap(), "A\tgood");
    git.run(&["checkout", "-q", "x"]).unwrap();
}

/// What somebody puts into their own repository before root exports to it.
#[test]
fn a_repository_that_leads_elsewhere_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let repo = dir.path().join("repo");
    repository(&repo);
    let (world, branch) = world_of(&repo);
    branch.write("a", "changed\n");
    world.scan(&branch);
    let refused = |what: &str| {
        let since = std::time::Instant::now();
        let result = world.store.export(&branch.id, ExportTarget::GitRef(to(&repo, "x")));
        assert!(matches!(result, Err(ExportError::Repo { .. })), "{what}: {result:?}");
        assert!(since.elapsed() < std::time::Duration::from_secs(20), "{what}");
    };
    let git_dir = repo.join(".git");
    let outside = dir.path().join("outside");
    let logs = git_dir.join("logs/refs/heads");
    std::fs::create_dir_all(&logs).unwrap();
    std::os::unix::fs::symlink(&outside, logs.join("x")).unwrap();
    refused("a log that is a link");
    assert!(!outside.exists());
    std::fs::remove_file(logs.join("x")).unwrap();
    let fifo = |at: &Path| {
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, at, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    };
    // What git would open beside objects and refs.
    let config = std::fs::read_to_string(git_dir.join("config")).unwrap();
    for include in
        ["[include]\n\tpath = /dev/zero\n", "[includeIf \"gitdir:**\"]\n\tpath = /dev/zero\n", "[x"]
    {
        std::fs::write(git_dir.join("config"), format!("{config}{include}")).unwrap();
        refused(include);
        std::fs::write(git_dir.join("config"), &config).unwrap();
    }
    std::fs::create_dir_all(git_dir.join("info")).unwrap();
    std::fs::create_dir_all(git_dir.join("objects/aa")).unwrap();
    let loose = format!("objects/aa/{}", "b".repeat(38));
    for name in ["info/grafts", "info/attributes", "config.worktree", "shallow", &loose] {
        fifo(&git_dir.join(name));
        refused(name);
        std::fs::remove_file(git_dir.join(name)).unwrap();
    }
    // Another repository of the same user, which knows nothing of this directory.
    let (other, aside) = (dir.path().join("other"), dir.path().join("aside"));
    repository(&other);
    std::fs::rename(&git_dir, &aside).unwrap();
    std::fs::write(&git_dir, format!("gitdir: {}\n", other.join(".git").display())).unwrap();
    refused("a .git file that names another repository");
    std::fs::File::create(&git_dir).unwrap().set_len(3 << 30).unwrap();
    refused("a .git file of 3 GiB");
    std::fs::remove_file(&git_dir).unwrap();
    fifo(&git_dir);
    refused("a .git that is a fifo");
    std::fs::remove_file(&git_dir).unwrap();
    std::fs::rename(&aside, &git_dir).unwrap();
    world.store.export(&branch.id, ExportTarget::GitRef(to(&repo, "x"))).unwrap();
    let log = std::fs::read_to_string(git_dir.join("logs/refs/heads/x")).unwrap();
    assert!(log.contains("A B <a@b>"), "{log}");
    if !testkit::have(testkit::Need::Root) {
        return;
    }
    // Root's repository in a directory that somebody else can rename.
    std::os::unix::fs::chown(dir.path(), Some(testkit::OTHER_UID), Some(testkit::OTHER_GID)).unwrap();
    refused("root's repository in somebody's directory");
}
