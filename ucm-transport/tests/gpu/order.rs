//! Copies wait for those who write their sources, and others can wait for copies (A58).

use std::sync::Arc;

use ucm_transport::{
    Addr, DeviceEngine, Location, Memory, Producer, Transfer, TransferEngine, TransferPlan,
    testing::{Runner, WATCHDOG},
};

use crate::{child::both, fake::Fake, harness::pattern};

const LEN: usize = 8192;

fn address(memory: &Memory) -> usize {
    memory.as_ptr().as_ptr().expose_provenance()
}

/// A producer writes the source in two halves, late. Mutant: without the wait, the copy reads the
/// old bytes.
#[test]
fn a58_a_copy_waits_for_the_producer_of_its_source() {
    both("order::a58_a_copy_waits_for_the_producer_of_its_source", |family| {
        let fake = Fake::find(family);
        let gpu = fake.gpu(0);
        let engine = Arc::new(DeviceEngine::builder(&gpu).build().unwrap());
        let mut runner = Runner::new(Arc::clone(&engine) as Arc<dyn TransferEngine>);
        let producer = fake.stream();
        for by_event in [false, true] {
            let (new, source) = (gpu.alloc(LEN).unwrap(), gpu.alloc(LEN).unwrap());
            let target = Memory::host(LEN).unwrap();
            let wanted = pattern(3, LEN);
            gpu.write(&new, 0, &wanted).unwrap();
            let src = Addr { region: engine.register(source.clone()).unwrap(), offset: 0 };
            let dst = Addr { region: engine.register(target.clone()).unwrap(), offset: 0 };
            let items = vec![Transfer { src, dst, len: LEN as u64 }];
            let plan = TransferPlan { items, holds: vec![] };

            fake.delay_us(20_000);
            let (from, to) = (address(&new), address(&source));
            fake.copy(to, from, LEN / 2, producer);
            fake.copy(to + LEN / 2, from + LEN / 2, LEN / 2, producer);
            let event = fake.event(producer);
            let wait = if by_event { Producer::Event(event) } else { Producer::Stream(producer) };
            // SAFETY: both live until the plan has ended.
            let ticket = unsafe { engine.submit_after(plan, &[wait]) }.unwrap();
            assert_eq!(runner.wait(ticket).result.unwrap(), LEN as u64);
            fake.delay_us(0);
            let mut got = vec![0; LEN];
            target.read(0, &mut got).unwrap();
            assert!(got == wanted, "copied before it was written (by event: {by_event})");
            fake.destroy_event(event);
        }
        fake.destroy_stream(producer);
        drop((runner, engine, gpu));
        fake.assert_clean("producers");
    });
}

/// A consumer's stream waits for a plan without the host. Mutant: without the wait it reads zeros.
#[test]
fn a_stream_waits_for_a_plan() {
    both("order::a_stream_waits_for_a_plan", |family| {
        let fake = Fake::find(family);
        let gpu = fake.gpu(0);
        let engine = Arc::new(DeviceEngine::builder(&gpu).build().unwrap());
        let mut runner = Runner::new(Arc::clone(&engine) as Arc<dyn TransferEngine>);
        let consumer = fake.stream();
        let (source, loaded, seen) =
            (Memory::host(LEN).unwrap(), gpu.alloc(LEN).unwrap(), gpu.alloc(LEN).unwrap());
        let wanted = pattern(4, LEN);
        source.write(0, &wanted).unwrap();
        let src = Addr { region: engine.register(source).unwrap(), offset: 0 };
        let dst = Addr { region: engine.register(loaded.clone()).unwrap(), offset: 0 };
        let items = vec![Transfer { src, dst, len: LEN as u64 }];

        fake.delay_us(20_000);
        let ticket = engine.submit(TransferPlan { items, holds: vec![] }).unwrap();
        // SAFETY: the stream lives.
        unsafe { engine.hold_back(consumer, ticket) }.unwrap();
        fake.copy(address(&seen), address(&loaded), LEN, consumer);
        let after = fake.event(consumer);
        assert_eq!(runner.wait(ticket).result.unwrap(), LEN as u64);
        // SAFETY: as above; a plan that has ended holds nothing back.
        unsafe { engine.hold_back(consumer, ticket) }.unwrap();
        fake.delay_us(0);
        // Reading goes through a stream of its own: wait for the consumer's.
        let deadline = std::time::Instant::now() + WATCHDOG;
        while fake.live("operations") > 0 {
            assert!(std::time::Instant::now() < deadline);
            std::thread::yield_now();
        }
        let mut got = vec![0; LEN];
        gpu.read(&seen, 0, &mut got).unwrap();
        assert!(got == wanted, "the stream did not wait");
        fake.destroy_event(after);
        fake.destroy_stream(consumer);
        drop((loaded, seen, runner, engine, gpu));
        fake.assert_clean("consumers");
    });
}

/// What was current on the calling thread is current again.
#[test]
fn the_callers_device_stays_current() {
    both("order::the_callers_device_stays_current", |family| {
        let fake = Fake::find(family);
        let hip = family != ucm_transport::GpuFamily::Cuda;
        if hip {
            fake.set_device(1);
        }
        let gpu = fake.gpu(0);
        let engine = Arc::new(DeviceEngine::builder(&gpu).build().unwrap());
        let mut runner = Runner::new(Arc::clone(&engine) as Arc<dyn TransferEngine>);
        let (host, device) = (Memory::host(LEN).unwrap(), gpu.alloc(LEN).unwrap());
        assert_eq!(host.location(), Location::Host);
        gpu.write(&device, 0, &pattern(5, LEN)).unwrap();
        let src = Addr { region: engine.register(device).unwrap(), offset: 0 };
        let dst = Addr { region: engine.register(host.clone()).unwrap(), offset: 0 };
        let items = vec![Transfer { src, dst, len: LEN as u64 }];
        let ticket = engine.submit(TransferPlan { items, holds: vec![] }).unwrap();
        runner.wait(ticket).result.unwrap();
        let mut got = vec![0; LEN];
        host.read(0, &mut got).unwrap();
        assert!(got == pattern(5, LEN));
        if hip {
            assert_eq!(fake.device(), 1);
            drop((runner, engine, gpu));
            assert_eq!(fake.device(), 1);
        } else {
            assert_eq!(fake.contexts_of_thread(), 0);
        }
    });
}
