//! Fuzz targets for everything that comes from outside, and a small runner that needs no special compiler.
//!
//! The same targets are run with coverage by libFuzzer: see `fuzz/`. The runner here mutates the seeds and keeps each input
//! whose outcome (the error's words, say) it has not seen, so that it gets past the first check of a parser.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use prost::Message as _;
use proto::hand::{
    EnvVar, ExecInput, ExecOutput, Exited, Start, WindowSize, exec_input, exec_output, exited,
};

use crate::random::Random;

/// Inputs are cut to this: a longer one finds nothing that a shorter one does not.
const INPUT_BYTES_MAX: usize = 4096;
/// Inputs that the runner keeps to mutate.
const CORPUS_MAX: usize = 2000;

/// One thing to feed bytes to.
pub struct Target {
    /// Its name, also of the libFuzzer target.
    pub name: &'static str,
    /// Inputs to start from: well-formed ones.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Takes any bytes; must return, and not panic. Returns a word for what happened.
    pub run: fn(&[u8]) -> String,
}

/// All targets.
pub const TARGETS: &[Target] = &[
    Target { name: "tree_path", seeds: path_seeds, run: tree_path },
    Target { name: "verify_request", seeds: request_seeds, run: verify_request },
    Target { name: "spec", seeds: spec_seeds, run: spec },
    Target { name: "command_line", seeds: command_seeds, run: command_line },
    Target { name: "hand_exec_input", seeds: exec_input_seeds, run: hand_exec_input },
    Target { name: "hand_exec_output", seeds: exec_output_seeds, run: hand_exec_output },
    Target { name: "hand_boot_config", seeds: boot_seeds, run: hand_boot_config },
];

/// The function of the target `name`, which is in [`TARGETS`].
pub fn target(name: &str) -> fn(&[u8]) -> String {
    let found = TARGETS.iter().find(|target| target.name == name);
    found.unwrap_or_else(|| panic!("there is no fuzz target `{name}`")).run
}

/// Runs a target for `duration`; returns how many inputs it took. Panics with the input that made the target panic.
pub fn run(target: &Target, duration: Duration, seed: u64) -> u64 {
    let mut random = Random::new(seed);
    let mut corpus = (target.seeds)();
    let mut outcomes = BTreeSet::new();
    let end = Instant::now() + duration;
    let mut runs = 0;
    while Instant::now() < end {
        let input = mutate(&corpus, &mut random);
        match catch_unwind(AssertUnwindSafe(|| (target.run)(&input))) {
            Ok(outcome) => {
                if corpus.len() < CORPUS_MAX && outcomes.insert(outcome) {
                    corpus.push(input);
                }
            }
            Err(_) => panic!("{} panics (seed {seed}) on {}", target.name, show(&input)),
        }
        runs += 1;
    }
    runs
}

fn mutate(corpus: &[Vec<u8>], random: &mut Random) -> Vec<u8> {
    let mut input = corpus[random.below(corpus.len())].clone();
    for _ in 0..=random.below(4) {
        mutate_once(&mut input, corpus, random);
    }
    input.truncate(INPUT_BYTES_MAX);
    input
}

fn mutate_once(input: &mut Vec<u8>, corpus: &[Vec<u8>], random: &mut Random) {
    const ODD: &[&[u8]] = &[
        b"\0",
        b"\xff",
        b"..",
        b"/",
        b"\"",
        b"'",
        b"\\",
        b"\n",
        b"[",
        b"]",
        b"{",
        b"}",
        b"=",
        b"-1",
        b"1e400",
        b"18446744073709551616",
        b"\xe2\x80\xae",
    ];
    let at = random.below(input.len() + 1);
    let end = at + random.below(input.len() + 1 - at);
    match random.below(7) {
        0 if at < input.len() => input[at] ^= 1 << random.below(8),
        1 if at < input.len() => input[at] = random.bits() as u8,
        2 => drop(input.drain(at..end)),
        3 => drop(input.splice(at..at, ODD[random.below(ODD.len())].iter().copied())),
        4 => {
            let piece = input[at..end].to_vec();
            drop(input.splice(at..at, piece));
        }
        5 => {
            let other = &corpus[random.below(corpus.len())];
            let from = random.below(other.len() + 1);
            let to = from + random.below(other.len() + 1 - from);
            drop(input.splice(at..end, other[from..to].iter().copied()));
        }
        _ => input.truncate(at.max(1)),
    }
}

/// An input as a Rust byte string.
fn show(input: &[u8]) -> String {
    format!("b\"{}\"", input.escape_ascii())
}

/// The start of an error's text without what it quotes: what makes one outcome differ from another.
fn outcome<T>(result: Result<T, impl std::fmt::Display>) -> String {
    let Err(error) = result else { return "accepted".to_owned() };
    error.to_string().chars().filter(char::is_ascii_alphabetic).take(60).collect()
}

fn path_seeds() -> Vec<Vec<u8>> {
    vec![b"src/main.rs".to_vec(), b"a\nb/\xff".to_vec(), b"..".to_vec()]
}

fn tree_path(data: &[u8]) -> String {
    let parsed = proto::path::TreePath::new(data);
    if let Ok(path) = &parsed {
        assert!(!path.to_string().contains(char::is_control), "a printed path obeys no terminal");
    }
    outcome(parsed)
}

fn request_seeds() -> Vec<Vec<u8>> {
    let texts = [
        r#"{"source":{"kind":"git","repo":"/r","ref":"main"},"checks":[["cargo","test"]],"limits":{"cpu_milli":1500}}"#,
        r#"{"source":{"kind":"directory","path":{"base64":"L3I="},"include_ignored":true},"setup":[["a"]],"checks":[["b"]]}"#,
        r#"{"source":{"kind":"files","files":[{"path":"a/b","content":"x","executable":true}]},"checks":[["b"]],"env":[["A","b"]]}"#,
    ];
    texts.iter().map(|text| text.as_bytes().to_vec()).collect()
}

fn verify_request(data: &[u8]) -> String {
    let parsed = serde_json::from_slice::<proto::verify::VerifyRequest>(data);
    if let Ok(request) = &parsed {
        let again = serde_json::to_vec(request).and_then(|json| serde_json::from_slice(&json));
        assert!(
            again.is_ok_and(|again: proto::verify::VerifyRequest| again == *request),
            "it survives a round trip"
        );
    }
    outcome(parsed)
}

fn spec_seeds() -> Vec<Vec<u8>> {
    let texts = [
        "checks = [\"cargo test\"]",
        "setup = [\"npm ci\"]\nchecks = [\"npm test\", [\"sh\", \"-c\", \"a | b\"]]\nkeep_going = true\n[env]\nCI = \"1\"",
        "checks = [\"a\"]\nsource = { repo = \"https://x.test/a\", ref = \"v1\" }\n[limits]\ncpus = 1.5\nmemory = \"2GiB\"\ntimeout = \"1h30m\"",
        "checks = [\"sh run.sh 'a b' c\\\\ d\"]\nsource = { files = { \"run.sh\" = \"#!/bin/sh\" } }",
    ];
    texts.iter().map(|text| text.as_bytes().to_vec()).collect()
}

fn spec(data: &[u8]) -> String {
    let text = String::from_utf8_lossy(data);
    let parsed = proto::spec::parse_spec(&text, std::path::Path::new("/project"));
    if let Ok(request) = &parsed {
        for argv in request.setup.iter().chain(&request.checks) {
            assert!(!argv[0].is_empty(), "no command is empty");
            let line = proto::spec::command::join_command(argv);
            assert_eq!(
                proto::spec::split_command(&line).as_ref(),
                Ok(argv),
                "a command survives being shown"
            );
        }
    }
    outcome(parsed)
}

fn command_seeds() -> Vec<Vec<u8>> {
    vec![b"cargo test --all".to_vec(), b"sh -c 'a \"b\" c' \\ d".to_vec(), b"a \"b $c\" | d > e".to_vec()]
}

fn command_line(data: &[u8]) -> String {
    let split = proto::spec::split_command(&String::from_utf8_lossy(data));
    if let Ok(argv) = &split {
        assert!(argv.first().is_some_and(|program| !program.is_empty()), "a command has a program");
        assert!(argv.iter().all(|word| !word.contains('\0')), "no word holds a NUL");
    }
    outcome(split)
}

fn exec_input_seeds() -> Vec<Vec<u8>> {
    let start = Start {
        exec: "ex-0123456789abcdef".to_owned(),
        argv: vec![b"sh".to_vec().into(), b"-c".to_vec().into(), b"exit 3".to_vec().into()],
        cwd: b"sub/dir".to_vec().into(),
        env: vec![EnvVar { name: b"PATH".to_vec().into(), value: b"/usr/bin:/bin".to_vec().into() }],
        pty: Some(WindowSize { rows: 24, cols: 80 }),
        stdin: true,
        wall_ms_max: 1000,
    };
    let inputs = [exec_input::Input::Start(start), exec_input::Input::Stdin(b"some input".to_vec().into())];
    inputs.map(|input| ExecInput { input: Some(input) }.encode_to_vec()).to_vec()
}

/// What the runner sends: decoded, and checked as a hand does before it starts anything.
fn hand_exec_input(data: &[u8]) -> String {
    match proto::hand::decode_exec_input(data) {
        Ok(ExecInput { input: Some(exec_input::Input::Start(start)) }) => outcome(hand::plan::check(start)),
        decoded => outcome(decoded),
    }
}

fn exec_output_seeds() -> Vec<Vec<u8>> {
    let ended = Exited {
        cpu_ms: 7,
        rss_bytes_max: 1 << 20,
        wall_ms: 9,
        lingering: true,
        processes_full: true,
        program_missing: false,
        how: Some(exited::How::NotStarted("no such program".to_owned())),
    };
    let outputs = [exec_output::Output::Stdout(b"out".to_vec().into()), exec_output::Output::Exited(ended)];
    outputs.map(|output| ExecOutput { output: Some(output) }.encode_to_vec()).to_vec()
}

/// What a hand sends, a hostile one too.
fn hand_exec_output(data: &[u8]) -> String {
    outcome(proto::hand::decode_exec_output(data))
}

fn boot_seeds() -> Vec<Vec<u8>> {
    let mut config = proto::hand::BootConfig::new("/work");
    config.write_paths = vec!["/work".to_owned(), "/tmp".to_owned()];
    vec![config.to_json().unwrap_or_default(), b"{\"version\":2,\"work_dir\":\"\"}".to_vec()]
}

fn hand_boot_config(data: &[u8]) -> String {
    outcome(proto::hand::BootConfig::from_json(data))
}
