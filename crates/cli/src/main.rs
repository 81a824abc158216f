//! tendon: the command line, a client of the runner's socket.

fn main() {}
