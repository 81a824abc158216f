//! Removal of bases and mirrors.

use proto::error::{Code, Coded};
use rusqlite::params;
use testkit::{GitRepo, Need, have};

use super::*;
use crate::base::dotgit::{Mirror, Origin};
use crate::{Actor, Cancel};

fn count(dir: &Path) -> usize {
    std::fs::read_dir(dir).unwrap().count()
}

/// The rows of a branch on the base, as creating one makes them.
fn add_branch(f: &Fixture, base: &BaseInfo, id: &str, dropped: bool) {
    let now = i64::try_from(f.clock.now_ms()).unwrap();
    let conn = f.store.inner.db.read();
    let layer = id.replace("br-", "ly-");
    conn.execute(
        "INSERT INTO layers VALUES (?1, ?2, ?3, 1, 'open', 'overlay', ?4)",
        params![layer, f_layer(&conn, base), base.id.as_str(), now],
    )
    .unwrap();
    conn.execute(
        "INSERT INTO branches VALUES (?1, NULL, ?2, ?3, NULL, NULL, 'overlay', ?4, ?5)",
        params![id, base.id.as_str(), layer, now, dropped.then_some(now)],
    )
    .unwrap();
}

fn f_layer(conn: &rusqlite::Connection, base: &BaseInfo) -> String {
    conn.query_row("SELECT layer FROM bases WHERE id = ?1", [base.id.as_str()], |r| r.get(0)).unwrap()
}

#[test]
fn what_no_branch_stands_on_is_removed() {
    let f = Fixture::new();
    let repo = GitRepo::new();
    repo.file("a", "a").commit("one");
    let git = f.git(repo.path(), "HEAD").unwrap();
    let used = f.store.freeze_files(&[inline("a", "1")]).unwrap();
    let dropped = f.store.freeze_files(&[inline("b", "1")]).unwrap();
    add_branch(&f, &used, "br-0123456789abcdef", false);
    add_branch(&f, &dropped, "br-0123456789abcdeg", true);
    assert_eq!(f.store.base(&used.id).unwrap().branches, 1);
    let report = f.store.base_gc().unwrap();
    assert_eq!(report.removed, std::slice::from_ref(&dropped.id), "the other one was handed out just now");
    f.clock.0.fetch_add(60_000, Ordering::Relaxed);
    let mirrors = f.state.path().join("mirrors");
    assert_eq!(std::fs::read_dir(&mirrors).unwrap().flatten().filter(|e| e.path().is_dir()).count(), 1);
    let report = f.store.base_gc().unwrap();
    assert_eq!(report.removed, std::slice::from_ref(&git.id));
    assert!(report.bytes > 0);
    assert_eq!(std::fs::read_dir(&mirrors).unwrap().flatten().filter(|e| e.path().is_dir()).count(), 0);
    assert_eq!(count(&f.state.path().join("bases")), 1);
    assert_eq!(f.store.bases().unwrap().len(), 1);
    assert!(f.tree(&used).join("a").exists());
    assert!(f.store.base(&git.id).is_err());
    assert!(f.entries(&used).len() == 1);
    assert_eq!(f.git(repo.path(), "HEAD").unwrap().tree, git.tree);
}

#[test]
fn bases_are_collected_by_age_and_size_and_never_one_that_somebody_may_want() {
    let f = Fixture::new();
    let day = 24 * 60 * 60 * 1000;
    let base = |name: &str| f.store.freeze_files(&[inline(name, &"x".repeat(1000))]).unwrap();
    let verified = |name: &str| {
        let made = base(name);
        let verify = Actor::verify(&proto::ids::VerifyId::from_random([name.as_bytes()[0]; 10]));
        let branch = f.store.create_branch(&made.id, None, &verify).unwrap();
        f.store.drop_branch(&branch.id, &verify).unwrap();
        f.clock.0.fetch_add(60_000, Ordering::Relaxed);
        made.id
    };
    let user = Actor::cli(0);
    let (used, dropped, frozen) = (base("used"), base("dropped"), base("frozen"));
    f.store.create_branch(&used.id, Some("mine"), &user).unwrap();
    let branch = f.store.create_branch(&dropped.id, None, &user).unwrap();
    f.store.drop_branch(&branch.id, &user).unwrap();
    f.clock.0.fetch_add(60_000, Ordering::Relaxed);
    let (first, second, third) = (verified("a"), verified("b"), verified("c"));
    let collect = |idle_ms_max, bytes_max| f.store.collect_bases(idle_ms_max, bytes_max).unwrap().removed;
    assert_eq!(collect(0, 0), []);
    assert_eq!(collect(day, 5000), []);
    // Five of 1,000 bytes are unused; the one that was used longest ago goes first.
    assert_eq!(collect(day, 1999), [second, first]);
    // What users made or dropped is not taken for its size, nor is the last one of all.
    assert_eq!(collect(day, 1), []);
    // A second look at an old base makes it young again.
    f.clock.0.fetch_add(day / 2, Ordering::Relaxed);
    assert_eq!(verified("c"), third);
    f.clock.0.fetch_add(day / 2 + 60_000, Ordering::Relaxed);
    let mut gone = collect(day, 0);
    gone.sort();
    let mut want = vec![dropped.id, frozen.id];
    want.sort();
    assert_eq!(gone, want);
    f.clock.0.fetch_add(day, Ordering::Relaxed);
    assert_eq!(collect(day, 0), [third]);
    assert_eq!(f.store.bases().unwrap().into_iter().map(|base| base.id).collect::<Vec<_>>(), [used.id]);
}

#[test]
fn locks_of_mirrors_go_unless_somebody_holds_them() {
    let f = Fixture::new();
    let repo = GitRepo::new();
    repo.file("a", "a").commit("one");
    f.git(repo.path(), "HEAD").unwrap();
    let mirrors = f.state.path().join("mirrors");
    let locks = || {
        let names = std::fs::read_dir(&mirrors).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<_> = names.map(|name| name.into_string().unwrap()).collect();
        names.retain(|name| name.ends_with(".lock"));
        names.sort();
        names
    };
    std::fs::write(mirrors.join("left.lock"), "").unwrap();
    let held = std::fs::File::create(mirrors.join("held.lock")).unwrap();
    held.lock().unwrap();
    f.store.base_gc().unwrap();
    assert_eq!(locks().len(), 2, "that of a mirror in use, and the one that is held: {:?}", locks());
    assert!(!mirrors.join("left.lock").exists());
    drop(held);
    f.clock.0.fetch_add(60_000, Ordering::Relaxed);
    f.store.base_gc().unwrap();
    assert_eq!(locks(), [""; 0]);
    // Who waited for a lock that was removed meanwhile holds one that keeps others out.
    let url = repo.path().as_os_str();
    let lock = || Mirror::lock(&f.store.inner.layout, Origin::Url(url), &Cancel::default()).unwrap();
    let first = lock();
    let path = mirrors.join(&locks()[0]);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(lock);
        std::thread::sleep(std::time::Duration::from_millis(100));
        std::fs::remove_file(&path).unwrap();
        drop(first);
        let second = waiter.join().unwrap();
        assert!(std::fs::File::open(&path).unwrap().try_lock().is_err());
        drop(second);
    });
}

#[test]
fn what_a_crash_left_is_swept() {
    let f = Fixture::new();
    let repo = GitRepo::new();
    repo.file("a", "a").commit("one");
    let base = f.git(repo.path(), "HEAD").unwrap();
    let stray = f.state.path().join("bases/ly-0000000000000000");
    std::fs::create_dir_all(stray.join("deep")).unwrap();
    let mirror = std::fs::read_dir(f.state.path().join("mirrors")).unwrap().flatten();
    let mirror = mirror.map(|e| e.path()).find(|path| path.is_dir()).unwrap();
    std::fs::write(mirror.join("packed-refs.lock"), "").unwrap();
    std::fs::write(mirror.join("HEAD.lock"), "").unwrap();
    let tmp = f.state.path().join("tmp/base-x/tree/closed");
    std::fs::create_dir_all(&tmp).unwrap();
    let Fixture { state, store, .. } = f;
    drop(store);
    let (store, clock) = open(state.path());
    store.sweep_bases().unwrap();
    assert!(!stray.exists() && !tmp.exists());
    let f = Fixture { state, store, clock };
    assert!(f.tree(&base).join("a").exists());
    repo.file("b", "b").commit("two");
    assert_eq!(f.git(repo.path(), "HEAD").unwrap().files, 2);
}

#[test]
fn a_full_disk_is_told_and_leaves_nothing() {
    if !have(Need::Root) {
        return;
    }
    testkit::private_mounts("base::tests::gc::a_full_disk_is_told_and_leaves_nothing", || {
        let state = temp_dir("full");
        let mut mount = testkit::process::command("mount");
        mount.args(["-t", "tmpfs", "-o", "size=3m", "tmpfs"]).arg(state.path());
        testkit::process::run(&mut mount);
        let (store, clock) = open(state.path());
        let f = Fixture { state, store, clock };
        // Content that can't be compressed: BLAKE3's own output.
        let mut noise = vec![0; 4 << 20];
        blake3::Hasher::new().finalize_xof().fill(&mut noise);
        let repo = GitRepo::new();
        repo.file("noise", &noise).commit("one");
        let plain = temp_dir("plain");
        std::fs::write(plain.path().join("noise"), &noise).unwrap();
        let files = [InlineFile { content: JsonBytes::new(&noise), ..inline("noise", "") }];
        for (what, result) in [
            ("git", f.git(repo.path(), "HEAD")),
            ("repository", f.try_dir(repo.path(), false)),
            ("directory", f.try_dir(plain.path(), false)),
            ("files", f.store.freeze_files(&files)),
        ] {
            let error = result.expect_err(what);
            assert_eq!(error.code(), Code::NoSpace, "{what}: {error:?}");
        }
        assert!(f.store.bases().unwrap().is_empty());
        assert_eq!((count(&f.state.path().join("bases")), count(&f.state.path().join("tmp"))), (0, 0));
        assert_eq!(f.store.freeze_files(&[inline("a", "1")]).unwrap().files, 1);
    });
}
