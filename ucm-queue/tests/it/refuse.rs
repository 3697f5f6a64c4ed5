//! What is refused at submission, with its numbers and without any effect.

use ucm_queue::{DumpRef, DumpTask, ErrorKind, Request, ShardRef, Task};
use ucm_transport::{Addr, Memory};

use crate::support::*;

const BYTES: u64 = 4096;

fn one(shards: Vec<ShardRef>) -> Task {
    Task { requests: vec![Request { shards, deadline: None }] }
}

#[test]
fn p4_what_can_never_work_is_refused_with_its_numbers() {
    let node = Node::new(8, BYTES);
    let rank = node.rank();
    let backend = Script::new();
    let builder = rank.builder(backend.clone()).max_admitted(2, 10).max_dump_bytes(2 * BYTES);
    let queue = builder.start().unwrap();
    let buffer = Buffer::of(&queue, 8, BYTES);
    let unknown = rank.buffers(1);
    let good = buffer.shard(key(0), 0);
    let cases: Vec<(Vec<ShardRef>, ErrorKind, &[&str])> = vec![
        (vec![ShardRef { len: Some(4097), ..good }], ErrorKind::TooLarge, &["4097", "4096"]),
        (vec![buffer.shard(key(0), 8)], ErrorKind::OutOfBounds, &["4096", "32768"]),
        (
            vec![ShardRef { dst: Addr { offset: u64::MAX, ..good.dst }, ..good }],
            ErrorKind::OutOfBounds,
            &["18446744073709551615"],
        ),
        (
            vec![ShardRef { dst: unknown.try_acquire().unwrap().addr(0, 1).unwrap(), ..good }],
            ErrorKind::UnknownRegion,
            &["RegionId"],
        ),
        (
            vec![good, ShardRef { key: key(1), dst: Addr { offset: 4095, ..good.dst }, len: None }],
            ErrorKind::Overlap,
            &["4095"],
        ),
        (
            vec![good, ShardRef { len: Some(17), ..buffer.shard(key(0), 1) }],
            ErrorKind::Invalid,
            &["4096", "17"],
        ),
        (
            vec![ShardRef { key: ucm_ctrl::Key::new([0; 16], 4), ..good }],
            ErrorKind::Invalid,
            &["4 shards"],
        ),
        (
            (0..11).map(|i| ShardRef { len: Some(0), ..buffer.shard(key(i), 0) }).collect(),
            ErrorKind::TooLarge,
            &["12", "10"],
        ),
    ];
    let count = cases.len();
    for (shards, kind, numbers) in cases {
        // The bad shard comes last: what was good before it must not be done either.
        let mut requests = vec![Request { shards: vec![buffer.shard(key(3), 3)], deadline: None }];
        requests.extend(one(shards).requests);
        let error = queue.submit(Task { requests }).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        for number in numbers {
            assert!(error.to_string().contains(number), "{error}: {number} is missing");
        }
    }
    assert_eq!(queue.stats().rejected.iter().sum::<u64>(), count as u64);
    assert_eq!(queue.stats().rejected[ErrorKind::Overlap as usize], 1);
    // Nothing happened, nothing is held.
    assert_eq!(backend.loads(), (0, 0));
    assert_eq!(queue.stats().tasks, 0);
    buffer.assert_untouched(3);
    assert_all_loaded(
        &queue.submit(one((0..8).map(|i| buffer.shard(key(i), i)).collect())).unwrap(),
    );
}

#[test]
fn a_full_queue_is_busy_and_recovers() {
    let node = Node::new(8, BYTES);
    let rank = node.rank();
    let backend = Script::holding();
    let queue = rank.builder(backend.clone()).max_admitted(2, 10).start().unwrap();
    let buffer = Buffer::of(&queue, 16, BYTES);
    let first = queue.submit(task_of(&buffer, (0..7).map(key))).unwrap();
    let error = queue.submit(task_of(&buffer, (0..4).map(key))).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    assert!(error.to_string().contains("holds 7 shards"), "{error}");
    let second = queue.submit(task_of(&buffer, [key(9)])).unwrap();
    let error = queue.submit(task_of(&buffer, [key(9)])).unwrap_err();
    assert!(error.to_string().contains("holds 2 tasks"), "{error}");
    backend.open();
    assert_all_loaded(&first);
    assert_all_loaded(&second);
    // Whoever has heard of the end may submit again at once.
    for _ in 0..1000 {
        let full = queue.submit(task_of(&buffer, (0..10).map(key))).unwrap();
        assert_all_loaded(&full);
    }
}

#[test]
fn dumps_are_checked_too() {
    let node = Node::new(8, BYTES);
    let rank = node.rank();
    let backend = Script::new();
    let queue = rank.builder(backend).max_dump_bytes(2 * BYTES).start().unwrap();
    let buffer = Buffer::of(&queue, 8, BYTES);
    let shard = |i: u64| DumpRef { key: key(i), src: buffer.addr(i), len: None };
    let dump = |shards| {
        queue.dump(DumpTask { shards, durable: false, ..DumpTask::default() }).unwrap_err()
    };
    let error = dump((0..3).map(shard).collect());
    assert_eq!(error.kind(), ErrorKind::TooLarge);
    assert!(error.to_string().contains("12288") && error.to_string().contains("8192"), "{error}");
    assert_eq!(dump(vec![DumpRef { len: Some(0), ..shard(0) }]).kind(), ErrorKind::TooLarge);
    assert_eq!(dump(vec![DumpRef { len: Some(4097), ..shard(0) }]).kind(), ErrorKind::TooLarge);
    assert_eq!(dump(vec![shard(0), shard(0)]).kind(), ErrorKind::Invalid);
    assert_eq!(dump(vec![shard(8)]).kind(), ErrorKind::OutOfBounds);
}

#[test]
fn regions_come_and_go() {
    let node = Node::new(8, BYTES);
    let rank = node.rank();
    let queue = rank.builder(Script::new()).start().unwrap();
    let buffer = Buffer::of(&queue, 4, BYTES);
    assert_all_loaded(&queue.submit(task_of(&buffer, [key(0)])).unwrap());
    queue.deregister(buffer.region).unwrap();
    let error = queue.submit(task_of(&buffer, [key(0)])).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::UnknownRegion);
    let again = queue.register(Memory::host(4096).unwrap()).unwrap();
    assert_ne!(again, buffer.region);
    rank.gate.close();
    let other = Buffer::of(&queue, 4, BYTES);
    let handle = queue.submit(task_of(&other, [key(0)])).unwrap();
    rank.gate.wait_held(1);
    assert!(queue.deregister(other.region).is_err(), "a copy uses it");
    rank.gate.open();
    assert_all_loaded(&handle);
    other.assert_holds(key(0), 0);
}

#[test]
fn a_queue_that_cannot_work_does_not_start() {
    let node = Node::new(8, BYTES);
    let rank = node.rank();
    let small = Cells::new(Memory::host(8 * 4095).unwrap(), rank_region(&rank), 8, 4095);
    let start = |cells: std::sync::Arc<Cells>| {
        ucm_queue::LoadQueue::builder(
            &rank.member,
            &rank.pool,
            cells,
            Script::new(),
            rank.gate.clone(),
        )
        .start()
        .unwrap_err()
    };
    let error = start(small);
    assert_eq!(error.kind(), ErrorKind::TooLarge);
    assert!(error.to_string().contains("4096") && error.to_string().contains("4095"), "{error}");
    let few = Cells::new(Memory::host(7 * 4096).unwrap(), rank_region(&rank), 7, 4096);
    assert_eq!(start(few).kind(), ErrorKind::Start);
}

fn rank_region(rank: &Rank) -> ucm_transport::RegionId {
    ucm_queue::SlotMemory::slot_addr(&*rank.cells, ucm_ctrl::SlotId(0)).unwrap().region
}
