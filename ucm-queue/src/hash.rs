//! A short hash for the queue's own tables.
//!
//! **Invariant:** nothing depends on the values; the seed differs between processes, so keys chosen
//! by somebody else do not collide by design.

use std::{
    hash::{BuildHasher, Hasher, RandomState},
    sync::OnceLock,
};

/// Table with the short hash.
pub(crate) type Map<K, V> = std::collections::HashMap<K, V, Mix>;

/// Makes [`Mixer`]s.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mix(u64);

impl Default for Mix {
    fn default() -> Self {
        static SEED: OnceLock<u64> = OnceLock::new();
        Self(*SEED.get_or_init(|| RandomState::new().hash_one(0)))
    }
}

impl BuildHasher for Mix {
    type Hasher = Mixer;

    fn build_hasher(&self) -> Mixer {
        Mixer(self.0)
    }
}

/// Folds words by multiplication.
#[derive(Debug)]
pub(crate) struct Mixer(u64);

impl Hasher for Mixer {
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            for (to, from) in word.iter_mut().zip(chunk) {
                *to = *from;
            }
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    fn write_u32(&mut self, word: u32) {
        self.write_u64(u64::from(word));
    }

    fn write_u64(&mut self, word: u64) {
        // A multiplication carries upwards only, so the rotation brings the mixed bits down again.
        self.0 = (self.0 ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29);
    }

    fn finish(&self) -> u64 {
        self.0.wrapping_mul(0x9E37_79B9_7F4A_7C15)
    }
}
