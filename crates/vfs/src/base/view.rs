//! A git directory of ours through which git reads a repository that somebody else wrote: theirs are its objects and
//! refs, by symbolic links, and its `HEAD`, by a copy. Its configuration is ours, so git opens nothing else of theirs: no
//! included file, attributes, grafts or hooks.

use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use super::repo::{Repo, read_small};
use super::{FreezeError, shown};

/// What is linked, where they have it. That none of it is odd was looked at when the repository was found.
const LINKED: [&str; 5] = ["objects", "refs", "packed-refs", "reftable", "shallow"];

/// The view of a repository, gone when this is dropped.
pub(super) struct View {
    dir: PathBuf,
}

impl View {
    /// Makes it at `dir`, where nothing is.
    pub(super) fn of(repo: &Repo, dir: PathBuf) -> Result<Self, FreezeError> {
        let theirs = repo.git_dir.join("HEAD");
        let head =
            read_small(&theirs).map_err(|source| FreezeError::Read { path: shown(&theirs), source })?;
        std::fs::create_dir(&dir).map_err(FreezeError::Store)?;
        let view = Self { dir };
        view.fill(repo, &head).map_err(FreezeError::Store)?;
        Ok(view)
    }

    fn fill(&self, repo: &Repo, head: &[u8]) -> io::Result<()> {
        for name in LINKED {
            let theirs = repo.common.join(name);
            if theirs.symlink_metadata().is_ok() {
                symlink(theirs, self.dir.join(name))?;
            }
        }
        let mut config = format!(
            "[core]\n\trepositoryformatversion = 1\n\tbare = true\n[extensions]\n\tobjectFormat = {}\n",
            repo.format()
        );
        if repo.has_reftable() {
            config.push_str("\trefStorage = reftable\n");
        }
        std::fs::write(self.dir.join("config"), config)?;
        std::fs::write(self.dir.join("HEAD"), head)
    }

    /// What git is given in place of the repository.
    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }
}

impl Drop for View {
    fn drop(&mut self) {
        // Links are removed, and not followed.
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}
