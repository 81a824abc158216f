//! The only crate with unsafe code: mounts, namespaces, spawning, limits.

pub mod idmap;
pub mod ns;
pub mod spawn;
pub mod supervise;
