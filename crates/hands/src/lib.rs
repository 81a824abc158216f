//! Tiers, hand supervision and limits: from a grant and a branch to a hand that runs commands.

#![forbid(unsafe_code)]

mod anchor;
mod cgroup;
mod generated;
mod hand;
mod hands;
mod limits;
pub mod link;
pub mod probe;
mod seccomp;
mod selftest;
mod spawner;
mod tier;
mod toolchains;
mod transport;
mod usage;
pub mod warden;

pub use hand::{Exec, FreezeError, Hand};
pub use hands::{BootError, HandSpec, Hands, HandsError, HandsOptions};
pub use link::{ExecControl, ExecEvent, ExecSpec, ExecStdin, FileContent, LinkError, Size, Stdin};
