//! tendond: the runner as a daemon on a unix socket.

fn main() {}
