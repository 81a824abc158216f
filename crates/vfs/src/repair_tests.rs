//! A power cut, imitated: another boot, and files that are missing, empty, damaged or back from the dead.

use crate::engine::tests::{Fixture, me, on_all, open, path};
use crate::world::shown;
use crate::{AuditFilter, EngineChoice, ForkBusy};

const BASE: &[(&str, &str)] = &[("a", "base a"), ("d/b", "base b"), ("d/e/c", "base c"), ("del", "deleted")];

/// Ends the store as a power cut would: no orderly end, and the next start is on another boot.
fn cut(fixture: &mut Fixture, engine: EngineChoice, damage: impl FnOnce(&std::path::Path)) {
    fixture.store().inner.live.faults.kill();
    let set = "INSERT OR REPLACE INTO meta (key, value) VALUES ('run', x'6f70656e206f74686572')";
    fixture.store().inner.db.read().execute(set, []).unwrap();
    fixture.store = None;
    damage(&fixture.state());
    fixture.store = Some(open(&fixture.state(), engine));
    assert!(fixture.store().recovery().power_cut);
}

/// The directory that holds what a branch changed itself.
fn own(state: &std::path::Path, branch: &proto::ids::BranchId) -> std::path::PathBuf {
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
