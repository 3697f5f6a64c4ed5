//! Ranks that dump parts of one thing: all of them publish, or none.
//!
//! Mutants seen to fail here: a vote before all shards are held; a full cache that makes a group take
//! staging buffers; a group behind ordinary dumps; waiting for a shard that somebody else fills; a queue that closes after its vote and
//! drops what the others commit; a gated dump that cannot give up.

use std::sync::Arc;

use ucm_ctrl::{Acquired, FailKind, MemberStay, Presence};
use ucm_queue::{
    CommitBoard, CommitGroup, DumpHandle, DumpTask, LoadQueue, LocalBoard, Producer, SharedBoard,
};
use ucm_transport::ErrorKind as CopyError;

use crate::{
    dump::{BYTES, dump_of, presence, sources},
    support::*,
};

/// The dump as rank `rank` of three.
fn in_group(board: &Arc<dyn CommitBoard>, mut task: DumpTask, rank: u32) -> DumpTask {
    task.group = Some(CommitGroup { board: board.clone(), id: [9; 16], rank, ranks: 3 });
    task
}

#[test]
fn s6_a_group_is_visible_only_when_all_its_ranks_have_committed() {
    let node = Node::new(32, BYTES);
    let ranks = [node.rank(), node.rank(), node.rank()];
    let backend = Script::new();
    let queues = ranks.each_ref().map(|rank| rank.builder(backend.clone()).start().unwrap());
    let buffers = queues.each_ref().map(|queue| sources(queue, 12));
    let votes = LocalBoard::new();
    let board: Arc<dyn CommitBoard> = votes.clone();
    let dump = |rank: usize| {
        let first = rank as u64 * 4;
        let task = dump_of(&buffers[rank], first..first + 4, true);
        let rank_number = u32::try_from(rank).unwrap();
        queues[rank].dump(in_group(&board, task, rank_number)).unwrap()
    };
    let mut handles = vec![dump(0), dump(1)];
    eventually("a vote", || votes.open() == 1);
    eventually("the copies", || queues[..2].iter().all(|queue| queue.stats().copy_plans > 0));
    // All bytes of two ranks are here, and nobody can read one of them.
    for i in 0..12 {
        assert_ne!(presence(&ranks[2], i), Presence::Ready, "shard {i}");
    }
    assert_eq!(handles[0].wait_cached(Some(std::time::Instant::now())), None);
    assert_eq!(backend.stored(key(0)), None, "nor is anything in the backend");
    handles.push(dump(2));
    for (rank, handle) in handles.iter().enumerate() {
        assert_eq!(handle.wait_durable(watchdog()), Some(vec![Ok(()); 4]), "rank {rank}");
        assert_eq!(queues[rank].stats().groups_committed, 1);
    }
    for i in 0..12 {
        assert_eq!(presence(&ranks[0], i), Presence::Ready);
        assert_eq!(backend.stored(key(i)).unwrap(), buffers[0].bytes(i));
    }
    assert_eq!(votes.open(), 0);
    node.assert_at_rest();
}

#[test]
fn s6_one_rank_that_fails_or_closes_takes_the_group_back() {
    for closes in [false, true] {
        let node = Node::new(32, BYTES);
        let ranks = [node.rank(), node.rank(), node.rank()];
        let backend = Script::new();
        let mut queues: Vec<_> =
            ranks.iter().map(|rank| Some(rank.builder(backend.clone()).start().unwrap())).collect();
        let buffers: Vec<_> =
            queues.iter().map(|queue| sources(queue.as_ref().unwrap(), 12)).collect();
        let board: Arc<dyn CommitBoard> = LocalBoard::new();
        ranks[2].gate.close();
        let handles: Vec<_> = (0..3)
            .map(|rank: u32| {
                let first = u64::from(rank) * 4;
                let task = dump_of(&buffers[rank as usize], first..first + 4, true);
                let queue = queues[rank as usize].as_ref().unwrap();
                queue.dump(in_group(&board, task, rank)).unwrap()
            })
            .collect();
        ranks[2].gate.wait_held(1);
        if closes {
            ranks[2].gate.open();
            // Dropped before or after its copies: it has not been told of a decision.
            let held = Some(std::time::Instant::now());
            let queue = queues[2].take();
            if handles[2].wait_cached(held).is_none() {
                drop(queue);
            }
        } else {
            for _ in 0..5 {
                ranks[2].gate.fail_next(CopyError::Failed);
            }
            ranks[2].gate.open();
        }
        let results: Vec<_> =
            handles.iter().map(|handle| handle.wait_durable(watchdog()).unwrap()).collect();
        let committed = results[0] == vec![Ok(()); 4];
        assert!(closes || !committed, "a rank failed");
        for (rank, results) in results.iter().enumerate().take(2) {
            let expected = if committed { Ok(()) } else { Err(FailKind::Cancelled) };
            assert_eq!(*results, vec![expected; 4], "rank {rank}");
        }
        for i in 0..8 {
            let ready = presence(&ranks[0], i) == Presence::Ready;
            assert_eq!((ready, backend.stored(key(i)).is_some()), (committed, committed));
        }
        drop(queues);
        node.assert_at_rest();
    }
}

/// One board for all, or one a rank in the control region.
fn boards(shared: bool, ranks: &[Rank]) -> Vec<Arc<dyn CommitBoard>> {
    if shared {
        let roster: Vec<MemberStay> = ranks.iter().map(|rank| rank.member.stay()).collect();
        ranks.iter().map(|rank| SharedBoard::new(&rank.member, roster.clone()) as _).collect()
    } else {
        let board: Arc<dyn CommitBoard> = LocalBoard::new();
        vec![board; ranks.len()]
    }
}

/// The part of rank `rank` of two in attempt `id`.
fn half(
    queue: &LoadQueue,
    board: &Arc<dyn CommitBoard>,
    mut task: DumpTask,
    rank: u32,
    id: u8,
) -> DumpHandle {
    task.group = Some(CommitGroup { board: board.clone(), id: [id; 16], rank, ranks: 2 });
    queue.dump(task).unwrap()
}

/// The copies of one rank take their time; neither its vote nor the others' publish comes before.
#[test]
fn s6_no_vote_before_the_last_copy() {
    for shared in [false, true] {
        let node = Node::new(8, BYTES);
        let ranks = [node.rank(), node.rank()];
        let boards = boards(shared, &ranks);
        let queues = ranks.each_ref().map(|rank| rank.builder(Script::new()).start().unwrap());
        let buffers = queues.each_ref().map(|queue| sources(queue, 4));
        ranks[0].gate.close();
        let slow = half(&queues[0], &boards[0], dump_of(&buffers[0], 0..1, true), 0, 1);
        ranks[0].gate.wait_held(1);
        let fast = half(&queues[1], &boards[1], dump_of(&buffers[1], 1..3, true), 1, 1);
        eventually("the fast rank's copies", || queues[1].stats().copy_plans > 0);
        assert!((0..3).all(|i| presence(&ranks[1], i) != Presence::Ready), "shared {shared}");
        assert_eq!(fast.wait_cached(Some(std::time::Instant::now())), None);
        ranks[0].gate.open();
        assert_eq!(slow.wait_durable(watchdog()), Some(vec![Ok(()); 1]), "shared {shared}");
        assert_eq!(fast.wait_durable(watchdog()), Some(vec![Ok(()); 2]));
        drop(queues);
        node.assert_at_rest();
    }
}

/// Ordinary dumps that wait for the fills of a group do not keep the vote from it.
/// Mutant: one line for both.
#[test]
fn s6_a_group_does_not_stand_behind_dumps_that_wait_for_it() {
    for shared in [false, true] {
        let node = Node::new(32, BYTES);
        let ranks = [node.rank(), node.rank()];
        let boards = boards(shared, &ranks);
        let queues = ranks.each_ref().map(|rank| rank.builder(Script::new()).start().unwrap());
        let buffers = queues.each_ref().map(|queue| sources(queue, 12));
        let theirs = half(&queues[1], &boards[1], dump_of(&buffers[1], 0..10, false), 1, 1);
        eventually("the fills", || (0..10).all(|i| presence(&ranks[0], i) == Presence::Filling));
        // More than may keep slots at once.
        let plain = queues[0].dump(dump_of(&buffers[0], 0..10, false)).unwrap();
        let mine = half(&queues[0], &boards[0], dump_of(&buffers[0], 10..12, false), 0, 1);
        assert_eq!(mine.wait_cached(watchdog()), Some(vec![Ok(()); 2]), "shared {shared}");
        assert_eq!(theirs.wait_cached(watchdog()), Some(vec![Ok(()); 10]));
        assert_eq!(plain.wait_cached(watchdog()), Some(vec![Ok(()); 10]));
        drop(queues);
        node.assert_at_rest();
    }
}

/// Nobody waits for a slot, a buffer or somebody else's fill while others wait for its vote.
#[test]
fn s6_a_shard_that_cannot_be_held_takes_the_group_back() {
    for shared in [false, true] {
        let node = Node::new(8, BYTES);
        let ranks = [node.rank(), node.rank()];
        let boards = boards(shared, &ranks);
        // One buffer, which would do for one shard of a dump that waits for nobody.
        let queues = ranks
            .each_ref()
            .map(|rank| rank.builder(Script::new()).dump_staging(rank.buffers(1)).start().unwrap());
        let buffers = queues.each_ref().map(|queue| sources(queue, 16));
        let ends = |handles: [DumpHandle; 2]| handles.map(|h| h.wait_durable(watchdog()).unwrap());
        // More than there is room for.
        let first = half(&queues[0], &boards[0], dump_of(&buffers[0], 0..4, true), 0, 1);
        eventually("the first rank's copies", || queues[0].stats().copy_plans > 0);
        let second = half(&queues[1], &boards[1], dump_of(&buffers[1], 4..10, true), 1, 1);
        let results = ends([first, second]);
        assert_eq!(results[0], vec![Err(FailKind::Cancelled); 4], "shared {shared}");
        assert!(results[1].iter().all(Result::is_err), "{results:?}");
        assert!(results[1].contains(&Err(FailKind::NoSpace)), "{results:?}");
        assert_eq!(queues.each_ref().map(|queue| queue.stats().staging_in_use_max), [0; 2]);
        // Somebody fills one of them, and may take for ever.
        let Acquired::Owner(fill) = ranks[0].pool.acquire(&key(5)).unwrap() else { panic!() };
        let results = ends([
            half(&queues[0], &boards[0], dump_of(&buffers[0], 0..2, true), 0, 2),
            half(&queues[1], &boards[1], dump_of(&buffers[1], 4..6, true), 1, 2),
        ]);
        assert_eq!(results[0], vec![Err(FailKind::Cancelled); 2]);
        let busy = Err(FailKind::Unavailable);
        assert_eq!(results[1], [Err(FailKind::Cancelled), busy]);
        drop(fill);
        for i in 0..10 {
            assert_ne!(presence(&ranks[0], i), Presence::Ready, "shard {i}");
        }
        // The next attempt has what it needs.
        let results = ends([
            half(&queues[0], &boards[0], dump_of(&buffers[0], 0..2, true), 0, 3),
            half(&queues[1], &boards[1], dump_of(&buffers[1], 4..6, true), 1, 3),
        ]);
        assert_eq!(results, [vec![Ok(()); 2], vec![Ok(()); 2]]);
        drop(queues);
        node.assert_at_rest();
    }
}

#[test]
fn s6_a_rank_can_give_up_before_and_after_its_vote() {
    for shared in [false, true] {
        let node = Node::new(16, BYTES);
        let ranks = [node.rank(), node.rank()];
        let boards = boards(shared, &ranks);
        let queues = ranks.each_ref().map(|rank| rank.builder(Script::new()).start().unwrap());
        let buffers = queues.each_ref().map(|queue| sources(queue, 8));
        let cancelled = || Some(vec![Err(FailKind::Cancelled); 4]);
        // With its producer still at work, with copies under way or held, and with nothing to dump.
        let (producer, produced) = Producer::new();
        let mut task = dump_of(&buffers[0], 0..4, false);
        task.after = Some(produced);
        let gated = half(&queues[0], &boards[0], task, 0, 1);
        let other = half(&queues[1], &boards[1], dump_of(&buffers[1], 4..8, false), 1, 1);
        gated.give_up();
        assert_eq!(
            [gated.wait_cached(watchdog()), other.wait_cached(watchdog())],
            [cancelled(), cancelled()]
        );
        producer.signal();
        let early = half(&queues[0], &boards[0], dump_of(&buffers[0], 0..4, false), 0, 2);
        early.give_up();
        assert_eq!(early.wait_cached(watchdog()), cancelled());
        let late = half(&queues[1], &boards[1], dump_of(&buffers[1], 4..8, false), 1, 2);
        assert_eq!(late.wait_cached(watchdog()), cancelled());
        let other = half(&queues[1], &boards[1], dump_of(&buffers[1], 4..8, false), 1, 3);
        CommitGroup { board: boards[0].clone(), id: [3; 16], rank: 0, ranks: 2 }.give_up();
        assert_eq!(other.wait_cached(watchdog()), cancelled());
        // After the decision it changes nothing.
        let both = [
            half(&queues[0], &boards[0], dump_of(&buffers[0], 0..4, false), 0, 4),
            half(&queues[1], &boards[1], dump_of(&buffers[1], 4..8, false), 1, 4),
        ];
        for handle in both {
            assert_eq!(handle.wait_cached(watchdog()), Some(vec![Ok(()); 4]));
            handle.give_up();
        }
        assert!((0..8).all(|i| presence(&ranks[0], i) == Presence::Ready));
        drop(queues);
        node.assert_at_rest();
    }
}

/// A queue that closes while its group is being decided ends as the others do.
#[test]
fn s6_a_queue_that_closes_publishes_what_was_decided() {
    let mut committed = 0;
    for round in 0..200_u32 {
        let shared = round % 2 == 0;
        let node = Node::new(16, BYTES);
        let ranks = [node.rank(), node.rank()];
        let boards = boards(shared, &ranks);
        let mut queues =
            ranks.each_ref().map(|rank| Some(rank.builder(Script::new()).start().unwrap()));
        let buffers = queues.each_ref().map(|queue| sources(queue.as_ref().unwrap(), 8));
        let mine =
            half(queues[0].as_ref().unwrap(), &boards[0], dump_of(&buffers[0], 0..4, false), 0, 1);
        // It has voted: what the other one does now decides.
        let copied = || queues[0].as_ref().unwrap().stats().copy_plans > 0;
        eventually("the first rank's copies", copied);
        let theirs =
            half(queues[1].as_ref().unwrap(), &boards[1], dump_of(&buffers[1], 4..8, false), 1, 1);
        for _ in 0..round * 20 {
            std::hint::spin_loop();
        }
        queues[0].take().unwrap().close().unwrap();
        // The one that stays learns what the one that closed did.
        let results = [theirs, mine].map(|handle| handle.wait_cached(watchdog()).unwrap());
        let all = results[0] == vec![Ok(()); 4];
        let none = results.iter().flatten().all(Result::is_err);
        assert!(none || all && results[1] == vec![Ok(()); 4], "round {round}: {results:?}");
        for i in 0..8 {
            assert_eq!(presence(&ranks[1], i) == Presence::Ready, all, "round {round}, shard {i}");
        }
        committed += u32::from(all);
        drop(queues);
        node.assert_at_rest();
    }
    assert!(committed > 0, "no round was decided before the end of the queue");
}
