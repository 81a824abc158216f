//! Bases from git, directories and inline files, as git and the file system see them.

mod cancel;
mod dirs;
mod gc;
mod gits;
mod hostile;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use proto::api::BaseInfo;
use proto::path::{JsonBytes, TreePath};
use proto::verify::InlineFile;
use tempfile::TempDir;
use testkit::{OTHER_GID, OTHER_UID, temp_dir};

use super::{DirSource, FreezeError, GitSource};
use crate::clock::Clock;
use crate::entries::{Class, Entry, of_layer};
use crate::store::{EngineChoice, Store, StoreOptions};

/// A clock that tests set.
struct Manual(AtomicU64);

impl Clock for Manual {
    fn now_ms(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

struct Fixture {
    state: TempDir,
    store: Store,
    clock: Arc<Manual>,
}

impl Fixture {
    /// As root, bases belong to another user, as they do for the runner.
    fn new() -> Self {
        let state = temp_dir("state");
        let (store, clock) = open(state.path());
        Self { state, store, clock }
    }

    fn git(&self, repo: &Path, rev: &str) -> Result<BaseInfo, FreezeError> {
        let source = GitSource { repo: repo.to_str().unwrap().into(), rev: rev.into() };
        self.store.freeze_git(&source, &|_| ())
    }

    fn dir(&self, path: &Path) -> BaseInfo {
        self.try_dir(path, false).unwrap()
    }

    fn try_dir(&self, path: &Path, include_ignored: bool) -> Result<BaseInfo, FreezeError> {
        self.store.freeze_dir(&DirSource { path: path.to_owned(), include_ignored }, &|_| ())
    }

    fn layer(&self, base: &BaseInfo) -> proto::ids::LayerId {
        let conn = self.store.inner.db.read();
        let layer: String = conn
            .query_row("SELECT layer FROM bases WHERE id = ?1", [base.id.as_str()], |r| r.get(0))
            .unwrap();
        layer.parse().unwrap()
    }

    /// Where the base's files are.
    fn tree(&self, base: &BaseInfo) -> PathBuf {
        self.store.inner.layout.base(&self.layer(base))
    }

    fn entries(&self, base: &BaseInfo) -> std::collections::BTreeMap<TreePath, Entry> {
        let layer = self.layer(base);
        of_layer(&self.store.inner.db.read(), &layer, None).unwrap()
    }

    /// The paths of the tree, without directories.
    fn files(&self, base: &BaseInfo) -> Vec<String> {
        let entries = self.entries(base);
        let leaf = |(path, entry): (&TreePath, &Entry)| {
            (entry.class == Class::Tree && entry.hash.is_some()).then(|| path.to_string())
        };
        entries.iter().filter_map(leaf).collect()
    }

    /// A copy of the base that may be changed, as a branch is one.
    fn branch(&self, base: &BaseInfo) -> Branch {
        let dir = temp_dir("branch");
        let work = dir.path().join("work");
        testkit::process::run(testkit::process::command("cp").arg("-a").arg(self.tree(base)).arg(&work));
        Branch { _dir: dir, work }
    }
}

/// Opens the store: as root with another owner.
fn open(dir: &Path) -> (Store, Arc<Manual>) {
    let clock = Arc::new(Manual(AtomicU64::new(1_700_000_000_000)));
    let owner = testkit::user::is_root().then_some((OTHER_UID, OTHER_GID));
    let options = StoreOptions { engine: EngineChoice::Auto, owner, clock: clock.clone() };
    (Store::open(dir, options).unwrap(), clock)
}

struct Branch {
    _dir: TempDir,
    work: PathBuf,
}

impl Branch {
    /// Runs git there as the owner, who has no configuration.
    fn git(&self, args: &[&str]) -> String {
        let mut git = testkit::process::command("git");
        git.env_clear().env("PATH", testkit::process::variable("PATH").unwrap()).env("HOME", "/nonexistent");
        git.current_dir(&self.work).args(args);
        let out = testkit::process::run(testkit::as_other_user(&mut git));
        String::from_utf8(out.stdout).unwrap().trim_end().to_owned()
    }

    fn status(&self) -> String {
        self.git(&["status", "--porcelain"])
    }
}

fn inline(path: &str, content: &str) -> InlineFile {
    InlineFile {
        path: path.parse().unwrap(),
        content: JsonBytes::Text(content.into()),
        executable: path.ends_with(".sh"),
    }
}

#[test]
fn inline_files_become_a_base_once() {
    let f = Fixture::new();
    let files = [inline("src/a.rs", "fn a() {}"), inline("run.sh", "#!/bin/sh\n")];
    let base = f.store.freeze_files(&files).unwrap();
    assert_eq!((base.files, base.bytes, base.branches), (2, 19, 0));
    assert_eq!(f.files(&base), ["run.sh", "src/a.rs"]);
    assert_eq!(f.entries(&base)[&"run.sh".parse().unwrap()].mode, 0o755);
    assert_eq!(std::fs::read_to_string(f.tree(&base).join("src/a.rs")).unwrap(), "fn a() {}");
    let again = f.store.freeze_files(&[files[1].clone(), files[0].clone()]).unwrap();
    assert_eq!(again, base);
    let other = f.store.freeze_files(&[inline("run.sh", "#!/bin/sh\n")]).unwrap();
    assert_ne!(other.tree, base.tree);
    assert_eq!(f.store.bases().unwrap().len(), 2);
    assert_eq!(f.store.base(&other.id).unwrap(), other);
}

#[test]
fn inline_files_that_make_no_sense_are_refused() {
    let f = Fixture::new();
    for files in [
        vec![inline("a", "1"), inline("a/b", "2")],
        vec![inline("a", "1"), inline("a.txt", "2"), inline("a/b/c", "3")],
        vec![inline("a", "1"), inline("a", "1")],
        vec![inline(".git/hooks/x", "1")],
        vec![inline("sub/.GIT", "1")],
        vec![InlineFile { content: JsonBytes::Base64 { base64: "!".into() }, ..inline("a", "") }],
    ] {
        let error = f.store.freeze_files(&files).unwrap_err();
        assert!(matches!(error, FreezeError::Inline { .. }), "{error}");
    }
    assert!(f.store.bases().unwrap().is_empty());
    assert!(f.store.freeze_files(&[inline("a.txt", "1"), inline("a/b", "2")]).is_ok());
}
