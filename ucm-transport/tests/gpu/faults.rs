//! An error at every call, one after the other: typed, no panic, nothing left behind.
//!
//! Mutants that these tests find: an early return that forgets a stream, an event, a pin, the kernel's
//! module or a context; a failed measurement that frees its memory under a copy; an error that is
//! left on the thread (HIP).

use std::sync::Arc;

use ucm_transport::{
    Addr, Completion, DeviceEngine, ErrorKind, Gpu, KernelUse, Memory, Transfer, TransferEngine,
    TransferError, TransferPlan, testing::Runner,
};

use crate::{child::both, fake::Fake, harness::pattern};

const LEN: usize = 96 << 10;

/// Opens a device, loads and stores by single copies, batches and the kernel, and closes it. Bytes of
/// plans that end well are compared.
fn everything(fake: &Fake, kernel: KernelUse) -> Result<(), TransferError> {
    let gpu = Gpu::open(fake.family, 0)?;
    let (host, device) = (Memory::host(LEN)?, gpu.alloc(LEN)?);
    host.write(0, &pattern(9, LEN))?;
    let engine = DeviceEngine::builder(&gpu).kernel(kernel).pin_piece_bytes(32 << 10).build()?;
    let engine: Arc<dyn TransferEngine> = Arc::new(engine);
    let (host_id, device_id) = (engine.register(host.clone())?, engine.register(device.clone())?);
    let mut runner = Runner::new(Arc::clone(&engine));
    let mut failed = None;
    for (count, len, back) in [(1, 40_000, false), (20, 700, false), (12, 3000, true)] {
        let at = |region, n: usize| Addr { region, offset: (n * 4000) as u64 };
        let items: Vec<Transfer> = (0..count)
            .map(|n| {
                // The way back goes where nothing was loaded from.
                let (host, device) = (at(host_id, n), at(device_id, n));
                let (src, dst) = if back { (device, host) } else { (host, device) };
                Transfer { src, dst, len }
            })
            .collect();
        let plan = TransferPlan { items, holds: vec![Box::new(7)] };
        match engine.submit(plan) {
            Ok(ticket) => {
                let Completion { result, holds, .. } = runner.wait(ticket);
                match result {
                    Ok(bytes) => {
                        assert_eq!((bytes, holds.len()), (count as u64 * len, 1));
                    }
                    Err(error) => failed = Some(error),
                }
            }
            Err(rejected) => {
                assert_eq!((rejected.plan.items.len(), rejected.plan.holds.len()), (count, 1));
                failed = Some(rejected.error);
            }
        }
        if failed.is_none() && !back {
            compare(&gpu, &device, count, usize::try_from(len).unwrap())?;
        }
    }
    failed.map_or(Ok(()), Err)
}

/// The pieces loaded last are on the device.
fn compare(gpu: &Gpu, device: &Memory, count: usize, len: usize) -> Result<(), TransferError> {
    let wanted = pattern(9, LEN);
    let mut got = vec![0; len];
    for n in 0..count {
        gpu.read(device, n * 4000, &mut got)?;
        assert!(got == wanted[n * 4000..n * 4000 + len], "piece {n} of {count}");
    }
    Ok(())
}

fn every_call(family: ucm_transport::GpuFamily, kernel: KernelUse, codes: &[i32]) {
    let fake = Fake::find(family);
    everything(&fake, kernel).unwrap();
    fake.assert_clean("without a fault");
    for code in codes {
        let (mut at, mut failures) = (0, 0);
        loop {
            fake.fail("", at, 1, *code);
            let before = fake.calls();
            let result = everything(&fake, kernel);
            let used = fake.calls() - before;
            fake.heal();
            fake.assert_clean(&format!("{code} at call {at}"));
            if let Err(error) = result {
                failures += 1;
                let allowed = [
                    ErrorKind::Unsupported,
                    ErrorKind::Registration,
                    ErrorKind::Failed,
                    ErrorKind::Poisoned,
                ];
                assert!(allowed.contains(&error.kind()), "{code} at call {at}: {error}");
                assert!(!error.to_string().is_empty());
            }
            if at >= used {
                break;
            }
            at += 1;
        }
        // Most calls matter; some (giving back, optional help) may fail without harm.
        assert!(at > 40 && failures > 20, "{at} calls, {failures} failures");
    }
}

#[test]
fn any_call_may_fail() {
    both("faults::any_call_may_fail", |family| {
        every_call(family, KernelUse::UpTo(1000), &[999, 2]);
    });
}

/// The code of a lost device, once: the engine is poisoned, and everything is still given back,
/// because the driver then says that the copies have ended.
#[test]
fn any_call_may_say_that_the_device_is_lost() {
    both("faults::any_call_may_say_that_the_device_is_lost", |family| {
        every_call(family, KernelUse::Never, &[700]);
    });
}

/// "Not supported" takes the other way where there is one.
#[test]
fn any_call_may_be_unsupported() {
    both("faults::any_call_may_be_unsupported", |family| {
        every_call(family, KernelUse::UpTo(1000), &[801]);
        let fake = Fake::find(family);
        fake.fail(fake.name("cuMemcpyBatchAsync", "hipMemcpyBatchAsync"), 0, u64::MAX, 801);
        everything(&fake, KernelUse::Never).unwrap();
        fake.heal();
        fake.assert_clean("batches refused");
    });
}

/// Faults in the measurement at the start leave the engine without its kernel, and nothing behind.
#[test]
fn any_call_of_the_measurement_may_fail() {
    both("faults::any_call_of_the_measurement_may_fail", |family| {
        let fake = Fake::find(family);
        let names = [
            ("cuLaunchKernel", "hipMemcpyAsync"),
            ("cuMemHostAlloc", "hipHostMalloc"),
            ("cuModuleLoadData", "hipMemcpyAsync"),
            ("cuModuleGetFunction", "hipMemcpyAsync"),
        ];
        for (cuda, hip) in names {
            fake.fail(fake.name(cuda, hip), 0, 1, 999);
            let gpu = fake.gpu(0);
            let built = DeviceEngine::builder(&gpu).build();
            fake.heal();
            let kernel = built.unwrap().switch_point();
            assert_eq!((kernel.to_device, kernel.from_device), (0, 0), "{cuda}");
        }
    });
}
