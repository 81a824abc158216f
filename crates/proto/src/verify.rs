//! The records of `verify`: what is asked for, what happens meanwhile, and the report.

use serde::{Deserialize, Serialize};

use crate::ids::{BaseId, BranchId, ExecId, VerifyId};
use crate::path::{JsonBytes, TreePath};

/// The version of [`Report`]: raised when a reader of the old one would misread the new one.
pub const REPORT_VERSION: u32 = 1;

/// Where the code comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Source {
    /// A git repository at a ref.
    Git {
        /// Absolute path or URL.
        repo: JsonBytes,
        /// Any ref or commit id that git can resolve there.
        #[serde(rename = "ref")]
        rev: String,
    },
    /// A directory as it is now, uncommitted work included.
    Directory {
        /// Absolute path.
        path: JsonBytes,
        /// Whether files that git ignores come along.
        include_ignored: bool,
    },
    /// A branch that exists, as it is now.
    Branch {
        /// The branch.
        branch: BranchId,
    },
    /// Files given inline: path and content.
    Files {
        /// The files.
        files: Vec<InlineFile>,
    },
}

/// One file given inline.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InlineFile {
    /// Where.
    pub path: TreePath,
    /// What.
    pub content: JsonBytes,
    /// Whether it is executable.
    #[serde(default)]
    pub executable: bool,
}

/// Limits that a caller asks for. `None` is the configuration's default, which is enforced where the host can;
/// a limit that is named here and can't be enforced is refused.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LimitsAsked {
    /// CPUs, in thousandths: 1500 is one and a half.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_milli: Option<u32>,
    /// Memory of all processes of the hand together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes_max: Option<u64>,
    /// Processes and threads of the hand.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pids_max: Option<u32>,
    /// Bytes that the commands may add to the branch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_bytes_max: Option<u64>,
    /// Wall time of one command.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wall_ms_max: Option<u64>,
}

/// The word by which people give a limit, for its name in records: the option without its dashes, and the key below
/// `limits` in a spec.
pub fn limit_word(name: &str) -> &str {
    match name {
        "cpu_milli" => "cpus",
        "memory_bytes_max" => "memory",
        "pids_max" => "pids",
        "disk_bytes_max" => "disk",
        "wall_ms_max" => "timeout",
        other => other,
    }
}

/// What `verify` is asked to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VerifyRequest {
    /// The code.
    pub source: Source,
    /// Commands that prepare; a failure ends the run as not passed.
    #[serde(default)]
    pub setup: Vec<Vec<String>>,
    /// Commands that must exit 0.
    pub checks: Vec<Vec<String>>,
    /// Extra environment.
    #[serde(default)]
    pub env: Vec<(String, String)>,
    /// Limits.
    #[serde(default)]
    pub limits: LimitsAsked,
    /// Run the checks that follow a failed one too.
    #[serde(default)]
    pub keep_going: bool,
    /// Keep the branch afterwards.
    #[serde(default)]
    pub keep_branch: bool,
    /// What of the commands' output is sent while they run.
    #[serde(default)]
    pub output: OutputWanted,
}

/// What of the commands' output a caller is sent while they run. All of it is in the logs that the report names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OutputWanted {
    /// The latest of it, a few times per second: something to look at.
    #[default]
    Recent,
    /// Nothing: the report is enough.
    None,
}

/// Which list of the request a command stood in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// `setup`.
    Setup,
    /// `checks`.
    Check,
}

/// How a command ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "how")]
pub enum Outcome {
    /// It exited by itself.
    Exited {
        /// Its status.
        code: i32,
    },
    /// A signal ended it.
    Signalled {
        /// The signal's number.
        signal: i32,
    },
    /// It ran longer than its limit and was killed, with all that it had started.
    TimedOut {
        /// The limit.
        wall_ms_max: u64,
    },
    /// It went over a limit and was killed.
    LimitExceeded {
        /// Which: `memory`, `disk`, `files`, `free disk space`.
        limit: String,
    },
    /// It could not be started.
    NotStarted {
        /// Why, with what was searched and what would help.
        reason: String,
        /// Whether there is no such program.
        #[serde(default)]
        program_missing: bool,
    },
    /// The caller stopped it.
    Cancelled,
    /// It was killed with all that ran in the hand, for what the code there did: it killed a process that holds it together.
    Killed {
        /// What happened.
        reason: String,
    },
    /// The hand died or stopped answering under it.
    HandLost {
        /// The cause, as far as it is known.
        reason: String,
    },
    /// An earlier command failed.
    Skipped,
}

impl Outcome {
    /// It went over this limit.
    pub fn exceeded(limit: &str) -> Self {
        Outcome::LimitExceeded { limit: limit.to_owned() }
    }
    /// Whether this is exit status 0.
    pub fn passed(&self) -> bool {
        *self == Outcome::Exited { code: 0 }
    }
}

/// A part of an output stream: its end, and how much there was.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutputTail {
    /// The last bytes.
    pub tail: Option<JsonBytes>,
    /// All bytes that the command wrote.
    pub bytes_total: u64,
    /// Whether the log file holds less than that, because of its size limit.
    pub truncated: bool,
    /// The whole stream, as far as it was kept.
    pub log: Option<JsonBytes>,
}

/// One command of the run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommandReport {
    /// Which list it stood in.
    pub phase: Phase,
    /// The command.
    pub argv: Vec<String>,
    /// Its exec, if it started.
    pub exec: Option<ExecId>,
    /// How it ended.
    pub outcome: Outcome,
    /// Standard output.
    pub stdout: OutputTail,
    /// Standard error.
    pub stderr: OutputTail,
    /// Wall time.
    pub wall_ms: u64,
    /// CPU time of it and all that it started and waited for.
    pub cpu_ms: u64,
    /// Highest memory of the hand meanwhile; where it has no control group, of its largest process.
    pub memory_bytes_peak: Option<u64>,
    /// Files that differ after it: the count and the first 1,000.
    pub changed: ChangedFiles,
}

/// The files that a command, or all of them, changed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangedFiles {
    /// Changed paths that belong to the tree.
    pub tree_total: u64,
    /// Changed paths that git ignores, or that lie in `.git`.
    pub other_total: u64,
    /// The first 1,000 of those that belong to the tree.
    pub paths: Vec<Change>,
}

/// One changed path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// Added, modified, deleted, or type changed.
    pub status: ChangeStatus,
    /// Where.
    pub path: TreePath,
}

/// git's letters for a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum ChangeStatus {
    /// Added.
    #[serde(rename = "A")]
    Added,
    /// Modified, in content or mode.
    #[serde(rename = "M")]
    Modified,
    /// Deleted.
    #[serde(rename = "D")]
    Deleted,
    /// Turned from a file into a symlink or the like.
    #[serde(rename = "T")]
    TypeChanged,
}

impl ChangeStatus {
    /// git's letter.
    pub fn letter(self) -> char {
        match self {
            Self::Added => 'A',
            Self::Modified => 'M',
            Self::Deleted => 'D',
            Self::TypeChanged => 'T',
        }
    }
}

/// A limit as it was really in force.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitInForce {
    /// `cpu_milli`, `memory_bytes_max`, `pids_max`, `disk_bytes_max`, `wall_ms_max`.
    pub name: String,
    /// Its value.
    pub value: u64,
    /// By what: `cgroup2`, `cgroup1`, `host` (all that the machine has), `watch`, `deadline`; `None`: not enforced on this host.
    pub enforced_by: Option<String>,
}

/// What confined the commands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Confinement {
    /// The tier: `sandbox`.
    pub tier: String,
    /// Digest of the policy: BLAKE3 of its canonical JSON, in hex.
    pub policy_digest: String,
    /// The limits.
    pub limits: Vec<LimitInForce>,
    /// What the hand itself found about its confinement at boot, by name: `seccomp`, `landlock`, `net`, …
    pub self_test: Vec<(String, String)>,
    /// Named protections that this host lacks although configuration tolerates it.
    #[serde(default)]
    pub degraded: Vec<String>,
}

/// What `verify` returns. The versioned record that `--json` prints.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// [`REPORT_VERSION`].
    pub version: u32,
    /// The run.
    pub id: VerifyId,
    /// All checks exited 0, nothing was cancelled.
    pub passed: bool,
    /// Whether the caller stopped it.
    pub cancelled: bool,
    /// The source, as asked for (inline files without their content).
    pub source: String,
    /// The frozen source.
    pub base: BaseId,
    /// The branch that the commands ran on.
    pub branch: BranchId,
    /// Whether the branch was kept.
    pub branch_kept: bool,
    /// The commit that the source stood at, if it is a git repository.
    pub git_head: Option<String>,
    /// Tree hash before the first command, `blake3:…`.
    pub tree_before: String,
    /// Tree hash after the last one.
    pub tree_after: Option<String>,
    /// The commands, in order.
    pub commands: Vec<CommandReport>,
    /// All that the commands changed.
    pub changed: ChangedFiles,
    /// What was in force.
    pub confinement: Option<Confinement>,
    /// Things to know: submodules left empty, LFS pointers, skipped special files.
    pub warnings: Vec<String>,
    /// Milliseconds since the Unix epoch.
    pub started_ms: u64,
    /// Wall time of the whole run.
    pub wall_ms: u64,
    /// Audit rows of this run: first and last sequence number.
    pub audit: Option<(u64, u64)>,
}

/// What the runner tells while a verify runs, one JSON object per line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "event")]
pub enum VerifyEvent {
    /// It was accepted.
    Accepted {
        /// The run.
        id: VerifyId,
    },
    /// Work on the source or the hand goes on.
    Progress {
        /// What is done now, for people.
        message: String,
    },
    /// A command starts.
    Started {
        /// Its place, from 0, setup first.
        index: u32,
        /// Which list.
        phase: Phase,
        /// The command.
        argv: Vec<String>,
    },
    /// A command wrote. These are the latest bytes: output that is too much, or too much for a slow caller, is skipped.
    Output {
        /// Its place.
        index: u32,
        /// `1` or `2`.
        fd: u8,
        /// What it wrote.
        bytes: JsonBytes,
        /// Bytes before these that were not sent.
        #[serde(default)]
        skipped: u64,
    },
    /// A command ended.
    Ended {
        /// Its place.
        index: u32,
        /// How.
        report: Box<CommandReport>,
    },
    /// The end: the report.
    Done {
        /// The report.
        report: Box<Report>,
    },
    /// The end: it could not be run.
    Failed {
        /// Why.
        error: crate::error::ErrorBody,
    },
}
