//! Loading: bytes, sharing, batching, completion.

use std::{
    future::Future,
    sync::{Arc, Condvar, Mutex},
    task::{Context, Poll, Wake},
    time::{Duration, Instant},
};

use ucm_queue::{Deadline, LoadQueue, Outcome, Request, Task};
use ucm_transport::HostEngine;

use crate::support::*;

const BYTES: u64 = 4096;

#[test]
fn cold_and_warm_loads_bring_the_right_bytes() {
    let node = Node::new(64, BYTES);
    let rank = node.rank();
    let backend = Script::new();
    let queue = rank.builder(backend.clone()).start().unwrap();
    let buffer = Buffer::of(&queue, 64, BYTES);
    for round in 0..3 {
        let handle = queue.submit(task_of(&buffer, (0..40).map(key))).unwrap();
        assert_all_loaded(&handle);
        for i in 0..40 {
            buffer.assert_holds(key(i), i);
            buffer.wipe(i);
        }
        buffer.assert_untouched(40);
        assert_eq!(backend.loads(), (40, 40), "round {round}");
    }
    let stats = queue.stats();
    assert_eq!((stats.owned_shards, stats.hit_shards, stats.loaded), (40, 80, 120));
    assert_eq!((stats.owned_bytes, stats.hit_bytes), (40 * BYTES, 80 * BYTES));
    queue.close().unwrap();
    node.assert_at_rest();
}

#[test]
fn workers_copy_too() {
    let node = Node::new(256, 65_536);
    let rank = node.rank_with(Arc::new(HostEngine::builder().workers(2).build().unwrap()));
    let queue = rank.builder(Script::new()).start().unwrap();
    let buffer = Buffer::of(&queue, 256, 65_536);
    for _ in 0..3 {
        let handle = queue.submit(request_of(&buffer, (0..256).map(key))).unwrap();
        assert_all_loaded(&handle);
        for i in 0..256 {
            buffer.assert_holds(key(i), i);
            buffer.wipe(i);
        }
    }
    queue.close().unwrap();
    node.assert_at_rest();
}

#[test]
fn q1_no_more_loads_in_flight_than_the_depth() {
    for depth in [1, 3, 8] {
        let node = Node::new(64, BYTES);
        let rank = node.rank();
        let backend = Script::holding();
        let queue = rank.builder(backend.clone()).backend_depth(depth).start().unwrap();
        let buffer = Buffer::of(&queue, 64, BYTES);
        let a = queue.submit(task_of(&buffer, (0..20).map(key))).unwrap();
        for _ in 0..20 {
            let left = 20 - usize::try_from(queue.stats().loaded).unwrap();
            backend.wait_held(depth.min(left));
            assert_eq!(backend.held().len(), depth.min(left));
            let before = queue.stats().loaded;
            backend.release_some(1);
            eventually("the next load", || queue.stats().loaded == before + 1);
        }
        assert_all_loaded(&a);
        assert_eq!(backend.in_flight_max(), depth);
        assert_eq!(queue.stats().backend_in_flight_max, depth as u64);
        assert_eq!(queue.stats().backend_in_flight, 0);
    }
}

#[test]
fn q1_no_more_bytes_in_flight_than_the_budget() {
    let node = Node::new(64, BYTES);
    let rank = node.rank();
    let backend = Script::holding();
    let builder = rank.builder(backend.clone()).backend_depth(8).backend_bytes(3 * BYTES);
    let queue = builder.start().unwrap();
    let buffer = Buffer::of(&queue, 64, BYTES);
    let handle = queue.submit(task_of(&buffer, (0..20).map(key))).unwrap();
    backend.wait_held(3);
    backend.open();
    assert_all_loaded(&handle);
    assert_eq!(backend.in_flight_max(), 3);
}

#[test]
fn loads_start_in_batches() {
    let node = Node::new(64, BYTES);
    let rank = node.rank();
    let backend = Script::holding();
    let queue = rank.builder(backend.clone()).backend_depth(8).start().unwrap();
    let buffer = Buffer::of(&queue, 64, BYTES);
    let handle = queue.submit(task_of(&buffer, (0..8).map(key))).unwrap();
    backend.wait_held(8);
    assert_eq!(backend.load_calls(), 1, "eight operations in one call");
    backend.open();
    assert_all_loaded(&handle);
}

#[test]
fn q4_a_request_ends_after_its_last_copy() {
    let node = Node::new(8, BYTES);
    let rank = node.rank();
    let queue = rank.builder(Script::new()).start().unwrap();
    let buffer = Buffer::of(&queue, 8, BYTES);
    rank.gate.close();
    let handle = queue.submit(request_of(&buffer, (0..4).map(key))).unwrap();
    rank.gate.wait_held(1);
    eventually("all reads", || queue.stats().backend_in_flight == 0);
    assert!(!handle.is_done() && !handle.is_quiesced());
    buffer.assert_untouched(0);
    rank.gate.open();
    assert_all_loaded(&handle);
    assert!(handle.is_quiesced());
    (0..4).for_each(|i| buffer.assert_holds(key(i), i));
}

#[test]
fn q5_several_shards_of_a_request_are_one_completion() {
    let node = Node::new(8, BYTES);
    let rank = node.rank();
    let backend = Script::holding();
    let queue = rank.builder(backend.clone()).backend_depth(8).start().unwrap();
    let buffer = Buffer::of(&queue, 8, BYTES);
    let requests = vec![
        Request { shards: (0..3).map(|i| buffer.shard(key(i), i)).collect(), deadline: None },
        Request { shards: vec![buffer.shard(key(3), 3)], deadline: None },
    ];
    let handle = queue.submit(Task { requests }).unwrap();
    backend.wait_held(4);
    let ends = handle.event_fd().unwrap();
    let count = || {
        let mut count = [0; 8];
        rustix::io::read(&ends, &mut count).map(|_| u64::from_ne_bytes(count)).unwrap_or(0)
    };
    for i in [2, 0] {
        backend.release(key(i));
        eventually("the read", || queue.stats().owned_shards > 0);
        assert_eq!(handle.request(0), None);
    }
    backend.release(key(3));
    assert_eq!(handle.wait_request(1, watchdog()), Some(Outcome::Loaded));
    assert_eq!(count(), 1, "the other request has not ended");
    assert_eq!(handle.request(0), None);
    backend.release(key(1));
    assert_all_loaded(&handle);
    assert_eq!(count(), 1, "three shards, one completion");
    assert_eq!(queue.stats().loaded, 2);
}

#[test]
fn q11_identical_sources_are_read_once() {
    for cap in [16, 24, 32, 128] {
        let node = Node::new(64, BYTES);
        let rank = node.rank();
        let backend = Script::new();
        let queue = rank.builder(backend.clone()).start().unwrap();
        let buffer = Buffer::of(&queue, 200, BYTES);
        // Every key three times, spread over two requests.
        let of = |i: u64| key(i % (cap / 3 + 1));
        let split = cap / 2;
        let shards = |range: std::ops::Range<u64>| range.map(|i| buffer.shard(of(i), i)).collect();
        let requests = vec![
            Request { shards: shards(0..split), deadline: None },
            Request { shards: shards(split..cap), deadline: None },
        ];
        let handle = queue.submit(Task { requests }).unwrap();
        assert_all_loaded(&handle);
        (0..cap).for_each(|i| buffer.assert_holds(of(i), i));
        buffer.assert_untouched(cap);
        let unique = cap / 3 + 1;
        assert_eq!(backend.loads(), (unique, usize::try_from(unique).unwrap()), "cap {cap}");
    }
}

#[test]
fn q11_one_source_goes_to_more_destinations_than_a_plan_has_items() {
    let node = Node::new(4, BYTES);
    let rank = node.rank();
    let backend = Script::new();
    let queue = rank.builder(backend.clone()).start().unwrap();
    let buffer = Buffer::of(&queue, 200, BYTES);
    let shards = (0..200).map(|i| buffer.shard(key(1), i)).collect();
    let requests = vec![Request { shards, deadline: None }];
    assert_all_loaded(&queue.submit(Task { requests }).unwrap());
    (0..200).for_each(|i| buffer.assert_holds(key(1), i));
    assert_eq!(backend.loads(), (1, 1));
    queue.close().unwrap();
    node.assert_at_rest();
}

#[test]
fn q12_a_slow_read_does_not_delay_a_ready_copy() {
    let node = Node::new(8, BYTES);
    let rank = node.rank();
    let backend = Script::new();
    let queue = rank.builder(backend.clone()).backend_depth(1).start().unwrap();
    let buffer = Buffer::of(&queue, 8, BYTES);
    assert_all_loaded(&queue.submit(task_of(&buffer, [key(1)])).unwrap());
    backend.hold();
    let handle = queue.submit(task_of(&buffer, (0..4).map(key))).unwrap();
    assert_eq!(handle.wait_request(1, watchdog()), Some(Outcome::Loaded));
    backend.wait_held(1);
    assert_eq!(handle.poll(), None);
    backend.open();
    assert_all_loaded(&handle);
}

#[test]
fn q16_a_task_larger_than_the_cache_completes() {
    for workers in [0, 2] {
        let node = Node::new(4, BYTES);
        let rank =
            node.rank_with(Arc::new(HostEngine::builder().workers(workers).build().unwrap()));
        let backend = Script::new();
        let builder = rank.builder(backend.clone()).staging(rank.buffers(2)).backend_depth(8);
        let queue = builder.start().unwrap();
        let buffer = Buffer::of(&queue, 100, BYTES);
        let handle = queue.submit(request_of(&buffer, (0..100).map(key))).unwrap();
        assert_all_loaded(&handle);
        (0..100).for_each(|i| buffer.assert_holds(key(i), i));
        assert_eq!(backend.loads(), (100, 100));
        let stats = queue.stats();
        assert_eq!(stats.owned_shards + stats.bypass_shards, 100);
        queue.close().unwrap();
        node.assert_at_rest();
    }
}

#[test]
fn q16_without_buffers_a_large_task_waits_for_its_own_slots() {
    let node = Node::new(4, BYTES);
    let rank = node.rank();
    let backend = Script::new();
    let queue = rank.builder(backend.clone()).backend_depth(8).start().unwrap();
    let buffer = Buffer::of(&queue, 100, BYTES);
    for _ in 0..3 {
        assert_all_loaded(&queue.submit(request_of(&buffer, (0..100).map(key))).unwrap());
        for i in 0..100 {
            buffer.assert_holds(key(i), i);
            buffer.wipe(i);
        }
    }
    assert_eq!(queue.stats().bypass_shards, 0);
    queue.close().unwrap();
    node.assert_at_rest();
}

#[test]
fn q16_every_slot_pinned_by_others_is_bypassed() {
    let node = Node::new(4, BYTES);
    let rank = node.rank();
    let backend = Script::new();
    let queue = rank.builder(backend.clone()).staging(rank.buffers(1)).start().unwrap();
    let other = node.rank();
    let fills: Vec<_> = (100..104)
        .map(|i| match other.pool.acquire(&key(i)).unwrap() {
            ucm_ctrl::Acquired::Owner(fill) => fill,
            got => panic!("{got:?}"),
        })
        .collect();
    let buffer = Buffer::of(&queue, 10, BYTES);
    assert_all_loaded(&queue.submit(task_of(&buffer, (0..10).map(key))).unwrap());
    (0..10).for_each(|i| buffer.assert_holds(key(i), i));
    assert_eq!(queue.stats().bypass_shards, 10);
    drop(fills);
}

#[test]
fn q17_an_empty_task_ends_at_once() {
    let node = Node::new(4, BYTES);
    let rank = node.rank();
    let queue = rank.builder(Script::new()).start().unwrap();
    let handle = queue.submit(Task::default()).unwrap();
    assert_eq!(handle.poll(), Some(vec![]));
    assert!(handle.is_done() && handle.is_quiesced());
    let buffer = Buffer::of(&queue, 1, BYTES);
    let nothing = ucm_queue::ShardRef { len: Some(0), ..buffer.shard(key(0), 0) };
    let requests = vec![Request::default(), Request { shards: vec![nothing; 3], deadline: None }];
    assert_all_loaded(&queue.submit(Task { requests }).unwrap());
    assert_eq!(queue.stats().backend_loads, 0);
    buffer.assert_untouched(0);
}

#[test]
fn q18_submit_from_many_threads() {
    let node = Node::new(32, BYTES);
    let rank = node.rank();
    let backend = Script::new();
    let queue = rank.builder(backend).staging(rank.buffers(2)).start().unwrap();
    std::thread::scope(|scope| {
        for thread in 0..8_u64 {
            let queue = &queue;
            scope.spawn(move || {
                let buffer = Buffer::of(queue, 16, BYTES);
                for round in 0..50 {
                    let of = |i: u64| key((thread * 7 + round * 3 + i) % 60);
                    let task = task_of(&buffer, (0..16).map(of));
                    assert_all_loaded(&queue.submit(task).unwrap());
                    for i in 0..16 {
                        buffer.assert_holds(of(i), i);
                        buffer.wipe(i);
                    }
                }
            });
        }
    });
    assert_eq!(queue.stats().loaded, 8 * 50 * 16);
    queue.close().unwrap();
    node.assert_at_rest();
}

#[test]
fn q19_time_limits_count_from_admission() {
    let node = Node::new(8, BYTES);
    let rank = node.rank();
    let backend = Script::holding();
    let queue = rank.builder(backend.clone()).backend_depth(1).start().unwrap();
    let buffer = Buffer::of(&queue, 8, BYTES);
    let first = queue.submit(task_of(&buffer, [key(0)])).unwrap();
    backend.wait_held(1);
    // Never gets a turn: the only place in flight is taken.
    let start = Instant::now();
    let mut task = task_of(&buffer, [key(1), key(2), key(3)]);
    task.requests[0].deadline = Some(Deadline::After(Duration::from_millis(30)));
    task.requests[1].deadline = Some(Deadline::At(start + Duration::from_millis(60)));
    let second = queue.submit(task).unwrap();
    assert_eq!(second.wait_request(0, watchdog()), Some(Outcome::Deadline));
    assert!(start.elapsed() >= Duration::from_millis(30));
    assert_eq!(second.wait_request(1, watchdog()), Some(Outcome::Deadline));
    assert!(start.elapsed() >= Duration::from_millis(60));
    assert_eq!(backend.loads(), (1, 1), "nothing was read for them");
    backend.open();
    assert_all_loaded(&first);
    assert_eq!(second.wait_request(2, watchdog()), Some(Outcome::Loaded));
}

#[test]
fn waiting_for_another_rank_costs_no_load() {
    let node = Node::new(16, BYTES);
    let (a, b) = (node.rank(), node.rank());
    let (slow, none) = (Script::holding(), Script::new());
    let first = a.builder(slow.clone()).rank(0, 2).start().unwrap();
    let second = b.builder(none.clone()).rank(1, 2).start().unwrap();
    let (from_a, from_b) = (Buffer::of(&first, 4, BYTES), Buffer::of(&second, 4, BYTES));
    let filling = first.submit(task_of(&from_a, (0..4).map(key))).unwrap();
    slow.wait_held(4);
    let waiting = second.submit(task_of(&from_b, (0..4).map(key))).unwrap();
    node.wait_waiters(4);
    slow.open();
    assert_all_loaded(&filling);
    assert_all_loaded(&waiting);
    (0..4).for_each(|i| from_b.assert_holds(key(i), i));
    assert_eq!(none.loads(), (0, 0));
    assert_eq!(second.stats().waited_shards, 4);
}

/// A queue's handle as a future, without a runtime.
#[test]
fn a_handle_is_a_future() {
    struct Flag(Mutex<bool>, Condvar);
    impl Wake for Flag {
        fn wake(self: Arc<Self>) {
            *self.0.lock().unwrap() = true;
            self.1.notify_all();
        }
    }
    let node = Node::new(8, BYTES);
    let rank = node.rank();
    let backend = Script::holding();
    let queue: LoadQueue = rank.builder(backend.clone()).start().unwrap();
    let buffer = Buffer::of(&queue, 8, BYTES);
    let mut handle = queue.submit(task_of(&buffer, (0..4).map(key))).unwrap();
    let flag = Arc::new(Flag(Mutex::new(false), Condvar::new()));
    let waker = flag.clone().into();
    let mut cx = Context::from_waker(&waker);
    assert_eq!(Future::poll(std::pin::Pin::new(&mut handle), &mut cx), Poll::Pending);
    backend.open();
    let woken = flag.0.lock().unwrap();
    let woken = flag.1.wait_timeout_while(woken, WATCHDOG, |woken| !*woken).unwrap().0;
    assert!(*woken);
    let ended = Future::poll(std::pin::Pin::new(&mut handle), &mut cx);
    assert_eq!(ended, Poll::Ready(vec![Outcome::Loaded; 4]));
}

/// A cached shard is as long as it was loaded: what lies behind it in its slot belongs to an
/// earlier key, and never reaches anybody, by a load or by a dump.
#[test]
fn a_shard_of_another_length_is_never_served() {
    let node = Node::new(1, BYTES);
    let rank = node.rank();
    let queue = rank.builder(Script::new()).start().unwrap();
    let buffer = Buffer::of(&queue, 4, BYTES);
    // An earlier tenant of the only slot.
    assert_all_loaded(&queue.submit(task_of(&buffer, [key(1)])).unwrap());
    let with_len = |index: u64, len: Option<u64>| {
        let shard = ucm_queue::ShardRef { len, ..buffer.shard(key(2), index) };
        Task { requests: vec![Request { shards: vec![shard], deadline: None }] }
    };
    assert_all_loaded(&queue.submit(with_len(1, Some(100))).unwrap());
    assert_all_loaded(&queue.submit(with_len(2, Some(100))).unwrap());
    let refused = Outcome::Recompute { shards: vec![0], kind: ucm_ctrl::FailKind::Corrupt };
    assert_eq!(outcomes(&queue.submit(with_len(3, None)).unwrap()), [refused]);
    buffer.assert_untouched(3);
    let dump = ucm_queue::DumpRef { key: key(2), src: buffer.addr(0), len: None };
    let dumped =
        queue.dump(ucm_queue::DumpTask { shards: vec![dump], ..Default::default() }).unwrap();
    assert_eq!(dumped.wait_cached(watchdog()), Some(vec![Err(ucm_ctrl::FailKind::Corrupt)]));
    queue.close().unwrap();
    node.assert_at_rest();
}
