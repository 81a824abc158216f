//! The runner as a library: verify, execs on branches, configuration. `server` puts it on a socket. Start at [`verify`].

#![forbid(unsafe_code)]

mod below;
pub mod config;
mod disk;
mod doctor;
pub mod exec;
mod fit;
mod hints;
mod id;
pub mod limits;
mod logs;
mod meter;
mod recent;
mod record;
mod runner;
pub mod verify;
mod warm;

pub use below::Below;
pub use runner::{Blocking, Runner, RunnerOptions};
