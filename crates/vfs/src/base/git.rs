//! Freezes a commit of a git repository, local or remote.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use proto::api::BaseInfo;
use proto::path::shown;

use super::dotgit::{Head, Mirror, Origin};
use super::repo::Repo;
use super::{About, Cancel, Draft, FreezeError, index, seal, unless_cancelled};
use crate::git::Git;
use crate::store::Store;

/// Seconds that a base's files are older than its making, at least: a file that is changed in a branch in the second
/// after has another modification time then, which is how git finds it.
pub(super) const AGE_S: i64 = 2;
/// Bytes of a ref that are shown.
const REV_BYTES_MAX: usize = 256;
/// Names that a warning lists.
const NAMES_MAX: usize = 10;

/// A commit of a git repository.
#[derive(Clone, Debug)]
pub struct GitSource {
    /// Absolute path, or URL (https, http, ssh, git, file, or `host:path`).
    pub repo: OsString,
    /// Any ref or commit id that git can resolve there.
    pub rev: String,
}

/// Where a repository is.
enum Place {
    Local(Repo),
    Url(OsString),
}

impl Store {
    /// Freezes a commit. The source's history is kept in a mirror of ours, so the next commit of the same source
    /// costs only what is new.
    ///
    /// A base is found again by its commit, the mirror, and whether `HEAD` is on a branch: then its `.git` has the
    /// other branches as they were when it was made.
    pub fn freeze_git(&self, source: &GitSource, progress: &dyn Fn(&str)) -> Result<BaseInfo, FreezeError> {
        self.freeze_git_until(source, progress, &Cancel::default())
    }

    /// [`Store::freeze_git`], which `cancel` stops.
    pub fn freeze_git_until(
        &self,
        source: &GitSource,
        progress: &dyn Fn(&str),
        cancel: &Cancel,
    ) -> Result<BaseInfo, FreezeError> {
        unless_cancelled(self.freeze_commit(source, progress, cancel), cancel)
    }

    fn freeze_commit(
        &self,
        source: &GitSource,
        progress: &dyn Fn(&str),
        cancel: &Cancel,
    ) -> Result<BaseInfo, FreezeError> {
        let place = place(&source.repo)?;
        let origin = match &place {
            Place::Local(repo) => Origin::Local(repo),
            Place::Url(url) => Origin::Url(url),
        };
        let no_rev = || FreezeError::NoRev { repo: repo_shown(&source.repo), rev: rev_shown(&source.rev) };
        if source.rev.is_empty() || source.rev.contains(['\0', '\n']) {
            return Err(no_rev());
        }
        let mut mirror = Mirror::lock(&self.inner.layout, origin, cancel)?;
        // A full commit id always means the same: nothing to ask the source for.
        if is_full_id(&source.rev) {
            let content = content(&source.rev, &Head::Detached(source.rev.clone()), &mirror.id);
            if let Some(base) = self.lease(&content)? {
                return Ok(base);
            }
        }
        progress(&format!("fetching {}", repo_shown(&source.repo)));
        let remote = mirror.look()?;
        mirror.fetch(&remote, progress)?;
        let (commit, head) = resolve(&mut mirror, &source.rev, progress)?.ok_or_else(no_rev)?;
        let content = content(&commit, &head, &mirror.id);
        if let Some(base) = self.lease(&content)? {
            return Ok(base);
        }
        progress(&format!("checking out {commit}"));
        let draft = Draft::new(self, cancel)?;
        let settings = format_setting(remote.format);
        mirror.write_dot_git(&draft.git_dir(), &head, &settings)?;
        let mtime_s = check_out(&draft, &commit)?;
        let warnings = submodules(&draft)?;
        let about = About {
            content,
            source: format!("{} @ {}", repo_shown(&source.repo), rev_shown(&source.rev)),
            git_head: Some(commit),
            mirror: Some(mirror.id.clone()),
            warnings,
        };
        let how = seal::How { mtime_s: Some(mtime_s), ..seal::How::default() };
        self.keep(&draft, about, &how, progress)
    }
}

fn content(commit: &str, head: &Head, mirror: &str) -> String {
    let mut hasher = blake3::Hasher::new();
    for part in ["git", commit, &head.text(), mirror] {
        hasher.update(part.as_bytes());
        hasher.update(&[0]);
    }
    hasher.finalize().to_hex().to_string()
}

pub(super) fn format_setting(format: &str) -> Vec<(String, String)> {
    let of = |format: &str| vec![("extensions.objectformat".to_owned(), format.to_owned())];
    if format == "sha1" { Vec::new() } else { of(format) }
}

/// Tells a path from an URL, and refuses what is neither.
fn place(repo: &OsStr) -> Result<Place, FreezeError> {
    let unusable = |reason: &str, hint| {
        Err(FreezeError::Unusable { path: repo_shown(repo), reason: reason.to_owned(), hint })
    };
    let text = repo.to_string_lossy();
    let (scheme, path) = match text.split_once("://") {
        Some(("file", _)) => (None, OsStr::from_bytes(&repo.as_bytes()["file://".len()..])),
        Some((scheme, _)) => (Some(scheme), repo),
        None => (None, repo),
    };
    match scheme {
        Some("https" | "http" | "ssh" | "git") => return Ok(Place::Url(repo.to_owned())),
        Some(_) => return unusable("its address has an unknown scheme", "use https, ssh, git or a path"),
        None => {}
    }
    if !path.as_bytes().starts_with(b"/") {
        let scp_like = !text.contains("://")
            && text.split_once(':').is_some_and(|(host, path)| {
                !host.is_empty() && !host.contains('/') && !host.starts_with('-') && !path.starts_with(':')
            });
        if scp_like {
            return Ok(Place::Url(repo.to_owned()));
        }
        return unusable("it is neither an absolute path nor a URL", "give an absolute path or a URL");
    }
    let not_found = || FreezeError::NotFound { what: "repository", path: repo_shown(repo) };
    let dir = PathBuf::from(path).canonicalize().map_err(|_| not_found())?;
    let Some(found) = Repo::holding(&dir) else {
        return unusable("it is not a git repository", "freeze the directory as it is, without a ref");
    };
    match &found.refused {
        Some(reason) => unusable(reason, OUTSIDE_HINT),
        None => Ok(Place::Local(found)),
    }
}

pub(super) const OUTSIDE_HINT: &str =
    "clone it without links to other repositories (git clone --dissociate), and use the clone";

/// The repository for people and the database: without a password or token.
fn repo_shown(repo: &OsStr) -> String {
    proto::repo::shown(repo.as_bytes())
}

/// The ref for people, as long as refs are.
fn rev_shown(rev: &str) -> String {
    shown(&rev.as_bytes()[..rev.floor_char_boundary(REV_BYTES_MAX)])
}

fn is_full_id(rev: &str) -> bool {
    matches!(rev.len(), 40 | 64) && rev.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

fn resolve(
    mirror: &mut Mirror<'_>,
    rev: &str,
    progress: &dyn Fn(&str),
) -> Result<Option<(String, Head)>, FreezeError> {
    if let Some(found) = mirror.resolve(rev)? {
        return Ok(Some(found));
    }
    // What a clone calls `origin/x` is `x` there.
    if let Some(branch) = rev.strip_prefix("origin/")
        && let Some((commit, _)) = mirror.resolve(&format!("refs/heads/{branch}"))?
    {
        return Ok(Some((commit.clone(), Head::Detached(commit))));
    }
    let may_be_fetched = is_full_id(rev) || rev.starts_with("refs/");
    if may_be_fetched && mirror.fetch_one(rev, progress).is_ok() {
        let name = if is_full_id(rev) { rev } else { "refs/tendon/one" };
        return Ok(mirror.resolve(name)?.map(|(commit, _)| (commit.clone(), Head::Detached(commit))));
    }
    Ok(None)
}

/// Fills the draft's tree from its `.git`, and returns the modification time that its files are to have: the commit's.
///
/// Only our own configuration is in force, which defines no filter: an LFS pointer stays a pointer.
fn check_out(draft: &Draft, commit: &str) -> Result<i64, FreezeError> {
    let git = draft.git();
    let time = git.text(&["log", "-1", "--format=%ct", "--end-of-options", commit])?;
    let newest = draft.now_s()? - AGE_S;
    let mtime = time.parse().unwrap_or(newest).clamp(1, newest.min(i64::from(u32::MAX)));
    git.run(&["read-tree", commit])?;
    git.run(&["checkout-index", "--all", "--force", "--index", "--quiet"])?;
    let index = draft.git_dir().join("index");
    let mut bytes = std::fs::read(&index).map_err(FreezeError::Store)?;
    let seconds = u32::try_from(mtime).unwrap_or(u32::MAX);
    if index::set_mtimes(&mut bytes, seconds, commit.len() / 2).is_some() {
        std::fs::write(&index, bytes).map_err(FreezeError::Store)?;
        git.run(&["update-index", "--force-write-index"])?;
    }
    Ok(mtime)
}

/// A warning that names the submodules, which stay empty.
fn submodules(draft: &Draft) -> Result<Vec<String>, FreezeError> {
    let staged = Git::at(&draft.git_dir()).run(&["ls-files", "-z", "--stage"])?;
    let names: Vec<String> = staged
        .split(|b| *b == 0)
        .filter(|line| line.starts_with(b"160000 "))
        .filter_map(|line| line.splitn(2, |b| *b == b'\t').nth(1))
        .map(shown)
        .collect();
    if names.is_empty() {
        return Ok(Vec::new());
    }
    Ok(vec![format!("submodules are left empty: {}", some(&names))])
}

/// The first names of a list, for a warning.
pub(crate) fn some(names: &[String]) -> String {
    let more = names.len().saturating_sub(NAMES_MAX);
    let first = names[..names.len() - more].join(", ");
    if more == 0 { first } else { format!("{first} and {more} more") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_known_addresses_are_repositories() {
        for good in ["https://h/x", "ssh://h/x", "git@h:x.git"] {
            assert!(matches!(place(OsStr::new(good)), Ok(Place::Url(_))), "{good}");
        }
        for bad in
            ["ext::sh -c id", "-oProxyCommand=x:y", "x", "foo://x", "file://x", "file://h:x", "../x", ""]
        {
            assert!(matches!(place(OsStr::new(bad)), Err(FreezeError::Unusable { .. })), "{bad}");
        }
    }
}
