//! What fails, and what must not fail with it.

use std::time::Instant;

use ucm_ctrl::{Acquired, FailKind};
use ucm_queue::{Outcome, Request, Task};
use ucm_store::ErrorKind;
use ucm_transport::ErrorKind as CopyError;

use crate::support::*;

const BYTES: u64 = 4096;

fn recompute(shards: &[u32], kind: FailKind) -> Outcome {
    Outcome::Recompute { shards: shards.to_vec(), kind }
}

#[test]
fn f1_a_failed_shard_invalidates_only_itself() {
    let node = Node::new(64, BYTES);
    let rank = node.rank();
    let backend = Script::new();
    let queue = rank.builder(backend.clone()).start().unwrap();
    let buffer = Buffer::of(&queue, 20, BYTES);
    backend.fail(key(6), [ErrorKind::Io]);
    backend.fail(key(3), [ErrorKind::Corrupt]);
    // A23: one EIO in the seventh of twenty operations.
    let shards = |range: std::ops::Range<u64>| range.map(|i| buffer.shard(key(i), i)).collect();
    let requests = vec![
        Request { shards: shards(0..5), deadline: None },
        Request { shards: shards(5..12), deadline: None },
        Request { shards: shards(12..20), deadline: None },
    ];
    let handle = queue.submit(Task { requests: requests.clone() }).unwrap();
    let all = outcomes(&handle);
    assert_eq!(all[0], recompute(&[3], FailKind::Corrupt));
    assert_eq!(all[1], recompute(&[1], FailKind::Io));
    assert_eq!(all[2], Outcome::Loaded);
    for i in 0..20 {
        if [3, 6].contains(&i) {
            buffer.assert_untouched(i);
        } else {
            buffer.assert_holds(key(i), i);
        }
    }
    // A retry works, and reads only what failed.
    let handle = queue.submit(Task { requests }).unwrap();
    assert_all_loaded(&handle);
    assert_eq!(backend.loads(), (22, 20));
    queue.close().unwrap();
    node.assert_at_rest();
}

#[test]
fn f1_a_failed_source_fails_each_of_its_destinations() {
    let node = Node::new(64, BYTES);
    let rank = node.rank();
    let backend = Script::new();
    let queue = rank.builder(backend.clone()).start().unwrap();
    let buffer = Buffer::of(&queue, 6, BYTES);
    backend.fail(key(1), [ErrorKind::Missing]);
    let keys = [1, 0, 1, 2, 1, 1];
    let handle = queue.submit(request_of(&buffer, keys.map(key))).unwrap();
    assert_eq!(outcomes(&handle), [recompute(&[0, 2, 4, 5], FailKind::Missing)]);
    assert_eq!(backend.loads_of(key(1)), 1);
}

#[test]
fn f2_a_panicking_backend_ends_its_requests_only() {
    let node = Node::new(64, BYTES);
    let rank = node.rank();
    let backend = Script::new();
    let queue = rank.builder(backend.clone()).backend_depth(4).start().unwrap();
    let buffer = Buffer::of(&queue, 8, BYTES);
    backend.panic_next(1);
    let handle = queue.submit(task_of(&buffer, (0..4).map(key))).unwrap();
    for outcome in outcomes(&handle) {
        assert_eq!(outcome, recompute(&[0], FailKind::Abandoned));
    }
    assert_eq!(queue.stats().caught_panics, 1);
    assert_all_loaded(&queue.submit(task_of(&buffer, (0..8).map(key))).unwrap());
    queue.check().unwrap();
    queue.close().unwrap();
    node.assert_at_rest();
}

#[test]
fn f2_a_lost_operation_ends_its_request() {
    let node = Node::new(64, BYTES);
    let rank = node.rank();
    let backend = Script::holding();
    let queue = rank.builder(backend.clone()).backend_depth(4).start().unwrap();
    let buffer = Buffer::of(&queue, 8, BYTES);
    let handle = queue.submit(task_of(&buffer, (0..2).map(key))).unwrap();
    backend.wait_held(2);
    backend.lose(key(1));
    assert_eq!(handle.wait_request(1, watchdog()), Some(recompute(&[0], FailKind::Abandoned)));
    backend.open();
    assert_eq!(handle.wait_request(0, watchdog()), Some(Outcome::Loaded));
}

#[test]
fn f3_a_copy_error_fails_only_the_piece_that_has_it() {
    let node = Node::new(64, BYTES);
    let rank = node.rank();
    let queue = rank.builder(Script::new()).start().unwrap();
    let buffer = Buffer::of(&queue, 8, BYTES);
    // All resident, so that the next task is one plan.
    assert_all_loaded(&queue.submit(task_of(&buffer, (0..8).map(key))).unwrap());
    (0..8).for_each(|i| buffer.wipe(i));
    // The shared plan fails; of the eight that are copied alone then, the third fails again.
    rank.gate.close();
    let handle = queue.submit(task_of(&buffer, (0..8).map(key))).unwrap();
    rank.gate.wait_held(1);
    rank.gate.fail_next(CopyError::Failed);
    rank.gate.release(1);
    for alone in 0..8 {
        rank.gate.wait_held(1);
        if alone == 2 {
            rank.gate.fail_next(CopyError::Failed);
        }
        rank.gate.release(1);
    }
    let all = outcomes(&handle);
    for i in 0..8 {
        if i == 2 {
            assert_eq!(all[2], recompute(&[0], FailKind::Io));
            buffer.assert_untouched(2);
        } else {
            assert_eq!(all[usize::try_from(i).unwrap()], Outcome::Loaded);
            buffer.assert_holds(key(i), i);
        }
    }
    assert_eq!(queue.stats().copy_retries, 8);
    rank.gate.open();
    assert_all_loaded(&queue.submit(task_of(&buffer, (0..8).map(key))).unwrap());
    queue.close().unwrap();
    node.assert_at_rest();
}

#[test]
fn f3_a_bad_destination_does_not_fail_its_neighbours() {
    let node = Node::new(64, BYTES);
    let rank = node.rank();
    let backend = Script::holding();
    let queue = rank.builder(backend.clone()).backend_depth(8).start().unwrap();
    let good = Buffer::of(&queue, 4, BYTES);
    let bad = Buffer::of(&queue, 4, BYTES);
    let requests = vec![
        Request { shards: vec![good.shard(key(0), 0)], deadline: None },
        Request { shards: vec![bad.shard(key(1), 1)], deadline: None },
        Request { shards: vec![good.shard(key(2), 2)], deadline: None },
    ];
    let handle = queue.submit(Task { requests }).unwrap();
    backend.wait_held(3);
    queue.deregister(bad.region).unwrap();
    rank.gate.close();
    backend.open();
    rank.gate.open();
    let all = outcomes(&handle);
    assert_eq!(all, [Outcome::Loaded, recompute(&[0], FailKind::Io), Outcome::Loaded]);
    good.assert_holds(key(0), 0);
    good.assert_holds(key(2), 2);
    bad.assert_untouched(1);
}

#[test]
fn f4_siblings_are_drained_before_a_failure_is_told() {
    let node = Node::new(64, BYTES);
    let rank = node.rank();
    let backend = Script::holding();
    let queue = rank.builder(backend.clone()).backend_depth(8).start().unwrap();
    let buffer = Buffer::of(&queue, 8, BYTES);
    backend.fail(key(0), [ErrorKind::Io]);
    let handle = queue.submit(request_of(&buffer, (0..3).map(key))).unwrap();
    backend.wait_held(3);
    backend.release(key(0));
    eventually("the failure", || queue.stats().failed_shards == 1);
    assert_eq!(handle.poll(), None);
    backend.release(key(1));
    eventually("the copy", || queue.stats().owned_shards == 1);
    assert_eq!(handle.poll(), None, "one sibling is still being read");
    backend.release(key(2));
    assert_eq!(outcomes(&handle), [recompute(&[0], FailKind::Io)]);
    buffer.assert_holds(key(1), 1);
    buffer.assert_holds(key(2), 2);
}

#[test]
fn f7_f8_every_kind_of_backend_failure_is_told_and_survived() {
    let node = Node::new(64, BYTES);
    let rank = node.rank();
    let backend = Script::new();
    let queue = rank.builder(backend.clone()).start().unwrap();
    let buffer = Buffer::of(&queue, 8, BYTES);
    for (kind, told) in [
        (ErrorKind::Unavailable, FailKind::Unavailable),
        (ErrorKind::Missing, FailKind::Missing),
        (ErrorKind::Corrupt, FailKind::Corrupt),
        (ErrorKind::Io, FailKind::Io),
        (ErrorKind::NoSpace, FailKind::NoSpace),
        (ErrorKind::Cancelled, FailKind::Cancelled),
        (ErrorKind::Lost, FailKind::Abandoned),
        (ErrorKind::Invalid, FailKind::Other),
    ] {
        backend.fail_always(Some(kind));
        let handle = queue.submit(task_of(&buffer, (0..8).map(key))).unwrap();
        assert_eq!(outcomes(&handle), vec![recompute(&[0], told); 8]);
        (0..8).for_each(|i| buffer.assert_untouched(i));
        node.assert_at_rest();
    }
    backend.fail_always(None);
    assert_all_loaded(&queue.submit(task_of(&buffer, (0..8).map(key))).unwrap());
}

#[test]
fn f8_a_failure_on_the_way_around_the_cache_is_told_too() {
    let node = Node::new(1, BYTES);
    let rank = node.rank();
    let backend = Script::new();
    let queue = rank.builder(backend.clone()).staging(rank.buffers(1)).start().unwrap();
    let Acquired::Owner(fill) = rank.pool.acquire(&key(99)).unwrap() else { panic!() };
    let buffer = Buffer::of(&queue, 8, BYTES);
    for _ in 0..3 {
        backend.fail(key(1), [ErrorKind::Corrupt]);
        let handle = queue.submit(request_of(&buffer, (0..3).map(key))).unwrap();
        assert_eq!(outcomes(&handle), [recompute(&[1], FailKind::Corrupt)]);
        buffer.assert_untouched(1);
    }
    assert_all_loaded(&queue.submit(request_of(&buffer, (0..3).map(key))).unwrap());
    fill.fail(FailKind::Other);
}

#[test]
fn without_staging_buffers_a_full_cache_is_an_outcome() {
    let node = Node::new(1, BYTES);
    let rank = node.rank();
    let queue = rank.builder(Script::new()).start().unwrap();
    let Acquired::Owner(fill) = rank.pool.acquire(&key(99)).unwrap() else { panic!() };
    let buffer = Buffer::of(&queue, 8, BYTES);
    let handle = queue.submit(request_of(&buffer, (0..3).map(key))).unwrap();
    assert_eq!(outcomes(&handle), [recompute(&[0, 1, 2], FailKind::NoSpace)]);
    fill.fail(FailKind::Other);
    assert_all_loaded(&queue.submit(request_of(&buffer, (0..1).map(key))).unwrap());
}

/// Two queues of two members; the first owns the loads of `count` keys, the second waits for them.
struct Pair {
    node: Node,
    owner: (std::sync::Arc<Script>, ucm_queue::LoadQueue, Buffer),
    waiter: (std::sync::Arc<Script>, ucm_queue::LoadQueue, Buffer),
}

impl Pair {
    fn new() -> Self {
        let node = Node::new(16, BYTES);
        let make = |index| {
            let rank = node.rank();
            let backend = Script::holding();
            let builder = rank.builder(backend.clone()).rank(index, 2).backend_depth(8);
            let queue = builder.start().unwrap();
            let buffer = Buffer::of(&queue, 8, BYTES);
            (backend, queue, buffer)
        };
        let (owner, waiter) = (make(0), make(1));
        Self { node, owner, waiter }
    }

    /// Both load the same keys; returns when the owner reads and the waiter waits.
    fn start(&self, count: u64) -> (ucm_queue::TaskHandle, ucm_queue::TaskHandle) {
        let (backend, queue, buffer) = &self.owner;
        let owned = queue.submit(task_of(buffer, (0..count).map(key))).unwrap();
        backend.wait_held(usize::try_from(count).unwrap());
        let (_, queue, buffer) = &self.waiter;
        let waits = queue.submit(task_of(buffer, (0..count).map(key))).unwrap();
        self.node.wait_waiters(count);
        (owned, waits)
    }
}

#[test]
fn f9_a_waiter_hears_of_the_failure_and_retries_once_as_owner() {
    let pair = Pair::new();
    let (owned, waits) = pair.start(2);
    pair.owner.0.fail(key(0), [ErrorKind::Io]);
    pair.owner.0.open();
    assert_eq!(owned.wait_request(0, watchdog()), Some(recompute(&[0], FailKind::Io)));
    // The waiter becomes the owner of what failed, and only of that.
    pair.waiter.0.wait_held(1);
    assert_eq!(pair.waiter.0.held(), [key(0)]);
    pair.waiter.0.open();
    assert_all_loaded(&waits);
    pair.waiter.2.assert_holds(key(0), 0);
    pair.waiter.2.assert_holds(key(1), 1);
    assert_eq!(pair.waiter.0.loads(), (1, 1));
    assert_eq!(pair.waiter.1.stats().retried_shards, 1);
    assert_eq!(outcomes(&owned)[1], Outcome::Loaded);
    pair.node.assert_at_rest();
}

#[test]
fn f9_the_retry_fails_as_its_own_failure() {
    let pair = Pair::new();
    let (owned, waits) = pair.start(1);
    pair.owner.0.fail(key(0), [ErrorKind::Io]);
    pair.waiter.0.fail(key(0), [ErrorKind::Unavailable]);
    pair.owner.0.open();
    pair.waiter.0.open();
    assert_eq!(outcomes(&waits), [recompute(&[0], FailKind::Unavailable)]);
    assert_eq!(pair.waiter.0.loads(), (1, 1), "one retry, not more");
    assert_eq!(outcomes(&owned), [recompute(&[0], FailKind::Io)]);
    pair.node.assert_at_rest();
}

#[test]
fn f9_a_waiter_retries_once_even_if_it_only_waits_again() {
    let node = Node::new(16, BYTES);
    let rank = node.rank();
    let backend = Script::holding();
    let queue = rank.builder(backend.clone()).backend_depth(1).start().unwrap();
    let buffer = Buffer::of(&queue, 2, BYTES);
    let other = node.rank();
    let own = || match other.pool.acquire(&key(1)).unwrap() {
        Acquired::Owner(fill) => fill,
        got => panic!("{got:?}"),
    };
    let first = own();
    // The only read in flight is taken, so the retry has to wait for a turn.
    let handle = queue.submit(task_of(&buffer, (0..2).map(key))).unwrap();
    backend.wait_held(1);
    first.fail(FailKind::Io);
    eventually("the retry", || queue.stats().retried_shards == 1);
    let second = own();
    backend.release(key(0));
    assert_eq!(handle.wait_request(0, watchdog()), Some(Outcome::Loaded));
    node.wait_waiters(2);
    second.fail(FailKind::Unavailable);
    assert_eq!(handle.wait_request(1, watchdog()), Some(recompute(&[0], FailKind::Unavailable)));
    assert_eq!(backend.loads(), (1, 1));
    node.assert_at_rest();
}

#[test]
fn f9_a_verdict_on_the_object_is_the_same_for_all() {
    for (kind, told) in
        [(ErrorKind::Missing, FailKind::Missing), (ErrorKind::Corrupt, FailKind::Corrupt)]
    {
        let pair = Pair::new();
        let (owned, waits) = pair.start(1);
        pair.owner.0.fail(key(0), [kind]);
        let start = Instant::now();
        pair.owner.0.open();
        assert_eq!(outcomes(&waits), [recompute(&[0], told)]);
        assert!(start.elapsed() < WATCHDOG);
        assert_eq!(outcomes(&owned), [recompute(&[0], told)]);
        assert_eq!(pair.waiter.0.loads(), (0, 0));
    }
}

#[test]
fn f9_a_waiter_of_a_queue_that_ends_takes_over() {
    let mut pair = Pair::new();
    let (owned, waits) = pair.start(1);
    // The owner's queue is dropped in the middle of its read.
    let (backend, queue, _) = pair.owner;
    let closing = std::thread::spawn(move || queue.close());
    assert_eq!(outcomes(&owned), [Outcome::Cancelled]);
    backend.fail(key(0), [ErrorKind::Io]);
    backend.open();
    closing.join().unwrap().unwrap();
    pair.waiter.0.wait_held(1);
    pair.waiter.0.open();
    assert_all_loaded(&waits);
    pair.waiter.2.assert_holds(key(0), 0);
    pair.node.assert_at_rest();
    pair.owner = (backend, pair.waiter.1, pair.waiter.2);
}

#[test]
fn f10_a_waiter_of_a_dead_owner_takes_over() {
    let pair = Pair::new();
    let (_, queue, buffer) = &pair.waiter;
    let dead = pair.node.rank();
    let Acquired::Owner(fill) = dead.pool.acquire(&key(0)).unwrap() else { panic!() };
    let waits = queue.submit(task_of(buffer, [key(0)])).unwrap();
    pair.node.wait_waiters(1);
    // As after a proof of its death: its fill is undone, and the waiter hears of it.
    pair.node.rank().member.reap(dead.member.id(), Some(dead.member.generation()));
    pair.waiter.0.wait_held(1);
    pair.waiter.0.open();
    assert_all_loaded(&waits);
    pair.waiter.2.assert_holds(key(0), 0);
    assert_eq!(queue.stats().retried_shards, 1);
    // What the dead one does afterwards reaches nobody.
    drop(fill);
    assert_all_loaded(&queue.submit(task_of(buffer, [key(0)])).unwrap());
    pair.node.assert_at_rest();
}
