//! A freeze that is stopped, wherever it is, ends at once and leaves nothing.

use std::cell::RefCell;
use std::path::Path;

use testkit::GitRepo;

use super::super::{Cancel, DirSource, FreezeError, GitSource};
use super::Fixture;
use crate::store::Store;

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect()
}

/// Runs a freeze once to learn its steps, then stops it at each of them.
fn stop_everywhere(
    repo: &GitRepo,
    freeze: impl Fn(&Store, &dyn Fn(&str), &Cancel) -> Result<proto::api::BaseInfo, FreezeError>,
) {
    // How often git says how far it is differs.
    let is_step = |text: &str| !text.contains("objects:") && !text.contains("deltas:");
    let steps = RefCell::new(0);
    let count = |text: &str| *steps.borrow_mut() += usize::from(is_step(text));
    freeze(&Fixture::new().store, &count, &Cancel::default()).unwrap();
    assert!(*steps.borrow() >= 4);
    for last in 1..=*steps.borrow() {
        let fixture = Fixture::new();
        let (cancel, said) = (Cancel::default(), RefCell::new(Vec::new()));
        let progress = |text: &str| {
            if is_step(text) {
                said.borrow_mut().push(text.to_owned());
            }
            if said.borrow().len() == last {
                cancel.cancel();
            }
        };
        let stopped = freeze(&fixture.store, &progress, &cancel);
        assert!(matches!(stopped, Err(FreezeError::Cancelled)), "{:?}: {stopped:?}", said.borrow());
        assert_eq!(fixture.store.bases().unwrap(), []);
        for dir in ["tmp", "bases"] {
            assert_eq!(names(&fixture.state.path().join(dir)), [""; 0], "{:?}", said.borrow());
        }
        // The next one is not in its way.
        let whole = freeze(&fixture.store, &|_| (), &Cancel::default()).unwrap();
        assert_eq!(whole.files, 3, "{:?} in {}", said.borrow(), repo.path().display());
    }
}

fn repo() -> GitRepo {
    let repo = GitRepo::new();
    repo.file("a", "a").file("b/c", "c").file("b/d", "d").commit("first");
    repo
}

#[test]
fn a_stopped_freeze_of_a_directory_leaves_nothing() {
    let repo = repo();
    stop_everywhere(&repo, |store, progress, cancel| {
        let source = DirSource { path: repo.path().to_owned(), include_ignored: false };
        store.freeze_dir_until(&source, progress, cancel)
    });
}

#[test]
fn a_stopped_freeze_of_a_commit_leaves_nothing() {
    let repo = repo();
    stop_everywhere(&repo, |store, progress, cancel| {
        let source = GitSource { repo: repo.path().to_str().unwrap().into(), rev: "HEAD".into() };
        store.freeze_git_until(&source, progress, cancel)
    });
}
