//! Bases, branches, capture, audit, diff and export: everything that keeps an agent's work. The design is in
//! `docs/design/001-spine.md`. This crate blocks; async callers use a blocking pool.

#![forbid(unsafe_code)]

mod base;
mod blobs;
mod clock;
mod db;
mod entries;
pub mod git;
mod layout;
mod store;
mod tree;

pub use base::{BaseError, DirSource, FreezeError, GcError, GcReport, GitSource};
pub use blobs::BlobError;
pub use clock::{Clock, SystemClock};
pub use db::DbError;
pub use entries::{Class, Entry, Kind, StatId};
pub use store::{EngineChoice, OpenError, Store, StoreOptions};
pub use tree::TreeHasher;
