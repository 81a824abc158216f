//! Heavy tests and the machinery under them: a disk that loses power, runners that are killed, a command line driver.
//! Dev only; nothing links this.

#![forbid(unsafe_code)]

pub mod acks;
pub mod disk;
pub mod fuzz;
pub mod guest;
pub mod leftovers;
pub mod mount;
pub mod random;
pub mod tendon;
pub mod vm;
pub mod workload;

/// A count that a soak raises by the environment: `name`'s value, else `default`.
pub fn count(name: &str, default: usize) -> usize {
    testkit::process::variable(name).and_then(|text| text.parse().ok()).unwrap_or(default)
}
