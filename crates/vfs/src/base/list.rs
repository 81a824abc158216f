//! Which files of a directory are frozen: those that git tracks or would track, or all of them.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use proto::path::TreePath;
use rustix::fs::{Dir, FileType};

use super::copy::{is_gone, open_dir};
use super::dotgit::{Head, copy_state, write_bare_minimum};
use super::repo::{Repo, is_plain_file};
use super::{Cancel, Draft, FreezeError, shown};
use crate::git::{Git, GitError, user_excludes};

/// Largest index of a repository that is read: of some million files.
const INDEX_BYTES_MAX: u64 = 512 << 20;
/// How often a guard looks whether a freeze was cancelled.
const GUARD_EVERY: std::time::Duration = std::time::Duration::from_millis(20);
/// Submodules in submodules, and so on.
const NESTED_MAX: usize = 16;

/// The files of a source, as paths below its top.
#[derive(Default)]
pub(super) struct List {
    pub(super) paths: BTreeSet<TreePath>,
    /// Repositories within, whose files are taken and whose history is not.
    pub(super) nested: Vec<String>,
}

/// All files, symlinks and directories below `root`; `.git` is passed over, and so is `except`.
pub(super) fn everything(
    root: BorrowedFd<'_>,
    except: Option<&TreePath>,
    cancel: &Cancel,
) -> Result<List, FreezeError> {
    let mut out = List::default();
    let mut todo: Vec<Option<TreePath>> = vec![None];
    while let Some(dir) = todo.pop() {
        cancel.check().map_err(FreezeError::Store)?;
        let name = || dir.as_ref().map_or_else(|| ".".to_owned(), ToString::to_string);
        let fail = |error: rustix::io::Errno| FreezeError::Read { path: name(), source: error.into() };
        let fd = match open_dir(root, dir.as_ref()) {
            Err(error) if is_gone(error) && dir.is_some() => continue,
            opened => opened.map_err(fail)?,
        };
        for entry in Dir::new(fd).map_err(fail)? {
            let entry = entry.map_err(fail)?;
            let bytes = entry.file_name().to_bytes();
            if matches!(bytes, b"." | b"..") {
                continue;
            }
            if bytes == b".git" {
                out.nested.extend(dir.as_ref().map(ToString::to_string));
                continue;
            }
            let path = match &dir {
                Some(dir) => dir.join(bytes)?,
                None => TreePath::new(bytes)?,
            };
            if except == Some(&path) {
                continue;
            }
            if is_dir(root, &path, entry.file_type()) {
                todo.push(Some(path.clone()));
            }
            out.paths.insert(path);
        }
    }
    Ok(out)
}

fn is_dir(root: BorrowedFd<'_>, path: &TreePath, kind: FileType) -> bool {
    match kind {
        FileType::Directory => true,
        FileType::Unknown => open_dir(root, Some(path)).is_ok(),
        FileType::RegularFile
        | FileType::Symlink
        | FileType::Fifo
        | FileType::Socket
        | FileType::CharacterDevice
        | FileType::BlockDevice => false,
    }
}

/// What git tracks in the work tree `top`, and what it doesn't track and doesn't ignore. The git directory is `git_dir`,
/// one of ours with the user's index: the user's own repository configuration is not read.
///
/// Ignored is what `.gitignore` files, `info/exclude` and the user's own global excludes file say.
pub(super) fn not_ignored(
    root: BorrowedFd<'_>,
    top: &Path,
    git_dir: &Path,
    draft: &Draft,
) -> Result<List, FreezeError> {
    let mut out = List::default();
    let mut walk = Nested { root, top, draft, count: 0, out: &mut out };
    walk.repo(None, git_dir, 0)?;
    Ok(out)
}

struct Nested<'a> {
    root: BorrowedFd<'a>,
    top: &'a Path,
    draft: &'a Draft,
    count: usize,
    out: &'a mut List,
}

impl Nested<'_> {
    /// Adds the files of the repository at `dir`, and those of the repositories within.
    fn repo(&mut self, dir: Option<&TreePath>, git_dir: &Path, depth: usize) -> Result<(), FreezeError> {
        let work_tree = dir.map_or_else(|| self.top.to_owned(), |dir| self.top.join(dir.as_path()));
        let git = git_for(git_dir, &work_tree).until(&self.draft.cancel);
        let mut nested = Vec::new();
        let staged = git.run(&["ls-files", "-z", "--stage"])?;
        for line in staged.split(|b| *b == 0).filter(|line| !line.is_empty()) {
            let Some(name) = line.splitn(2, |b| *b == b'\t').nth(1) else { continue };
            let Some(path) = below(dir, name)? else { continue };
            if line.starts_with(b"160000 ") {
                nested.push(path);
            } else {
                self.out.paths.insert(path);
            }
        }
        let closed = RefCell::new(None);
        let hear = |line: &str| {
            if let Some((_, name)) = line.split_once("could not open directory '") {
                closed.borrow_mut().get_or_insert_with(|| name.split('\'').next().unwrap_or(name).to_owned());
            }
        };
        let others = self.guarded(dir, git, |git| {
            git.run_with(&["ls-files", "-z", "--others", "--exclude-standard"], &[], &hear)
        })?;
        if let Some(name) = closed.into_inner() {
            let source = std::io::ErrorKind::PermissionDenied.into();
            return Err(FreezeError::Read { path: shown(&work_tree.join(name)), source });
        }
        for name in others.split(|b| *b == 0).filter(|name| !name.is_empty()) {
            let Some(path) = below(dir, name.strip_suffix(b"/").unwrap_or(name))? else { continue };
            if name.ends_with(b"/") {
                nested.push(path);
            } else {
                self.out.paths.insert(path);
            }
        }
        for path in nested {
            self.nested(path, depth + 1)?;
        }
        Ok(())
    }

    /// Runs a git that reads `.gitignore` files, and ends it when one of them is a fifo, at which it would wait for ever.
    fn guarded<T>(
        &self,
        dir: Option<&TreePath>,
        git: Git,
        run: impl FnOnce(&Git) -> Result<T, GitError>,
    ) -> Result<T, FreezeError> {
        let (stop, over) = (Cancel::default(), Cancel::default());
        std::thread::scope(|scope| {
            let looking = scope.spawn(|| {
                let odd = odd_rules(self.root, dir, &[&over, &self.draft.cancel]);
                if odd.is_some() {
                    stop.cancel();
                }
                while !over.is_cancelled() && !self.draft.cancel.is_cancelled() {
                    std::thread::park_timeout(GUARD_EVERY);
                }
                if self.draft.cancel.is_cancelled() {
                    stop.cancel();
                }
                odd
            });
            let done = run(&git.until(&stop));
            over.cancel();
            looking.thread().unpark();
            match (done, looking.join().ok().flatten()) {
                (Ok(done), _) => Ok(done),
                (Err(_), Some(odd)) => {
                    let path = shown(&self.top.join(odd.as_path()));
                    let reason = "it is a fifo or a device".into();
                    Err(FreezeError::Unusable { path, reason, hint: "remove it, or put a file in its place" })
                }
                (Err(error), None) => Err(error.into()),
            }
        })
    }

    fn nested(&mut self, path: TreePath, depth: usize) -> Result<(), FreezeError> {
        self.out.paths.insert(path.clone());
        // A submodule that is not checked out is an empty directory; a link is not entered.
        if open_dir(self.root, Some(&path)).is_err() {
            return Ok(());
        }
        let at = self.top.join(path.as_path());
        let Some(repo) = Repo::at(&at).filter(|_| depth <= NESTED_MAX) else { return Ok(()) };
        self.count += 1;
        let git_dir = scratch_repo(&self.draft.dir.join(format!("nested-{}", self.count)), &repo)?;
        self.out.nested.push(path.to_string());
        self.repo(Some(&path), &git_dir, depth)
    }
}

/// A `.gitignore` below `dir` that can't be read like a file.
fn odd_rules(root: BorrowedFd<'_>, dir: Option<&TreePath>, ends: &[&Cancel]) -> Option<TreePath> {
    let mut todo: Vec<Option<TreePath>> = vec![dir.cloned()];
    while let Some(dir) = todo.pop() {
        if ends.iter().any(|end| end.is_cancelled()) {
            return None;
        }
        // What can't be looked at is told by who is to read it.
        let Some(entries) = open_dir(root, dir.as_ref()).ok().and_then(|fd| Dir::new(fd).ok()) else {
            continue;
        };
        for entry in entries.flatten() {
            let name = entry.file_name().to_bytes();
            let path = match &dir {
                Some(dir) => dir.join(name),
                None => TreePath::new(name),
            };
            // Also `.` and `..`, which are no paths.
            let Ok(path) = path else { continue };
            match entry.file_type() {
                FileType::Directory => todo.push(Some(path)),
                FileType::Fifo | FileType::CharacterDevice | FileType::BlockDevice
                    if name == b".gitignore" =>
                {
                    return Some(path);
                }
                FileType::Fifo
                | FileType::CharacterDevice
                | FileType::BlockDevice
                | FileType::RegularFile
                | FileType::Symlink
                | FileType::Socket
                | FileType::Unknown => {}
            }
        }
    }
    None
}

/// A git directory of ours that knows what `repo` tracks and excludes, and has no history.
pub(super) fn scratch_repo(git_dir: &Path, repo: &Repo) -> Result<PathBuf, FreezeError> {
    let settings = if repo.refused.is_none() { repo.settings() } else { &[] };
    let head = Head::Branch("refs/heads/main".into());
    write_bare_minimum(git_dir, &head, settings).map_err(FreezeError::Store)?;
    if repo.refused.is_none() {
        take_index(repo, git_dir)?;
    }
    Ok(git_dir.to_owned())
}

/// Copies the user's index, with what it is split into, and the exclude file.
pub(super) fn take_index(repo: &Repo, git_dir: &Path) -> Result<(), FreezeError> {
    let take = || -> std::io::Result<()> {
        for entry in std::fs::read_dir(&repo.git_dir)? {
            let entry = entry?;
            let name = entry.file_name();
            let is_index = name == "index" || name.as_bytes().starts_with(b"sharedindex.");
            if is_index && is_plain_file(&entry.path()) {
                if entry.metadata()?.len() > INDEX_BYTES_MAX {
                    let most = INDEX_BYTES_MAX >> 20;
                    return Err(std::io::Error::other(format!("its index is larger than {most} MiB")));
                }
                std::fs::copy(entry.path(), git_dir.join(name))?;
            }
        }
        Ok(())
    };
    take().map_err(|source| FreezeError::Read { path: shown(&repo.git_dir), source })?;
    copy_state(&repo.git_dir, &repo.common, git_dir).map_err(FreezeError::Store)
}

/// git with a git directory of ours and the user's work tree.
pub(super) fn git_for(git_dir: &Path, work_tree: &Path) -> Git {
    let git = Git::at(git_dir).work_tree(work_tree);
    match user_excludes() {
        Some(file) => git.config("core.excludesFile", file),
        None => git,
    }
}

/// The path of `name` in the repository at `dir`. None for what a written index places in a `.git`: copied, it would be
/// the configuration that git reads on the host.
fn below(dir: Option<&TreePath>, name: &[u8]) -> Result<Option<TreePath>, FreezeError> {
    if in_git_dir(name) {
        return Ok(None);
    }
    Ok(Some(match dir {
        Some(dir) => TreePath::new([dir.as_bytes(), b"/", name].concat())?,
        None => TreePath::new(name)?,
    }))
}

/// Whether a path leads into a `.git`, in any spelling that a file system without cases would take for one.
pub(super) fn in_git_dir(path: &[u8]) -> bool {
    path.split(|b| *b == b'/').any(|part| part.eq_ignore_ascii_case(b".git"))
}
