//! The worked examples of CLOCK, touch and prealloc, and what happens when everything is pinned.
//!
//! **Invariant:** slots, bits and the hand are compared step by step.

use super::kit::*;
use crate::{BlockId, FailKind, Presence, Removal};

#[test]
fn c1_scenario_c_second_chance() {
    let control = cache(4);
    let pool = pool(&control);
    let [a, b, c, d, e, f] = [1, 2, 3, 4, 5, 6].map(key);
    assert_eq!([a, b, c, d].map(|k| load(&pool, &k)), [0, 1, 2, 3]);
    assert_eq!((bit_string(&control).as_str(), cursor(&control)), ("1111", 0));
    // Miss E: all bits cleared, slot 0 (A) is the victim.
    assert_eq!(load(&pool, &e), 0);
    assert_eq!((bit_string(&control).as_str(), cursor(&control)), ("1000", 1));
    drop(hit(&pool, &b));
    assert_eq!((bit_string(&control).as_str(), cursor(&control)), ("1100", 1));
    // Miss F: B has a second chance, C goes.
    assert_eq!(load(&pool, &f), 2);
    assert_eq!((bit_string(&control).as_str(), cursor(&control)), ("1010", 3));
    assert_eq!(keys(&control), [Some(e), Some(b), Some(f), Some(d)]);
    assert_eq!(control.statistics().evictions, 2);
    assert_at_rest(&control);
}

#[test]
fn c2_scenario_d_touch_saves_a_block() {
    let control = crate::Control::private(&crate::Geometry::single(6, 0, 3, 4096)).unwrap();
    let pool = pool(&control);
    let t: Vec<_> = (0..3).map(|s| shard(1, s)).collect();
    for (slot, key) in t.iter().chain([&key(2), &key(3), &key(4)]).enumerate() {
        assert_eq!(load(&pool, key) as usize, slot);
    }
    clear_bits(&control);
    assert_eq!(pool.touch(&[t[0].block]).unwrap(), 3);
    assert_eq!((bit_string(&control).as_str(), cursor(&control)), ("111000", 0));
    assert_eq!(load(&pool, &key(5)), 3, "U is the victim");
    assert_eq!((bit_string(&control).as_str(), cursor(&control)), ("000100", 4));
    for key in &t {
        assert!(key_in(&control, key.shard) == Some(*key), "all of T survives");
    }
    assert_at_rest(&control);
}

#[test]
fn c3_a_pinned_shard_survives_any_pressure_and_its_bit_one_lap() {
    let control = cache(4);
    let pool = pool(&control);
    let pin = own(&pool, &key(0)).publish().unwrap();
    for other in 1..200 {
        load(&pool, &key(other));
        assert_eq!(key_in(&control, pin.slot().0), Some(key(0)));
    }
    let slot = pin.slot().0;
    assert!(bits(&control)[slot as usize], "a pinned slot is passed with its bit untouched");
    drop(pin);
    // The bit buys one more lap: the next victim is another slot.
    clear_bits(&control);
    tables(&control).mark(slot);
    load(&pool, &key(500));
    assert_eq!(key_in(&control, slot), Some(key(0)));
    assert_at_rest(&control);
}

#[test]
fn c4_touch_renews_all_resident_shards_of_its_blocks_and_nothing_else() {
    let control = crate::Control::private(&crate::Geometry::single(64, 0, 5, 4096)).unwrap();
    let pool = pool(&control);
    let mut slots = std::collections::HashMap::new();
    for block in 0..8 {
        for s in (0..5).filter(|s| (block + u64::from(*s)) % 3 != 0) {
            slots.insert(shard(block, s), load(&pool, &shard(block, s)));
        }
    }
    clear_bits(&control);
    let id = |block| shard(block, 0).block;
    let touched = pool.touch(&[id(2), id(99), id(5), BlockId([3; 16])]).unwrap();
    let expected: Vec<_> =
        slots.iter().filter(|(k, _)| [id(2), id(5)].contains(&k.block)).collect();
    assert_eq!(touched, expected.len());
    let bits = bits(&control);
    for (key, slot) in &slots {
        assert_eq!(bits[*slot as usize], [id(2), id(5)].contains(&key.block), "{key:?}");
    }
    assert_eq!(bits.iter().filter(|b| **b).count(), touched);
}

#[test]
fn lookup_sets_no_bits() {
    let control = cache(4);
    let pool = pool(&control);
    load(&pool, &key(1));
    clear_bits(&control);
    let mut out = [Presence::Absent; 2];
    pool.lookup(&[key(1), key(2)], &mut out).unwrap();
    assert_eq!(out, [Presence::Ready, Presence::Absent]);
    assert_eq!(bit_string(&control), "0000");
    assert_eq!(control.inspect().pools[0].pinned, 0);
}

#[test]
fn c6_full_is_answered_at_once_and_ends_with_the_first_unpin() {
    for slots in [1_u32, 3, 64, 65] {
        let control = cache(slots);
        let [a, b] = [pool(&control), pool(&control)];
        let mut pins: Vec<_> = (0..u64::from(slots))
            .map(|k| own(if k % 2 == 0 { &a } else { &b }, &key(k)).publish().unwrap())
            .collect();
        let before = control.statistics();
        assert!(is_full(&a, &key(1000)));
        let first = control.statistics();
        let steps = first.victim_steps - before.victim_steps;
        assert!(steps <= 2 * u64::from(slots), "{steps} steps");
        assert_eq!((bit_string(&control), cursor(&control)), ("1".repeat(slots as usize), 0));
        assert!(is_full(&a, &key(1001)) && is_full(&b, &key(1000)));
        assert_eq!(control.statistics().victim_steps, first.victim_steps, "answered in O(1)");
        assert_eq!(control.statistics().fulls, 3);
        let slot = pins.remove(slots as usize / 2).slot().0;
        assert_eq!(load(&b, &key(1000)), slot);
        drop(pins);
        assert_at_rest(&control);
    }
}

#[test]
fn c6_every_way_to_become_evictable_ends_full() {
    type End = fn(&crate::Pool, crate::Fill);
    let ends: [(&str, End); 5] = [
        ("publish", |_, fill| drop(fill.publish().unwrap())),
        ("fail", |_, fill| fill.fail(FailKind::Io)),
        ("drop", |_, fill| drop(fill)),
        ("drain", |_, fill| fill.abandon_draining(FailKind::Deadline)),
        ("drain with operations", |_, fill| {
            let token = fill.start_io();
            fill.abandon_draining(FailKind::Deadline);
            drop(token);
        }),
    ];
    for (name, end) in ends {
        let control = cache(1);
        let pool = pool(&control);
        let fill = own(&pool, &key(1));
        assert!(is_full(&pool, &key(2)) && is_full(&pool, &key(2)), "{name}");
        end(&pool, fill);
        assert_eq!(load(&pool, &key(2)), 0, "{name}");
    }
}

/// Regression: a search that ran while a preallocation had the only evictable slot in its hands
/// set the "full" flag, and nobody cleared it.
#[test]
fn c6_full_does_not_stick_after_a_preallocation() {
    let control = cache(1);
    let pool = pool(&control);
    load(&pool, &key(1));
    clear_bits(&control);
    let member = &*pool.member;
    // The steps of prealloc, with somebody else's search in the middle.
    let tables = tables(&control);
    let (index, _) = tables.obtain_idle(member, control.region.hasher()).unwrap();
    assert!(is_full(&pool, &key(2)));
    let (slot, raw) = (&tables.slots[index as usize], pool.raw(&key(3)));
    slot.set_key(&raw);
    let detached = slot.load();
    let idle = detached.fresh().to(crate::Phase::Idle, None);
    assert_eq!(pool.link(tables, index, slot, &raw, [detached, idle]), crate::pool::Linked::Done);
    assert_eq!(load(&pool, &key(2)), 0);
}

/// Regression: a search that ran while an evictor looked at the only evictable slot, which it then
/// gave back because of a passing pin.
#[test]
fn c6_full_does_not_stick_after_a_claim_given_back() {
    let control = cache(1);
    let pool = pool(&control);
    load(&pool, &key(1));
    let tables = tables(&control);
    let word = tables.slots[0].load();
    let refused = tables.evict(&pool.member, control.region.hasher(), 0, word, || {
        assert!(is_full(&pool, &key(2)), "claimed at the moment");
        false
    });
    assert!(!refused);
    assert_eq!(tables.slots[0].load(), word, "given back as it was");
    assert_eq!(load(&pool, &key(2)), 0);
}

#[test]
fn remove_takes_only_what_nobody_uses() {
    let control = cache(4);
    let pool = pool(&control);
    assert_eq!(pool.remove(&key(1)).unwrap(), Removal::Absent);
    let fill = own(&pool, &key(1));
    assert_eq!(pool.remove(&key(1)).unwrap(), Removal::InUse);
    let pin = fill.publish().unwrap();
    assert_eq!(pool.remove(&key(1)).unwrap(), Removal::InUse);
    drop(pin);
    assert_eq!(pool.remove(&key(1)).unwrap(), Removal::Removed);
    assert_eq!(keys(&control), [None; 4]);
    assert_at_rest(&control);
}

/// A slot remembers how long its shard is: the bytes behind belong to an earlier key.
#[test]
fn a_pin_says_how_many_bytes_are_the_shards() {
    let pool = pool(&cache(1));
    assert_eq!(own(&pool, &key(1)).publish().unwrap().bytes(), 4096);
    assert_eq!(own(&pool, &key(2)).publish_bytes(100).unwrap().bytes(), 100);
    let Ok(crate::Acquired::Hit(pin)) = pool.acquire(&key(2)) else { panic!("no hit") };
    assert_eq!(pin.bytes(), 100);
    drop(pin);
    // The next key in the same slot does not inherit it.
    assert_eq!(own(&pool, &key(3)).publish().unwrap().bytes(), 4096);
}
