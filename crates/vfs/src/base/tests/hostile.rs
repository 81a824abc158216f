//! Repositories that were written to run something, or to get at something, when they are frozen.

use std::fmt::Write as _;

use proto::error::{Code, Coded};
use testkit::{GitRepo, Need, have};

use super::*;

/// A repository whose configuration names a command wherever git takes one. Each leaves a file in `markers`.
fn trapped(markers: &Path) -> GitRepo {
    let repo = GitRepo::new();
    repo.file("a.txt", "alpha").file(".gitattributes", "* filter=trap diff=trap merge=trap\n").commit("one");
    repo.git(&["branch", "other"]);
    let trap = |name: &str| format!("touch {}/{name} #", markers.display());
    let hooks = repo.path().join("hooks");
    for name in
        ["post-checkout", "post-index-change", "reference-transaction", "pre-auto-gc", "fsmonitor-watchman"]
    {
        let path = hooks.join(name);
        testkit::fixtures::write(&path, format!("#!/bin/sh\n{}\n", trap(&format!("hook-{name}"))));
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    }
    let mut config = String::new();
    for (section, key) in [
        ("core", "fsmonitor"),
        ("core", "sshCommand"),
        ("core", "pager"),
        ("core", "editor"),
        ("core", "askPass"),
        ("core", "gitProxy"),
        ("core", "alternateRefsCommand"),
        ("filter \"trap\"", "clean"),
        ("filter \"trap\"", "smudge"),
        ("filter \"trap\"", "process"),
        ("diff", "external"),
        ("diff \"trap\"", "command"),
        ("diff \"trap\"", "textconv"),
        ("merge \"trap\"", "driver"),
        ("credential", "helper"),
        ("uploadpack", "packObjectsHook"),
        ("gpg", "program"),
        ("submodule \"x\"", "update"),
        ("remote \"origin\"", "uploadpack"),
        ("remote \"source\"", "uploadpack"),
    ] {
        let name = format!("{section}-{key}").replace([' ', '"'], "");
        writeln!(config, "[{section}]\n\t{key} = \"{}\"", trap(&name)).unwrap();
    }
    for alias in ["ls-files", "upload-pack", "fetch", "status", "config"] {
        writeln!(config, "[alias]\n\t{alias} = \"!{}\"", trap(&format!("alias-{alias}"))).unwrap();
    }
    writeln!(config, "[filter \"trap\"]\n\trequired = true\n[protocol]\n\tallow = always").unwrap();
    writeln!(config, "[remote \"origin\"]\n\turl = \"ext::{}\"", trap("ext")).unwrap();
    writeln!(config, "[core]\n\thooksPath = \"{}\"", hooks.display()).unwrap();
    testkit::fixtures::write(&repo.path().join("more.config"), &config);
    std::fs::write(repo.path().join(".git/config"), format!("[include]\n\tpath = ../more.config\n{config}"))
        .unwrap();
    repo
}

/// Puts a fifo there, at which who opens it waits for ever.
fn fifo(at: &Path) {
    let _ = std::fs::remove_file(at);
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(rustix::fs::CWD, at, rustix::fs::FileType::Fifo, mode, 0).unwrap();
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn no_command_of_a_hostile_repository_runs() {
    if !have(Need::Git) {
        return;
    }
    let markers = temp_dir("markers");
    std::fs::set_permissions(markers.path(), std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    let repo = trapped(markers.path());
    // The traps work: git alone walks into some.
    std::fs::write(repo.path().join("a.txt"), "ALPHA").unwrap();
    let _ = testkit::fixtures::git(repo.path()).args(["status"]).output().unwrap();
    let _ = testkit::fixtures::git(repo.path()).args(["add", "a.txt"]).output().unwrap();
    let sprung = names(markers.path());
    assert!(sprung.iter().any(|name| name == "core-fsmonitor"), "{sprung:?}");
    assert!(sprung.iter().any(|name| name.starts_with("filter")), "{sprung:?}");
    for name in sprung {
        std::fs::remove_file(markers.path().join(name)).unwrap();
    }
    let f = Fixture::new();
    for rev in ["main", "other", "HEAD"] {
        f.git(repo.path(), rev).unwrap();
    }
    let base = f.dir(repo.path());
    assert_eq!(base.warnings, Vec::<String>::new());
    std::fs::write(repo.path().join("a.txt"), "beta").unwrap();
    f.try_dir(repo.path(), true).unwrap();
    f.try_dir(&repo.path().join("hooks"), false).unwrap();
    // As a submodule of another one.
    let outer = GitRepo::new();
    outer.file("x", "x").commit("outer");
    std::fs::rename(repo.path(), outer.path().join("inner")).unwrap();
    let nested = f.dir(outer.path());
    assert!(f.files(&nested).contains(&"inner/a.txt".to_owned()), "{:?}", f.files(&nested));
    std::fs::rename(outer.path().join("inner"), repo.path()).unwrap();
    assert_eq!(names(markers.path()), Vec::<String>::new());
    // And nothing of it is in the base's own repository.
    let config = std::fs::read_to_string(f.tree(&base).join(".git/config")).unwrap();
    assert!(!config.contains("touch"), "{config}");
    assert!(!f.tree(&base).join(".git/hooks").exists());
}

#[test]
fn a_missing_object_is_not_fetched_by_the_repositorys_own_means() {
    let markers = temp_dir("markers");
    let repo = trapped(markers.path());
    let blob = repo.git(&["-c", "core.fsmonitor=false", "rev-parse", "HEAD:a.txt"]);
    let config = repo.path().join(".git/config");
    let mut text = std::fs::read_to_string(&config).unwrap();
    text += "[core]\n\trepositoryformatversion = 1\n[extensions]\n\tpartialClone = origin\n";
    text += "[remote \"origin\"]\n\tpromisor = true\n";
    std::fs::write(&config, text).unwrap();
    std::fs::remove_file(repo.path().join(".git/objects").join(&blob[..2]).join(&blob[2..])).unwrap();
    // The trap works: git alone runs the remote's command to get the object.
    let _ = testkit::fixtures::git(repo.path()).args(["cat-file", "-p", &blob]).output().unwrap();
    assert_eq!(names(markers.path()), ["ext"]);
    std::fs::remove_file(markers.path().join("ext")).unwrap();
    let f = Fixture::new();
    let error = f.git(repo.path(), "main").unwrap_err();
    assert!(matches!(error, FreezeError::Git(_)), "{error}");
    let base = f.dir(repo.path());
    assert!(base.warnings.iter().any(|w| w.contains("without git history")), "{:?}", base.warnings);
    assert!(f.files(&base).contains(&"a.txt".to_owned()));
    assert_eq!(names(markers.path()), Vec::<String>::new());
}

/// A repository of the user's that nobody named, with a file that must not get out.
fn secret() -> GitRepo {
    let repo = GitRepo::new();
    repo.file("secret.txt", "the secret").file("deep/secret.txt", "the secret").commit("the secret commit");
    repo
}

/// That the base of the directory has nothing of the secret, in files or objects, and says why.
fn check_closed(f: &Fixture, dir: &Path, what: &str) {
    let base = f.try_dir(dir, false).unwrap_or_else(|error| panic!("{what}: {error}"));
    assert!(base.warnings.iter().any(|w| w.contains("without git history")), "{what}: {:?}", base.warnings);
    assert_eq!(base.git_head, None, "{what}");
    assert!(!f.tree(&base).join(".git").exists(), "{what}");
    assert!(f.files(&base).iter().all(|path| !path.contains("secret")), "{what}: {:?}", f.files(&base));
    assert!(f.files(&base).contains(&"bait".to_owned()), "{what}");
    let error = f.git(dir, "HEAD").unwrap_err();
    assert_eq!(error.code(), Code::BadInput, "{what}: {error}");
}

#[test]
fn a_git_directory_that_leads_elsewhere_is_not_followed() {
    let f = Fixture::new();
    let secret = secret();
    let target = secret.path().join(".git");
    let link = |from: &Path, to: &Path| std::os::unix::fs::symlink(from, to).unwrap();
    let bait = |what: &str| {
        let repo = GitRepo::new();
        repo.file("bait", what).commit("bait");
        repo
    };

    let repo = bait("gitfile");
    std::fs::remove_dir_all(repo.path().join(".git")).unwrap();
    std::fs::write(repo.path().join(".git"), format!("gitdir: {}\n", target.display())).unwrap();
    check_closed(&f, repo.path(), "a .git file");

    let repo = bait("link");
    std::fs::remove_dir_all(repo.path().join(".git")).unwrap();
    link(&target, &repo.path().join(".git"));
    check_closed(&f, repo.path(), "a .git link");

    let repo = bait("commondir");
    std::fs::write(repo.path().join(".git/commondir"), target.to_str().unwrap()).unwrap();
    check_closed(&f, repo.path(), "a commondir file");

    let repo = bait("alternates");
    let alternates = repo.path().join(".git/objects/info/alternates");
    testkit::fixtures::write(&alternates, format!("{}\n", target.join("objects").display()));
    check_closed(&f, repo.path(), "alternates");

    for name in ["refs", "objects", "HEAD"] {
        let repo = bait(name);
        let own = repo.path().join(".git").join(name);
        std::fs::rename(&own, repo.path().join("old")).unwrap();
        std::fs::remove_dir_all(repo.path().join("old")).ok();
        link(&target.join(name), &own);
        check_closed(&f, repo.path(), name);
    }
    let repo = bait("ref");
    link(&target.join("refs/heads"), &repo.path().join(".git/refs/heads/theirs"));
    check_closed(&f, repo.path(), "a link among refs");

    let commit = secret.git(&["rev-parse", "HEAD"]);
    for each in [true, false] {
        let repo = bait("loose");
        let own = repo.path().join(".git/objects");
        for dir in names(&target.join("objects")).iter().filter(|name| name.len() == 2) {
            if !each {
                let _ = std::fs::remove_dir_all(own.join(dir));
                link(&target.join("objects").join(dir), &own.join(dir));
                continue;
            }
            std::fs::create_dir_all(own.join(dir)).unwrap();
            for name in names(&target.join("objects").join(dir)) {
                link(&target.join("objects").join(dir).join(&name), &own.join(dir).join(&name));
            }
        }
        std::fs::write(repo.path().join(".git/refs/heads/steal"), &commit).unwrap();
        // The trap works: git alone follows them.
        assert_eq!(repo.git(&["show", "steal:secret.txt"]), "the secret");
        check_closed(&f, repo.path(), if each { "linked objects" } else { "linked directories of objects" });
    }
}

#[test]
fn the_history_is_read_through_a_configuration_of_ours() {
    if !have(Need::Git) {
        return;
    }
    let f = Fixture::new();
    let (repo, pipe) = (GitRepo::new(), temp_dir("pipe"));
    let pipe = pipe.path().join("pipe");
    fifo(&pipe);
    repo.file("a", "a").file(".gitattributes", "* text\n").commit("one");
    let include = format!("[include]\n\tpath = {}\n", pipe.display());
    let config = std::fs::read_to_string(repo.path().join(".git/config")).unwrap();
    std::fs::write(repo.path().join(".git/config"), format!("{config}{include}")).unwrap();
    std::fs::create_dir_all(repo.path().join(".git/info")).unwrap();
    for name in ["info/grafts", "info/attributes", "config.worktree", ".gitattributes"] {
        fifo(&repo.path().join(".git").join(name));
    }
    let base = f.dir(repo.path());
    assert_eq!((base.warnings.len(), base.git_head.is_some()), (0, true), "{:?}", base.warnings);
    f.git(repo.path(), "HEAD").unwrap();
    assert_eq!(names(&f.store.inner.layout.tmp()), [""; 0], "what it was read through is gone");
}

#[test]
fn refs_in_a_reftable_are_read() {
    if !have(Need::Git) {
        return;
    }
    let dir = temp_dir("reftable");
    let made = testkit::fixtures::git(dir.path()).args(["init", "-q", "--ref-format=reftable", "."]).output();
    if !made.unwrap().status.success() {
        // git before 2.45 knows none, and can't read them either.
        return;
    }
    let f = Fixture::new();
    let repo = GitRepo::at(dir.path());
    repo.file("a", "a").commit("one");
    repo.git(&["branch", "other"]);
    let base = f.dir(repo.path());
    assert_eq!(base.warnings, [""; 0]);
    assert_eq!(f.branch(&base).git(&["log", "--format=%s", "other"]), "one");
    assert_eq!(f.git(repo.path(), "other").unwrap().git_head, base.git_head);
    let linked = dir.path().join("linked");
    repo.git(&["worktree", "add", "-q", linked.to_str().unwrap(), "other"]);
    let base = f.dir(&linked);
    assert!(base.warnings[0].contains("reftable"), "{:?}", base.warnings);
    fifo(&repo.path().join(".git/reftable/tables.list"));
    let base = f.dir(repo.path());
    assert!(base.warnings[0].contains("without git history"), "{:?}", base.warnings);
}

#[test]
fn a_colon_in_the_path_splits_no_list() {
    let f = Fixture::new();
    let dir = temp_dir("colon");
    let path = dir.path().join("a:b\"c\\d\ne");
    std::fs::create_dir(&path).unwrap();
    let repo = GitRepo::at(&path);
    repo.git(&["init", "-q", "."]);
    repo.file("a", "a").commit("one");
    repo.file("a", "staged").git(&["add", "a"]);
    let base = f.dir(repo.path());
    assert_eq!(f.branch(&base).git(&["show", ":a"]), "staged");
}

#[test]
fn core_worktree_is_not_believed() {
    let f = Fixture::new();
    let secret = secret();
    let repo = GitRepo::new();
    repo.file("bait", "x").commit("bait");
    let value = secret.path().to_str().unwrap().to_owned();
    repo.git(&["config", "core.worktree", &value]);
    let base = f.dir(repo.path());
    assert_eq!(f.files(&base), ["bait"]);
}

#[test]
fn links_and_index_entries_that_lead_outside_are_not_followed() {
    let f = Fixture::new();
    let secret = secret();
    let repo = GitRepo::new();
    repo.file("d/secret.txt", "mine").file("d/deep/secret.txt", "mine").file("bait", "x").commit("one");
    std::fs::remove_dir_all(repo.path().join("d")).unwrap();
    std::os::unix::fs::symlink(secret.path(), repo.path().join("d")).unwrap();
    let base = f.dir(repo.path());
    assert_eq!(f.files(&base), ["bait", "d"]);
    assert!(f.tree(&base).join("d").symlink_metadata().unwrap().is_symlink());
    let all = f.try_dir(repo.path(), true).unwrap();
    assert_eq!(f.files(&all), ["bait", "d"]);
}

#[test]
fn what_an_index_places_in_a_git_directory_is_not_copied() {
    if !have(Need::Git) {
        return;
    }
    let marker = testkit::temp_dir("marker");
    for (name, mode) in [(".git", 0o160_000_u32), (".git/config", 0o100_644), (".GIT/config", 0o100_644)] {
        let (f, repo) = (Fixture::new(), GitRepo::new());
        repo.file("a", "a").commit("one");
        repo.file(".gitattributes", "* filter=trap\n");
        let ran = marker.path().join("ran");
        repo.git(&["config", "filter.trap.clean", &format!("touch {}; cat", ran.display())]);
        let index = repo.path().join(".git/index");
        let stat = std::fs::read(&index).unwrap()[12..72].to_vec();
        let mut written = b"DIRC\0\0\0\x02\0\0\0\x02".to_vec();
        for (name, mode) in [(name, mode), ("a", 0o100_644)] {
            let mut entry = stat.clone();
            entry[8..16].copy_from_slice(&[0, 0, 0, 1, 0, 0, 0, 0]);
            entry[24..28].copy_from_slice(&mode.to_be_bytes());
            entry.extend((name.len() as u16).to_be_bytes());
            entry.extend(name.as_bytes());
            entry.resize(entry.len() / 8 * 8 + 8, 0);
            written.extend(entry);
        }
        let mut sum = sha1_smol::Sha1::new();
        sum.update(&written);
        written.extend(sum.digest().bytes());
        std::fs::write(&index, written).unwrap();
        let base = f.dir(repo.path());
        assert!(!ran.exists(), "{name}: a command ran");
        assert_eq!(f.files(&base), [".gitattributes", "a"], "{name}");
    }
}

#[test]
fn a_fifo_in_place_of_a_file_that_git_reads_hangs_nothing() {
    if !have(Need::Git) {
        return;
    }
    let since = std::time::Instant::now();
    for name in [".gitignore", "d/.gitignore"] {
        let (f, repo) = (Fixture::new(), GitRepo::new());
        repo.file("a", "a").file("d/b", "b").commit("one");
        fifo(&repo.path().join(name));
        let error = f.try_dir(repo.path(), false).unwrap_err();
        assert!(error.to_string().contains(name), "{error}");
        assert!(error.hint().is_some(), "{error}");
    }
    let loose = format!("objects/aa/{}", "b".repeat(38));
    for name in [
        "config",
        "HEAD",
        "packed-refs",
        "shallow",
        "index",
        "info/exclude",
        "refs/heads/x",
        "objects/info/alternates",
        "objects/info/commit-graph",
        "objects/pack/pack-a.idx",
        &loose,
    ] {
        let (f, repo) = (Fixture::new(), GitRepo::new());
        repo.file("a", "a").commit("one");
        for dir in ["info", "objects/aa"] {
            std::fs::create_dir_all(repo.path().join(".git").join(dir)).unwrap();
        }
        fifo(&repo.path().join(".git").join(name));
        // The files are taken, with the history or without it, or it is refused.
        let _ = f.try_dir(repo.path(), false);
        let _ = f.git(repo.path(), "HEAD");
    }
    assert!(since.elapsed() < std::time::Duration::from_secs(60), "{:?}", since.elapsed());
}

#[test]
fn a_source_that_is_nested_as_deep_as_can_be_is_taken() {
    let f = Fixture::new();
    let dir = testkit::temp_dir("deep");
    let depth = (proto::path::PATH_BYTES_MAX - 1) / 2;
    std::fs::create_dir_all(dir.path().join("d/".repeat(depth - 1))).unwrap();
    std::fs::write(dir.path().join("d/".repeat(depth - 1)).join("f"), "deep").unwrap();
    let base = f.dir(dir.path());
    assert_eq!(f.files(&base).len(), 1);
}
