//! What a tier that cannot hold everything keeps.
//!
//! Owns: which objects were used lately, and two small models of the tier that say which rule pays; no
//! clock, no IO.
//! **Invariant:** memory is bounded by the number of objects that the tier holds, and by [`MOST_OBJECTS`].

mod ghost;
mod seen;

use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

use ghost::Ghost;
use seen::Seen;

use super::hash;

/// More objects than these are counted as these: some 20 MiB of memory.
const MOST_OBJECTS: u64 = 1 << 20;
/// An object counts as used before if that was within this many times the tier's objects (at least; twice
/// as many at most).
const WINDOW: u64 = 8;
/// One in so many objects is followed in the models.
const SAMPLED: u64 = 8;
/// Models smaller than this say nothing: more objects are followed then.
const LEAST_GHOST: u64 = 64;
/// What a hit and a write are worth.
const HIT: i64 = 32;
const WRITE: i64 = 1;
/// The second rule must be better by so many hits.
const MARGIN: i64 = 4;

/// Decides for a tier whether an object is kept there: either every object, or those that were used
/// before, whichever gives more hits at the moment.
///
/// Most blocks are never used again, and in a small tier they push the others out; in a large one, each
/// block that is refused at first is a hit lost later. So two models of the tier run along on a sample of
/// the objects (one keeps everything, one what is used for the second time), and the rule of the better
/// one is in force, once as many objects were used as the tier holds. A write costs a thirty-second of a hit.
///
/// Threads may share it.
#[derive(Debug)]
pub struct Admission {
    sampled: u64,
    state: Mutex<State>,
    only_used_before: AtomicBool,
    refused: AtomicU64,
    changes: AtomicU64,
}

#[derive(Debug)]
struct State {
    seen: Seen,
    every: Ghost,
    used_before: Ghost,
    /// What the second model has won, less what the first has.
    lead: i64,
    uses: u64,
    /// After so many uses in the models, what they have won counts half.
    fade: u64,
}

impl Admission {
    /// For a tier with room for so many objects (of those that this process uses).
    #[must_use]
    pub fn new(objects: u64) -> Self {
        let objects = objects.clamp(1, MOST_OBJECTS);
        let sampled = (objects / LEAST_GHOST).clamp(1, SAMPLED);
        let ghost = objects / sampled;
        let state = State {
            seen: Seen::new(objects.saturating_mul(WINDOW)),
            every: Ghost::new(ghost),
            used_before: Ghost::new(ghost),
            lead: 0,
            uses: 0,
            fade: ghost.saturating_mul(8),
        };
        Self {
            sampled,
            state: Mutex::new(state),
            only_used_before: AtomicBool::new(false),
            refused: AtomicU64::new(0),
            changes: AtomicU64::new(0),
        }
    }

    /// An object is used (loaded or stored): whether the tier should keep it, if it does not have it.
    pub fn used(&self, block: &[u8; 16], shard: u32) -> bool {
        let hash = hash(&(*block, shard));
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let before = state.seen.note(hash);
        // Other bits than those that choose a place in a table.
        if (hash >> 40).is_multiple_of(self.sampled) {
            let second = state.follow(hash, before);
            if second != self.only_used_before.swap(second, Ordering::Relaxed) {
                self.changes.fetch_add(1, Ordering::Relaxed);
            }
        }
        let kept = before || !self.only_used_before.load(Ordering::Relaxed);
        if !kept {
            self.refused.fetch_add(1, Ordering::Relaxed);
        }
        kept
    }

    /// Whether only what was used before is kept now.
    #[must_use]
    pub fn only_used_before(&self) -> bool {
        self.only_used_before.load(Ordering::Relaxed)
    }

    /// Uses after which the object was not to be kept.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// How often the rule changed.
    #[must_use]
    pub fn changes(&self) -> u64 {
        self.changes.load(Ordering::Relaxed)
    }
}

impl State {
    /// What the models do with it; says whether the second one leads.
    fn follow(&mut self, hash: u64, before: bool) -> bool {
        let worth = |hit: bool, kept: bool| {
            if hit {
                HIT
            } else if kept {
                -WRITE
            } else {
                0
            }
        };
        // What fits pushes nothing out.
        let full = self.every.is_full();
        let first = worth(self.every.used(hash, true), true);
        let second = worth(self.used_before.used(hash, before), before);
        if !full {
            return false;
        }
        self.lead += second - first;
        self.uses += 1;
        if self.uses.is_multiple_of(self.fade) {
            self.lead /= 2;
        }
        self.lead > MARGIN * HIT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(n: u64) -> [u8; 16] {
        let mut block = [0; 16];
        block[..8].copy_from_slice(&n.to_le_bytes());
        block
    }

    /// Broken on purpose: the models are never compared; a use in the past is not remembered.
    #[test]
    fn in_a_small_tier_blocks_that_are_used_once_are_refused() {
        let admission = Admission::new(200);
        let mut once = 1_000_000;
        let mut last = 0;
        for _ in 0..40 {
            // A hundred objects used again and again, and eight times as many that never are.
            for n in 0..100 {
                last = u64::from(admission.used(&block(n), 0));
                for _ in 0..8 {
                    admission.used(&block(once), 0);
                    once += 1;
                }
            }
        }
        assert!(admission.only_used_before() && last == 1);
        assert!(!admission.used(&block(once), 0) && admission.used(&block(once), 0));
        assert!(admission.refused() > 10_000, "{} refused", admission.refused());
    }

    /// Broken on purpose: only what was used before is kept from the start; writes count before the tier is
    /// full.
    #[test]
    fn in_a_large_tier_everything_is_kept() {
        let admission = Admission::new(10_000);
        for n in 0..20_000 {
            // Each object is used twice, the second time soon.
            assert!(admission.used(&block(n), 1));
            assert!(admission.used(&block(n.saturating_sub(3000)), 1));
        }
        assert_eq!((admission.refused(), admission.changes()), (0, 0));
    }

    #[test]
    fn shards_of_a_block_are_objects_of_their_own() {
        let admission = Admission::new(100);
        admission.only_used_before.store(true, Ordering::Relaxed);
        admission.used(&block(1), 0);
        let mut state = admission.state.lock().unwrap();
        assert!(!state.seen.note(hash(&(block(1), 1))));
        assert!(state.seen.note(hash(&(block(1), 0))));
    }
}
