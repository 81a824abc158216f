//! What runs in the guest of the test of version 2 of control groups. It touches the whole machine: never run it on one
//! that is not the test's.

pub mod cases;
pub mod host;
pub mod init;
