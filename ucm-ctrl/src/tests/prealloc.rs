//! Preallocation: the next shards of the blocks of a task get their slots in the idle window.
//!
//! **Invariant:** nothing pinned or accessed is ever evicted for a guess.

use std::{sync::Barrier, thread};

use super::kit::*;
use crate::{Control, Geometry, Phase, Prealloc};

#[test]
fn p1_scenario_e_acquire_after_prealloc_searches_no_victim() {
    let control = Control::private(&Geometry::single(8, 0, 4, 4096)).unwrap();
    let [pool, other] = [pool(&control), pool(&control)];
    // Task {B0.s, B1.s, B2.s}; B3 is resident, too.
    let s = 1;
    for block in 0..4 {
        load(&pool, &shard(block, s));
    }
    let b3 = keys(&control);
    for block in 0..3 {
        assert_eq!(pool.prealloc(&shard(block, s + 1)).unwrap(), Prealloc::Made);
    }
    assert_eq!(keys(&control)[..4], b3[..4]);
    for slot in 4..7 {
        assert_eq!(phase(&control, slot), Phase::Idle);
        assert!(tables(&control).slots[slot as usize].unpinned() && bits(&control)[slot as usize]);
    }
    let before = control.statistics();
    let fill = own(&pool, &shard(0, s + 1));
    let after = control.statistics();
    assert_eq!(after.victim_searches, before.victim_searches);
    assert_eq!((after.takeovers, after.evictions), (before.takeovers + 1, 0));
    // Another rank meanwhile filling one of them: we wait for it.
    let theirs = own(&other, &shard(1, s + 1));
    drop(wait(&pool, &shard(1, s + 1)));
    drop((fill, theirs));
    assert_eq!(key_in(&control, 3), Some(shard(3, s)), "B3 is untouched");
    assert_eq!(control.statistics().victim_searches, before.victim_searches);
    assert_at_rest(&control);
}

#[test]
fn p1_no_slot_for_a_shard_that_a_block_does_not_have() {
    let control = Control::private(&Geometry::single(8, 0, 4, 4096)).unwrap();
    assert_eq!(pool(&control).prealloc(&shard(0, 4)).unwrap(), Prealloc::NoSuchShard);
    assert_eq!(keys(&control), [None; 8]);
}

#[test]
fn p2_a_guess_evicts_nothing_accessed_or_pinned() {
    let control = Control::private(&Geometry::single(4, 2, 1, 4096)).unwrap();
    let pool = pool(&control);
    for k in 0..4 {
        load(&pool, &key(k));
    }
    let before = keys(&control);
    let hand = cursor(&control);
    // All bits are set: only the reserved slots are left.
    assert_eq!(pool.prealloc(&key(10)).unwrap(), Prealloc::MadeReserved);
    assert_eq!(pool.prealloc(&key(11)).unwrap(), Prealloc::MadeReserved);
    // Their own bits protect them for one more search, then they are ordinary again.
    assert_eq!(pool.prealloc(&key(12)).unwrap(), Prealloc::NoSlot);
    assert_eq!(pool.prealloc(&key(12)).unwrap(), Prealloc::MadeReserved);
    assert_eq!(keys(&control)[..4], before[..4]);
    assert_eq!((bit_string(&control)[..4].to_string(), cursor(&control)), ("1111".into(), hand));
    // Cold ones may go, if nobody pins them.
    clear_bits(&control);
    let pin = hit(&pool, &key(0));
    tables(&control).accessed[0].store(0, crate::sync::Ordering::SeqCst);
    assert_eq!(pool.prealloc(&key(20)).unwrap(), Prealloc::Made);
    assert_eq!(keys(&control)[..2], [Some(key(0)), Some(key(20))]);
    drop(pin);
    assert_at_rest(&control);
}

#[test]
fn p2_a_guess_nobody_asks_for_is_evicted_like_any_other() {
    let control = cache(2);
    let pool = pool(&control);
    assert_eq!(pool.prealloc(&key(1)).unwrap(), Prealloc::Made);
    assert_eq!(pool.prealloc(&key(2)).unwrap(), Prealloc::Made);
    assert_eq!((load(&pool, &key(3)), load(&pool, &key(4))), (0, 1));
    assert_at_rest(&control);
}

#[test]
fn p2_reserved_slots_are_for_guesses_only() {
    let control = Control::private(&Geometry::single(1, 3, 1, 4096)).unwrap();
    let pool = pool(&control);
    let pin = own(&pool, &key(1)).publish().unwrap();
    assert!(is_full(&pool, &key(2)));
    assert_eq!(pool.prealloc(&key(2)).unwrap(), Prealloc::MadeReserved);
    let fill = own(&pool, &key(2));
    assert_eq!(fill.slot().0, 1);
    drop((fill.publish().unwrap(), pin));
    assert_eq!(keys(&control), [Some(key(1)), Some(key(2)), None, None]);
    assert_at_rest(&control);
}

#[test]
fn p3_preallocating_a_resident_key_does_nothing() {
    let control = cache(4);
    let pool = pool(&control);
    load(&pool, &key(1));
    clear_bits(&control);
    assert_eq!(pool.prealloc(&key(1)).unwrap(), Prealloc::Resident);
    let fill = own(&pool, &key(2));
    assert_eq!(pool.prealloc(&key(2)).unwrap(), Prealloc::Resident);
    assert_eq!(bit_string(&control), "0100");
    fill.fail(crate::FailKind::Missing);
    assert_eq!(pool.prealloc(&key(2)).unwrap(), Prealloc::Resident);
    assert_eq!(keys(&control), [Some(key(1)), Some(key(2)), None, None]);
}

#[test]
fn p3_two_ranks_preallocating_one_key_make_one_slot() {
    let control = cache(8);
    let pools: Vec<_> = (0..4).map(|_| pool(&control)).collect();
    let barrier = Barrier::new(pools.len());
    for round in 0..500 {
        let made: usize = thread::scope(|scope| {
            let threads: Vec<_> = pools
                .iter()
                .map(|pool| {
                    scope.spawn(|| {
                        barrier.wait();
                        pool.prealloc(&key(round)).unwrap()
                    })
                })
                .collect();
            let made = threads.into_iter().map(|t| t.join().unwrap());
            made.filter(|made| *made == Prealloc::Made).count()
        });
        assert_eq!(made, 1, "round {round}");
        let resident = keys(&control).iter().filter(|k| **k == Some(key(round))).count();
        assert_eq!(resident, 1, "round {round}");
        assert_at_rest(&control);
        assert_eq!(pools[0].remove(&key(round)).unwrap(), crate::Removal::Removed);
    }
}
