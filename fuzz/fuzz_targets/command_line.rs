//! libFuzzer's entry to the target `command_line`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    heavy::fuzz::target("command_line")(data);
});
