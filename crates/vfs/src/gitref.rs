//! A branch as a commit on a ref of the user's repository. The commit is made in a repository of ours and pushed, so
//! that git itself guards theirs: their work tree, index, hooks and filters are never touched.

use std::collections::BTreeSet;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use proto::ids::BranchId;
use proto::path::TreePath;
use rusqlite::params;

use crate::base::Repo;
use crate::content::Contents;
use crate::db::DbError;
use crate::diff::{DiffError, FastImport, Scratch, changes, in_tree, names_taken};
use crate::entries::{self, Entry};
use crate::export::{ExportError, ExportReport, GitRef, no_branch};
use crate::git::{Git, GitError, UPLOAD_PACK};
use crate::gitattr::{Special, Treatment};
use crate::gitname;
use crate::scan::Layers;
use crate::store::Store;

/// The same for the other direction: no hook, no command that their configuration names, no work tree.
const RECEIVE_PACK: &str = "git -c 'safe.directory=*' -c core.hooksPath=/dev/null -c core.fsmonitor=false \
     -c core.alternateRefsCommand=true -c receive.denyCurrentBranch=refuse -c receive.autogc=false \
     -c receive.unpackLimit=1 -c gc.auto=0 -c maintenance.auto=false receive-pack";
/// Where the commit stands in our repository.
const OURS: &str = "refs/heads/export";

pub(crate) fn export_ref(store: &Store, branch: &BranchId, to: &GitRef) -> Result<ExportReport, ExportError> {
    let conn = store.inner.db.reader()?;
    let layers = Layers::of(&conn, branch)?.ok_or_else(|| ExportError::NoBranch(branch.clone()))?;
    let head: Option<String> = conn
        .query_row("SELECT git_head FROM bases WHERE layer = ?1", params![layers.base().as_str()], |row| {
            row.get(0)
        })
        .map_err(DbError::from)?;
    let head = head.ok_or(ExportError::NoCommit)?;
    let target = format!("refs/heads/{}", to.name);
    let named = Git::new().ask(&["check-ref-format", &target]).map_err(DiffError::from)?;
    // As `git branch` has it; and the full name of a ref would become a part of one.
    let odd = to.name.starts_with('-') || ["HEAD", "@"].contains(&&*to.name) || to.name.starts_with("refs/");
    if named.is_none() || odd {
        return Err(ExportError::Name(to.name.clone(), "branch name"));
    }
    let author = author(to)?;
    let theirs = Theirs::find(&to.repo)?;
    let scratch = Scratch::new(store, if head.len() == 64 { "sha256" } else { "sha1" })?;
    theirs.has(store, &head)?;
    if theirs.has_ref(&target)? {
        return Err(ExportError::Exists(to.name.clone()));
    }
    // The history below the commit is read where the base has it.
    let base = store.inner.layout.base(layers.base());
    let objects = base.join(".git/objects");
    std::fs::write(
        scratch.dir().join("objects/info/alternates"),
        [objects.as_os_str().as_bytes(), b"\n"].concat(),
    )?;
    let frozen = differing(&base, &head).map_err(DiffError::from)?;
    let chain = layers.chain();
    let changes = changes(&conn, &chain)?;
    let refused = |path: &TreePath, entry: &Entry| gitname::refused(path, entry.kind);
    names_taken(changes.iter().filter(|it| it.after.as_ref().is_some_and(|after| refused(&it.path, after))))?;
    let changed: BTreeSet<_> = changes.into_iter().map(|change| change.path).collect();
    let base_git = base.join(".git");
    let special = Special::of(&Git::at(&base_git), &head)?;
    if let Some(submodule) = changed.iter().find_map(|path| special.submodule_of(path)) {
        return Err(ExportError::Submodule(submodule.clone()));
    }
    let contents = Contents::new(store, &conn, Some(branch), &chain);
    let (mut puts, mut gone) = (Vec::new(), Vec::new());
    for path in frozen.union(&changed).filter(|path| special.submodule_of(path).is_none()) {
        // Of the base, what their own git would not add stays out.
        let entry = entries::lookup(&conn, &chain, path)?.filter(in_tree);
        match entry.filter(|entry| !refused(path, entry)) {
            Some(entry) => puts.push((path, entry)),
            None => gone.push(path),
        }
    }
    let treatment =
        Treatment { scratch: &scratch, head: &head, base_git: &base_git, conn: &conn, contents: &contents };
    let treated = treatment.treat(&special, &puts)?;
    if let Some(path) = treated.filtered.iter().find(|path| changed.contains(*path) || !special.has(path)) {
        return Err(ExportError::Filter(path.clone()));
    }
    // What the branch left alone stays what the commit has: here lies what the filter made of that.
    puts.retain(|(path, _)| !treated.filtered.contains(*path));
    let mut stream = FastImport::new(&scratch, &contents)?;
    let seconds = store.inner.options.clock.now_ms() / 1_000;
    let from = format!("from {head}\n");
    stream.commit_by(OURS, &format!("{author} {seconds} +0000"), to.message.as_bytes(), from.as_bytes())?;
    for path in gone {
        stream.put(path, None)?;
    }
    let files = puts.len() as u64;
    for (path, entry) in puts {
        match treated.converted.get(path) {
            Some(object) => stream.put_object(path, &entry, object)?,
            None => stream.put(path, Some(&entry))?,
        }
    }
    stream.run(&scratch.git()).map_err(no_branch)?;
    let commit = scratch.git().text(&["rev-parse", OURS]).map_err(DiffError::from)?;
    let args =
        ["diff-tree", "-r", "--no-renames", "--ignore-submodules", "--name-only", "-z", &head, OURS, "--"];
    let made = names(&scratch.git().run(&args).map_err(DiffError::from)?);
    theirs.push(&scratch, &target, to)?;
    Ok(ExportReport { files, commit: Some(commit), uncommitted: made.difference(&changed).count() as u64 })
}

/// `Name <address>` without what would end a line of a commit.
fn author(to: &GitRef) -> Result<&str, ExportError> {
    let bad = || ExportError::Name(to.author.clone(), "author");
    let (name, rest) = to.author.split_once('<').ok_or_else(bad)?;
    let address = rest.strip_suffix('>').ok_or_else(bad)?;
    let plain = |text: &str| !text.contains(['<', '>', '\n', '\0']);
    if name.ends_with(' ') && !name.trim().is_empty() && plain(name) && plain(address) {
        Ok(&to.author)
    } else {
        Err(bad())
    }
}

/// Paths of the base that are not as its commit has them: uncommitted work that was frozen with it. This runs in the
/// base's own git directory, which we made.
fn differing(base: &Path, head: &str) -> Result<BTreeSet<TreePath>, GitError> {
    let git = Git::at(&base.join(".git")).work_tree(base);
    let diff = [
        "diff",
        "--no-ext-diff",
        "--no-textconv",
        "--no-renames",
        "--ignore-submodules",
        "--name-only",
        "-z",
        head,
        "--",
    ];
    let mut list = git.run(&diff)?;
    list.extend(git.run(&["ls-files", "-o", "-z"])?);
    Ok(names(&list))
}

/// The paths of a list of git's; its end is none.
fn names(list: &[u8]) -> BTreeSet<TreePath> {
    list.split(|byte| *byte == 0).filter_map(|path| TreePath::new(path).ok()).collect()
}

/// The user's repository.
struct Theirs {
    /// As it was named, made absolute.
    repo: PathBuf,
    /// What a git that works in it is started by: as its owner, if that is not who we are. Whoever owns it can make it lead
    /// anywhere, at any time.
    prefix: String,
}

impl Theirs {
    fn find(repo: &Path) -> Result<Self, ExportError> {
        let bad = |problem: String| ExportError::Repo { repo: repo.to_owned(), problem };
        let repo = repo.canonicalize().map_err(|error| bad(error.to_string()))?;
        let found = Repo::at(&repo).ok_or_else(|| bad("there is none".into()))?;
        if let Some(refused) = found.refused.clone().or_else(|| found.unsafe_to_write()) {
            return Err(bad(refused));
        }
        let prefix = match owner(&repo, &found.common).map_err(bad)? {
            Some((uid, gid)) => {
                format!("setpriv --reuid={uid} --regid={gid} --clear-groups --no-new-privs -- ")
            }
            None => String::new(),
        };
        Ok(Self { repo, prefix })
    }

    /// Makes sure that it has the commit, by asking for it and nothing below it.
    fn has(&self, store: &Store, commit: &str) -> Result<(), ExportError> {
        let probe = Scratch::new(store, if commit.len() == 64 { "sha256" } else { "sha1" })?;
        let upload = format!("{}{UPLOAD_PACK}", self.prefix).replace(
            " upload-pack",
            " -c uploadpack.allowFilter=true -c uploadpack.allowAnySHA1InWant=true upload-pack",
        );
        // A named remote that promises the rest, or git would miss the commit's tree.
        let git = probe
            .git()
            .config("remote.theirs.url", &self.repo)
            .config("remote.theirs.uploadpack", &upload)
            .config("remote.theirs.promisor", "true")
            .config("remote.theirs.partialclonefilter", "tree:0");
        let args = ["fetch", "--quiet", "--depth=1", "--filter=tree:0", "--no-tags", "theirs", commit];
        match git.run(&args) {
            Ok(_) => Ok(()),
            Err(GitError::Failed { stderr, .. }) if lacks(&stderr) => {
                Err(ExportError::NoParent { repo: self.repo.clone(), commit: commit.to_owned() })
            }
            Err(error) => Err(self.failed(error)),
        }
    }

    /// Whether it has a ref of that name.
    fn has_ref(&self, target: &str) -> Result<bool, ExportError> {
        let upload = format!("--upload-pack={}{UPLOAD_PACK}", self.prefix);
        let args: [&std::ffi::OsStr; 5] =
            ["ls-remote".as_ref(), upload.as_ref(), "--".as_ref(), self.repo.as_os_str(), target.as_ref()];
        let list = Git::new().text(&args).map_err(|error| self.failed(error))?;
        Ok(list.lines().any(|line| line.split_once('\t').is_some_and(|(_, name)| name == target)))
    }

    /// What git said of their repository.
    fn failed(&self, error: GitError) -> ExportError {
        if let GitError::Failed { stderr, .. } = &error
            && !stderr.contains("No space left")
        {
            return ExportError::Repo { repo: self.repo.clone(), problem: stderr.clone() };
        }
        DiffError::from(error).into()
    }

    fn push(&self, scratch: &Scratch, target: &str, to: &GitRef) -> Result<(), ExportError> {
        // Only if it is still not there.
        let lease = format!("--force-with-lease={target}:");
        let receive = format!("--receive-pack={}{RECEIVE_PACK}", self.prefix);
        let spec = format!("{OURS}:{target}");
        let args: [&std::ffi::OsStr; 8] = [
            "push".as_ref(),
            "--quiet".as_ref(),
            "--no-verify".as_ref(),
            lease.as_ref(),
            receive.as_ref(),
            "--".as_ref(),
            self.repo.as_os_str(),
            spec.as_ref(),
        ];
        // For the line in the ref's log.
        let (name, address) = to.author.split_once(" <").unwrap_or((&to.author, ""));
        let git = scratch.git().config("push.negotiate", "true");
        let git =
            git.env("GIT_COMMITTER_NAME", name).env("GIT_COMMITTER_EMAIL", address.trim_end_matches('>'));
        match git.run(&args) {
            Ok(_) => Ok(()),
            Err(GitError::Failed { stderr, .. }) if stderr.contains("checked out") => {
                Err(ExportError::CheckedOut(to.name.clone()))
            }
            Err(GitError::Failed { stderr, .. }) if stderr.contains("stale info") => {
                Err(ExportError::Exists(to.name.clone()))
            }
            Err(error) => Err(self.failed(error)),
        }
    }
}

/// As whom git is to work in a repository; `None`: as who we are. Only root can be another.
fn owner(repo: &Path, common: &Path) -> Result<Option<(u32, u32)>, String> {
    if !rustix::process::geteuid().is_root() {
        return Ok(None);
    }
    let common_meta = common.symlink_metadata().map_err(|error| error.to_string())?;
    if common_meta.uid() != 0 {
        return Ok(Some((common_meta.uid(), common_meta.gid())));
    }
    // Who owns a directory above could put another in its place.
    for dir in repo.ancestors().chain(common.ancestors()) {
        let meta = dir.symlink_metadata().map_err(|error| error.to_string())?;
        let shared = meta.mode() & 0o022 != 0 && meta.mode() & 0o1000 == 0;
        if meta.uid() != 0 || shared {
            let dir = dir.display();
            return Err(format!("it is root's, and {dir}, in which it lies, can be changed by others"));
        }
    }
    Ok(None)
}

fn lacks(stderr: &str) -> bool {
    ["not our ref", "couldn't find remote ref", "Could not find object", "no such remote ref", "bad object"]
        .iter()
        .any(|said| stderr.contains(said))
}
