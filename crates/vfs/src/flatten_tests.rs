//! Flattened chains show the same, and long ones work.

use std::collections::BTreeMap;

use crate::engine::tests::{Fixture, me, on_all};
use crate::world::shown;
use crate::{EngineChoice, ForkBusy};

const BASE: &[(&str, &str)] = &[
    ("a", "base a"),
    ("d/b", "base b"),
    ("d/e/c", "base c"),
    ("gone/x", "x"),
    ("gone/y/z", "z"),
    ("file", "f"),
    ("moved/deep/f", "moved"),
];

/// Layers that do everything to each other that layers can.
fn grow(fixture: &Fixture, branch: &proto::ids::BranchId, n: u32) {
    let at = fixture.at(branch);
    at.write(&format!("n/{n}"), &format!("layer {n}"));
    match n % 10 {
        0 => at.write("a", &format!("changed {n}")),
        1 => drop(std::fs::remove_dir_all(at.join("gone"))),
        2 => at.write("gone/again", "new"),
        3 => {
            let _ = std::fs::remove_file(at.join("file"));
            std::fs::create_dir_all(at.join("file/dir")).unwrap();
        }
        4 => {
            let _ = std::fs::remove_dir_all(at.join("d/e"));
            at.write("d/e", "a file now");
        }
        // EXDEV without root's rights: then it stays.
        5 => drop(std::fs::rename(at.join("moved"), at.join("elsewhere"))),
        6 => {
            let _ = std::fs::remove_file(at.join("d/e"));
            at.write("d/e/c2", "a directory again");
        }
        7 => drop(std::fs::hard_link(at.join("a"), at.join(&format!("hard{n}")))),
        8 => std::os::unix::fs::symlink("a", at.join(&format!("link{n}"))).unwrap(),
        _ => {
            let _ = std::fs::remove_file(at.join(&format!("n/{}", n / 2)));
        }
    }
}

#[test]
fn a_flattened_chain_shows_the_same_with_fewer_layers() {
    on_all("flatten::tests::a_flattened_chain_shows_the_same_with_fewer_layers", |engine| {
        let mut fixture = Fixture::new(engine, BASE);
        let mut branch = fixture.create().id;
        let mut all = BTreeMap::new();
        for n in 0..24 {
            grow(&fixture, &branch, n);
            fixture.scan(&branch);
            all.insert(branch.clone(), shown(&fixture.at(&branch).join("")));
            branch = fixture.fork(&branch, ForkBusy::Quiet).id;
        }
        let last = fixture.store().branch(&branch).unwrap();
        assert_eq!(last.depth, 24);
        let hash = fixture.store().tree_hash(&branch).unwrap();
        // Mounted branches are left alone.
        let root = fixture.store().mount(&branch).unwrap();
        fixture.store().flatten_some().unwrap();
        assert_eq!(fixture.store().branch(&branch).unwrap().depth, 24);
        drop(root);
        fixture.store().unmount_idle(std::time::Duration::ZERO);
        assert!(fixture.store().flatten_some().unwrap() > 0);
        while fixture.store().flatten_some().unwrap() > 0 {}
        let infos = fixture.store().branches().unwrap();
        assert!(infos.iter().all(|b| b.depth <= 16), "{infos:?}");
        assert_eq!(fixture.store().branch(&branch).unwrap().depth, 1);
        assert_eq!(fixture.store().tree_hash(&branch).unwrap(), hash);
        fixture.reopen();
        for (branch, before) in &all {
            assert_eq!(&shown(&fixture.at(branch).join("")), before);
            fixture.check(branch);
        }
        fixture.check(&branch);
        // It goes on as any other.
        fixture.at(&branch).write("n/after", "flat");
        std::fs::remove_file(fixture.at(&branch).join("n/20")).unwrap();
        fixture.scan(&branch);
        let fork = fixture.fork(&branch, ForkBusy::Quiet).id;
        fixture.check(&fork);
        for branch in fixture.store().branches().unwrap() {
            fixture.store().drop_branch(&branch.id, &me()).unwrap();
        }
        fixture.store().inner.live.removed();
        assert_eq!(std::fs::read_dir(fixture.state().join("layers")).unwrap().count(), 0);
    });
}

#[test]
fn two_hundred_forks_deep_works_and_so_does_more() {
    let fixture = Fixture::new(EngineChoice::Auto, BASE);
    let mut branch = fixture.create().id;
    for n in 0..220 {
        let editor = fixture.store().edit(&branch, &me()).unwrap();
        editor.write(&format!("n/{n}").parse().unwrap(), b"x", None).unwrap();
        branch = fixture.fork(&branch, ForkBusy::Quiet).id;
    }
    assert!(fixture.store().branch(&branch).unwrap().depth < 205);
    assert_eq!(fixture.check(&branch).len(), 220 + BASE.len());
    fixture.store().unmount_idle(std::time::Duration::ZERO);
    let lock = fixture.store().branch_lock(&branch);
    let moved = fixture.store().flatten_locked(&branch, 1).unwrap();
    drop(lock);
    assert!(moved > 0);
    assert_eq!(fixture.check(&branch).len(), 220 + BASE.len());
}
