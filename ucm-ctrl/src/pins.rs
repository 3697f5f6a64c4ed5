//! Pins of this process: one shared bit a slot for all of them, private counts of the further ones.
//!
//! The first pin costs one locked instruction, the release of the last one two.
//!
//! **Invariant:** the shared bit is set exactly while this process holds at least one pin of the
//! slot. Only the release of the last pin clears it, and it keeps further pins out meanwhile.

use crate::{
    failpoint::failpoint,
    region::zeroed_counts,
    sync::{AtomicU32, AtomicU64, Backoff, Ordering, seqcst_point},
};

/// The last pin is being released.
const BUSY: u32 = u32::MAX;

/// See the module description.
#[derive(Debug)]
pub(crate) struct Pins {
    word: usize,
    bit: u64,
    /// Pins beyond the first, by pool and slot.
    further: Vec<Box<[AtomicU32]>>,
}

/// What a release has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Release {
    /// The slot is pinned by somebody still.
    Pinned,
    /// Nobody pins the slot any more.
    Last,
    /// This process did not pin the slot.
    Nothing,
}

impl Pins {
    /// Of a member of a region with these numbers of slots.
    pub(crate) fn new(member: u8, slots: impl Iterator<Item = u32>) -> Self {
        Self {
            word: usize::from(member) / 64,
            bit: 1 << (member % 64),
            further: slots.map(zeroed_counts).collect(),
        }
    }

    fn further(&self, pool: u8, slot: u32) -> Option<&AtomicU32> {
        self.further.get(usize::from(pool))?.get(slot as usize)
    }

    /// Pins a slot once more.
    pub(crate) fn pin(&self, pool: u8, slot: u32, pins: &[AtomicU64; 2]) {
        let (Some(further), Some(shared)) = (self.further(pool, slot), pins.get(self.word)) else {
            return;
        };
        // The release will need it: read it together with the slot, not after the locked instruction.
        further.load(Ordering::Relaxed);
        failpoint!("pin.bit.before");
        while shared.fetch_or(self.bit, Ordering::SeqCst) & self.bit != 0 {
            if self.pin_further(further, shared) {
                return;
            }
        }
        failpoint!("pin.bit.after");
        seqcst_point();
    }

    /// Counts a pin of a slot that this process pins already; false when it does no more.
    #[cold]
    fn pin_further(&self, further: &AtomicU32, shared: &AtomicU64) -> bool {
        let mut backoff = Backoff::default();
        let mut count = further.load(Ordering::Relaxed);
        loop {
            if count == BUSY {
                backoff.snooze();
                count = further.load(Ordering::Relaxed);
                continue;
            }
            match further.compare_exchange(count, BUSY, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => {
                    // Now nobody can clear the bit.
                    let pinned = shared.load(Ordering::SeqCst) & self.bit != 0;
                    further.store(count + u32::from(pinned), Ordering::Release);
                    return pinned;
                }
                Err(now) => count = now,
            }
        }
    }

    /// Releases one pin.
    pub(crate) fn unpin(&self, pool: u8, slot: u32, pins: &[AtomicU64; 2]) -> Release {
        let (Some(further), Some(shared)) = (self.further(pool, slot), pins.get(self.word)) else {
            return Release::Nothing;
        };
        let mut backoff = Backoff::default();
        let mut count = further.load(Ordering::Relaxed);
        loop {
            let next = match count {
                BUSY => {
                    backoff.snooze();
                    count = further.load(Ordering::Relaxed);
                    continue;
                }
                0 => BUSY,
                more => more - 1,
            };
            match further.compare_exchange(count, next, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(0) => break,
                Ok(_) => return Release::Pinned,
                Err(now) => count = now,
            }
        }
        failpoint!("unpin.bit.before");
        let before = shared.fetch_and(!self.bit, Ordering::SeqCst);
        failpoint!("unpin.bit.after");
        seqcst_point();
        further.store(0, Ordering::Release);
        match before {
            none if none & self.bit == 0 => Release::Nothing,
            alone if alone == self.bit && is_unpinned(pins) => Release::Last,
            _ => Release::Pinned,
        }
    }

    /// True when this process pins the slot.
    pub(crate) fn is_set(&self, pins: &[AtomicU64; 2]) -> bool {
        pins.get(self.word).is_some_and(|word| word.load(Ordering::SeqCst) & self.bit != 0)
    }

    /// Pins of this process on a slot.
    pub(crate) fn held(&self, pool: u8, slot: u32, pins: &[AtomicU64; 2]) -> u64 {
        let further = self.further(pool, slot).map_or(0, |c| c.load(Ordering::Relaxed));
        let further = if further == BUSY { 0 } else { further };
        u64::from(further) + u64::from(self.is_set(pins))
    }
}

/// True when no member pins the slot.
pub(crate) fn is_unpinned(pins: &[AtomicU64; 2]) -> bool {
    pins.iter().all(|word| word.load(Ordering::SeqCst) == 0)
}

#[cfg(all(test, not(ucm_loom)))]
mod tests {
    use super::*;

    #[test]
    fn one_bit_for_all_pins_of_a_process() {
        let shared = [const { AtomicU64::new(0) }; 2];
        let [a, b] = [3, 70].map(|member| Pins::new(member, [8].into_iter()));
        let words = || shared.each_ref().map(|word| word.load(Ordering::SeqCst));
        a.pin(0, 5, &shared);
        a.pin(0, 5, &shared);
        b.pin(0, 5, &shared);
        assert_eq!((words(), a.held(0, 5, &shared)), ([1 << 3, 1 << 6], 2));
        assert_eq!(a.unpin(0, 5, &shared), Release::Pinned);
        assert_eq!((words(), a.held(0, 5, &shared)), ([1 << 3, 1 << 6], 1));
        assert_eq!(a.unpin(0, 5, &shared), Release::Pinned);
        assert_eq!((words(), a.held(0, 5, &shared)), ([0, 1 << 6], 0));
        assert_eq!(a.unpin(0, 5, &shared), Release::Nothing);
        assert_eq!(b.unpin(0, 5, &shared), Release::Last);
        assert_eq!(b.unpin(0, 5, &shared), Release::Nothing);
        assert_eq!(words(), [0, 0]);
        assert_eq!(a.unpin(0, 8, &shared), Release::Nothing, "there is no slot 8");
    }

    /// Four threads pin and release one slot; whoever holds a pin always sees the bit.
    #[test]
    fn the_bit_stays_while_any_thread_holds_a_pin() {
        let shared = [const { AtomicU64::new(0) }; 2];
        let pins = Pins::new(0, [1].into_iter());
        let lasts: usize = std::thread::scope(|scope| {
            let work = || {
                let mut lasts = 0;
                for round in 0..100_000_u32 {
                    let depth = 1 + round % 3;
                    for _ in 0..depth {
                        pins.pin(0, 0, &shared);
                        assert_eq!(shared[0].load(Ordering::SeqCst), 1);
                    }
                    for left in (0..depth).rev() {
                        match pins.unpin(0, 0, &shared) {
                            Release::Pinned => {}
                            Release::Last => {
                                assert_eq!(left, 0, "a pin was held");
                                lasts += 1;
                            }
                            Release::Nothing => panic!("a pin was lost"),
                        }
                    }
                }
                lasts
            };
            let threads = [0; 4].map(|_| scope.spawn(work));
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert!(lasts > 0);
        assert_eq!((pins.held(0, 0, &shared), is_unpinned(&shared)), (0, true));
    }
}
