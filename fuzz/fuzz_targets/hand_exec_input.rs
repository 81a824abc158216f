//! libFuzzer's entry to the target `hand_exec_input`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    heavy::fuzz::target("hand_exec_input")(data);
});
