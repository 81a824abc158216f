//! Bases, branches, capture, audit, diff and export: everything that keeps an agent's work. The design is in
//! `docs/design/001-spine.md`. This crate blocks; async callers use a blocking pool.

#![forbid(unsafe_code)]

mod audit;
mod base;
mod beneath;
mod blobs;
mod branch;
mod captured;
mod clock;
mod content;
mod db;
mod diff;
mod drop;
mod edit;
mod engine;
mod entries;
mod export;
mod flatten;
mod fork;
pub mod git;
mod gitattr;
mod gitname;
mod gitref;
mod hashing;
mod history;
mod key;
mod layout;
pub mod limits;
mod live;
#[cfg(test)]
mod model_tests;
mod patch;
mod recover;
mod repair;
mod replace;
mod reserve;
mod rules;
mod scan;
mod sql;
mod store;
mod times;
mod tree;
mod walk;
mod witness;
#[cfg(test)]
mod world;

pub use audit::{ACTORS_MAX, Actor, AuditCheck, AuditFilter, KeyError, LOG_ROWS_MAX};
pub use base::{BaseError, Cancel, DirSource, FreezeError, GcError, GcReport, GitSource};
pub use beneath::{BeneathError, DiskUse, FileKind, FileStat};
pub use blobs::BlobError;
pub use branch::{BranchAtError, BranchError, CreateError, ForkBusy, MountError, NameError};
pub use captured::Uncaptured;
pub use clock::{Clock, SystemClock};
pub use content::{Content, ContentError};
pub use db::DbError;
pub use diff::{DiffError, DiffFormat};
pub use drop::DropError;
pub use edit::{DirEntry, EditError, Editor};
pub use engine::Root;
pub use entries::{Class, Entry, Kind, StatId};
pub use export::{ExportError, ExportReport, ExportTarget, GitRef};
pub use flatten::FlattenError;
pub use fork::ForkError;
pub use history::{AtError, HistoryError};
pub use layout::is_foreign;
pub use recover::{RecoverError, RecoveryReport};
pub use reserve::release_reserve_to_start;
pub use scan::{ScanError, ScanReport, Writers};
pub use sql::{SqlError, SqlTable};
pub use store::{EngineChoice, OpenError, Store, StoreOptions};
pub use tree::TreeHasher;
