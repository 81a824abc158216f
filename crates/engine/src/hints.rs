//! What would help when a command failed for want of a network, or of room. Pure: how it ended and the end of its output
//! in, a sentence out.

use proto::path::JsonBytes;
use proto::units::show_bytes;
use proto::verify::{CommandReport, Outcome};

/// What a package client writes when it may not ask the network, and what fills its place on the host.
const OFFLINE: [(&str, &str); 5] = [
    ("No matching distribution found for", PIP),
    ("ENOTCACHED", NPM),
    ("cache mode is 'only-if-cached'", NPM),
    ("you're using offline mode", CARGO),
    ("but --offline was specified", CARGO),
];
const PIP: &str = "pip has no network here: put the packages into ~/.cache/tendon/wheels of the user that runs tendon, \
                   with `pip download --dest ~/.cache/tendon/wheels …` (setuptools too, to build some); a runner that runs already sees them after `tendon runner stop`";
const NPM: &str =
    "npm has no network here, and its cache lacks a package: install once outside, with `npm ci`";
const CARGO: &str =
    "cargo has no network here, and its registry lacks a crate: fetch once outside, with `cargo fetch`";

/// The hint for a command that failed.
pub(crate) fn offline(report: &CommandReport) -> Option<&'static str> {
    if report.outcome.passed() {
        return None;
    }
    let tails = [&report.stderr.tail, &report.stdout.tail].into_iter().flatten();
    let texts: Vec<Vec<u8>> = tails.filter_map(|tail| JsonBytes::decode(tail).ok()).collect();
    let texts: Vec<_> = texts.iter().map(|text| String::from_utf8_lossy(text)).collect();
    let said = |words: &str| texts.iter().any(|text| text.contains(words));
    OFFLINE.iter().find(|(words, _)| said(words)).map(|(_, hint)| *hint)
}

/// The hint for a shell whose command wanted a larger file than there may be: the shell says so with a status of its own.
pub(crate) fn file_size(outcome: &Outcome, disk_bytes_max: u64) -> Option<String> {
    const SIGXFSZ: i32 = 25;
    (*outcome == Outcome::Exited { code: 128 + SIGXFSZ }).then(|| {
        let most = show_bytes(disk_bytes_max);
        format!(
            "a file was to become larger than the disk limit, {most}, which holds for each file, in /tmp too"
        )
    })
}
