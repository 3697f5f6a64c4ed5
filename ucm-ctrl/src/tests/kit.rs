//! What the tests share: small caches, short keys, a look behind the scenes.
//!
//! **Invariant:** the look reads the region itself, not what the code under test says about it.

use crate::{
    Acquired, Control, Fill, Geometry, Key, Member, MemberSpec, Phase, Pin, Pool, PoolGeometry,
    PoolId, Waiter,
    event::{EventWord, SLEEPERS},
    region::PoolTables,
    sync::{Arc, Ordering},
};

/// A private cache with one pool of single-shard blocks.
pub(super) fn cache(slots: u32) -> Control {
    Control::private(&Geometry::single(slots, 0, 1, 4096)).unwrap()
}

/// A private cache with one pool; the index hash keeps only the bits of `mask`.
pub(super) fn narrow(pool: PoolGeometry, mask: u64) -> Control {
    let mut control = Control::private(&Geometry { pools: vec![pool], leases: 8 }).unwrap();
    Arc::get_mut(&mut control.region).unwrap().narrow_hash(mask);
    control
}

pub(super) fn geometry(slots: u32, reserved: u32, shards_per_block: u32) -> PoolGeometry {
    PoolGeometry { slots, reserved, shards_per_block, shard_bytes: 4096 }
}

pub(super) fn rank(control: &Control) -> Member {
    control.join(MemberSpec::rank(0, 1)).unwrap()
}

/// The first pool in the name of a new member.
pub(super) fn pool(control: &Control) -> Pool {
    rank(control).pool(PoolId(0)).unwrap()
}

pub(super) fn key(block: u64) -> Key {
    shard(block, 0)
}

pub(super) fn shard(block: u64, shard: u32) -> Key {
    Key::new(crate::BlockId::from_halves(block, !block), shard)
}

pub(super) fn own(pool: &Pool, key: &Key) -> Fill {
    match pool.acquire(key).unwrap() {
        Acquired::Owner(fill) => fill,
        other => panic!("{key:?} should be ours to fill: {other:?}"),
    }
}

pub(super) fn hit(pool: &Pool, key: &Key) -> Pin {
    match pool.acquire(key).unwrap() {
        Acquired::Hit(pin) => pin,
        other => panic!("{key:?} should be ready: {other:?}"),
    }
}

pub(super) fn wait(pool: &Pool, key: &Key) -> Waiter {
    match pool.acquire(key).unwrap() {
        Acquired::Waiter(waiter) => waiter,
        other => panic!("{key:?} should be in somebody's hands: {other:?}"),
    }
}

pub(super) fn is_full(pool: &Pool, key: &Key) -> bool {
    matches!(pool.acquire(key).unwrap(), Acquired::Full)
}

/// Fills a key that is absent; returns its slot, unpinned.
pub(super) fn load(pool: &Pool, key: &Key) -> u32 {
    own(pool, key).publish().unwrap().slot().0
}

pub(super) fn tables(control: &Control) -> &PoolTables {
    control.region.pool(0).unwrap()
}

pub(super) fn phase(control: &Control, slot: u32) -> Phase {
    tables(control).slots[slot as usize].load().phase()
}

/// Key of a resident slot.
pub(super) fn key_in(control: &Control, index: u32) -> Option<Key> {
    let slot = &tables(control).slots[index as usize];
    let key = Key::new(slot.block(), slot.shard.load(Ordering::SeqCst));
    slot.load().phase().is_resident().then_some(key)
}

pub(super) fn keys(control: &Control) -> Vec<Option<Key>> {
    (0..tables(control).slots.len()).map(|i| key_in(control, u32::try_from(i).unwrap())).collect()
}

pub(super) fn bits(control: &Control) -> Vec<bool> {
    let slots = u32::try_from(tables(control).slots.len()).unwrap();
    (0..slots).map(|slot| tables(control).is_marked(slot)).collect()
}

/// "1010" for the accessed bits.
pub(super) fn bit_string(control: &Control) -> String {
    bits(control).iter().map(|bit| if *bit { '1' } else { '0' }).collect()
}

pub(super) fn cursor(control: &Control) -> u64 {
    control.inspect().pools[0].cursor
}

pub(super) fn clear_bits(control: &Control) {
    for word in tables(control).accessed.iter() {
        word.store(0, Ordering::SeqCst);
    }
}

/// The consistency walk finds nothing, nobody pins anything, nothing is half done.
pub(super) fn assert_at_rest(control: &Control) {
    let seen = control.inspect();
    assert_eq!(seen.problems, Vec::<String>::new());
    for pool in &seen.pools {
        let unfinished = (pool.pinned, pool.filling, pool.draining, pool.moving);
        assert_eq!(unfinished, (0, 0, 0, 0), "{pool:?}");
    }
}

/// Far enough for any machine; reaching it means that something was lost.
pub(super) fn watchdog() -> std::time::Instant {
    std::time::Instant::now() + std::time::Duration::from_secs(60)
}

/// Waits, without an event to wait for, until another thread has come so far.
pub(super) fn until_asleep(word: &EventWord) {
    eventually("a sleeper", || word.arm(0) & SLEEPERS != 0);
    // It is about to sleep. If it does not yet, nothing can go wrong with it, and the test shows less.
    std::thread::sleep(std::time::Duration::from_millis(20));
}

pub(super) fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let watchdog = watchdog();
    while !done() {
        assert!(std::time::Instant::now() < watchdog, "waited in vain: {what}");
        std::thread::yield_now();
    }
}
