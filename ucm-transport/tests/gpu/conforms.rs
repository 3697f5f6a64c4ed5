//! The suite of all engines, over both drivers, in every direction and on every path.

use ucm_transport::{
    DeviceEngineBuilder, EndNotice, GpuFamily, KernelUse, PinPolicy, testing::conformance,
};

use crate::{
    child::{Library, Setting, both, each},
    fake::Fake,
    harness::{OnDevice, Place},
};

/// Runs the suite with memory in these places; `on_device` says which sides are on the device.
fn suite(
    family: GpuFamily,
    (source, destination): (bool, bool),
    settings: impl Fn(DeviceEngineBuilder) -> DeviceEngineBuilder,
) -> Fake {
    let fake = Fake::find(family);
    let gpu = fake.gpu(0);
    let place = |on_device| if on_device { Place::Device(gpu.clone()) } else { Place::Host };
    let (source, destination) = (place(source), place(destination));
    conformance(&OnDevice { gpus: vec![gpu.clone()], source, destination, settings });
    drop(gpu);
    fake.assert_clean("conformance");
    fake
}

const LOAD: (bool, bool) = (false, true);
const STORE: (bool, bool) = (true, false);

/// Fragments go by the batch call where they are many.
#[test]
fn loads_with_batch_copies() {
    both("conforms::loads_with_batch_copies", |family| {
        let fake = suite(family, LOAD, |builder| builder.kernel(KernelUse::Never));
        assert!(fake.calls_of(fake.name("cuMemcpyBatchAsync", "hipMemcpyBatchAsync")) > 0);
        assert_eq!(fake.calls_of("cuLaunchKernel"), 0);
    });
}

#[test]
fn stores_with_batch_copies() {
    both("conforms::stores_with_batch_copies", |family| {
        suite(family, STORE, |builder| builder.kernel(KernelUse::Never));
    });
}

#[test]
fn copies_within_the_device() {
    both("conforms::copies_within_the_device", |family| {
        suite(family, (true, true), |builder| builder);
    });
}

/// The driver lacks what came later: no batch, no kernel, no calls to the host.
#[test]
fn loads_and_stores_with_an_old_driver() {
    let old = |family| Setting {
        library: match family {
            GpuFamily::Cuda => Library::Without(&["cuMemcpyBatchAsync", "cuModuleLoadData"]),
            _ => Library::Without(&["hipMemcpyBatchAsync", "hipLaunchHostFunc"]),
        },
        env: match family {
            GpuFamily::Cuda => &[("UCM_FAKE_GPU_VERSION", "11040")],
            _ => &[("UCM_FAKE_GPU_VERSION", "50000000")],
        },
    };
    each("conforms::loads_and_stores_with_an_old_driver", old, |family| {
        let fake = suite(family, LOAD, |builder| builder.notice(EndNotice::Called));
        assert_eq!(fake.calls_of(fake.name("cuMemcpyBatchAsync", "hipMemcpyBatchAsync")), 0);
        suite(family, STORE, |builder| builder.notice(EndNotice::Called));
        assert!(!fake.gpu(0).abilities().batch_copies);
    });
}

/// The kernel takes whatever it may; without one (HIP) the same plans go by copies.
#[test]
fn loads_and_stores_with_the_kernel() {
    both("conforms::loads_and_stores_with_the_kernel", |family| {
        for way in [LOAD, STORE] {
            let fake = suite(family, way, |builder| builder.kernel(KernelUse::UpTo(u64::MAX)));
            assert_eq!(fake.calls_of("cuLaunchKernel") > 0, family == GpuFamily::Cuda);
        }
    });
}

#[test]
fn streams_that_call_the_host() {
    both("conforms::streams_that_call_the_host", |family| {
        let fake = suite(family, LOAD, |builder| builder.notice(EndNotice::Called));
        assert!(fake.calls_of(fake.name("cuLaunchHostFunc", "hipLaunchHostFunc")) > 0);
    });
}

/// Every operation is late, and memory is not pinned at all, or pinned page by page.
#[test]
fn slow_streams_and_every_way_of_pinning() {
    let slow = |_| Setting { library: Library::Fake, env: &[("UCM_FAKE_GPU_DELAY_US", "10")] };
    each("conforms::slow_streams_and_every_way_of_pinning", slow, |family| {
        let settings = |builder: DeviceEngineBuilder| builder.kernel(KernelUse::Never);
        suite(family, LOAD, |builder| settings(builder).pin(PinPolicy::Never));
        suite(family, STORE, |builder| settings(builder).pin_piece_bytes(4096 * 7));
    });
}

#[test]
fn one_stream_each_and_measured_kernel() {
    both("conforms::one_stream_each_and_measured_kernel", |family| {
        suite(family, LOAD, |builder| builder.load_streams(1).store_streams(1));
        suite(family, STORE, |builder| builder.load_streams(1).store_streams(1));
    });
}
