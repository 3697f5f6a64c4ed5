//! Payload that tells where every byte came from.

/// Words derived from (slot, generation, offset); `bytes` starts at a multiple of 8.
pub(crate) fn fill(bytes: &mut [u8], slot: u32, generation: u64, offset: u64) {
    for (word, at) in bytes.chunks_mut(8).zip((offset..).step_by(8)) {
        let text = value(slot, generation, at).to_le_bytes();
        word.copy_from_slice(&text[..word.len()]);
    }
}

/// Whether these are the bytes of (slot, generation) from `offset` on.
pub(crate) fn is(bytes: &[u8], slot: u32, generation: u64, offset: u64) -> bool {
    let mut expected = vec![0; bytes.len()];
    fill(&mut expected, slot, generation, offset);
    bytes == expected
}

fn value(slot: u32, generation: u64, at: u64) -> u64 {
    let x = (u64::from(slot) << 40) ^ (generation << 32) ^ at ^ 0x9E37_79B9_7F4A_7C15;
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x ^ (x >> 27)
}
