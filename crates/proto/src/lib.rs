//! Ids, error codes, wire and disk records of tendon, and the socket client. Nothing of ours lies below this crate.

#![forbid(unsafe_code)]

pub mod api;
pub mod error;
#[cfg(feature = "hand")]
pub mod hand;
pub mod ids;
pub mod path;
pub mod verify;
