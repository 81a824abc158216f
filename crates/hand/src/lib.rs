//! The agent inside every hand: runs commands and moves files for the runner. It is the first process of its sandbox, has
//! one thread, and trusts nothing that the code it runs can touch.

#![forbid(unsafe_code)]

pub mod boot;
pub mod confine;
pub mod exec;
pub mod files;
pub mod limits;
pub mod plan;
pub mod selftest;
pub mod serve;
pub mod table;
pub mod tree;
