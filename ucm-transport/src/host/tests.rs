//! The host engine: conformance with 0, 1 and 2 workers, and what only this engine does.
//!
//! **Invariant:** no test waits by time.

use std::{task::Wake, time::Duration};

use super::*;
use crate::{
    Transfer,
    testing::{Bell, GateEngine, Runner, conformance},
};

fn engine(workers: usize) -> Arc<dyn TransferEngine> {
    Arc::new(HostEngine::builder().workers(workers).build().unwrap())
}

fn watchdog() -> Instant {
    Instant::now() + crate::testing::WATCHDOG
}

#[test]
fn conforms_without_workers() {
    conformance(&|| engine(0));
}

#[test]
fn conforms_with_one_worker() {
    conformance(&|| engine(1));
}

#[test]
fn conforms_with_two_workers() {
    conformance(&|| engine(2));
}

#[test]
fn conforms_behind_an_open_gate_and_with_small_spans() {
    let small = || HostEngine::builder().workers(2).span_bytes(4096).build().unwrap();
    conformance(&|| GateEngine::new(Arc::new(small())) as Arc<dyn TransferEngine>);
}

fn two_regions(engine: &dyn TransferEngine, len: usize) -> (Memory, Vec<Transfer>) {
    let (src, dst) = (Memory::host(len).unwrap(), Memory::host(len).unwrap());
    src.write(0, &vec![9; len]).unwrap();
    let src = crate::Addr { region: engine.register(src).unwrap(), offset: 0 };
    let to = crate::Addr { region: engine.register(dst.clone()).unwrap(), offset: 0 };
    (dst, vec![Transfer { src, dst: to, len: len as u64 }])
}

#[test]
fn without_workers_the_end_is_there_when_submit_returns() {
    let engine = engine(0);
    let bell = Bell::new();
    engine.set_waker(Some(bell.waker()));
    let (dst, items) = two_regions(&*engine, 100);
    let ticket = engine.submit(TransferPlan { items, holds: vec![] }).unwrap();
    assert_eq!(bell.rings(), 1);
    let mut out = Vec::new();
    assert_eq!(engine.poll(&mut out), 1);
    assert_eq!(out[0].ticket, ticket);
    let mut bytes = [0; 100];
    dst.read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [9; 100]);
}

#[test]
fn unpolled_plans_count_as_in_flight() {
    let engine = HostEngine::builder().max_in_flight(2).build().unwrap();
    let (_dst, items) = two_regions(&engine, 100);
    let submit = || engine.submit(TransferPlan { items: items.clone(), holds: vec![] });
    submit().unwrap();
    submit().unwrap();
    let rejected = submit().unwrap_err();
    assert_eq!((rejected.error.kind(), &rejected.plan.items), (ErrorKind::Busy, &items));
    assert_eq!(engine.poll(&mut Vec::new()), 2);
    submit().unwrap();
}

#[test]
fn device_memory_is_refused() {
    let engine = engine(0);
    let host = Memory::host(64).unwrap();
    // SAFETY: the memory is real host memory; only its label says otherwise.
    let device = unsafe { Memory::from_raw(host.as_ptr(), 64, Location::Cuda(0), Arc::new(host)) };
    assert_eq!(engine.register(device).unwrap_err().kind(), ErrorKind::Unsupported);
}

#[test]
fn a26_a_panicking_worker_poisons_and_every_ticket_ends() {
    for (workers, nth) in [(0, 0), (1, 0), (1, 3), (2, 0), (2, 5)] {
        let engine: Arc<dyn TransferEngine> = Arc::new(
            HostEngine::builder().workers(workers).span_bytes(4096).panic_at(nth).build().unwrap(),
        );
        let mut runner = Runner::new(Arc::clone(&engine));
        let (_dst, items) = two_regions(&*engine, 64 << 10);
        let mut tickets = Vec::new();
        for _ in 0..8 {
            match engine.submit(TransferPlan { items: items.clone(), holds: vec![Box::new(1)] }) {
                Ok(ticket) => tickets.push(ticket),
                Err(rejected) => {
                    assert_eq!(rejected.error.kind(), ErrorKind::Poisoned);
                    assert_eq!(rejected.plan.holds.len(), 1);
                }
            }
        }
        let ends: Vec<_> = tickets.into_iter().map(|t| runner.wait(t)).collect();
        assert!(ends.iter().all(|c| c.holds.len() == 1));
        let failed = ends.iter().filter_map(|c| c.result.as_ref().err());
        let kinds: Vec<_> = failed.map(TransferError::kind).collect();
        assert!(!kinds.is_empty() && kinds.iter().all(|k| *k == ErrorKind::Poisoned), "{kinds:?}");
        engine.quiesce(Quiesce::All, watchdog()).unwrap();
        let after = engine.submit(TransferPlan { items: items.clone(), holds: vec![] });
        assert_eq!(after.unwrap_err().error.kind(), ErrorKind::Poisoned);
        engine.deregister(items[0].dst.region).unwrap();
    }
}

struct PanickingWaker;

impl Wake for PanickingWaker {
    fn wake(self: Arc<Self>) {
        panic!("a waker must not do this");
    }
}

#[test]
fn a_panicking_waker_poisons_but_hangs_nobody() {
    for workers in [0, 1] {
        let engine = engine(workers);
        engine.set_waker(Some(Waker::from(Arc::new(PanickingWaker))));
        let (_dst, items) = two_regions(&*engine, 100);
        let plan = || TransferPlan { items: items.clone(), holds: vec![] };
        engine.submit(plan()).unwrap();
        engine.quiesce(Quiesce::All, watchdog()).unwrap();
        let mut ended = Vec::new();
        while engine.submit(plan()).is_ok() {
            std::thread::yield_now();
        }
        engine.quiesce(Quiesce::All, watchdog()).unwrap();
        assert!(engine.poll(&mut ended) >= 1);
    }
}

#[test]
fn the_gate_holds_plans_and_quiesce_says_stuck() {
    let gate = GateEngine::new(engine(0));
    let (dst, items) = two_regions(&*gate, 100);
    let mut runner = Runner::new(Arc::clone(&gate) as Arc<dyn TransferEngine>);
    gate.close();
    let ticket = runner.submit(items.clone(), vec![]);
    gate.wait_held(1);
    let now = Instant::now() + Duration::from_millis(1);
    for target in [Quiesce::All, Quiesce::Ticket(ticket), Quiesce::Region(items[0].src.region)] {
        assert_eq!(gate.quiesce(target, now).unwrap_err().kind(), ErrorKind::Stuck);
    }
    assert_eq!(gate.deregister(items[0].dst.region).unwrap_err().kind(), ErrorKind::Busy);
    assert_eq!(runner.poll(), 0);
    let mut bytes = [1; 100];
    dst.read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 100], "no byte has moved");
    gate.open();
    assert_eq!(runner.wait(ticket).result.unwrap(), 100);
    gate.fail_next(ErrorKind::Failed);
    let ticket = runner.submit(items, vec![Box::new(1)]);
    let end = runner.wait(ticket);
    assert_eq!((end.result.unwrap_err().kind(), end.holds.len()), (ErrorKind::Failed, 1));
}

/// Drops the last reference to the engine from a worker's own thread.
struct LastReference {
    engine: std::sync::Mutex<Option<Arc<HostEngine>>>,
    bell: Arc<Bell>,
}

impl Wake for LastReference {
    fn wake(self: Arc<Self>) {
        drop(self.engine.lock().unwrap().take());
        self.bell.waker().wake();
    }
}

#[test]
fn a_waker_may_drop_the_engine() {
    let bell = Bell::new();
    let engine = Arc::new(HostEngine::builder().workers(2).build().unwrap());
    let (_dst, items) = two_regions(&*engine, 1 << 20);
    let waker = LastReference {
        engine: std::sync::Mutex::new(Some(Arc::clone(&engine))),
        bell: Arc::clone(&bell),
    };
    engine.set_waker(Some(Waker::from(Arc::new(waker))));
    engine.submit(TransferPlan { items, holds: vec![] }).unwrap();
    drop(engine);
    bell.wait_past(0);
}

#[test]
fn q9_idle_workers_never_wake() {
    let engine = HostEngine::builder().workers(2).name("q9-idle").build().unwrap();
    let mut runner = Runner::new(Arc::new(engine));
    let (_dst, items) = two_regions(&**runner.engine(), 1 << 20);
    let ticket = runner.submit(items, vec![]);
    runner.wait(ticket);
    let pause = |ms| assert!(!Bell::new().wait_at_most(Duration::from_millis(ms)));
    pause(50); // the workers go back to sleep
    let before = switches_of("q9-idle");
    assert_eq!(before.len(), 2);
    pause(1000);
    assert_eq!(switches_of("q9-idle"), before);
}

/// Context switches of the threads whose name starts so.
fn switches_of(name: &str) -> Vec<(std::path::PathBuf, String)> {
    let read = |path: std::path::PathBuf| std::fs::read_to_string(path).unwrap_or_default();
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten().map(|t| t.path());
    let ours = tasks.filter(|t| read(t.join("comm")).starts_with(name));
    let of_status =
        |status: String| status.lines().filter(|l| l.contains("ctxt_switches")).collect::<String>();
    let mut all: Vec<_> = ours.map(|t| (t.clone(), of_status(read(t.join("status"))))).collect();
    all.sort();
    all
}
