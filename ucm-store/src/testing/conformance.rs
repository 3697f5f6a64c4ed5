//! The suite that every backend passes.
//!
//! **Invariant:** every load that ends well is compared byte by byte with what was dumped.

use std::{ptr::NonNull, sync::Arc, thread};

use super::Collector;
use crate::{Backend, ErrorKind, IoMemory, Presence, StoreError, fill_pattern, verify_pattern};

/// What a backend keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keeps {
    /// Whatever is dumped.
    Everything,
    /// Only objects of this many bytes that are the pattern of their key in generation 0.
    Patterns(usize),
}

/// Runs all cases; `make` makes a new, empty backend for each.
///
/// # Panics
/// When the backend does not behave as [`Backend`] says.
pub fn conformance(keeps: Keeps, make: impl Fn() -> Arc<dyn Backend>) {
    let len = match keeps {
        Keeps::Everything => 20_003,
        Keeps::Patterns(len) => len,
    };
    what_was_dumped_is_loaded(&*make(), len);
    missing_objects_are_missing(&*make(), len);
    lengths_must_match(&*make(), len);
    each_item_of_a_batch_has_its_own_end(&*make(), len);
    removed_objects_are_gone(&*make(), len);
    empty_operations_are_invalid(&*make());
    nothing_around_the_memory_changes(&*make(), len);
    similar_keys_are_different(&*make(), len);
    unknown_blocks_can_be_touched(&*make());
    many_operations_end_once(&*make(), len);
    dropping_the_backend_ends_everything(make(), len);
    if keeps == Keeps::Everything {
        all_lengths_are_kept(&*make());
        a_dump_replaces_the_whole_object(&*make());
        a_reader_never_sees_a_mix(&*make());
    }
}

/// A key of these tests: block number and shard.
type Id = (u8, u32);

fn block(n: u8) -> [u8; 16] {
    let mut block = *b"conformance-key.";
    block[15] = n;
    block
}

fn pattern(id: Id, generation: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fill_pattern(&mut bytes, &block(id.0), id.1, 0, generation);
    bytes
}

fn dump(backend: &dyn Backend, id: Id, generation: u64, len: usize) {
    let sink = Collector::new();
    backend.dump(vec![sink.op_with(block(id.0), id.1, &pattern(id, generation, len)).1]);
    assert_eq!(sink.wait_one().0, Ok(()), "dump of {id:?}");
}

fn load(backend: &dyn Backend, id: Id, len: usize) -> Result<Vec<u8>, ErrorKind> {
    let sink = Collector::new();
    backend.load(vec![sink.op(block(id.0), id.1, len).1]);
    let (result, bytes) = sink.wait_one();
    result.map(|()| bytes)
}

fn verify(bytes: &[u8], id: Id, generation: u64) {
    if let Err(wrong) = verify_pattern(bytes, &block(id.0), id.1, 0, generation) {
        panic!("object {id:?}: {wrong}");
    }
}

fn forget(backend: &dyn Backend, ids: &[Id]) {
    let keys: Vec<_> = ids.iter().map(|id| (block(id.0), id.1)).collect();
    let results = backend.remove(&keys);
    assert_eq!(results.len(), keys.len());
    results.into_iter().for_each(|r| r.unwrap());
}

fn presence(backend: &dyn Backend, ids: &[Id]) -> Vec<Presence> {
    let keys: Vec<_> = ids.iter().map(|id| (block(id.0), id.1)).collect();
    backend.contains(&keys)
}

fn what_was_dumped_is_loaded(backend: &dyn Backend, len: usize) {
    for id in [(0, 0), (0, 1), (1, 0), (255, u32::MAX)] {
        dump(backend, id, 0, len);
    }
    for id in [(255, u32::MAX), (0, 0), (0, 1), (1, 0)] {
        verify(&load(backend, id, len).unwrap(), id, 0);
    }
}

fn missing_objects_are_missing(backend: &dyn Backend, len: usize) {
    forget(backend, &[(1, 0), (1, 1)]);
    assert_eq!(load(backend, (1, 0), len), Err(ErrorKind::Missing));
    dump(backend, (1, 1), 0, len);
    assert_eq!(load(backend, (1, 0), len), Err(ErrorKind::Missing));
    verify(&load(backend, (1, 1), len).unwrap(), (1, 1), 0);
}

fn lengths_must_match(backend: &dyn Backend, len: usize) {
    dump(backend, (2, 0), 0, len);
    for wrong in [1, len - 1, len + 1, len * 2] {
        assert_eq!(load(backend, (2, 0), wrong), Err(ErrorKind::Corrupt), "{wrong} of {len} bytes");
    }
    // Asking for a wrong length is no reason to lose the object.
    verify(&load(backend, (2, 0), len).unwrap(), (2, 0), 0);
}

fn each_item_of_a_batch_has_its_own_end(backend: &dyn Backend, len: usize) {
    forget(backend, &[(3, 0), (3, 1), (3, 2), (3, 3)]);
    let sink = Collector::new();
    let bytes = |id: Id| pattern(id, 0, len);
    let dumps = vec![
        sink.op_with(block(3), 0, &bytes((3, 0))).1,
        sink.op(block(3), 1, 0).1,
        sink.op_with(block(3), 2, &bytes((3, 2))).1,
    ];
    backend.dump(dumps);
    let ended = sink.wait(3);
    assert!(ended[&0].result.is_ok() && ended[&2].result.is_ok());
    assert_eq!(ended[&1].result.as_ref().unwrap_err().kind(), ErrorKind::Invalid);
    let sink = Collector::new();
    let lens = [(0, len), (1, len), (2, len + 8), (2, len), (3, len)];
    backend.load(lens.map(|(shard, len)| sink.op(block(3), shard, len).1).into());
    let ended = sink.wait(5);
    let kind = |token: u64| ended[&token].result.as_ref().err().map(StoreError::kind);
    use ErrorKind::{Corrupt, Missing};
    assert_eq!(
        [0, 1, 2, 3, 4].map(kind),
        [None, Some(Missing), Some(Corrupt), None, Some(Missing)]
    );
    for (token, shard) in [(0, 0), (3, 2)] {
        let mut bytes = vec![0; len];
        ended[&token].memory.read(0, &mut bytes).unwrap();
        verify(&bytes, (3, shard), 0);
    }
}

fn removed_objects_are_gone(backend: &dyn Backend, len: usize) {
    let ids = [(4, 0), (4, 1), (5, 0)];
    forget(backend, &ids);
    let [absent, there] = [Presence::Absent, Presence::There];
    assert_eq!(presence(backend, &ids), [absent; 3]);
    dump(backend, (4, 0), 0, len);
    dump(backend, (5, 0), 0, len);
    assert_eq!(presence(backend, &ids), [there, absent, there]);
    forget(backend, &[(4, 0), (4, 1)]);
    forget(backend, &[(4, 0)]);
    assert_eq!(presence(backend, &ids), [absent, absent, there]);
    assert_eq!(load(backend, (4, 0), len), Err(ErrorKind::Missing));
    verify(&load(backend, (5, 0), len).unwrap(), (5, 0), 0);
    dump(backend, (4, 0), 0, len);
    verify(&load(backend, (4, 0), len).unwrap(), (4, 0), 0);
    assert!(presence(backend, &[]).is_empty());
}

fn empty_operations_are_invalid(backend: &dyn Backend) {
    let sink = Collector::new();
    backend.load(vec![sink.op(block(6), 0, 0).1]);
    assert_eq!(sink.wait_one().0, Err(ErrorKind::Invalid));
    backend.dump(vec![sink.op(block(6), 0, 0).1]);
    assert_eq!(sink.wait_one().0, Err(ErrorKind::Invalid));
    backend.load(Vec::new());
    backend.dump(Vec::new());
    assert_eq!(sink.open(), 0);
}

/// A37, A50: the memory of an operation is a part of something bigger.
fn nothing_around_the_memory_changes(backend: &dyn Backend, len: usize) {
    const EDGE: usize = 77;
    dump(backend, (7, 0), 0, len);
    for len_asked in [len, len - 1, len + 1] {
        let whole = IoMemory::private(len_asked + 2 * EDGE).unwrap();
        let canary = vec![0xA5; len_asked + 2 * EDGE];
        whole.write(0, &canary).unwrap();
        // SAFETY: EDGE lies inside the memory.
        let base: NonNull<u8> = unsafe { whole.as_ptr().add(EDGE) };
        // SAFETY: a part of memory that `whole` keeps, and outlives the operation here.
        let part = unsafe { IoMemory::from_raw(base, len_asked, Box::new(())) };
        let sink = Collector::new();
        backend.load(vec![sink.op_on(block(7), 0, part).1]);
        let ok = sink.wait(1).remove(&0).unwrap().result.is_ok();
        assert_eq!(ok, len_asked == len);
        let mut bytes = canary.clone();
        whole.read(0, &mut bytes).unwrap();
        let (before, rest) = bytes.split_at(EDGE);
        let (middle, after) = rest.split_at(len_asked);
        assert!(before.iter().chain(after).all(|b| *b == 0xA5), "bytes around changed");
        if ok {
            verify(middle, (7, 0), 0);
        }
    }
}

/// A60: keys that differ in one bit, or only in the shard.
fn similar_keys_are_different(backend: &dyn Backend, len: usize) {
    let ids = [(8, 1), (8, 2), (9, 1), (10, 1), (8, 257), (8, 11)];
    forget(backend, &ids);
    for (i, id) in ids.iter().enumerate() {
        assert_eq!(load(backend, *id, len), Err(ErrorKind::Missing), "{id:?} before its dump");
        dump(backend, *id, 0, len);
        for known in &ids[..=i] {
            verify(&load(backend, *known, len).unwrap(), *known, 0);
        }
    }
}

fn unknown_blocks_can_be_touched(backend: &dyn Backend) {
    backend.touch(&[block(11), block(12)]).unwrap();
    backend.touch(&[]).unwrap();
}

fn many_operations_end_once(backend: &dyn Backend, len: usize) {
    let sink = Collector::new();
    let ids: Vec<Id> = (0..200u8).map(|n| (n, u32::from(n) % 3)).collect();
    let dumps = ids.iter().map(|id| sink.op_with(block(id.0), id.1, &pattern(*id, 0, len)).1);
    backend.dump(dumps.collect());
    assert!(sink.wait(ids.len()).values().all(|c| c.result.is_ok()));
    let (mut tokens, mut loads) = (Vec::new(), Vec::new());
    for id in &ids {
        let (token, op) = sink.op(block(id.0), id.1, len);
        tokens.push((token, *id));
        loads.push(op);
    }
    while let Some(op) = loads.pop() {
        let more = loads.pop();
        backend.load(more.into_iter().chain([op]).collect());
    }
    let ended = sink.wait(ids.len());
    for (token, id) in tokens {
        let completed = &ended[&token];
        completed.result.as_ref().unwrap();
        let mut bytes = vec![0; len];
        completed.memory.read(0, &mut bytes).unwrap();
        verify(&bytes, id, 0);
    }
    assert_eq!((sink.open(), sink.ended()), (0, 0));
}

fn dropping_the_backend_ends_everything(backend: Arc<dyn Backend>, len: usize) {
    dump(&*backend, (13, 0), 0, len);
    let sink = Collector::new();
    backend.load((0..64).map(|_| sink.op(block(13), 0, len).1).collect());
    let dumps = (0..8).map(|n| sink.op_with(block(14), n, &pattern((14, n), 0, len)).1);
    backend.dump(dumps.collect());
    drop(backend);
    for completed in sink.wait(72).into_values().filter(|c| c.token < 64) {
        match completed.result {
            Ok(()) => {
                let mut bytes = vec![0; len];
                completed.memory.read(0, &mut bytes).unwrap();
                verify(&bytes, (13, 0), 0);
            }
            Err(e) => assert!(
                matches!(e.kind(), ErrorKind::Cancelled | ErrorKind::Unavailable | ErrorKind::Lost),
                "{e}"
            ),
        }
    }
    assert_eq!(sink.open(), 0);
}

/// A29, A38: lengths around every seam.
fn all_lengths_are_kept(backend: &dyn Backend) {
    const KIB: usize = 1024;
    let seams = [1, 8, 240, 4096, 8192, 64 * KIB, 256 * KIB, 1024 * KIB];
    let lens = seams.iter().flat_map(|n| [n - 1, *n, n + 1, n + 4095]).filter(|n| *n > 0);
    for (shard, len) in (0..).zip(lens) {
        dump(backend, (15, shard), 0, len);
        verify(&load(backend, (15, shard), len).unwrap(), (15, shard), 0);
    }
}

fn a_dump_replaces_the_whole_object(backend: &dyn Backend) {
    for (generation, len) in [(1, 10_000), (2, 20_000), (3, 50), (4, 20_000)] {
        dump(backend, (16, 0), generation, len);
        verify(&load(backend, (16, 0), len).unwrap(), (16, 0), generation);
    }
    assert_eq!(load(backend, (16, 0), 50), Err(ErrorKind::Corrupt));
}

/// Readers and writers of one key at once: each load is one dump, whole.
fn a_reader_never_sees_a_mix(backend: &dyn Backend) {
    const LEN: usize = 300_000;
    const GENERATIONS: u64 = 4;
    const ROUNDS: usize = 40;
    let id = (17, 3);
    dump(backend, id, 0, LEN);
    thread::scope(|scope| {
        for writer in 0..2u64 {
            scope.spawn(move || {
                for round in 0..ROUNDS as u64 {
                    dump(backend, id, (round + writer) % GENERATIONS, LEN);
                }
            });
        }
        for _ in 0..2 {
            scope.spawn(move || {
                for _ in 0..ROUNDS {
                    let bytes = load(backend, id, LEN).unwrap();
                    let whole = |g| verify_pattern(&bytes, &block(id.0), id.1, 0, g);
                    let (first, _) = bytes.split_first_chunk::<8>().unwrap();
                    let found = (0..GENERATIONS).find(|g| {
                        crate::pattern_word(&block(id.0), id.1, 0, *g).to_le_bytes() == *first
                    });
                    whole(found.unwrap()).unwrap();
                }
            });
        }
    });
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{Delay, LatencyBackend, MemoryBackend, Metered, Op, PatternBackend};

    #[test]
    fn memory_conforms() {
        conformance(Keeps::Everything, || Arc::new(MemoryBackend::new()));
    }

    #[test]
    fn pattern_conforms() {
        let make = || Arc::new(PatternBackend::new(0).object_bytes(5003)) as Arc<dyn Backend>;
        conformance(Keeps::Patterns(5003), make);
    }

    #[test]
    fn latency_conforms() {
        let delay = Delay::Uniform(Duration::ZERO, Duration::from_micros(300));
        conformance(Keeps::Everything, || {
            Arc::new(LatencyBackend::new(MemoryBackend::new(), delay, 8).unwrap())
        });
    }

    #[test]
    fn metered_conforms() {
        conformance(Keeps::Everything, || Arc::new(Metered::new(MemoryBackend::new())));
    }

    #[test]
    fn dropped_operations_are_lost() {
        let sink = Collector::new();
        let (_, op) = sink.op([1; 16], 0, 8);
        drop(op);
        assert_eq!(sink.wait_one().0, Err(ErrorKind::Lost));
        let (_, op) = sink.op([1; 16], 0, 8);
        drop(op.intercept(|op, result| {
            assert_eq!(result.unwrap_err().kind(), ErrorKind::Lost);
            op.finish(Ok(()));
        }));
        assert_eq!(sink.wait_one().0, Ok(()));
        let (_, op) = sink.op([1; 16], 0, 8);
        op.intercept(|op, _| drop(op)).finish(Ok(()));
        assert_eq!(sink.wait_one().0, Err(ErrorKind::Lost));
    }

    #[test]
    fn batches_reach_each_sink_whole() {
        let (a, b) = (Collector::new(), Collector::new());
        let op = |sink: &Arc<Collector>| (sink.op([1; 16], 0, 8).1, Ok(()));
        let ops: Vec<(Op, Result<(), StoreError>)> = vec![op(&a), op(&b), op(&a), op(&a)];
        Op::finish_all(ops);
        assert_eq!((a.batches(), b.batches()), (vec![3], vec![1]));
    }
}
