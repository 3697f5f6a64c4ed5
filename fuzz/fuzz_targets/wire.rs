//! What other processes say: rendezvous messages and the geometry of segments.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    // What was understood once is understood again, and says the same.
    if let Ok(again) = ucm_data::testing::parse_message(bytes) {
        assert_eq!(ucm_data::testing::parse_message(&again).unwrap(), again);
    }
    if let Ok(geometry) = ucm_data::Geometry::decode(bytes) {
        assert_eq!(ucm_data::Geometry::decode(&geometry.encode()).unwrap(), geometry);
    }
});
