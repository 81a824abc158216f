//! libFuzzer's entry to the target `tree_path`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    heavy::fuzz::target("tree_path")(data);
});
