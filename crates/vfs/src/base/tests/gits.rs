//! Bases from commits.

use proto::error::{Code, Coded};
use testkit::{GitRepo, Need, have};

use super::*;

fn repo() -> (GitRepo, String) {
    let repo = GitRepo::new();
    repo.file("a.txt", "alpha").file("src/b.rs", "fn b() {}").script("run.sh", "#!/bin/sh\n");
    repo.symlink("a.txt", "link").symlink("/etc/passwd", "out");
    let commit = repo.commit("one");
    (repo, commit)
}

#[test]
fn a_commit_is_frozen_with_a_repository_that_works() {
    if !have(Need::Git) {
        return;
    }
    let f = Fixture::new();
    let (repo, commit) = repo();
    repo.git(&["tag", "-a", "v1", "-m", "v1"]);
    let base = f.git(repo.path(), "main").unwrap();
    assert_eq!(base.git_head.as_deref(), Some(commit.as_str()));
    assert_eq!(f.files(&base), ["a.txt", "link", "out", "run.sh", "src/b.rs"]);
    assert!(base.warnings.is_empty(), "{:?}", base.warnings);
    let branch = f.branch(&base);
    assert_eq!(branch.status(), "");
    assert_eq!(branch.git(&["symbolic-ref", "HEAD"]), "refs/heads/main");
    assert_eq!(branch.git(&["log", "--format=%s"]), "one");
    assert_eq!(branch.git(&["describe"]), "v1");
    std::fs::write(branch.work.join("a.txt"), "ALPHA").unwrap();
    assert!(branch.git(&["diff"]).contains("+ALPHA"));
    branch.git(&["commit", "--quiet", "--all", "--message", "two"]);
    assert_eq!(branch.git(&["log", "--format=%s"]), "two\none");
    branch.git(&["fsck", "--strict"]);
    assert_eq!(std::fs::read_to_string(f.tree(&base).join("a.txt")).unwrap(), "alpha");
    assert_eq!(std::fs::read_to_string(repo.path().join("a.txt")).unwrap(), "alpha");
}

#[test]
fn one_content_is_one_base_and_every_kind_of_ref_resolves() {
    let f = Fixture::new();
    let (repo, first) = repo();
    repo.git(&["tag", "light"]);
    repo.git(&["checkout", "--quiet", "-b", "side"]);
    let second = repo.file("c", "c").commit("two");
    let main = f.git(repo.path(), "main").unwrap();
    assert_eq!(f.git(repo.path(), "refs/heads/main").unwrap(), main);
    let detached = f.git(repo.path(), "light").unwrap();
    assert_ne!(detached.id, main.id, "a branch and a commit differ in HEAD");
    assert_eq!(detached.tree, main.tree);
    for rev in [first.as_str(), &first[..10], "HEAD~1", "side^", "origin/main"] {
        assert_eq!(f.git(repo.path(), rev).unwrap().id, detached.id, "{rev}");
    }
    let side = f.git(repo.path(), "HEAD").unwrap();
    assert_eq!(side.git_head, Some(second));
    assert_eq!(f.branch(&side).git(&["symbolic-ref", "HEAD"]), "refs/heads/side");
    let third = repo.file("d", "d").commit("three");
    assert_eq!(f.git(repo.path(), "side").unwrap().git_head, Some(third));
    for rev in ["nope", "", "--help", "-1", "0123456789012345678901234567890123456789", "a\nb", "HEAD:a.txt"]
    {
        let error = f.git(repo.path(), rev).unwrap_err();
        assert_eq!(error.code(), Code::NotFound, "{rev}: {error}");
    }
}

#[test]
fn a_commit_that_no_ref_leads_to_is_found() {
    let f = Fixture::new();
    let (repo, _) = repo();
    let lost = repo.file("lost", "x").commit("lost");
    repo.git(&["reset", "--quiet", "--hard", "HEAD^"]);
    f.git(repo.path(), "main").unwrap();
    assert!(f.files(&f.git(repo.path(), &lost).unwrap()).contains(&"lost".to_owned()));
}

#[test]
fn git_status_does_not_read_the_files_again() {
    let f = Fixture::new();
    let (repo, _) = repo();
    for base in [f.git(repo.path(), "main").unwrap(), f.dir(repo.path())] {
        let branch = f.branch(&base);
        let file = branch.work.join("src/b.rs");
        let time = std::fs::metadata(&file).unwrap().modified().unwrap();
        // Same size, same time: only who reads the file can tell.
        std::fs::write(&file, "fn B() {}").unwrap();
        std::fs::File::options().write(true).open(&file).unwrap().set_modified(time).unwrap();
        assert_eq!(branch.status(), "", "{}", base.source);
        // And a change at once after the freeze is seen, although size and second may be the same.
        std::fs::write(branch.work.join("a.txt"), "ALPHA").unwrap();
        assert_eq!(branch.status(), " M a.txt", "{}", base.source);
    }
}

#[test]
fn bare_repositories_worktrees_and_file_urls_are_sources() {
    let f = Fixture::new();
    let (repo, commit) = repo();
    let dir = temp_dir("more");
    let bare = dir.path().join("bare.git");
    repo.git(&["clone", "--quiet", "--bare", ".", bare.to_str().unwrap()]);
    let tree = dir.path().join("tree");
    repo.git(&["worktree", "add", "--quiet", "-b", "wt", tree.to_str().unwrap()]);
    let url = PathBuf::from(format!("file://{}", repo.path().display()));
    let odd = dir.path().join(<std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(b"odd \n\xff"));
    std::fs::create_dir(&odd).unwrap();
    let odd = odd.join("wt");
    repo.git(&["clone", "--quiet", ".", dir.path().join("clone").to_str().unwrap()]);
    std::fs::rename(dir.path().join("clone"), &odd).unwrap();
    let base = f.dir(&odd);
    assert_eq!((base.git_head.as_deref(), base.warnings.len()), (Some(commit.as_str()), 0));
    for place in [&bare, &tree, &url, &repo.path().join("src")] {
        let base = f.git(place, "HEAD").unwrap();
        assert_eq!(base.git_head.as_deref(), Some(commit.as_str()), "{place:?}");
    }
}

#[test]
fn places_that_are_no_repository_are_told() {
    let f = Fixture::new();
    let dir = temp_dir("plain");
    assert_eq!(f.git(dir.path(), "HEAD").unwrap_err().code(), Code::BadInput);
    assert_eq!(f.git(&dir.path().join("gone"), "HEAD").unwrap_err().code(), Code::NotFound);
    let empty = GitRepo::new();
    let error = f.git(empty.path(), "HEAD").unwrap_err();
    assert_eq!(error.code(), Code::NotFound, "{error}");
    let error = f.git(Path::new("http://127.0.0.1:9/x.git"), "HEAD").unwrap_err();
    assert!(matches!(error, FreezeError::Git(_)), "{error}");
}

#[test]
fn submodules_and_lfs_pointers_are_told() {
    let f = Fixture::new();
    let (inner, _) = repo();
    let (repo, _) = repo();
    let inner = inner.path().to_str().unwrap();
    repo.git(&["-c", "protocol.file.allow=always", "submodule", "--quiet", "add", inner, "libs/inner"]);
    repo.file("big.bin", "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n");
    repo.file(".gitattributes", "*.bin filter=lfs diff=lfs merge=lfs -text\n");
    repo.commit("sub");
    let base = f.git(repo.path(), "main").unwrap();
    assert!(base.warnings.iter().any(|w| w.contains("libs/inner")), "{:?}", base.warnings);
    assert!(base.warnings.iter().any(|w| w.contains("1 file is kept in Git LFS")), "{:?}", base.warnings);
    assert!(f.tree(&base).join("libs/inner").is_dir());
    assert_eq!(f.branch(&base).status(), "");
    // In a directory the submodule's files are there.
    let base = f.dir(repo.path());
    assert!(f.files(&base).contains(&"libs/inner/src/b.rs".to_owned()), "{:?}", f.files(&base));
    assert!(!f.tree(&base).join("libs/inner/.git").exists());
    assert!(base.warnings.iter().any(|w| w.contains("libs/inner")), "{:?}", base.warnings);
    assert_eq!(f.branch(&base).status(), "");
}

#[test]
fn line_ends_and_names_of_every_kind_survive() {
    use std::os::unix::ffi::OsStrExt;
    let f = Fixture::new();
    let repo = GitRepo::new();
    repo.file(".gitattributes", "*.crlf text eol=crlf\n").file("a.crlf", "1\r\n2\r\n").file("b\nc", "x");
    std::fs::write(repo.path().join(std::ffi::OsStr::from_bytes(b"\xff\xfe")), "y").unwrap();
    repo.commit("one");
    for base in [f.git(repo.path(), "main").unwrap(), f.dir(repo.path())] {
        assert_eq!(base.files, 4);
        assert_eq!(std::fs::read(f.tree(&base).join("a.crlf")).unwrap(), b"1\r\n2\r\n");
        assert_eq!(f.branch(&base).status(), "");
    }
}

#[test]
fn a_shallow_clone_and_a_sha256_repository_are_sources() {
    let f = Fixture::new();
    let (repo, _) = repo();
    repo.file("c", "c").commit("two");
    let dir = temp_dir("shallow");
    let shallow = dir.path().join("s");
    let url = format!("file://{}", repo.path().display());
    repo.git(&["clone", "--quiet", "--depth=1", &url, shallow.to_str().unwrap()]);
    for base in [f.git(&shallow, "HEAD").unwrap(), f.dir(&shallow)] {
        assert!(base.warnings.is_empty(), "{:?}", base.warnings);
        let branch = f.branch(&base);
        assert_eq!(branch.git(&["log", "--format=%s"]), "two");
        assert_eq!(branch.status(), "");
    }
    let modern = dir.path().join("m");
    repo.git(&["init", "--quiet", "--object-format=sha256", "-b", "main", modern.to_str().unwrap()]);
    let modern = GitRepo::at(&modern);
    let commit = modern.file("a", "a").commit("one");
    assert_eq!(commit.len(), 64);
    for base in [f.git(modern.path(), &commit).unwrap(), f.dir(modern.path())] {
        assert_eq!(base.git_head.as_deref(), Some(commit.as_str()));
        assert_eq!(f.branch(&base).status(), "");
        f.branch(&base).git(&["fsck"]);
    }
}

#[test]
fn as_root_all_of_a_base_belongs_to_the_owner() {
    if !have(Need::Root) {
        return;
    }
    let f = Fixture::new();
    let (repo, _) = repo();
    for base in [f.git(repo.path(), "main").unwrap(), f.dir(repo.path())] {
        let other = testkit::process::run(testkit::process::command("find").arg(f.tree(&base)).args([
            "!",
            "-uid",
            &OTHER_UID.to_string(),
            "-o",
            "!",
            "-gid",
            &OTHER_GID.to_string(),
        ]));
        assert_eq!(String::from_utf8_lossy(&other.stdout), "");
    }
}

#[test]
fn a_user_without_privileges_freezes_too() {
    testkit::rootless("base::tests::gits::a_user_without_privileges_freezes_too", || {
        let f = Fixture::new();
        let (repo, _) = repo();
        std::fs::create_dir(repo.path().join("ro")).unwrap();
        repo.file("ro/file", "x");
        let mode = |mode| std::os::unix::fs::PermissionsExt::from_mode(mode);
        std::fs::set_permissions(repo.path().join("ro"), mode(0o555)).unwrap();
        let base = f.dir(repo.path());
        assert_eq!(f.branch(&base).status(), "?? ro/");
        assert_eq!(f.branch(&f.git(repo.path(), "main").unwrap()).status(), "");
        std::fs::set_permissions(repo.path().join("src/b.rs"), mode(0o000)).unwrap();
        let error = f.try_dir(repo.path(), false).unwrap_err();
        assert!(error.to_string().contains("src/b.rs"), "{error}");
        assert_eq!(error.code(), Code::BadInput);
        std::fs::set_permissions(repo.path().join("src/b.rs"), mode(0o644)).unwrap();
        std::fs::set_permissions(repo.path().join("ro"), mode(0o000)).unwrap();
        let error = f.try_dir(repo.path(), false).unwrap_err();
        assert!(error.to_string().contains("ro"), "{error}");
        std::fs::set_permissions(repo.path().join("ro"), mode(0o755)).unwrap();
    });
}

/// Serves the repositories below `dir` to one client after another, as a git server does.
fn serve(dir: &Path) -> u16 {
    let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = server.local_addr().unwrap().port();
    let dir = dir.to_owned();
    std::thread::spawn(move || {
        for client in server.incoming() {
            let client: std::os::fd::OwnedFd = client.unwrap().into();
            let mut git = testkit::process::command("git");
            git.args(["-c", "safe.directory=*", "daemon", "--inetd", "--export-all"]);
            git.arg(format!("--base-path={}", dir.display()));
            let status = git.stdin(client.try_clone().unwrap()).stdout(client).status().unwrap();
            assert!(status.success());
        }
    });
    port
}

#[test]
fn a_repository_is_fetched_from_a_server() {
    let f = Fixture::new();
    let dir = temp_dir("served");
    let repo = GitRepo::at(&dir.path().join("repo"));
    repo.file("a", "a").commit("one");
    repo.git(&["checkout", "--quiet", "-b", "side"]);
    let commit = repo.file("b", "b").commit("two");
    repo.git(&["checkout", "--quiet", "main"]);
    repo.git(&["update-ref", "refs/pull/7/head", &commit]);
    let url = format!("git://127.0.0.1:{}", serve(dir.path()));
    let from = |rev: &str| f.git(Path::new(&format!("{url}/repo")), rev);
    assert_eq!(from("HEAD").unwrap().files, 1);
    for rev in ["side", "origin/side", "refs/pull/7/head", &commit] {
        let base = from(rev).unwrap_or_else(|error| panic!("{rev}: {error}"));
        assert_eq!(base.git_head.as_deref(), Some(commit.as_str()), "{rev}");
        assert_eq!(f.branch(&base).status(), "");
    }
    assert_eq!(from("gone").unwrap_err().code(), Code::NotFound);
    let error = f.git(Path::new(&format!("{url}/gone")), "HEAD").unwrap_err();
    assert!(matches!(error, FreezeError::Git(_)), "{error}");
}

#[test]
fn a_head_without_commits_is_not_an_older_one() {
    let f = Fixture::new();
    let (repo, _) = repo();
    f.git(repo.path(), "HEAD").unwrap();
    // Nothing of a mirror is written in place: a kill halfway would leave it without a head.
    let mirrors = std::fs::read_dir(f.store.inner.layout.mirrors()).unwrap();
    let mirror = mirrors.map(|entry| entry.unwrap().path()).find(|path| path.is_dir()).unwrap();
    let (head, link) = (mirror.join("HEAD"), mirror.join("link"));
    std::fs::hard_link(&head, &link).unwrap();
    let before = std::fs::read(&head).unwrap();
    repo.git(&["symbolic-ref", "HEAD", "refs/heads/none"]);
    assert_eq!(f.git(repo.path(), "HEAD").unwrap_err().code(), Code::NotFound);
    assert!(f.git(repo.path(), "main").is_ok());
    assert_ne!(std::fs::read(&head).unwrap(), before);
    assert_eq!(std::fs::read(&link).unwrap(), before);
}

#[test]
fn many_packs_of_a_mirror_become_one_and_bases_stay_whole() {
    let f = Fixture::new();
    let (repo, _) = repo();
    let first = f.git(repo.path(), "HEAD").unwrap();
    for n in 0..26 {
        repo.file("n", n.to_string()).commit("more");
        f.git(repo.path(), "HEAD").unwrap();
    }
    let last = f.git(repo.path(), "HEAD").unwrap();
    for base in [first, last] {
        let branch = f.branch(&base);
        branch.git(&["fsck", "--full"]);
        assert_eq!(branch.status(), "");
    }
}

#[test]
fn two_at_once_make_one_base() {
    let f = Fixture::new();
    let (repo, _) = repo();
    let bases: Vec<BaseInfo> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|n| {
                let (f, repo) = (&f, &repo);
                scope.spawn(
                    move || if n % 2 == 0 { f.git(repo.path(), "main").unwrap() } else { f.dir(repo.path()) },
                )
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(bases[0], bases[2]);
    assert_eq!(bases[1], bases[3]);
    assert_eq!(std::fs::read_dir(f.state.path().join("bases")).unwrap().count(), 2);
}
