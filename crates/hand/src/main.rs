//! The agent inside every hand: runs commands and moves files for the runner.

fn main() {}
