//! Error codes: append-only words, each with the exit status that the command line ends with.

use serde::{Deserialize, Serialize};

/// A word for what went wrong, stable for programs. New words are only ever appended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Code {
    /// The request itself makes no sense: fix it and call again.
    Usage,
    /// A named thing (repository, ref, branch, file) does not exist.
    NotFound,
    /// The input exists and can't be used (not a repository, a path outside, a file that can't be read).
    BadInput,
    /// Something changed under the request, or a name is taken.
    Conflict,
    /// Policy or a limit forbids it, or the host can't enforce what was asked for.
    Refused,
    /// Something of the host that tendon needs is missing or broken.
    HostBroken,
    /// The disk is full.
    NoSpace,
    /// Another runner owns the state directory.
    StateBusy,
    /// The state directory was written by a newer tendon, or is damaged.
    StateBad,
    /// The hand died or stopped answering.
    HandLost,
    /// The caller asked to stop.
    Cancelled,
    /// A defect of tendon: please report it.
    Internal,
}

impl Code {
    /// The exit status of the command line for this code. 0 is passed and 1 is a failed check.
    pub fn exit_status(self) -> u8 {
        match self {
            Code::Usage | Code::NotFound | Code::BadInput | Code::Conflict => 2,
            Code::Refused => 3,
            Code::HostBroken | Code::NoSpace | Code::StateBusy | Code::StateBad | Code::HandLost => 4,
            Code::Internal => 70,
            Code::Cancelled => 130,
        }
    }

    /// The HTTP status that the runner's API answers with for this code.
    pub fn http_status(self) -> u16 {
        match self {
            Code::Usage | Code::BadInput => 400,
            Code::NotFound => 404,
            Code::Conflict | Code::StateBusy => 409,
            Code::Refused => 403,
            Code::NoSpace => 507,
            Code::Cancelled => 499,
            Code::HandLost | Code::HostBroken | Code::StateBad | Code::Internal => 500,
        }
    }
}

/// An error as it crosses the socket (problem+json, RFC 9457, with our members) and as it is printed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// The stable word.
    pub code: Code,
    /// One sentence, lowercase, without full stop.
    pub message: String,
    /// What caused it, nearest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub causes: Vec<String>,
    /// What to try next.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

/// What each operation's error enum offers, so that `server` can render any of them.
pub trait Coded: std::error::Error {
    /// The stable word.
    fn code(&self) -> Code;
    /// What to try next, if anything helps.
    fn hint(&self) -> Option<String> {
        None
    }
    /// The error as it crosses the socket, with its chain of sources.
    fn body(&self) -> ErrorBody {
        let mut causes = Vec::new();
        let mut source = self.source();
        while let Some(error) = source {
            causes.push(error.to_string());
            source = error.source();
        }
        ErrorBody { code: self.code(), message: self.to_string(), causes, hint: self.hint() }
    }
}
