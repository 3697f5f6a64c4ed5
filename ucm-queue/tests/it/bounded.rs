//! What callers can pile up is bounded, also where it has no bytes.

use std::time::Duration;

use ucm_queue::{Deadline, DumpRef, DumpTask, ErrorKind, Outcome, Producer, Request, Task};

use crate::support::*;

const BYTES: u64 = 4096;

/// Requests that end long before their deadlines leave no list of them behind. Seen to fail: no
/// compaction; ends that are not counted; a compaction that drops the open ones.
#[test]
fn deadlines_of_ended_requests_are_not_kept() {
    const OPEN: u64 = 40;
    const MINUTE: Duration = Duration::from_secs(60);
    // Key 100 takes longer than anybody waits for it.
    let fate = |_, read| {
        let hours = u64::from(read == key(100)) * 3600;
        (Duration::from_secs(hours), Fate::Good)
    };
    let mut world =
        World::new(Node::new(64, 64), 1, OPEN + 4, |_| Box::new(fate), |_, builder| builder);
    let mut task = task_of(&world.ranks[0].buffer, (0..OPEN).map(|_| key(100)));
    for (minutes, request) in (1..).zip(&mut task.requests) {
        request.deadline = Some(Deadline::After(MINUTE * minutes));
    }
    let open = world.ranks[0].queue.submit(task, world.now).unwrap();
    let mut most = 0;
    for round in 0..2000 {
        let rank = &world.ranks[0];
        let shard = |i| rank.buffer.shard(key((round + i) % 32), OPEN + i);
        let deadline = Some(Deadline::After(MINUTE * 600));
        let requests = (0..4).map(|i| Request { shards: vec![shard(i)], deadline }).collect();
        let handle = rank.queue.submit(Task { requests }, world.now).unwrap();
        if round % 3 == 0 {
            handle.cancel();
        }
        world.pass(Duration::from_millis(1));
        assert!(handle.is_done());
        most = most.max(world.ranks[0].queue.deadlines());
    }
    // The open ones, and about as many again.
    assert!((40..=88).contains(&most), "{most} deadlines for {OPEN} open requests");
    for minutes in 1..=OPEN {
        assert_eq!(open.poll(), None);
        world.pass(MINUTE);
        let ended = (0..40).filter(|i| open.request(*i).is_some()).count();
        assert_eq!(ended as u64, minutes, "each in its time");
    }
    assert_eq!(open.poll().unwrap(), [const { Outcome::Deadline }; 40]);
    world.run();
    assert_eq!(world.ranks[0].queue.deadlines(), 0);
}

fn empty(requests: usize) -> Task {
    Task { requests: vec![Request::default(); requests] }
}

/// Seen to fail: requests count what they have, nothing if empty.
#[test]
fn requests_without_shards_count_as_one() {
    let node = Node::new(8, BYTES);
    let rank = node.rank();
    let backend = Script::holding();
    let queue = rank.builder(backend.clone()).max_admitted(9, 10).start().unwrap();
    let buffer = Buffer::of(&queue, 8, BYTES);
    let error = queue.submit(empty(11)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TooLarge);
    assert!(error.to_string().contains("11 shards"), "{error}");
    let mut task = task_of(&buffer, [key(0)]);
    task.requests.extend(empty(5).requests);
    let first = queue.submit(task).unwrap();
    let error = queue.submit(empty(5)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    assert!(error.to_string().contains("holds 6 shards"), "{error}");
    assert_eq!(outcomes(&queue.submit(empty(4)).unwrap()), vec![Outcome::Loaded; 4]);
    backend.open();
    assert_all_loaded(&first);
    for _ in 0..100 {
        assert_all_loaded(&queue.submit(empty(10)).unwrap());
    }
}

/// Seen to fail: dumps counted by bytes only; a share that is forgotten when a limit after it refuses;
/// a task's share that is kept by what gated it.
#[test]
fn dumps_without_bytes_to_speak_of_are_counted() {
    let node = Node::new(64, BYTES);
    let rank = node.rank();
    let backend = Script::holding();
    let queue = rank.builder(backend.clone()).max_admitted(3, 10).max_dump_bytes(9);
    let queue = queue.start().unwrap();
    let buffer = Buffer::of(&queue, 16, BYTES);
    let tiny = |keys: std::ops::Range<u64>| {
        let shards = keys.map(|i| DumpRef { key: key(i), src: buffer.addr(i), len: Some(1) });
        DumpTask { shards: shards.collect(), durable: true, ..DumpTask::default() }
    };
    let error = queue.dump(tiny(0..11)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TooLarge);
    assert!(error.to_string().contains("11 dump shards"), "{error}");
    let first = queue.dump(tiny(0..7)).unwrap();
    for _ in 0..5 {
        let error = queue.dump(tiny(7..10)).unwrap_err();
        assert!(error.to_string().contains("holds 7 dump bytes"), "{error}");
        let error = queue.dump(tiny(7..11)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Busy);
        assert!(error.to_string().contains("holds 7 dump shards"), "{error}");
    }
    // Tasks without anything that wait for their producer.
    let (producer, produced) = Producer::new();
    let gated = || DumpTask { after: Some(produced.clone()), ..DumpTask::default() };
    let waiting = [queue.dump(gated()).unwrap(), queue.dump(gated()).unwrap()];
    let error = queue.dump(gated()).unwrap_err();
    assert!(error.to_string().contains("holds 3 dump tasks"), "{error}");
    // Loads are another matter.
    let loads: Vec<_> = (0..3).map(|_| queue.submit(empty(3)).unwrap()).collect();
    loads.iter().for_each(assert_all_loaded);
    producer.signal();
    eventually("room for a task", || queue.dump(DumpTask::default()).is_ok());
    backend.open();
    assert_eq!(first.wait_durable(watchdog()), Some(vec![Ok(()); 7]));
    drop(waiting);
    // Whoever has heard of the end may dump again at once.
    for _ in 0..200 {
        let handle = queue.dump(tiny(0..9)).unwrap();
        assert_eq!(handle.wait_durable(watchdog()), Some(vec![Ok(()); 9]));
    }
}
