//! Set-up, demo, tests, benchmarks and soak of this workspace.

fn main() {}
