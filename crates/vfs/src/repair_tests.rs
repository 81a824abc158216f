//! A power cut, imitated: another boot, and files that are missing, empty, damaged or back from the dead.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use proto::ids::BranchId;
use testkit::process::variable;

use crate::engine::tests::{Fixture, USERNS, me, on_all, open, path};
use crate::live::KILL_NEXT;
use crate::world::{Shown, shown};
use crate::{AuditFilter, EngineChoice, ForkBusy};

const BASE: &[(&str, &str)] = &[("a", "base a"), ("d/b", "base b"), ("d/e/c", "base c"), ("del", "deleted")];

/// Ends the store as a power cut would: no orderly end, and the next start is on another boot.
fn end(fixture: &mut Fixture) {
    fixture.store().inner.live.faults.kill();
    let set = "INSERT OR REPLACE INTO meta (key, value) VALUES ('run', x'6f70656e206f74686572')";
    fixture.store().inner.db.read().execute(set, []).unwrap();
    fixture.store = None;
}

fn cut(fixture: &mut Fixture, engine: EngineChoice, damage: impl FnOnce(&Path)) {
    end(fixture);
    damage(&fixture.state());
    fixture.store = Some(open(&fixture.state(), engine));
    assert!(fixture.store().recovery().power_cut);
}

/// The directory that holds what a branch changed itself.
fn own(state: &Path, branch: &BranchId) -> std::path::PathBuf {
    crate::content::layer_dir(&state.join("branches").join(branch.as_str()))
}

#[test]
fn kept_content_comes_back_after_a_power_cut() {
    on_all("repair::tests::kept_content_comes_back_after_a_power_cut", |engine| {
        let mut fixture = Fixture::new(engine, BASE);
        let branch = fixture.create().id;
        let at = fixture.at(&branch);
        for name in ["new/missing", "new/empty", "new/zeros", "new/whole", "a", "reborn"] {
            at.write(name, &format!("content of {name}"));
        }
        std::os::unix::fs::symlink("a", at.join("link")).unwrap();
        std::fs::remove_file(at.join("del")).unwrap();
        fixture.scan(&branch);
        std::fs::remove_file(at.join("reborn")).unwrap();
        fixture.scan(&branch);
        drop(at);
        let before = shown(&fixture.at(&branch).join(""));
        let hash = fixture.store().tree_hash(&branch).unwrap();
        cut(&mut fixture, engine, |state| {
            let own = own(state, &branch);
            std::fs::remove_file(own.join("new/missing")).unwrap();
            std::fs::write(own.join("new/empty"), "").unwrap();
            std::fs::write(own.join("new/zeros"), vec![0; 20]).unwrap();
            std::fs::remove_file(own.join("a")).unwrap();
            std::fs::remove_file(own.join("link")).unwrap();
            std::fs::write(own.join("reborn"), "content of reborn").unwrap();
            if engine == EngineChoice::Overlay {
                // The whiteout.
                std::fs::remove_file(own.join("del")).unwrap();
            } else {
                std::fs::write(own.join("del"), "deleted").unwrap();
            }
        });
        assert_eq!(shown(&fixture.at(&branch).join("")), before, "{:?}", fixture.store().recovery());
        assert_eq!(fixture.store().tree_hash(&branch).unwrap(), hash);
        fixture.check(&branch);
        assert!(fixture.scan(&branch).first_seq.is_none());
        // What lay in a file's place is in the history.
        let filter = AuditFilter { path: Some(path("new/zeros")), ..AuditFilter::default() };
        let rows = fixture.store().audit_log(&filter).unwrap();
        assert!(
            rows.iter().any(|r| r.after == Some(blake3::hash(&[0; 20]).to_hex().to_string())),
            "{rows:?}"
        );
        assert_eq!(fixture.store().audit_verify().unwrap().problem, None);
    });
}

#[test]
fn one_path_that_can_not_come_back_keeps_no_other_from_it() {
    on_all("repair::tests::one_path_that_can_not_come_back_keeps_no_other_from_it", |engine| {
        let mut fixture = Fixture::new(engine, BASE);
        let branch = fixture.create().id;
        let at = fixture.at(&branch);
        let long = "l".repeat(255);
        for name in ["torn", &long, "mode", "run.sh", "new/whole"] {
            at.write(name, &format!("content of {name}"));
        }
        std::fs::set_permissions(at.join("run.sh"), std::fs::Permissions::from_mode(0o755)).unwrap();
        fixture.scan(&branch);
        drop(at);
        cut(&mut fixture, engine, |state| {
            let own = own(state, &branch);
            // Its content is damaged, too.
            let hex = blake3::hash(b"content of torn").to_hex();
            std::fs::write(state.join("blobs").join(&hex[..2]).join(&hex[2..]), "torn").unwrap();
            for gone in ["torn", &long, "new/whole"] {
                std::fs::remove_file(own.join(gone)).unwrap();
            }
            std::fs::create_dir(own.join(&long)).unwrap();
            std::fs::set_permissions(own.join("run.sh"), std::fs::Permissions::from_mode(0o644)).unwrap();
        });
        let lost = &fixture.store().recovery().lost;
        assert!(matches!(&lost[..], [one] if one.starts_with("torn: ")), "{lost:?}");
        let at = fixture.at(&branch);
        for name in [&long, "mode", "run.sh", "new/whole"] {
            assert_eq!(std::fs::read_to_string(at.join(name)).unwrap(), format!("content of {name}"));
        }
        assert_eq!(std::fs::metadata(at.join("run.sh")).unwrap().permissions().mode() & 0o777, 0o755);
    });
}

#[test]
fn sealed_layers_and_lost_directories_come_back() {
    on_all("repair::tests::sealed_layers_and_lost_directories_come_back", |engine| {
        let mut fixture = Fixture::new(engine, BASE);
        let parent = fixture.create().id;
        let editor = fixture.store().edit(&parent, &me()).unwrap();
        editor.write(&path("x/sealed"), b"sealed", None).unwrap();
        editor.remove(&path("d")).unwrap();
        let child = fixture.fork(&parent, ForkBusy::Quiet).id;
        fixture.store().edit(&child, &me()).unwrap().write(&path("x/open"), b"open", 0o755).unwrap();
        drop(editor);
        let before = (shown(&fixture.at(&parent).join("")), shown(&fixture.at(&child).join("")));
        cut(&mut fixture, engine, |state| {
            std::fs::remove_dir_all(state.join("branches").join(child.as_str())).unwrap();
            for layer in std::fs::read_dir(state.join("layers")).unwrap() {
                std::fs::write(layer.unwrap().path().join("x/sealed"), "").unwrap();
            }
        });
        let after = (shown(&fixture.at(&parent).join("")), shown(&fixture.at(&child).join("")));
        assert_eq!(after, before, "{:?}", fixture.store().recovery());
        fixture.check(&parent);
        fixture.check(&child);
    });
}

#[test]
fn what_was_written_and_not_recorded_stays() {
    on_all("repair::tests::what_was_written_and_not_recorded_stays", |engine| {
        let mut fixture = Fixture::new(engine, BASE);
        let branch = fixture.create().id;
        fixture.at(&branch).write("unrecorded", "work");
        cut(&mut fixture, engine, |_| {});
        assert_eq!(fixture.at(&branch).read("unrecorded"), "work");
        fixture.check(&branch);
        let rows = fixture.store().audit_log(&AuditFilter::default()).unwrap();
        assert!(rows.iter().any(|row| row.actor == "recovery" && row.path == Some(path("unrecorded"))));
    });
}

/// A store after a power cut that left something of everything to be done, and what its branches showed.
fn ruins(engine: EngineChoice) -> (Fixture, Vec<(BranchId, Shown)>) {
    let mut fixture = Fixture::new(engine, BASE);
    let parent = fixture.create().id;
    let edit = |branch: &BranchId| fixture.store().edit(branch, &me()).unwrap();
    edit(&parent).write(&path("x/sealed"), b"sealed", None).unwrap();
    edit(&parent).remove(&path("del")).unwrap();
    let child = fixture.fork(&parent, ForkBusy::Quiet).id;
    for branch in [&parent, &child] {
        for file in ["new/missing", "new/zeros", "new/dir", "a"] {
            edit(branch).write(&path(file), format!("content of {file}").as_bytes(), None).unwrap();
        }
        edit(branch).mkdir(&path("private/deep")).unwrap();
        edit(branch).chmod(&path("private"), 0o710).unwrap();
        edit(branch).write(&path("reborn"), b"content of reborn", None).unwrap();
        edit(branch).remove(&path("reborn")).unwrap();
        edit(branch).remove(&path("d/e")).unwrap();
    }
    let (lost, half, dropped) = (fixture.create().id, fixture.create().id, fixture.create().id);
    for branch in [&lost, &half, &dropped] {
        edit(branch).write(&path("own/file"), b"own", 0o755).unwrap();
    }
    let layer: String = {
        let conn = fixture.store().inner.db.read();
        let sql = "SELECT layer FROM branches WHERE id = ?1";
        conn.query_row(sql, [half.as_str()], |row| row.get(0)).unwrap()
    };
    let branches = [parent.clone(), child.clone(), lost.clone(), half.clone()];
    let before = branches.map(|branch| (branch.clone(), shown(&fixture.at(&branch).join("")))).to_vec();
    {
        // A drop of which nothing but its row was done.
        let conn = fixture.store().inner.db.read();
        let sql = "UPDATE branches SET dropped_ms = 1, name = NULL WHERE id = ?1";
        conn.execute(sql, [dropped.as_str()]).unwrap();
    }
    end(&mut fixture);
    let state = fixture.state();
    let branch_dir = |branch: &BranchId| state.join("branches").join(branch.as_str());
    std::fs::remove_dir_all(branch_dir(&lost)).unwrap();
    if engine == EngineChoice::Overlay {
        // A fork that was killed after it had moved the upper, and one that was killed later, seen from its row.
        std::fs::rename(branch_dir(&half).join("upper"), state.join("layers").join(layer)).unwrap();
        std::fs::create_dir(branch_dir(&half).join("upper")).unwrap();
        for layer in std::fs::read_dir(state.join("layers")).unwrap() {
            let layer = layer.unwrap().path();
            if layer.join("x/sealed").exists() {
                std::fs::write(layer.join("x/sealed"), "").unwrap();
                std::fs::write(layer.join("x/back"), "back from the dead").unwrap();
            }
        }
    }
    std::fs::create_dir_all(state.join("branches/br-0000000000000000/upper/stray")).unwrap();
    std::fs::create_dir_all(state.join("layers/ly-0000000000000000/stray")).unwrap();
    std::fs::create_dir_all(state.join("bases/ly-0000000000000000/stray")).unwrap();
    for branch in [&parent, &child] {
        let own = own(&state, branch);
        std::fs::remove_file(own.join("new/missing")).unwrap();
        std::fs::write(own.join("new/zeros"), vec![0; 20]).unwrap();
        std::fs::remove_file(own.join("new/dir")).unwrap();
        std::fs::create_dir(own.join("new/dir")).unwrap();
        std::fs::remove_file(own.join("a")).unwrap();
        std::fs::remove_dir_all(own.join("private")).unwrap();
        std::fs::write(own.join("reborn"), "content of reborn").unwrap();
    }
    (fixture, before)
}

/// What must hold once a start is through, however often it was killed before.
fn check_ruins(fixture: &Fixture, before: &[(BranchId, Shown)], context: &str) -> usize {
    for (branch, shown_before) in before {
        let mut now = shown(&fixture.at(branch).join(""));
        // Something of another kind was moved aside.
        now.retain(|path, _| !path.to_string().contains(".found-"));
        assert_eq!(&now, shown_before, "{context}: {:?}", fixture.store().recovery());
        fixture.check(branch);
        assert!(fixture.scan(branch).first_seq.is_none(), "{context}");
    }
    let state = fixture.state();
    fixture.store().inner.live.removed();
    let names = |dir: &str| -> BTreeSet<String> {
        let names = std::fs::read_dir(state.join(dir)).unwrap();
        names.map(|name| name.unwrap().file_name().to_string_lossy().into_owned()).collect()
    };
    let branches: BTreeSet<String> = before.iter().map(|(branch, _)| branch.to_string()).collect();
    assert_eq!(names("branches"), branches, "{context}");
    assert_eq!(names("bases").len(), 1, "{context}");
    assert!(names("tmp").is_empty() && names("layers").len() <= 1, "{context}: {:?}", names("layers"));
    assert_eq!(fixture.store().audit_verify().unwrap().problem, None, "{context}");
    fixture.store().audit_log(&AuditFilter::default()).unwrap().len()
}

#[test]
fn a_start_that_is_killed_at_any_step_is_done_by_the_next() {
    on_all("repair::tests::a_start_that_is_killed_at_any_step_is_done_by_the_next", |engine| {
        let (ruins, before) = ruins(engine);
        let mut whole = ruins.copied();
        whole.store = Some(open(&whole.state(), engine));
        let rows = check_ruins(&whole, &before, "not killed");
        let mut killed_at = BTreeSet::new();
        // Every step once; some of them in each other way.
        let stride = if engine == EngineChoice::Overlay && variable(USERNS).is_none() { 1 } else { 8 };
        for steps in (0..).step_by(stride) {
            assert!(steps < 100, "it never ends");
            let mut fixture = ruins.copied();
            let state = fixture.state();
            KILL_NEXT.set(Some(steps));
            let killed = match catch_unwind(AssertUnwindSafe(|| open(&state, engine))) {
                Ok(store) => {
                    store.inner.live.faults.kill_after(None);
                    fixture.store = Some(store);
                    false
                }
                Err(step) => {
                    killed_at.insert(*step.downcast::<&'static str>().expect("a kill, not a failure"));
                    true
                }
            };
            KILL_NEXT.set(None);
            if fixture.store.is_none() {
                fixture.store = Some(open(&state, engine));
            }
            let context = format!("killed after {steps} steps, {engine:?}");
            assert_eq!(check_ruins(&fixture, &before, &context), rows, "{context}");
            if !killed {
                break;
            }
        }
        assert!(killed_at.len() > 10 || stride > 1, "{killed_at:?}");
    });
}

#[test]
fn a_branch_that_went_on_after_a_lost_fork_keeps_both() {
    on_all("repair::tests::a_branch_that_went_on_after_a_lost_fork_keeps_both", |engine| {
        if engine != EngineChoice::Overlay {
            return;
        }
        for steps in 0.. {
            let mut fixture = Fixture::new(engine, BASE);
            let branch = fixture.create().id;
            let layer: String = {
                let conn = fixture.store().inner.db.read();
                conn.query_row("SELECT layer FROM branches", [], |row| row.get(0)).unwrap()
            };
            let edit = |file: &str, text: &[u8]| {
                fixture.store().edit(&branch, &me()).unwrap().write(&path(file), text, None).unwrap();
            };
            edit("sealed", b"sealed");
            edit("lost", b"lost");
            end(&mut fixture);
            let state = fixture.state();
            let (upper, sealed) = (
                state.join("branches").join(branch.as_str()).join("upper"),
                state.join("layers").join(layer),
            );
            std::fs::rename(&upper, &sealed).unwrap();
            std::fs::create_dir(&upper).unwrap();
            std::fs::set_permissions(&upper, std::fs::Permissions::from_mode(0o755)).unwrap();
            // Rows of what was written last before the fork are gone too.
            std::fs::write(sealed.join("unrecorded"), "before the fork").unwrap();
            std::fs::write(upper.join("later"), "after the fork").unwrap();
            std::fs::remove_file(sealed.join("lost")).unwrap();
            KILL_NEXT.set(Some(steps));
            let killed = catch_unwind(AssertUnwindSafe(|| open(&state, engine)));
            KILL_NEXT.set(None);
            let done = killed.is_ok();
            drop(killed);
            fixture.store = Some(open(&state, engine));
            drop(fixture.at(&branch));
            let files = fixture.check(&branch);
            for (file, text) in [
                ("sealed", "sealed"),
                ("lost", "lost"),
                ("unrecorded", "before the fork"),
                ("later", "after the fork"),
            ] {
                assert!(files.contains(&(file.into(), text.into())), "{file} after {steps} steps: {files:?}");
            }
            assert!(fixture.scan(&branch).first_seq.is_none());
            let child = fixture.fork(&branch, ForkBusy::Quiet).id;
            assert_eq!(fixture.check(&child), files);
            assert_eq!(fixture.store().audit_verify().unwrap().problem, None);
            if done {
                break;
            }
        }
    });
}
