//! P1–P9 and what shards pass through the pool, split and in turns.

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use proptest::prelude::*;
use ucm_ctrl::{Acquired, FailKind, Fill};
use ucm_queue::{
    BufferId, BufferRegistrar, DumpRef, DumpTask, ErrorKind, Outcome, Request, ShardRef,
    SlotMemory, StagingLease, StagingPool, Task,
};
use ucm_store::IoMemory;
use ucm_transport::{Memory, RegionId};

use crate::support::*;

const BYTES: u64 = 512;

/// A pool that no engine knows.
fn pool(depth: u32) -> StagingPool {
    let bytes = usize::try_from(u64::from(depth) * BYTES).unwrap();
    let region = RegionId { index: 7, generation: 1 };
    StagingPool::new(Cells::new(Memory::host(bytes).unwrap(), region, depth, BYTES), 0..depth)
        .unwrap()
}

fn index(lease: &StagingLease) -> u32 {
    lease.id().index
}

/// Takes every slot of the node away from the queues.
fn fill_up(node: &Node, rank: &Rank) -> Vec<Fill> {
    (0..u64::from(node.count))
        .map(|i| match rank.pool.acquire(&key(100_000 + i)).unwrap() {
            Acquired::Owner(fill) => fill,
            got => panic!("{got:?}"),
        })
        .collect()
}

#[test]
fn p1_addresses_are_reused_lowest_index_first() {
    let pool = pool(4);
    let mut leases: Vec<_> = (0..4).map(|_| pool.try_acquire().unwrap()).collect();
    assert_eq!(leases.iter().map(index).collect::<Vec<_>>(), [0, 1, 2, 3]);
    let addr = leases[1].addr(0, BYTES).unwrap();
    leases.swap_remove(3);
    leases.swap_remove(1);
    let again = pool.try_acquire().unwrap();
    assert_eq!((index(&again), again.addr(0, BYTES).unwrap()), (1, addr));
    assert_eq!(index(&pool.try_acquire().unwrap()), 3);
    assert_eq!(pool.in_use_max(), 4);
}

#[test]
fn p2_exhaustion_is_told_at_once() {
    let pool = pool(1);
    let lease = pool.try_acquire().unwrap();
    assert!(pool.try_acquire().is_none());
    assert!(pool.acquire(Some(Instant::now())).is_none());
    assert_eq!(pool.waiting(), 0, "who gave up is forgotten");
    drop(lease);
    assert!(pool.try_acquire().is_some());
}

#[test]
fn p3_waiters_are_woken_once_per_release_in_their_order() {
    let pool = pool(2);
    let held = [pool.try_acquire().unwrap(), pool.try_acquire().unwrap()];
    let (served, order) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        for n in 0..6 {
            let (waiter, served) = (pool.clone(), served.clone());
            scope.spawn(move || {
                let lease = waiter.acquire(watchdog()).unwrap();
                served.send((n, lease)).unwrap();
            });
            eventually("the waiter", || pool.waiting() == n + 1);
        }
        let mut released: Vec<StagingLease> = held.into();
        for n in 0..6 {
            // One release, one waiter, and nobody can take it from him.
            drop(released.remove(0));
            assert!(pool.try_acquire().is_none());
            let (who, lease) = order.recv_timeout(WATCHDOG).unwrap();
            assert_eq!((who, pool.waiting()), (n, 5 - n));
            released.push(lease);
        }
    });
    assert_eq!(pool.in_use(), 0);
}

#[test]
fn p4_a_large_request_is_split_and_its_parts_find_their_owners() {
    // Three shards to a buffer, two buffers; ten shards, of which two fail.
    let node = Node::new(4, BYTES);
    let (rank, other) = (node.rank(), node.rank());
    let backend = Script::holding();
    let pool = rank.buffers_of(2, 3 * BYTES);
    let queue = rank.builder(backend.clone()).backend_depth(16).staging(pool.clone());
    let queue = queue.start().unwrap();
    let fills = fill_up(&node, &other);
    let buffer = Buffer::of(&queue, 10, BYTES);
    backend.fail(key(2), [ucm_store::ErrorKind::Io]);
    backend.fail(key(7), [ucm_store::ErrorKind::Corrupt]);
    let handle = queue.submit(request_of(&buffer, (0..10).map(key))).unwrap();
    backend.wait_held(6);
    assert_eq!(backend.held(), (0..6).map(key).collect::<Vec<_>>(), "in order, two buffers full");
    assert_eq!(pool.in_use(), 2);
    backend.open();
    let Outcome::Recompute { shards, kind } = outcomes(&handle).remove(0) else { panic!() };
    assert_eq!((shards, kind), (vec![2, 7], FailKind::Io));
    (0..10).filter(|i| ![2, 7].contains(i)).for_each(|i| buffer.assert_holds(key(i), i));
    [2, 7].iter().for_each(|i| buffer.assert_untouched(*i));
    assert_eq!((queue.stats().bypass_shards, pool.in_use()), (8, 0));
    drop(fills);
    queue.close().unwrap();
    node.assert_at_rest();
}

#[test]
fn p4_a_shard_larger_than_a_buffer_is_refused_with_both_numbers() {
    let node = Node::new(4, BYTES);
    let rank = node.rank();
    let builder = rank.builder(Script::new()).staging(rank.buffers_of(2, BYTES - 1));
    let error = builder.start().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TooLarge);
    assert!(error.to_string().contains("512") && error.to_string().contains("511"), "{error}");
}

#[test]
fn p5_nothing_to_load_needs_no_buffer() {
    let node = Node::new(4, BYTES);
    let (rank, other) = (node.rank(), node.rank());
    let pool = rank.buffers(1);
    let queue = rank.builder(Script::new()).staging(pool.clone()).start().unwrap();
    let _fills = fill_up(&node, &other);
    let buffer = Buffer::of(&queue, 1, BYTES);
    let nothing = ShardRef { len: Some(0), ..buffer.shard(key(0), 0) };
    let requests = vec![Request { shards: vec![nothing], deadline: None }];
    assert_all_loaded(&queue.submit(Task { requests }).unwrap());
    assert_eq!((pool.in_use_max(), queue.stats().backend_loads), (0, 0));
    buffer.assert_untouched(0);
}

#[test]
fn p6_p7_p9_names_are_checked() {
    let (pool, another) = (pool(2), pool(2));
    let lease = pool.try_acquire().unwrap();
    let clone = lease.clone();
    let id = lease.id();
    let kind = |id: BufferId, offset, len| pool.resolve(id, offset, len).map_err(|e| e.kind());
    assert_eq!(kind(id, 10, 20), Ok(lease.addr(10, 20).unwrap()));
    assert_eq!(kind(id, 10, BYTES - 9), Err(ErrorKind::OutOfBounds));
    assert_eq!(kind(id, u64::MAX, 2), Err(ErrorKind::OutOfBounds));
    assert_eq!(kind(another.try_acquire().unwrap().id(), 0, 1), Err(ErrorKind::Invalid), "P7");
    assert_eq!(kind(BufferId { index: 2, ..id }, 0, 1), Err(ErrorKind::Invalid));
    drop(lease);
    assert!(kind(id, 0, 1).is_ok(), "a clone still holds it");
    drop(clone);
    assert_eq!(kind(id, 0, 1), Err(ErrorKind::Stale), "P6");
    let again = pool.try_acquire().unwrap();
    assert_eq!(again.id().index, id.index);
    assert_eq!(kind(id, 0, 1), Err(ErrorKind::Stale), "the same buffer, another use");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..Default::default() })]
    #[test]
    fn p8_after_any_schedule_the_pool_is_full(
        depth in 1_u32..6,
        steps in proptest::collection::vec((0_u8..6, 0_usize..8), 1..200),
    ) {
        let pool = pool(depth);
        let mut held: Vec<StagingLease> = Vec::new();
        let mut ids: Vec<BufferId> = Vec::new();
        for (step, at) in steps {
            let in_use: std::collections::BTreeSet<u32> = held.iter().map(index).collect();
            match step {
                0 | 1 => match pool.try_acquire() {
                    Some(lease) => {
                        let lowest = (0..depth).find(|i| !in_use.contains(i));
                        prop_assert_eq!(Some(index(&lease)), lowest, "P1");
                        prop_assert!(!ids.contains(&lease.id()), "a name is used once");
                        ids.push(lease.id());
                        held.push(lease);
                    }
                    None => prop_assert_eq!(in_use.len(), depth as usize, "P2"),
                },
                2 if !held.is_empty() => {
                    held.swap_remove(at % held.len());
                }
                3 if !held.is_empty() => held.push(held[at % held.len()].clone()),
                4 if !held.is_empty() => {
                    // A thread that panics with a lease.
                    let lease = held.swap_remove(at % held.len());
                    let hold = std::panic::AssertUnwindSafe(move || {
                        let _lease = lease;
                        std::panic::resume_unwind(Box::new("over"));
                    });
                    let _ = std::panic::catch_unwind(hold);
                }
                _ => {
                    // Somebody who waits, and gives up if there is nothing.
                    let lease = pool.acquire(Some(Instant::now()));
                    prop_assert_eq!(lease.is_some(), in_use.len() < depth as usize);
                    ids.extend(lease.map(|lease| lease.id()));
                }
            }
            let now: std::collections::BTreeSet<u32> = held.iter().map(index).collect();
            prop_assert_eq!(pool.in_use() as usize, now.len());
            for id in &ids {
                let live = held.iter().any(|lease| lease.id() == *id);
                prop_assert_eq!(pool.resolve(*id, 0, BYTES).is_ok(), live, "P6");
            }
        }
        drop(held);
        prop_assert_eq!(pool.in_use(), 0);
    }
}

/// Notes what it is told, or refuses.
#[derive(Debug, Default)]
struct Registrar {
    refuses: bool,
    known: Mutex<Vec<(StagingPool, Vec<IoMemory>)>>,
}

impl BufferRegistrar for Registrar {
    fn register_buffers(&self, pool: &StagingPool, buffers: Vec<IoMemory>) -> Result<(), String> {
        if self.refuses {
            return Err("no more memory may be locked".to_owned());
        }
        self.known.lock().unwrap().push((pool.clone(), buffers));
        Ok(())
    }
}

#[test]
fn p9_registered_or_not_the_bytes_are_the_same() {
    for refuses in [false, true] {
        let node = Node::new(2, BYTES);
        let (rank, other) = (node.rank(), node.rank());
        let registrar = Arc::new(Registrar { refuses, ..Registrar::default() });
        let queue = rank
            .builder(Script::new())
            .staging(rank.buffers_of(3, 2 * BYTES))
            .dump_staging(rank.buffers(1))
            .registrar(registrar.clone())
            .start()
            .unwrap();
        let _fills = fill_up(&node, &other);
        let buffer = Buffer::of(&queue, 8, BYTES);
        assert_all_loaded(&queue.submit(request_of(&buffer, (0..8).map(key))).unwrap());
        (0..8).for_each(|i| buffer.assert_holds(key(i), i));
        // Reported, one way or the other.
        assert_eq!(queue.stats().staging_registered, if refuses { 0 } else { 2 });
        let known = registrar.known.lock().unwrap();
        let sizes: Vec<_> = known.iter().map(|(_, b)| (b.len(), b[0].len() as u64)).collect();
        assert_eq!(sizes, if refuses { vec![] } else { vec![(3, 2 * BYTES), (1, BYTES)] });
    }
}

#[test]
fn slots_the_engine_cannot_reach_are_staged_both_ways() {
    let mut node = Node::new(16, BYTES);
    node.unreachable = true;
    let rank = node.rank();
    let backend = Script::new();
    let builder = rank.builder(backend.clone()).staging(rank.buffers(2));
    let queue = builder.dump_staging(rank.buffers(1)).start().unwrap();
    let buffer = Buffer::of(&queue, 16, BYTES);
    for _ in 0..2 {
        assert_all_loaded(&queue.submit(task_of(&buffer, (0..8).map(key))).unwrap());
        (0..8).for_each(|i| buffer.assert_holds(key(i), i));
        (0..8).for_each(|i| buffer.wipe(i));
    }
    (8..12).for_each(|i| buffer.fill(key(i), i));
    let shards = (8..12).map(|i| DumpRef { key: key(i), src: buffer.addr(i), len: None }).collect();
    let dump = queue.dump(DumpTask { shards, durable: true, ..DumpTask::default() }).unwrap();
    assert_eq!(dump.wait_durable(watchdog()), Some(vec![Ok(()); 4]));
    (8..12).for_each(|i| assert_eq!(backend.stored(key(i)).unwrap(), buffer.bytes(i)));
    (8..12).for_each(|i| buffer.wipe(i));
    assert_all_loaded(&queue.submit(task_of(&buffer, (0..12).map(key))).unwrap());
    (0..12).for_each(|i| buffer.assert_holds(key(i), i));
    let stats = queue.stats();
    assert_eq!((stats.backend_loads, stats.staged_shards), (8, 8 + 8 + 4 + 12));
    queue.close().unwrap();
    node.assert_at_rest();
}

#[test]
fn without_buffers_an_unreachable_slot_is_an_outcome() {
    let mut node = Node::new(4, BYTES);
    node.unreachable = true;
    let rank = node.rank();
    let queue = rank.builder(Script::new()).start().unwrap();
    let buffer = Buffer::of(&queue, 1, BYTES);
    let handle = queue.submit(task_of(&buffer, [key(0)])).unwrap();
    let failed = Outcome::Recompute { shards: vec![0], kind: FailKind::Unavailable };
    assert_eq!(outcomes(&handle), [failed]);
    buffer.assert_untouched(0);
}

#[test]
fn a55_what_a_buffer_held_before_reaches_nobody() {
    // Buffers and slots full of poison; one read in three fails after half of its bytes.
    let node = Node::new(2, BYTES);
    let (rank, other) = (node.rank(), node.rank());
    let memory = Memory::host(usize::try_from(2 * BYTES).unwrap()).unwrap();
    memory.write(0, &vec![0xdd; memory.len()]).unwrap();
    let region = ucm_transport::TransferEngine::register(&*rank.gate, memory.clone()).unwrap();
    let cells: Arc<dyn SlotMemory> = Cells::new(memory, region, 2, BYTES);
    let backend = Script::new();
    let queue = rank.builder(backend.clone()).staging(StagingPool::new(cells, 0..2).unwrap());
    let queue = queue.start().unwrap();
    let _fills = fill_up(&node, &other);
    let buffer = Buffer::of(&queue, 30, BYTES);
    (0..30).filter(|i| i % 3 == 0).for_each(|i| {
        backend.fail(key(i), [ucm_store::ErrorKind::Io]);
    });
    let handle = queue.submit(request_of(&buffer, (0..30).map(key))).unwrap();
    let Outcome::Recompute { shards, .. } = outcomes(&handle).remove(0) else { panic!() };
    assert_eq!(shards, (0..30).filter(|i| i % 3 == 0).collect::<Vec<u32>>());
    for i in 0..30 {
        if i % 3 == 0 {
            buffer.assert_untouched(i);
        } else {
            buffer.assert_holds(key(i), i);
        }
    }
}

/// A world whose cache is full, so that everything is staged: `depth` buffers of `shards` shards.
fn staged_world(depth: u32, shards: u64, limit: usize, places: u64) -> (World, Vec<Fill>, Rank) {
    let node = Node::new(4, BYTES);
    let other = node.rank();
    let fills = fill_up(&node, &other);
    let world = World::new(
        node,
        1,
        places,
        |_| Box::new(move |_, _| (TURN, Fate::Good)),
        |rank, builder| {
            let builder = builder.backend_depth(64).tasks_in_flight(limit);
            builder.staging(rank.buffers_of(depth, shards * BYTES))
        },
    );
    (world, fills, other)
}

/// One read; with all reads of a buffer at once also the time of a buffer's turn.
const TURN: Duration = Duration::from_millis(5);

fn submit(world: &World, keys: std::ops::Range<u64>, place: u64) -> ucm_queue::TaskHandle {
    let rank = &world.ranks[0];
    let shards = keys.zip(place..).map(|(i, place)| rank.buffer.shard(key(i), place)).collect();
    let requests = vec![Request { shards, deadline: None }];
    rank.queue.submit(Task { requests }, world.now).unwrap()
}

#[test]
fn q1_requests_in_flight_stay_below_the_limit_and_the_depth() {
    for (limit, depth) in [(2, 4), (4, 4), (8, 4), (usize::MAX, 3)] {
        let (mut world, _fills, _other) = staged_world(depth, 2, limit, 200);
        let handles: Vec<_> =
            (0..20).map(|n| submit(&world, n * 10..n * 10 + 10, n * 10)).collect();
        let mut most = 0;
        while world.step(None) {
            let stats = world.ranks[0].queue.stats();
            most = most.max(stats.staging_in_use);
            assert!(stats.backend_in_flight <= u64::from(depth) * 2, "two shards to a buffer");
        }
        handles.iter().for_each(assert_all_loaded);
        let stats = world.ranks[0].queue.stats();
        assert!(stats.tasks_in_flight_max <= limit as u64, "{stats:?}");
        assert_eq!(most, u64::from(depth), "spare buffers are used: one request stripes");
        assert_eq!(stats.staging_in_use, 0);
    }
}

#[test]
fn q7_a_small_request_behind_a_big_one_is_there_within_two_turns_of_a_buffer() {
    for limit in [1, 2, usize::MAX] {
        let (mut world, _fills, _other) = staged_world(4, 8, limit, 1100);
        let big = submit(&world, 0..1000, 0);
        world.pass(TURN * 3 + TURN / 2);
        let begin = world.now;
        let small = submit(&world, 5000..5001, 1000);
        while !small.is_done() {
            assert!(world.step(None));
        }
        let took = world.now - begin;
        assert!(took <= 2 * TURN, "limit {limit}: {took:?}");
        assert!(!big.is_done());
        world.run();
        assert_all_loaded(&big);
        (0..1000).for_each(|i| world.ranks[0].buffer.assert_holds(key(i), i));
    }
}

#[test]
fn q8_two_big_requests_leave_turns_to_small_ones() {
    for limit in [2, usize::MAX] {
        let (mut world, _fills, _other) = staged_world(2, 4, limit, 2100);
        let big = [submit(&world, 0..1000, 0), submit(&world, 1000..2000, 1000)];
        for round in 0..20 {
            let begin = world.now;
            let small = submit(&world, 3000 + round..3001 + round, 2000 + round);
            while !small.is_done() {
                assert!(world.step(None));
            }
            let took = world.now - begin;
            assert!(took <= 3 * TURN, "limit {limit}, round {round}: {took:?}");
        }
        assert!(big.iter().all(|big| !big.is_done()));
        assert!(limit == 2 || world.ranks[0].queue.stats().staging_yields > 0);
        world.run();
        big.iter().for_each(assert_all_loaded);
    }
}

#[test]
fn q6_a_buffer_is_not_refilled_before_its_copy_has_ended() {
    let node = Node::new(1, BYTES);
    let (rank, other) = (node.rank(), node.rank());
    let backend = Script::new();
    let pool = rank.buffers(1);
    let queue = rank.builder(backend.clone()).staging(pool.clone()).start().unwrap();
    let _fills = fill_up(&node, &other);
    let buffer = Buffer::of(&queue, 2, BYTES);
    rank.gate.close();
    let handle = queue.submit(task_of(&buffer, [key(0), key(1)])).unwrap();
    rank.gate.wait_held(1);
    assert_eq!((backend.loads(), pool.in_use()), ((1, 1), 1));
    rank.gate.release(1);
    rank.gate.wait_held(1);
    assert_eq!(backend.loads(), (2, 2));
    rank.gate.open();
    assert_all_loaded(&handle);
    (0..2).for_each(|i| buffer.assert_holds(key(i), i));
}
