//! Which objects were used lately: two Bloom filters, of which the older one is forgotten.
//!
//! **Invariant:** what was noted among the last `window` different objects is known; what never was is
//! taken for known once in a hundred times, at most.

/// Bits for each object, and bits set for it: one wrong answer in a hundred.
const BITS: u64 = 10;
const HASHES: u64 = 7;

/// The filters.
#[derive(Debug)]
pub(super) struct Seen {
    window: u64,
    young: Vec<u64>,
    old: Vec<u64>,
    /// Objects in the young one.
    noted: u64,
}

impl Seen {
    pub(super) fn new(window: u64) -> Self {
        let words = usize::try_from((window * BITS).div_ceil(64)).unwrap_or(1).max(1);
        Self { window, young: vec![0; words], old: vec![0; words], noted: 0 }
    }

    /// Notes an object; says whether it was known.
    pub(super) fn note(&mut self, hash: u64) -> bool {
        let bits = self.young.len() as u64 * 64;
        let step = hash.rotate_right(32) | 1;
        let place = |n: u64| {
            let bit = hash.wrapping_add(n.wrapping_mul(step)) % bits;
            (usize::try_from(bit / 64).unwrap_or(0), 1_u64 << (bit % 64))
        };
        let (mut young, mut old) = (true, true);
        for (word, bit) in (0..HASHES).map(place) {
            old &= self.old.get(word).is_some_and(|w| w & bit != 0);
            if let Some(word) = self.young.get_mut(word) {
                young &= *word & bit != 0;
                *word |= bit;
            }
        }
        if !young {
            self.noted += 1;
            if self.noted >= self.window {
                std::mem::swap(&mut self.young, &mut self.old);
                self.young.fill(0);
                self.noted = 0;
            }
        }
        young || old
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::SplitMix;

    /// Broken on purpose: the old filter is not asked; nothing is ever forgotten; two hashes instead of
    /// seven.
    #[test]
    fn the_window_is_known_and_the_rest_forgotten() {
        let mut seen = Seen::new(1000);
        let mut random = SplitMix::new(7);
        let keys: Vec<u64> = (0..5000).map(|_| random.next()).collect();
        let wrong = keys.iter().filter(|key| seen.note(**key)).count();
        assert!(wrong < 100, "{wrong} of 5000 new objects taken for known");
        assert!(keys[4001..].iter().all(|key| seen.note(*key)), "the last thousand");
        let mut seen = Seen::new(1000);
        keys[..3000].iter().for_each(|key| {
            seen.note(*key);
        });
        let old = keys[..900].iter().filter(|key| seen.note(**key)).count();
        assert!(old < 60, "{old} of 900 objects still known long after");
    }
}
