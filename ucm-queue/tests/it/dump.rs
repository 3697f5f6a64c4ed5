//! The way back: device, cache, backend.

use ucm_ctrl::{Acquired, FailKind, Presence};
use ucm_queue::{DumpRef, DumpTask, ErrorKind, LoadQueue, Outcome, Producer};
use ucm_store::ErrorKind as StoreKind;
use ucm_transport::ErrorKind as CopyError;

use crate::support::*;

pub(crate) const BYTES: u64 = 4096;

pub(crate) fn dump_of(buffer: &Buffer, keys: std::ops::Range<u64>, durable: bool) -> DumpTask {
    let shard = |i| DumpRef { key: key(i), src: buffer.addr(i), len: None };
    DumpTask { shards: keys.map(shard).collect(), durable, ..DumpTask::default() }
}

/// A buffer whose place `i` holds the payload of key `i`.
pub(crate) fn sources(queue: &LoadQueue, count: u64) -> Buffer {
    let buffer = Buffer::of(queue, count, BYTES);
    (0..count).for_each(|i| buffer.fill(key(i), i));
    buffer
}

pub(crate) fn presence(rank: &Rank, n: u64) -> Presence {
    let mut out = [Presence::Absent];
    rank.pool.lookup(&[key(n)], &mut out).unwrap();
    out[0]
}

#[test]
fn s2_cached_comes_before_durable_and_loads_find_both() {
    let node = Node::new(16, BYTES);
    let rank = node.rank();
    let backend = Script::holding();
    let queue = rank.builder(backend.clone()).dump_depth(2).start().unwrap();
    let buffer = sources(&queue, 16);
    let handle = queue.dump(dump_of(&buffer, 0..8, true)).unwrap();
    assert_eq!(handle.wait_cached(watchdog()), Some(vec![Ok(()); 8]));
    assert_eq!(handle.progress(0).durable, None);
    // The sources may be reused now.
    (0..8).for_each(|i| buffer.wipe(i));
    backend.wait_held(2);
    assert_eq!(queue.stats().dumps_in_flight, 2, "bounded");
    assert_eq!(queue.stats().dump_bytes_in_flight, 8 * BYTES);
    // Loads are served from the cache meanwhile.
    assert_all_loaded(&queue.submit(task_of(&buffer, (0..8).map(key))).unwrap());
    (0..8).for_each(|i| buffer.assert_holds(key(i), i));
    assert_eq!(queue.stats().backend_loads, 0);
    assert_eq!(handle.wait_durable(Some(std::time::Instant::now())), None);
    backend.open();
    assert_eq!(handle.wait_durable(watchdog()), Some(vec![Ok(()); 8]));
    for i in 0..8 {
        buffer.assert_holds(key(i), i);
        assert_eq!(backend.stored(key(i)).unwrap(), buffer.bytes(i));
    }
    assert_eq!(queue.stats().dump_bytes_in_flight, 0);
    node.assert_at_rest();
}

#[test]
fn dumps_without_durability_stay_in_the_cache() {
    let node = Node::new(16, BYTES);
    let rank = node.rank();
    let backend = Script::new();
    let queue = rank.builder(backend.clone()).start().unwrap();
    let buffer = sources(&queue, 4);
    let handle = queue.dump(dump_of(&buffer, 0..4, false)).unwrap();
    assert_eq!(handle.wait_durable(watchdog()), Some(vec![Ok(()); 4]));
    assert_eq!(handle.progress(3).cached, Some(Ok(())));
    assert!(backend.stored(key(0)).is_none());
    assert_eq!(queue.stats().dump_copied, 4);
}

#[test]
fn resident_or_filling_shards_are_not_copied_twice() {
    let node = Node::new(16, BYTES);
    let rank = node.rank();
    let backend = Script::new();
    let queue = rank.builder(backend.clone()).start().unwrap();
    let buffer = sources(&queue, 4);
    let wait = |handle: ucm_queue::DumpHandle| handle.wait_durable(watchdog()).unwrap();
    assert_eq!(wait(queue.dump(dump_of(&buffer, 0..2, false)).unwrap()), [Ok(()); 2]);
    // Resident: made durable from the slot, whatever the source holds by now.
    let original = [buffer.bytes(0), buffer.bytes(1)];
    (0..2).for_each(|i| buffer.wipe(i));
    assert_eq!(wait(queue.dump(dump_of(&buffer, 0..2, true)).unwrap()), [Ok(()); 2]);
    assert_eq!(backend.stored(key(0)).unwrap(), original[0]);
    assert_eq!(backend.stored(key(1)).unwrap(), original[1]);
    assert_eq!((queue.stats().dump_copied, queue.stats().dump_resident), (2, 2));
    // Being filled by somebody else: wait, then as above.
    let other = node.rank();
    let Acquired::Owner(fill) = other.pool.acquire(&key(2)).unwrap() else { panic!() };
    let handle = queue.dump(dump_of(&buffer, 2..3, false)).unwrap();
    node.wait_waiters(1);
    assert_eq!(handle.progress(0).cached, None);
    drop(fill.publish().unwrap());
    assert_eq!(wait(handle), [Ok(())]);
    assert_eq!((queue.stats().dump_copied, queue.stats().dump_resident), (2, 3));
    // The other fails: the dump becomes the owner.
    let Acquired::Owner(fill) = other.pool.acquire(&key(3)).unwrap() else { panic!() };
    let handle = queue.dump(dump_of(&buffer, 3..4, false)).unwrap();
    node.wait_waiters(2);
    fill.fail(FailKind::Missing);
    assert_eq!(wait(handle), [Ok(())]);
    assert_eq!(queue.stats().dump_copied, 3);
    node.assert_at_rest();
}

#[test]
fn s1_nothing_is_readable_before_all_bytes() {
    let node = Node::new(16, BYTES);
    let rank = node.rank();
    let queue = rank.builder(Script::new()).start().unwrap();
    let buffer = sources(&queue, 2);
    rank.gate.close();
    let handle = queue.dump(dump_of(&buffer, 0..2, false)).unwrap();
    rank.gate.wait_held(1);
    assert_eq!(presence(&rank, 0), Presence::Filling);
    assert_eq!(handle.progress(0).cached, None);
    rank.gate.open();
    assert_eq!(handle.wait_cached(watchdog()), Some(vec![Ok(()); 2]));
    assert_eq!(presence(&rank, 0), Presence::Ready);
}

#[test]
fn s3_too_much_is_busy_and_loads_go_on() {
    let node = Node::new(16, BYTES);
    let rank = node.rank();
    let backend = Script::new();
    let queue =
        rank.builder(backend.clone()).max_dump_bytes(4 * BYTES).dump_depth(1).start().unwrap();
    let buffer = sources(&queue, 8);
    backend.hold();
    let first = queue.dump(dump_of(&buffer, 0..4, true)).unwrap();
    let error = queue.dump(dump_of(&buffer, 4..5, true)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    assert!(error.to_string().contains("holds 16384 dump bytes"), "{error}");
    backend.wait_held(1);
    // Q10: a load does not wait for any of it.
    let load = queue.submit(task_of(&Buffer::of(&queue, 1, BYTES), [key(100)])).unwrap();
    backend.wait_held(2);
    backend.release(key(100));
    assert_all_loaded(&load);
    assert_eq!(first.progress(0).durable, None);
    backend.open();
    assert_eq!(first.wait_durable(watchdog()), Some(vec![Ok(()); 4]));
    queue.dump(dump_of(&buffer, 4..8, true)).expect("room at once");
}

#[test]
fn s5_errors_belong_to_their_own_key() {
    let node = Node::new(16, BYTES);
    let rank = node.rank();
    let backend = Script::new();
    let queue = rank.builder(backend.clone()).start().unwrap();
    let buffer = sources(&queue, 5);
    backend.fail(key(2), [StoreKind::NoSpace]);
    let handle = queue.dump(dump_of(&buffer, 0..5, true)).unwrap();
    let durable = handle.wait_durable(watchdog()).unwrap();
    assert_eq!(durable, [Ok(()), Ok(()), Err(FailKind::NoSpace), Ok(()), Ok(())]);
    assert_eq!(handle.wait_cached(watchdog()), Some(vec![Ok(()); 5]), "the cache has it all");
    let handle = queue.dump(dump_of(&buffer, 2..3, true)).unwrap();
    assert_eq!(handle.wait_durable(watchdog()), Some(vec![Ok(())]));
    assert_eq!(backend.stored(key(2)).unwrap(), buffer.bytes(2));
    // A copy that fails alone fails its key; a shared one is tried piece by piece.
    rank.gate.close();
    let handle = queue.dump(DumpTask {
        shards: (0..3)
            .map(|i| DumpRef { key: key(50 + i), src: buffer.addr(i), len: None })
            .collect(),
        durable: true,
        ..DumpTask::default()
    });
    let handle = handle.unwrap();
    rank.gate.wait_held(1);
    rank.gate.fail_next(CopyError::Failed);
    rank.gate.release(1);
    rank.gate.wait_held(1);
    rank.gate.fail_next(CopyError::Failed);
    rank.gate.open();
    let all = [Err(FailKind::Io), Ok(()), Ok(())];
    assert_eq!(handle.wait_cached(watchdog()).unwrap(), all);
    assert_eq!(handle.wait_durable(watchdog()).unwrap(), all);
    assert_eq!(presence(&rank, 50), Presence::Absent);
    assert!(backend.stored(key(50)).is_none());
    node.assert_at_rest();
}

#[test]
fn a56_the_source_is_copied_when_it_is_called_cached() {
    // The bytes of a source are overwritten right after `cached`, the backend is slow.
    let node = Node::new(16, BYTES);
    let rank = node.rank();
    let backend = Script::holding();
    let queue = rank.builder(backend.clone()).dump_depth(8).start().unwrap();
    let buffer = sources(&queue, 5);
    let original: Vec<_> = (0..5).map(|i| buffer.bytes(i)).collect();
    let handle = queue.dump(dump_of(&buffer, 0..5, true)).unwrap();
    handle.wait_cached(watchdog()).unwrap().into_iter().for_each(|r| assert_eq!(r, Ok(())));
    (0..5).for_each(|i| buffer.wipe(i));
    backend.wait_held(5);
    // The third is last.
    for i in [0, 1, 3, 4] {
        backend.release(key(i));
    }
    eventually("four of five", || queue.stats().dump_durable == 4);
    assert_eq!(handle.wait_durable(Some(std::time::Instant::now())), None);
    backend.release(key(2));
    handle.wait_durable(watchdog()).unwrap().into_iter().for_each(|r| assert_eq!(r, Ok(())));
    (0..5).for_each(|i| {
        assert_eq!(backend.stored(key(i)).unwrap(), original[usize::try_from(i).unwrap()])
    });
}

#[test]
fn a_full_cache_is_no_reason_not_to_store() {
    let node = Node::new(2, BYTES);
    let rank = node.rank();
    let backend = Script::new();
    let queue = rank.builder(backend.clone()).dump_staging(rank.buffers(1)).start().unwrap();
    let pins: Vec<_> = (90..92)
        .map(|i| match rank.pool.acquire(&key(i)).unwrap() {
            Acquired::Owner(fill) => fill.publish().unwrap(),
            got => panic!("{got:?}"),
        })
        .collect();
    let buffer = sources(&queue, 6);
    let handle = queue.dump(dump_of(&buffer, 0..6, true)).unwrap();
    assert_eq!(handle.wait_durable(watchdog()), Some(vec![Ok(()); 6]));
    assert_eq!(handle.wait_cached(watchdog()), Some(vec![Err(FailKind::NoSpace); 6]));
    (0..6).for_each(|i| assert_eq!(backend.stored(key(i)).unwrap(), buffer.bytes(i)));
    assert_eq!(queue.stats().dump_bypass, 6);
    // Without durability there is nowhere to put it.
    let handle = queue.dump(dump_of(&buffer, 0..1, false)).unwrap();
    assert_eq!(handle.wait_durable(watchdog()), Some(vec![Err(FailKind::NoSpace)]));
    drop(pins);
}

#[test]
fn a_load_that_waits_for_a_dump_gets_its_bytes() {
    let node = Node::new(16, BYTES);
    let rank = node.rank();
    let backend = Script::new();
    backend.fail_always(Some(StoreKind::Missing));
    let queue = rank.builder(backend.clone()).start().unwrap();
    let buffer = sources(&queue, 2);
    rank.gate.close();
    let dump = queue.dump(dump_of(&buffer, 0..2, false)).unwrap();
    rank.gate.wait_held(1);
    let into = Buffer::of(&queue, 2, BYTES);
    let load = queue.submit(task_of(&into, (0..2).map(key))).unwrap();
    rank.gate.open();
    assert_all_loaded(&load);
    (0..2).for_each(|i| into.assert_holds(key(i), i));
    assert_eq!(dump.wait_cached(watchdog()), Some(vec![Ok(()); 2]));
    assert_eq!(queue.stats().backend_loads, 0);
    // What was neither dumped nor stored is missing.
    let load = queue.submit(task_of(&into, [key(9)])).unwrap();
    let missing = Outcome::Recompute { shards: vec![0], kind: FailKind::Missing };
    assert_eq!(outcomes(&load), [missing]);
}

#[test]
fn closing_ends_dumps_typed() {
    let node = Node::new(16, BYTES);
    let rank = node.rank();
    let backend = Script::holding();
    let queue = rank.builder(backend.clone()).dump_depth(1).start().unwrap();
    let buffer = sources(&queue, 3);
    let handle = queue.dump(dump_of(&buffer, 0..3, true)).unwrap();
    handle.wait_cached(watchdog()).unwrap();
    backend.wait_held(1);
    let closing = std::thread::spawn(move || queue.close());
    backend.open();
    closing.join().unwrap().unwrap();
    // What was in the cache when the queue was closed has been stored.
    assert_eq!(handle.wait_durable(watchdog()), Some(vec![Ok(()); 3]));
    node.assert_at_rest();
}

#[test]
fn a58_nothing_is_read_before_the_producer_s_event() {
    let node = Node::new(16, BYTES);
    let rank = node.rank();
    let backend = Script::new();
    let queue = rank.builder(backend.clone()).start().unwrap();
    let buffer = sources(&queue, 8);
    // The producer has written half of it when the dump is submitted.
    let half = usize::try_from(BYTES / 2).unwrap();
    (0..4).for_each(|i| {
        let mut bytes = buffer.bytes(i);
        bytes[half..].fill(0);
        buffer.write(i, &bytes);
    });
    let (producer, produced) = Producer::new();
    let mut task = dump_of(&buffer, 0..4, true);
    task.after = Some(produced.clone());
    let handle = queue.dump(task).unwrap();
    // Another dump, and a load, show that the queue has turned since.
    let other = queue.dump(dump_of(&buffer, 4..6, true)).unwrap();
    assert_eq!(other.wait_durable(watchdog()), Some(vec![Ok(()); 2]));
    assert_eq!(handle.progress(0).cached, None);
    assert_eq!(presence(&rank, 0), Presence::Absent, "not even a slot is taken");
    assert_eq!(queue.stats().dump_bytes_in_flight, 4 * BYTES, "back-pressure counts it");
    (0..4).for_each(|i| buffer.fill(key(i), i));
    producer.signal();
    assert_eq!(handle.wait_durable(watchdog()), Some(vec![Ok(()); 4]));
    (0..4).for_each(|i| assert_eq!(backend.stored(key(i)).unwrap(), buffer.bytes(i)));
    // An event that has happened is no obstacle.
    let mut task = dump_of(&buffer, 6..7, false);
    task.after = Some(produced);
    assert_eq!(queue.dump(task).unwrap().wait_cached(watchdog()), Some(vec![Ok(())]));
}

#[test]
fn a58_a_producer_that_is_gone_ends_what_waits_for_it() {
    let node = Node::new(16, BYTES);
    let rank = node.rank();
    let queue = rank.builder(Script::new()).start().unwrap();
    let buffer = sources(&queue, 2);
    let (producer, produced) = Producer::new();
    let mut task = dump_of(&buffer, 0..2, true);
    task.after = Some(produced.clone());
    let handle = queue.dump(task.clone()).unwrap();
    drop(producer);
    assert_eq!(produced.happened(), Some(false));
    assert_eq!(handle.wait_durable(watchdog()), Some(vec![Err(FailKind::Abandoned); 2]));
    assert_eq!(queue.stats().dump_bytes_in_flight, 0);
    assert_eq!(presence(&rank, 0), Presence::Absent);
    // A queue that closes ends it as well, and a later signal finds nobody.
    let (producer, produced) = Producer::new();
    task.after = Some(produced);
    let handle = queue.dump(task).unwrap();
    queue.close().unwrap();
    assert_eq!(handle.wait_cached(watchdog()), Some(vec![Err(FailKind::Abandoned); 2]));
    producer.signal();
    node.assert_at_rest();
}
