//! Where free slots are: a three-level bitmap of hints.
//!
//! **Invariant:** the slot word is the truth; a set bit only says "look here". A stale bit costs a
//! look, a missing one is set again by the next reap. Finding the lowest set bit reads at most
//! slots / 262,144 + 3 words.

use crate::failpoint::failpoint;
use crate::sync::{AtomicU64, Ordering};

/// Levels from the bits of slots up to the summary of summaries.
pub(crate) type FreeMap<'a> = [&'a [AtomicU64]; 3];

/// Marks all slots of a fresh map as free.
pub(crate) fn fill(map: FreeMap<'_>, slots: u32) {
    for slot in 0..slots {
        set(map, slot);
    }
}

/// Says that a slot is free. Call after its word says so.
pub(crate) fn set(map: FreeMap<'_>, slot: u32) {
    let mut index = slot;
    for level in map {
        if let Some(word) = level.get(index as usize / 64) {
            let bit = 1_u64 << (index % 64);
            // Read first: filling a fresh map would otherwise hammer the upper words.
            if word.load(Ordering::SeqCst) & bit == 0 {
                word.fetch_or(bit, Ordering::SeqCst);
            }
        }
        index /= 64;
    }
}

/// Finds the lowest hinted slot that `claim` accepts, and clears its hint.
pub(crate) fn take(map: FreeMap<'_>, mut claim: impl FnMut(u32) -> bool) -> Option<u32> {
    let [l0, l1, l2] = map;
    for (k2, w2) in l2.iter().enumerate() {
        for b2 in bits(w2.load(Ordering::SeqCst)) {
            let k1 = k2 * 64 + b2;
            let Some(w1) = l1.get(k1) else { continue };
            for b1 in bits(w1.load(Ordering::SeqCst)) {
                let k0 = k1 * 64 + b1;
                let Some(w0) = l0.get(k0) else { continue };
                for b0 in bits(w0.load(Ordering::SeqCst)) {
                    let Ok(slot) = u32::try_from(k0 * 64 + b0) else { continue };
                    if claim(slot) {
                        w0.fetch_and(!(1 << b0), Ordering::SeqCst);
                        failpoint!("free.hint.after");
                        tidy(w0, [(w1, b1), (w2, b2)]);
                        tidy(w1, [(w2, b2)]);
                        return Some(slot);
                    }
                }
                tidy(w0, [(w1, b1), (w2, b2)]);
            }
            tidy(w1, [(w2, b2)]);
        }
    }
    None
}

/// Clears the bit of the first of its `parents`, lowest first, when a child has become empty. Looks
/// again afterwards: a bit set in between must not be lost. Nor must those above it: who set it saw
/// them set, and another may have cleared them since, while the first was clear.
fn tidy<const LEVELS: usize>(child: &AtomicU64, parents: [(&AtomicU64, usize); LEVELS]) {
    let Some((parent, bit)) = parents.first() else { return };
    if child.load(Ordering::SeqCst) == 0 && parent.load(Ordering::SeqCst) & (1 << bit) != 0 {
        parent.fetch_and(!(1 << bit), Ordering::SeqCst);
        if child.load(Ordering::SeqCst) != 0 {
            for (parent, bit) in parents {
                parent.fetch_or(1 << bit, Ordering::SeqCst);
            }
        }
    }
}

fn bits(mut word: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        if word == 0 {
            return None;
        }
        let bit = word.trailing_zeros() as usize;
        word &= word - 1;
        Some(bit)
    })
}

#[cfg(all(test, not(ucm_loom)))]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;
    use crate::geometry::free_map_words;

    proptest! {
        #[test]
        fn takes_the_lowest_free_slot(slots in 1_u32..20_000, ops in prop::collection::vec((any::<bool>(), any::<u32>()), 0..300)) {
            let levels = free_map_words(slots).map(|n| (0..n).map(|_| AtomicU64::new(0)).collect::<Vec<_>>());
            let map = [&levels[0][..], &levels[1][..], &levels[2][..]];
            let mut model = BTreeSet::new();
            for (put, slot) in ops {
                let slot = slot % slots;
                if put {
                    set(map, slot);
                    model.insert(slot);
                } else {
                    prop_assert_eq!(take(map, |_| true), model.pop_first());
                }
            }
            // A refused slot keeps its hint.
            prop_assert_eq!(take(map, |_| false), None);
            while let Some(lowest) = model.pop_first() {
                prop_assert_eq!(take(map, |_| true), Some(lowest));
            }
            prop_assert_eq!(take(map, |_| true), None);
        }
    }
}
