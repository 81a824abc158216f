//! Bodies of the runner's HTTP API, version 1. `Source`, `VerifyRequest` and `VerifyEvent` stand in [`crate::verify`].

use serde::{Deserialize, Serialize};

use crate::api::{BaseInfo, BranchInfo};
use crate::error::ErrorBody;
use crate::ids::{BaseId, BranchId, ExecId};
use crate::path::{JsonBytes, TreePath};
use crate::verify::{ChangedFiles, Confinement, LimitsAsked, Outcome};

/// The version in every path of the API (`/v1/…`).
pub const API_VERSION: u32 = 1;
/// The largest JSON request body: inline files (64 MiB, base 64) and what surrounds them.
pub const REQUEST_BYTES_MAX: usize = 96 * 1024 * 1024;
/// The largest sum of inline files, decoded.
pub const INLINE_BYTES_MAX: u64 = 64 * 1024 * 1024;
/// The largest file that the files endpoint reads or writes at once.
pub const FILE_BYTES_MAX: u64 = 64 * 1024 * 1024;
/// The longest line of an event stream. The longest that is sent is a report.
pub const LINE_BYTES_MAX: usize = 16 * 1024 * 1024;

/// The version of [`ExecReport`]: raised when a reader of the old one would misread the new one.
pub const EXEC_REPORT_VERSION: u32 = 1;

/// The runner behind the socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunnerInfo {
    /// The runner's release.
    pub version: String,
    /// [`API_VERSION`].
    pub api: u32,
    /// Its process id, as its starter sees it.
    pub pid: u32,
    /// Whether it ends by itself when nobody needs it.
    pub private: bool,
    /// Its state directory.
    pub state_dir: JsonBytes,
    /// Connections now, this one included.
    pub clients: u32,
    /// Verifies and execs that run now.
    pub running: u32,
    /// Hands in which background processes of an exec may still be at work.
    #[serde(default)]
    pub lingering: u32,
    /// Milliseconds since it started.
    pub uptime_ms: u64,
}

/// The one line that a private runner writes to its standard output once it listens, or cannot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "start")]
pub enum StartLine {
    /// It listens.
    Ready {
        /// Its process id.
        pid: u32,
    },
    /// It refuses, and ends.
    Refused {
        /// Why.
        error: ErrorBody,
    },
}

/// What the runner tells while a base is frozen, one JSON object per line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "event")]
pub enum FreezeEvent {
    /// What is done now, for people.
    Progress {
        /// The text.
        message: String,
    },
    /// The end: the base.
    Done {
        /// The base.
        base: BaseInfo,
    },
    /// The end: it could not be frozen.
    Failed {
        /// Why.
        error: ErrorBody,
    },
}

/// What a garbage collection of bases removed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GcReply {
    /// The bases that are gone.
    pub removed: Vec<BaseId>,
    /// The bytes that this freed.
    pub bytes: u64,
}

/// Makes a branch over a base.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CreateBranch {
    /// The base.
    pub base: BaseId,
    /// A name for it, unique.
    #[serde(default)]
    pub name: Option<String>,
}

/// Makes a branch that starts as another is now.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ForkBranch {
    /// A name for it, unique.
    #[serde(default)]
    pub name: Option<String>,
}

/// Makes a branch that starts as another was.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BranchAt {
    /// The audit sequence number.
    pub seq: u64,
    /// A name for it, unique.
    #[serde(default)]
    pub name: Option<String>,
}

/// The branch that was made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BranchAtReply {
    /// The branch.
    pub branch: BranchInfo,
    /// Files whose content was not kept: they are not there.
    pub missing: Vec<TreePath>,
}

/// Writes a branch as a commit to a ref of a repository.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExportGit {
    /// Absolute path of the repository.
    pub repo: JsonBytes,
    /// The branch there, without `refs/heads/`.
    #[serde(rename = "ref")]
    pub name: String,
    /// The commit's message.
    pub message: String,
    /// Its author, as `Name <address>`.
    pub author: String,
}

/// What an export made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportReply {
    /// The commit, for an export to git.
    pub commit: Option<String>,
    /// The ref that now names it.
    #[serde(rename = "ref")]
    pub name: Option<String>,
    /// Files of the commit that differ from its parent's by uncommitted work in the frozen directory, not by the branch.
    pub uncommitted: u64,
}

/// A direct edit of a branch other than writing or removing a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "op")]
pub enum EditRequest {
    /// Makes a directory and those above it.
    Mkdir {
        /// Where.
        path: TreePath,
    },
    /// Moves; nothing may lie at `to`.
    Rename {
        /// What.
        from: TreePath,
        /// Its new path.
        to: TreePath,
    },
    /// Makes a symlink.
    Symlink {
        /// Where.
        path: TreePath,
        /// What it says; it is not followed.
        target: JsonBytes,
    },
    /// Changes permission bits.
    Chmod {
        /// What.
        path: TreePath,
        /// The bits.
        mode: u32,
    },
}

/// One entry of a directory of a branch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Its name.
    pub name: JsonBytes,
    /// `file`, `dir`, `symlink` or `other`.
    pub kind: String,
    /// Permission bits.
    pub mode: u32,
    /// Bytes.
    pub size: u64,
}

/// The window of a terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PtySize {
    /// Rows.
    pub rows: u16,
    /// Columns.
    pub cols: u16,
}

/// Runs a command on a branch: the first line of the request's body. [`ExecInput`] lines follow; the body's end is the
/// end of the command's standard input.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExecRequest {
    /// The command.
    pub argv: Vec<JsonBytes>,
    /// The directory below the branch to run in; its top when absent.
    #[serde(default)]
    pub cwd: Option<TreePath>,
    /// Extra environment.
    #[serde(default)]
    pub env: Vec<(String, String)>,
    /// Limits.
    #[serde(default)]
    pub limits: LimitsAsked,
    /// Whether standard input follows; else it is empty.
    #[serde(default)]
    pub stdin: bool,
    /// A terminal of this size instead of pipes.
    #[serde(default)]
    pub pty: Option<PtySize>,
}

/// More standard input for a running command: one JSON object per line of the request's body.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExecInput {
    /// The bytes.
    pub stdin: JsonBytes,
}

/// What else a caller does to a running command. A call of its own, so that it never waits behind input that nobody reads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "action")]
pub enum ExecControl {
    /// Sends a signal to the command.
    Signal {
        /// Its number.
        signal: i32,
    },
    /// The terminal's window changed.
    Resize {
        /// Its size now.
        size: PtySize,
    },
    /// Kills it and all that it started.
    Cancel {},
}

/// What the runner tells while a command runs on a branch, one JSON object per line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "event")]
pub enum ExecLine {
    /// It starts.
    Started {
        /// The exec.
        exec: ExecId,
    },
    /// It wrote.
    Output {
        /// `1` or `2`.
        fd: u8,
        /// What.
        bytes: JsonBytes,
    },
    /// The end.
    Done {
        /// The result.
        report: Box<ExecReport>,
    },
    /// The end: it could not be run.
    Failed {
        /// Why.
        error: ErrorBody,
    },
}

/// How a command on a branch ended. The record that `branch exec --json` prints.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecReport {
    /// [`EXEC_REPORT_VERSION`].
    pub version: u32,
    /// The exec.
    pub exec: ExecId,
    /// The branch.
    pub branch: BranchId,
    /// How it ended.
    pub outcome: Outcome,
    /// Wall time.
    pub wall_ms: u64,
    /// CPU time of it and all that it started and waited for.
    pub cpu_ms: u64,
    /// Highest memory of the hand meanwhile; where it has no control group, of its largest process.
    pub memory_bytes_peak: Option<u64>,
    /// Files that differ after it.
    pub changed: ChangedFiles,
    /// Audit rows of this exec: first and last sequence number.
    pub audit: Option<(u64, u64)>,
    /// Whether processes that it started still run.
    pub lingering: bool,
    /// Things to know: background processes that were ended.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
    /// What was in force.
    pub confinement: Confinement,
}

/// What checking the audit's chain found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuditCheckReply {
    /// Rows that were checked.
    pub rows: u64,
    /// The first thing that is wrong, or `None`.
    pub problem: Option<String>,
}

/// A read-only question to the audit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SqlRequest {
    /// One `select`.
    pub query: String,
}

/// A table that a question to the audit returned.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SqlReply {
    /// The columns' names.
    pub columns: Vec<String>,
    /// The rows.
    pub rows: Vec<Vec<serde_json::Value>>,
    /// Whether rows were left out because of a limit.
    #[serde(default)]
    pub truncated: bool,
}

/// One setting and where its value came from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ConfigValue {
    /// Dotted name.
    pub key: String,
    /// Its value.
    pub value: serde_json::Value,
    /// `built-in`, a file's path, `environment NAME` or `flag`.
    pub origin: String,
}

/// The runner's configuration as it is in force.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ConfigReply {
    /// 1.
    pub version: u32,
    /// The settings, sorted by name.
    pub values: Vec<ConfigValue>,
}

/// What the host can enforce.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DoctorReply {
    /// 1.
    pub version: u32,
    /// What was tried.
    pub checks: Vec<DoctorCheck>,
}

/// One thing that doctor tried.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DoctorCheck {
    /// What: `tier sandbox`, `limit memory`, `engine overlay`, …
    pub name: String,
    /// How it went.
    pub state: DoctorState,
    /// What was found.
    pub detail: String,
    /// What to install or set, if that helps.
    pub fix: Option<String>,
}

/// How a check of doctor went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DoctorState {
    /// It works.
    Works,
    /// It works in part, or something else stands in for it.
    Degraded,
    /// It does not work here, and something that was asked for may be refused.
    Missing,
    /// It does not work here, and nothing can run.
    Broken,
}

/// Percent-encodes bytes for a query string.
pub fn percent_encode(bytes: &[u8]) -> String {
    let mut out = String::with_capacity(bytes.len());
    for byte in bytes {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' | b'/' => {
                out.push(char::from(*byte))
            }
            other => {
                out.push('%');
                for digit in [other >> 4, other & 15] {
                    out.push(char::from(b"0123456789ABCDEF"[usize::from(digit)]));
                }
            }
        }
    }
    out
}

/// The bytes of `name` in a query string, decoded; `None` if it is not there or broken.
pub fn query_bytes(query: &str, name: &str) -> Option<Vec<u8>> {
    let value = query.split('&').find_map(|pair| pair.split_once('=').filter(|(key, _)| *key == name))?.1;
    let mut out = Vec::with_capacity(value.len());
    let mut rest = value.as_bytes();
    while let Some((byte, tail)) = rest.split_first() {
        rest = tail;
        if *byte != b'%' {
            out.push(*byte);
            continue;
        }
        let digits = std::str::from_utf8(tail.get(..2)?).ok()?;
        out.push(u8::from_str_radix(digits, 16).ok()?);
        rest = &tail[2..];
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_bytes_survive_a_query() {
        for bytes in [&b"src/a b.rs"[..], b"\xff\x00&=%", b"", "grüße".as_bytes()] {
            let query = format!("x=1&path={}&y=2", percent_encode(bytes));
            assert_eq!(query_bytes(&query, "path").unwrap(), bytes, "{query}");
        }
        assert_eq!(query_bytes("path=%z1", "path"), None);
        assert_eq!(query_bytes("path=%1", "path"), None);
        assert_eq!(query_bytes("other=1", "path"), None);
    }
}
