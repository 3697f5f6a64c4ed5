//! Six ways in which the predecessor of this queue lost requests or bytes, one test each.

use std::sync::Arc;

use ucm_ctrl::{Acquired, FailKind};
use ucm_queue::{Deadline, Outcome, Request, Task};
use ucm_store::ErrorKind;
use ucm_transport::{DeviceFault, DeviceRates, HostEngine, SimDevice};

use crate::support::*;

const BYTES: u64 = 512;

#[test]
fn predecessor_1_two_specs_of_one_request_are_one_completion() {
    // The second spec overwrote the first one's future, and the caller waited for ever.
    let node = Node::new(16, BYTES);
    let rank = node.rank();
    let backend = Script::holding();
    let queue = rank.builder(backend.clone()).backend_depth(4).start().unwrap();
    let buffer = Buffer::of(&queue, 4, BYTES);
    let handle = queue.submit(request_of(&buffer, (0..4).map(key))).unwrap();
    backend.wait_held(4);
    for i in [3, 0, 2] {
        backend.release(key(i));
    }
    assert_eq!(handle.wait_request(0, Some(std::time::Instant::now())), None, "one is missing");
    backend.release(key(1));
    assert_eq!(outcomes(&handle), [Outcome::Loaded]);
    (0..4).for_each(|i| buffer.assert_holds(key(i), i));
}

#[test]
fn predecessor_2_a_submit_that_throws_ends_its_request() {
    // The buffer and the future were lost when the transfer's submit threw.
    quiet_injected_panics();
    let node = Node::new(16, BYTES);
    let device = SimDevice::start(DeviceRates::default()).unwrap();
    let rank = node.rank_with(device.clone());
    let backend = Script::new();
    let pool = rank.buffers(2);
    let queue = rank.builder(backend.clone()).staging(pool.clone()).start().unwrap();
    let buffer = Buffer::of(&queue, 8, BYTES);
    // In the engine, and in the backend.
    for fault in [DeviceFault::Panics, DeviceFault::Loses] {
        device.inject(fault);
        let handle = queue.submit(task_of(&buffer, [key(0)])).unwrap();
        let failed = Outcome::Recompute { shards: vec![0], kind: FailKind::Io };
        assert_eq!(outcomes(&handle), [failed], "{fault:?}");
    }
    backend.panic_next(1);
    let handle = queue.submit(task_of(&buffer, [key(5)])).unwrap();
    let lost = Outcome::Recompute { shards: vec![0], kind: FailKind::Abandoned };
    assert_eq!(outcomes(&handle), [lost]);
    assert_all_loaded(&queue.submit(task_of(&buffer, (0..8).map(key))).unwrap());
    assert_eq!((pool.in_use(), queue.stats().caught_panics), (0, 2));
    queue.close().unwrap();
    node.assert_at_rest();
}

#[test]
fn predecessor_3_one_failure_ends_one_request() {
    // One exception in the load thread ended the thread, and with it everything else. F5: every
    // lane works after each kind of failure.
    let node = Node::new(64, BYTES);
    let rank = node.rank();
    let backend = Script::new();
    let queue = rank.builder(backend.clone()).backend_depth(4).start().unwrap();
    let buffer = Buffer::of(&queue, 64, BYTES);
    let kinds = [
        ErrorKind::Missing,
        ErrorKind::Corrupt,
        ErrorKind::Io,
        ErrorKind::NoSpace,
        ErrorKind::Unavailable,
        ErrorKind::Cancelled,
    ];
    for (n, kind) in (0..).zip(kinds) {
        backend.fail(key(n * 10), [kind]);
        let handle = queue.submit(task_of(&buffer, (n * 10..n * 10 + 10).map(key))).unwrap();
        let all = outcomes(&handle);
        assert!(matches!(&all[0], Outcome::Recompute { .. }), "{kind:?}: {:?}", all[0]);
        assert!(all[1..].iter().all(|one| *one == Outcome::Loaded), "{kind:?}: {all:?}");
        (1..10).for_each(|i| buffer.assert_holds(key(n * 10 + i), i));
        queue.check().unwrap();
    }
}

#[test]
fn predecessor_4_memory_is_not_released_under_a_writer() {
    // After a timeout the buffer went back to the pool while the server could still write it.
    let node = Node::new(1, BYTES);
    let (rank, other) = (node.rank(), node.rank());
    let backend = Script::holding();
    let pool = rank.buffers(1);
    let queue = rank.builder(backend.clone()).backend_depth(2).staging(pool.clone());
    let queue = queue.start().unwrap();
    let Acquired::Owner(fill) = other.pool.acquire(&key(99)).unwrap() else { panic!() };
    let buffer = Buffer::of(&queue, 2, BYTES);
    let mut late = request_of(&buffer, [key(0)]);
    late.requests[0].deadline = Some(Deadline::After(std::time::Duration::from_millis(20)));
    let first = queue.submit(late).unwrap();
    backend.wait_held(1);
    assert_eq!(outcomes(&first), [Outcome::Deadline]);
    // The caller is free, the buffer is not: nobody else gets it.
    assert!(first.is_quiesced());
    let second = queue.submit(task_of(&buffer, [key(1)])).unwrap();
    let stats = queue.stats();
    assert_eq!((stats.quarantine_loads, stats.quarantine_bytes), (1, BYTES));
    assert_eq!((pool.in_use(), backend.loads()), (1, (1, 1)));
    assert!(!second.is_done());
    // The late write lands where it may, completes nothing twice, and the buffer comes back.
    backend.release(key(0));
    backend.wait_held(1);
    backend.open();
    assert_eq!(outcomes(&second), [Outcome::Loaded]);
    buffer.assert_holds(key(1), 0);
    assert_eq!(outcomes(&first), [Outcome::Deadline]);
    assert_eq!((pool.in_use(), queue.stats().quarantine_loads), (0, 0));
    drop(fill);
}

#[test]
fn predecessor_5_nothing_is_stranded_in_the_channel() {
    // Requests that were queued when the worker ended stayed in its channel for ever.
    for panics in [false, true] {
        quiet_injected_panics();
        let node = Node::new(16, BYTES);
        let rank = node.rank_with(Arc::new(HostEngine::builder().build().unwrap()));
        let backend = Script::holding();
        let builder = rank.builder(backend.clone()).backend_depth(1);
        let builder = builder.grace(std::time::Duration::from_millis(50));
        let builder = if panics { builder.panic_at_step(6) } else { builder };
        let queue = Arc::new(builder.start().unwrap());
        let buffer = Buffer::of(&queue, 16, BYTES);
        let mut handles = Vec::new();
        for n in 0..16 {
            let shard = buffer.shard(key(n), n);
            let requests = vec![Request { shards: vec![shard], deadline: None }];
            handles.extend(queue.submit(Task { requests }));
        }
        if !panics {
            drop(queue);
        }
        for handle in &handles {
            let outcome = outcomes(handle).remove(0);
            let typed = matches!(
                outcome,
                Outcome::Cancelled | Outcome::Recompute { kind: FailKind::Abandoned, .. }
            );
            assert!(typed, "{outcome:?}");
        }
        backend.open();
    }
}

#[test]
fn predecessor_6_big_requests_do_not_starve_small_ones() {
    // Two requests that together held all buffers served themselves until they were done. Here the
    // engine is the slow part; `staging.rs` has the case of slow reads.
    let copy = std::time::Duration::from_millis(1);
    let node = Node::new(1, BYTES);
    let other = node.rank();
    let Acquired::Owner(_fill) = other.pool.acquire(&key(99_999)).unwrap() else { panic!() };
    let mut world = World::with_copies(
        node,
        1,
        1000,
        Copies { per_item: copy, ..Copies::default() },
        |_| Box::new(|_, _| (std::time::Duration::from_micros(100), Fate::Good)),
        |rank, builder| builder.backend_depth(8).staging(rank.buffers_of(2, 4 * BYTES)),
    );
    let task = |world: &World, keys: std::ops::Range<u64>| {
        let rank = &world.ranks[0];
        let shards = keys.map(|i| rank.buffer.shard(key(i), i)).collect();
        let requests = vec![Request { shards, deadline: None }];
        rank.queue.submit(Task { requests }, world.now).unwrap()
    };
    let big = [task(&world, 0..400), task(&world, 400..800)];
    world.pass(copy * 10);
    for n in 900..910 {
        let begin = world.now;
        let small = task(&world, n..n + 1);
        while !small.is_done() {
            assert!(world.step(None));
        }
        // A turn of a buffer is four copies; those of the other buffer share the device.
        assert!(world.now - begin <= copy * 4 * 2 * 2, "{:?}", world.now - begin);
    }
    assert!(big.iter().all(|big| !big.is_done()));
    world.run();
    big.iter().for_each(assert_all_loaded);
}
