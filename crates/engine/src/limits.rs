//! The named bounds of this crate.

use std::time::Duration;

/// Bytes of one output stream of one command that are kept in its log file.
pub const LOG_BYTES_MAX: u64 = 64 * 1024 * 1024;
/// Bytes at the end of an output stream that the report holds.
pub const TAIL_BYTES_MAX: usize = 8 * 1024;
/// Runs whose logs are kept.
pub const LOGS_KEPT_MAX: usize = 200;
/// Changed paths that a report lists.
pub const PATHS_MAX: usize = 1000;
/// Bytes of the paths that a report lists of all commands together.
pub const PATHS_BYTES_MAX: usize = 256 * 1024;
/// Bytes of all commands of one verify, as JSON.
pub const ARGV_BYTES_MAX: usize = 4 * 1024 * 1024;
/// Bytes that a report holds of what its commands printed and changed, as JSON.
pub const OUTPUTS_BYTES_MAX: usize = 7 * 1024 * 1024;
/// Those of them that are only for commands that failed.
pub const OUTPUTS_BYTES_OF_FAILED: usize = 1024 * 1024;
/// Bytes of a report's warnings, as JSON.
pub const WARNINGS_BYTES_MAX: usize = 128 * 1024;
/// Commands of one verify.
pub const COMMANDS_MAX: usize = 1000;
/// Verifies and execs that run at one time.
pub const RUNNING_MAX: usize = 256;
/// Files and directories that a command may add to its branch: each takes memory of the runner when it is captured.
pub const FILES_MAX: u64 = 500_000;
/// How often the bytes that a branch added are compared with their limit.
pub const DISK_WATCH_EVERY: Duration = Duration::from_secs(1);
/// What is kept free of the state directory's disk, so that the audit can be written: this, or a 50th of a smaller disk.
pub const DISK_FREE_BYTES_MIN: u64 = 512 << 20;
/// The same for inodes.
pub const DISK_FREE_INODES_MIN: u64 = 20_000;
/// How long hands are looked at to find the one that writes most.
pub const DISK_BLAME_TIME: Duration = Duration::from_millis(200);
/// How often a branch is captured while background processes of an exec live.
pub const CAPTURE_EVERY: Duration = Duration::from_secs(2);
/// Events that wait for a caller who reads slowly; then the command's output waits.
pub const EVENTS_MAX: usize = 64;
/// Bytes of an output stream that a caller of a verify is sent at a time: the latest.
pub const RECENT_BYTES_MAX: usize = 4 * 1024;
/// How often they are sent.
pub const RECENT_EVERY: Duration = Duration::from_millis(100);
/// How long a branch that nobody uses stays mounted.
pub const MOUNT_IDLE_MAX: Duration = Duration::from_secs(60);
/// How often the end of the audit is noted beside the database.
pub const WITNESS_EVERY: Duration = Duration::from_secs(30);
/// Signals and the like that wait for an exec.
pub const CONTROLS_MAX: usize = 16;
/// How long a command that was cancelled may take to end before its hand is ended.
pub const CANCEL_GRACE: Duration = Duration::from_secs(5);
/// The largest configuration file.
pub const CONFIG_BYTES_MAX: u64 = 1024 * 1024;
