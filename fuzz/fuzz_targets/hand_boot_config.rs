//! libFuzzer's entry to the target `hand_boot_config`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    heavy::fuzz::target("hand_boot_config")(data);
});
