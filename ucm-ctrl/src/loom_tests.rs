//! Models of the protocols, for all interleavings with at most two preemptions (`cargo xtask loom`).
//!
//! A model has four seats, two buckets with a single entry and a chain, one or two slots, and "slot
//! memory" in loom cells, so that a read that meets a write, or is not ordered after it, is reported
//! as a race. A lost wake-up is a deadlock, which is reported as well.
//!
//! **Invariant:** every model fails when the step it guards is left out.
//!
//! Steps left out or swapped on purpose, and the model or test (T) that fails then:
//!
//! | broken | caught by |
//! |---|---|
//! | version not moved at the end of a fill; told before the state changes | `loom_w1_*`, `loom_bytes_*` |
//! | waiter looks, then sets its flag | `loom_w1_*`, `loom_bytes_*` |
//! | armed slots ring no doorbell | `loom_w4_*` |
//! | publish without release | `loom_bytes_*`, `loom_hit_meets_evict` |
//! | no look at the pins after a claim | `loom_a_pin_keeps_its_key`, `loom_two_threads_*` |
//! | pin bit set after the count | `loom_two_threads_of_a_member_meet_a_claim` |
//! | no look at the key after the pin | `loom_a_pin_keeps_its_key`, `loom_hit_meets_evict` |
//! | no second look after "full" was set | `loom_c6_unpin_meets_full` |
//! | "full" left by an unpin, a passing pin, a claim given back, a link | `loom_c6_*`, one each |
//! | no look under the lock before a link | `loom_two_acquires_*`, `loom_p3_*` |
//! | take-over by a plain store | `loom_takeover_*` |
//! | chain version not moved | `loom_a_chain_changes_under_a_reader` |
//! | fill with operations in flight fails instead of draining | `loom_quarantine_*` |
//! | free slot taken though a late waiter pins it | `loom_a_draining_slot_*` |
//! | second reaper not refused | `loom_the_seats_next_holder_is_left_alone` |
//! | a claim keeps the generation; a dead member's claim stays | T `d1_a_claim_*` |
//! | pinned slots age; the second lap leaves the hand | T `c5_model_*` |
//! | a draining slot in its bucket counts as resident | T `a_draining_slot_still_linked_*` |
//! | tag compared instead of the key | `loom_a_chain_*`, T `a60_*` |
//! | last consumer rings no lease bell | T `s3_*`, `a09_*` |
//! | a reaper tells only those whose flag still stands | T `d1_death_between_state_and_wake_*` |
//! | a reaper leaves what the dead member was reaping | T `d1_a_reaper_that_dies_*` |
//! | failure kinds outlive their key | T `failure_kinds_do_not_outlive_their_key` |

#![expect(clippy::unwrap_used, reason = "a model may panic")]

mod bytes;
mod evicting;
mod owning;
mod pinning;
mod recovery;
mod seats;
mod waking;

use loom::cell::UnsafeCell;

use crate::{
    Acquired, BlockId, Control, Fill, Geometry, Key, Member, MemberSpec, Phase, Pin, Pool, PoolId,
    SlotId, Waiter,
    key::Hasher,
    sync::{Arc, Counter, Ordering},
};

/// Explores all interleavings; two preemptions unless the environment says otherwise.
fn explore(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound.get_or_insert(2);
    builder.max_branches = builder.max_branches.max(20_000);
    builder.check(model);
}

fn cache(slots: u32) -> Control {
    Control::private(&Geometry { leases: 0, ..Geometry::single(slots, 0, 1, 4096) }).unwrap()
}

fn join(control: &Control) -> Member {
    control.join(MemberSpec::rank(0, 1)).unwrap()
}

fn pool(control: &Control) -> Pool {
    join(control).pool(PoolId(0)).unwrap()
}

/// A key of the first bucket.
fn key(block: u64) -> Key {
    key_in(0, block)
}

/// Keys of the same bucket and number are the same.
fn key_in(bucket: u64, number: u64) -> Key {
    let hasher = Hasher { seed: (0x5eed, 0xfeed), mask: u64::MAX };
    let of_bucket = (0..).filter(|half| hasher.block(*half, number) & 1 == bucket);
    let half = of_bucket.into_iter().next().unwrap();
    Key::new(BlockId::from_halves(half, number), 0)
}

fn own(pool: &Pool, key: &Key) -> Fill {
    match pool.acquire(key).unwrap() {
        Acquired::Owner(fill) => fill,
        other => panic!("{other:?}"),
    }
}

fn wait(pool: &Pool, key: &Key) -> Waiter {
    match pool.acquire(key).unwrap() {
        Acquired::Waiter(waiter) => waiter,
        other => panic!("{other:?}"),
    }
}

fn load(pool: &Pool, key: &Key) {
    drop(own(pool, key).publish().unwrap());
}

fn phase(control: &Control, slot: u32) -> Phase {
    control.region.pool(0).unwrap().slots[slot as usize].load().phase()
}

fn resident(control: &Control, key: &Key) -> usize {
    let slots = &control.region.pool(0).unwrap().slots;
    slots.iter().filter(|s| s.load().phase().is_resident() && s.block() == key.block).count()
}

fn assert_at_rest(control: &Control) {
    let seen = control.inspect();
    assert_eq!(seen.problems, Vec::<String>::new());
    let pool = &seen.pools[0];
    assert_eq!((pool.pinned, pool.filling, pool.draining, pool.moving), (0, 0, 0, 0));
}

/// The bytes of two slots: a loom cell that knows who reads and writes, and the value.
#[derive(Clone)]
struct Memory(Arc<[(UnsafeCell<()>, Counter); 2]>);

impl Memory {
    fn new() -> Self {
        Self(Arc::new(Default::default()))
    }

    fn write(&self, slot: SlotId, word: u64) {
        let (cell, value) = &self.0[slot.0 as usize];
        cell.with_mut(|_| value.store(word, Ordering::Relaxed));
    }

    fn read(&self, slot: SlotId) -> u64 {
        let (cell, value) = &self.0[slot.0 as usize];
        cell.with(|_| value.load(Ordering::Relaxed))
    }

    fn check(&self, pin: &Pin, key: u64) {
        assert_eq!(self.read(pin.slot()), key, "the bytes of another key");
    }

    /// Acquires, and fills or checks; true unless the cache was full.
    fn use_key(&self, pool: &Pool, block: u64) -> bool {
        match pool.acquire(&key(block)).unwrap() {
            Acquired::Hit(pin) => self.check(&pin, block),
            Acquired::Owner(fill) => {
                self.write(fill.slot(), block);
                self.check(&fill.publish().unwrap(), block);
            }
            Acquired::Waiter(waiter) => {
                let _ = waiter.wait(None);
                if let Ok(pin) = waiter.into_pin() {
                    self.check(&pin, block);
                }
            }
            Acquired::Full => return false,
        }
        true
    }
}
