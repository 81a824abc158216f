//! Bases, branches, capture, audit, diff and export: everything that keeps an agent's work. The design is in
//! `docs/design/001-spine.md`. This crate blocks; async callers use a blocking pool.

#![forbid(unsafe_code)]

mod audit;
mod blobs;
mod clock;
mod db;
mod entries;
mod key;
mod layout;
mod sql;
mod store;
mod tree;

pub use audit::{Actor, AuditCheck, AuditFilter, KeyError, LOG_ROWS_MAX};
pub use blobs::BlobError;
pub use clock::{Clock, SystemClock};
pub use db::DbError;
pub use entries::{Class, Entry, Kind, StatId};
pub use sql::{SqlError, SqlTable};
pub use store::{EngineChoice, OpenError, Store, StoreOptions};
pub use tree::TreeHasher;
