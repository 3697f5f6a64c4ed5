//! Memory belongs to the copies until the driver says that they have ended.
//!
//! Mutants that these tests find: an engine that drops its jobs when it is dropped; a plan that ends
//! when its copies were given to the stream; a plan whose failed batch call ends it at once; an
//! error of the event query that ends the plan.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use ucm_transport::{
    DeviceEngine, ErrorKind, KernelUse, Memory, Quiesce, RegionId, Transfer, TransferEngine,
    TransferPlan,
    testing::{Bell, Runner, WATCHDOG},
};

use crate::{child::both, fake::Fake, harness::pattern};

const LEN: usize = 64 << 10;

/// A host region, a device region, and pieces between them with gaps.
struct Load {
    host: Memory,
    device: Memory,
    ids: (RegionId, RegionId),
}

impl Load {
    fn new(fake: &Fake, engine: &DeviceEngine) -> Self {
        let gpu = fake.gpu(0);
        let (host, device) = (Memory::host(LEN).unwrap(), gpu.alloc(LEN).unwrap());
        host.write(0, &pattern(1, LEN)).unwrap();
        gpu.write(&device, 0, &[0; LEN]).unwrap();
        let ids =
            (engine.register(host.clone()).unwrap(), engine.register(device.clone()).unwrap());
        Self { host, device, ids }
    }

    fn items(&self, count: usize) -> Vec<Transfer> {
        let at = |region, at: usize| ucm_transport::Addr { region, offset: at as u64 };
        let one = |n: usize| Transfer {
            src: at(self.ids.0, n * 512),
            dst: at(self.ids.1, n * 512),
            len: 300,
        };
        (0..count).map(one).collect()
    }

    fn plan(&self, count: usize, hold: &Arc<()>) -> TransferPlan {
        TransferPlan { items: self.items(count), holds: vec![Box::new(Arc::clone(hold))] }
    }

    /// How many of the first pieces are there.
    fn arrived(&self, fake: &Fake, count: usize) -> usize {
        let mut bytes = vec![0; LEN];
        fake.gpu(0).read(&self.device, 0, &mut bytes).unwrap();
        let mut wanted = vec![0; LEN];
        self.host.read(0, &mut wanted).unwrap();
        (0..count)
            .filter(|n| bytes[n * 512..n * 512 + 300] == wanted[n * 512..n * 512 + 300])
            .count()
    }
}

fn held(hold: &Arc<()>) -> bool {
    Arc::strong_count(hold) > 1
}

fn eventually(what: &str, mut good: impl FnMut() -> bool) {
    let deadline = Instant::now() + WATCHDOG;
    while !good() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Nothing ends while the streams are held: no completion, no free region, no released hold.
#[test]
fn what_has_not_ended_is_not_free() {
    both("ownership::what_has_not_ended_is_not_free", |family| {
        let fake = Fake::find(family);
        let gpu = fake.gpu(0);
        let engine = Arc::new(DeviceEngine::builder(&gpu).build().unwrap());
        let load = Load::new(&fake, &engine);
        let mut runner = Runner::new(Arc::clone(&engine) as Arc<dyn TransferEngine>);
        let hold = Arc::new(());
        fake.hold(true);
        let ticket = engine.submit(load.plan(20, &hold)).unwrap();
        assert!(!Bell::new().wait_at_most(Duration::from_millis(50)));
        assert_eq!(runner.poll(), 0);
        assert!(held(&hold));
        for region in [load.ids.0, load.ids.1] {
            assert_eq!(engine.deregister(region).unwrap_err().kind(), ErrorKind::Busy);
        }
        for target in [Quiesce::All, Quiesce::Ticket(ticket), Quiesce::Region(load.ids.1)] {
            let stuck = engine.quiesce(target, Instant::now()).unwrap_err();
            assert_eq!(stuck.kind(), ErrorKind::Stuck);
        }
        fake.hold(false);
        let end = runner.wait(ticket);
        assert_eq!((end.result.unwrap(), end.holds.len()), (20 * 300, 1));
        assert_eq!(load.arrived(&fake, 20), 20);
        engine.deregister(load.ids.1).unwrap();
        drop((end.holds, runner, engine, load, gpu));
        fake.assert_clean("held streams");
    });
}

/// An engine dropped in the middle: memory and holds wait for the copies, the caller does not.
#[test]
fn a_dropped_engine_keeps_the_memory_of_its_copies() {
    both("ownership::a_dropped_engine_keeps_the_memory_of_its_copies", |family| {
        let fake = Fake::find(family);
        let gpu = fake.gpu(0);
        let engine = DeviceEngine::builder(&gpu).linger(Duration::from_millis(20)).build().unwrap();
        let load = Load::new(&fake, &engine);
        let hold = Arc::new(());
        fake.hold(true);
        for count in [1, 20] {
            engine.submit(load.plan(count, &hold)).unwrap();
        }
        drop(engine);
        // All of ours is given up; only the copies own the memory now.
        drop(load);
        assert!(!Bell::new().wait_at_most(Duration::from_millis(50)));
        assert!(held(&hold));
        assert_eq!(fake.live("pins"), 1);
        assert!(fake.live("device allocations") > 0);
        fake.hold(false);
        eventually("the copies end and give up their memory", || !held(&hold));
        drop(gpu);
        fake.assert_clean("a dropped engine");
    });
}

/// The driver refuses a batch half-way: what it took still runs.
#[test]
fn a_failed_plan_ends_after_the_copies_that_began() {
    both("ownership::a_failed_plan_ends_after_the_copies_that_began", |family| {
        let fake = Fake::find(family);
        let gpu = fake.gpu(0);
        let builder = DeviceEngine::builder(&gpu).kernel(KernelUse::Never);
        let engine = Arc::new(builder.build().unwrap());
        let load = Load::new(&fake, &engine);
        let mut runner = Runner::new(Arc::clone(&engine) as Arc<dyn TransferEngine>);
        let hold = Arc::new(());
        fake.hold(true);
        fake.fail(fake.name("cuMemcpyBatchAsync", "hipMemcpyBatchAsync"), 0, 1, 2);
        let ticket = engine.submit(load.plan(20, &hold)).unwrap();
        assert!(!Bell::new().wait_at_most(Duration::from_millis(50)));
        assert_eq!((runner.poll(), held(&hold)), (0, true));
        fake.hold(false);
        let end = runner.wait(ticket);
        assert_eq!(end.result.unwrap_err().kind(), ErrorKind::Failed);
        assert_eq!(end.holds.len(), 1);
        assert_eq!(load.arrived(&fake, 20), 10, "the half that the driver took has run");
        drop((end.holds, runner, engine, load, gpu));
        fake.assert_clean("a failed batch");
    });
}

/// The event cannot be recorded at first: the plan ends all the same, and not before its copies.
#[test]
fn an_event_that_comes_late_still_tells_the_end() {
    both("ownership::an_event_that_comes_late_still_tells_the_end", |family| {
        let fake = Fake::find(family);
        let gpu = fake.gpu(0);
        let engine = Arc::new(DeviceEngine::builder(&gpu).build().unwrap());
        let load = Load::new(&fake, &engine);
        let mut runner = Runner::new(Arc::clone(&engine) as Arc<dyn TransferEngine>);
        let hold = Arc::new(());
        fake.hold(true);
        fake.fail(fake.name("cuEventRecord", "hipEventRecord"), 0, 1, 999);
        let ticket = engine.submit(load.plan(3, &hold)).unwrap();
        assert!(!Bell::new().wait_at_most(Duration::from_millis(50)));
        assert_eq!((runner.poll(), held(&hold)), (0, true));
        fake.hold(false);
        assert_eq!(runner.wait(ticket).result.unwrap(), 900);
        assert_eq!(load.arrived(&fake, 3), 3);
        drop((runner, engine, load, gpu));
        fake.assert_clean("a late event");
    });
}

/// The device is lost: every plan ends as poisoned, the caller goes on, the memory stays until the
/// driver, asked again, says that the copies have ended.
#[test]
fn a_lost_device_ends_plans_and_keeps_their_memory() {
    both("ownership::a_lost_device_ends_plans_and_keeps_their_memory", |family| {
        let fake = Fake::find(family);
        let gpu = fake.gpu(0);
        let engine = Arc::new(DeviceEngine::builder(&gpu).build().unwrap());
        let load = Load::new(&fake, &engine);
        let mut runner = Runner::new(Arc::clone(&engine) as Arc<dyn TransferEngine>);
        let hold = Arc::new(());
        fake.hold(true);
        let tickets = [1, 20, 3].map(|count| engine.submit(load.plan(count, &hold)).unwrap());
        fake.fail(fake.name("cuEventQuery", "hipEventQuery"), 0, u64::MAX, 700);
        for ticket in tickets {
            let end = runner.wait(ticket);
            assert_eq!(end.result.unwrap_err().kind(), ErrorKind::Poisoned);
            assert!(end.holds.is_empty(), "holds stay with the memory");
        }
        assert!(held(&hold));
        assert_eq!(engine.counters().quarantined, 3);
        assert_eq!(engine.deregister(load.ids.1).unwrap_err().kind(), ErrorKind::Busy);
        let late = engine.submit(load.plan(1, &hold)).unwrap_err();
        assert_eq!((late.error.kind(), late.plan.holds.len()), (ErrorKind::Poisoned, 1));
        drop(late);
        // The driver recovers: only now is the memory free.
        fake.heal();
        assert!(!Bell::new().wait_at_most(Duration::from_millis(300)));
        assert!(held(&hold), "the streams are still held");
        fake.hold(false);
        eventually("quarantine is left", || !held(&hold));
        assert_eq!(engine.counters().quarantined, 0);
        engine.quiesce(Quiesce::All, Instant::now() + WATCHDOG).unwrap();
        drop((runner, engine, load, gpu));
        fake.assert_clean("a lost device");
    });
}

/// A device that never answers again: the engine can be dropped, and the memory is given up, counted.
#[test]
fn memory_of_a_device_lost_for_good_is_given_up() {
    both("ownership::memory_of_a_device_lost_for_good_is_given_up", |family| {
        let fake = Fake::find(family);
        let gpu = fake.gpu(0);
        let engine = DeviceEngine::builder(&gpu).linger(WATCHDOG).build().unwrap();
        let load = Load::new(&fake, &engine);
        let hold = Arc::new(());
        fake.hold(true);
        engine.submit(load.plan(5, &hold)).unwrap();
        fake.fail(fake.name("cuEventQuery", "hipEventQuery"), 0, u64::MAX, 719);
        drop(engine);
        assert!(held(&hold), "holds are given up, not dropped");
        let other = DeviceEngine::builder(&gpu).kernel(KernelUse::Never).build().unwrap();
        assert_eq!(other.counters().leaked, 1);
        drop((other, load));
        fake.hold(false);
        assert_eq!(fake.live("pins"), 1, "pinned until the process ends");
        assert_eq!(fake.violations(), 0);
    });
}
