//! A branch as a commit on a ref of the user's repository. The commit is made in a repository of ours and pushed, so
//! that git itself guards theirs: their work tree, index, hooks and filters are never touched.

use std::collections::BTreeSet;
use std::fs::{File, Metadata};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use proto::ids::BranchId;
use proto::path::TreePath;
use rusqlite::params;
use rustix::fs::{AtFlags, Gid, OFlags, Uid};
use rustix::io::Errno;

use crate::content::Contents;
use crate::db::DbError;
use crate::diff::{DiffError, FastImport, Scratch, changes, in_tree};
use crate::entries;
use crate::export::{ExportError, ExportReport, GitRef, no_branch};
use crate::git::{Git, GitError, UPLOAD_PACK};
use crate::scan::Layers;
use crate::store::Store;
use crate::walk::open_beneath;

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
    let odd = to.name.starts_with('-') || to.name == "HEAD" || to.name.starts_with("refs/");
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
    let mut paths = differing(&base, &head).map_err(DiffError::from)?;
    let chain = layers.chain();
    paths.extend(changes(&conn, &chain)?.into_iter().map(|change| change.path));
    let contents = Contents { store, conn: &conn, branch: Some(branch), chain: &chain };
    let mut stream = FastImport::new(&scratch, &contents)?;
    let seconds = store.inner.options.clock.now_ms() / 1_000;
    let from = format!("from {head}\n");
    stream.commit_by(OURS, &format!("{author} {seconds} +0000"), to.message.as_bytes(), from.as_bytes())?;
    let mut puts = Vec::new();
    for path in &paths {
        match entries::lookup(&conn, &chain, path)?.filter(in_tree) {
            Some(entry) => puts.push((path, entry)),
            None => stream.put(path, None)?,
        }
    }
    let files = puts.len() as u64;
    for (path, entry) in puts {
        stream.put(path, Some(&entry))?;
    }
    stream.run(&scratch.git()).map_err(no_branch)?;
    let commit = scratch.git().text(&["rev-parse", OURS]).map_err(DiffError::from)?;
    theirs.push(&scratch, &target, to)?;
    Ok(ExportReport { files, commit: Some(commit) })
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
    Ok(list.split(|byte| *byte == 0).filter_map(|path| TreePath::new(path).ok()).collect())
}

/// The user's repository.
struct Theirs {
    /// As it was named, made absolute.
    repo: PathBuf,
    /// Where its objects and refs are.
    common: PathBuf,
}

impl Theirs {
    fn find(repo: &Path) -> Result<Self, ExportError> {
        let bad = |problem: String| ExportError::Repo { repo: repo.to_owned(), problem };
        let repo = repo.canonicalize().map_err(|error| bad(error.to_string()))?;
        let dot_git = repo.join(".git");
        let git_dir = match std::fs::read_to_string(&dot_git) {
            Ok(text) => repo.join(text.strip_prefix("gitdir: ").unwrap_or_default().trim_end()),
            Err(_) if dot_git.is_dir() => dot_git,
            Err(_) => repo.clone(),
        };
        let common = std::fs::read_to_string(git_dir.join("commondir"))
            .map_or_else(|_| git_dir.clone(), |text| git_dir.join(text.trim_end()));
        let common = common.canonicalize().map_err(|error| bad(error.to_string()))?;
        if !common.join("objects").is_dir() || !common.join("refs").is_dir() {
            return Err(bad("there is none".into()));
        }
        Ok(Self { repo, common })
    }

    /// Makes sure that it has the commit, by asking for it and nothing below it.
    fn has(&self, store: &Store, commit: &str) -> Result<(), ExportError> {
        let probe = Scratch::new(store, if commit.len() == 64 { "sha256" } else { "sha1" })?;
        let upload = UPLOAD_PACK.replace(
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
            Err(error) => Err(DiffError::from(error).into()),
        }
    }

    /// Whether it has a ref of that name.
    fn has_ref(&self, target: &str) -> Result<bool, ExportError> {
        let upload = format!("--upload-pack={UPLOAD_PACK}");
        let args: [&std::ffi::OsStr; 5] =
            ["ls-remote".as_ref(), upload.as_ref(), "--".as_ref(), self.repo.as_os_str(), target.as_ref()];
        let list = Git::new().text(&args).map_err(DiffError::from)?;
        Ok(list.lines().any(|line| line.split_once('\t').is_some_and(|(_, name)| name == target)))
    }

    fn push(&self, scratch: &Scratch, target: &str, to: &GitRef) -> Result<(), ExportError> {
        // Only if it is still not there.
        let lease = format!("--force-with-lease={target}:");
        let receive = format!("--receive-pack={RECEIVE_PACK}");
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
        let pushed = scratch.git().config("push.negotiate", "true").run(&args);
        self.give_back(target)?;
        match pushed {
            Ok(_) => Ok(()),
            Err(GitError::Failed { stderr, .. }) if stderr.contains("checked out") => {
                Err(ExportError::CheckedOut(to.name.clone()))
            }
            Err(GitError::Failed { stderr, .. }) if stderr.contains("stale info") => {
                Err(ExportError::Exists(to.name.clone()))
            }
            Err(error) => Err(DiffError::from(error).into()),
        }
    }

    /// What root made in somebody's repository becomes theirs, or they could not work on it.
    fn give_back(&self, target: &str) -> io::Result<()> {
        let owner = self.common.metadata()?;
        if !rustix::process::geteuid().is_root() || owner.uid() == 0 {
            return Ok(());
        }
        let common = File::open(&self.common)?;
        let mut paths: Vec<String> = Vec::new();
        for top in ["", "logs/"] {
            paths.extend(target.match_indices('/').map(|(at, _)| format!("{top}{}", &target[..at])));
            paths.push(format!("{top}{target}"));
        }
        paths.push("logs".into());
        for file in std::fs::read_dir(self.common.join("objects/pack"))?.flatten() {
            paths.extend(file.file_name().to_str().map(|name| format!("objects/pack/{name}")));
        }
        paths.iter().try_for_each(|path| give(&common, path, &owner))
    }
}

/// Gives what is root's to `owner`: through no link, since the directory is theirs and could lead to anything of
/// root's. What is gone or somebody else's stays.
fn give(common: &File, path: &str, owner: &Metadata) -> io::Result<()> {
    let Ok(path) = path.parse::<TreePath>() else { return Ok(()) };
    let fd = match open_beneath(common.as_fd(), &path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC) {
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV) => return Ok(()),
        opened => File::from(opened?),
    };
    let meta = fd.metadata()?;
    if meta.uid() != 0 || !(meta.is_dir() || meta.is_file() && meta.nlink() == 1) {
        return Ok(());
    }
    let (uid, gid) = (Uid::from_raw(owner.uid()), Gid::from_raw(owner.gid()));
    Ok(rustix::fs::chownat(&fd, "", Some(uid), Some(gid), AtFlags::EMPTY_PATH)?)
}

fn lacks(stderr: &str) -> bool {
    ["not our ref", "couldn't find remote ref", "Could not find object", "no such remote ref", "bad object"]
        .iter()
        .any(|said| stderr.contains(said))
}
