//! Freezes a directory as it is now, uncommitted work included.

use std::collections::HashMap;
use std::ffi::OsString;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use proto::api::BaseInfo;
use proto::path::TreePath;
use proto::units::counted;
use rusqlite::{OptionalExtension, params};
use rustix::fs::{Mode, OFlags};

use super::copy::{Outcome, Survey};
use super::dotgit::{Head, Mirror, Origin};
use super::git::{AGE_S, some};
use super::list::{List, everything, git_for, not_ignored, scratch_repo, take_index};
use super::repo::{Repo, read_small};
use super::{About, Cancel, Draft, FreezeError, copy, seal, shown, unless_cancelled};
use crate::db::DbError;
use crate::git::{Git, GitError};
use crate::store::Store;

/// A directory.
#[derive(Clone, Debug)]
pub struct DirSource {
    /// Where it is. One that lies in a git work tree, and holds files that are tracked there, stands for the whole
    /// work tree.
    pub path: PathBuf,
    /// Whether files that git ignores come along.
    pub include_ignored: bool,
}

/// The history that a base gets.
struct History<'a> {
    mirror: Mirror<'a>,
    commit: Option<String>,
    head: Head,
}

impl Store {
    /// Freezes a directory. In a git work tree: what is tracked, and what is neither tracked nor ignored, with a `.git`
    /// in which `git status` says what it says in the original. Elsewhere: everything.
    ///
    /// The files are copied one by one, not at one instant: each is whole, and of one moment between start and end.
    pub fn freeze_dir(&self, source: &DirSource, progress: &dyn Fn(&str)) -> Result<BaseInfo, FreezeError> {
        self.freeze_dir_until(source, progress, &Cancel::default())
    }

    /// [`Store::freeze_dir`], which `cancel` stops.
    pub fn freeze_dir_until(
        &self,
        source: &DirSource,
        progress: &dyn Fn(&str),
        cancel: &Cancel,
    ) -> Result<BaseInfo, FreezeError> {
        unless_cancelled(self.freeze_files_of(source, progress, cancel), cancel)
    }

    fn freeze_files_of(
        &self,
        source: &DirSource,
        progress: &dyn Fn(&str),
        cancel: &Cancel,
    ) -> Result<BaseInfo, FreezeError> {
        let mut warnings = Vec::new();
        let draft = Draft::new(self, cancel)?;
        let (top, repo) = choose(&source.path, &draft, &mut warnings)?;
        let state = self.inner.layout.root();
        if top.starts_with(state) {
            let reason = "it lies in the state directory".into();
            return Err(FreezeError::Unusable {
                path: shown(&top),
                reason,
                hint: "name a directory of yours",
            });
        }
        // A state directory within is not part of the work.
        let own = state
            .strip_prefix(&top)
            .ok()
            .and_then(|own| TreePath::new(own.as_os_str().as_encoded_bytes()).ok());
        let root = open_root(&top)?;
        progress(&format!("reading {}", shown(&top)));
        let history = match &repo {
            Some(repo) => self.history(repo, &draft, &mut warnings, progress)?,
            None => None,
        };
        let list =
            list(&root, &top, repo.as_ref(), history.as_ref(), source.include_ignored, own.as_ref(), &draft)?;
        if !list.nested.is_empty() {
            warnings.push(format!(
                "repositories within are plain files, without their history: {}",
                some(&list.nested)
            ));
        }
        let identity = identity(history.as_ref(), &draft)?;
        let now_s = draft.now_s()?;
        let survey = copy::survey(root.as_fd(), &list.paths, cancel)?;
        let key = survey_key(&top, source.include_ignored);
        if let Some((files, of_files)) = self.known_survey(&key, &survey)?
            && let Some(base) = self.lease(&content(&identity, &files))?
        {
            warnings.extend(of_files);
            return Ok(BaseInfo { warnings, ..base });
        }
        progress(&format!("copying {}", counted(list.paths.len() as u64, "file")));
        let paths = list.paths.into_iter().collect();
        let copied = copy::copy(root.as_fd(), paths, &draft.tree(), now_s - AGE_S, cancel)?;
        let files = files_digest(&copied);
        let of_files = warnings_of(&copied);
        if survey.newest_s < now_s - AGE_S {
            self.remember_survey(&key, &survey, &files, &of_files)?;
        }
        warnings.extend(of_files);
        let content = content(&identity, &files);
        if let Some(base) = self.lease(&content)? {
            return Ok(BaseInfo { warnings, ..base });
        }
        if history.is_some() {
            refresh_index(&draft)?;
        }
        let about = About {
            content,
            source: shown(&top),
            git_head: history.as_ref().and_then(|history| history.commit.clone()),
            mirror: history.as_ref().map(|history| history.mirror.id.clone()),
            warnings,
        };
        let hashes: HashMap<TreePath, blake3::Hash> =
            copied.leaves.iter().map(|(path, copied)| (path.clone(), copied.hash)).collect();
        let how = seal::How { hashes: Some(&hashes), dirs: Some(&copied.dirs), mtime_s: None };
        self.keep(&draft, about, &how, progress)
    }

    /// The digest of the files that looked like this when they were last copied, and what was warned of then.
    fn known_survey(
        &self,
        key: &str,
        survey: &Survey,
    ) -> Result<Option<(blake3::Hash, Vec<String>)>, DbError> {
        let conn = self.inner.db.read();
        let mut statement = conn.prepare_cached("SELECT value FROM meta WHERE key = ?1")?;
        let value: Option<Vec<u8>> = statement.query_row([key], |row| row.get(0)).optional()?;
        let known = |value: Vec<u8>| {
            let rest = value.strip_prefix(survey.digest.as_bytes())?;
            let (files, warnings) = rest.split_at_checked(blake3::OUT_LEN)?;
            Some((blake3::Hash::from_slice(files).ok()?, serde_json::from_slice(warnings).ok()?))
        };
        Ok(value.and_then(known))
    }

    fn remember_survey(
        &self,
        key: &str,
        survey: &Survey,
        files: &blake3::Hash,
        warnings: &[String],
    ) -> Result<(), DbError> {
        let warnings = serde_json::to_vec(warnings).map_err(|error| DbError::Damaged(error.to_string()))?;
        let value = [survey.digest.as_bytes().as_slice(), files.as_bytes(), &warnings].concat();
        self.inner.db.write(|tx| {
            tx.execute("INSERT OR REPLACE INTO meta (key, value) VALUES (?1, ?2)", params![key, value])?;
            Ok(())
        })
    }

    /// Gives the draft a `.git` with the repository's history and index. A repository whose history can't be read
    /// leaves a warning: its files can be frozen all the same.
    fn history<'a>(
        &self,
        repo: &'a Repo,
        draft: &Draft,
        warnings: &mut Vec<String>,
        progress: &dyn Fn(&str),
    ) -> Result<Option<History<'a>>, FreezeError> {
        if let Some(reason) = &repo.refused {
            warnings.push(format!("frozen without git history: {reason}"));
            return Ok(None);
        }
        let mirror = Mirror::lock(&self.inner.layout, Origin::Local(repo), &draft.cancel)?;
        let why = match self.fetch_history(repo, mirror, draft, progress) {
            Ok(history) => return Ok(Some(history)),
            Err(FreezeError::Git(GitError::Failed { command, stderr, .. }))
                if !stderr.contains("No space") =>
            {
                format!("git {command} said: {stderr}")
            }
            Err(FreezeError::Read { path, source }) => format!("can't read {path}: {source}"),
            Err(error) => return Err(error),
        };
        super::remove_tree(&draft.git_dir()).or_else(ignore_missing).map_err(FreezeError::Store)?;
        warnings.push(format!("frozen without git history: {why}"));
        Ok(None)
    }

    fn fetch_history<'a>(
        &self,
        repo: &'a Repo,
        mut mirror: Mirror<'a>,
        draft: &Draft,
        progress: &dyn Fn(&str),
    ) -> Result<History<'a>, FreezeError> {
        let remote = mirror.look()?;
        let commit = remote.head_commit.clone();
        let head = match remote.head.clone().filter(|_| commit.is_some()) {
            Some(head) => head,
            None => unborn_head(&repo.git_dir),
        };
        mirror.fetch(&remote, progress)?;
        mirror.write_dot_git(&draft.git_dir(), &head, repo.settings())?;
        take_index(repo, &draft.git_dir())?;
        let merge = draft.git_dir().join("MERGE_HEAD");
        for other in read_small(&merge).unwrap_or_default().split(|b| *b == b'\n').filter(|id| !id.is_empty())
        {
            let other = String::from_utf8_lossy(other);
            if mirror.resolve(&other)?.is_none() {
                mirror.fetch_one(&other, progress)?;
                mirror.write_objects(&draft.git_dir())?;
            }
        }
        bring_staged(repo, &draft.git_dir(), commit.as_deref())?;
        Ok(History { mirror, commit, head })
    }
}

/// The key in `meta` of what a directory looked like.
fn survey_key(top: &Path, include_ignored: bool) -> String {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&[u8::from(include_ignored)]);
    hasher.update(top.as_os_str().as_encoded_bytes());
    format!("{}{}", super::gc::SURVEY_KEY, hasher.finalize().to_hex())
}

/// The digest of all that decides what the base is.
fn content(identity: &blake3::Hash, files: &blake3::Hash) -> String {
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"dir\0").update(identity.as_bytes()).update(files.as_bytes());
    hasher.finalize().to_hex().to_string()
}

/// A digest of parts that can't run into each other.
#[derive(Default)]
struct Parts(blake3::Hasher);

impl Parts {
    fn add(&mut self, bytes: &[u8]) {
        self.0.update(&(bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
    }
}

/// What decides the base beside its files: history, and what is staged.
fn identity(history: Option<&History<'_>>, draft: &Draft) -> Result<blake3::Hash, FreezeError> {
    let mut parts = Parts::default();
    if let Some(history) = history {
        parts.add(history.mirror.id.as_bytes());
        parts.add(history.head.text().as_bytes());
        parts.add(history.commit.as_deref().unwrap_or_default().as_bytes());
        parts.add(&Git::at(&draft.git_dir()).run(&["ls-files", "-z", "--stage", "-t"])?);
        parts.add(&read_small(&draft.git_dir().join("MERGE_HEAD")).unwrap_or_default());
    }
    Ok(parts.0.finalize())
}

fn files_digest(copied: &Outcome) -> blake3::Hash {
    let mut parts = Parts::default();
    for (path, copied) in &copied.leaves {
        parts.add(path.as_bytes());
        parts.add(&copied.mode.to_le_bytes());
        parts.add(copied.hash.as_bytes());
    }
    let mut dirs: Vec<_> = copied.dirs.iter().collect();
    dirs.sort_unstable_by_key(|(path, _)| *path);
    for (path, look) in dirs {
        parts.add(path.as_bytes());
        parts.add(&look.mode.to_le_bytes());
    }
    parts.0.finalize()
}

fn ignore_missing(error: std::io::Error) -> std::io::Result<()> {
    if error.kind() == std::io::ErrorKind::NotFound { Ok(()) } else { Err(error) }
}

/// What is frozen for a path: the directory, or the work tree that it is a part of.
fn choose(
    path: &Path,
    draft: &Draft,
    warnings: &mut Vec<String>,
) -> Result<(PathBuf, Option<Repo>), FreezeError> {
    let not_found = || FreezeError::NotFound { what: "directory", path: shown(path) };
    let dir = match path.canonicalize() {
        Ok(dir) => dir,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Err(not_found()),
        Err(source) => return Err(FreezeError::Read { path: shown(path), source }),
    };
    let unusable =
        |reason: &str, hint| FreezeError::Unusable { path: shown(path), reason: reason.into(), hint };
    if !dir.is_dir() {
        return Err(unusable("it is not a directory", "name the directory that holds it"));
    }
    let Some(repo) = Repo::holding(&dir) else { return Ok((dir, None)) };
    let Some(top) = repo.top.clone() else {
        return Err(unusable("it is a bare git repository and holds no files", "name a ref of it"));
    };
    if dir.starts_with(&repo.git_dir) {
        return Err(unusable("it lies in a git directory", "name the work tree"));
    }
    if top == dir {
        return Ok((top, Some(repo)));
    }
    if repo.refused.is_some() || !tracks(&repo, &top, &dir, draft)? {
        return Ok((dir, None));
    }
    warnings.push(format!(
        "{} is a part of the repository {}: all of it was taken",
        shown(&dir),
        shown(&top)
    ));
    Ok((top, Some(repo)))
}

/// Whether files below `dir` are tracked: a directory that only happens to lie below a repository (a home directory
/// that is one, an ignored build directory) is not a part of it.
fn tracks(repo: &Repo, top: &Path, dir: &Path, draft: &Draft) -> Result<bool, FreezeError> {
    let git_dir = scratch_repo(&draft.dir.join("above"), repo)?;
    let below = dir.strip_prefix(top).unwrap_or(dir).as_os_str();
    let found = git_for(&git_dir, top).env("GIT_LITERAL_PATHSPECS", "1").run(&[
        "ls-files".as_ref(),
        "-z".as_ref(),
        "--".as_ref(),
        below,
    ])?;
    Ok(!found.is_empty())
}

fn list(
    root: &OwnedFd,
    top: &Path,
    repo: Option<&Repo>,
    history: Option<&History<'_>>,
    include_ignored: bool,
    own: Option<&TreePath>,
    draft: &Draft,
) -> Result<List, FreezeError> {
    let Some(repo) = repo.filter(|_| !include_ignored) else {
        return everything(root.as_fd(), own, &draft.cancel);
    };
    let git_dir = match history {
        Some(_) => draft.git_dir(),
        None => scratch_repo(&draft.dir.join("top"), repo)?,
    };
    let mut list = not_ignored(root.as_fd(), top, &git_dir, draft)?;
    if let Some(own) = own {
        list.paths.retain(|path| !path.starts_with(own));
    }
    Ok(list)
}

fn open_root(top: &Path) -> Result<OwnedFd, FreezeError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::open(top, flags, Mode::empty())
        .map_err(|error| FreezeError::Read { path: shown(top), source: error.into() })
}

/// The branch that a repository without commits is on.
fn unborn_head(git_dir: &Path) -> Head {
    let text = read_small(&git_dir.join("HEAD")).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    match text.trim().strip_prefix("ref: ") {
        Some(name) if name.starts_with("refs/heads/") && !name.contains("/.") => {
            Head::Branch(name.to_owned())
        }
        _ => Head::Branch("refs/heads/main".to_owned()),
    }
}

/// Brings content that is staged and in no commit: it is in the user's repository only. Our own git directory borrows
/// from its objects for this one command, so its configuration is not read.
fn bring_staged(repo: &Repo, git_dir: &Path, commit: Option<&str>) -> Result<(), FreezeError> {
    let git = Git::at(git_dir);
    let mut wanted = Vec::new();
    let staged = git.run(&["ls-files", "-z", "--stage"])?;
    for line in staged.split(|b| *b == 0) {
        let mut words = line.splitn(3, |b| *b == b' ');
        let (mode, oid, rest) = (words.next(), words.next(), words.next());
        let in_conflict = rest.is_some_and(|rest| !rest.starts_with(b"0\t"));
        if let (Some(mode), Some(oid)) = (mode, oid)
            && mode != b"160000"
            && (commit.is_none() || in_conflict)
        {
            wanted.push(oid.to_vec());
        }
    }
    if let Some(commit) = commit {
        let changed =
            git.run(&["diff-index", "--cached", "--raw", "--no-renames", "--no-abbrev", "-z", commit])?;
        for line in changed.split(|b| *b == 0).filter(|line| line.starts_with(b":")) {
            let words: Vec<&[u8]> = line.split(|b| *b == b' ').collect();
            if let [_, mode, _, oid, _] = words[..]
                && mode != b"160000"
                && oid.iter().any(|b| *b != b'0')
            {
                wanted.push(oid.to_vec());
            }
        }
    }
    if wanted.is_empty() {
        return Ok(());
    }
    let found = git.run_with(&["cat-file", "--batch-check"], &lines(&wanted), &|_| ())?;
    let missing: Vec<Vec<u8>> = found
        .split(|b| *b == b'\n')
        .filter_map(|line| line.strip_suffix(b" missing"))
        .map(<[u8]>::to_vec)
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    let borrowing = git.env("GIT_ALTERNATE_OBJECT_DIRECTORIES", one_of_a_list(&repo.common.join("objects")));
    let pack = git_dir.join("objects/pack/pack");
    let args = ["pack-objects".as_ref(), "-q".as_ref(), pack.as_os_str()];
    borrowing.run_with(&args, &lines(&missing), &|_| ())?;
    Ok(())
}

/// The path as git takes it in a list that `:` separates.
fn one_of_a_list(path: &Path) -> OsString {
    let mut quoted = b"\"".to_vec();
    for byte in path.as_os_str().as_bytes() {
        match byte {
            b'"' | b'\\' => quoted.extend([b'\\', *byte]),
            b'\n' => quoted.extend(b"\\n"),
            _ => quoted.push(*byte),
        }
    }
    quoted.push(b'"');
    OsString::from_vec(quoted)
}

fn lines(ids: &[Vec<u8>]) -> Vec<u8> {
    ids.iter().flat_map(|id| id.iter().copied().chain([b'\n'])).collect()
}

/// Writes the index anew, in the plain format and in agreement with the copied files. Files whose modification time
/// differs from the index are read by git here, once, and not in every branch.
fn refresh_index(draft: &Draft) -> Result<(), FreezeError> {
    let git_dir = draft.git_dir();
    if !git_dir.join("index").exists() {
        return Ok(());
    }
    let git = draft.git();
    // Exit status 1 says that files differ from the index, which is the user's uncommitted work.
    git.ask(&["update-index", "-q", "--no-split-index", "--force-write-index", "--refresh"])?;
    for entry in std::fs::read_dir(&git_dir).map_err(FreezeError::Store)?.flatten() {
        if entry.file_name().as_encoded_bytes().starts_with(b"sharedindex.") {
            std::fs::remove_file(entry.path()).map_err(FreezeError::Store)?;
        }
    }
    Ok(())
}

/// Warnings of the files; a base may be found again by a freeze that has others.
fn warnings_of(copied: &Outcome) -> Vec<String> {
    let mut warnings = Vec::new();
    if !copied.special.is_empty() {
        let names: Vec<String> = copied.special.iter().map(ToString::to_string).collect();
        warnings.push(format!("fifos, sockets and devices were left out: {}", some(&names)));
    }
    if copied.lfs_pointers > 0 {
        let pointers =
            if copied.lfs_pointers == 1 { "file is a Git LFS pointer" } else { "files are Git LFS pointers" };
        warnings.push(format!("{} {pointers}, not the content", copied.lfs_pointers));
    }
    warnings
}
