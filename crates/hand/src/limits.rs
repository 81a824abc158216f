//! Every bound of a hand.

use std::time::Duration;

/// Execs that run at once, and calls that are open at once.
pub const CALLS_MAX: u32 = 1024;
/// Longest text that names an exec.
pub const EXEC_ID_BYTES_MAX: usize = 64;
/// Receive window of one call: stdin or a file's content that was sent and not yet consumed.
pub const STREAM_WINDOW_BYTES: u32 = 128 * 1024;
/// Output of one call that waits for the runner to read.
pub const SEND_BUFFER_BYTES: usize = 128 * 1024;
/// Largest HTTP/2 frame that is received.
pub const FRAME_BYTES_MAX: u32 = 64 * 1024;
/// Largest header list: gRPC needs a few hundred bytes.
pub const HEADER_BYTES_MAX: u32 = 8 * 1024;
/// After a command's end: how long output is awaited that a background process may still write.
pub const DRAIN: Duration = Duration::from_millis(100);
/// How long a killed tree may take to be gone before all of the hand is killed.
pub const KILL_PATIENCE: Duration = Duration::from_secs(3);
/// Walks of one strike that look for processes forked meanwhile.
pub const STRIKE_ROUNDS_MAX: u32 = 64;
/// Entries of `/proc` that are looked at in one walk.
pub const PROCESSES_MAX: usize = 65_536;
/// Longest path that file transfer takes.
pub const PATH_BYTES_MAX: usize = 4096;
/// Between two reads of what nobody hears any more.
pub const SINK_PAUSE: Duration = Duration::from_millis(10);
/// Signals and timers that may be queued: the kernel counts them by user of the host too, which all hands share, so that
/// each gets a part of the usual 100,000.
pub const SIGNALS_QUEUED_MAX: u64 = 4096;
