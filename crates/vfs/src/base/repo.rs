//! Finds the git repository of a directory without asking git, and without believing it: a directory that somebody
//! else wrote can have a `.git` that leads to another repository of the user, whose history must not get into a base.

use std::fs::Metadata;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::git::Git;

/// Largest small file of a git directory that is read (`HEAD`, `commondir`, a `.git` file).
const SMALL_BYTES_MAX: u64 = 64 * 1024;
/// Largest configuration of a repository that is read.
const CONFIG_BYTES_MAX: u64 = 4 << 20;
/// Refs and logs that are looked at for what is odd.
const REFS_MAX: usize = 200_000;
/// Objects that are looked at for what is odd.
const OBJECTS_MAX: usize = 20_000_000;

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
    settings: OnceLock<Vec<(String, String)>>,
}

impl Repo {
    fn found(top: Option<&Path>, git_dir: PathBuf, common: PathBuf) -> Self {
        let refused = leads_outside(&git_dir, &common);
        Self { top: top.map(Path::to_owned), git_dir, common, refused, settings: OnceLock::new() }
    }

    fn refused(dir: &Path, reason: String) -> Self {
        let (top, git_dir) = (Some(dir.to_owned()), dir.join(".git"));
        Self { top, common: git_dir.clone(), git_dir, refused: Some(reason), settings: OnceLock::new() }
    }

    /// What names it.
    pub(super) fn address(&self) -> &Path {
        self.top.as_deref().unwrap_or(&self.git_dir)
    }

    /// The repository with its top at `dir`, or the bare one at `dir`.
    pub(crate) fn at(dir: &Path) -> Option<Repo> {
        let dot_git = dir.join(".git");
        match dot_git.symlink_metadata() {
            Ok(meta) if meta.is_dir() => {
                looks_like_git_dir(&dot_git).then(|| Self::found(Some(dir), dot_git.clone(), dot_git.clone()))
            }
            Ok(meta) if meta.is_file() => Some(match linked(dir, &dot_git) {
                Ok((git_dir, common)) => Self::found(Some(dir), git_dir, common),
                Err(reason) => Self::refused(dir, reason),
            }),
            Ok(meta) if meta.is_symlink() => Some(Self::refused(dir, "its .git is a symbolic link".into())),
            Ok(_) | Err(_) => {
                looks_like_git_dir(dir).then(|| Self::found(None, dir.to_owned(), dir.to_owned()))
            }
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
    pub(super) fn settings(&self) -> &[(String, String)] {
        self.settings.get_or_init(|| {
            let said = self.configs().filter_map(|file| configured(&file).ok()).flatten();
            said.filter(|(key, value)| SETTINGS.contains(&key.as_str()) && is_word(value)).collect()
        })
    }

    /// git's name for its object format.
    pub(super) fn format(&self) -> &'static str {
        let is_sha256 = |(key, value): &(String, String)| key == OBJECT_FORMAT && value == "sha256";
        if self.settings().iter().any(is_sha256) { "sha256" } else { "sha1" }
    }

    /// Whether its refs are in a reftable.
    pub(super) fn has_reftable(&self) -> bool {
        self.common.join("reftable").is_dir()
    }

    /// Why git must not write in it, if so: there it opens more than objects and refs.
    pub(crate) fn unsafe_to_write(&self) -> Option<String> {
        let mut left = REFS_MAX;
        for dir in [&self.git_dir, &self.common] {
            for name in ["logs", "info"] {
                if is_odd(&dir.join(name)) || has_odd(dir.join(name), &mut left) {
                    return Some(format!("in its {name} is what is neither a file nor a directory"));
                }
            }
        }
        for file in self.configs().filter(|file| file.symlink_metadata().is_ok()) {
            let name = super::shown(&file);
            match configured(&file) {
                Ok(said) if said.iter().any(|(key, _)| key.starts_with("include")) => {
                    return Some(format!("its configuration includes other files ({name})"));
                }
                Ok(_) => {}
                Err(reason) => return Some(format!("its configuration {name} {reason}")),
            }
        }
        None
    }

    fn configs(&self) -> impl Iterator<Item = PathBuf> {
        [self.common.join("config"), self.git_dir.join("config.worktree")].into_iter()
    }
}

/// What a file of configuration says, without what it includes, as `key`, `value`.
fn configured(file: &Path) -> Result<Vec<(String, String)>, &'static str> {
    if !is_config(file) {
        return Err("is not a small file");
    }
    let args = ["config", "-z", "--no-includes", "--list", "--file"].map(std::ffi::OsStr::new);
    let args: Vec<_> = args.into_iter().chain([file.as_os_str()]).collect();
    let list = Git::new().run(&args).map_err(|_| "can't be read by git")?;
    let pair = |item: &[u8]| {
        let text = String::from_utf8_lossy(item);
        let (key, value) = text.split_once('\n').unwrap_or((&text, "true"));
        (key.to_owned(), value.to_owned())
    };
    Ok(list.split(|b| *b == 0).filter(|item| !item.is_empty()).map(pair).collect())
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
    OBJECT_FORMAT,
];
const OBJECT_FORMAT: &str = "extensions.objectformat";

fn is_word(value: &str) -> bool {
    !value.is_empty() && value.len() <= 16 && value.bytes().all(|b| b.is_ascii_alphanumeric())
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

/// Whether what git reads of a repository leads to another one, or is no file: git follows symbolic links, `commondir`
/// and alternates without a question, and waits for ever at a fifo.
fn leads_outside(git_dir: &Path, common: &Path) -> Option<String> {
    if git_dir == common && git_dir.join("commondir").symlink_metadata().is_ok() {
        return Some("its git directory has a `commondir` file".into());
    }
    for name in ["HEAD", "objects", "refs", "packed-refs", "shallow", "reftable"] {
        if [git_dir, common].iter().any(|dir| is_odd(&dir.join(name))) {
            return Some(format!("`{name}` in its git directory is neither a file nor a directory"));
        }
    }
    if git_dir != common && git_dir.join("reftable").is_dir() {
        return Some("it is a linked worktree whose `HEAD` is in a reftable, which is not read yet".into());
    }
    for name in ["alternates", "http-alternates"] {
        if common.join("objects/info").join(name).symlink_metadata().is_ok() {
            return Some(format!("it borrows objects of another repository (objects/info/{name})"));
        }
    }
    for (name, most) in [("refs", REFS_MAX), ("reftable", REFS_MAX), ("objects", OBJECTS_MAX)] {
        let dir = common.join(name);
        if has_odd(dir.clone(), &mut { most }) {
            return Some(format!("below {} is what is neither a file nor a directory", super::shown(&dir)));
        }
    }
    None
}

/// Whether there is something that is neither a file nor a directory.
fn is_odd(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|meta| !meta.is_file() && !meta.is_dir())
}

/// Whether something below `dir` is a link, a fifo or the like, or can't be looked at.
fn has_odd(dir: PathBuf, left: &mut usize) -> bool {
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
