//! The only crate with unsafe code: mounts, namespaces, spawning, limits.

mod child;
pub mod facts;
pub mod idmap;
pub mod mount;
pub mod ns;
pub mod reflink;
pub mod spawn;
pub mod supervise;
