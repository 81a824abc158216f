//! What is measured on: generated trees, repositories and archives, and real packages fetched from their registries
//! when the benchmark runs.

mod packages;
mod trees;

pub(crate) use packages::{cargo_project, npm_project};
pub(crate) use trees::{archive, repository, tree};
