//! Every bound of this crate.

use std::time::Duration;

/// How long a hand may take from its spawn to the end of its self-test.
pub const BOOT_PATIENCE: Duration = Duration::from_secs(15);
/// How long a hand may take to be gone after it was killed.
pub const STOP_PATIENCE: Duration = Duration::from_secs(10);
/// How long a freeze may take.
pub const FREEZE_PATIENCE: Duration = Duration::from_secs(5);
/// Of what bubblewrap and `hand` write to standard error, the last bytes that are kept.
pub const STDERR_BYTES_MAX: usize = 8 * 1024;
/// The period of CPU quotas.
pub const CPU_PERIOD_US: u64 = 100_000;
/// Processes and threads that a hand has beside its commands: bubblewrap's monitor, `hand`, and one supervisor.
pub const HAND_PIDS: u32 = 4;
/// Looks for processes that are left in a group that is killed.
pub const CGROUP_KILL_ROUNDS: u32 = 200;
/// Processes that are killed in one look.
pub const CGROUP_PROCS_MAX: usize = 100_000;
/// The mount below which mounts are attached holds empty directories only.
pub const ANCHOR_BYTES_MAX: u64 = 1 << 20;
/// Times that the processes of a group are moved aside, more of which may be forked meanwhile.
pub const CGROUP_ASIDE_ROUNDS: u32 = 20;
/// Tries to remove a group whose processes are leaving.
pub const CGROUP_REMOVE_ROUNDS: u32 = 100;
/// Entries and bytes that are copied from the host's `/etc`.
pub const ETC_ENTRIES_MAX: usize = 20_000;
/// See [`ETC_ENTRIES_MAX`].
pub const ETC_BYTES_MAX: u64 = 64 << 20;
/// Open files of a process in a hand.
pub const OPEN_FILES_MAX: u64 = 65_536;
/// Largest `/dev/shm`, which counts as memory.
pub const SHM_BYTES_MAX: u64 = 1 << 30;
/// Largest configuration file of a toolchain that is read.
pub const TOOLCHAIN_CONFIG_BYTES_MAX: u64 = 1 << 20;
/// Spawns that wait for the spawning thread.
pub const SPAWN_QUEUE_MAX: usize = 256;
/// Largest message to the warden.
pub const WARDEN_BYTES_MAX: u64 = 1 << 20;
/// Output of a program that doctor runs.
pub const PROBE_OUTPUT_BYTES_MAX: u64 = 64 * 1024;
/// The longest reason that is taken from a hand.
pub const REASON_BYTES_MAX: usize = 4096;
