//! Attacks: whatever lies below a root, and however fast it is swapped, nothing outside is read, written, or waited for.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proto::path::TreePath;
use rustix::fs::{CWD, FileType, Mode};

use super::*;

/// Stops the other thread also when this one fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

struct Place {
    dir: tempfile::TempDir,
    root: File,
}

impl Place {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("root/d/e")).unwrap();
        std::fs::create_dir_all(dir.path().join("outside/e")).unwrap();
        for at in ["root/d/f", "root/d/e/f"] {
            std::fs::write(dir.path().join(at), "inside").unwrap();
        }
        for at in ["outside/f", "outside/e/f"] {
            std::fs::write(dir.path().join(at), "outside").unwrap();
        }
        let root = File::open(dir.path().join("root")).unwrap();
        Self { dir, root }
    }
    fn at(&self, path: &str) -> PathBuf {
        self.dir.path().join("root").join(path)
    }
    fn outside(&self) -> PathBuf {
        self.dir.path().join("outside")
    }
    /// Everything outside, as it was made.
    fn check_outside(&self) {
        for at in ["f", "e/f"] {
            assert_eq!(std::fs::read_to_string(self.outside().join(at)).unwrap(), "outside");
            assert_eq!(self.outside().join(at).metadata().unwrap().mode() & 0o777, 0o644);
        }
        assert_eq!(std::fs::read_dir(self.outside()).unwrap().count(), 2);
        assert_eq!(std::fs::read_dir(self.outside().join("e")).unwrap().count(), 1);
    }
}

fn path(text: &str) -> TreePath {
    text.parse().unwrap()
}

/// Every operation, on one path; what it returns is the caller's to ignore.
fn all(root: BorrowedFd<'_>, at: &TreePath) -> Vec<Result<Vec<u8>, BeneathError>> {
    let done = |_: ()| Vec::new();
    let place = |staged: Result<Staged, BeneathError>| {
        let mut staged = staged?;
        let replaced = staged.place(at).map_err(fail("write", at))?;
        assert!(matches!(replaced, Replaced::Nothing | Replaced::Staged));
        staged.discard(at).map(done)
    };
    vec![
        read(root, at, 0, 100),
        read_link(root, at),
        list(root, Some(at)).map(|_| Vec::new()),
        chmod(root, at, 0o600).map(|_| Vec::new()),
        place(Staged::file(root, at, &mut &b"edited"[..], 0o600, None)),
        place(Staged::symlink(root, at, b"edited", None)),
        make_dirs(root, at, None).map(|_| Vec::new()),
        rename(root, at, &path("renamed")).map(done).map_err(fail("rename", at)),
        copy_dir(root, at, &path("copied")).map(done),
        remove(root, at).map(done),
    ]
}

#[test]
fn links_lead_nowhere() {
    for target in ["absolute", "relative", "proc", "loop"] {
        for at in ["link", "link/f", "link/e/f", "link/e", "link/new", "link/new/er"] {
            let place = Place::new();
            let to = match target {
                "absolute" => place.outside(),
                "relative" => PathBuf::from("../outside"),
                "proc" => PathBuf::from("/proc/self/cwd"),
                _ => PathBuf::from("link"),
            };
            symlink(to, place.at("link")).unwrap();
            for result in all(place.root.as_fd(), &path(at)) {
                if at != "link" {
                    let error = result.expect_err("nothing lies behind a link");
                    assert!(matches!(error, BeneathError::Symlink(_) | BeneathError::NotDir(_)), "{error:?}");
                } else if let Ok(content) = result {
                    assert_ne!(content, b"outside");
                }
            }
            place.check_outside();
        }
    }
}

#[test]
fn fifos_sockets_and_devices_are_not_opened() {
    let place = Place::new();
    rustix::fs::mknodat(CWD, place.at("fifo"), FileType::Fifo, Mode::from_raw_mode(0o644), 0).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(place.at("socket")).unwrap();
    let start = Instant::now();
    for at in ["fifo", "socket"] {
        let at = path(at);
        assert!(matches!(read(place.root.as_fd(), &at, 0, 1), Err(BeneathError::NotFile(_))));
        assert!(matches!(chmod(place.root.as_fd(), &at, 0o600), Err(BeneathError::NotFile(_))));
        assert_eq!(stat(place.root.as_fd(), &at).unwrap().kind, FileKind::Other);
        remove(place.root.as_fd(), &at).unwrap();
    }
    assert!(start.elapsed() < Duration::from_secs(5));
}

#[test]
fn reads_are_cut_and_hardlinks_are_not_written_through() {
    let place = Place::new();
    let big = File::create(place.at("big")).unwrap();
    big.set_len(5 << 30).unwrap();
    let root = place.root.as_fd();
    assert_eq!(read(root, &path("big"), (5 << 30) - 3, 100).unwrap(), [0; 3]);
    assert_eq!(read(root, &path("big"), 0, 10).unwrap().len(), 10);
    assert_eq!(read(root, &path("big"), u64::MAX, 10).unwrap(), b"");
    std::fs::hard_link(place.outside().join("f"), place.at("hard")).unwrap();
    let mut staged = Staged::file(root, &path("hard"), &mut &b"edited"[..], 0o600, None).unwrap();
    staged.place(&path("hard")).unwrap();
    staged.discard(&path("hard")).unwrap();
    assert_eq!(std::fs::read_to_string(place.at("hard")).unwrap(), "edited");
    place.check_outside();
}

#[test]
fn directories_swapped_for_links_never_lead_out() {
    let place = Place::new();
    let stop = AtomicBool::new(false);
    std::fs::create_dir_all(place.at("real/e")).unwrap();
    std::fs::write(place.at("real/f"), "inside").unwrap();
    std::fs::create_dir_all(place.at("s")).unwrap();
    std::fs::create_dir_all(place.at("t/e")).unwrap();
    symlink(place.outside(), place.at("s/link")).unwrap();
    // `swap` is a directory or a link to the outside, and never missing.
    symlink(place.outside(), place.at("swap")).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let flags = RenameFlags::EXCHANGE;
                let (a, b) = (place.at("swap"), place.at("real"));
                let _ = rustix::fs::renameat_with(CWD, &a, CWD, &b, flags);
                let (a, b) = (place.at("t/e"), place.at("s/link"));
                let _ = rustix::fs::renameat_with(CWD, &a, CWD, &b, flags);
            }
        });
        let guard = Stop(&stop);
        let end = Instant::now() + Duration::from_millis(1_500);
        let mut reads = 0;
        while Instant::now() < end {
            for at in ["swap/f", "swap/e/f", "swap/new", "swap/e/new/er", "swap/e", "t/e/f", "t/e/new"] {
                let at = path(at);
                if let Ok(content) = read(place.root.as_fd(), &at, 0, 100) {
                    assert_ne!(content, b"outside");
                    reads += 1;
                }
                let staged = Staged::file(place.root.as_fd(), &at, &mut &b"edited"[..], 0o600, None);
                if let Ok(mut staged) = staged {
                    let _ = staged.place(&at);
                    let _ = staged.discard(&at);
                }
                let _ = chmod(place.root.as_fd(), &at, 0o755);
                let _ = make_dirs(place.root.as_fd(), &path("swap/e/deep/er"), None);
                if at.file_name() != b"f" {
                    let _ = remove(place.root.as_fd(), &at);
                }
                let _ = copy_dir(place.root.as_fd(), &path("swap"), &path("copy"));
                let _ = remove(place.root.as_fd(), &path("copy"));
            }
        }
        drop(guard);
        assert!(reads > 0, "the race was real");
    });
    place.check_outside();
}

#[test]
fn what_is_filled_while_it_is_removed_ends() {
    let place = Place::new();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for n in 0.. {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                let _ = std::fs::write(place.at(&format!("d/new{n}")), "x");
            }
        });
        let guard = Stop(&stop);
        let start = Instant::now();
        let _ = remove(place.root.as_fd(), &path("d"));
        drop(guard);
        assert!(start.elapsed() < Duration::from_secs(20));
    });
}

fn make_deep(place: &Place) {
    std::fs::create_dir_all(place.at("d")).unwrap();
    let mut dir: OwnedFd = File::open(place.at("d")).unwrap().into();
    for _ in 0..3_000 {
        rustix::fs::mkdirat(&dir, "deep", Mode::RWXU).unwrap();
        dir = rustix::fs::openat(&dir, "deep", OPEN_DIR, Mode::empty()).unwrap();
    }
}

#[test]
fn trees_deeper_than_any_path_are_measured_and_removed() {
    let place = Place::new();
    make_deep(&place);
    assert!(disk_use(&place.at("d")).unwrap().files >= 3_000);
    assert!(disk_use(&place.at("d")).unwrap().bytes >= 3_000 * 4096);
    remove(place.root.as_fd(), &path("d")).unwrap();
    assert!(!place.at("d").exists());
    make_deep(&place);
    std::fs::set_permissions(place.at("d/deep"), std::fs::Permissions::from_mode(0o000)).unwrap();
    remove_tree(&place.at("d")).unwrap();
    assert!(!place.at("d").exists());
}

#[test]
fn disk_space_counts_each_file_once() {
    let place = Place::new();
    let before = disk_use(&place.at("d")).unwrap().bytes;
    std::fs::write(place.at("d/one"), vec![1; 1 << 20]).unwrap();
    std::fs::hard_link(place.at("d/one"), place.at("d/e/two")).unwrap();
    File::create(place.at("d/sparse")).unwrap().set_len(1 << 30).unwrap();
    let grown = disk_use(&place.at("d")).unwrap().bytes - before;
    assert!(((1 << 20)..(1 << 20) + 65_536).contains(&grown), "{grown}");
    // Files take inodes, too.
    (0..100).for_each(|n| drop(File::create(place.at(&format!("d/empty{n}"))).unwrap()));
    assert!(disk_use(&place.at("d")).unwrap().bytes - before - grown >= 100 * 4096);
}

#[test]
fn a_path_counts_by_its_length() {
    let place = Place::new();
    let count = |dir: &str| {
        (0..10).for_each(|n| drop(File::create(place.at(&format!("{dir}/f{n}"))).unwrap()));
        disk_use(&place.at("d")).unwrap()
    };
    let before = disk_use(&place.at("d")).unwrap();
    let short = count("d");
    assert_eq!(short.files - before.files, 10);
    assert!((41_000..42_000).contains(&(short.bytes - before.bytes)), "{short:?}");
    let deep = format!("d{}", format!("/{}", "n".repeat(200)).repeat(6));
    std::fs::create_dir_all(place.at(&deep)).unwrap();
    let made = disk_use(&place.at("d")).unwrap();
    let long = count(&deep);
    // 1,208 bytes of path each, counted four times, and two files more.
    assert_eq!(long.files - made.files, 30);
    assert!((88_000..92_000).contains(&(long.bytes - made.bytes)), "{made:?} {long:?}");
}

fn is_inside(place: &Place, at: &Path) -> bool {
    at.canonicalize().is_ok_and(|at| at.starts_with(place.dir.path().canonicalize().unwrap().join("root")))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn any_links_and_any_paths_stay_beneath(
        links in proptest::collection::vec(("[ab]{1,2}", "(\\.\\./|/|[abde]/){0,4}[abdef.]{1,2}"), 0..5),
        paths in proptest::collection::vec("[abdef]{1,2}(/[abdef]{1,2}){0,3}", 1..6),
    ) {
        let place = Place::new();
        for (name, target) in links {
            let _ = symlink(target, place.at(&name));
        }
        for at in paths {
            let results = all(place.root.as_fd(), &path(&at));
            for content in results.into_iter().flatten() {
                prop_assert_ne!(content, b"outside");
            }
            // Nothing came to be at the same path outside.
            prop_assert!(!place.dir.path().join(&at).exists() || is_inside(&place, &place.dir.path().join(&at)));
        }
        place.check_outside();
    }
}
