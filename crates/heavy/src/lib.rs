//! Heavy tests and the machinery under them: a disk that loses power, runners that are killed, a command line driver.
//! Dev only; nothing links this.

#![forbid(unsafe_code)]

pub mod disk;
pub mod mount;
pub mod random;
