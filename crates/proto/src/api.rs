//! Bodies of the runner's HTTP API other than verify's.

use serde::{Deserialize, Serialize};

use crate::ids::{BaseId, BranchId};
use crate::path::TreePath;

/// A base as the API shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BaseInfo {
    /// The base.
    pub id: BaseId,
    /// Where it came from, for people.
    pub source: String,
    /// Its tree hash, `blake3:…`.
    pub tree: String,
    /// The commit it stands at, if it came from a git repository.
    pub git_head: Option<String>,
    /// Files and symlinks.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Milliseconds since the Unix epoch.
    pub created_ms: u64,
    /// Branches that stand on it.
    pub branches: u64,
    /// Things to know: submodules left empty, LFS pointers, skipped special files.
    pub warnings: Vec<String>,
}

/// A branch as the API shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BranchInfo {
    /// The branch.
    pub id: BranchId,
    /// A name given by the user, unique.
    pub name: Option<String>,
    /// The base below.
    pub base: BaseId,
    /// The branch it was forked from.
    pub parent: Option<BranchId>,
    /// `overlay` or `copy`.
    pub engine: String,
    /// Layers between the branch and its base.
    pub depth: u32,
    /// Milliseconds since the Unix epoch.
    pub created_ms: u64,
    /// The last audit sequence number that touched it.
    pub audit_seq: u64,
}

/// One row of the audit. See `SPEC.md` for the hash chain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuditRow {
    /// Its place in the chain, from 1, without gaps.
    pub seq: u64,
    /// Milliseconds since the Unix epoch.
    pub time_ms: u64,
    /// The branch.
    pub branch: BranchId,
    /// Who: `exec:ex-…`, `cli:UID`, `session:…`, `recovery`.
    pub actor: String,
    /// `create`, `fork`, `drop`, `exec`; of a path `add`, `modify`, `delete`, `mode`, `type`, `class`.
    pub op: String,
    /// The path, for rows about a file.
    pub path: Option<TreePath>,
    /// BLAKE3 of the content before, hex.
    pub before: Option<String>,
    /// BLAKE3 of the content after, hex.
    pub after: Option<String>,
    /// Unix mode after, file type included.
    pub mode: Option<u32>,
    /// Bytes after.
    pub size: Option<u64>,
    /// Free text: a command line, a fork's parent.
    pub detail: Option<String>,
    /// The row's chain hash, hex.
    pub hash: String,
}
