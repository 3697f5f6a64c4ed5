//! Timing, depth and ends of the latency wrapper.
//!
//! **Invariant:** lower bounds of time are exact; upper bounds are watchdogs.

use std::{sync::Mutex, time::Instant};

use super::*;
use crate::{
    MemoryBackend, PatternBackend,
    testing::Collector,
    timer::{Alarm, Moment},
    verify_pattern,
};

const MS: Duration = Duration::from_millis(1);

fn slow(delay_ms: u32, depth: usize) -> LatencyBackend<PatternBackend> {
    LatencyBackend::new(PatternBackend::new(1), Delay::Fixed(delay_ms * MS), depth).unwrap()
}

fn loads(sink: &Arc<Collector>, count: u8, len: usize) -> Vec<Op> {
    (0..count).map(|i| sink.op([i; 16], 0, len).1).collect()
}

#[test]
fn ends_after_its_delay_with_the_bytes_of_the_backend() {
    let (backend, sink) = (slow(5, 8), Collector::new());
    let start = Instant::now();
    backend.load(loads(&sink, 8, 10_000));
    let ended = sink.wait(8);
    assert!(start.elapsed() >= 5 * MS);
    for (token, completed) in ended {
        completed.result.unwrap();
        let mut bytes = vec![0; 10_000];
        completed.memory.read(0, &mut bytes).unwrap();
        verify_pattern(&bytes, &[u8::try_from(token).unwrap(); 16], 0, 0, 1).unwrap();
    }
    assert_eq!(sink.batches().iter().sum::<usize>(), 8);
}

#[test]
fn operations_due_together_end_as_one_batch() {
    let (backend, sink) = (slow(5, 8), Collector::new());
    backend.load(loads(&sink, 8, 64));
    sink.wait(8);
    assert_eq!(sink.batches(), [8]);
}

#[test]
fn depth_bounds_the_service_and_queued_operations_follow_without_a_gap() {
    let (backend, sink) = (slow(2, 4), Collector::new());
    let start = Instant::now();
    backend.load(loads(&sink, 40, 64));
    sink.wait(40);
    assert!(start.elapsed() >= 20 * MS, "ten rounds of 2 ms");
    let report = backend.meter().report();
    assert_eq!((report.loads, report.in_flight_max, report.in_flight), (40, 4, 0));
    assert!(report.in_flight_mean <= 4.0);
}

#[test]
fn dumps_are_delayed_too_and_other_calls_are_not() {
    let backend = LatencyBackend::new(MemoryBackend::new(), Delay::Fixed(3 * MS), 1).unwrap();
    let sink = Collector::new();
    let start = Instant::now();
    backend.dump(vec![sink.op_with([1; 16], 2, b"bytes").1]);
    assert_eq!(sink.wait_one().0, Ok(()));
    assert!(start.elapsed() >= 3 * MS);
    assert_eq!(backend.contains(&[([1; 16], 2)]), [Presence::There]);
    backend.load(vec![sink.op([1; 16], 2, 5).1]);
    assert_eq!(sink.wait_one(), (Ok(()), b"bytes".to_vec()));
    let report = backend.meter().report();
    assert_eq!((report.loaded_bytes, report.dumped_bytes), (5, 5));
}

#[test]
fn zero_delay_and_a_deep_queue_do_not_recurse() {
    let backend =
        LatencyBackend::new(PatternBackend::new(0), Delay::Fixed(Duration::ZERO), 1).unwrap();
    let sink = Collector::new();
    backend.load((0..20_000).map(|i| sink.op([1; 16], i, 8).1).collect());
    assert_eq!(sink.wait(20_000).len(), 20_000);
}

#[test]
fn dropping_it_ends_everything() {
    let (backend, sink) = (slow(60_000, 2), Collector::new());
    backend.load(loads(&sink, 6, 64));
    drop(backend);
    let ended = sink.wait(6);
    let kinds = |token: u64| ended[&token].result.as_ref().map_err(StoreError::kind).copied();
    assert_eq!((kinds(0), kinds(1)), (Ok(()), Ok(())), "those in service had their bytes");
    assert!((2..6).all(|t| kinds(t) == Err(ErrorKind::Cancelled)));
}

/// A backend that ends only when told to.
#[derive(Debug, Default)]
struct Held(Mutex<Vec<Op>>);

impl Backend for Held {
    fn capabilities(&self) -> BackendCapabilities {
        BackendCapabilities::new("held", 1, false)
    }
    fn load(&self, ops: Vec<Op>) {
        self.0.lock().unwrap().extend(ops);
    }
    fn dump(&self, ops: Vec<Op>) {
        self.load(ops);
    }
    fn contains(&self, keys: &[Key]) -> Vec<Presence> {
        vec![Presence::Unknown; keys.len()]
    }
    fn touch(&self, _: &[[u8; 16]]) -> Result<(), StoreError> {
        Ok(())
    }
    fn remove(&self, keys: &[Key]) -> Vec<Result<(), StoreError>> {
        keys.iter().map(|_| Ok(())).collect()
    }
}

#[test]
fn a_backend_slower_than_the_delay_keeps_its_place_and_frees_it_later() {
    let backend = LatencyBackend::new(Held::default(), Delay::Fixed(MS), 1).unwrap();
    let (sink, other) = (Collector::new(), Collector::new());
    backend.load(vec![sink.op([1; 16], 0, 8).1]);
    backend.load(vec![other.op([2; 16], 0, 8).1]);
    // An own alarm of the same length as proof that the delay is over; then the place is still
    // taken, because the backend has not ended.
    let clock = Alarm::new().unwrap();
    clock.set(Moment::now().after(5 * MS));
    clock.wait().unwrap();
    assert_eq!((sink.ended(), other.open()), (0, 1));
    let first = backend.inner().0.lock().unwrap().pop().unwrap();
    assert_eq!(first.block(), &[1; 16]);
    first.finish(Ok(()));
    assert_eq!(sink.wait_one().0, Ok(()));
    // The second enters now, and the backend never ends it: with the backend it ends as lost.
    while backend.inner().0.lock().unwrap().is_empty() {
        thread::yield_now();
    }
    drop(backend);
    assert_eq!(other.wait_one().0, Err(ErrorKind::Lost));
}

#[test]
fn a_panicking_backend_ends_operations_as_lost_and_the_thread_goes_on() {
    #[derive(Debug)]
    struct Panics(PatternBackend);
    impl Backend for Panics {
        fn capabilities(&self) -> BackendCapabilities {
            self.0.capabilities()
        }
        fn load(&self, ops: Vec<Op>) {
            assert!(ops.iter().all(|op| op.shard() != 7), "shard 7 panics");
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
    let inner = Panics(PatternBackend::new(0));
    let backend = LatencyBackend::new(inner, Delay::Fixed(MS), 1).unwrap();
    let sink = Collector::new();
    // The second starts in the thread of the wrapper, where the panic must not end it.
    backend.load([0, 7, 1].map(|shard| sink.op([1; 16], shard, 8).1).into());
    let ended = sink.wait(3);
    assert!(ended[&0].result.is_ok() && ended[&2].result.is_ok());
    assert_eq!(ended[&1].result.as_ref().unwrap_err().kind(), ErrorKind::Lost);
}

#[test]
fn q9_idle_means_no_wake_ups() {
    let (backend, sink) = (slow(1, 4), Collector::new());
    backend.load(loads(&sink, 4, 8));
    sink.wait(4);
    let tid = backend.shared.core.thread_id.get().copied().unwrap();
    let switches = || {
        let status = std::fs::read_to_string(format!("/proc/self/task/{tid}/status")).unwrap();
        let field = |name: &str| -> u64 {
            let line = status.lines().find(|l| l.starts_with(name)).unwrap();
            line.split_whitespace().nth(1).unwrap().parse().unwrap()
        };
        field("voluntary_ctxt_switches") + field("nonvoluntary_ctxt_switches")
    };
    let clock = Alarm::new().unwrap();
    let idle = |ms: u32| {
        clock.set(Moment::now().after(ms * MS));
        clock.wait().unwrap();
    };
    idle(20); // the thread goes back to sleep
    let before = switches();
    idle(1000);
    assert_eq!(switches(), before);
}

#[test]
fn delays_follow_their_distribution() {
    let mut random = SplitMix::new(3);
    let mean = |delay: Delay, random: &mut SplitMix| {
        (0..20_000).map(|_| delay.draw(random)).sum::<Duration>() / 20_000
    };
    let near = |a: Duration, b: Duration| a.abs_diff(b) < b / 20;
    assert_eq!(mean(Delay::Fixed(7 * MS), &mut random), 7 * MS);
    assert!(near(mean(Delay::Uniform(2 * MS, 4 * MS), &mut random), 3 * MS));
    assert!(near(mean(Delay::Exponential(5 * MS), &mut random), 5 * MS));
    assert!(near(mean(Delay::Mixed(MS, 101 * MS, 0.1), &mut random), 11 * MS));
}
