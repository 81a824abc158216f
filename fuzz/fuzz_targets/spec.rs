//! libFuzzer's entry to the target `spec`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    heavy::fuzz::target("spec")(data);
});
