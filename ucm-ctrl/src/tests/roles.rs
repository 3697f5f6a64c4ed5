//! Schedulers and lookups.
//!
//! **Invariant:** a lookup changes nothing.

use super::kit::*;
use crate::{ErrorKind, FailKind, MemberSpec, PoolId, Presence};

#[test]
fn s1_a_scheduler_looks_up_per_key_and_as_longest_prefix() {
    let control = cache(16);
    let pool = pool(&control);
    let scheduler = control.join(MemberSpec::scheduler()).unwrap();
    let view = scheduler.pool(PoolId(0)).unwrap();
    let keys: Vec<_> = (0..6).map(key).collect();
    for k in [0, 1, 2, 4] {
        load(&pool, &keys[k]);
    }
    let fill = own(&pool, &keys[3]);
    clear_bits(&control);
    let before = format!("{:?}", control.inspect());
    let mut out = [Presence::Filling; 7];
    view.lookup(&keys, &mut out).unwrap();
    use Presence::{Absent, Filling, Ready};
    assert_eq!(out, [Ready, Ready, Ready, Filling, Ready, Absent, Filling]);
    assert_eq!(view.prefix_lookup(&keys).unwrap(), 3);
    assert_eq!(view.prefix_lookup(&keys[4..]).unwrap(), 1);
    assert_eq!(view.prefix_lookup(&[]).unwrap(), 0);
    let without_age =
        |text: String| text.split("oldest_fill_ms").next().map(str::to_owned).unwrap_or_default();
    assert_eq!(without_age(format!("{:?}", control.inspect())), without_age(before));
    assert!(control.inspect().members.iter().any(|m| m.device_id < 0));
    drop(fill);
    let error = view.lookup(&keys, &mut out[..5]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
}

#[test]
fn s2_only_ready_shards_are_there() {
    let control = cache(4);
    let pool = pool(&control);
    let look = || {
        let mut out = [Presence::Ready];
        pool.lookup(&[key(1)], &mut out).unwrap();
        (out[0], pool.prefix_lookup(&[key(1)]).unwrap())
    };
    assert_eq!(look(), (Presence::Absent, 0));
    assert_eq!(pool.prealloc(&key(1)).unwrap(), crate::Prealloc::Made);
    assert_eq!(look(), (Presence::Absent, 0), "reserved is not there");
    let fill = own(&pool, &key(1));
    assert_eq!(look(), (Presence::Filling, 0));
    fill.fail(FailKind::Io);
    assert_eq!(look(), (Presence::Absent, 0), "failed is not there");
    let pin = own(&pool, &key(1)).publish().unwrap();
    assert_eq!(look(), (Presence::Ready, 1));
    drop(pin);
    assert_eq!(look(), (Presence::Ready, 1));
    let fill = own(&pool, &key(2));
    let token = fill.start_io();
    drop(fill);
    let mut out = [Presence::Ready];
    pool.lookup(&[key(2)], &mut out).unwrap();
    assert_eq!(out, [Presence::Absent], "draining is not there");
    drop(token);
}

#[test]
fn shards_and_pools_that_do_not_exist_are_refused() {
    let control = cache(4);
    let member = rank(&control);
    let error = member.pool(PoolId(1)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    let pool = member.pool(PoolId(0)).unwrap();
    let error = pool.acquire(&shard(1, 1)).unwrap_err();
    assert!(error.to_string().contains("shard 1 of a block with 1 shards"), "{error}");
    assert!(pool.acquire_resident(&shard(1, 1)).is_err());
    assert_at_rest(&control);
}

/// A60: two keys with equal hash and tag are two keys.
#[test]
fn a60_equal_hashes_are_told_apart() {
    for mask in [0, 0xff] {
        let control = narrow(geometry(40, 0, 1), mask);
        let pool = pool(&control);
        for k in 0..40 {
            assert_eq!(u64::from(load(&pool, &key(k))), k);
        }
        for k in 0..40 {
            assert_eq!(u64::from(hit(&pool, &key(k)).slot().0), k);
        }
        assert_eq!(pool.prefix_lookup(&[key(100)]).unwrap(), 0);
        assert!(mask != 0 || control.inspect().pools[0].longest_bucket == 40);
        // Out of the middle of the chain, in again at its head.
        for k in [20, 6, 39, 0] {
            assert_eq!(pool.remove(&key(k)).unwrap(), crate::Removal::Removed);
            assert_eq!(control.inspect().problems, Vec::<String>::new());
            assert_eq!(u64::from(load(&pool, &key(k + 100))), k);
        }
        for k in (0..40).filter(|k| ![20, 6, 39, 0].contains(k)).chain([120, 106, 139, 100]) {
            assert_eq!(u64::from(hit(&pool, &key(k)).slot().0), k % 100);
        }
        assert_at_rest(&control);
    }
}
