//! Every fault does what its description says, to the operation it was drawn for and no other.
//!
//! **Invariant:** no test waits by time.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    time::Instant,
};

use super::*;
use crate::{
    MemoryBackend, PatternBackend, fill_pattern,
    testing::{Collector, Keeps, conformance},
    verify_pattern,
};

const A: [u8; 16] = [1; 16];
const LEN: usize = 4000;
const LONG: Duration = Duration::from_secs(60);

fn backend() -> FaultBackend<PatternBackend> {
    FaultBackend::new(PatternBackend::new(0))
}

fn pattern(shard: u32) -> Vec<u8> {
    let mut bytes = vec![0; LEN];
    fill_pattern(&mut bytes, &A, shard, 0, 0);
    bytes
}

/// Loads shard `shard` into memory filled with 0xEE.
fn load(backend: &impl Backend, shard: u32) -> (Result<(), ErrorKind>, Vec<u8>) {
    let sink = Collector::new();
    backend.load(vec![sink.op_with(A, shard, &[0xEE; LEN]).1]);
    sink.wait_one()
}

#[test]
fn conforms_without_faults() {
    conformance(Keeps::Everything, || Arc::new(FaultBackend::new(MemoryBackend::new())));
}

#[test]
fn conforms_with_everything_delayed() {
    conformance(Keeps::Everything, || {
        let backend = FaultBackend::new(MemoryBackend::new());
        backend.add(Rule::new(Fault::Delay(Duration::from_micros(50))));
        Arc::new(backend)
    });
}

#[test]
fn rules_pick_their_operations() {
    let backend = backend();
    backend.add(Rule::new(Fault::Fail(ErrorKind::Io)).loads().block(A).shard(2).skip(1).times(2));
    let sink = Collector::new();
    let other = [2; 16];
    let keys = [(A, 2), (A, 1), (other, 2), (A, 2), (A, 2), (A, 2)];
    backend.load(keys.map(|(block, shard)| sink.op(block, shard, 8).1).into());
    let ended = sink.wait(6);
    let failed: Vec<u64> = (0..6).filter(|t| ended[t].result.is_err()).collect();
    assert_eq!(failed, [3, 4]);
    assert_eq!(backend.fired(), 2);
    backend.add(Rule::new(Fault::Fail(ErrorKind::NoSpace)).dumps());
    backend.dump(vec![sink.op_with(A, 2, &pattern(2)).1]);
    assert_eq!(sink.wait_one().0, Err(ErrorKind::NoSpace));
    backend.clear();
    backend.dump(vec![sink.op_with(A, 2, &pattern(2)).1]);
    assert_eq!(sink.wait_one().0, Ok(()));
}

#[test]
fn delays_are_at_least_as_long_as_asked() {
    let backend = backend();
    backend.add(Rule::new(Fault::Delay(Duration::from_millis(4))).shard(1));
    let start = Instant::now();
    assert_eq!(load(&backend, 1), (Ok(()), pattern(1)));
    assert!(start.elapsed() >= Duration::from_millis(4));
}

#[test]
fn stalls_hold_before_or_after_the_bytes_move() {
    for after in [false, true] {
        let (backend, gate, sink) = (backend(), Gate::new(), Collector::new());
        let stall = if after { Fault::StallAfter } else { Fault::StallBefore };
        backend.add(Rule::new(stall(gate.clone())).shard(1));
        backend.load([0, 1, 1].map(|shard| sink.op(A, shard, LEN).1).into());
        assert!(gate.wait_held(2, LONG));
        assert_eq!(backend.inner().meter().report().loads, if after { 3 } else { 1 });
        assert_eq!(sink.wait_one(), (Ok(()), pattern(0)));
        assert!(gate.release());
        assert_eq!(sink.wait_one(), (Ok(()), pattern(1)));
        assert_eq!((gate.held(), sink.open()), (1, 1));
        gate.open();
        assert_eq!(sink.wait_one(), (Ok(()), pattern(1)));
        assert_eq!(load(&backend, 1), (Ok(()), pattern(1)), "an open gate holds nobody");
    }
}

#[test]
fn operations_at_a_gate_that_goes_away_are_lost() {
    let (backend, gate, sink) = (backend(), Gate::new(), Collector::new());
    backend.add(Rule::new(Fault::StallBefore(gate.clone())));
    backend.load(vec![sink.op(A, 0, 8).1]);
    backend.clear();
    drop(gate);
    assert_eq!(sink.wait_one().0, Err(ErrorKind::Lost));
}

#[test]
fn damaged_loads_have_exactly_the_damaged_bytes() {
    let good = pattern(4);
    let half = |good: &[u8]| [&good[..LEN / 2], &[0xEE; LEN / 2]].concat();
    let torn = |good: &[u8]| {
        let mut bytes = good.to_vec();
        for (n, sector) in bytes.chunks_mut(512).enumerate() {
            if n % 2 == 1 {
                sector.fill(0xEE);
            }
        }
        bytes
    };
    let flipped = |good: &[u8]| {
        let mut bytes = good.to_vec();
        bytes[LEN / 2] ^= 8;
        bytes
    };
    let cases = [
        (Damage::Short, half(&good)),
        (Damage::Torn, torn(&good)),
        (Damage::FlippedBit, flipped(&good)),
        (Damage::WrongKey, pattern(5)),
    ];
    for (damage, bytes) in cases {
        assert!(verify_pattern(&bytes, &A, 4, 0, 0).is_err());
        for noticed in [true, false] {
            let backend = backend();
            let fault = if noticed { Fault::Damaged(damage) } else { Fault::Silent(damage) };
            backend.add(Rule::new(fault).times(1));
            let result = if noticed { Err(ErrorKind::Corrupt) } else { Ok(()) };
            assert_eq!(load(&backend, 4), (result, bytes.clone()), "{damage:?}");
            assert_eq!(load(&backend, 4), (Ok(()), good.clone()));
        }
    }
}

#[test]
fn damaged_dumps_store_nothing_or_the_damaged_object() {
    for damage in [Damage::Short, Damage::Torn, Damage::FlippedBit, Damage::WrongKey] {
        let backend = FaultBackend::new(MemoryBackend::new());
        let sink = Collector::new();
        backend.add(Rule::new(Fault::Damaged(damage)).times(1));
        backend.dump(vec![sink.op_with(A, 4, &pattern(4)).1]);
        assert_eq!(sink.wait_one().0, Err(ErrorKind::Io));
        assert!(backend.inner().is_empty());
        backend.add(Rule::new(Fault::Silent(damage)).times(1));
        backend.dump(vec![sink.op_with(A, 4, &pattern(4)).1]);
        assert_eq!(sink.wait_one().0, Ok(()));
        let shard = if damage == Damage::WrongKey { 5 } else { 4 };
        let stored = backend.inner().object(&A, shard).unwrap();
        assert_eq!(stored.len(), if damage == Damage::Short { LEN / 2 } else { LEN });
        let whole = damage == Damage::WrongKey || damage == Damage::Short;
        assert_eq!(verify_pattern(&stored, &A, 4, 0, 0).is_ok(), whole, "{damage:?}");
    }
}

#[test]
fn a_missing_object_stays_missing_under_damage() {
    let backend = FaultBackend::new(MemoryBackend::new());
    backend.add(Rule::new(Fault::Silent(Damage::FlippedBit)));
    assert_eq!(load(&backend, 0), (Err(ErrorKind::Missing), vec![0xEE; LEN]));
}

#[test]
fn lost_and_panicking_operations_end_and_spare_the_others() {
    let (backend, sink) = (backend(), Collector::new());
    backend.add(Rule::new(Fault::Lose).shard(1));
    backend.add(Rule::new(Fault::Panic).shard(3));
    let ops = (0..5).map(|shard| sink.op(A, shard, 8).1).collect();
    catch_unwind(AssertUnwindSafe(|| backend.load(ops))).unwrap_err();
    let ended = sink.wait(5);
    for token in 0..5 {
        let kind = ended[&token].result.as_ref().err().map(StoreError::kind);
        assert_eq!(kind, matches!(token, 1 | 3).then_some(ErrorKind::Lost));
    }
}

#[test]
fn down_means_unavailable_and_unknown() {
    let backend = backend();
    backend.set_down(true);
    assert_eq!(load(&backend, 0).0, Err(ErrorKind::Unavailable));
    assert_eq!(backend.contains(&[(A, 0)]), [Presence::Unknown]);
    assert_eq!(backend.touch(&[A]).unwrap_err().kind(), ErrorKind::Unavailable);
    assert!(backend.remove(&[(A, 0)]).pop().unwrap().is_err());
    backend.set_down(false);
    assert_eq!(load(&backend, 0).0, Ok(()));
}

#[test]
fn random_faults_follow_their_seed_and_share() {
    let run = |seed| -> Vec<bool> {
        let backend = backend();
        backend.randomly(seed, vec![(0.1, Fault::Fail(ErrorKind::Io)), (0.1, Fault::Lose)]);
        (0..2000).map(|_| load(&backend, 0).0.is_ok()).collect()
    };
    let first = run(1);
    assert_eq!(first, run(1));
    assert_ne!(first, run(2));
    let failed = first.iter().filter(|ok| !**ok).count();
    assert!((300..500).contains(&failed), "{failed} of 2000 at 20 %");
}
