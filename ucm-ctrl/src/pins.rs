//! Pins of this process: one shared bit a slot for all of them, private counts of the further ones.
//!
//! The first pin costs one locked instruction, the release of the last one two. What is private does
//! not grow with the slots, so that a hit reads no memory of its own besides the slot's.
//!
//! **Invariant:** the shared bit is set exactly while this process holds at least one pin of the
//! slot. Only the release of the last pin clears it, and it keeps further pins out meanwhile.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use crate::{
    failpoint::failpoint,
    sync::{AtomicU32, AtomicU64, Backoff, Ordering, seqcst_point},
};

/// Slots share these many words.
const STRIPES: usize = if cfg!(ucm_loom) { 1 } else { 1024 };
/// Somebody changes pins of a slot of the stripe.
const BUSY: u32 = u32::MAX;

/// See the module description.
pub(crate) struct Pins {
    word: usize,
    bit: u64,
    /// Further pins of all slots of a stripe, or [`BUSY`].
    stripes: Box<[AtomicU32]>,
    /// Pins beyond the first, by pool and slot. An entry only changes while its stripe is busy.
    further: Mutex<HashMap<(u8, u32), u32>>,
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
    /// Of the member in this seat.
    pub(crate) fn new(seat: u8) -> Self {
        Self {
            word: usize::from(seat) / 64,
            bit: 1 << (seat % 64),
            stripes: (0..STRIPES).map(|_| AtomicU32::new(0)).collect(),
            further: Mutex::default(),
        }
    }

    /// Pins a slot once more.
    pub(crate) fn pin(&self, pool: u8, slot: u32, pins: &[AtomicU64; 2]) {
        let Some(shared) = pins.get(self.word) else { return };
        failpoint!("pin.bit.before");
        while shared.fetch_or(self.bit, Ordering::SeqCst) & self.bit != 0 {
            if self.pin_further(pool, slot, shared) {
                return;
            }
        }
        failpoint!("pin.bit.after");
        seqcst_point();
    }

    /// Counts a pin of a slot that this process pins already; false when it does no more.
    #[cold]
    fn pin_further(&self, pool: u8, slot: u32, shared: &AtomicU64) -> bool {
        let Some(stripe) = self.stripe(pool, slot) else { return false };
        let count = take(stripe);
        // Now nobody can clear the bit.
        let pinned = self.is_set_in(shared);
        if pinned {
            *self.further().entry((pool, slot)).or_default() += 1;
        }
        stripe.store(count + u32::from(pinned), Ordering::Release);
        pinned
    }

    /// Releases one pin.
    pub(crate) fn unpin(&self, pool: u8, slot: u32, pins: &[AtomicU64; 2]) -> Release {
        let (Some(stripe), Some(shared)) = (self.stripe(pool, slot), pins.get(self.word)) else {
            return Release::Nothing;
        };
        let count = take(stripe);
        if count != 0 && self.unpin_further(pool, slot) {
            stripe.store(count - 1, Ordering::Release);
            return Release::Pinned;
        }
        failpoint!("unpin.bit.before");
        let before = shared.fetch_and(!self.bit, Ordering::SeqCst);
        failpoint!("unpin.bit.after");
        seqcst_point();
        stripe.store(count, Ordering::Release);
        match before {
            none if none & self.bit == 0 => Release::Nothing,
            alone if alone == self.bit && is_unpinned(pins) => Release::Last,
            _ => Release::Pinned,
        }
    }

    /// True when the slot had a further pin.
    #[cold]
    fn unpin_further(&self, pool: u8, slot: u32) -> bool {
        let mut further = self.further();
        match further.get_mut(&(pool, slot)) {
            None => false,
            Some(1) => further.remove(&(pool, slot)).is_some(),
            Some(count) => {
                *count -= 1;
                true
            }
        }
    }

    /// True when this process pins the slot.
    pub(crate) fn is_set(&self, pins: &[AtomicU64; 2]) -> bool {
        pins.get(self.word).is_some_and(|word| self.is_set_in(word))
    }

    /// Pins of this process beyond the first of each slot.
    pub(crate) fn further_pins(&self) -> u64 {
        self.further().values().copied().map(u64::from).sum()
    }

    fn is_set_in(&self, shared: &AtomicU64) -> bool {
        shared.load(Ordering::SeqCst) & self.bit != 0
    }

    fn stripe(&self, pool: u8, slot: u32) -> Option<&AtomicU32> {
        // Neighbours, which are often pinned together, lie apart.
        let spread = (slot ^ (u32::from(pool) << 28)).wrapping_mul(0x9e37_79b1) >> 16;
        self.stripes.get(spread as usize % STRIPES)
    }

    fn further(&self) -> MutexGuard<'_, HashMap<(u8, u32), u32>> {
        // Nothing panics while the lock is held.
        self.further.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Pins {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pins").field("further", &self.further().len()).finish_non_exhaustive()
    }
}

/// Makes a stripe busy; returns its count.
fn take(stripe: &AtomicU32) -> u32 {
    let mut backoff = Backoff::default();
    let mut count = stripe.load(Ordering::Relaxed);
    loop {
        if count == BUSY {
            backoff.snooze();
            count = stripe.load(Ordering::Relaxed);
            continue;
        }
        match stripe.compare_exchange(count, BUSY, Ordering::AcqRel, Ordering::Relaxed) {
            Ok(count) => return count,
            Err(now) => count = now,
        }
    }
}

/// True when no member pins the slot.
pub(crate) fn is_unpinned(pins: &[AtomicU64; 2]) -> bool {
    pins.iter().all(|word| word.load(Ordering::SeqCst) == 0)
}

#[cfg(all(test, not(ucm_loom)))]
mod tests {
    use super::*;

    /// Pins on the only slot in use.
    fn held(pins: &Pins, words: &[AtomicU64; 2]) -> u64 {
        u64::from(pins.is_set(words)) + pins.further_pins()
    }

    #[test]
    fn one_bit_for_all_pins_of_a_process() {
        let shared = [const { AtomicU64::new(0) }; 2];
        let [a, b] = [3, 70].map(Pins::new);
        let words = || shared.each_ref().map(|word| word.load(Ordering::SeqCst));
        a.pin(0, 5, &shared);
        a.pin(0, 5, &shared);
        b.pin(0, 5, &shared);
        assert_eq!((words(), held(&a, &shared)), ([1 << 3, 1 << 6], 2));
        assert_eq!(a.unpin(0, 5, &shared), Release::Pinned);
        assert_eq!((words(), held(&a, &shared)), ([1 << 3, 1 << 6], 1));
        assert_eq!(a.unpin(0, 5, &shared), Release::Pinned);
        assert_eq!((words(), held(&a, &shared)), ([0, 1 << 6], 0));
        assert_eq!(a.unpin(0, 5, &shared), Release::Nothing);
        assert_eq!(b.unpin(0, 5, &shared), Release::Last);
        assert_eq!(b.unpin(0, 5, &shared), Release::Nothing);
        assert_eq!(words(), [0, 0]);
    }

    /// More slots than stripes, so that some share one with a slot that has further pins.
    #[test]
    fn slots_of_one_stripe_are_counted_apart() {
        let pins = Pins::new(0);
        let slots = [const { [const { AtomicU64::new(0) }; 2] }; 3000];
        let all = || (0..).zip(&slots);
        let even = || all().filter(|(slot, _)| slot % 2 == 0);
        all().for_each(|(slot, words)| pins.pin(1, slot, words));
        even().for_each(|(slot, words)| pins.pin(1, slot, words));
        assert!(all().all(|(_, words)| pins.is_set(words)));
        assert_eq!(pins.further_pins(), 1500);
        for (slot, words) in all() {
            let expected = if slot % 2 == 0 { Release::Pinned } else { Release::Last };
            assert_eq!(pins.unpin(1, slot, words), expected, "slot {slot}");
        }
        assert!(even().all(|(slot, words)| pins.unpin(1, slot, words) == Release::Last));
        assert!(all().all(|(_, words)| is_unpinned(words)) && pins.further().is_empty());
    }

    /// Four threads pin and release one slot; whoever holds a pin always sees the bit.
    #[test]
    fn the_bit_stays_while_any_thread_holds_a_pin() {
        let shared = [const { AtomicU64::new(0) }; 2];
        let pins = Pins::new(0);
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
        assert_eq!((held(&pins, &shared), is_unpinned(&shared)), (0, true));
    }
}
