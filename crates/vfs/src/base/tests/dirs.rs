//! Bases from directories.

use proto::error::{Code, Coded};
use testkit::GitRepo;

use super::*;

fn repo() -> GitRepo {
    let repo = GitRepo::new();
    repo.file(".gitignore", "target/\n*.log\n").file("kept", "1").file("changed", "1").file("deleted", "1");
    repo.file("src/staged", "1").file("partly", "1\n2\n3\n");
    repo.commit("one");
    repo
}

#[test]
fn uncommitted_work_is_taken_and_git_says_the_same_of_it() {
    let f = Fixture::new();
    let repo = repo();
    repo.file("changed", "2")
        .remove("deleted")
        .file("new/untracked", "n")
        .file("target/out", "o")
        .file("x.log", "l");
    repo.file("src/staged", "2");
    repo.git(&["add", "src/staged"]);
    repo.file("partly", "one\n2\n3\n");
    repo.git(&["add", "partly"]);
    repo.file("partly", "one\n2\nthree\n");
    repo.git(&["add", "--intent-to-add", "new/untracked"]);
    repo.symlink("/etc", "etc").symlink("loop", "loop");
    let base = f.dir(repo.path());
    assert!(base.warnings.is_empty(), "{:?}", base.warnings);
    let files = f.files(&base);
    let expected = [".gitignore", "changed", "etc", "kept", "loop", "new/untracked", "partly", "src/staged"];
    assert_eq!(files, expected);
    let branch = f.branch(&base);
    assert_eq!(branch.status(), repo.git(&["status", "--porcelain"]));
    assert_eq!(branch.git(&["diff", "--cached"]), repo.git(&["diff", "--cached"]));
    assert_eq!(branch.git(&["diff"]), repo.git(&["diff"]));
    branch.git(&["commit", "--quiet", "--message", "staged"]);
    branch.git(&["fsck"]);
    let all = f.try_dir(repo.path(), true).unwrap();
    assert!(f.files(&all).contains(&"target/out".to_owned()));
    assert!(f.tree(&all).join(".git").is_dir());
}

#[test]
fn an_unchanged_directory_is_the_same_base() {
    let f = Fixture::new();
    let repo = repo();
    let base = f.dir(repo.path());
    assert_eq!(f.dir(repo.path()), base);
    assert_eq!(std::fs::read_dir(f.state.path().join("bases")).unwrap().count(), 1);
    assert_eq!(std::fs::read_dir(f.state.path().join("tmp")).unwrap().count(), 0);
    repo.file("kept", "changed");
    let changed = f.dir(repo.path());
    assert_ne!(changed.tree, base.tree);
    repo.git(&["add", "kept"]);
    assert_ne!(f.dir(repo.path()).id, changed.id, "what is staged is seen by git status");
    repo.commit("two");
    let committed = f.dir(repo.path());
    assert_eq!(committed.tree, changed.tree);
    assert_ne!(committed.git_head, changed.git_head);
}

fn fifo(path: &Path) {
    let mode = rustix::fs::Mode::from_raw_mode(0o644);
    rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
}

#[test]
fn a_freeze_warns_of_what_it_met_whoever_made_the_base() {
    let f = Fixture::new();
    let dir = temp_dir("warned");
    testkit::fixtures::write(&dir.path().join("a"), "x");
    let plain = f.dir(dir.path());
    assert!(plain.warnings.is_empty(), "{:?}", plain.warnings);
    fifo(&dir.path().join("pipe"));
    let warned = f.dir(dir.path());
    assert_eq!(warned.id, plain.id);
    assert!(warned.warnings[0].contains("pipe"), "{:?}", warned.warnings);
    std::fs::remove_file(dir.path().join("pipe")).unwrap();
    assert!(f.dir(dir.path()).warnings.is_empty());
}

#[test]
fn a_directory_without_git_is_taken_whole() {
    let f = Fixture::new();
    let dir = temp_dir("plain");
    testkit::fixtures::write(&dir.path().join("a/b"), "x");
    testkit::fixtures::write(&dir.path().join(".gitignore"), "a/\n");
    std::fs::create_dir(dir.path().join("empty")).unwrap();
    let old = std::time::UNIX_EPOCH + std::time::Duration::from_nanos(1_500_000_000_123_456_789);
    std::fs::File::open(dir.path().join("a/b")).unwrap().set_modified(old).unwrap();
    std::fs::File::open(dir.path().join("a")).unwrap().set_modified(old).unwrap();
    fifo(&dir.path().join("pipe"));
    let base = f.dir(dir.path());
    assert_eq!(f.files(&base), [".gitignore", "a/b"]);
    assert!(f.tree(&base).join("empty").is_dir());
    assert_eq!(base.git_head, None);
    assert!(base.warnings[0].contains("pipe"), "{:?}", base.warnings);
    for path in ["a", "a/b"] {
        assert_eq!(std::fs::metadata(f.tree(&base).join(path)).unwrap().modified().unwrap(), old, "{path}");
    }
    let file = dir.path().join("a/b");
    assert_eq!(f.try_dir(&file, false).unwrap_err().code(), Code::BadInput);
    assert_eq!(f.try_dir(&dir.path().join("gone"), false).unwrap_err().code(), Code::NotFound);
}

#[test]
fn a_part_of_a_repository_stands_for_the_whole_and_an_unrelated_directory_does_not() {
    let f = Fixture::new();
    let repo = repo();
    let base = f.dir(&repo.path().join("src"));
    assert!(f.files(&base).contains(&"kept".to_owned()));
    assert!(base.warnings[0].contains("all of it was taken"), "{:?}", base.warnings);
    repo.file("target/out", "o");
    let base = f.dir(&repo.path().join("target"));
    assert_eq!(f.files(&base), ["out"]);
    assert_eq!(f.try_dir(&repo.path().join(".git"), false).unwrap_err().code(), Code::BadInput);
}

#[test]
fn heads_of_every_kind_are_kept() {
    let f = Fixture::new();
    let unborn = GitRepo::new();
    unborn.file("a", "1").git(&["add", "a"]);
    let branch = f.branch(&f.dir(unborn.path()));
    assert_eq!(branch.status(), "A  a");
    branch.git(&["commit", "--quiet", "--message", "first"]);
    assert_eq!(branch.git(&["symbolic-ref", "HEAD"]), "refs/heads/main");

    let repo = repo();
    let commit = repo.git(&["rev-parse", "HEAD"]);
    repo.git(&["checkout", "--quiet", "--detach"]);
    let branch = f.branch(&f.dir(repo.path()));
    assert_eq!(branch.git(&["rev-parse", "HEAD"]), commit);
    assert_eq!(std::fs::read_to_string(branch.work.join(".git/HEAD")).unwrap().trim(), commit);

    let dir = temp_dir("worktree");
    let tree = dir.path().join("wt");
    repo.git(&["worktree", "add", "--quiet", "-b", "wt", tree.to_str().unwrap()]);
    std::fs::write(tree.join("kept"), "other").unwrap();
    let base = f.dir(&tree);
    assert!(base.warnings.is_empty(), "{:?}", base.warnings);
    let branch = f.branch(&base);
    assert_eq!(branch.git(&["symbolic-ref", "HEAD"]), "refs/heads/wt");
    assert_eq!(branch.status(), " M kept");
}

#[test]
fn a_merge_in_progress_a_split_index_and_a_sparse_checkout_are_kept() {
    let f = Fixture::new();
    let repo = repo();
    repo.git(&["checkout", "--quiet", "-b", "side"]);
    repo.file("kept", "side").commit("side");
    repo.git(&["checkout", "--quiet", "main"]);
    repo.file("kept", "main").commit("main");
    repo.git(&["config", "core.splitIndex", "true"]);
    let merged = testkit::fixtures::git(repo.path()).args(["merge", "--quiet", "side"]).output().unwrap();
    assert!(!merged.status.success());
    let branch = f.branch(&f.dir(repo.path()));
    assert_eq!(branch.status(), "UU kept");
    assert_eq!(branch.status(), repo.git(&["status", "--porcelain"]));
    std::fs::write(branch.work.join("kept"), "both").unwrap();
    branch.git(&["commit", "--quiet", "--all", "--no-edit"]);
    assert_eq!(branch.git(&["rev-list", "--count", "--merges", "HEAD"]), "1");

    repo.git(&["merge", "--abort"]);
    repo.git(&["sparse-checkout", "set", "--cone", "--sparse-index", "src"]);
    std::fs::write(repo.path().join("src/staged"), "x").unwrap();
    let base = f.dir(repo.path());
    assert!(base.warnings.is_empty(), "{:?}", base.warnings);
    assert_eq!(f.branch(&base).status(), repo.git(&["status", "--porcelain"]));
}

#[test]
fn a_repository_within_is_taken_as_files() {
    let f = Fixture::new();
    let repo = repo();
    let inner = GitRepo::at(&repo.path().join("vendor/inner"));
    inner.file("tracked.log", "t").file(".gitignore", "*.o\n").git(&["add", "--force", "--all"]);
    inner.file("junk.o", "o").file("free", "f");
    let base = f.dir(repo.path());
    let inner: Vec<String> = f.files(&base).into_iter().filter(|path| path.starts_with("vendor")).collect();
    assert_eq!(inner, ["vendor/inner/.gitignore", "vendor/inner/free", "vendor/inner/tracked.log"]);
    assert!(base.warnings[0].contains("vendor/inner"), "{:?}", base.warnings);
}

#[test]
fn a_large_sparse_file_stays_sparse() {
    use std::os::unix::fs::MetadataExt;
    let f = Fixture::new();
    let dir = temp_dir("sparse");
    let file = std::fs::File::create(dir.path().join("disk.img")).unwrap();
    file.set_len(1 << 30).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"end", (1 << 30) - 3).unwrap();
    let base = f.dir(dir.path());
    let meta = std::fs::metadata(f.tree(&base).join("disk.img")).unwrap();
    assert_eq!(meta.len(), 1 << 30);
    assert!(meta.blocks() < 1024, "{}", meta.blocks());
    assert_eq!(base.bytes, 1 << 30);
}

#[test]
fn a_file_that_keeps_changing_is_told_or_taken_whole() {
    let f = Fixture::new();
    let dir = temp_dir("busy");
    let path = dir.path().join("file");
    let line = |n: u8| vec![n; 300_000];
    std::fs::write(&path, line(0)).unwrap();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut n = 0_u8;
            while !stop.load(Ordering::Relaxed) {
                n = n.wrapping_add(1);
                let whole = dir.path().join(".next");
                std::fs::write(&whole, line(n)).unwrap();
                std::fs::rename(&whole, &path).unwrap();
            }
        });
        for _ in 0..20 {
            match f.try_dir(dir.path(), false) {
                Ok(base) => {
                    let content = std::fs::read(f.tree(&base).join("file")).unwrap();
                    assert_eq!(content, line(content[0]), "half of one and half of another");
                }
                Err(error) => assert!(matches!(error, FreezeError::Changed(_)), "{error}"),
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn a_state_directory_within_is_left_out() {
    let repo = repo();
    let state = repo.path().join("state/here");
    std::fs::create_dir_all(&state).unwrap();
    let (store, clock) = open(&state);
    let f = Fixture { state: temp_dir("unused"), store, clock };
    for include_ignored in [false, true] {
        let base = f.try_dir(repo.path(), include_ignored).unwrap();
        assert!(f.files(&base).iter().all(|path| !path.starts_with("state")), "{:?}", f.files(&base));
    }
    assert_eq!(f.try_dir(&state.join("bases"), false).unwrap_err().code(), Code::BadInput);
}

#[test]
fn files_that_were_looked_at_before_are_found_again_without_reading() {
    let f = Fixture::new();
    let dir = temp_dir("again");
    let path = dir.path().join("file");
    fifo(&dir.path().join("pipe"));
    std::fs::write(&path, "1").unwrap();
    // Change times can't be set: only old files are trusted by their looks, so wait until this one is.
    let old = || std::os::unix::fs::MetadataExt::ctime(&std::fs::metadata(&path).unwrap());
    let now = || {
        let probe = dir.path().join(".now");
        std::fs::write(&probe, "").unwrap();
        let now = std::os::unix::fs::MetadataExt::ctime(&std::fs::metadata(&probe).unwrap());
        std::fs::remove_file(&probe).unwrap();
        now
    };
    testkit::wait_until("the file is old", std::time::Duration::from_secs(20), || now() > old() + 3);
    let copied = std::cell::Cell::new(0);
    let freeze = || {
        let source = DirSource { path: dir.path().to_owned(), include_ignored: false };
        let progress = |line: &str| copied.set(copied.get() + i32::from(line.starts_with("copying")));
        f.store.freeze_dir(&source, &progress).unwrap()
    };
    let first = freeze();
    let again = freeze();
    assert_eq!((&again.id, copied.get()), (&first.id, 1));
    assert!(!first.warnings.is_empty());
    assert_eq!(again.warnings, first.warnings, "what is not read again is told again");
    // The same size and modification time, but another content.
    let time = std::fs::metadata(&path).unwrap().modified().unwrap();
    std::fs::write(&path, "2").unwrap();
    std::fs::File::options().write(true).open(&path).unwrap().set_modified(time).unwrap();
    assert_ne!(freeze().tree, first.tree);
    assert_eq!(copied.get(), 2);
}

#[test]
fn what_the_user_ignores_everywhere_is_left_out() {
    testkit::rootless("base::tests::dirs::what_the_user_ignores_everywhere_is_left_out", || {
        let home = PathBuf::from(testkit::process::variable("HOME").unwrap());
        if testkit::process::variable("TESTKIT_ROOTLESS_TEST").is_none() {
            return; // The home is a person's own.
        }
        let f = Fixture::new();
        let repo = repo();
        repo.file("secret.env", "s");
        assert!(f.files(&f.dir(repo.path())).contains(&"secret.env".to_owned()));
        testkit::fixtures::write(&home.join(".config/git/ignore"), "*.env\n");
        assert!(!f.files(&f.dir(repo.path())).contains(&"secret.env".to_owned()));
        testkit::fixtures::write(&home.join(".gitconfig"), "[core]\n\texcludesFile = ~/mine\n");
        testkit::fixtures::write(&home.join("mine"), "kept\n*.env\nchanged\n");
        let files = f.files(&f.dir(repo.path()));
        assert!(!files.contains(&"secret.env".to_owned()) && files.contains(&"kept".to_owned()), "{files:?}");
    });
}
