//! The stack over real tiers, failing ones among them.
//!
//! **Invariant:** no test waits by time.

use std::{
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use super::*;
use crate::{
    Fault, FaultBackend, FileBackend, FileConfig, Gate, LatencyBackend, MemoryBackend, Rule,
    fill_pattern,
    testing::{Collector, Keeps, conformance},
    verify_pattern,
};

const A: [u8; 16] = [1; 16];
const LEN: usize = 5000;
const LONG: Duration = Duration::from_secs(60);

type Faulty = Arc<FaultBackend<MemoryBackend>>;

fn faulty() -> Faulty {
    Arc::new(FaultBackend::new(MemoryBackend::new()))
}

fn tier(name: &str, backend: &Faulty) -> Tier {
    Tier::new(name, Arc::<FaultBackend<MemoryBackend>>::clone(backend))
}

fn pattern(shard: u32) -> Vec<u8> {
    let mut bytes = vec![0; LEN];
    fill_pattern(&mut bytes, &A, shard, 0, 0);
    bytes
}

fn put(backend: &Faulty, shard: u32) {
    backend.inner().insert(&A, shard, pattern(shard).into()).unwrap();
}

fn load(stack: &Stack, shard: u32) -> Result<(), ErrorKind> {
    let sink = Collector::new();
    stack.load(vec![sink.op(A, shard, LEN).1]);
    let (result, bytes) = sink.wait_one();
    if result.is_ok() {
        verify_pattern(&bytes, &A, shard, 0, 0).unwrap();
    }
    result
}

fn dump(stack: &Stack, shard: u32) -> Result<(), ErrorKind> {
    let sink = Collector::new();
    stack.dump(vec![sink.op_with(A, shard, &pattern(shard)).1]);
    sink.wait_one().0
}

#[test]
fn conforms_with_memory_over_files() {
    let dir = tempfile::tempdir().unwrap();
    let next = AtomicU64::new(0);
    conformance(Keeps::Everything, || {
        let case = next.fetch_add(1, Ordering::Relaxed).to_string();
        let config = FileConfig::new(dir.path().join(case), "ns").threads(2);
        let file = Arc::new(FileBackend::open(config).unwrap());
        let memory = Arc::new(MemoryBackend::new());
        Arc::new(Stack::new(vec![Tier::new("memory", memory), Tier::new("file", file)]).unwrap())
    });
}

#[test]
fn conforms_when_only_the_slow_tier_takes_dumps_and_the_fast_one_is_empty() {
    conformance(Keeps::Everything, || {
        let delay = crate::Delay::Fixed(Duration::from_micros(100));
        let slow = LatencyBackend::new(MemoryBackend::new(), delay, 16).unwrap();
        let fast = Tier::new("fast", Arc::new(MemoryBackend::new())).writes(Writes::Never);
        Arc::new(Stack::new(vec![fast, Tier::new("slow", Arc::new(slow))]).unwrap())
    });
}

#[test]
fn a_load_asks_the_tiers_in_order_and_counts_exactly() {
    let (a, b, c) = (faulty(), faulty(), faulty());
    let stack = Stack::new(vec![tier("a", &a), tier("b", &b), tier("c", &c)]).unwrap();
    put(&a, 0);
    put(&b, 1);
    put(&c, 2);
    put(&c, 3);
    b.add(Rule::new(Fault::Fail(ErrorKind::Io)).loads().shard(3));
    a.add(Rule::new(Fault::Fail(ErrorKind::Corrupt)).loads().shard(2));
    assert_eq!([0, 1, 2, 3].map(|shard| load(&stack, shard)), [Ok(()); 4]);
    assert_eq!(load(&stack, 9), Err(ErrorKind::Missing));
    let counts: Vec<_> = stack
        .report()
        .iter()
        .map(|t| (t.hits, t.hit_bytes, t.misses, t.load_failures, t.corrupt))
        .collect();
    let bytes = LEN as u64;
    assert_eq!(counts, [(1, bytes, 3, 1, 1), (1, bytes, 2, 1, 0), (2, 2 * bytes, 1, 0, 0)]);
}

#[test]
fn the_first_failure_is_reported_when_no_tier_has_the_object() {
    let (a, b) = (faulty(), faulty());
    let stack = Stack::new(vec![tier("a", &a), tier("b", &b)]).unwrap();
    a.add(Rule::new(Fault::Fail(ErrorKind::Io)).times(1));
    b.add(Rule::new(Fault::Fail(ErrorKind::Unavailable)).times(1));
    assert_eq!(load(&stack, 0), Err(ErrorKind::Io));
    assert_eq!(load(&stack, 0), Err(ErrorKind::Missing));
}

#[test]
fn f2_panicking_and_losing_tiers_are_passed_over() {
    let (a, b) = (faulty(), faulty());
    let stack = Stack::new(vec![tier("a", &a), tier("b", &b)]).unwrap();
    (0..4).for_each(|shard| put(&b, shard));
    a.add(Rule::new(Fault::Panic).shard(1));
    a.add(Rule::new(Fault::Lose).shard(2));
    let sink = Collector::new();
    stack.load((0..4).map(|shard| sink.op(A, shard, LEN).1).collect());
    assert!(sink.wait(4).values().all(|c| c.result.is_ok()));
    assert_eq!(stack.report()[0].load_failures, 2);
}

#[test]
fn misses_of_one_call_reach_the_next_tier_as_one_batch() {
    #[derive(Debug, Default)]
    struct Batches(MemoryBackend, Mutex<Vec<usize>>);
    impl Backend for Batches {
        fn capabilities(&self) -> BackendCapabilities {
            self.0.capabilities()
        }
        fn load(&self, ops: Vec<Op>) {
            self.1.lock().unwrap().push(ops.len());
            self.0.load(ops);
        }
        fn dump(&self, ops: Vec<Op>) {
            self.0.dump(ops);
        }
        fn contains(&self, keys: &[Key]) -> Vec<Presence> {
            self.0.contains(keys)
        }
        fn touch(&self, blocks: &[[u8; 16]]) -> Result<(), StoreError> {
            self.0.touch(blocks)
        }
        fn remove(&self, keys: &[Key]) -> Vec<Result<(), StoreError>> {
            self.0.remove(keys)
        }
    }
    let (a, b) = (faulty(), Arc::new(Batches::default()));
    let below: Arc<dyn Backend> = Arc::<Batches>::clone(&b);
    let stack = Stack::new(vec![tier("a", &a), Tier::new("b", below)]).unwrap();
    put(&a, 3);
    let sink = Collector::new();
    stack.load((0..16).map(|shard| sink.op(A, shard, LEN).1).collect());
    sink.wait(16);
    assert_eq!(*b.1.lock().unwrap(), [15]);
}

#[test]
fn hits_below_are_promoted_where_wanted() {
    let (a, b, c) = (faulty(), faulty(), faulty());
    let even = Promotion::If(Arc::new(|candidate: &Candidate| {
        assert_eq!((candidate.block, candidate.bytes, candidate.found_in), (A, LEN, 2));
        candidate.shard.is_multiple_of(2)
    }));
    let tiers = vec![
        tier("a", &a).promotion(even),
        tier("b", &b).promotion(Promotion::Always),
        tier("c", &c),
    ];
    let stack = Stack::new(tiers).unwrap();
    (0..2).for_each(|shard| put(&c, shard));
    assert_eq!([0, 1].map(|shard| load(&stack, shard)), [Ok(()); 2]);
    let there = |backend: &Faulty| [0, 1].map(|s| backend.inner().object(&A, s).is_some());
    assert_eq!([there(&a), there(&b)], [[true, false], [true, true]]);
    verify_pattern(&a.inner().object(&A, 0).unwrap(), &A, 0, 0, 0).unwrap();
    let promoted =
        stack.report().iter().map(|t| (t.promoted, t.promoted_bytes)).collect::<Vec<_>>();
    assert_eq!(promoted, [(1, LEN as u64), (2, 2 * LEN as u64), (0, 0)]);
    // The promoted copy is a hit, and is not promoted again.
    assert_eq!(load(&stack, 0), Ok(()));
    assert_eq!((stack.report()[0].hits, stack.report()[1].promoted), (1, 2));
}

#[test]
fn a_promotion_owns_its_bytes() {
    let (a, b, gate) = (faulty(), faulty(), Gate::new());
    let stack =
        Stack::new(vec![tier("a", &a).promotion(Promotion::Always), tier("b", &b)]).unwrap();
    put(&b, 0);
    a.add(Rule::new(Fault::StallBefore(gate.clone())).dumps());
    let sink = Collector::new();
    let (token, op) = sink.op(A, 0, LEN);
    stack.load(vec![op]);
    let completed = sink.wait(1).remove(&token).unwrap();
    assert!(gate.wait_held(1, LONG));
    // The owner has its memory back, and writes it, before the promotion runs.
    completed.memory.write(0, &[0xEE; LEN]).unwrap();
    drop(completed);
    gate.open();
    verify_pattern(&a.inner().object(&A, 0).unwrap(), &A, 0, 0, 0).unwrap();
}

#[test]
fn promotions_are_bounded_and_their_failures_counted() {
    let (a, b, gate) = (faulty(), faulty(), Gate::new());
    let mut stack =
        Stack::new(vec![tier("a", &a).promotion(Promotion::Always), tier("b", &b)]).unwrap();
    Arc::get_mut(&mut stack.inner).unwrap().promoting = Budget::new(2 * LEN as u64);
    (0..5).for_each(|shard| put(&b, shard));
    a.add(Rule::new(Fault::StallBefore(gate.clone())).dumps().shard(0));
    a.add(Rule::new(Fault::Fail(ErrorKind::NoSpace)).dumps().shard(1));
    a.add(Rule::new(Fault::StallBefore(gate.clone())).dumps().shard(2));
    assert_eq!([0, 1, 2, 3].map(|shard| load(&stack, shard)), [Ok(()); 4]);
    let report = || {
        let report = stack.report().remove(0);
        (report.promoted, report.promotion_failures, report.promotions_skipped)
    };
    assert_eq!(report(), (0, 1, 1));
    gate.open();
    assert_eq!(load(&stack, 4), Ok(()));
    assert_eq!(report(), (3, 1, 1));
}

#[test]
fn a_dump_ends_when_all_tiers_have_and_as_its_home_says() {
    let (a, b, c, gate) = (faulty(), faulty(), faulty(), Gate::new());
    let tiers = vec![tier("a", &a), tier("b", &b), tier("c", &c).writes(Writes::Never)];
    let stack = Stack::new(tiers).unwrap();
    a.add(Rule::new(Fault::StallAfter(gate.clone())).dumps().times(1));
    let sink = Collector::new();
    stack.dump(vec![sink.op_with(A, 0, &pattern(0)).1]);
    assert!(gate.wait_held(1, LONG));
    assert_eq!((sink.open(), b.inner().len()), (1, 1), "one tier still has the memory");
    gate.open();
    assert_eq!(sink.wait_one().0, Ok(()));
    assert_eq!((a.inner().len(), b.inner().len(), c.inner().len()), (1, 1, 0));
    a.add(Rule::new(Fault::Fail(ErrorKind::NoSpace)).dumps().times(1));
    assert_eq!(dump(&stack, 1), Ok(()), "an upper tier is only a cache");
    b.add(Rule::new(Fault::Fail(ErrorKind::NoSpace)).dumps().times(1));
    assert_eq!(dump(&stack, 2), Err(ErrorKind::NoSpace));
    b.add(Rule::new(Fault::Panic).dumps().times(1));
    assert_eq!(dump(&stack, 3), Err(ErrorKind::Lost));
    let failures: Vec<_> = stack.report().iter().map(|t| (t.dumps, t.dump_failures)).collect();
    assert_eq!(failures, [(3, 1), (2, 2), (0, 0)]);
}

#[test]
fn without_a_tier_that_takes_dumps_they_are_refused() {
    let a = faulty();
    let stack = Stack::new(vec![tier("a", &a).writes(Writes::Never)]).unwrap();
    assert!(!stack.capabilities().writable);
    assert_eq!(dump(&stack, 0), Err(ErrorKind::Unavailable));
    assert_eq!(Stack::new(vec![]).unwrap_err().kind(), ErrorKind::Invalid);
}

#[test]
fn touch_reaches_every_tier_once_and_never_fails() {
    #[derive(Debug, Default)]
    struct Touched(Mutex<Vec<Vec<[u8; 16]>>>, bool);
    impl Backend for Touched {
        fn capabilities(&self) -> BackendCapabilities {
            BackendCapabilities::new("touched", 1, false)
        }
        fn load(&self, _: Vec<Op>) {}
        fn dump(&self, _: Vec<Op>) {}
        fn contains(&self, _: &[Key]) -> Vec<Presence> {
            panic!("a tier that panics")
        }
        fn touch(&self, blocks: &[[u8; 16]]) -> Result<(), StoreError> {
            self.0.lock().unwrap().push(blocks.to_vec());
            if self.1 { Err(StoreError::new(ErrorKind::Io, "no")) } else { Ok(()) }
        }
        fn remove(&self, _: &[Key]) -> Vec<Result<(), StoreError>> {
            Vec::new()
        }
    }
    let tiers = [true, false, true].map(|fails| Arc::new(Touched(Mutex::default(), fails)));
    let stack = Stack::new(
        tiers
            .iter()
            .map(|t| Tier::new("t", Arc::<Touched>::clone(t) as Arc<dyn Backend>))
            .collect(),
    )
    .unwrap();
    stack.touch(&[A, [2; 16]]).unwrap();
    for tier in &tiers {
        assert_eq!(*tier.0.lock().unwrap(), [vec![A, [2; 16]]]);
    }
    assert_eq!(stack.report().iter().map(|t| t.touch_failures).collect::<Vec<_>>(), [1, 0, 1]);
    // What such tiers cannot answer is unknown, or a failure.
    assert_eq!(stack.contains(&[(A, 0)]), [Presence::Unknown]);
    assert_eq!(stack.remove(&[(A, 0)])[0].as_ref().unwrap_err().kind(), ErrorKind::Io);
}

#[test]
fn contains_and_remove_cover_all_tiers() {
    let (a, b) = (faulty(), faulty());
    let stack = Stack::new(vec![tier("a", &a), tier("b", &b)]).unwrap();
    put(&a, 0);
    put(&b, 1);
    put(&a, 2);
    put(&b, 2);
    let keys = [0, 1, 2, 3].map(|shard| (A, shard));
    use Presence::{Absent, There, Unknown};
    assert_eq!(stack.contains(&keys), [There, There, There, Absent]);
    a.set_down(true);
    assert_eq!(stack.contains(&keys), [Unknown, There, There, Unknown]);
    assert!(stack.remove(&keys).iter().all(Result::is_err));
    a.set_down(false);
    assert!(stack.remove(&keys).iter().all(Result::is_ok));
    assert!(a.inner().is_empty() && b.inner().is_empty());
}

#[test]
fn dropping_the_stack_ends_what_a_tier_still_has() {
    let (a, b, gate, sink) = (faulty(), faulty(), Gate::new(), Collector::new());
    let stack = Stack::new(vec![tier("a", &a), tier("b", &b)]).unwrap();
    put(&b, 0);
    a.add(Rule::new(Fault::StallAfter(gate.clone())).loads());
    stack.load(vec![sink.op(A, 0, LEN).1]);
    assert!(gate.wait_held(1, LONG));
    drop(stack);
    gate.open();
    assert_eq!(sink.wait_one().0, Err(ErrorKind::Missing), "nothing is asked any more");
}

mod rules;
