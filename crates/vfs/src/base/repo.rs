//! Finds the git repository of a directory without asking git, and without believing it: a directory that somebody
//! else wrote can have a `.git` that leads to another repository of the user, whose history must not get into a base.

use std::fs::Metadata;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::git::Git;

/// Largest small file of a git directory that is read (`HEAD`, `commondir`, a `.git` file).
const SMALL_BYTES_MAX: u64 = 64 * 1024;
/// Largest configuration of a repository that is read.
const CONFIG_BYTES_MAX: u64 = 4 << 20;
/// Refs that are looked at for links that lead outside.
pub(crate) const REFS_MAX: usize = 200_000;

/// A repository as it was found.
pub(crate) struct Repo {
    /// The top of its work tree; `None`: bare.
    pub(crate) top: Option<PathBuf>,
    /// Its git directory: `HEAD` and `index` are here.
    pub(crate) git_dir: PathBuf,
    /// The git directory that it shares with its linked worktrees: objects, refs and configuration are here.
    pub(crate) common: PathBuf,
    /// Why its history must not be read, if so.
    pub(crate) refused: Option<String>,
}

impl Repo {
    /// What `git fetch` is given to read it.
    pub(super) fn address(&self) -> &Path {
        self.top.as_deref().unwrap_or(&self.git_dir)
    }

    /// The repository with its top at `dir`, or the bare one at `dir`.
    pub(crate) fn at(dir: &Path) -> Option<Repo> {
        let dot_git = dir.join(".git");
        let found = |git_dir: PathBuf, common: PathBuf| {
            let refused = leads_outside(&git_dir, &common);
            Repo { top: Some(dir.to_owned()), git_dir, common, refused }
        };
        match dot_git.symlink_metadata() {
            Ok(meta) if meta.is_dir() => {
                looks_like_git_dir(&dot_git).then(|| found(dot_git.clone(), dot_git))
            }
            Ok(meta) if meta.is_file() => match linked(dir, &dot_git) {
                Ok((git_dir, common)) => Some(found(git_dir, common)),
                Err(reason) => Some(refused(dir, dot_git, reason)),
            },
            Ok(meta) if meta.is_symlink() => {
                Some(refused(dir, dot_git, "its .git is a symbolic link".into()))
            }
            Ok(_) | Err(_) => (looks_like_git_dir(dir)).then(|| Repo {
                top: None,
                git_dir: dir.to_owned(),
                common: dir.to_owned(),
                refused: leads_outside(dir, dir),
            }),
        }
    }

    /// The repository that holds `dir`: at `dir` or above. One above must belong to who `dir` belongs to (or to us),
    /// or anybody could put one into a shared directory.
    pub(super) fn holding(dir: &Path) -> Option<Repo> {
        if let Some(repo) = Self::at(dir) {
            return Some(repo);
        }
        let owner = dir.symlink_metadata().ok()?.uid();
        let ours = |meta: &Metadata| meta.uid() == owner || meta.uid() == rustix::process::geteuid().as_raw();
        dir.ancestors().skip(1).find_map(|above| {
            let dot_git = above.join(".git").symlink_metadata().ok()?;
            (ours(&dot_git)).then(|| Self::at(above)).flatten()
        })
    }

    /// What its configuration says of a few harmless things, as `key`, `value`.
    pub(super) fn settings(&self) -> Vec<(String, String)> {
        let mut out = Vec::new();
        for file in [self.common.join("config"), self.git_dir.join("config.worktree")] {
            if !is_config(&file) {
                continue;
            }
            let args = ["config", "-z", "--no-includes", "--list", "--file"].map(std::ffi::OsStr::new);
            let args: Vec<_> = args.into_iter().chain([file.as_os_str()]).collect();
            let Ok(list) = Git::new().run(&args) else { continue };
            for item in list.split(|b| *b == 0) {
                let text = String::from_utf8_lossy(item);
                let (key, value) = text.split_once('\n').unwrap_or((&text, "true"));
                if SETTINGS.contains(&key) && is_word(value) {
                    out.push((key.to_owned(), value.to_owned()));
                }
            }
        }
        out
    }
}

/// Configuration that decides how files compare with the index; a base takes it over.
const SETTINGS: &[&str] = &[
    "core.filemode",
    "core.autocrlf",
    "core.eol",
    "core.symlinks",
    "core.ignorecase",
    "core.sparsecheckout",
    "core.sparsecheckoutcone",
    "extensions.objectformat",
];

fn is_word(value: &str) -> bool {
    !value.is_empty() && value.len() <= 16 && value.bytes().all(|b| b.is_ascii_alphanumeric())
}

fn refused(dir: &Path, git_dir: PathBuf, reason: String) -> Repo {
    Repo { top: Some(dir.to_owned()), common: git_dir.clone(), git_dir, refused: Some(reason) }
}

fn looks_like_git_dir(dir: &Path) -> bool {
    dir.join("HEAD").symlink_metadata().is_ok() && dir.join("objects").is_dir() && dir.join("refs").is_dir()
}

/// Where a `.git` file leads: a linked worktree or a submodule. Both name the work tree back, or anybody's `.git` file
/// could name any repository.
fn linked(top: &Path, dot_git: &Path) -> Result<(PathBuf, PathBuf), String> {
    let text = read_small(dot_git).map_err(|error| format!("its .git file can't be read: {error}"))?;
    let target = text.strip_prefix(b"gitdir: ").map(<[u8]>::trim_ascii_end).filter(|path| !path.is_empty());
    let target = target.ok_or("its .git file names no git directory")?;
    let git_dir = top.join(std::ffi::OsStr::from_bytes(target));
    let git_dir = git_dir
        .canonicalize()
        .map_err(|error| format!("its .git file names {}: {error}", super::shown(&git_dir)))?;
    let back = |path: PathBuf| path.canonicalize().ok();
    if let Ok(text) = read_small(&git_dir.join("gitdir")) {
        let named = git_dir.join(std::ffi::OsStr::from_bytes(text.trim_ascii_end()));
        let common = read_small(&git_dir.join("commondir")).unwrap_or_default();
        let common = git_dir.join(std::ffi::OsStr::from_bytes(common.trim_ascii_end()));
        if back(named) == back(dot_git.to_owned())
            && let Some(common) = back(common)
            && git_dir.starts_with(common.join("worktrees"))
        {
            return Ok((git_dir, common));
        }
    } else if let Some(named) = core_worktree(&git_dir)
        && back(git_dir.join(named)) == back(top.to_owned())
    {
        return Ok((git_dir.clone(), git_dir));
    }
    Err(format!("its .git file names {}, which does not name this directory back", super::shown(&git_dir)))
}

fn core_worktree(git_dir: &Path) -> Option<PathBuf> {
    let file = git_dir.join("config");
    if !is_config(&file) {
        return None;
    }
    let args = ["config", "--no-includes", "--get", "core.worktree", "--file"].map(std::ffi::OsStr::new);
    let args: Vec<_> = args.into_iter().chain([file.as_os_str()]).collect();
    let value = Git::new().ask(&args).ok()??;
    Some(PathBuf::from(std::ffi::OsStr::from_bytes(value.trim_ascii_end())))
}

/// Whether something in the git directory leads to another repository: git follows symbolic links, `commondir` and
/// alternates without a question.
fn leads_outside(git_dir: &Path, common: &Path) -> Option<String> {
    if git_dir == common && git_dir.join("commondir").symlink_metadata().is_ok() {
        return Some("its git directory has a `commondir` file".into());
    }
    let names = [
        "HEAD",
        "config",
        "objects",
        "objects/pack",
        "objects/info",
        "refs",
        "packed-refs",
        "shallow",
        "reftable",
    ];
    for name in names {
        for dir in [git_dir, common] {
            if dir.join(name).symlink_metadata().is_ok_and(|meta| !meta.is_file() && !meta.is_dir()) {
                return Some(format!("`{name}` in its git directory is neither a file nor a directory"));
            }
        }
    }
    for name in ["alternates", "http-alternates"] {
        if common.join("objects/info").join(name).symlink_metadata().is_ok() {
            return Some(format!("it borrows objects of another repository (objects/info/{name})"));
        }
    }
    let mut left = REFS_MAX;
    for dir in
        [common.join("refs"), git_dir.join("refs"), common.join("objects/pack"), common.join("objects/info")]
    {
        if has_odd(dir.clone(), &mut left) {
            return Some(format!("below {} is what is neither a file nor a directory", super::shown(&dir)));
        }
    }
    // Loose objects: a linked directory or file would be read like any other.
    let linked = |dir: io::Result<std::fs::ReadDir>| {
        dir.is_ok_and(|dir| dir.flatten().any(|e| e.file_type().is_ok_and(|kind| kind.is_symlink())))
    };
    linked(std::fs::read_dir(common.join("objects")))
        .then(|| "there is a symbolic link in the objects of its git directory".into())
}

/// Whether something below `dir` is a link, a fifo or the like, or can't be looked at.
pub(crate) fn has_odd(dir: PathBuf, left: &mut usize) -> bool {
    let mut todo = vec![dir];
    while let Some(dir) = todo.pop() {
        let entries = match std::fs::read_dir(&dir) {
            Ok(entries) => entries,
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                continue;
            }
            Err(_) => return true,
        };
        for entry in entries {
            let Ok((path, kind)) = entry.and_then(|entry| Ok((entry.path(), entry.file_type()?))) else {
                return true;
            };
            *left = left.saturating_sub(1);
            if *left == 0 || !(kind.is_dir() || kind.is_file()) {
                return true;
            }
            if kind.is_dir() {
                todo.push(path);
            }
        }
    }
    false
}

/// Whether git can be given the file to read as configuration.
fn is_config(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|meta| meta.is_file() && meta.len() <= CONFIG_BYTES_MAX)
}

pub(super) fn is_plain_file(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|meta| meta.is_file())
}

/// The content of a small regular file; a symbolic link, a fifo or a large file is an error.
pub(super) fn read_small(path: &Path) -> io::Result<Vec<u8>> {
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
    let flags = i32::try_from(flags.bits()).unwrap_or_default();
    let file = std::fs::File::options().read(true).custom_flags(flags).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    let mut out = Vec::new();
    file.take(SMALL_BYTES_MAX + 1).read_to_end(&mut out)?;
    if out.len() as u64 > SMALL_BYTES_MAX { Err(io::ErrorKind::FileTooLarge.into()) } else { Ok(out) }
}
