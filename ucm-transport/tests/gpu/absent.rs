//! What is said where there is no device, and what still works with a driver that lacks things.

use ucm_transport::{DeviceAbsent, ErrorKind, Gpu, GpuFamily, TransferError};

use crate::{
    child::{Library, Setting, both, each},
    fake::Fake,
};

/// The reason why no device can be opened. Counting gives the same.
fn absent(family: GpuFamily) -> DeviceAbsent {
    let reason = Gpu::open(family, 0).unwrap_err();
    assert_eq!(Gpu::count(family).unwrap_err(), reason);
    assert!(!reason.remedy().is_empty());
    assert!(reason.to_string().ends_with(&reason.remedy()), "{reason}");
    assert_eq!(TransferError::from(reason.clone()).kind(), ErrorKind::Unsupported);
    reason
}

/// This test binary holds both engines: that the child starts at all, with files of these names that
/// are no libraries, shows that nothing is linked against them.
#[test]
fn no_library_is_a_reason_and_the_program_starts() {
    let garbage = |_| Setting { library: Library::Garbage, env: &[] };
    each("absent::no_library_is_a_reason_and_the_program_starts", garbage, |family| {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        assert!(!maps.contains("libcuda") && !maps.contains("libamdhip64"), "{maps}");
        match absent(family) {
            DeviceAbsent::NoLibrary { family: whose, .. } => assert_eq!(whose, family),
            other => panic!("{other}"),
        }
    });
}

#[test]
fn needed_functions_that_are_missing_are_named() {
    let without = |family| Setting {
        library: match family {
            GpuFamily::Cuda => Library::Without(&["cuEventQuery", "cuMemHostRegister_v2"]),
            _ => Library::Without(&["hipEventQuery", "hipHostRegister"]),
        },
        env: &[],
    };
    each("absent::needed_functions_that_are_missing_are_named", without, |family| {
        match (absent(family), family) {
            (DeviceAbsent::MissingSymbols { names, .. }, GpuFamily::Cuda) => {
                assert_eq!(names, ["cuEventQuery", "cuMemHostRegister_v2"]);
            }
            (DeviceAbsent::MissingSymbols { names, .. }, _) => {
                assert_eq!(names, ["hipEventQuery", "hipHostRegister"]);
            }
            (other, _) => panic!("{other}"),
        }
    });
}

#[test]
fn functions_that_need_not_be_there_are_refused_when_asked_for() {
    let without = |family| Setting {
        library: match family {
            GpuFamily::Cuda => Library::Without(&[
                "cuIpcGetMemHandle",
                "cuMemGetHandleForAddressRange",
                "cuLaunchKernel",
                "cuCtxEnablePeerAccess",
            ]),
            _ => Library::Without(&[
                "hipIpcGetMemHandle",
                "hipMemGetHandleForAddressRange",
                "hipDeviceEnablePeerAccess",
            ]),
        },
        env: &[],
    };
    let name = "absent::functions_that_need_not_be_there_are_refused_when_asked_for";
    each(name, without, |family| {
        let fake = Fake::find(family);
        let gpu = fake.gpu(0);
        let abilities = gpu.abilities();
        assert!(!abilities.shared_memory && !abilities.dmabuf && !abilities.fragment_kernel);
        let memory = gpu.alloc(4096).unwrap();
        assert_eq!(gpu.share(&memory).unwrap_err().kind(), ErrorKind::Unsupported);
        assert_eq!(gpu.dmabuf(&memory).unwrap_err().kind(), ErrorKind::Unsupported);
        assert_eq!(gpu.reach_peer(&fake.gpu(1)).unwrap_err().kind(), ErrorKind::Unsupported);
        drop((memory, gpu));
        fake.assert_clean("a driver without");
    });
}

#[test]
fn no_device_is_a_reason() {
    let none = |_| Setting { library: Library::Fake, env: &[("UCM_FAKE_GPU_DEVICES", "0")] };
    each("absent::no_device_is_a_reason", none, |family| {
        let reason = absent(family);
        assert_eq!(reason, DeviceAbsent::NoDevice { family, devices: 0, code: 100 });
        Fake::find(family).assert_clean("no device");
    });
}

/// What drivers answer where there is none: a stub library, no device, an unknown device.
#[test]
fn answers_of_the_driver_become_reasons() {
    for code in ["100", "101", "999"] {
        let env = [("UCM_FAKE_GPU_INIT", code)];
        let setting = |_| Setting { library: Library::Fake, env: &env };
        each("absent::answers_of_the_driver_become_reasons", setting, |family| {
            let code: i32 = std::env::var("UCM_FAKE_GPU_INIT").unwrap().parse().unwrap();
            match (code, absent(family)) {
                (100 | 101, DeviceAbsent::NoDevice { code: told, .. }) => assert_eq!(told, code),
                (999, DeviceAbsent::Refused { said, .. }) => {
                    assert!(said.contains("999"), "{said}")
                }
                (_, other) => panic!("{other}"),
            }
            Fake::find(family).assert_clean("a driver that refuses");
        });
        if std::env::var_os("UCM_GPU_CHILD").is_some() {
            return;
        }
    }
}

#[test]
fn an_old_driver_is_a_reason() {
    let old = |family| Setting {
        library: Library::Fake,
        env: match family {
            GpuFamily::Cuda => &[("UCM_FAKE_GPU_VERSION", "11030")],
            _ => &[("UCM_FAKE_GPU_VERSION", "40500000")],
        },
    };
    each("absent::an_old_driver_is_a_reason", old, |family| {
        let (found, needed) = match family {
            GpuFamily::Cuda => (11_030, 11_040),
            _ => (40_500_000, 50_000_000),
        };
        assert_eq!(absent(family), DeviceAbsent::TooOld { family, found, needed });
    });
}

#[test]
fn a_device_that_is_not_there_is_a_reason() {
    both("absent::a_device_that_is_not_there_is_a_reason", |family| {
        let reason = Gpu::open(family, 2).unwrap_err();
        assert_eq!(reason, DeviceAbsent::NoDevice { family, devices: 2, code: 0 });
        assert_eq!(Gpu::count(family).unwrap(), 2);
        Fake::find(family).assert_clean("no such device");
    });
}
