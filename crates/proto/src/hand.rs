//! The protocol between the runner and a hand: the gRPC service (generated) and what a hand is told at boot.

use serde::{Deserialize, Serialize};

use crate::path::JsonBytes;

/// Messages, server trait and client, generated from `proto/hand.proto`; `UPDATE=1 cargo test -p proto --features hand` rewrites it.
#[allow(missing_docs, clippy::all, reason = "generated; the comments are in the .proto file")]
#[rustfmt::skip]
mod generated {
    include!("gen/tendon.hand.v1.rs");
}
pub use generated::*;

/// The version of [`BootConfig`], and of the protocol that goes with it.
pub const BOOT_VERSION: u32 = 1;
/// The descriptor on which a hand finds its end of the channel.
pub const CHANNEL_FD: i32 = 3;
/// The descriptor on which a hand finds its [`BootConfig`] as JSON.
pub const CONFIG_FD: i32 = 4;
/// Largest stdin, stdout, stderr or file chunk in one message.
pub const CHUNK_BYTES_MAX: usize = 64 * 1024;
/// Largest message that either side decodes: a `Start` with the longest argv and environment that Linux takes.
pub const MESSAGE_BYTES_MAX: usize = 4 * 1024 * 1024;
/// Largest boot configuration that a hand reads.
pub const BOOT_BYTES_MAX: u64 = 1024 * 1024;

/// What a hand is told at boot, as JSON in the memfd on [`CONFIG_FD`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BootConfig {
    /// [`BOOT_VERSION`].
    pub version: u32,
    /// Where the branch is mounted: the directory that commands start in and that file transfer is confined to.
    pub work_dir: String,
    /// Landlock: files below may be written, too. No path in either list: no Landlock, and the self-test says so.
    #[serde(default)]
    pub write_paths: Vec<String>,
    /// Landlock: files below may be read and executed.
    #[serde(default)]
    pub read_paths: Vec<String>,
    /// Paths that the self-test must find closed or absent.
    #[serde(default)]
    pub denied_paths: Vec<JsonBytes>,
    /// Largest file that `Put` takes and `Get` returns.
    #[serde(default = "file_bytes_max")]
    pub file_bytes_max: u64,
}

fn file_bytes_max() -> u64 {
    256 * 1024 * 1024
}

/// A boot configuration that a hand can't use.
#[derive(Debug, thiserror::Error)]
pub enum BootConfigError {
    /// It is not the JSON of a [`BootConfig`].
    #[error("the boot configuration can't be read")]
    Json(#[from] serde_json::Error),
    /// Runner and hand are of different releases.
    #[error("the boot configuration has version {found}, this hand knows {BOOT_VERSION}")]
    Version {
        /// What was found.
        found: u32,
    },
}

impl BootConfig {
    /// The plainest configuration: commands start in `work_dir`, no Landlock.
    pub fn new(work_dir: impl Into<String>) -> Self {
        BootConfig {
            version: BOOT_VERSION,
            work_dir: work_dir.into(),
            write_paths: Vec::new(),
            read_paths: Vec::new(),
            denied_paths: Vec::new(),
            file_bytes_max: file_bytes_max(),
        }
    }

    /// Decodes one and checks its version.
    pub fn from_json(json: &[u8]) -> Result<Self, BootConfigError> {
        let config: BootConfig = serde_json::from_slice(json)?;
        if config.version == BOOT_VERSION {
            Ok(config)
        } else {
            Err(BootConfigError::Version { found: config.version })
        }
    }

    /// The JSON that [`BootConfig::from_json`] reads.
    pub fn to_json(&self) -> Result<Vec<u8>, BootConfigError> {
        Ok(serde_json::to_vec(self)?)
    }
}

/// Decodes what the runner sends on an exec's stream. Pure: for fuzzing.
pub fn decode_exec_input(bytes: &[u8]) -> Result<ExecInput, prost::DecodeError> {
    prost::Message::decode(bytes)
}

/// Decodes what a hand sends on an exec's stream; a hostile hand may send anything. Pure: for fuzzing.
pub fn decode_exec_output(bytes: &[u8]) -> Result<ExecOutput, prost::DecodeError> {
    prost::Message::decode(bytes)
}
