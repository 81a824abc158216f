//! Direct edits: recorded as made, undone when they can't be recorded, whole after a kill at any step.

use std::panic::{AssertUnwindSafe, catch_unwind};

use proto::error::{Code, Coded};
use proto::ids::BranchId;
use testkit::{Need, have};

use super::{EditError, Editor};
use crate::engine::tests::{Fixture, me, on_all, open, options, path};
use crate::world::{Shown, shown};
use crate::{AuditFilter, EngineChoice, ForkBusy, Store};

const BASE: &[(&str, &str)] =
    &[("a", "base a"), ("d/b", "base b"), ("d/e/c", "base c"), ("keep", "k"), (".gitignore", "tmp/\n")];

type Step = (&'static str, fn(&Editor) -> Result<(), EditError>);

/// One edit of each kind, each possible after those before it.
const STEPS: &[Step] = &[
    ("new file", |e| e.write(&path("x/y/new"), b"new", 0o755)),
    ("base file", |e| e.write(&path("a"), b"edited", None)),
    ("same content", |e| e.write(&path("a"), b"edited", None)),
    ("empty file", |e| e.write(&path("empty"), b"", None)),
    ("ignored file", |e| e.write(&path("tmp/i"), b"ignored", None)),
    ("symlink", |e| e.symlink(&path("l/ink"), b"../a")),
    ("directory", |e| e.mkdir(&path("m/n"))),
    ("mode of a base file", |e| e.chmod(&path("d/b"), 0o700)),
    ("mode of a base directory", |e| e.chmod(&path("d"), 0o750)),
    ("rename a base file", |e| e.rename(&path("d/b"), &path("m/b"))),
    ("rename a symlink", |e| e.rename(&path("l/ink"), &path("ink"))),
    ("rename a base directory", |e| e.rename(&path("d"), &path("new/d"))),
    ("edit in it", |e| e.write(&path("new/d/e/c"), b"moved and edited", None)),
    ("rename a new directory", |e| e.rename(&path("x"), &path("m/x"))),
    ("out of the ignored", |e| e.rename(&path("tmp/i"), &path("was-ignored"))),
    ("remove a file", |e| e.remove(&path("empty"))),
    ("remove a base file", |e| e.remove(&path("keep"))),
    ("remove a directory", |e| e.remove(&path("new"))),
    ("make it again", |e| e.mkdir(&path("d"))),
    ("file where a directory was", |e| e.write(&path("new"), b"file", None)),
    ("other rules", |e| e.write(&path(".gitignore"), b"was-ignored\n", None)),
    ("no rules", |e| e.remove(&path(".gitignore"))),
];

/// Files before the rules that ignore them or no longer do.
const RULES: &[Step] = &[
    ("a file", |e| e.write(&path(".env"), b"x", None)),
    ("one that is ignored", |e| e.write(&path("tmp/keep"), b"x", None)),
    ("one in a directory", |e| e.write(&path("out/deep/file"), b"x", None)),
    ("now they are", |e| e.write(&path(".gitignore"), b".env\nout/\n", None)),
    ("and no longer", |e| e.write(&path(".gitignore"), b"tmp/\n", None)),
    ("no rules", |e| e.remove(&path(".gitignore"))),
    ("all is ignored", |e| e.write(&path(".gitignore"), b"*\n", None)),
    ("and not here", |e| e.write(&path("out/.gitignore"), b"!*\n", None)),
    ("rules go with their directory", |e| e.rename(&path("out"), &path("else/where"))),
    ("and are gone", |e| e.remove(&path("else"))),
];

/// Those that are killed at each of their steps: one of each way of being made.
const KILLED: &[&str] = &[
    "new file",
    "base file",
    "mode of a base file",
    "rename a base file",
    "rename a base directory",
    "remove a directory",
];

fn rows(store: &Store, branch: &BranchId) -> usize {
    let filter = AuditFilter { branch: Some(branch.clone()), ..AuditFilter::default() };
    store.audit_log(&filter).unwrap().len()
}

fn seen(fixture: &Fixture, branch: &BranchId) -> Shown {
    shown(&fixture.at(branch).join(""))
}

#[test]
fn every_edit_is_recorded_as_it_is_seen() {
    on_all("edit::tests::every_edit_is_recorded_as_it_is_seen", |engine| {
        let mut fixture = Fixture::new(engine, BASE);
        let branch = fixture.create().id;
        for (what, step) in STEPS {
            let before = rows(fixture.store(), &branch);
            step(&fixture.store().edit(&branch, &me()).unwrap()).unwrap_or_else(|e| panic!("{what}: {e:?}"));
            let after = rows(fixture.store(), &branch);
            assert_eq!(after == before, *what == "same content", "{what}: {before} {after}");
            fixture.check(&branch);
            let tree = fixture.store().tree_hash(&branch).unwrap();
            let scan = fixture.scan(&branch);
            assert_eq!(
                scan.first_seq, None,
                "{what}: a scan finds nothing that the edit did not record: {scan:?}"
            );
            assert_eq!(fixture.store().tree_hash(&branch).unwrap(), tree, "{what}");
        }
        // The history alone gives the same files.
        let seq = fixture.store().branch(&branch).unwrap().audit_seq;
        let again = fixture.store().branch_at(&branch, seq, None, &me()).unwrap().0.id;
        assert_eq!(fixture.store().tree_hash(&again).unwrap(), fixture.store().tree_hash(&branch).unwrap());
        let before = seen(&fixture, &branch);
        fixture.reopen();
        assert_eq!(seen(&fixture, &branch), before);
        assert_eq!(fixture.store().audit_verify().unwrap().problem, None);
    });
}

#[test]
fn edits_in_a_row_give_the_tree_that_scans_between_them_find() {
    on_all("edit::tests::edits_in_a_row_give_the_tree_that_scans_between_them_find", |engine| {
        let fixture = Fixture::new(engine, BASE);
        let (quick, scanned) = (fixture.create().id, fixture.create().id);
        for (what, step) in RULES.iter().chain(STEPS).chain(RULES) {
            for branch in [&quick, &scanned] {
                step(&fixture.store().edit(branch, &me()).unwrap())
                    .unwrap_or_else(|e| panic!("{what}: {e:?}"));
            }
            fixture.scan(&scanned);
            let hash = |branch| fixture.store().tree_hash(branch).unwrap();
            assert_eq!(hash(&quick), hash(&scanned), "{what}");
        }
        fixture.check(&quick);
        let child = fixture.fork(&quick, ForkBusy::Quiet).id;
        let hash = |branch| fixture.store().tree_hash(branch).unwrap();
        assert_eq!(hash(&child), hash(&scanned));
    });
}

#[test]
fn edits_between_forks_are_carried() {
    on_all("edit::tests::edits_between_forks_are_carried", |engine| {
        let fixture = Fixture::new(engine, BASE);
        let mut branch = fixture.create().id;
        for (what, step) in STEPS {
            step(&fixture.store().edit(&branch, &me()).unwrap()).unwrap_or_else(|e| panic!("{what}: {e:?}"));
            let parent = seen(&fixture, &branch);
            let child = fixture.fork(&branch, ForkBusy::Quiet).id;
            assert_eq!(seen(&fixture, &child), parent, "{what}");
            assert_eq!(seen(&fixture, &branch), parent, "{what}");
            fixture.check(&child);
            branch = child;
        }
    });
}

#[test]
fn what_can_not_be_committed_is_undone() {
    on_all("edit::tests::what_can_not_be_committed_is_undone", |engine| {
        let fixture = Fixture::new(engine, BASE);
        let branch = fixture.create().id;
        for (what, step) in STEPS {
            let editor = fixture.store().edit(&branch, &me()).unwrap();
            let before = (seen(&fixture, &branch), rows(fixture.store(), &branch));
            fixture.store().inner.db.read().commit_hook(Some(|| true)).unwrap();
            let failed = step(&editor);
            fixture.store().inner.db.read().commit_hook(None::<fn() -> bool>).unwrap();
            let copied = *what == "rename a base directory" && matches!(failed, Err(EditError::Beneath(_)));
            assert!(!copied, "{failed:?}");
            assert!(matches!(failed, Err(EditError::Db(_) | EditError::Scan(_))), "{what}: {failed:?}");
            assert_eq!((seen(&fixture, &branch), rows(fixture.store(), &branch)), before, "{what}");
            fixture.check(&branch);
            step(&editor).unwrap();
        }
    });
}

#[test]
fn a_locked_database_fails_the_edit() {
    let fixture = Fixture::new(EngineChoice::Auto, BASE);
    let branch = fixture.create().id;
    let editor = fixture.store().edit(&branch, &me()).unwrap();
    fixture.store().inner.db.read().busy_timeout(std::time::Duration::ZERO).unwrap();
    let other = rusqlite::Connection::open(fixture.state().join("tendon.db")).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let before = seen(&fixture, &branch);
    let error = editor.write(&path("n/a"), b"edited", None).unwrap_err();
    assert_eq!(error.code(), Code::StateBusy, "{error:?}");
    assert_eq!(seen(&fixture, &branch), before);
    other.execute_batch("ROLLBACK").unwrap();
    editor.write(&path("n/a"), b"edited", None).unwrap();
}

#[test]
fn a_full_disk_fails_edits_and_leaves_nothing_half_done() {
    if !have(Need::Root) {
        return;
    }
    testkit::user::private_mounts(
        "edit::tests::a_full_disk_fails_edits_and_leaves_nothing_half_done",
        || {
            for engine in [EngineChoice::Overlay, EngineChoice::Copy] {
                let dir = testkit::temp_dir("full");
                let flags = rustix::mount::MountFlags::empty();
                rustix::mount::mount("tmpfs", dir.path(), "tmpfs", flags, c"size=12m").unwrap();
                let store = Store::open(&dir.path().join("s"), options(engine)).unwrap();
                let fixture = Fixture::with(store, engine, BASE);
                let branch = fixture.create().id;
                let editor = fixture.store().edit(&branch, &me()).unwrap();
                editor.write(&path("a"), b"before", None).unwrap();
                let fill = std::fs::File::create(dir.path().join("fill")).unwrap();
                let mut left = 0;
                for (size, tries) in [(65_536, 400), (4_096, 64)] {
                    for _ in 0..tries {
                        left += 1;
                        if std::io::Write::write_all(&mut &fill, &vec![1; size]).is_err() {
                            break;
                        }
                    }
                }
                assert!(left > 0);
                let random: Vec<u8> = (0..200_000_u32)
                    .flat_map(|n| blake3::hash(&n.to_le_bytes()).as_bytes()[..4].to_vec())
                    .collect();
                let before = (seen(&fixture, &branch), rows(fixture.store(), &branch));
                for at in ["a", "new/file"] {
                    let error = editor.write(&path(at), &random, None).unwrap_err();
                    assert_eq!(error.code(), Code::NoSpace, "{engine:?} {error:?}");
                    assert_eq!((seen(&fixture, &branch), rows(fixture.store(), &branch)), before);
                }
                drop(fill);
                std::fs::remove_file(dir.path().join("fill")).unwrap();
                editor.write(&path("a"), &random, None).unwrap();
                fixture.check(&branch);
                drop(editor);
                drop(fixture);
                sys::mount::detach(dir.path()).unwrap();
            }
        },
    );
}

#[test]
fn a_kill_at_any_step_loses_no_acknowledged_edit() {
    on_all("edit::tests::a_kill_at_any_step_loses_no_acknowledged_edit", |engine| {
        let mut fixture = Fixture::new(engine, BASE);
        let mut branch = fixture.create().id;
        for (what, step) in STEPS {
            if !KILLED.contains(what) {
                step(&fixture.store().edit(&branch, &me()).unwrap()).unwrap();
                continue;
            }
            // What there would be after it: tried on a fork.
            let trial = fixture.fork(&branch, ForkBusy::Quiet).id;
            let before = seen(&fixture, &trial);
            step(&fixture.store().edit(&trial, &me()).unwrap()).unwrap();
            let after = seen(&fixture, &trial);
            for steps in 0.. {
                assert!(steps < 20, "{what}");
                let start = fixture.fork(&branch, ForkBusy::Quiet).id;
                let editor = fixture.store().edit(&start, &me()).unwrap();
                fixture.store().inner.live.faults.kill_after(Some(steps));
                let done = catch_unwind(AssertUnwindSafe(|| step(&editor).unwrap()));
                let killed = fixture.store().inner.live.faults.killed();
                assert_eq!(done.is_err(), killed.is_some());
                fixture.store().inner.live.faults.kill_after(None);
                if killed.is_none() {
                    branch = start;
                    break;
                }
                drop(editor);
                fixture.store = None;
                fixture.store = Some(open(&fixture.state(), engine));
                assert!(fixture.store().recovery().unclean);
                // A fork may be the first that looks at the branch again.
                let fork = (steps % 2 == 0).then(|| fixture.fork(&start, ForkBusy::Quiet).id);
                let now = seen(&fixture, &start);
                if let Some(fork) = fork {
                    assert_eq!(seen(&fixture, &fork), now, "{what} killed at {killed:?}");
                    assert!(!format!("{now:?}").contains(".tendon-edit"), "{now:?}");
                    fixture.check(&fork);
                }
                let half = engine_may_copy(what) && now != before && now != after;
                assert!(now == before || now == after || half, "{what} killed at {killed:?}: {now:#?}");
                // A directory that can't be renamed is removed after the commit.
                if killed == Some("edit: committed") && !half && *what != "remove a directory" {
                    assert_eq!(now, after, "{what} at {killed:?}");
                }
                fixture.check(&start);
                assert_eq!(fixture.store().audit_verify().unwrap().problem, None);
            }
        }
    });
}

/// Edits that are not one step where directories can't be renamed, or that make directories first.
fn engine_may_copy(what: &str) -> bool {
    !matches!(what, "base file" | "same content" | "empty file" | "mode of a base file" | "remove a file")
}

#[test]
fn links_and_odd_files_are_not_written_through() {
    on_all("edit::tests::links_and_odd_files_are_not_written_through", |engine| {
        let fixture = Fixture::new(engine, BASE);
        let branch = fixture.create().id;
        let at = fixture.at(&branch);
        std::os::unix::fs::symlink("/etc", at.join("abs")).unwrap();
        std::os::unix::fs::symlink("d", at.join("rel")).unwrap();
        std::fs::hard_link(at.join("a"), at.join("hard")).unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            at.join("fifo"),
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::from_raw_mode(0o644),
            0,
        )
        .unwrap();
        fixture.scan(&branch);
        let editor = fixture.store().edit(&branch, &me()).unwrap();
        for bad in ["abs/hostname", "rel/b", "abs", "rel", "fifo", "a/b"] {
            let errors = [editor.write(&path(bad), b"x", None).err(), editor.read(&path(bad), 0, 10).err()];
            for error in errors {
                let error = error.unwrap_or_else(|| panic!("{bad} {engine:?}"));
                assert_eq!(error.code(), Code::BadInput, "{bad}: {error:?}");
            }
        }
        assert!(matches!(editor.chmod(&path("abs"), 0o600), Err(EditError::Beneath(_))));
        let staged = path(".tendon-edit-0123456789abcdef");
        assert!(matches!(editor.write(&staged, b"", None), Err(EditError::Reserved(_))));
        editor.write(&path("hard"), b"other", None).unwrap();
        assert_eq!(at.read("a"), "base a", "a hardlink is broken, not written through");
        editor.remove(&path("abs")).unwrap();
        editor.remove(&path("fifo")).unwrap();
        assert_eq!(editor.read_link(&path("rel")).unwrap(), b"d");
        assert!(std::path::Path::new("/etc").exists());
        assert_eq!(editor.read(&path("d/b"), 5, 100).unwrap(), b"b");
        assert_eq!(editor.read(&path("d/b"), 500, 100).unwrap(), b"");
        let names: Vec<_> = editor.list(Some(&path("d"))).unwrap().into_iter().map(|e| e.name).collect();
        assert_eq!(names, [b"b", b"e"]);
        fixture.check(&branch);
    });
}

#[test]
fn what_no_scan_has_seen_is_not_removed_without_a_row() {
    on_all("edit::tests::what_no_scan_has_seen_is_not_removed_without_a_row", |engine| {
        let fixture = Fixture::new(engine, BASE);
        let branch = fixture.create().id;
        let root = fixture.store().mount(&branch).unwrap();
        for (name, dir) in [("made", false), ("made-dir", true)] {
            let at = fixture.at(&branch).join(name);
            if dir {
                std::fs::create_dir(&at).unwrap()
            } else {
                std::fs::write(&at, "guest").unwrap()
            }
            let before = rows(fixture.store(), &branch);
            fixture.store().edit(&branch, &me()).unwrap().remove(&path(name)).unwrap();
            assert!(!at.exists());
            let filter = AuditFilter { branch: Some(branch.clone()), ..AuditFilter::default() };
            let log = fixture.store().audit_log(&filter).unwrap();
            let last = log.last().unwrap();
            assert_eq!((log.len(), last.op.as_str()), (before + 2, "delete"));
            let found = &log[before];
            assert_eq!((found.op.as_str(), found.actor.as_str()), ("add", "unknown"));
            assert!(log[before..].iter().all(|row| row.path == Some(path(name))));
        }
        drop(root);
        let seq = fixture.store().branch(&branch).unwrap().audit_seq;
        let again = fixture.store().branch_at(&branch, seq, None, &me()).unwrap().0.id;
        assert_eq!(fixture.store().tree_hash(&again).unwrap(), fixture.store().tree_hash(&branch).unwrap());
        fixture.check(&branch);
        assert_eq!(fixture.scan(&branch).first_seq, None);
    });
}

#[test]
fn an_edit_over_an_unrecorded_change_records_all_of_it() {
    on_all("edit::tests::an_edit_over_an_unrecorded_change_records_all_of_it", |engine| {
        let fixture = Fixture::new(engine, BASE);
        for over in 0..4 {
            let branch = fixture.create().id;
            let at = fixture.at(&branch);
            std::fs::remove_dir_all(at.join("d")).unwrap();
            let editor = fixture.store().edit(&branch, &me()).unwrap();
            match over {
                0 => editor.write(&path("d"), b"a file", None).unwrap(),
                1 => editor.symlink(&path("d"), b"a").unwrap(),
                2 => editor.rename(&path("a"), &path("d")).unwrap(),
                _ => {
                    at.write("d", "a file");
                    editor.remove(&path("d")).unwrap();
                }
            }
            fixture.check(&branch);
            fixture.scan(&branch);
            fixture.check(&branch);
            let seq = fixture.store().branch(&branch).unwrap().audit_seq;
            let again = fixture.store().branch_at(&branch, seq, None, &me()).unwrap().0.id;
            assert_eq!(fixture.check(&again), fixture.check(&branch));
        }
    });
}

#[test]
fn what_a_guest_wrote_is_in_the_history_before_an_edit_replaces_it() {
    on_all("edit::tests::what_a_guest_wrote_is_in_the_history_before_an_edit_replaces_it", |engine| {
        let fixture = Fixture::new(engine, BASE);
        for (what, edit, op) in [
            ("write", (|e| e.write(&path("a"), b"edited", None)) as fn(&Editor) -> _, "modify"),
            ("remove", |e| e.remove(&path("a")), "delete"),
            ("chmod", |e| e.chmod(&path("a"), 0o755), "mode"),
            ("rename", |e| e.rename(&path("a"), &path("x")), "delete"),
            ("remove its directory", |e| e.remove(&path("g")), "delete"),
            ("rename its directory", |e| e.rename(&path("g"), &path("x/g")), "delete"),
            ("write patterns", |e| e.write(&path(".gitignore"), b"k*", None), "modify"),
            ("write where it was", |e| e.write(&path("keep"), b"again", None), "add"),
            ("link where it was", |e| e.symlink(&path("keep"), b"a"), "add"),
        ] {
            let branch = fixture.create().id;
            let at = fixture.at(&branch);
            for file in ["a", "g/a", "elsewhere", ".gitignore"] {
                at.write(file, "guest");
            }
            std::fs::remove_file(at.join("keep")).unwrap();
            edit(&fixture.store().edit(&branch, &me()).unwrap()).unwrap_or_else(|e| panic!("{what}: {e:?}"));
            let filter = AuditFilter { branch: Some(branch.clone()), ..AuditFilter::default() };
            let log = fixture.store().audit_log(&filter).unwrap();
            let file = match op {
                "add" => "keep",
                _ if what.ends_with("patterns") => ".gitignore",
                _ if what.ends_with("directory") => "g/a",
                _ => "a",
            };
            let rows: Vec<_> = log.iter().filter(|row| row.path == Some(path(file))).collect();
            let [found, edited] = rows[..] else { panic!("{what}: {log:#?}") };
            assert_eq!((found.actor.as_str(), edited.actor.as_str()), ("unknown", me().as_str()), "{what}");
            assert_eq!(edited.op, op, "{what}");
            // What the edit did not touch is left to who made it.
            assert!(log.iter().all(|row| row.path != Some(path("elsewhere"))), "{what}: {log:#?}");
            let again = fixture.store().branch_at(&branch, found.seq, None, &me()).unwrap().0.id;
            let again = fixture.at(&again).join(file);
            if op == "add" {
                assert!(!again.exists(), "{what}");
            } else {
                assert_eq!(std::fs::read(again).unwrap(), b"guest", "{what}");
            }
            drop(at);
            fixture.scan(&branch);
            fixture.check(&branch);
            assert_eq!(fixture.scan(&branch).first_seq, None, "{what}");
        }
    });
}
