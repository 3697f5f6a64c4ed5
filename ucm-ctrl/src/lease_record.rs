//! Lease records in the region: taken by a holder, consumed by others, ended by either's end.
//!
//! **Invariant:** one compare-and-swap each; a record is consumed at most as often as it was taken for,
//! and not after it was ended.

use crate::{failpoint::failpoint, layout::LeaseRecord, sync::Ordering};

const FREE: u64 = 0;
const LIVE: u64 = 1;

/// Bits 0..8 state, 8..16 holder, 16..32 consumers left, 32..64 generation.
#[derive(Clone, Copy)]
pub(crate) struct LeaseWord(u64);

impl LeaseWord {
    fn new(state: u64, holder: u8, left: u16, generation: u32) -> Self {
        Self(
            state
                | (u64::from(holder) << 8)
                | (u64::from(left) << 16)
                | (u64::from(generation) << 32),
        )
    }

    pub(crate) fn is_live(self) -> bool {
        self.0 & 0xff == LIVE
    }

    pub(crate) fn holder(self) -> u8 {
        (self.0 >> 8).to_le_bytes()[0]
    }

    pub(crate) fn left(self) -> u16 {
        let [_, _, lo, hi, ..] = self.0.to_le_bytes();
        u16::from_le_bytes([lo, hi])
    }

    pub(crate) fn generation(self) -> u32 {
        u32::try_from(self.0 >> 32).unwrap_or(0)
    }
}

impl LeaseRecord {
    pub(crate) fn load(&self) -> LeaseWord {
        LeaseWord(self.word.load(Ordering::SeqCst))
    }

    fn change(&self, from: LeaseWord, to: LeaseWord) -> bool {
        self.word.compare_exchange(from.0, to.0, Ordering::SeqCst, Ordering::Relaxed).is_ok()
    }

    /// Takes a free record; its generation from now on.
    pub(crate) fn take(&self, holder: u8, consumers: u16) -> Option<u32> {
        let seen = self.load();
        let live = LeaseWord::new(LIVE, holder, consumers, seen.generation().wrapping_add(1));
        (!seen.is_live() && self.change(seen, live)).then(|| live.generation())
    }

    /// Consumes the lease of this generation once: what it is afterwards, `None` when it is over.
    pub(crate) fn consume(&self, generation: u32) -> Option<LeaseWord> {
        loop {
            let word = self.load();
            if !word.is_live() || word.generation() != generation || word.left() == 0 {
                return None;
            }
            let next = LeaseWord::new(LIVE, word.holder(), word.left() - 1, generation);
            if self.change(word, next) {
                failpoint!("redeem.word.after");
                return Some(next);
            }
        }
    }

    /// Ends a live lease, if it is the one that is meant. Consumers that are under way lose the race
    /// visibly: they get nothing.
    pub(crate) fn retire(&self, is_meant: impl Fn(LeaseWord) -> bool) {
        loop {
            let word = self.load();
            let meant = word.is_live() && is_meant(word);
            if !meant || self.change(word, LeaseWord::new(FREE, 0, 0, word.generation())) {
                return;
            }
        }
    }
}
