//! Cancellation and deadlines: the caller is released, the memory is not, before its IO has ended.

use std::time::{Duration, Instant};

use ucm_ctrl::{Acquired, FailKind};
use ucm_queue::{Deadline, LoadQueue, Outcome, Request, Task};

use crate::support::*;

const BYTES: u64 = 4096;

fn soon(ms: u64) -> Option<Deadline> {
    Some(Deadline::After(Duration::from_millis(ms)))
}

#[test]
fn c1_a_deadline_that_has_passed_reads_nothing() {
    let node = Node::new(8, BYTES);
    let rank = node.rank();
    let backend = Script::new();
    let queue = rank.builder(backend.clone()).start().unwrap();
    let buffer = Buffer::of(&queue, 8, BYTES);
    let mut task = task_of(&buffer, (0..4).map(key));
    for request in &mut task.requests[..3] {
        request.deadline = Some(Deadline::At(Instant::now()));
    }
    let handle = queue.submit(task).unwrap();
    let all = outcomes(&handle);
    assert_eq!(all[..3], [Outcome::Deadline, Outcome::Deadline, Outcome::Deadline]);
    assert_eq!(all[3], Outcome::Loaded);
    assert_eq!(backend.loads(), (1, 1));
    (0..3).for_each(|i| buffer.assert_untouched(i));
}

#[test]
fn c2_a_deadline_during_io_releases_the_caller_and_never_the_slot() {
    let node = Node::new(4, BYTES);
    let rank = node.rank();
    let backend = Script::holding();
    let builder = rank.builder(backend.clone()).backend_depth(8).staging(rank.buffers(4));
    let queue = builder.start().unwrap();
    let buffer = Buffer::of(&queue, 16, BYTES);
    let mut task = task_of(&buffer, (0..4).map(key));
    task.requests.iter_mut().for_each(|request| request.deadline = soon(20));
    let handle = queue.submit(task).unwrap();
    assert_eq!(outcomes(&handle), vec![Outcome::Deadline; 4]);
    assert!(handle.is_quiesced(), "the reads go to slots, not to the caller");
    let stats = queue.stats();
    assert_eq!((stats.quarantine_loads, stats.quarantine_bytes), (4, 4 * BYTES));
    assert_eq!(stats.abandoned_fills, 4);
    assert_eq!(node.inspect().pools[0].draining, 4);
    // Other keys get no slot that these reads can still write: they go around the cache.
    let others = queue.submit(request_of(&buffer, (20..24).map(key))).unwrap();
    backend.wait_held(8);
    for i in 20..24 {
        backend.release(key(i));
    }
    assert_all_loaded(&others);
    (20..24).for_each(|i| buffer.assert_holds(key(i), i - 20));
    assert_eq!(queue.stats().bypass_shards, 4);
    // The late ends complete nothing twice, and the slots come back.
    (0..8).for_each(|i| buffer.wipe(i));
    backend.open();
    eventually("the end of the quarantine", || queue.stats().quarantine_loads == 0);
    assert_eq!(queue.stats().quarantine_bytes, 0);
    node.assert_at_rest();
    assert_eq!(outcomes(&handle), vec![Outcome::Deadline; 4]);
    (0..8).for_each(|i| buffer.assert_untouched(i));
    assert_all_loaded(&queue.submit(request_of(&buffer, (0..4).map(key))).unwrap());
    (0..4).for_each(|i| buffer.assert_holds(key(i), i));
}

#[test]
fn c2_waiters_hear_of_the_owner_s_deadline_and_load_elsewhere() {
    let node = Node::new(4, BYTES);
    let (a, b) = (node.rank(), node.rank());
    let (stalled, healthy) = (Script::holding(), Script::new());
    let owner = a.builder(stalled.clone()).rank(0, 2).start().unwrap();
    let waiter = b.builder(healthy.clone()).rank(1, 2).start().unwrap();
    let (from_a, from_b) = (Buffer::of(&owner, 1, BYTES), Buffer::of(&waiter, 1, BYTES));
    let mut task = task_of(&from_a, [key(0)]);
    task.requests[0].deadline = soon(400);
    let owned = owner.submit(task).unwrap();
    stalled.wait_held(1);
    let waits = waiter.submit(task_of(&from_b, [key(0)])).unwrap();
    node.wait_waiters(1);
    assert_eq!(outcomes(&owned), [Outcome::Deadline]);
    assert_all_loaded(&waits);
    from_b.assert_holds(key(0), 0);
    assert_eq!(node.inspect().pools[0].draining, 1);
    // The stalled read ends at last, with other bytes: nobody ever sees them.
    stalled.fail(key(0), [ucm_store::ErrorKind::Io]);
    stalled.open();
    eventually("the slot", || node.inspect().pools[0].draining == 0);
    from_b.wipe(0);
    assert_all_loaded(&waiter.submit(task_of(&from_b, [key(0)])).unwrap());
    from_b.assert_holds(key(0), 0);
    node.assert_at_rest();
}

#[test]
fn c3_a_cancel_during_the_copy_waits_for_it() {
    let node = Node::new(8, BYTES);
    let rank = node.rank();
    let queue = rank.builder(Script::new()).start().unwrap();
    let buffer = Buffer::of(&queue, 8, BYTES);
    rank.gate.close();
    let handle = queue.submit(request_of(&buffer, (0..2).map(key))).unwrap();
    rank.gate.wait_held(1);
    handle.cancel();
    // Behind the cancel in the same queue: when this has ended, the cancel has been seen.
    let other = queue.submit(Task::default()).unwrap();
    assert_eq!(outcomes(&other), []);
    assert_eq!(handle.poll(), None, "an engine may still write the destination");
    rank.gate.open();
    assert_eq!(outcomes(&handle), [Outcome::Cancelled]);
    assert!(handle.is_quiesced());
    queue.close().unwrap();
    node.assert_at_rest();
}

#[test]
fn c3_a_deadline_during_the_copy_is_stuck_and_quiesces_later() {
    let node = Node::new(8, BYTES);
    let rank = node.rank();
    let queue = rank.builder(Script::new()).start().unwrap();
    let buffer = Buffer::of(&queue, 8, BYTES);
    rank.gate.close();
    let mut task = request_of(&buffer, (0..2).map(key));
    task.requests[0].deadline = soon(20);
    let handle = queue.submit(task).unwrap();
    assert_eq!(outcomes(&handle), [Outcome::Stuck]);
    assert!(!handle.is_quiesced());
    assert!(!handle.wait_quiesced(Some(Instant::now() + Duration::from_millis(20))));
    // A cancel after the end changes nothing.
    handle.cancel();
    rank.gate.open();
    assert!(handle.wait_quiesced(watchdog()));
    assert_eq!(outcomes(&handle), [Outcome::Stuck]);
    assert_eq!(queue.stats().expired, 1);
    queue.close().unwrap();
    node.assert_at_rest();
}

/// Found by a random schedule: one source for more destinations than a plan has items, and those
/// left for the second plan all lost their request meanwhile.
#[test]
fn c3_a_source_whose_last_destinations_are_unwanted_still_ends() {
    let node = Node::new(8, BYTES);
    let rank = node.rank();
    let queue = rank.builder(Script::new()).start().unwrap();
    let buffer = Buffer::of(&queue, 70, BYTES);
    rank.gate.close();
    let shards = |places: std::ops::Range<u64>| places.map(|i| buffer.shard(key(0), i)).collect();
    let requests = vec![
        Request { shards: shards(0..64), deadline: None },
        Request { shards: shards(64..70), deadline: soon(20) },
    ];
    let handle = queue.submit(Task { requests }).unwrap();
    rank.gate.wait_held(1);
    assert_eq!(handle.wait_request(1, watchdog()), Some(Outcome::Deadline));
    rank.gate.open();
    assert_eq!(handle.wait_request(0, watchdog()), Some(Outcome::Loaded));
    (0..64).for_each(|i| buffer.assert_holds(key(0), i));
    (64..70).for_each(|i| buffer.assert_untouched(i));
    queue.close().unwrap();
    node.assert_at_rest();
}

#[test]
fn c3_copies_not_begun_are_not_made() {
    let node = Node::new(8, BYTES);
    let rank = node.rank();
    let queue = rank.builder(Script::new()).start().unwrap();
    let buffer = Buffer::of(&queue, 16, BYTES);
    assert_all_loaded(&queue.submit(task_of(&buffer, (0..8).map(key))).unwrap());
    (0..8).for_each(|i| buffer.wipe(i));
    rank.gate.close();
    // The engine copies one plan at a time: the second task's copies are queued.
    let first = queue.submit(task_of(&buffer, [key(0)])).unwrap();
    rank.gate.wait_held(1);
    let second = queue
        .submit(Task {
            requests: vec![Request { shards: vec![buffer.shard(key(1), 9)], deadline: None }],
        })
        .unwrap();
    second.cancel();
    assert_eq!(outcomes(&second), [Outcome::Cancelled]);
    assert!(second.is_quiesced());
    assert_eq!(node.inspect().pools[0].pinned, 1, "the pin of the dropped copy is gone");
    rank.gate.open();
    assert_all_loaded(&first);
    buffer.assert_untouched(9);
}

#[test]
fn c4_preemption_returns_when_nothing_can_write_any_more() {
    let node = Node::new(8, BYTES);
    let rank = node.rank();
    let backend = Script::holding();
    let queue = rank.builder(backend.clone()).backend_depth(8).start().unwrap();
    let buffer = Buffer::of(&queue, 8, BYTES);
    let handle = queue.submit(task_of(&buffer, (0..8).map(key))).unwrap();
    backend.wait_held(8);
    rank.gate.close();
    backend.release_some(4);
    rank.gate.wait_held(1);
    assert!(!handle.preempt(Some(Instant::now() + Duration::from_millis(20))));
    std::thread::scope(|scope| {
        let fence = scope.spawn(|| handle.preempt(watchdog()));
        rank.gate.open();
        assert!(fence.join().unwrap());
    });
    (0..8).for_each(|i| buffer.wipe(i));
    backend.open();
    eventually("the reads", || queue.stats().backend_in_flight == 0);
    (0..8).for_each(|i| buffer.assert_untouched(i));
    queue.close().unwrap();
    node.assert_at_rest();
}

#[test]
fn a_core_that_is_gone_says_stuck_while_an_engine_may_write() {
    let mut world = World::with_copies(
        Node::new(8, BYTES),
        1,
        8,
        Copies { max_in_flight: 1, ..Copies::default() },
        |_| Box::new(|_, _| (Duration::ZERO, Fate::Good)),
        |_, builder| builder.backend_depth(1),
    );
    let rank = &world.ranks[0];
    rank.rank.gate.close();
    let handle = rank.queue.submit(task_of(&rank.buffer, (0..3).map(key)), world.now).unwrap();
    world.run();
    assert_eq!(world.ranks[0].rank.gate.held(), 1);
    let SimRank { rank, queue, device, buffer, .. } = world.ranks.remove(0);
    drop(queue);
    // One destination is being written; of the others nothing will come.
    let gone = |kind| Outcome::Recompute { shards: vec![0], kind };
    let abandoned = gone(FailKind::Abandoned);
    assert_eq!(handle.poll().unwrap(), [Outcome::Stuck, abandoned.clone(), abandoned]);
    assert!(!handle.is_quiesced());
    rank.gate.open();
    device.advance(world.now);
    let mut ended = Vec::new();
    ucm_transport::TransferEngine::poll(&*rank.gate, &mut ended);
    drop(ended);
    assert!(handle.is_quiesced());
    buffer.assert_holds(key(0), 0);
    (1..3).for_each(|i| buffer.assert_untouched(i));
    world.node.assert_at_rest();
}

#[test]
fn a24_cancelled_loads_leave_nothing_behind_without_further_requests() {
    let node = Node::new(128, BYTES);
    let rank = node.rank();
    let backend = Script::holding();
    let queue = rank.builder(backend.clone()).backend_depth(100).start().unwrap();
    let buffer = Buffer::of(&queue, 100, BYTES);
    let handles: Vec<_> = (0..100)
        .map(|i| {
            let shards = vec![buffer.shard(key(i), i)];
            queue.submit(Task { requests: vec![Request { shards, deadline: None }] }).unwrap()
        })
        .collect();
    backend.wait_held(100);
    handles.iter().for_each(ucm_queue::TaskHandle::cancel);
    for handle in &handles {
        assert_eq!(outcomes(handle), [Outcome::Cancelled]);
        assert!(handle.is_quiesced());
    }
    assert_eq!(queue.stats().quarantine_loads, 100);
    backend.open();
    eventually("everything free", || queue.stats().quarantine_loads == 0);
    node.assert_at_rest();
    (0..100).for_each(|i| buffer.assert_untouched(i));
    // What was read for nobody is in the cache all the same.
    assert_all_loaded(&queue.submit(task_of(&buffer, (0..100).map(key))).unwrap());
    assert_eq!(backend.loads(), (100, 100));
}

#[test]
fn a_cancelled_owner_still_serves_those_who_wait() {
    let node = Node::new(4, BYTES);
    let (a, b) = (node.rank(), node.rank());
    let backend = Script::holding();
    let owner = a.builder(backend.clone()).rank(0, 2).start().unwrap();
    let waiter = b.builder(Script::new()).rank(1, 2).start().unwrap();
    let (from_a, from_b) = (Buffer::of(&owner, 1, BYTES), Buffer::of(&waiter, 1, BYTES));
    let owned = owner.submit(task_of(&from_a, [key(0)])).unwrap();
    backend.wait_held(1);
    let waits = waiter.submit(task_of(&from_b, [key(0)])).unwrap();
    node.wait_waiters(1);
    owned.cancel();
    assert_eq!(outcomes(&owned), [Outcome::Cancelled]);
    backend.open();
    assert_all_loaded(&waits);
    from_b.assert_holds(key(0), 0);
    from_a.assert_untouched(0);
    assert_eq!(waiter.stats().backend_loads, 0, "one load for both");
}

#[test]
fn a_cancelled_waiter_gives_its_pin_back() {
    let node = Node::new(4, BYTES);
    let rank = node.rank();
    let queue = rank.builder(Script::new()).start().unwrap();
    let other = node.rank();
    let Acquired::Owner(fill) = other.pool.acquire(&key(0)).unwrap() else { panic!() };
    let buffer = Buffer::of(&queue, 1, BYTES);
    let handle = queue.submit(task_of(&buffer, [key(0)])).unwrap();
    node.wait_waiters(1);
    handle.cancel();
    assert_eq!(outcomes(&handle), [Outcome::Cancelled]);
    fill.fail(FailKind::Io);
    node.assert_at_rest();
}

#[test]
fn a25_dropped_handles_change_nothing() {
    let node = Node::new(16, BYTES);
    let rank = node.rank();
    let backend = Script::new();
    let queue: LoadQueue = rank.builder(backend.clone()).start().unwrap();
    let buffer = Buffer::of(&queue, 16, BYTES);
    for _ in 0..1000 {
        drop(queue.submit(task_of(&buffer, (0..16).map(key))).unwrap());
    }
    eventually("all ends", || queue.stats().loaded == 16_000);
    (0..16).for_each(|i| buffer.assert_holds(key(i), i));
    queue.close().unwrap();
    node.assert_at_rest();
}

#[test]
fn f4_closing_drains_copies_and_reads() {
    let node = Node::new(8, BYTES);
    let rank = node.rank();
    let backend = Script::holding();
    let queue = rank.builder(backend.clone()).backend_depth(2).start().unwrap();
    let buffer = Buffer::of(&queue, 8, BYTES);
    rank.gate.close();
    let handle = queue.submit(task_of(&buffer, (0..8).map(key))).unwrap();
    backend.wait_held(2);
    backend.release_some(1);
    rank.gate.wait_held(1);
    let closing = std::thread::spawn(move || queue.close());
    // Those without a copy end at once, the copying one when its copy has ended.
    eventually("the cancelled ones", || {
        (0..8).filter(|i| handle.request(*i) == Some(Outcome::Cancelled)).count() == 7
    });
    assert!(!handle.is_done());
    rank.gate.open();
    backend.open();
    closing.join().unwrap().unwrap();
    assert_eq!(outcomes(&handle), vec![Outcome::Cancelled; 8]);
    node.assert_at_rest();
}

#[test]
fn closing_gives_up_a_stuck_backend_after_the_grace() {
    let node = Node::new(8, BYTES);
    let rank = node.rank();
    let backend = Script::holding();
    let builder = rank.builder(backend.clone()).grace(Duration::from_millis(50));
    let queue = builder.start().unwrap();
    let buffer = Buffer::of(&queue, 8, BYTES);
    let handle = queue.submit(task_of(&buffer, [key(0)])).unwrap();
    backend.wait_held(1);
    queue.close().unwrap();
    assert_eq!(outcomes(&handle), [Outcome::Cancelled]);
    assert_eq!(node.inspect().pools[0].draining, 1, "the read may still write its slot");
    backend.open();
    node.assert_at_rest();
}
