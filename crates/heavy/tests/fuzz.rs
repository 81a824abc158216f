//! A brief run of every fuzz target. `FUZZ_SECONDS` makes it longer; `fuzz/` has the same targets for libFuzzer.

use std::time::Duration;

use heavy::fuzz::{TARGETS, run};
use heavy::random::Random;

#[test]
fn no_input_makes_a_parser_panic() {
    let seconds = heavy::count("FUZZ_SECONDS", 5) as u64;
    let seed = Random::seed();
    std::thread::scope(|scope| {
        let runs =
            TARGETS.iter().map(|target| scope.spawn(move || run(target, Duration::from_secs(seconds), seed)));
        for (target, thread) in TARGETS.iter().zip(runs.collect::<Vec<_>>()) {
            let runs = thread.join().expect("a target panicked: its input is printed above");
            assert!(runs > 100, "{}: only {runs} inputs", target.name);
        }
    });
}

#[test]
fn the_runner_finds_a_panic() {
    let target = heavy::fuzz::Target {
        name: "bad",
        seeds: || vec![b"abc".to_vec()],
        run: |data| {
            assert!(!data.contains(&0xff), "planted");
            String::new()
        },
    };
    let found = std::panic::catch_unwind(|| run(&target, Duration::from_secs(20), 1));
    assert!(found.is_err(), "20 s of mutations never made a byte 0xff");
}

#[test]
fn libfuzzer_has_every_target() {
    let manifest = include_str!("../../../fuzz/Cargo.toml");
    for target in TARGETS {
        assert!(manifest.contains(&format!("path = \"fuzz_targets/{}.rs\"", target.name)), "{}", target.name);
    }
}
