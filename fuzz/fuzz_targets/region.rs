//! Scripts of writes into a control region and of calls on it: see `ucm_ctrl::testing::abuse`.

#![no_main]

libfuzzer_sys::fuzz_target!(|script: &[u8]| {
    let _ = ucm_ctrl::testing::abuse(script);
});
