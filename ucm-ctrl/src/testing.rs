//! Floors for benchmarks: what the kernel and the memory charge for the same accesses without the
//! cache's logic; and for tests: keys that collide, and a member that writes nonsense.
//!
//! **Invariant:** a floor works on a region of its own that nobody joins, so it disturbs no cache.

use std::hint::black_box;

use rustix::thread::futex;

mod hostile;

pub use hostile::abuse;

use crate::{
    Control, CtrlError, Key, PoolId,
    key::Hasher,
    region::PoolTables,
    sync::{AtomicU32, Ordering},
};

/// A futex in shared memory and nothing else: one process counts it up and wakes the one that
/// sleeps. Thread-safe; one waker at a time.
#[derive(Debug)]
pub struct BareFutex {
    control: Control,
}

impl BareFutex {
    /// Uses a word of a region that serves nothing else.
    ///
    /// # Errors
    /// `Invalid` for a region without slots.
    pub fn new(control: Control) -> Result<Self, CtrlError> {
        let futex = Self { control };
        match futex.word() {
            Some(_) => Ok(futex),
            None => Err(CtrlError::Invalid("the region has no slot".into())),
        }
    }

    fn word(&self) -> Option<&AtomicU32> {
        Some(&self.control.region.pool(0)?.slot(0)?.next)
    }

    /// How often it was rung, modulo 2³².
    #[must_use]
    pub fn value(&self) -> u32 {
        self.word().map_or(0, |word| word.load(Ordering::SeqCst))
    }

    /// Counts up and wakes one sleeper.
    pub fn ring(&self) {
        if let Some(word) = self.word() {
            word.fetch_add(1, Ordering::SeqCst);
            // Waking cannot fail on a mapped word.
            let _ = futex::wake(word, futex::Flags::empty(), 1);
        }
    }

    /// Sleeps in the kernel until the value differs from `seen`.
    pub fn wait(&self, seen: u32) {
        let Some(word) = self.word() else { return };
        while word.load(Ordering::SeqCst) == seen {
            // EAGAIN and EINTR mean "look again".
            let _ = futex::wait(word, futex::Flags::empty(), seen, None);
        }
    }
}

/// The bucket that a key falls into, to choose keys that collide.
#[must_use]
pub fn bucket_of(control: &Control, pool: PoolId, key: &Key) -> Option<usize> {
    let (lo, hi) = key.block.halves();
    let hashed = Hasher::shard(control.region.hasher().block(lo, hi), key.shard);
    Some(control.region.pool(usize::from(pool.0))?.bucket_index(hashed))
}

/// One place of a [`LineFloor`]: a bucket and a slot.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    bucket: u32,
    slot: u32,
}

/// Reads the cache lines that hits read, in tables of the same size and kind of memory.
/// Thread-safe.
#[derive(Debug)]
pub struct LineFloor {
    control: Control,
    pool: PoolId,
}

impl LineFloor {
    /// Uses a pool of a region that serves nothing else.
    ///
    /// # Errors
    /// `Invalid` for a pool that does not exist.
    pub fn new(control: Control, pool: PoolId) -> Result<Self, CtrlError> {
        let floor = Self { control, pool };
        match floor.tables() {
            Some(_) => Ok(floor),
            None => Err(CtrlError::Invalid(format!("there is no pool {}", pool.0))),
        }
    }

    fn tables(&self) -> Option<&PoolTables> {
        self.control.region.pool(usize::from(self.pool.0))
    }

    /// The place that two random numbers select.
    #[must_use]
    pub fn place(&self, random: [u32; 2]) -> Place {
        let scale = |random: u32, len: usize| {
            let wide = (u64::from(random) * len as u64) >> 32;
            u32::try_from(wide).unwrap_or(0)
        };
        let [bucket, slot] = random;
        let (buckets, slots) =
            self.tables().map_or((0, 0), |tables| (tables.buckets.len(), tables.slots.len()));
        Place { bucket: scale(bucket, buckets), slot: scale(slot, slots) }
    }

    /// Reads both lines of each place. No read waits for another: what the memory gives at best.
    pub fn read(&self, places: &[Place]) {
        let Some(tables) = self.tables() else { return };
        let mut sum = 0;
        for place in places {
            let Some(bucket) = tables.buckets.get(place.bucket as usize) else { continue };
            let Some(slot) = tables.slot(place.slot) else { continue };
            sum += bucket.overflow.load(Ordering::Acquire) + slot.next.load(Ordering::Acquire);
        }
        black_box(sum);
    }

    /// As [`read`](Self::read), but a slot is known only when its bucket has been read, and a place
    /// only when the slot before has been: the latency of two lines that a single look-up waits for.
    pub fn chase(&self, places: &[Place]) {
        let Some(tables) = self.tables() else { return };
        // All words read are zero, which the compiler does not know.
        let mut before = 0;
        for place in places {
            let bucket = place.bucket.wrapping_add(before);
            let Some(bucket) = tables.buckets.get(bucket as usize) else { continue };
            let slot = place.slot.wrapping_add(bucket.overflow.load(Ordering::Acquire));
            let Some(slot) = tables.slot(slot) else { continue };
            before = slot.next.load(Ordering::Acquire);
        }
        black_box(before);
    }

    /// As [`chase`](Self::chase), with the two locked instructions on the slot's line that a pin
    /// visible to other processes takes.
    pub fn pin(&self, places: &[Place]) {
        let Some(tables) = self.tables() else { return };
        for place in places {
            let Some(bucket) = tables.buckets.get(place.bucket as usize) else { continue };
            let slot = place.slot.wrapping_add(bucket.overflow.load(Ordering::Acquire));
            let Some(slot) = tables.slot(slot) else { continue };
            let Some(pins) = slot.pins.first() else { continue };
            pins.fetch_or(1, Ordering::SeqCst);
            black_box(slot.load());
            pins.fetch_and(!1, Ordering::SeqCst);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::Geometry;

    fn control(slots: u32) -> Control {
        Control::private(&Geometry::single(slots, 0, 1, 1)).unwrap()
    }

    #[test]
    fn a_ring_ends_the_wait_for_the_value_before_it() {
        let control = control(1);
        let futex = BareFutex::new(control.clone()).unwrap();
        for round in 0..1000 {
            assert_eq!(futex.value(), round);
            let other = BareFutex::new(control.clone()).unwrap();
            let waiter = thread::spawn(move || {
                other.wait(round);
                other.value()
            });
            futex.ring();
            assert_eq!(waiter.join().unwrap(), round + 1);
        }
    }

    #[test]
    fn places_reach_both_ends_and_pins_leave_no_trace() {
        let control = control(1000);
        let floor = LineFloor::new(control.clone(), PoolId(0)).unwrap();
        let last = floor.place([u32::MAX; 2]);
        assert_eq!((last.bucket, last.slot), (511, 999));
        let places = [floor.place([0; 2]), last];
        assert_eq!((places[0].bucket, places[0].slot), (0, 0));
        floor.read(&places);
        floor.chase(&places);
        floor.pin(&places);
        assert_eq!(control.inspect().pools[0].pinned, 0);
        assert!(LineFloor::new(control, PoolId(1)).is_err());
    }
}
