//! Takes a branch out: as a patch, as a commit on a ref of the user's repository, or as a tar archive.

use std::io::{self, Write};
use std::path::PathBuf;

use proto::error::{Code, Coded};
use proto::ids::BranchId;
use proto::path::TreePath;

use crate::branch::MountError;
use crate::captured::Uncaptured;
use crate::content::{ContentError, Contents};
use crate::db::DbError;
use crate::diff::{DiffError, in_tree};
use crate::entries::{self, Kind};
use crate::scan::{Layers, ScanError};
use crate::store::Store;

/// The time of every file in an archive: the first one that all formats can tell (1980-01-01).
const TAR_MTIME_S: u64 = 315_532_800;

/// Where a branch goes.
pub enum ExportTarget<'a> {
    /// A patch against the base, that `git apply` takes.
    Patch(&'a mut dyn Write),
    /// The files of the tree, as a tar archive that depends on nothing but them.
    Tar(&'a mut dyn Write),
    /// A commit in the user's repository.
    GitRef(GitRef),
}

/// A commit to be made in the user's repository, over the commit that the base stands at.
#[derive(Clone, Debug)]
pub struct GitRef {
    /// The repository, or its work tree.
    pub repo: PathBuf,
    /// The branch there, without `refs/heads/`.
    pub name: String,
    /// The commit's message.
    pub message: String,
    /// Its author, as `Name <address>`.
    pub author: String,
}

/// What an export made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExportReport {
    /// Files and symlinks that were written.
    pub files: u64,
    /// The commit, for a ref.
    pub commit: Option<String>,
    /// Files of it that differ from its parent's because they were so in the frozen directory, not by the branch.
    pub uncommitted: u64,
}

/// A branch that was not taken out.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// There is no such branch.
    #[error("there is no branch {0}")]
    NoBranch(BranchId),
    /// Something on the branch can't be captured.
    #[error(transparent)]
    Uncaptured(#[from] Uncaptured),
    /// What is on the branch can't be looked at.
    #[error(transparent)]
    Scan(#[from] ScanError),
    /// What a killed runner left on it can't be looked at.
    #[error(transparent)]
    Mount(#[from] MountError),
    /// It can't be compared or its files can't be given to git.
    #[error("can't prepare the files of the branch")]
    Diff(#[from] DiffError),
    /// Content can't be had.
    #[error("can't read a file of the branch")]
    Content(#[from] ContentError),
    /// The archive can't be written.
    #[error("can't write the export")]
    Io(#[from] io::Error),
    /// The database failed.
    #[error("can't read what the branch holds")]
    Db(#[from] DbError),
    /// The branch changed a submodule's files.
    #[error("the branch changed files of the submodule {0}, which a commit of this repository can't hold")]
    Submodule(TreePath),
    /// The branch changed a file that git keeps through a filter.
    #[error("git keeps {0} through a filter that its attributes name, which is not run here")]
    Filter(TreePath),
    /// The base has no commit.
    #[error("the base of the branch does not stand at a git commit")]
    NoCommit,
    /// The repository can't be used.
    #[error("can't use {} as a git repository: {problem}", repo.display())]
    Repo {
        /// Which repository.
        repo: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// It does not have the commit below.
    #[error("{} does not have the commit {commit} that the branch stands on", repo.display())]
    NoParent {
        /// Which repository.
        repo: PathBuf,
        /// Which commit.
        commit: String,
    },
    /// The ref's name or the author can't be used.
    #[error("`{0}` is not a good {1}")]
    Name(String, &'static str),
    /// The ref exists.
    #[error("the branch `{0}` exists in the repository")]
    Exists(String),
    /// Somebody stands on it.
    #[error("the branch `{0}` is checked out in the repository")]
    CheckedOut(String),
}

impl Coded for ExportError {
    fn code(&self) -> Code {
        match self {
            ExportError::NoBranch(_) => Code::NotFound,
            ExportError::Uncaptured(error) => error.code(),
            ExportError::Scan(error) => error.code(),
            ExportError::Mount(error) => error.code(),
            ExportError::Diff(error) => error.code(),
            ExportError::Content(error) => error.code(),
            ExportError::Io(error) if error.kind() == io::ErrorKind::StorageFull => Code::NoSpace,
            ExportError::Io(_) => Code::HostBroken,
            ExportError::Db(error) => error.code(),
            ExportError::Submodule(_) | ExportError::Filter(_) => Code::BadInput,
            ExportError::NoCommit | ExportError::Repo { .. } | ExportError::NoParent { .. } => Code::BadInput,
            ExportError::Name(..) => Code::Usage,
            ExportError::Exists(_) | ExportError::CheckedOut(_) => Code::Conflict,
        }
    }
    fn hint(&self) -> Option<String> {
        match self {
            ExportError::Exists(_) => Some("choose another name, or delete that branch first".into()),
            ExportError::CheckedOut(_) => {
                Some("choose another name: a branch that is checked out is never moved".into())
            }
            ExportError::NoCommit | ExportError::Submodule(_) | ExportError::Filter(_) => {
                Some("export it as a patch or a tar archive".into())
            }
            ExportError::NoParent { .. } => Some("fetch that commit there first".into()),
            ExportError::Content(error) => error.hint(),
            ExportError::Diff(error) => error.hint(),
            ExportError::Uncaptured(error) => error.hint(),
            ExportError::Scan(error) => error.hint(),
            ExportError::Mount(error) => error.hint(),
            ExportError::Repo { .. } => {
                Some("name a git repository on this machine, or its work tree; or export a patch, and apply it there".into())
            }
            ExportError::Name(_, "author") => Some("write it as: Name <address>".into()),
            ExportError::Name(..) => Some("name a branch as git does, like: agent/fix".into()),
            ExportError::NoBranch(_) | ExportError::Io(_) | ExportError::Db(_) => None,
        }
    }
}

impl Store {
    /// Takes the branch, as of its last scan, out to `target`. One that holds what can't be captured is refused, as it is by a
    /// fork.
    pub fn export(&self, branch: &BranchId, target: ExportTarget<'_>) -> Result<ExportReport, ExportError> {
        self.recovered(branch)?;
        if let Some(uncaptured) = self.uncaptured(branch)? {
            return Err(uncaptured.into());
        }
        match target {
            ExportTarget::Patch(out) => {
                let files = self.patch(branch, out).map_err(no_branch)?;
                Ok(ExportReport { files, ..ExportReport::default() })
            }
            ExportTarget::Tar(out) => self.export_tar(branch, out),
            ExportTarget::GitRef(to) => crate::gitref::export_ref(self, branch, &to),
        }
    }

    fn export_tar(&self, branch: &BranchId, out: &mut dyn Write) -> Result<ExportReport, ExportError> {
        let conn = self.inner.db.reader()?;
        let layers = Layers::of(&conn, branch)?.ok_or_else(|| ExportError::NoBranch(branch.clone()))?;
        let chain = layers.chain();
        let contents = Contents::new(self, &conn, Some(branch), &chain);
        let mut archive = tar::Builder::new(out);
        let mut files = 0;
        for (path, entry) in entries::merged(&conn, &chain, None)?.iter().filter(|(_, entry)| in_tree(entry))
        {
            let mut header = tar::Header::new_gnu();
            header.set_mtime(TAR_MTIME_S);
            header.set_uid(0);
            header.set_gid(0);
            if entry.kind == Kind::Symlink {
                let target = contents.read(path, entry)?;
                header.set_entry_type(tar::EntryType::Symlink);
                header.set_mode(0o777);
                header.set_size(0);
                let target: &std::ffi::OsStr = std::os::unix::ffi::OsStrExt::from_bytes(&target);
                archive.append_link(&mut header, path.as_path(), target)?;
            } else {
                header.set_mode(if entry.mode & 0o100 != 0 { 0o755 } else { 0o644 });
                header.set_size(entry.size);
                let mut content = contents.open(path, entry)?;
                archive.append_data(&mut header, path.as_path(), &mut content)?;
            }
            files += 1;
        }
        archive.finish()?;
        Ok(ExportReport { files, ..ExportReport::default() })
    }
}

pub(crate) fn no_branch(error: DiffError) -> ExportError {
    match error {
        DiffError::NoBranch(branch) => ExportError::NoBranch(branch),
        DiffError::TooLarge(_)
        | DiffError::PatchTooLarge
        | DiffError::Names(_)
        | DiffError::Scan(_)
        | DiffError::Mount(_)
        | DiffError::Content(_)
        | DiffError::Git(_)
        | DiffError::Io(_)
        | DiffError::Db(_) => error.into(),
    }
}

#[cfg(test)]
#[path = "export_tests.rs"]
mod tests;
