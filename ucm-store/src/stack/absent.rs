//! What a tier does not have, remembered for a while.
//!
//! Owns: a table of fixed size of full keys, each with the time until which it counts; no clock, no IO.
//! **Invariant:** a key counts as absent only if the tier said so after the last time this process began or
//! ended storing it, and only for the time to live, counted from when the tier was asked: that is the
//! longest for which something stored by others can look absent.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use super::{Key, hash};

/// Keys of one set; the one that counts shortest makes room.
const WAYS: usize = 4;
/// Sets behind one lock.
const SETS_PER_LOCK: usize = 64;

/// The table.
#[derive(Debug)]
pub(super) struct Absent {
    ttl: Duration,
    sets: usize,
    parts: Vec<Mutex<Vec<Set>>>,
}

#[derive(Clone, Debug, Default)]
struct Set {
    /// Changes whenever a key of this set is being stored.
    stamp: u64,
    entries: [Option<(Key, Instant)>; WAYS],
}

/// A question that a tier is being asked.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    stamp: u64,
    at: Instant,
}

impl Absent {
    /// Room for about so many keys.
    pub(super) fn new(keys: usize, ttl: Duration) -> Self {
        let sets = keys.div_ceil(WAYS).max(1);
        let parts = sets.div_ceil(SETS_PER_LOCK);
        let part = || Mutex::new(vec![Set::default(); SETS_PER_LOCK]);
        Self { ttl, sets, parts: (0..parts).map(|_| part()).collect() }
    }

    /// `None`: the tier need not be asked.
    pub(super) fn ask(&self, key: &Key, now: Instant) -> Option<Asked> {
        self.with(key, |set| {
            let known = |entry: &&(Key, Instant)| entry.0 == *key && now < entry.1;
            let absent = set.entries.iter().flatten().find(known).is_some();
            (!absent).then_some(Asked { stamp: set.stamp, at: now })
        })
    }

    /// The tier does not have it. Not believed if somebody here has begun or ended storing meanwhile.
    pub(super) fn missed(&self, key: &Key, asked: Asked) {
        let until = asked.at + self.ttl;
        self.with(key, |set| {
            if set.stamp != asked.stamp {
                return;
            }
            let same = set.entries.iter().position(|e| e.is_some_and(|(k, _)| k == *key));
            let oldest =
                || (0..WAYS).min_by_key(|at| set.entries.get(*at).copied().flatten().map(|e| e.1));
            let place = same.or_else(oldest).unwrap_or(0);
            if let Some(entry) = set.entries.get_mut(place) {
                *entry = Some((*key, until));
            }
        });
    }

    /// It is being stored, or that has ended.
    pub(super) fn storing(&self, key: &Key) {
        self.with(key, |set| {
            set.stamp += 1;
            for entry in &mut set.entries {
                if entry.is_some_and(|(known, _)| known == *key) {
                    *entry = None;
                }
            }
        });
    }

    fn with<T>(&self, key: &Key, work: impl FnOnce(&mut Set) -> T) -> T {
        #[expect(clippy::cast_possible_truncation, reason = "a place in the table")]
        let at = hash(key) as usize % self.sets;
        let mut part = match self.parts.get(at / SETS_PER_LOCK) {
            Some(part) => lock(part),
            None => unreachable!("invariant: there is a lock for every set"),
        };
        match part.get_mut(at % SETS_PER_LOCK) {
            Some(set) => work(set),
            None => unreachable!("invariant: there are {SETS_PER_LOCK} sets behind a lock"),
        }
    }
}

fn lock(part: &Mutex<Vec<Set>>) -> MutexGuard<'_, Vec<Set>> {
    part.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(1);

    fn key(n: u32) -> Key {
        ([7; 16], n)
    }

    /// Broken on purpose: the time counts from the answer; keys are compared by their hash only; the
    /// stamp is not compared; storing leaves the entry.
    #[test]
    fn a_miss_counts_for_its_time_and_not_beyond_a_store() {
        // One set: every key meets every other.
        let absent = Absent::new(1, TTL);
        let start = Instant::now();
        let asked = absent.ask(&key(1), start).unwrap();
        absent.missed(&key(1), asked);
        assert!(absent.ask(&key(1), start + TTL / 2).is_none());
        assert!(absent.ask(&key(2), start + TTL / 2).is_some(), "a60: another key");
        assert!(absent.ask(&key(1), start + TTL).is_some());
        let asked = absent.ask(&key(2), start).unwrap();
        absent.missed(&key(2), asked);
        absent.storing(&key(2));
        let asked = absent.ask(&key(2), start).expect("stored by now");
        absent.storing(&key(2));
        absent.missed(&key(2), asked);
        assert!(absent.ask(&key(2), start).is_some(), "the answer is older than the store");
    }

    /// Broken on purpose: entries beyond the size are kept; the youngest makes room.
    #[test]
    fn it_is_bounded_and_the_oldest_makes_room() {
        let absent = Absent::new(WAYS, TTL);
        let start = Instant::now();
        let at = |n: u32| start + Duration::from_millis(u64::from(n));
        for n in 0..10 {
            let asked = absent.ask(&key(n), at(n)).unwrap();
            absent.missed(&key(n), asked);
        }
        let known: Vec<u32> = (0..10).filter(|n| absent.ask(&key(*n), at(10)).is_none()).collect();
        assert_eq!(known, [6, 7, 8, 9]);
    }

    #[test]
    fn many_keys_find_room_in_many_sets() {
        let absent = Absent::new(4096, TTL);
        let now = Instant::now();
        for n in 0..1000 {
            let asked = absent.ask(&key(n), now).unwrap();
            absent.missed(&key(n), asked);
        }
        let known = (0..1000).filter(|n| absent.ask(&key(*n), now).is_none()).count();
        assert!(known > 950, "{known} of 1000 keys in room for 4096");
    }
}
