//! What can go wrong with branches, one error for each thing that is done with them. Touches nothing.

use std::io;

use proto::error::{Code, Coded};
use proto::ids::{BaseId, BranchId};

use super::NAME_BYTES_MAX;
use crate::db::DbError;
use crate::history::AtError;
use crate::scan::ScanError;

/// A name that a branch can't have.
#[derive(Debug, thiserror::Error)]
pub enum NameError {
    /// It has a form that no name has.
    #[error("a branch can't be called `{name}`: {reason}")]
    Bad {
        /// The name, cut.
        name: String,
        /// Why not.
        reason: &'static str,
    },
    /// Another branch has it.
    #[error("a branch called `{0}` exists already")]
    Taken(String),
}

impl NameError {
    pub(crate) fn code(&self) -> Code {
        match self {
            NameError::Bad { .. } => Code::Usage,
            NameError::Taken(_) => Code::Conflict,
        }
    }
    pub(crate) fn hint(&self) -> Option<String> {
        Some(match self {
            NameError::Bad { .. } => {
                format!("use up to {NAME_BYTES_MAX} of a-z A-Z 0-9 . _ - / and begin with a letter or digit")
            }
            NameError::Taken(_) => "choose another name, or drop that branch".into(),
        })
    }
}

/// A branch that was not made.
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    /// There is no such base.
    #[error("there is no base {0}")]
    NoBase(BaseId),
    /// It can't have that name.
    #[error(transparent)]
    Name(#[from] NameError),
    /// The engine that was asked for does not work on this host.
    #[error("overlays can't be mounted on this host: {0}")]
    Engine(String),
    /// Its directory can't be made.
    #[error("can't make the directory of the branch")]
    Io(#[from] io::Error),
    /// The database failed.
    #[error("can't record the branch")]
    Db(#[from] DbError),
}

impl Coded for CreateError {
    fn code(&self) -> Code {
        match self {
            CreateError::NoBase(_) => Code::NotFound,
            CreateError::Name(error) => error.code(),
            CreateError::Engine(_) => Code::Refused,
            CreateError::Io(error) => io_code(error),
            CreateError::Db(error) => error.code(),
        }
    }
    fn hint(&self) -> Option<String> {
        match self {
            CreateError::NoBase(_) => Some("list them: tendon base list".into()),
            CreateError::Name(error) => error.hint(),
            CreateError::Engine(_) => Some("configure the engine as `auto` or `copy`".into()),
            CreateError::Io(_) | CreateError::Db(_) => None,
        }
    }
}

pub(crate) fn io_code(error: &io::Error) -> Code {
    let full = matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded);
    if full { Code::NoSpace } else { Code::HostBroken }
}

/// A branch that can't be shown or found.
#[derive(Debug, thiserror::Error)]
pub enum BranchError {
    /// There is no such branch.
    #[error("there is no branch `{0}`")]
    NoBranch(String),
    /// It was dropped.
    #[error("the branch `{name}` was dropped at audit row {seq}")]
    Dropped {
        /// Its id or the name that it had.
        name: String,
        /// Its id.
        id: BranchId,
        /// The row that says so.
        seq: u64,
        /// Whether what it held can still be told.
        kept: bool,
    },
    /// Its directory can't be read.
    #[error("can't read the directory of the branch")]
    Io(#[from] io::Error),
    /// The database failed.
    #[error("can't read the branches")]
    Db(#[from] DbError),
}

impl Coded for BranchError {
    fn code(&self) -> Code {
        match self {
            BranchError::NoBranch(_) | BranchError::Dropped { .. } => Code::NotFound,
            BranchError::Io(error) => io_code(error),
            BranchError::Db(error) => error.code(),
        }
    }
    fn hint(&self) -> Option<String> {
        match self {
            BranchError::NoBranch(_) => Some("list them: tendon branch list".into()),
            BranchError::Dropped { id, seq, kept: true, .. } => {
                Some(format!("bring back what it held: tendon branch at {} --branch {id}", seq - 1))
            }
            BranchError::Dropped { .. } => Some(
                "its base has been collected since, so it can't be brought back; the audit keeps its rows"
                    .into(),
            ),
            BranchError::Io(_) | BranchError::Db(_) => None,
        }
    }
}

/// A branch that can't be mounted.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// There is no such branch.
    #[error("there is no branch {0}")]
    NoBranch(BranchId),
    /// The engine failed.
    #[error("can't mount the branch {branch}")]
    Io {
        /// Which branch.
        branch: BranchId,
        /// Why.
        source: io::Error,
    },
    /// What a killed runner left on it can't be recorded.
    #[error("can't recover the branch {branch}")]
    Recover {
        /// Which branch.
        branch: BranchId,
        /// Why.
        source: Box<ScanError>,
    },
    /// The database failed.
    #[error("can't find the layers of the branch")]
    Db(#[from] DbError),
}

impl Coded for MountError {
    fn code(&self) -> Code {
        match self {
            MountError::NoBranch(_) => Code::NotFound,
            MountError::Io { source, .. } => io_code(source),
            MountError::Recover { source, .. } => source.code(),
            MountError::Db(error) => error.code(),
        }
    }
    fn hint(&self) -> Option<String> {
        match self {
            MountError::Recover { source, .. } => source.hint(),
            MountError::NoBranch(_) | MountError::Io { .. } | MountError::Db(_) => None,
        }
    }
}

/// A branch that could not be made from a past state.
#[derive(Debug, thiserror::Error)]
pub enum BranchAtError {
    /// The branch can't be made.
    #[error("can't make a branch of that state")]
    Create(#[from] CreateError),
    /// The state can't be put back.
    #[error("can't put that state back")]
    At(#[from] AtError),
    /// It can't be recorded.
    #[error("can't record that state")]
    Scan(#[from] ScanError),
}

impl Coded for BranchAtError {
    fn code(&self) -> Code {
        match self {
            BranchAtError::Create(error) => error.code(),
            BranchAtError::At(error) => error.code(),
            BranchAtError::Scan(error) => error.code(),
        }
    }
    fn hint(&self) -> Option<String> {
        match self {
            BranchAtError::Create(error) => error.hint(),
            BranchAtError::At(error) => error.hint(),
            BranchAtError::Scan(error) => error.hint(),
        }
    }
}
