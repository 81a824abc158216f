//! What takes long and is not part of CI: benchmarks, soak, fuzzing.

use crate::check::nextest;
use crate::setup::{For, setup};
use crate::shell::{Failure, cargo, run, step};

/// Builds everything with optimisation and measures. `args` go to the benchmark program.
pub fn bench(args: &[String]) -> Result<(), Failure> {
    setup(For::Tests)?;
    step("Release build");
    run(&mut cargo(&["build", "--release", "--workspace", "--bins"]))?;
    step("Measurements");
    run(cargo(&["run", "--release", "--quiet", "--package", "bench", "--"]).args(args))
}

/// The heavy tests at full length. `args` go to the test runner.
pub fn soak(args: &[String]) -> Result<(), Failure> {
    setup(For::Tests)?;
    run(&mut cargo(&["build", "--workspace", "--bins"]))?;
    step("Soak: hours rather than minutes");
    let mut model = tests("vfs");
    run(model.arg("stores_behave_like_maps_whatever_happens").env("MODEL_CASES", "500"))?;
    let mut soak = tests("heavy");
    for (name, value) in
        [("HEAVY_IMAGES", "100"), ("HEAVY_SECONDS", "40"), ("HEAVY_KILLS", "200"), ("FUZZ_SECONDS", "300")]
    {
        soak.env(name, value);
    }
    run(soak.args(args))
}

/// The fuzz targets for `SECONDS`.
pub fn fuzz(args: &[String]) -> Result<(), Failure> {
    let seconds = args.first().map_or("10", String::as_str);
    if seconds.parse::<u32>().is_err() {
        return Err(Failure::new(format!("`{seconds}` is not a number of seconds")));
    }
    let mut fuzz = tests("heavy");
    run(fuzz.args(["--test", "fuzz"]).env("FUZZ_SECONDS", seconds))
}

/// The test runner over one package, without limits of time, which cargo's own runner has not.
fn tests(package: &str) -> std::process::Command {
    if nextest() {
        cargo(&["nextest", "run", "--profile", "soak", "--package", package])
    } else {
        cargo(&["test", "--package", package])
    }
}
