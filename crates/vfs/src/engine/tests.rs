//! What both engines promise, tried as root, as a user in a user namespace, and (copies) as a plain user.

use std::io::Read;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::Arc;

use proto::api::BranchInfo;
use proto::error::{Code, Coded};
use proto::ids::{BaseId, BranchId};
use proto::path::{JsonBytes, TreePath};
use proto::verify::InlineFile;
use testkit::process::{command, run, variable};
use testkit::{Need, have};

use super::Root;
use super::tree::{CopyOptions, copy_tree};
use crate::diff::DiffFormat;
use crate::entries::{self, Kind};
use crate::export::ExportTarget;
use crate::scan::Layers;
use crate::world::shown;
use crate::{Actor, EngineChoice, ForkBusy, Store, StoreOptions, SystemClock};

pub(crate) const USERNS: &str = "VFS_TEST_USERNS";

/// Runs `body` with each engine, as each kind of user that this machine lets us be. `test` is the calling test's full name.
pub(crate) fn on_all(test: &str, body: impl Fn(EngineChoice)) {
    if variable(USERNS).is_some() {
        body(EngineChoice::Overlay);
        body(EngineChoice::Copy);
        return;
    }
    if testkit::user::is_root() && have(Need::Overlay) {
        body(EngineChoice::Overlay);
    }
    body(EngineChoice::Copy);
    if have(Need::RootlessOverlay) {
        testkit::rootless(test, || {
            let own = std::env::current_exe().unwrap();
            let mut child = command("unshare");
            child.args(["--user", "--map-root-user", "--mount"]).arg(own);
            child.args(["--exact", test, "--nocapture", "--test-threads=1"]).env(USERNS, "1");
            let output = run(&mut child);
            assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "no test is called {test}");
        });
    }
}

pub(crate) struct Fixture {
    pub(crate) store: Option<Store>,
    pub(crate) base: BaseId,
    engine: EngineChoice,
    dir: tempfile::TempDir,
}

pub(crate) fn path(text: &str) -> TreePath {
    text.parse().unwrap()
}

fn freeze(store: &Store, files: &[(&str, &str)]) -> BaseId {
    let files: Vec<_> = files
        .iter()
        .map(|(at, text)| InlineFile {
            path: path(at),
            content: JsonBytes::new(text.as_bytes()),
            executable: false,
        })
        .collect();
    store.freeze_files(&files).unwrap().id
}

pub(crate) fn me() -> Actor {
    Actor::cli(7)
}

impl Fixture {
    pub(crate) fn new(engine: EngineChoice, files: &[(&str, &str)]) -> Self {
        let dir = testkit::temp_dir("engine");
        let store = Store::open(&dir.path().join("state"), options(engine)).unwrap();
        let base = freeze(&store, files);
        Self { store: Some(store), base, engine, dir }
    }

    /// With a store that lies elsewhere and can't be reopened.
    pub(crate) fn with(store: Store, engine: EngineChoice, files: &[(&str, &str)]) -> Self {
        let base = freeze(&store, files);
        Self { store: Some(store), base, engine, dir: testkit::temp_dir("engine") }
    }

    pub(crate) fn store(&self) -> &Store {
        self.store.as_ref().unwrap()
    }

    pub(crate) fn state(&self) -> PathBuf {
        self.dir.path().join("state")
    }

    /// The same state, which nobody has opened, elsewhere.
    pub(crate) fn copied(&self) -> Self {
        let dir = testkit::temp_dir("engine");
        let options = CopyOptions { attributes: true, durable: false };
        copy_tree(&self.state(), &dir.path().join("state"), &options).unwrap();
        Self { store: None, base: self.base.clone(), engine: self.engine, dir }
    }

    pub(crate) fn reopen(&mut self) {
        self.store = None;
        self.store = Some(open(&self.state(), self.engine));
    }

    pub(crate) fn create(&self) -> BranchInfo {
        self.store().create_branch(&self.base, None, &me()).unwrap()
    }

    pub(crate) fn fork(&self, parent: &BranchId, busy: ForkBusy<'_>) -> BranchInfo {
        self.store().fork_branch(parent, None, &me(), busy).unwrap()
    }

    pub(crate) fn at(&self, branch: &BranchId) -> At {
        let root = self.store().mount(branch).unwrap();
        At { dir: PathBuf::from(format!("/proc/self/fd/{}", root.fd().as_raw_fd())), _root: root }
    }

    pub(crate) fn scan(&self, branch: &BranchId) -> crate::ScanReport {
        self.store().scan(branch, &me(), None).unwrap()
    }

    /// Asserts that the database says of the branch exactly what its root shows, and returns the files with content.
    pub(crate) fn check(&self, branch: &BranchId) -> Vec<(String, String)> {
        let conn = self.store().inner.db.reader().unwrap();
        let layers = Layers::of(&conn, branch).unwrap().unwrap();
        let recorded = entries::merged(&conn, &layers.chain(), None).unwrap();
        let seen = shown(&self.at(branch).dir);
        let said: Vec<_> = recorded.iter().map(|(path, e)| (path.clone(), e.kind, e.mode, e.hash)).collect();
        let shows: Vec<_> = seen
            .iter()
            .map(|(path, (kind, mode, bytes))| {
                let content = matches!(kind, Kind::File | Kind::Symlink);
                (path.clone(), *kind, *mode, content.then(|| blake3::hash(bytes)))
            })
            .collect();
        assert_eq!(said, shows, "recorded and seen on {branch}");
        let files = seen.into_iter().filter(|(_, (kind, ..))| *kind != Kind::Dir);
        files.map(|(path, (.., b))| (path.to_string(), String::from_utf8_lossy(&b).into_owned())).collect()
    }
}

/// Opens a store again. A child of another test may hold the old one's lock between its fork and its exec.
pub(crate) fn open(state: &std::path::Path, engine: EngineChoice) -> Store {
    let mut opened = None;
    testkit::wait_until("the lock", std::time::Duration::from_secs(10), || {
        opened = match Store::open(state, options(engine)) {
            Err(crate::OpenError::Busy { .. }) => None,
            opened => Some(opened.unwrap()),
        };
        opened.is_some()
    });
    opened.unwrap()
}

pub(crate) struct At {
    dir: PathBuf,
    _root: Root,
}

impl At {
    pub(crate) fn join(&self, path: &str) -> PathBuf {
        self.dir.join(path)
    }
    pub(crate) fn write(&self, path: &str, text: &str) {
        let at = self.join(path);
        std::fs::create_dir_all(at.parent().unwrap()).unwrap();
        std::fs::write(at, text).unwrap();
    }
    pub(crate) fn read(&self, path: &str) -> String {
        std::fs::read_to_string(self.join(path)).unwrap()
    }
}

pub(crate) fn options(engine: EngineChoice) -> StoreOptions {
    let root = testkit::user::is_root() && variable(USERNS).is_none();
    let owner = root.then_some((testkit::OTHER_UID, testkit::OTHER_GID));
    StoreOptions { engine, owner, clock: Arc::new(SystemClock) }
}

fn files(listed: &[(String, String)]) -> Vec<(&str, &str)> {
    listed.iter().map(|(path, text)| (path.as_str(), text.as_str())).collect()
}

const BASE: &[(&str, &str)] =
    &[("a", "base a"), ("d/b", "base b"), ("d/e/c", "base c"), (".gitignore", "tmp/\n")];

#[test]
fn a_branch_shows_its_base_and_keeps_its_changes() {
    on_all("engine::tests::a_branch_shows_its_base_and_keeps_its_changes", |engine| {
        let mut fixture = Fixture::new(engine, BASE);
        let branch = fixture.create();
        assert_eq!(branch.depth, 0);
        assert_eq!(fixture.check(&branch.id).len(), 4);
        let at = fixture.at(&branch.id);
        at.write("new/file", "new");
        at.write("a", "changed");
        std::fs::remove_file(at.join("d/b")).unwrap();
        std::fs::remove_dir_all(at.join("d/e")).unwrap();
        std::fs::create_dir(at.join("d/e")).unwrap();
        drop(at);
        fixture.scan(&branch.id);
        let expected = [(".gitignore", "tmp/\n"), ("a", "changed"), ("new/file", "new")];
        assert_eq!(files(&fixture.check(&branch.id)), expected);
        fixture.reopen();
        assert_eq!(files(&fixture.check(&branch.id)), expected);
        assert!(!fixture.store().recovery().unclean);
        let other = fixture.create();
        assert_eq!(fixture.check(&other.id).len(), 4, "the base is untouched");
    });
}

#[test]
fn whoever_asks_first_after_a_kill_sees_what_was_written() {
    on_all("engine::tests::whoever_asks_first_after_a_kill_sees_what_was_written", |engine| {
        let mut fixture = Fixture::new(engine, BASE);
        let branch = fixture.create().id;
        // A command's own file, of a name that edits give to theirs.
        let own = ".tendon-edit-abcdefgh12345678";
        fixture.at(&branch).write(own, "a command's");
        fixture.scan(&branch);
        for name in ["diff", "export", "fork"] {
            fixture.at(&branch).write(name, "unrecorded");
            fixture.store().inner.live.faults.kill();
            fixture.store = None;
            fixture.store = Some(open(&fixture.state(), engine));
            assert!(fixture.store().recovery().unclean);
            let mut out = Vec::new();
            match name {
                "diff" => out = fixture.store().diff(&branch, DiffFormat::NameStatus).unwrap(),
                "export" => drop(fixture.store().export(&branch, ExportTarget::Tar(&mut out)).unwrap()),
                _ => {
                    let fork = fixture.fork(&branch, ForkBusy::Quiet).id;
                    out = fixture.store().diff(&fork, DiffFormat::NameStatus).unwrap();
                }
            }
            let out = String::from_utf8_lossy(&out);
            assert!(out.contains(name) && out.contains(own), "{name}: {out}");
        }
    });
}

#[test]
fn forks_go_their_own_ways() {
    on_all("engine::tests::forks_go_their_own_ways", |engine| {
        for busy in [ForkBusy::Quiet, ForkBusy::Frozen(&me())] {
            let mut fixture = Fixture::new(engine, BASE);
            let parent = fixture.create().id;
            let at = fixture.at(&parent);
            at.write("a", "changed");
            at.write("tmp/cache", "ignored");
            std::fs::remove_dir_all(at.join("d")).unwrap();
            std::os::unix::fs::symlink("a", at.join("link")).unwrap();
            drop(at);
            // Not scanned: the fork does it.
            let child = fixture.fork(&parent, busy);
            assert_eq!(child.parent.as_ref(), Some(&parent));
            assert_eq!(child.depth, 1);
            let before =
                [(".gitignore", "tmp/\n"), ("a", "changed"), ("link", "a"), ("tmp/cache", "ignored")];
            assert_eq!(files(&fixture.check(&child.id)), before, "{busy:?}");
            assert_eq!(files(&fixture.check(&parent)), before);
            fixture.at(&child.id).write("a", "child");
            fixture.at(&parent).write("d/new", "parent");
            fixture.scan(&child.id);
            fixture.scan(&parent);
            let grandchild = fixture.fork(&child.id, ForkBusy::Quiet).id;
            fixture.reopen();
            for (branch, a, d) in
                [(&parent, "changed", true), (&child.id, "child", false), (&grandchild, "child", false)]
            {
                fixture.check(branch);
                assert_eq!(fixture.at(branch).read("a"), a);
                assert_eq!(fixture.at(branch).join("d/new").exists(), d);
            }
            assert!(fixture.scan(&grandchild).first_seq.is_none(), "nothing changed");
            assert_eq!(
                fixture.store().tree_hash(&child.id).unwrap(),
                fixture.store().tree_hash(&grandchild).unwrap()
            );
            let check = fixture.store().audit_verify().unwrap();
            assert_eq!(check.problem, None);
        }
    });
}

#[test]
fn a_fork_of_a_branch_in_use_copies_or_is_refused() {
    on_all("engine::tests::a_fork_of_a_branch_in_use_copies_or_is_refused", |engine| {
        let fixture = Fixture::new(engine, BASE);
        let parent = fixture.create().id;
        let at = fixture.at(&parent);
        at.write("a", "open");
        let mut open = std::fs::File::options().append(true).open(at.join("a")).unwrap();
        let child = fixture.fork(&parent, ForkBusy::Frozen(&me())).id;
        std::io::Write::write_all(&mut open, b" and written").unwrap();
        assert_eq!(at.read("a"), "open and written", "the parent's open files are the same");
        assert_eq!(fixture.at(&child).read("a"), "open");
        if engine == EngineChoice::Overlay {
            let error = fixture.store().fork_branch(&parent, None, &me(), ForkBusy::Quiet).unwrap_err();
            assert_eq!(error.code(), Code::Conflict, "{error}");
            drop((at, open));
            fixture.fork(&parent, ForkBusy::Quiet);
        }
    });
}

#[test]
fn what_can_not_be_captured_refuses_forks_and_exports_and_a_diff_tells_it() {
    use crate::{DiffFormat, ExportTarget, GitRef};
    let test = "engine::tests::what_can_not_be_captured_refuses_forks_and_exports_and_a_diff_tells_it";
    on_all(test, |engine| {
        let fixture = Fixture::new(engine, BASE);
        let branch = fixture.create().id;
        let at = fixture.at(&branch);
        let store = fixture.store();
        let export = |target: ExportTarget<'_>| store.export(&branch, target);
        let git = || {
            let (repo, name) = ("/nowhere".into(), "x".into());
            GitRef { repo, name, message: "m".into(), author: "A <a@b>".into() }
        };
        let diff = |format| String::from_utf8(store.diff(&branch, format).unwrap()).unwrap();
        let check = |why: &str| {
            fixture.scan(&branch);
            let fork = store.fork_branch(&branch, None, &me(), ForkBusy::Frozen(&me())).unwrap_err();
            let told = |error: &dyn Coded| {
                let text = error.to_string();
                assert!(text.starts_with("the branch holds what can't be captured: "), "{text}");
                assert!(text.contains(why) && error.code() == Code::Refused, "{text}");
            };
            told(&fork);
            told(&export(ExportTarget::Patch(&mut Vec::new())).unwrap_err());
            told(&export(ExportTarget::Tar(&mut Vec::new())).unwrap_err());
            told(&export(ExportTarget::GitRef(git())).unwrap_err());
            for format in [DiffFormat::NameStatus, DiffFormat::Unified] {
                let shown = diff(format);
                assert!(shown.contains("new") && shown.contains(why), "{shown}");
            }
            // An incomplete diff is not taken for a patch.
            let dir = tempfile::tempdir().unwrap();
            let apply = crate::git::Git::new().work_tree(dir.path());
            let diff = diff(DiffFormat::Unified);
            assert!(apply.run_with(&["apply", "-"], diff.as_bytes(), &|_| ()).is_err(), "{diff}");
        };
        let is_whole = || {
            fixture.scan(&branch);
            export(ExportTarget::Patch(&mut Vec::new())).unwrap();
            export(ExportTarget::Tar(&mut Vec::new())).unwrap();
            assert!(!diff(DiffFormat::Unified).contains("captured"));
        };
        at.write("new", "new");
        at.write(".gitignore", "ignored/\n");
        // Longer than a record can hold; what is ignored is no part of the tree.
        let long = vec!["n".repeat(240); 13].join("/");
        std::fs::create_dir_all(at.join(&format!("ignored/{long}"))).unwrap();
        is_whole();
        std::fs::create_dir_all(at.join(&long)).unwrap();
        check("passed over a name");
        crate::beneath::remove_tree(&at.join(&"n".repeat(240))).unwrap();
        is_whole();
        // More holes than are read.
        std::fs::File::create(at.join("sparse")).unwrap().set_len(1 << 40).unwrap();
        check("can't read sparse");
        std::fs::remove_file(at.join("sparse")).unwrap();
        is_whole();
    });
}

#[test]
fn dropped_branches_leave_nothing_but_their_history() {
    on_all("engine::tests::dropped_branches_leave_nothing_but_their_history", |engine| {
        let fixture = Fixture::new(engine, BASE);
        let store = fixture.store();
        let parent = store.create_branch(&fixture.base, Some("name"), &me()).unwrap().id;
        fixture.at(&parent).write("x", "x");
        let child = store.fork_branch(&parent, Some("child"), &me(), ForkBusy::Quiet).unwrap().id;
        assert_eq!(store.find_branch("name").unwrap(), parent);
        assert_eq!(store.find_branch(child.as_str()).unwrap(), child);
        let taken = store.create_branch(&fixture.base, Some("name"), &me()).unwrap_err();
        assert_eq!(taken.code(), Code::Conflict);
        for bad in ["", "-x", "a b", "br-0123456789abcdef", "ä", &"x".repeat(65)] {
            let error = store.create_branch(&fixture.base, Some(bad), &me()).unwrap_err();
            assert_eq!(error.code(), Code::Usage, "{bad}");
        }
        store.drop_branch(&parent, &me()).unwrap();
        assert_eq!(store.find_branch("name").unwrap_err().code(), Code::NotFound);
        assert_eq!(store.drop_branch(&parent, &me()).unwrap_err().code(), Code::NotFound);
        store.create_branch(&fixture.base, Some("name"), &me()).unwrap();
        assert_eq!(fixture.at(&child).read("x"), "x");
        let again =
            store.branch_at(&parent, store.branch(&child).unwrap().audit_seq - 1, None, &me()).unwrap().0;
        assert_eq!(fixture.at(&again.id).read("x"), "x");
        fixture.check(&again.id);
        for branch in store.branches().unwrap() {
            store.drop_branch(&branch.id, &me()).unwrap();
        }
        store.inner.live.removed();
        for dir in ["branches", "layers", "tmp"] {
            let left: Vec<_> = std::fs::read_dir(fixture.state().join(dir)).unwrap().collect();
            assert!(left.is_empty(), "{dir}: {left:?}");
        }
        let entries: u32 = store
            .inner
            .db
            .read()
            .query_row(
                "SELECT count(*) FROM entries WHERE layer NOT IN (SELECT layer FROM bases)",
                [],
                |row| row.get(0),
            )
            .unwrap();
        assert_eq!(entries, 0);
    });
}

#[test]
fn a_mount_can_be_handed_to_another_namespace() {
    on_all("engine::tests::a_mount_can_be_handed_to_another_namespace", |engine| {
        // A plain user can't mount at all; as root and in a user namespace `on_all` tries it, or says that it does not.
        if !testkit::user::is_root() {
            return;
        }
        let fixture = Fixture::new(engine, BASE);
        let branch = fixture.create().id;
        let at = fixture.at(&branch);
        let clone = fixture.store().mount(&branch).unwrap().mount_clone().unwrap();
        let seen = PathBuf::from(format!("/proc/self/fd/{}", clone.as_raw_fd()));
        at.write("through", "one");
        assert_eq!(std::fs::read_to_string(seen.join("through")).unwrap(), "one");
        std::fs::write(seen.join("through"), "other").unwrap();
        assert_eq!(at.read("through"), "other");
        let flags = rustix::fs::fstatvfs(&clone).unwrap().f_flag;
        let wanted = rustix::fs::StatVfsMountFlags::NOSUID | rustix::fs::StatVfsMountFlags::NODEV;
        assert!(flags.contains(wanted), "{flags:?}");
    });
}

#[test]
fn open_files_keep_their_meaning() {
    on_all("engine::tests::open_files_keep_their_meaning", |engine| {
        use std::io::{Read, Seek, Write};
        let fixture = Fixture::new(engine, BASE);
        let branch = fixture.create().id;
        let at = fixture.at(&branch);
        let read = |file: &mut std::fs::File| {
            let mut out = String::new();
            file.rewind().unwrap();
            file.read_to_string(&mut out).unwrap();
            out
        };
        // For a file of the base, once copied up, and for one of the branch.
        at.write("own", "own file");
        for name in ["a", "own"] {
            let text = at.read(name);
            let mut open = std::fs::File::options().read(true).append(true).open(at.join(name)).unwrap();
            std::fs::remove_file(at.join(name)).unwrap();
            at.write(name, "another");
            open.write_all(b"+").unwrap();
            assert_eq!(read(&mut open), format!("{text}+"), "unlinked and written through its descriptor");
            assert_eq!(at.read(name), "another");
            let mut open = std::fs::File::options().read(true).append(true).open(at.join(name)).unwrap();
            at.write("over", "renamed over");
            std::fs::rename(at.join("over"), at.join(name)).unwrap();
            open.write_all(b"+").unwrap();
            assert_eq!((read(&mut open).as_str(), at.read(name).as_str()), ("another+", "renamed over"));
            let mut open = std::fs::File::options().append(true).open(at.join(name)).unwrap();
            std::fs::rename(at.join(name), at.join("moved")).unwrap();
            open.write_all(b"+").unwrap();
            assert_eq!(at.read("moved"), "renamed over+", "a descriptor follows its file");
            std::fs::rename(at.join("moved"), at.join(name)).unwrap();
        }
        // A reader that was there before a file of the base was copied up.
        let mut before = std::fs::File::open(at.join("d/b")).unwrap();
        std::fs::File::options().append(true).open(at.join("d/b")).unwrap().write_all(b"+").unwrap();
        assert_eq!(at.read("d/b"), "base b+");
        assert!(matches!(read(&mut before).as_str(), "base b" | "base b+"));
        drop((before, at));
        fixture.scan(&branch);
        fixture.check(&branch);
    });
}

#[test]
fn a_large_directory_is_listed_while_it_is_emptied() {
    on_all("engine::tests::a_large_directory_is_listed_while_it_is_emptied", |engine| {
        const FILES: usize = 20_000;
        let fixture = Fixture::new(engine, BASE);
        let branch = fixture.create().id;
        let at = fixture.at(&branch);
        std::fs::create_dir(at.join("large")).unwrap();
        for n in 0..FILES {
            std::fs::File::create(at.join(&format!("large/{n}"))).unwrap();
        }
        let mut seen = std::collections::HashSet::new();
        for entry in std::fs::read_dir(at.join("large")).unwrap() {
            let name = entry.unwrap().file_name();
            std::fs::remove_file(at.join("large").join(&name)).unwrap();
            assert!(seen.insert(name), "listed twice");
        }
        assert_eq!(seen.len(), FILES);
        std::fs::remove_dir(at.join("large")).unwrap();
        drop(at);
        fixture.scan(&branch);
        fixture.check(&branch);
    });
}

#[test]
fn branches_of_the_hands_user_belong_to_it() {
    if !have(Need::Root) {
        return;
    }
    for engine in [EngineChoice::Overlay, EngineChoice::Copy] {
        use std::os::unix::fs::MetadataExt;
        let fixture = Fixture::new(engine, BASE);
        let branch = fixture.create().id;
        let editor = fixture.store().edit(&branch, &me()).unwrap();
        editor.write(&path("x/new"), b"new", None).unwrap();
        editor.write(&path("a"), b"edited", None).unwrap();
        editor.symlink(&path("x/link"), b"new").unwrap();
        let child = fixture.fork(&branch, ForkBusy::Quiet).id;
        for branch in [&branch, &child] {
            for name in ["", "a", "d/b", "x", "x/new", "x/link"] {
                let meta = fixture.at(branch).join(name).symlink_metadata().unwrap();
                assert_eq!((meta.uid(), meta.gid()), (testkit::OTHER_UID, testkit::OTHER_GID), "{name:?}");
            }
            assert_eq!(fixture.at(branch).join("").metadata().unwrap().mode() & 0o777, 0o755);
        }
    }
}

/// Holds a file mapped, shared and writable, and writes to it as it is told.
const MAPPER: &str = r"
import mmap, sys
file = open(sys.argv[1], 'r+b')
pages = mmap.mmap(file.fileno(), 0)
print('ready', flush=True)
for line in sys.stdin:
    if line == 'flush\n':
        pages.flush()
    else:
        pages[0:1] = line[0].encode()
    print('done', flush=True)
";

#[test]
fn what_is_written_through_a_mapping_is_caught_by_the_next_scan() {
    if !have(Need::Python) {
        return;
    }
    on_all("engine::tests::what_is_written_through_a_mapping_is_caught_by_the_next_scan", |engine| {
        let fixture = Fixture::new(engine, &[("a", "a")]);
        let branch = fixture.create().id;
        let at = fixture.at(&branch);
        at.write("mapped", &".".repeat(8192));
        let outside = format!("/proc/{}/fd", std::process::id());
        let file = at.join("mapped").to_string_lossy().replace("/proc/self/fd", &outside);
        let mut child = testkit::process::command("python3")
            .args(["-c", MAPPER, &file])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let (mut tell, heard) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let mut heard = std::io::BufRead::lines(std::io::BufReader::new(heard));
        assert_eq!(heard.next().unwrap().unwrap(), "ready");
        let mut write = |what: &str| {
            std::io::Write::write_all(&mut tell, format!("{what}\n").as_bytes()).unwrap();
            assert_eq!(heard.next().unwrap().unwrap(), "done");
        };
        let first = |branch: &BranchId| -> u8 {
            let found = fixture.store().scan_live(branch, &me(), None).unwrap();
            assert!(found.unscannable.is_empty());
            let conn = fixture.store().inner.db.reader().unwrap();
            let layers = Layers::of(&conn, branch).unwrap().unwrap();
            let entry = entries::lookup(&conn, &layers.chain(), &path("mapped")).unwrap().unwrap();
            let mut text = Vec::new();
            fixture.store().inner.blobs.open(&entry.hash.unwrap()).unwrap().read_to_end(&mut text).unwrap();
            text[0]
        };
        write("A");
        assert_eq!(first(&branch), b'A');
        // The page is dirty already: this makes no new time.
        write("B");
        assert_eq!(first(&branch), b'B');
        // After it was written out the next write makes one.
        write("flush");
        write("C");
        assert_eq!(first(&branch), b'C');
        // A fork holds what was there then; the mapping goes on into the parent, and nowhere else.
        write("D");
        let child_branch = fixture.fork(&branch, ForkBusy::Frozen(&me())).id;
        write("E");
        assert_eq!((first(&child_branch), first(&branch)), (b'D', b'E'));
        write("F");
        drop(tell);
        child.wait().unwrap();
        fixture.scan(&branch);
        assert!(at.read("mapped").starts_with('F'));
        fixture.check(&branch);
        fixture.check(&child_branch);
    });
}
