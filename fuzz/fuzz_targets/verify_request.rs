//! libFuzzer's entry to the target `verify_request`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    heavy::fuzz::target("verify_request")(data);
});
