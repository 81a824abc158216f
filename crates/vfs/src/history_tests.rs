//! Tests of history: every state that a branch was in can be told, and made again.

use std::fs::Permissions;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};

use super::*;
use crate::world::{Branch, Shown, World, path, shown};

fn base(root: &std::path::Path) {
    for (path, text) in
        [("a", "a"), ("d/1", "one"), ("d/2", "two"), ("d/e/3", "three"), (".gitignore", "*.log\n")]
    {
        let at = root.join(path);
        std::fs::create_dir_all(at.parent().unwrap()).unwrap();
        std::fs::write(at, text).unwrap();
    }
    symlink("a", root.join("link")).unwrap();
}

/// Changes a branch step by step; after each, what it shows.
fn live(world: &World, branch: &Branch) -> Vec<(u64, Shown)> {
    let steps: [&dyn Fn(&Branch); 9] = [
        &|_| {},
        &|b| b.write("new/x", "x"),
        &|b| std::fs::remove_dir_all(b.at("d")).unwrap(),
        &|b| b.write("d", "a file"),
        &|b| std::fs::set_permissions(b.at("a"), Permissions::from_mode(0o751)).unwrap(),
        &|b| {
            std::fs::remove_file(b.at("d")).unwrap();
            std::fs::create_dir_all(b.at("d/empty/deep")).unwrap();
            std::fs::set_permissions(b.at("d/empty"), Permissions::from_mode(0o700)).unwrap();
        },
        &|b| {
            std::fs::remove_file(b.at("link")).unwrap();
            symlink("elsewhere", b.at("link")).unwrap();
            symlink("x", b.at("new/other")).unwrap();
        },
        &|b| std::fs::rename(b.at("new"), b.at("renamed")).unwrap(),
        &|b| {
            b.write("renamed/x", "changed");
            b.write("big", &"0123456789".repeat(700_000));
            std::fs::write(b.root().join(std::ffi::OsStr::from_bytes(b"odd\n\xff")), "o").unwrap();
        },
    ];
    steps
        .iter()
        .map(|step| {
            step(branch);
            world.scan(branch);
            (world.seq(branch), shown(branch.root()))
        })
        .collect()
}

fn both(check: impl Fn(&mut World, Branch)) {
    let mut world = World::new(base);
    let branch = world.copy();
    check(&mut world, branch);
    let mut world = World::new(base);
    if let Some(branch) = world.overlay() {
        check(&mut world, branch);
    }
}

#[test]
fn every_state_can_be_told_and_made_again() {
    both(|world, branch| {
        let states = live(world, &branch);
        for (seq, expected) in &states {
            let past = past(&world.store.inner.db.read(), &branch.id, *seq).unwrap();
            assert_eq!(
                past.entries.keys().collect::<Vec<_>>(),
                expected.keys().collect::<Vec<_>>(),
                "at {seq}"
            );
            let again = world.copy();
            let root = std::fs::File::open(again.root()).unwrap();
            world.store.restore(&branch.id, *seq, root.as_fd()).unwrap();
            assert!(shown(again.root()) == *expected, "at {seq}");
            world.scan(&again);
            world.check(&again);
        }
        let trees: std::collections::BTreeSet<_> = states.iter().map(|(seq, _)| *seq).collect();
        assert_eq!(trees.len(), states.len());
    });
}

#[test]
fn a_file_can_be_read_as_it_was() {
    both(|world, branch| {
        for (seq, expected) in live(world, &branch) {
            for name in ["a", "d", "d/1", "d/e/3", "link", "new/x", "renamed/x", "big", "none"] {
                let found = world.store.content_at(&branch.id, &path(name), seq).unwrap();
                let content = found.map(|(entry, mut content)| {
                    let mut bytes = Vec::new();
                    content.read_to_end(&mut bytes).unwrap();
                    (entry.kind, entry.mode, bytes)
                });
                let there = expected.get(&path(name)).filter(|(kind, ..)| *kind != Kind::Dir);
                assert!(content.as_ref() == there, "{name} at {seq}");
            }
        }
    });
}

#[test]
fn ignored_files_are_not_put_back_and_their_content_is_told_to_be_gone() {
    let mut world = World::new(base);
    let branch = world.copy();
    branch.write("x.log", "log");
    branch.write("y", "y");
    world.scan(&branch);
    let again = world.copy();
    let root = std::fs::File::open(again.root()).unwrap();
    world.store.restore(&branch.id, world.seq(&branch), root.as_fd()).unwrap();
    assert!(again.at("y").exists() && !again.at("x.log").exists());
    let found = world.store.content_at(&branch.id, &path("x.log"), world.seq(&branch));
    assert_eq!(found.map(drop).unwrap_err().code(), Code::NotFound);
}

#[test]
fn a_state_that_never_was_is_refused() {
    let mut world = World::new(base);
    let first = world.copy();
    world.scan(&first);
    let second = world.copy();
    let past = |branch, seq| past(&world.store.inner.db.read(), branch, seq).map(drop);
    assert!(matches!(past(&second.id, 1), Err(HistoryError::Before { first: 2, seq: 1, .. })));
    assert!(matches!(past(&second.id, 99), Err(HistoryError::Future { last: 2, seq: 99 })));
    let stranger = BranchId::from_random([9; 10]);
    assert!(matches!(past(&stranger, 1), Err(HistoryError::NoBranch(_))));
}

#[test]
fn a_damaged_blob_is_told_and_not_given_out_and_comes_back_with_its_content() {
    let mut world = World::new(base);
    let branch = world.copy();
    branch.write("y", "precious");
    world.scan(&branch);
    std::fs::remove_file(branch.at("y")).unwrap();
    let seq = world.seq(&branch);
    world.scan(&branch);
    let hash = blake3::hash(b"precious").to_hex();
    let blob = world.store.dir().join("blobs").join(&hash[..2]).join(&hash[2..]);
    std::fs::write(blob, zstd::bulk::compress(b"forged!!", 1).unwrap()).unwrap();
    let found = world.store.content_at(&branch.id, &path("y"), seq).unwrap();
    let read = found.unwrap().1.read_to_end(&mut Vec::new());
    assert_eq!(read.unwrap_err().kind(), io::ErrorKind::InvalidData);
    assert!(world.store.content_at(&branch.id, &path("y"), seq).is_err());
    branch.write("elsewhere", "precious");
    world.scan(&branch);
    let found = world.store.content_at(&branch.id, &path("y"), seq).unwrap();
    assert_eq!(io::read_to_string(found.unwrap().1).unwrap(), "precious");
}

#[test]
fn what_can_be_had_of_a_state_is_given_and_the_rest_named() {
    let mut world = World::new(base);
    let branch = world.copy();
    branch.write("y", "precious");
    branch.write("z", "whole");
    branch.write("a", "another");
    std::fs::File::create(branch.at("large")).unwrap().set_len(300 << 20).unwrap();
    world.scan(&branch);
    for (content, damaged) in [(&b"precious"[..], &b"forged!!"[..]), (b"another", b"forged")] {
        let hash = blake3::hash(content).to_hex();
        let blob = world.store.dir().join("blobs").join(&hash[..2]).join(&hash[2..]);
        std::fs::write(blob, zstd::bulk::compress(damaged, 1).unwrap()).unwrap();
    }
    let again = world.copy();
    let root = std::fs::File::open(again.root()).unwrap();
    let missing = world.store.restore(&branch.id, world.seq(&branch), root.as_fd()).unwrap();
    assert_eq!(missing, [path("a"), path("large"), path("y")]);
    assert_eq!(std::fs::read_to_string(again.at("z")).unwrap(), "whole");
    // Nor is what the base has there in its place.
    assert!(missing.iter().all(|path| !again.root().join(path.as_path()).exists()));
}

#[test]
fn a_fork_sees_its_parent_up_to_the_fork() {
    let mut world = World::new(base);
    let parent = world.copy();
    parent.write("before", "b");
    world.scan(&parent);
    let fork = world.seq(&parent);
    let child = world.copy();
    let set = "UPDATE branches SET parent = ?1, parent_seq = ?2 WHERE id = ?3";
    let row = params![parent.id.as_str(), fork.cast_signed(), child.id.as_str()];
    world.store.inner.db.read().execute(set, row).unwrap();
    parent.write("after", "a");
    parent.write("before", "changed");
    world.scan(&parent);
    child.write("own", "o");
    std::fs::remove_file(child.at("a")).unwrap();
    world.scan(&child);
    let seq = world.seq(&child);
    let past = past(&world.store.inner.db.read(), &child.id, seq).unwrap().entries;
    assert_eq!(past[&path("before")].hash, Some(blake3::hash(b"b")));
    assert!(past.contains_key(&path("own")) && past.contains_key(&path("d/1")));
    assert!(!past.contains_key(&path("after")) && !past.contains_key(&path("a")));
    let read = |name: &str| {
        let found = world.store.content_at(&child.id, &path(name), seq).unwrap();
        found.map(|(_, mut content)| std::io::read_to_string(&mut content).unwrap())
    };
    assert_eq!(read("before").as_deref(), Some("b"));
    assert_eq!((read("a"), read("after")), (None, None));
}
