//! The only crate with unsafe code: mounts, namespaces, spawning, limits.

pub mod supervise;
