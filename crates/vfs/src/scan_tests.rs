//! Tests of capture, against the kernel's own overlayfs and against plain trees.

use std::os::fd::OwnedFd;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use rustix::fs::{Mode, OFlags};

use super::*;
use crate::entries::Class;
use crate::world::{Branch, World, path};

fn base(root: &std::path::Path) {
    for (path, text) in [
        ("a", "a"),
        ("d/1", "one"),
        ("d/2", "two"),
        ("d/e/3", "three"),
        ("f/1", "f"),
        ("f/g/h/4", "four"),
        (".gitignore", "target/\n*.log\n"),
        (".git/HEAD", "ref: refs/heads/main\n"),
        ("kept.log", "tracked although ignored"),
    ] {
        let at = root.join(path);
        std::fs::create_dir_all(at.parent().unwrap()).unwrap();
        std::fs::write(at, text).unwrap();
    }
    symlink("a", root.join("link")).unwrap();
}

/// Whether a scan found no change.
fn is_empty(report: &ScanReport) -> bool {
    ScanReport { disk: report.disk, ..ScanReport::default() } == *report
}

/// Runs `work` on a branch of each engine, scans, and checks the record and the report.
fn check(work: impl Fn(&Branch), expected: &[&str]) {
    let mut world = World::new(base);
    let mut branches = vec![world.copy()];
    branches.extend(world.overlay());
    for branch in branches {
        assert!(world.changed(&branch).is_empty());
        work(&branch);
        assert_eq!(world.changed(&branch), expected);
        world.check(&branch);
        let again = world.scan(&branch);
        assert!(is_empty(&again), "a second scan finds nothing: {again:?}");
        assert_eq!(world.store.audit_verify().unwrap().problem, None);
    }
}

#[test]
fn plain_changes_are_found() {
    check(
        |b| {
            b.write("new/deep/x", "x");
            b.write("a", "changed");
            std::fs::remove_file(b.at("d/1")).unwrap();
            std::fs::set_permissions(b.at("d/2"), std::fs::Permissions::from_mode(0o755)).unwrap();
            std::fs::remove_file(b.at("link")).unwrap();
            symlink("d/2", b.at("link")).unwrap();
        },
        &["M a", "D d/1", "M d/2", "M link", "A new/deep/x"],
    );
}

#[test]
fn a_directory_is_deleted_replaced_and_made_again() {
    check(|b| std::fs::remove_dir_all(b.at("d")).unwrap(), &["D d/1", "D d/2", "D d/e/3"]);
    check(
        |b| {
            std::fs::remove_dir_all(b.at("d")).unwrap();
            b.write("d/2", "another");
            b.write("d/e/new", "n");
        },
        &["D d/1", "M d/2", "D d/e/3", "A d/e/new"],
    );
    check(
        |b| {
            std::fs::remove_dir_all(b.at("d")).unwrap();
            b.write("d", "a file now");
        },
        &["A d", "D d/1", "D d/2", "D d/e/3"],
    );
    check(
        |b| {
            std::fs::remove_file(b.at("a")).unwrap();
            b.write("a/b/c", "a directory now");
        },
        &["D a", "A a/b/c"],
    );
    check(
        |b| {
            std::fs::remove_file(b.at("a")).unwrap();
            symlink("d", b.at("a")).unwrap();
        },
        &["T a"],
    );
}

/// Renames a directory, by hand where the kernel can't.
fn rename_dir(b: &Branch, from: &str, to: &str) {
    if let Err(error) = std::fs::rename(b.at(from), b.at(to)) {
        assert_eq!((error.kind(), marks()), (io::ErrorKind::CrossesDevices, Marks::User));
        crate::world::copy_tree(&b.at(from), &b.at(to));
        std::fs::remove_dir_all(b.at(from)).unwrap();
    }
}

#[test]
fn a_renamed_directory_is_followed() {
    check(|b| rename_dir(b, "f", "moved"), &["D f/1", "D f/g/h/4", "A moved/1", "A moved/g/h/4"]);
    check(
        |b| {
            rename_dir(b, "f", "moved");
            b.write("moved/g/h/4", "changed");
            std::fs::remove_file(b.at("moved/1")).unwrap();
            rename_dir(b, "moved/g", "d/g");
            b.write("f/1", "f");
        },
        &["A d/g/h/4", "D f/g/h/4"],
    );
    check(
        |b| {
            rename_dir(b, "d", "t");
            rename_dir(b, "f", "d");
            rename_dir(b, "t", "f");
        },
        &["M d/1", "D d/2", "D d/e/3", "A d/g/h/4", "M f/1", "A f/2", "A f/e/3", "D f/g/h/4"],
    );
}

#[test]
fn ignored_files_are_recorded_apart_and_their_content_is_not_kept() {
    let mut world = World::new(base);
    let b = world.copy();
    b.write("target/debug/x", "built");
    b.write("x.log", "log");
    b.write("kept.log", "changed");
    b.write(".git/HEAD", "ref: refs/heads/other\n");
    let report = world.scan(&b);
    assert_eq!((report.changed.tree_total, report.changed.other_total), (1, 3));
    let recorded = world.recorded(&b);
    let of = |text: &str| recorded[&path(text)].clone();
    assert_eq!((of("target/debug/x").class, of("target/debug/x").kept), (Class::Ignored, false));
    assert_eq!(of("target/debug/x").hash, Some(blake3::hash(b"built")));
    assert_eq!((of("kept.log").class, of("kept.log").kept), (Class::Tree, true));
    assert_eq!((of(".git/HEAD").class, of(".git/HEAD").kept), (Class::Git, true));
    assert!(world.store.inner.blobs.has(&blake3::hash(b"changed")));
    assert!(!world.store.inner.blobs.has(&blake3::hash(b"built")));
}

#[test]
fn a_change_of_the_patterns_changes_classes() {
    let mut world = World::new(base);
    let mut branches = vec![world.copy()];
    branches.extend(world.overlay());
    for mut b in branches {
        b.write("x.log", "log");
        b.write("y.tmp", "tmp");
        assert_eq!(world.changed(&b), ["A y.tmp"]);
        if b.upper(&world).ends_with("upper") {
            world.seal(&mut b);
        }
        b.write(".gitignore", "*.tmp\n");
        assert_eq!(world.changed(&b), ["M .gitignore", "A x.log", "D y.tmp"]);
        let entry = world.recorded(&b)[&path("x.log")].clone();
        assert_eq!((entry.class, entry.kept), (Class::Tree, true));
        assert!(world.store.inner.blobs.has(&blake3::hash(b"log")));
        assert!(is_empty(&world.scan(&b)));
        std::fs::remove_file(b.at(".gitignore")).unwrap();
        assert_eq!(world.changed(&b), ["D .gitignore", "A y.tmp"]);
        world.check(&b);
    }
}

#[test]
fn no_write_right_after_a_scan_is_missed() {
    let mut world = World::new(base);
    let b = world.copy();
    let until = Instant::now() + Duration::from_secs(3);
    let mut n = 0_u8;
    while Instant::now() < until {
        n = n.wrapping_add(1);
        // The same size, the same inode, within one tick of the clock.
        std::fs::write(b.at("a"), [b'0' + n % 2]).unwrap();
        world.scan(&b);
        assert_eq!(world.recorded(&b)[&path("a")].hash, Some(blake3::hash(&[b'0' + n % 2])), "{n}");
    }
}

#[test]
fn a_young_file_is_read_again_while_writers_live() {
    let mut world = World::new(base);
    let b = world.copy();
    b.write("young", "y");
    b.write("old", "o");
    let old = std::time::SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
    let times = std::fs::FileTimes::new().set_modified(old);
    File::options().write(true).open(b.at("old")).unwrap().set_times(times).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    world.store.scan_live(&b.id, &Actor::cli(1), None).unwrap();
    // A mapped page that is dirty already takes writes without a new time: no identity is trusted meanwhile.
    assert_eq!(world.recorded(&b)[&path("young")].stat, StatId::default());
    assert_eq!(world.recorded(&b)[&path("old")].stat, StatId::default());
    world.scan(&b);
    assert_ne!(world.recorded(&b)[&path("young")].stat, StatId::default());
    assert!(is_empty(&world.scan(&b)));
}

#[test]
fn odd_files_neither_stop_nor_hang_a_scan() {
    let mut world = World::new(base);
    let mut branches = vec![world.copy()];
    branches.extend(world.overlay());
    for b in branches {
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        let make = |name: &str, kind| {
            rustix::fs::mknodat(rustix::fs::CWD, b.at(name), kind, mode, 0).unwrap();
        };
        make("fifo", rustix::fs::FileType::Fifo);
        make("socket", rustix::fs::FileType::Socket);
        symlink("loop", b.at("loop")).unwrap();
        symlink("/etc/passwd", b.at("out")).unwrap();
        let odd = std::ffi::OsStr::from_bytes(b"n\n\xff\x01");
        std::fs::write(b.at("").join(odd), "odd").unwrap();
        std::fs::write(b.at("secret"), "s").unwrap();
        std::fs::set_permissions(b.at("secret"), std::fs::Permissions::from_mode(0o000)).unwrap();
        let sparse = File::create(b.at("sparse")).unwrap();
        sparse.set_len(300 * 1024 * 1024).unwrap();
        std::fs::create_dir_all(b.at(&["deep"; 300].join("/"))).unwrap();
        let report = world.scan(&b);
        assert_eq!(report.unscannable, Vec::<String>::new());
        let recorded = world.recorded(&b);
        assert_eq!(recorded[&path("fifo")].kind, Kind::Other);
        assert!(!recorded[&path("sparse")].kept);
        assert_eq!(recorded[&path("secret")].hash, Some(blake3::hash(b"s")));
        assert_eq!(recorded[&path("out")].hash, Some(blake3::hash(b"/etc/passwd")));
        assert_eq!(recorded[&TreePath::new(odd.as_bytes()).unwrap()].hash, Some(blake3::hash(b"odd")));
    }
}

/// Makes a directory with a path that is longer than a record can hold, and a file in it.
fn nest(top: &std::path::Path) {
    let mut dir: OwnedFd = File::open(top).unwrap().into();
    for _ in 0..14 {
        let name = "n".repeat(240);
        rustix::fs::mkdirat(&dir, &name, Mode::RWXU).unwrap();
        dir = rustix::fs::openat(&dir, &name, OFlags::DIRECTORY | OFlags::RDONLY, Mode::empty()).unwrap();
    }
    drop(rustix::fs::openat(&dir, "file", OFlags::CREATE | OFlags::WRONLY, Mode::RWXU).unwrap());
}

#[test]
fn what_can_not_be_recorded_is_told_and_not_taken_for_deleted() {
    let mut world = World::new(base);
    let mut branches = vec![world.copy()];
    branches.extend(world.overlay());
    for b in branches {
        // What is ignored is no part of the tree.
        std::fs::create_dir(b.at("target")).unwrap();
        nest(&b.at("target"));
        assert_eq!(world.scan(&b).unscannable_told(), None);
        nest(b.root());
        let report = world.scan(&b);
        assert_eq!(report.unscannable.len(), 1, "{report:?}");
        assert!(report.unscannable_told().unwrap().contains("can't be captured: passed over a name"));
        let before = world.recorded(&b);
        // It is told again as long as it is there, and only with a command a row says it.
        let told = world.store.scan(&b.id, &Actor::unknown(), Some("true")).unwrap();
        assert_eq!(told.unscannable, report.unscannable);
        let rows = world.store.audit_sql("SELECT detail FROM audit WHERE op = 'unscannable'").unwrap();
        assert!(format!("{:?}", rows.rows).contains("passed over a name"), "{:?}", rows.rows);
        assert_eq!(world.recorded(&b), before);
        // More holes than are read.
        let sparse = File::create(b.at("sparse")).unwrap();
        sparse.set_len(1 << 40).unwrap();
        let since = Instant::now();
        let report = world.scan(&b);
        assert!(report.unscannable.iter().any(|note| note.contains("sparse")), "{report:?}");
        assert!(since.elapsed() < Duration::from_secs(20));
        // Taken away, all is well.
        crate::beneath::remove_tree(&b.at(&"n".repeat(240))).unwrap();
        std::fs::remove_file(b.at("sparse")).unwrap();
        assert_eq!(world.scan(&b).unscannable_told(), None);
    }
}

#[test]
fn what_the_code_marks_itself_is_not_obeyed() {
    let mut world = World::new(base);
    // In a user namespace the kernel itself hides the code's marks from ours.
    let Some(b) = world.overlay().filter(|_| marks() == Marks::Trusted) else { return };
    b.write("d/new", "n");
    b.write("f/new", "n");
    let set = |path: &str, name: &str, value: &[u8]| {
        rustix::fs::setxattr(b.at(path), name, value, rustix::fs::XattrFlags::empty()).unwrap();
    };
    set("d", "user.overlay.opaque", b"y");
    set("f", "user.overlay.redirect", b"/d");
    set("d", "trusted.overlay.opaque", b"y");
    assert_eq!(world.changed(&b), ["A d/new", "A f/new"]);
    world.check(&b);
}

#[test]
fn a_scan_that_can_not_be_recorded_leaves_nothing() {
    let mut world = World::new(base);
    let b = world.copy();
    world.scan(&b);
    for n in 0..500 {
        b.write(&format!("n/{n}-{}", "x".repeat(200)), "text");
    }
    let before = world.recorded(&b);
    let set = |pages: u32| {
        world.store.inner.db.read().pragma_update(None, "max_page_count", pages).unwrap();
    };
    let pages: u32 =
        world.store.inner.db.read().pragma_query_value(None, "page_count", |row| row.get(0)).unwrap();
    set(pages + 5);
    let failed = world.store.scan_locked(&b.id, &Actor::cli(1), Some("cmd"), Writers::Gone);
    assert_eq!(failed.unwrap_err().code(), Code::NoSpace);
    assert_eq!(world.recorded(&b), before);
    assert_eq!(world.store.audit_verify().unwrap().rows, 1);
    set(1_000_000);
    world.store.inner.db.read().busy_timeout(Duration::from_millis(10)).unwrap();
    let other = Connection::open(world.store.dir().join("tendon.db")).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    world.store.scan_locked(&b.id, &Actor::cli(1), Some("cmd"), Writers::Gone).unwrap_err();
    other.execute_batch("ROLLBACK").unwrap();
    assert_eq!(world.recorded(&b), before);
    assert_eq!(world.store.audit_verify().unwrap().rows, 1);
    assert_eq!(world.changed(&b).len(), 500);
    assert_eq!(world.store.audit_verify().unwrap().problem, None);
}

#[test]
fn files_that_change_and_vanish_meanwhile_do_not_stop_a_scan() {
    let mut world = World::new(base);
    let b = world.copy();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for n in 0_u32.. {
                if stop.load(std::sync::atomic::Ordering::Relaxed) {
                    return;
                }
                b.write(&format!("churn/{}/{}", n % 7, n % 13), &"x".repeat(n as usize % 5_000));
                if n % 5 == 0 {
                    let _ = std::fs::remove_dir_all(b.at(&format!("churn/{}", n % 7)));
                }
                if n % 11 == 0 {
                    let _ = std::fs::rename(b.at("churn/1"), b.at("churn/8"));
                    let _ = symlink("/etc", b.at("churn/1"));
                    let _ = std::fs::remove_file(b.at("churn/1"));
                }
            }
        });
        for _ in 0..40 {
            world.store.scan_locked(&b.id, &Actor::cli(1), None, Writers::MayLive).unwrap();
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    world.scan(&b);
    world.check(&b);
    assert_eq!(world.store.audit_verify().unwrap().problem, None);
}

use std::os::unix::ffi::OsStrExt;

/// One step of the model test: names are drawn from few, so that steps meet.
#[derive(Clone, Debug)]
enum Step {
    Write(usize, u8),
    Remove(usize),
    Mkdir(usize),
    Rename(usize, usize),
    Link(usize, usize),
    Symlink(usize, u8),
    Mode(usize, u8),
    Scan,
    Seal,
}

const NAMES: [&str; 16] = [
    "a", "d", "d/1", "d/2", "d/e", "d/e/3", "d/n", "f", "f/1", "f/g", "f/g/h", "f/g/h/4", "n", "n/d",
    "n/f/x", "d/e/g",
];

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let name = 0..NAMES.len();
    let step = prop_oneof![
        4 => (name.clone(), any::<u8>()).prop_map(|(n, b)| Step::Write(n, b)),
        4 => name.clone().prop_map(Step::Remove),
        3 => name.clone().prop_map(Step::Mkdir),
        6 => (name.clone(), name.clone()).prop_map(|(a, b)| Step::Rename(a, b)),
        1 => (name.clone(), name.clone()).prop_map(|(a, b)| Step::Link(a, b)),
        1 => (name.clone(), any::<u8>()).prop_map(|(n, b)| Step::Symlink(n, b)),
        1 => (name, any::<u8>()).prop_map(|(n, b)| Step::Mode(n, b)),
        3 => Just(Step::Scan),
        1 => Just(Step::Seal),
    ];
    proptest::collection::vec(step, 1..40)
}

fn run(world: &mut World, branch: &mut Branch, steps: &[Step], overlay: bool) {
    for step in steps {
        let at = |n: &usize| branch.at(NAMES[*n]);
        // Steps that make no sense fail, which is fine: what counts is what lies there in the end.
        match step {
            Step::Write(n, byte) => drop(std::fs::write(at(n), [*byte])),
            Step::Remove(n) => drop(std::fs::remove_file(at(n)).or_else(|_| std::fs::remove_dir_all(at(n)))),
            Step::Mkdir(n) => drop(std::fs::create_dir(at(n))),
            Step::Rename(a, b) => drop(std::fs::rename(at(a), at(b))),
            Step::Link(a, b) => drop(std::fs::hard_link(at(a), at(b))),
            Step::Symlink(n, byte) => drop(symlink(format!("{byte}"), at(n))),
            Step::Mode(n, byte) => {
                let at = at(n);
                if at.symlink_metadata().is_ok_and(|meta| !meta.is_symlink()) {
                    let mode = std::fs::Permissions::from_mode(0o700 | u32::from(*byte));
                    std::fs::set_permissions(at, mode).unwrap();
                }
            }
            Step::Scan => {
                world.scan(branch);
                world.check(branch);
            }
            Step::Seal if overlay => {
                world.scan(branch);
                world.seal(branch);
            }
            Step::Seal => {}
        }
    }
    world.scan(branch);
    world.check(branch);
    let again = world.scan(branch);
    assert_eq!(again.first_seq, None, "{again:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_record_is_what_the_kernel_shows(steps in steps()) {
        let mut world = World::new(base);
        let mut copy = world.copy();
        run(&mut world, &mut copy, &steps, false);
        if let Some(mut overlay) = world.overlay() {
            run(&mut world, &mut overlay, &steps, true);
        }
        prop_assert_eq!(world.store.audit_verify().unwrap().problem, None);
    }
}

#[test]
fn the_same_holds_on_overlays_of_a_user_namespace() {
    if !testkit::have(testkit::Need::RootlessOverlay) {
        return;
    }
    testkit::rootless("scan::tests::the_same_holds_on_overlays_of_a_user_namespace", || {
        let mut child = testkit::process::command("unshare");
        child.args(["-Urm", "--"]).arg(std::env::current_exe().unwrap());
        child.args(["scan::tests::", "--skip", "the_same_holds"]);
        let out = testkit::process::run(&mut child);
        let text = String::from_utf8_lossy(&out.stdout).into_owned();
        assert!(text.contains("the_record_is_what_the_kernel_shows ... ok"), "{text}");
    });
}
