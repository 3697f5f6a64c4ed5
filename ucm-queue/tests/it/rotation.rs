//! Who loads what when several ranks load the same task, in simulated time.

use std::time::Duration;

use crate::support::*;

const BYTES: u64 = 64;
const D: Duration = Duration::from_millis(5);

/// Ranks with a backend of latency `D` plus up to `noise`.
fn world(ranks: usize, slots: u32, places: u64, depth: usize, noise: Duration, seed: u64) -> World {
    World::new(
        Node::new(slots, BYTES),
        ranks,
        places,
        |rank| {
            let mut random = Random(seed * 1000 + rank as u64);
            Box::new(move |_, _| (D + random.time(noise), Fate::Good))
        },
        |_, builder| builder.backend_depth(depth),
    )
}

/// Starts the same task of `len` shards on every rank, each up to `jitter` later; the time until
/// all have loaded it.
fn run(world: &mut World, len: u64, jitter: Duration, seed: u64) -> Duration {
    let mut random = Random(seed);
    let begin = world.now;
    let mut starts: Vec<(Duration, usize)> =
        (0..world.ranks.len()).map(|rank| (random.time(jitter), rank)).collect();
    starts.sort();
    let mut handles = Vec::new();
    for (at, rank) in starts {
        let wait = (begin + at).saturating_duration_since(world.now);
        world.pass(wait);
        let rank = &world.ranks[rank];
        let task = request_of(&rank.buffer, (0..len).map(key));
        handles.push(rank.queue.submit(task, world.now).unwrap());
    }
    while !handles.iter().all(ucm_queue::TaskHandle::is_done) {
        assert!(world.step(None), "nothing happens any more, but tasks are open");
    }
    let took = world.now - begin;
    for handle in &handles {
        assert_all_loaded(handle);
    }
    for rank in &world.ranks {
        (0..len).for_each(|i| rank.buffer.assert_holds(key(i), i));
    }
    world.run();
    world.node.assert_at_rest();
    took
}

#[test]
fn r3_scenario_a() {
    for seed in 0..20 {
        let mut world = world(4, 64, 12, 1, Duration::from_micros(50), seed);
        let took = run(&mut world, 12, Duration::ZERO, seed);
        let loads = world.loads();
        let first: Vec<u64> = (0..4).collect();
        let mut seen: Vec<_> = loads[..4].iter().map(|(_, _, k)| *k).collect();
        seen.sort();
        let mut wanted: Vec<_> = first.iter().map(|i| key(*i)).collect();
        wanted.sort();
        assert_eq!(seen, wanted, "step 0 is the first four shards, one per rank");
        assert_eq!(loads.len(), 12, "exactly twelve loads");
        assert!(world.loads_by_key().values().all(|n| *n == 1));
        assert!(world.owned().iter().all(|n| (2..=4).contains(n)), "{:?}", world.owned());
        assert!(took <= (12 * D).mul_f64(0.3), "took {took:?}");
    }
}

#[test]
fn q14_the_order_is_rearrange() {
    for (ranks, rank) in [(1_u32, 0_u32), (4, 0), (4, 1), (4, 3), (5, 2)] {
        for order in [ucm_queue::Order::Rotated, ucm_queue::Order::Natural] {
            let mut world = World::new(
                Node::new(64, BYTES),
                1,
                21,
                |_| Box::new(move |_, _| (D, Fate::Good)),
                |_, builder| builder.backend_depth(2).rank(rank, ranks).order(order),
            );
            run(&mut world, 21, Duration::ZERO, 0);
            let loads: Vec<_> = world.loads().into_iter().map(|(_, _, key)| key).collect();
            let rotated = ucm_queue::rearrange(21, ranks as usize, rank as usize);
            let wanted: Vec<_> = match order {
                ucm_queue::Order::Rotated => rotated.map(|i| key(i as u64)).collect(),
                _ => (0..21).map(key).collect(),
            };
            assert_eq!(loads, wanted, "rank {rank} of {ranks}");
        }
    }
}

#[test]
fn r4_loads_per_second_grow_with_the_ranks() {
    for ranks in [1_u32, 2, 4, 8] {
        for depth in [1_u32, 4] {
            let mut world =
                world(ranks as usize, 512, 256, depth as usize, Duration::ZERO, u64::from(ranks));
            let took = run(&mut world, 256, Duration::ZERO, 1);
            let ideal = D.mul_f64(256.0 / f64::from(ranks * depth));
            assert!(took <= ideal.div_f64(0.9), "{ranks} ranks, depth {depth}: {took:?}");
            assert_eq!(world.loads().len(), 256);
            for rank in &world.ranks {
                assert_eq!(rank.backend.in_flight_max(), depth as usize, "full depth, not more");
            }
        }
    }
}

#[test]
fn r5_ownership_is_balanced_in_spite_of_start_jitter() {
    for seed in 0..40 {
        let mut world = world(4, 512, 256, 4, Duration::from_micros(200), seed);
        let took = run(&mut world, 256, Duration::from_millis(1), seed);
        let owned = world.owned();
        assert!(owned.iter().all(|n| (58..=70).contains(n)), "seed {seed}: {owned:?}");
        assert_eq!(world.loads().len(), 256);
        assert!(world.loads_by_key().values().all(|n| *n == 1), "each shard is loaded once");
        assert!(took <= Duration::from_millis(92), "seed {seed}: {took:?}");
    }
}

#[test]
fn r5_a_late_rank_takes_what_is_left_and_a_slow_one_is_helped() {
    // Rank 1 is ten times slower: the others take over most of its stride.
    let mut world = World::new(
        Node::new(512, BYTES),
        4,
        256,
        |rank| {
            let delay = if rank == 1 { 10 * D } else { D };
            Box::new(move |_, _| (delay, Fate::Good))
        },
        |_, builder| builder.backend_depth(4),
    );
    let took = run(&mut world, 256, Duration::ZERO, 0);
    let owned = world.owned();
    assert_eq!(owned.iter().sum::<usize>(), 256);
    assert!(owned[1] < 20, "{owned:?}");
    // 3.1 ranks' worth of work is 104 ms; a stride of the slow rank alone would take 800 ms.
    assert!(took < Duration::from_millis(170), "took {took:?}");
}

#[test]
fn r5_natural_order_stays_correct() {
    let mut world = World::new(
        Node::new(512, BYTES),
        4,
        64,
        |_| Box::new(move |_, _| (D, Fate::Good)),
        |_, builder| builder.backend_depth(2).order(ucm_queue::Order::Natural),
    );
    run(&mut world, 64, Duration::from_millis(1), 3);
    assert_eq!(world.loads().len(), 64);
}

#[test]
fn q12_finished_shards_of_others_are_taken_while_an_own_read_is_stuck() {
    // Rank 0 has one read in flight that takes a second; the others finish everything else long
    // before. Their shards must not wait for that read.
    let mut world = World::new(
        Node::new(64, BYTES),
        2,
        12,
        |rank| {
            let mut first = rank == 0;
            Box::new(move |_, _| {
                let slow = std::mem::take(&mut first);
                (if slow { Duration::from_secs(1) } else { D }, Fate::Good)
            })
        },
        |_, builder| builder.backend_depth(1),
    );
    let mut handles = Vec::new();
    for rank in &world.ranks {
        let task = task_of(&rank.buffer, (0..12).map(key));
        handles.push(rank.queue.submit(task, world.now).unwrap());
    }
    world.pass(Duration::from_millis(200));
    let done = (0..12).filter(|i| handles[0].request(*i).is_some()).count();
    assert_eq!(done, 11, "all but the slow one");
    world.run();
    handles.iter().for_each(assert_all_loaded);
    assert_eq!(world.loads().len(), 12);
}

#[test]
fn q13_reads_overlap_copies() {
    // Four reads of 5 ms in flight make a shard every 1.25 ms; the copies take less, as long, more.
    for copy in [500_u64, 1250, 2500].map(Duration::from_micros) {
        let mut world = World::with_copies(
            Node::new(512, BYTES),
            1,
            256,
            Copies { per_item: copy, ..Copies::default() },
            |_| Box::new(move |_, _| (D, Fate::Good)),
            |_, builder| builder.backend_depth(4),
        );
        let took = run(&mut world, 256, Duration::ZERO, 0);
        let ideal = (D / 4 * 256).max(copy * 256);
        assert!(took <= ideal.mul_f64(1.1), "copies of {copy:?}: {took:?}, ideal {ideal:?}");
    }
}

#[test]
fn q7_a_small_request_does_not_wait_for_a_big_one() {
    let mut world = World::new(
        Node::new(2048, BYTES),
        1,
        1100,
        |_| Box::new(move |_, _| (D, Fate::Good)),
        |_, builder| builder.backend_depth(4),
    );
    let rank = &world.ranks[0];
    let big = rank.queue.submit(request_of(&rank.buffer, (0..1000).map(key)), world.now).unwrap();
    world.pass(D * 3 + D / 2);
    let begin = world.now;
    let rank = &world.ranks[0];
    let shard = rank.buffer.shard(key(5000), 1000);
    let request = ucm_queue::Request { shards: vec![shard], deadline: None };
    let small = rank.queue.submit(ucm_queue::Task { requests: vec![request] }, world.now).unwrap();
    while !small.is_done() {
        assert!(world.step(None));
    }
    assert!(world.now - begin <= 2 * D, "took {:?}", world.now - begin);
    assert!(!big.is_done());
    world.run();
    assert_all_loaded(&big);
}

#[test]
fn q8_two_big_requests_do_not_starve_small_ones() {
    let mut world = World::new(
        Node::new(4096, BYTES),
        1,
        2100,
        |_| Box::new(move |_, _| (D, Fate::Good)),
        |_, builder| builder.backend_depth(4),
    );
    let submit = |world: &World, keys: std::ops::Range<u64>, place: u64| {
        let rank = &world.ranks[0];
        let shards = keys.zip(place..).map(|(i, place)| rank.buffer.shard(key(i), place)).collect();
        let requests = vec![ucm_queue::Request { shards, deadline: None }];
        rank.queue.submit(ucm_queue::Task { requests }, world.now).unwrap()
    };
    let big = [submit(&world, 0..1000, 0), submit(&world, 1000..2000, 1000)];
    for round in 0..20 {
        let begin = world.now;
        let small = submit(&world, 3000 + round..3001 + round, 2000 + round);
        while !small.is_done() {
            assert!(world.step(None));
        }
        assert!(world.now - begin <= 2 * D, "took {:?}", world.now - begin);
    }
    assert!(big.iter().all(|big| !big.is_done()));
    world.run();
    big.iter().for_each(assert_all_loaded);
}
