//! I: what was fetched stays, and is fetched once for the whole node.
//!
//! Mutants, each seen to fail a test of this program: bytes on their way are fetched again; an assembly is not
//! joined; an object is committed without a lease; a reader's hold does not count; fetched bytes lie packed
//! instead of in their place; one part of an object is taken for a sign that all is wanted; pulls do not wait
//! for the foreground; an end is told while its copy runs.

use std::{
    sync::{Arc, Barrier},
    thread,
};

use ucm_remote::{
    ByteRange, GetOutcome, GetRequest, Medium as _, PutOutcome, RemotePool as _, RemoveOutcome,
};
use ucm_transport::{HostEngine, TransferEngine as _};

use crate::kit::{
    Lazy, PAGE, Proxy, Setup, Spoiling, directory, each_way, eventually, idle, key, range,
    reading_of, soon, touched,
};

#[test]
fn i1_a_whole_read_is_resident_at_return() {
    each_way(|way| {
        let directory = directory();
        let owner = Setup::new("owner", 8).start(&directory);
        let reader = Setup::new("reader", 8).start(&directory);
        reader.reach(&owner, way);
        owner.publish(&directory, 1, 0, 8192);
        assert_eq!(reader.get(1, 0, 8192, &[range(0, 8192)]), GetOutcome::Remote);
        assert!(reader.is_resident(1));
        assert_eq!(touched(&reader.arena), 0);
        assert_eq!(reader.get(1, 0, 8192, &[range(5, 8000)]), GetOutcome::Local);
        assert_eq!(reader.agent.stats().wire_bytes, 8192);
        idle(&reader);
        idle(&owner);
    });
}

#[test]
fn i2_without_a_free_slot_it_is_served_and_not_resident() {
    each_way(|way| {
        let directory = directory();
        let owner = Setup::new("owner", 8).start(&directory);
        let reader = Setup::new("reader", 2).start(&directory);
        reader.reach(&owner, way);
        owner.publish(&directory, 1, 0, 8192);
        assert_eq!(reader.put(2, 0, 8192), PutOutcome::Created);
        let medium = reader.agent.medium().medium();
        let lease = medium.lease(&key(2), soon()).unwrap().lease;
        assert_eq!(reader.get(1, 0, 8192, &[range(0, 8192)]), GetOutcome::Remote);
        assert!(!reader.is_resident(1) && reader.is_resident(2));
        assert_eq!(touched(&reader.arena), 8192);
        medium.release(lease);
        // Now something can be evicted for it.
        assert_eq!(reader.get(1, 0, 8192, &[range(0, 8192)]), GetOutcome::Remote);
        assert!(reader.is_resident(1));
        idle(&reader);
    });
}

#[test]
fn i3_scattered_pages_are_as_good() {
    each_way(|way| {
        let directory = directory();
        let owner = Setup::new("owner", 8).start(&directory);
        let reader = Setup::new("reader", 8).start(&directory);
        reader.reach(&owner, way);
        owner.publish(&directory, 1, 0, 3 * PAGE);
        (10..18).for_each(|number| assert_eq!(reader.put(number, 0, PAGE), PutOutcome::Created));
        for number in [10, 12, 14, 16] {
            let removed = reader.client.remove(&[key(number)], soon());
            assert_eq!(removed, [RemoveOutcome::Removed]);
        }
        assert_eq!(reader.get(1, 0, 3 * PAGE, &[range(0, 3 * PAGE)]), GetOutcome::Remote);
        assert!(reader.is_resident(1));
        assert_eq!(reader.get(1, 0, 3 * PAGE, &[range(4000, 8000)]), GetOutcome::Local);
        for number in [11, 13, 15, 17] {
            assert_eq!(reader.get(number, 0, PAGE, &[range(0, PAGE)]), GetOutcome::Local);
        }
    });
}

#[test]
fn i4_out_of_order_the_bytes_land_in_their_place() {
    each_way(|way| {
        let directory = directory();
        let owner = Setup::new("owner", 8).start(&directory);
        let reader = Setup::new("reader", 8).start(&directory);
        let small = Setup::new("small", 1).start(&directory);
        owner.publish(&directory, 1, 0, 8192);
        let ranges = [range(6000, 2192), range(0, 3000), range(3000, 3000)];
        for node in [&reader, &small] {
            node.reach(&owner, way);
            assert_eq!(node.get(1, 0, 8192, &ranges), GetOutcome::Remote);
        }
        assert_eq!(reader.get(1, 0, 8192, &[range(0, 8192)]), GetOutcome::Local);
        assert!(!small.is_resident(1), "what was packed is not the object");
        assert_eq!(small.get(1, 0, 8192, &[range(0, 8192)]), GetOutcome::Remote);
    });
}

#[test]
fn i5_a_part_read_becomes_whole_in_the_background() {
    each_way(|way| {
        let directory = directory();
        let owner = Setup::new("owner", 8).start(&directory);
        let reader = Setup::new("reader", 8).start(&directory);
        reader.reach(&owner, way);
        owner.publish(&directory, 1, 0, 20_000);
        // One part is no sign that the rest is wanted, a second one is.
        assert!(reader.get(1, 0, 20_000, &[range(7000, 100)]).is_served());
        assert_eq!(reader.agent.stats().pulled_bytes, 0);
        assert!(reader.get(1, 0, 20_000, &[range(9000, 100)]).is_served());
        eventually("the rest was pulled", || reader.is_resident(1));
        assert_eq!(reader.get(1, 0, 20_000, &[range(0, 20_000)]), GetOutcome::Local);
        let stats = reader.agent.stats();
        assert_eq!((stats.wire_bytes, stats.pulled_bytes), (20_000, 19_800));
        idle(&reader);
    });
}

#[test]
fn i6_without_prefetch_parts_stay_parts() {
    each_way(|way| {
        let directory = directory();
        let owner = Setup::new("owner", 8).start(&directory);
        let reader = Setup::new("reader", 8).with(|b| b.prefetch(false)).start(&directory);
        reader.reach(&owner, way);
        owner.publish(&directory, 1, 0, 8192);
        owner.publish(&directory, 2, 0, 8192);
        for part in 0..4 {
            assert!(reader.get(1, 0, 8192, &[range(part * 1000, 1000)]).is_served());
        }
        // What would have been begun is ahead of this in the puller's queue.
        assert!(reader.get(2, 0, 8192, &[range(0, 8192)]).is_served());
        assert!(!reader.is_resident(1) && reader.is_resident(2));
        let stats = reader.agent.stats();
        assert_eq!((stats.wire_bytes, stats.pulled_bytes), (4000 + 8192, 0));
    });
}

#[test]
fn i7_layer_groups_cost_the_object_once() {
    each_way(|way| {
        let directory = directory();
        let owner = Setup::new("owner", 40).start(&directory);
        let reader = Setup::new("reader", 40).start(&directory);
        reader.reach(&owner, way);
        let len = 8 * 12_345;
        owner.publish(&directory, 1, 0, len);
        for group in 0..8 {
            assert!(reader.get(1, 0, len, &[range(group * 12_345, 12_345)]).is_served());
        }
        eventually("it is whole", || reader.is_resident(1));
        assert_eq!(reader.agent.stats().wire_bytes, len);
        assert_eq!(reader.agent.stats().route_calls, 1);
        idle(&reader);
    });
}

/// I8: four ranks read the same cold keys, whole and by layers, each through a client of its own.
#[test]
fn i8_ranks_share_every_byte() {
    each_way(|way| {
        for (groups, prefetch) in [(1, true), (8, true), (8, false), (61, true)] {
            let directory = directory();
            let (keys, len) = (6, 61 * 500);
            let owner = Setup::new("owner", 60).start(&directory);
            let reader = Setup::new("reader", 60)
                .with(move |b| b.prefetch(prefetch).piece_bytes(5000).batch_bytes(20_000))
                .start(&directory);
            reader.reach(&owner, way);
            (0..keys).for_each(|number| owner.publish(&directory, number, 0, len));
            let begin = Barrier::new(4);
            thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| {
                        let engine = std::sync::Arc::new(HostEngine::builder().build().unwrap());
                        let client = reader.agent.client(engine.clone()).unwrap();
                        begin.wait();
                        let mut from = 0;
                        for group in 0..groups {
                            let to = len * (group + 1) / groups;
                            let part = range(from, to - from);
                            from = to;
                            let (mut requests, mut readings) = (Vec::new(), Vec::new());
                            for number in 0..keys {
                                let mut reading = reader.reading(number, len, &[part]);
                                let memory = reading.rebase(&*engine);
                                requests.push(reading.request.clone());
                                readings.push((reading, memory));
                            }
                            let outcomes = client.get(&requests, soon());
                            assert!(outcomes.iter().all(|o| o.is_served()), "{outcomes:?}");
                            for ((reading, region), number) in readings.iter().zip(0..) {
                                reading.check(number, 0);
                                engine.deregister(*region).unwrap();
                            }
                        }
                    });
                }
            });
            let stats = reader.agent.stats();
            assert_eq!(stats.wire_bytes, keys * len, "{groups} groups, prefetch {prefetch}");
            assert!((0..keys).all(|number| reader.is_resident(number)));
            idle(&reader);
        }
    });
}

/// Pulls begin when nothing in the foreground is on the wire, and not before.
#[test]
fn i7_pulls_wait_for_the_foreground() {
    let directory = directory();
    let proxy = Proxy::new();
    let address = proxy.address.to_string();
    let owner = Setup::new("owner", 16).with(move |b| b.advertise(&*address)).start(&directory);
    proxy.lead_to(owner.agent.address().unwrap());
    let reader = Setup::new("reader", 16).start(&directory);
    owner.publish(&directory, 1, 0, 8192);
    owner.publish(&directory, 2, 0, 8192);
    assert!(reader.get(1, 0, 8192, &[range(0, 10)]).is_served());
    proxy.allow(0);
    thread::scope(|scope| {
        let large = scope.spawn(|| reader.get(2, 0, 8192, &[range(0, 8192)]));
        eventually("it is on its way", || reader.agent.stats().fetches == 1);
        let second = scope.spawn(|| reader.get(1, 0, 8192, &[range(100, 10)]));
        eventually("it is on its way", || reader.agent.stats().fetches == 2);
        // The rest of key 1 is wanted from now on; the puller has all the time it needs.
        thread::sleep(std::time::Duration::from_millis(50));
        assert_eq!(reader.agent.stats().fetches, 2, "a pull is on the wire");
        proxy.allow_all();
        assert!(large.join().unwrap().is_served() && second.join().unwrap().is_served());
    });
    eventually("it is whole", || reader.is_resident(1));
    let stats = reader.agent.stats();
    assert_eq!((stats.wire_bytes, stats.pulled_bytes), (2 * 8192, 8172));
    idle(&reader);
}

/// I9: the object is put here while it is on its way here.
#[test]
fn i9_already_there_when_it_arrives() {
    let directory = directory();
    let proxy = Proxy::new();
    let address = proxy.address.to_string();
    let owner = Setup::new("owner", 16).with(move |b| b.advertise(&*address)).start(&directory);
    proxy.lead_to(owner.agent.address().unwrap());
    let reader = Setup::new("reader", 16).with(|b| b.prefetch(false)).start(&directory);
    owner.publish(&directory, 1, 0, 8192);
    owner.publish(&directory, 2, 0, 8192);
    assert!(reader.get(2, 0, 8192, &[range(0, 8192)]).is_served(), "connected");
    proxy.allow(1000);
    thread::scope(|scope| {
        let waiting = scope.spawn(|| reader.get(1, 0, 8192, &[range(0, 8192)]));
        eventually("it is on its way", || reader.agent.stats().fetches > 0);
        assert_eq!(reader.put(1, 0, 8192), PutOutcome::Created);
        assert_eq!(reader.get(1, 0, 8192, &[range(0, 8192)]), GetOutcome::Local);
        proxy.allow_all();
        assert!(waiting.join().unwrap().is_served());
    });
    assert_eq!(reader.get(1, 0, 8192, &[range(0, 8192)]), GetOutcome::Local);
    idle(&reader);
}

/// I9: an object that is complete cannot be evicted while its reader copies.
#[test]
fn i9_what_is_read_is_not_evicted() {
    each_way(|way| {
        let directory = directory();
        let owner = Setup::new("owner", 8).start(&directory);
        let reader = Setup::new("reader", 2).start(&directory);
        reader.reach(&owner, way);
        owner.publish(&directory, 1, 0, 8192);
        owner.publish(&directory, 2, 0, 8192);
        // An engine whose copies wait until they are let go.
        let gate = std::sync::Arc::new(crate::kit::Gated::default());
        let client = reader.agent.client(gate.clone()).unwrap();
        let mut reading = reader.reading(1, 8192, &[range(0, 8192)]);
        let region = reading.rebase(&*gate);
        thread::scope(|scope| {
            let slow = scope.spawn(|| client.get(std::slice::from_ref(&reading.request), soon()));
            eventually("it copies", || gate.waiting() == 1);
            // Both pages are read from: this one finds no slot, and takes the arena.
            assert_eq!(reader.get(2, 0, 8192, &[range(0, 8192)]), GetOutcome::Remote);
            assert!(!reader.is_resident(2));
            gate.open();
            assert_eq!(slow.join().unwrap(), [GetOutcome::Remote]);
        });
        reading.check(1, 0);
        gate.deregister(region).unwrap();
        assert_eq!(reader.get(2, 0, 8192, &[range(0, 8192)]), GetOutcome::Remote);
        assert!(reader.is_resident(2) && !reader.is_resident(1));
        idle(&reader);
    });
}

/// An engine that copies by itself: a key's end is told when its bytes are there, not when they are on their
/// way.
#[test]
fn i10_an_end_is_told_when_its_bytes_are_there() {
    let directory = directory();
    let len = 6 << 20;
    let large = |name| Setup { page_bytes: 1 << 20, ..Setup::new(name, 24) };
    let owner = large("owner").start(&directory);
    let reader = large("reader").start(&directory);
    let engine = std::sync::Arc::new(HostEngine::builder().workers(1).build().unwrap());
    let client = reader.agent.client(engine.clone()).unwrap();
    (0..3).for_each(|number| owner.publish(&directory, number, 0, len));
    let readings: Vec<_> = (0..3)
        .map(|number| crate::kit::reading_of(&*engine, number, len, &[range(0, len)]))
        .collect();
    let requests: Vec<_> = readings.iter().map(|reading| reading.request.clone()).collect();
    let mut told = Vec::new();
    client.get_each(&requests, soon(), |index, outcome| {
        assert_eq!(outcome, GetOutcome::Remote);
        readings[index].check(index as u64, 0);
        told.push(index);
    });
    told.sort_unstable();
    assert_eq!(told, [0, 1, 2]);
    readings.iter().for_each(|reading| reading.free(&*engine));
    idle(&reader);
}

/// Keys that are ready together are copied by one plan; one whose copy fails fails alone. Fails when the keys
/// of a plan share its end.
#[test]
fn i10_a_copy_that_fails_later_fails_its_key_only() {
    let directory = directory();
    let node = Setup::new("node", 16).start(&directory);
    let engine = std::sync::Arc::new(Spoiling::default());
    let client = node.agent.client(engine.clone()).unwrap();
    (0..5).for_each(|number| assert!(node.put(number, 3, 8192).is_stored()));
    let readings: Vec<_> = (0..5)
        .map(|number| crate::kit::reading_of(&*engine, number, 8192, &[range(0, 8192)]))
        .collect();
    engine.spoil(readings[2].region());
    let requests: Vec<_> = readings.iter().map(|reading| reading.request.clone()).collect();
    let outcomes = client.get(&requests, soon());
    for (number, (reading, outcome)) in (0..).zip(readings.iter().zip(outcomes)) {
        if number == 2 {
            assert_eq!(outcome, GetOutcome::Failed);
        } else {
            assert_eq!(outcome, GetOutcome::Local, "key {number}");
            reading.check(number, 3);
        }
        reading.free(&*engine);
    }
    idle(&node);
}

#[test]
fn i10_a_failed_copy_fails_its_key_only() {
    each_way(|way| {
        let directory = directory();
        let owner = Setup::new("owner", 8).start(&directory);
        let reader = Setup::new("reader", 8).start(&directory);
        reader.reach(&owner, way);
        owner.publish(&directory, 1, 0, 8192);
        owner.publish(&directory, 2, 0, 8192);
        let whole: [ByteRange; 1] = [range(0, 8192)];
        let bad = reader.reading(1, 8192, &whole);
        let request: GetRequest = bad.request.clone();
        // Its destination is gone.
        drop(reader.read(&[bad], soon()));
        reader.client.remove(&[key(1)], soon());
        owner.publish(&directory, 1, 0, 8192);
        let good = reader.reading(2, 8192, &whole);
        let outcomes = reader.client.get(&[request, good.request.clone()], soon());
        assert_eq!(outcomes, [GetOutcome::Failed, GetOutcome::Remote]);
        good.check(2, 0);
        assert!(reader.is_resident(1), "the object itself is good");
        assert_eq!(reader.get(1, 0, 8192, &whole), GetOutcome::Local);
        idle(&reader);
    });
}

#[test]
fn i11_an_object_over_16_mib_on_every_route() {
    each_way(|way| {
        let len = (16 << 20) + 12_345;
        let directory = directory();
        let large = |name, pages| Setup { page_bytes: 1 << 20, ..Setup::new(name, pages) };
        let owner = large("owner", 18).start(&directory);
        let reader = large("reader", 18).start(&directory);
        let small = Setup { arena: 1 << 20, ..large("small", 1) }.start(&directory);
        owner.publish(&directory, 1, 0, len);
        reader.reach(&owner, way);
        small.reach(&owner, way);
        let parts: Vec<ByteRange> = (0..)
            .map(|i| i << 20)
            .take_while(|at| *at < len)
            .map(|at| range(at, (len - at).min(1 << 20)))
            .collect();
        assert_eq!(small.get(1, 0, len, &parts), GetOutcome::Remote);
        assert_eq!(reader.get(1, 0, len, &[range(1 << 20, 15 << 20)]), GetOutcome::Remote);
        assert_eq!(reader.get(1, 0, len, &[range(0, len)]), GetOutcome::Remote);
        assert_eq!(reader.get(1, 0, len, &[range(0, len)]), GetOutcome::Local);
        assert_eq!(reader.agent.stats().wire_bytes, len);
        assert_eq!(small.agent.stats().wire_bytes, len);
    });
}

/// The arena holds one round: the next one begins only when what was copied of the first is let go, though
/// nobody has asked the engine for it. Mutant, seen to wait for ever here: a call waits for news while ended
/// copies hold the arena.
#[test]
fn a_call_lets_go_of_what_was_copied_before_it_waits() {
    let directory = directory();
    let owner = Setup::new("owner", 16).start(&directory);
    let reader = Setup::new("reader", 1).start(&directory);
    owner.publish(&directory, 1, 0, 20_480);
    let engine = Arc::new(Lazy::default());
    let client = reader.agent.client(Arc::clone(&engine) as _).unwrap();
    let ranges: Vec<_> = (0..5).map(|number| range(number * 4096, 4096)).collect();
    let reading = reading_of(&*engine, 1, 20_480, &ranges);
    assert_eq!(client.get(std::slice::from_ref(&reading.request), soon()), [GetOutcome::Remote]);
    reading.check(1, 0);
    idle(&reader);
}
