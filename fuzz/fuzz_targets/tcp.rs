//! What peers say over tcp: every message of the handshake, heads, trailers and bodies.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    // Says how many messages the bytes are; asserts that those are written as they were read.
    let _ = ucm_transport::testing::tcp_frames(bytes);
});
