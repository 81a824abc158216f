//! Mirrors of source repositories, and the `.git` that a base gets from one.

use std::ffi::OsStr;
use std::fs::{File, Permissions, TryLockError};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::repo::{Repo, read_small};
use super::view::View;
use super::{Cancel, FreezeError, gc};
use crate::git::{Git, UPLOAD_PACK};
use crate::layout::Layout;
use crate::replace::replace;

/// Packs of a mirror above which they are made one.
const PACKS_MAX: usize = 24;
/// How often a mirror that somebody else uses is asked for.
const LOCK_EVERY: Duration = Duration::from_millis(20);

/// What a base's repository is configured like. `checkStat=minimal` and `trustctime=false` leave size and modification
/// time to compare: all that a copy of a file keeps, so git doesn't read the files again to find them unchanged.
const CONFIG: &str = "[core]
\trepositoryformatversion = 1
\tbare = false
\tlogallrefupdates = true
\tcheckStat = minimal
\ttrustctime = false
[gc]
\tauto = 0
[user]
\tname = tendon agent
\temail = agent@localhost
";

/// Where `HEAD` stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Head {
    /// On a branch, by its full ref name, which may have no commit yet.
    Branch(String),
    /// On a commit.
    Detached(String),
}

impl Head {
    pub(super) fn text(&self) -> String {
        match self {
            Head::Branch(name) => format!("ref: {name}\n"),
            Head::Detached(commit) => format!("{commit}\n"),
        }
    }
}

/// What a source says of itself before anything is fetched.
pub(super) struct Remote {
    pub(super) head: Option<Head>,
    pub(super) head_commit: Option<String>,
    pub(super) has_refs: bool,
    /// `sha1` or `sha256`.
    pub(super) format: &'static str,
}

/// Where a mirror's history comes from.
#[derive(Clone, Copy)]
pub(super) enum Origin<'a> {
    Local(&'a Repo),
    Url(&'a OsStr),
}

/// Our bare copy of a source's history, locked as long as this lives.
pub(super) struct Mirror<'a> {
    pub(super) dir: PathBuf,
    /// Its name among the mirrors: BLAKE3 of the source's canonical path or URL.
    pub(super) id: String,
    origin: Origin<'a>,
    /// Through what a local repository is read, once it was; gone before the lock is.
    view: Option<View>,
    view_dir: PathBuf,
    cancel: Cancel,
    _lock: File,
}

impl<'a> Mirror<'a> {
    /// The mirror of a source. Waits for who else fetches the same.
    pub(super) fn lock(layout: &Layout, origin: Origin<'a>, cancel: &Cancel) -> Result<Self, FreezeError> {
        let id = mirror_id(match origin {
            Origin::Local(repo) => repo.address().as_os_str(),
            Origin::Url(url) => url,
        });
        let path = layout.mirrors().join(format!("{id}.lock"));
        let lock = || -> io::Result<File> {
            loop {
                let lock = File::options().write(true).create(true).truncate(false).open(&path)?;
                match lock.try_lock() {
                    Ok(()) => {}
                    Err(TryLockError::WouldBlock) => {
                        cancel.check()?;
                        std::thread::sleep(LOCK_EVERY);
                        continue;
                    }
                    Err(TryLockError::Error(error)) => return Err(error),
                }
                // A collection may have removed it meanwhile; a lock without a name keeps nobody out.
                match path.symlink_metadata() {
                    Ok(there) if there.ino() == lock.metadata()?.ino() => return Ok(lock),
                    Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                    Ok(_) | Err(_) => {}
                }
            }
        };
        let _lock = lock().map_err(FreezeError::Store)?;
        let dir = layout.mirrors().join(format!("{id}.git"));
        let view_dir = layout.tmp().join(format!("view-{id}"));
        Ok(Self { dir, id, origin, view: None, view_dir, cancel: cancel.clone(), _lock })
    }

    /// git that talks to the source, as the remote `source`.
    fn remote(&mut self, git: Git) -> Result<Git, FreezeError> {
        let git = git.until(&self.cancel);
        let repo = match self.origin {
            Origin::Url(url) => return Ok(git.config("remote.source.url", url).network()),
            Origin::Local(repo) => repo,
        };
        let view = match self.view.take() {
            Some(view) => view,
            None => View::of(repo, self.view_dir.clone())?,
        };
        let view = self.view.insert(view);
        Ok(git.config("remote.source.url", view.dir()).config("remote.source.uploadpack", UPLOAD_PACK))
    }

    pub(super) fn git(&self) -> Git {
        Git::at(&self.dir)
    }

    /// Asks the source for its refs.
    pub(super) fn look(&mut self) -> Result<Remote, FreezeError> {
        let text = self.remote(Git::new())?.text(&["ls-remote", "--symref", "source"])?;
        let mut out = Remote { head: None, head_commit: None, has_refs: false, format: "sha1" };
        for line in text.lines() {
            let Some((value, name)) = line.split_once('\t') else { continue };
            match value.strip_prefix("ref: ") {
                Some(target) if name == "HEAD" => out.head = Some(Head::Branch(target.to_owned())),
                Some(_) => {}
                None => {
                    out.has_refs = true;
                    out.format = if value.len() == 64 { "sha256" } else { "sha1" };
                    if name == "HEAD" {
                        out.head_commit = Some(value.to_owned());
                        out.head.get_or_insert(Head::Detached(value.to_owned()));
                    }
                }
            }
        }
        if let Origin::Local(repo) = self.origin {
            out.format = repo.format();
        }
        if !out
            .head
            .as_ref()
            .is_some_and(|head| matches!(head, Head::Branch(name) if name.starts_with("refs/heads/")))
        {
            out.head = out.head_commit.clone().map(Head::Detached);
        }
        Ok(out)
    }

    /// Makes the mirror if it is missing.
    pub(super) fn create(&self, format: &str) -> Result<(), FreezeError> {
        if self.dir.join("HEAD").exists() {
            return Ok(());
        }
        let format = format!("--object-format={format}");
        let args = ["init", "--quiet", "--bare", "--template=", &format, "--"].map(std::ffi::OsStr::new);
        let args: Vec<_> = args.into_iter().chain([self.dir.as_os_str()]).collect();
        Git::new().run(&args)?;
        Ok(())
    }

    /// Brings it up to the source: branches, tags, remote branches and `HEAD`.
    pub(super) fn fetch(&mut self, remote: &Remote, progress: &dyn Fn(&str)) -> Result<(), FreezeError> {
        self.create(remote.format)?;
        let mut refs = vec!["+refs/heads/*:refs/heads/*", "+refs/tags/*:refs/tags/*"];
        if let Origin::Local(_) = self.origin {
            refs.push("+refs/remotes/*:refs/remotes/*");
        }
        if remote.head_commit.is_some() {
            refs.push("+HEAD:refs/tendon/head");
        }
        if remote.has_refs {
            self.fetch_refs(&["--prune"], &refs, progress)?;
        }
        // Without a commit there, `HEAD` must not resolve to an older one here.
        let head = remote.head.as_ref().map_or_else(|| "ref: refs/tendon/none\n".into(), Head::text);
        replace(&self.dir.join("HEAD"), head.as_bytes()).map_err(FreezeError::Store)?;
        self.tidy()
    }

    /// Fetches one commit or ref that no branch or tag leads to.
    pub(super) fn fetch_one(&mut self, rev: &str, progress: &dyn Fn(&str)) -> Result<(), FreezeError> {
        self.fetch_refs(&[], &[&format!("+{rev}:refs/tendon/one")], progress)
    }

    fn fetch_refs(
        &mut self,
        options: &[&str],
        refs: &[&str],
        progress: &dyn Fn(&str),
    ) -> Result<(), FreezeError> {
        let mut args = vec!["fetch", "--progress", "--no-tags", "--force", "--update-shallow"];
        args.extend(["--no-write-fetch-head", "--no-auto-maintenance"]);
        args.extend(options);
        args.push("source");
        args.extend(refs);
        // Of all that git says, people want to see how far it is.
        let percents = |line: &str| {
            if line.contains("objects:") || line.contains("deltas:") {
                progress(line);
            }
        };
        self.remote(self.git())?.run_with(&args, &[], &percents).inspect_err(|_| {
            // A git that was ended, or had no room, leaves locks and parts of packs.
            if let Err(error) = gc::unlock(&self.dir) {
                tracing::warn!(mirror = %self.dir.display(), %error, "a mirror could not be cleaned");
            }
        })?;
        Ok(())
    }

    fn tidy(&self) -> Result<(), FreezeError> {
        self.git().run(&["pack-refs", "--all"])?;
        let packs = std::fs::read_dir(self.dir.join("objects/pack")).map_err(FreezeError::Store)?;
        let packs = packs.flatten().filter(|entry| entry.path().extension().is_some_and(|ext| ext == "pack"));
        if packs.count() > PACKS_MAX {
            // Bases have links to what they need of the old packs.
            self.git().run(&["repack", "-a", "-d", "-q", "--keep-unreachable"])?;
        }
        Ok(())
    }

    /// The commit that `rev` names, and where `HEAD` stands when it is checked out.
    pub(super) fn resolve(&self, rev: &str) -> Result<Option<(String, Head)>, FreezeError> {
        let git = self.git();
        let commit = format!("{rev}^{{commit}}");
        let Some(commit) = git.ask(&["rev-parse", "--verify", "--quiet", "--end-of-options", &commit])?
        else {
            return Ok(None);
        };
        let commit = String::from_utf8_lossy(&commit).trim().to_owned();
        let name =
            git.ask(&["rev-parse", "--verify", "--quiet", "--symbolic-full-name", "--end-of-options", rev]);
        let name = name.ok().flatten().unwrap_or_default();
        let name = String::from_utf8_lossy(&name).trim().to_owned();
        let head =
            if name.starts_with("refs/heads/") { Head::Branch(name) } else { Head::Detached(commit.clone()) };
        Ok(Some((commit, head)))
    }

    /// Links what the mirror has got since into the base's `.git`.
    pub(super) fn write_objects(&self, git_dir: &Path) -> Result<(), FreezeError> {
        link_objects(&self.dir.join("objects"), &git_dir.join("objects")).map_err(FreezeError::Store)
    }

    /// Writes the `.git` of a base: the mirror's refs and objects (links to its packs), `head`, and `settings`.
    pub(super) fn write_dot_git(
        &self,
        git_dir: &Path,
        head: &Head,
        settings: &[(String, String)],
    ) -> Result<(), FreezeError> {
        write_bare_minimum(git_dir, head, settings).map_err(FreezeError::Store)?;
        let refs = self.git().run(&[
            "for-each-ref",
            "--format=%(objectname) %(refname)",
            "refs/heads",
            "refs/tags",
            "refs/remotes",
        ])?;
        let mut packed = b"# pack-refs with: sorted \n".to_vec();
        packed.extend_from_slice(&refs);
        let place = || -> io::Result<()> {
            std::fs::write(git_dir.join("packed-refs"), packed)?;
            if self.dir.join("shallow").exists() {
                std::fs::copy(self.dir.join("shallow"), git_dir.join("shallow"))?;
            }
            link_objects(&self.dir.join("objects"), &git_dir.join("objects"))
        };
        place().map_err(FreezeError::Store)
    }
}

/// The name of a source's mirror.
pub(super) fn mirror_id(url: &OsStr) -> String {
    blake3::hash(url.as_encoded_bytes()).to_hex()[..32].to_owned()
}

/// The least that git takes for a repository.
pub(super) fn write_bare_minimum(
    git_dir: &Path,
    head: &Head,
    settings: &[(String, String)],
) -> io::Result<()> {
    for name in ["", "objects", "objects/info", "objects/pack", "refs", "refs/heads", "refs/tags", "info"] {
        std::fs::create_dir(git_dir.join(name))?;
    }
    let mut config = CONFIG.to_owned();
    let version = u8::from(settings.iter().any(|(key, _)| key.starts_with("extensions.")));
    config.push_str(&format!("[core]\n\trepositoryformatversion = {version}\n"));
    for (key, value) in settings {
        let (section, name) = key.split_once('.').unwrap_or(("core", key));
        config.push_str(&format!("[{section}]\n\t{name} = {value}\n"));
    }
    std::fs::write(git_dir.join("config"), config)?;
    std::fs::write(git_dir.join("HEAD"), head.text())
}

/// Links all objects: they never change. Across file systems they are copied.
fn link_objects(from: &Path, to: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let name = entry.file_name();
        let target = to.join(&name);
        if entry.file_type()?.is_dir() {
            match std::fs::create_dir(&target) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                _ => link_objects(&entry.path(), &target)?,
            }
            continue;
        }
        let bytes = name.as_encoded_bytes();
        if bytes.starts_with(b"tmp_") || bytes.ends_with(b".keep") || bytes.ends_with(b".lock") {
            continue;
        }
        if !target.exists() && std::fs::hard_link(entry.path(), &target).is_err() {
            std::fs::copy(entry.path(), &target)?;
            std::fs::set_permissions(&target, Permissions::from_mode(0o444))?;
        }
    }
    Ok(())
}

/// The state of a merge, cherry-pick or revert in progress, and what git leaves out: small files that a base takes over.
pub(super) fn copy_state(from: &Path, common: &Path, to: &Path) -> io::Result<()> {
    let state = ["MERGE_HEAD", "MERGE_MSG", "MERGE_MODE", "CHERRY_PICK_HEAD", "REVERT_HEAD", "ORIG_HEAD"];
    let state = state.map(|name| (from, name));
    for (dir, name) in state.into_iter().chain([(common, "info/exclude"), (from, "info/sparse-checkout")]) {
        if let Ok(content) = read_small(&dir.join(name)) {
            std::fs::write(to.join(name), content)?;
        }
    }
    Ok(())
}
