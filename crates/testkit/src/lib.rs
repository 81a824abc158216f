//! Shared test helpers: what a test needs of the machine, fixtures, other users, built binaries. Dev only.

#![forbid(unsafe_code)]

pub mod fixtures;
pub mod kernel;
pub mod need;
pub mod process;
pub mod registry;
pub mod user;

pub use fixtures::{GitRepo, temp_dir, tree_of_files};
pub use need::{Need, have, have_all};
pub use process::{binary, wait_until};
pub use user::{OTHER_GID, OTHER_UID, as_other_user, private_mounts, rootless};
