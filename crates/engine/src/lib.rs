//! Sessions and verify: the public library of the runner.
