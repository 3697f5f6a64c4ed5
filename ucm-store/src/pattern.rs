//! Deterministic payloads: every word of every object is known, so every byte can be verified, and
//! a wrong word tells where it came from.
//!
//! **Invariant:** the pattern of (block, shard, generation) never changes between versions; tests
//! of different processes rely on it.

use std::fmt;

/// Odd, so that it has an inverse and neighbouring words differ in all bytes.
const STEP: u64 = 0x9E37_79B9_7F4A_7C15;
/// `STEP * STEP_INVERSE == 1 (mod 2^64)`.
const STEP_INVERSE: u64 = inverse(STEP);
const WORD: usize = 8;
/// Shards and generations tried to explain a wrong word.
const GUESSES: u64 = 4096;

/// The 64-bit word at word offset `offset_words` (8 bytes each) of an object.
#[must_use]
pub fn pattern_word(block: &[u8; 16], shard: u32, offset_words: u64, generation: u64) -> u64 {
    word_at(seed(block, shard, generation), offset_words)
}

/// Fills `into` with the words from `first_word` on, little-endian; a rest shorter than a word
/// gets the first bytes of its word.
pub fn fill_pattern(
    into: &mut [u8],
    block: &[u8; 16],
    shard: u32,
    first_word: u64,
    generation: u64,
) {
    fill_seeded(into, seed(block, shard, generation), first_word);
}

/// Compares `bytes` with the pattern from word `first_word` on.
///
/// # Errors
/// The first wrong word, and what it seems to be.
pub fn verify_pattern(
    bytes: &[u8],
    block: &[u8; 16],
    shard: u32,
    first_word: u64,
    generation: u64,
) -> Result<(), PatternMismatch> {
    let seed = seed(block, shard, generation);
    let mut expected = [0u8; 4096];
    let mut word = first_word;
    for chunk in bytes.chunks(expected.len()) {
        let (expected, _) = expected.split_at_mut(chunk.len());
        fill_seeded(expected, seed, word);
        if chunk != expected {
            let pairs = chunk.chunks(WORD).zip(expected.chunks(WORD)).zip(0u64..);
            for ((found, wanted), i) in pairs {
                if found != wanted {
                    let (expected, found) = (le_word(wanted), le_word(found));
                    let offset_words = word + i;
                    let seems = explain(found, block, shard, offset_words, generation);
                    return Err(PatternMismatch { offset_words, expected, found, seems });
                }
            }
        }
        word += (chunk.len() / WORD) as u64;
    }
    Ok(())
}

/// The first wrong word of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PatternMismatch {
    /// Its offset in words of 8 bytes from the start of the object.
    pub offset_words: u64,
    /// The word that should be there (the last one of an object may be shorter).
    pub expected: u64,
    /// The word that is there.
    pub found: u64,
    /// Where that word would belong.
    pub seems: Seems,
}

/// What a wrong word seems to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Seems {
    /// Never written.
    Zero,
    /// The right object, another place: this word offset.
    Offset(u64),
    /// The same block, another shard: (shard, word offset).
    Shard(u32, u64),
    /// The same object in another generation: (generation, word offset).
    Generation(u64, u64),
    /// Foreign bytes.
    Foreign,
}

impl fmt::Display for PatternMismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { offset_words, expected, found, seems } = self;
        write!(f, "word {offset_words} is {found:#018x} instead of {expected:#018x}: ")?;
        match seems {
            Seems::Zero => write!(f, "zero, it seems never written"),
            Seems::Offset(at) => write!(f, "it belongs to word {at} of the same object"),
            Seems::Shard(shard, at) => write!(f, "it belongs to word {at} of shard {shard}"),
            Seems::Generation(g, at) => write!(f, "it belongs to word {at} of generation {g}"),
            Seems::Foreign => write!(f, "foreign bytes"),
        }
    }
}

impl std::error::Error for PatternMismatch {}

fn seed(block: &[u8; 16], shard: u32, generation: u64) -> u64 {
    let id = u128::from_le_bytes(*block);
    #[expect(clippy::cast_possible_truncation, reason = "the two halves of 128 bits")]
    let (low, high) = (id as u64, (id >> 64) as u64);
    let key = mix(low ^ mix(high ^ mix(u64::from(shard) ^ 0xA5A5_5A5A_0000_0000)));
    mix(key ^ mix(generation.wrapping_add(STEP)))
}

fn word_at(seed: u64, offset_words: u64) -> u64 {
    seed.wrapping_add(offset_words.wrapping_mul(STEP))
}

/// The finaliser of SplitMix64.
fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

fn fill_seeded(into: &mut [u8], seed: u64, first_word: u64) {
    let mut word = word_at(seed, first_word);
    let mut words = into.chunks_exact_mut(WORD);
    for out in &mut words {
        out.copy_from_slice(&word.to_le_bytes());
        word = word.wrapping_add(STEP);
    }
    for (out, byte) in words.into_remainder().iter_mut().zip(word.to_le_bytes()) {
        *out = byte;
    }
}

fn le_word(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |word, b| (word << 8) | u64::from(*b))
}

fn explain(found: u64, block: &[u8; 16], shard: u32, at: u64, generation: u64) -> Seems {
    // A place is believable within the largest object: 2^32 words are 32 GiB.
    let place = |seed: u64| {
        let offset = found.wrapping_sub(seed).wrapping_mul(STEP_INVERSE);
        (offset < 1 << 32).then_some(offset)
    };
    if found == 0 {
        return Seems::Zero;
    }
    if let Some(offset) = place(seed(block, shard, generation)).filter(|o| *o != at) {
        return Seems::Offset(offset);
    }
    let near = generation.saturating_sub(GUESSES / 2);
    for g in (near..near.saturating_add(GUESSES)).filter(|g| *g != generation) {
        if let Some(offset) = place(seed(block, shard, g)) {
            return Seems::Generation(g, offset);
        }
    }
    for s in (0..4096).filter(|s| *s != shard) {
        if let Some(offset) = place(seed(block, s, generation)) {
            return Seems::Shard(s, offset);
        }
    }
    Seems::Foreign
}

/// Newton's iteration for the inverse of an odd number modulo 2^64.
const fn inverse(odd: u64) -> u64 {
    let mut x = odd;
    let mut round = 0;
    while round < 6 {
        x = x.wrapping_mul(2u64.wrapping_sub(odd.wrapping_mul(x)));
        round += 1;
    }
    x
}

#[cfg(test)]
mod tests {
    use super::*;

    const B: [u8; 16] = *b"0123456789abcdef";

    fn filled(len: usize, first_word: u64) -> Vec<u8> {
        let mut bytes = vec![0; len];
        fill_pattern(&mut bytes, &B, 3, first_word, 5);
        bytes
    }

    #[test]
    fn fill_matches_words_and_parts_match_the_whole() {
        assert_eq!(STEP.wrapping_mul(STEP_INVERSE), 1);
        let bytes = filled(8203, 0);
        for (i, chunk) in (0u64..).zip(bytes.chunks_exact(8)) {
            assert_eq!(chunk, pattern_word(&B, 3, i, 5).to_le_bytes());
        }
        assert_eq!(bytes[8200..], pattern_word(&B, 3, 1025, 5).to_le_bytes()[..3]);
        assert_eq!(filled(4000, 100), bytes[800..4800]);
        verify_pattern(&bytes, &B, 3, 0, 5).unwrap();
        verify_pattern(&bytes[800..], &B, 3, 100, 5).unwrap();
        verify_pattern(&[], &B, 3, 0, 5).unwrap();
    }

    #[test]
    fn the_pattern_is_frozen() {
        assert_eq!(pattern_word(&[0; 16], 0, 0, 0), FROZEN[0]);
        assert_eq!(pattern_word(&B, 3, 7, 5), FROZEN[1]);
    }

    const FROZEN: [u64; 2] = [16416542381901309182, 217226868202854085];

    #[test]
    fn every_wrong_byte_is_found() {
        let good = filled(4099, 0);
        for at in (0..good.len()).step_by(61).chain([4096, 4098]) {
            let mut bad = good.clone();
            bad[at] ^= 0x10;
            let found = verify_pattern(&bad, &B, 3, 0, 5).unwrap_err();
            assert_eq!(found.offset_words, at as u64 / 8);
            assert_ne!(found.expected, found.found);
        }
    }

    #[test]
    fn wrong_words_say_what_they_seem_to_be() {
        let seems = |word: u64| {
            let mut bytes = filled(8192, 0);
            bytes[4800..4808].copy_from_slice(&word.to_le_bytes());
            let found = verify_pattern(&bytes, &B, 3, 0, 5).unwrap_err();
            assert_eq!((found.offset_words, found.found), (600, word));
            found.seems
        };
        assert_eq!(seems(0), Seems::Zero);
        assert_eq!(seems(pattern_word(&B, 3, 601, 5)), Seems::Offset(601));
        assert_eq!(seems(pattern_word(&B, 77, 600, 5)), Seems::Shard(77, 600));
        assert_eq!(seems(pattern_word(&B, 3, 600, 4)), Seems::Generation(4, 600));
        assert_eq!(seems(pattern_word(&[7; 16], 3, 600, 5)), Seems::Foreign);
    }
}
