//! T1–T3: what the ranks of one request can rely on together. (T4: `StagingLayout`.)

use std::time::{Duration, Instant};

use ucm_ctrl::{Acquired, FailKind, LeaseOutcome, Presence};
use ucm_queue::Outcome;
use ucm_store::ErrorKind;

use crate::support::*;

const BYTES: u64 = 256;

#[test]
fn t1_the_hit_length_is_the_minimum_over_the_ranks() {
    // Shard r of block b belongs to rank r. Rank 1 misses its shard of block 2.
    let node = Node::new(64, BYTES);
    let rank = node.rank();
    let queue = rank.builder(Script::new()).start().unwrap();
    let buffer = Buffer::of(&queue, 24, BYTES);
    let shards = (0..24).filter(|n| *n != 2 * 4 + 1).map(key);
    assert_all_loaded(&queue.submit(task_of(&buffer, shards)).unwrap());
    let hits: Vec<usize> = (0..4)
        .map(|r| {
            let keys: Vec<_> = (0..6).map(|b| key(b * 4 + r)).collect();
            rank.pool.prefix_lookup(&keys).unwrap()
        })
        .collect();
    assert_eq!(hits, [6, 2, 6, 6]);
    // One walk over all shards, block by block, says the same: the whole blocks of the prefix.
    let all: Vec<_> = (0..24).map(key).collect();
    assert_eq!(rank.pool.prefix_lookup(&all).unwrap() / 4, 2);
}

#[test]
fn t2_what_a_lease_promised_is_there_for_every_rank() {
    let node = Node::new(8, BYTES);
    let scheduler = node.control.join(ucm_ctrl::MemberSpec::scheduler()).unwrap();
    let pool = scheduler.pool(ucm_ctrl::PoolId(0)).unwrap();
    let ranks = [node.rank(), node.rank(), node.rank()];
    let backend = Script::new();
    let queues = ranks
        .each_ref()
        .map(|rank| rank.builder(backend.clone()).staging(rank.buffers(2)).start().unwrap());
    let buffers = queues.each_ref().map(|queue| Buffer::of(queue, 40, BYTES));
    assert_all_loaded(&queues[0].submit(task_of(&buffers[0], (0..4).map(key))).unwrap());
    let keys: Vec<_> = (0..4).map(key).collect();
    let LeaseOutcome::Leased(lease) =
        pool.lease(&keys, 3, Instant::now() + Duration::from_secs(600)).unwrap()
    else {
        panic!("nothing was leased");
    };
    let ticket = lease.ticket();
    let before = backend.loads().0;
    for (queue, buffer) in queues.iter().zip(&buffers) {
        // As much pressure as the cache can take ten times over.
        assert_all_loaded(&queue.submit(task_of(buffer, (100..140).map(key))).unwrap());
        (0..4).for_each(|i| buffer.wipe(i));
    }
    let pressure = backend.loads().0;
    assert!(pressure > before);
    for ((queue, buffer), rank) in queues.iter().zip(&buffers).zip(&ranks) {
        assert_all_loaded(&queue.submit(task_of(buffer, (0..4).map(key))).unwrap());
        (0..4).for_each(|i| buffer.assert_holds(key(i), i));
        rank.member.redeem(ticket).unwrap();
    }
    assert_eq!(backend.loads().0, pressure, "all of it were hits");
}

#[test]
fn t3_all_ranks_that_wait_recompute_the_same_blocks() {
    // Rank 0 reads everything, ranks 1 and 2 wait. Shards 2 and 5 are not there; 7 has an IO error
    // that the one retry meets again.
    let node = Node::new(32, BYTES);
    let ranks = [node.rank(), node.rank(), node.rank()];
    let backend = Script::holding();
    let queues = ranks
        .each_ref()
        .map(|rank| rank.builder(backend.clone()).backend_depth(16).start().unwrap());
    let buffers = queues.each_ref().map(|queue| Buffer::of(queue, 10, BYTES));
    [2, 5].iter().for_each(|i| backend.fail(key(*i), [ErrorKind::Missing; 4]));
    let mut handles = Vec::new();
    handles.push(queues[0].submit(request_of(&buffers[0], (0..10).map(key))).unwrap());
    backend.wait_held(10);
    for rank in [1, 2] {
        handles.push(queues[rank].submit(request_of(&buffers[rank], (0..10).map(key))).unwrap());
    }
    node.wait_waiters(20);
    backend.open();
    let expected = Outcome::Recompute { shards: vec![2, 5], kind: FailKind::Missing };
    for (rank, handle) in handles.iter().enumerate() {
        assert_eq!(outcomes(handle).remove(0), expected, "rank {rank}");
        let good = (0..10).filter(|i| ![2, 5].contains(i));
        good.for_each(|i| buffers[rank].assert_holds(key(i), i));
    }
    // The verdict was shared, not found three times.
    assert_eq!([2, 5].map(|i| backend.loads_of(key(i))), [1, 1]);
    // And no lookup says that they are there.
    let mut presence = [Presence::Ready; 2];
    ranks[1].pool.lookup(&[key(2), key(5)], &mut presence).unwrap();
    assert!(presence.iter().all(|presence| *presence != Presence::Ready), "{presence:?}");
}

#[test]
fn t3_a_rank_that_comes_later_asks_again_once() {
    let node = Node::new(32, BYTES);
    let (a, b) = (node.rank(), node.rank());
    let backend = Script::new();
    let first = a.builder(backend.clone()).start().unwrap();
    let second = b.builder(backend.clone()).start().unwrap();
    let buffers = [Buffer::of(&first, 1, BYTES), Buffer::of(&second, 1, BYTES)];
    backend.fail(key(0), [ErrorKind::Missing, ErrorKind::Missing]);
    for (queue, buffer) in [&first, &second].into_iter().zip(&buffers) {
        let handle = queue.submit(task_of(buffer, [key(0)])).unwrap();
        let missing = Outcome::Recompute { shards: vec![0], kind: FailKind::Missing };
        assert_eq!(outcomes(&handle), [missing]);
    }
    assert_eq!(backend.loads_of(key(0)), 2);
    assert!(matches!(a.pool.acquire(&key(0)).unwrap(), Acquired::Owner(_)), "nothing is stuck");
}
