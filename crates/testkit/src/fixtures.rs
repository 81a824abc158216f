//! Directories, trees of files and git repositories that tests start from.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::process::{command, run};

/// A directory of its own, removed at the end, that other users can look into.
pub fn temp_dir(label: &str) -> TempDir {
    let dir = tempfile::Builder::new()
        .prefix(&format!("tendon-{label}-"))
        .tempdir()
        .expect("a temporary directory");
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).expect("chmod");
    dir
}

/// Writes a file with the directories above it.
pub fn write(path: &Path, content: impl AsRef<[u8]>) {
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).expect("mkdir");
    }
    std::fs::write(path, content).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}

/// Makes `count` small files below `dir`, 50 to a directory, each with content of its own; returns their paths in order.
pub fn tree_of_files(dir: &Path, count: usize) -> Vec<PathBuf> {
    (0..count)
        .map(|n| {
            let path = dir.join(format!("d{:02}/s{:03}/f{n:05}.txt", n / 50 % 37, n / 50));
            write(&path, format!("file {n}\n{}", "lorem ipsum dolor sit amet\n".repeat(n % 23)));
            path
        })
        .collect()
}

/// `git` with nothing of the caller's configuration, a fixed author and a fixed date, so that commit ids repeat.
pub fn git(dir: &Path) -> Command {
    let mut git = command("git");
    git.current_dir(dir);
    for name in ["GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY"] {
        git.env_remove(name);
    }
    git.envs([
        ("GIT_CONFIG_NOSYSTEM", "1"),
        ("GIT_CONFIG_GLOBAL", "/dev/null"),
        ("GIT_TERMINAL_PROMPT", "0"),
    ]);
    for (role, mail) in [("AUTHOR", "author@example.org"), ("COMMITTER", "committer@example.org")] {
        git.env(format!("GIT_{role}_NAME"), "A Person").env(format!("GIT_{role}_EMAIL"), mail);
        git.env(format!("GIT_{role}_DATE"), "2026-01-01T00:00:00+0000");
    }
    git
}

/// A git repository made for a test.
pub struct GitRepo {
    dir: Place,
}

enum Place {
    Own(TempDir),
    Given(PathBuf),
}

impl GitRepo {
    /// An empty repository in a temporary directory, on branch `main`.
    pub fn new() -> Self {
        Self::init(Place::Own(temp_dir("repo")))
    }

    /// An empty repository in `dir`, which is made if it does not exist.
    pub fn at(dir: &Path) -> Self {
        std::fs::create_dir_all(dir).expect("mkdir");
        Self::init(Place::Given(dir.to_owned()))
    }

    fn init(dir: Place) -> Self {
        let repo = Self { dir };
        repo.git(&["init", "--quiet", "--initial-branch=main"]);
        repo
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        match &self.dir {
            Place::Own(dir) => dir.path(),
            Place::Given(dir) => dir,
        }
    }

    /// Writes a file in the working tree.
    pub fn file(&self, path: &str, content: impl AsRef<[u8]>) -> &Self {
        write(&self.path().join(path), content);
        self
    }

    /// Writes an executable file in the working tree.
    pub fn script(&self, path: &str, content: &str) -> &Self {
        self.file(path, content);
        std::fs::set_permissions(self.path().join(path), std::fs::Permissions::from_mode(0o755))
            .expect("chmod");
        self
    }

    /// Makes a symlink in the working tree.
    pub fn symlink(&self, target: &str, path: &str) -> &Self {
        std::os::unix::fs::symlink(target, self.path().join(path)).expect("symlink");
        self
    }

    /// Removes a file of the working tree.
    pub fn remove(&self, path: &str) -> &Self {
        std::fs::remove_file(self.path().join(path)).expect("unlink");
        self
    }

    /// Commits everything in the working tree and returns the commit's id.
    pub fn commit(&self, message: &str) -> String {
        self.git(&["add", "--all"]);
        self.git(&["commit", "--quiet", "--allow-empty", "--message", message]);
        self.git(&["rev-parse", "HEAD"])
    }

    /// Runs git in the repository; returns what it printed, without the last newline. Panics when git fails.
    pub fn git(&self, args: &[&str]) -> String {
        let output = run(git(self.path()).args(args));
        String::from_utf8_lossy(&output.stdout).trim_end().to_owned()
    }
}

impl Default for GitRepo {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::need::{Need, have};

    #[test]
    fn a_repository_repeats_its_commit_ids() {
        if !have(Need::Git) {
            return;
        }
        let make =
            || GitRepo::new().file("a/b", "x").script("run", "#!/bin/sh\n").symlink("a", "l").commit("one");
        assert_eq!(make(), make());
    }

    #[test]
    fn a_tree_has_as_many_files_as_asked_for() {
        let dir = temp_dir("tree");
        let paths = tree_of_files(dir.path(), 120);
        assert_eq!(paths.len(), 120);
        assert!(paths.iter().all(|path| path.is_file()));
    }
}
