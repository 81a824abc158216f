//! Ids, error codes, wire and disk records of tendon, and the socket client. Nothing of ours lies below this crate.

#![forbid(unsafe_code)]

pub mod api;
#[cfg(feature = "client")]
pub mod client;
pub mod error;
#[cfg(feature = "hand")]
pub mod hand;
pub mod http;
pub mod ids;
pub mod nearest;
pub mod path;
pub mod place;
pub mod repo;
#[cfg(feature = "spec")]
pub mod spec;
pub mod units;
pub mod verify;
