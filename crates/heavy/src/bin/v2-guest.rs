//! What runs in the guest of `tests/v2_host.rs`: its first process, the cases, and the step from root to a user's session.

#![forbid(unsafe_code)]

use heavy::guest::{cases, host, init};

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.first().map(String::as_str) {
        Some("cases") => cases::run(),
        Some(host::ENTER) => host::enter(&args[1..]),
        Some(_) | None if std::process::id() == 1 => init::run(),
        Some(_) | None => panic!("this is the first process of a test's guest, and does nothing elsewhere"),
    }
}
