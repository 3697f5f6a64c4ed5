//! Memory of peers, memory of other processes, dmabufs; the place in the allocation travels with the
//! handle (A59).

use std::{fs::File, os::unix::fs::FileExt as _};

use ucm_transport::{
    Addr, DeviceEngine, ErrorKind, Gpu, Location, Memory, SharedMemory, Transfer,
    TransferEngine as _, TransferPlan, testing::conformance,
};

use crate::{
    child::{Library, Setting, again, both, each},
    fake::Fake,
    harness::{OnDevice, Place, pattern},
};

const LEN: usize = 40_000;
/// Places of the memory in its allocation.
const OFFSETS: [usize; 4] = [0, 4096, 8191, 12_345];

/// Device 1 is a peer of device 0: the whole suite with the destination there.
#[test]
fn copies_to_a_peer() {
    both("reach::copies_to_a_peer", |family| {
        let fake = Fake::find(family);
        let gpus = vec![fake.gpu(0), fake.gpu(1)];
        let (source, destination) =
            (Place::Device(gpus[0].clone()), Place::Device(gpus[1].clone()));
        let peer = gpus[1].clone();
        conformance(&OnDevice {
            gpus,
            source,
            destination,
            settings: move |builder: ucm_transport::DeviceEngineBuilder| builder.peer(&peer),
        });
        fake.assert_clean("peers");
    });
}

#[test]
fn what_cannot_be_reached_is_refused() {
    let three = |_| Setting { library: Library::Fake, env: &[("UCM_FAKE_GPU_DEVICES", "3")] };
    each("reach::what_cannot_be_reached_is_refused", three, |family| {
        let fake = Fake::find(family);
        let (near, far) = (fake.gpu(0), fake.gpu(2));
        assert_eq!(near.reach_peer(&far).unwrap_err().kind(), ErrorKind::Unsupported);
        let refused = DeviceEngine::builder(&near).peer(&far).build().unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Unsupported);
        let engine = DeviceEngine::builder(&near).build().unwrap();
        let memory = far.alloc(LEN).unwrap();
        let error = engine.register(memory.clone()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("as a peer"), "{error}");
        assert_eq!(near.share(&memory).unwrap_err().kind(), ErrorKind::Unsupported);
        assert_eq!(near.dmabuf(&memory).unwrap_err().kind(), ErrorKind::Unsupported);
        let host = Memory::host(64).unwrap();
        assert_eq!(near.share(&host).unwrap_err().kind(), ErrorKind::Unsupported);
        assert_eq!(near.read(&host, 0, &mut [0]).unwrap_err().kind(), ErrorKind::Unsupported);
        assert_eq!(far.read(&memory, LEN, &mut [0]).unwrap_err().kind(), ErrorKind::OutOfBounds);
        drop((engine, memory, near, far));
        fake.assert_clean("refused");
    });
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Vec<u8> {
    (0..text.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap())
        .collect()
}

/// One process shares memory at several places of its allocation; another opens it, finds first and
/// last byte in place, and writes some back.
#[test]
fn a59_another_process_opens_memory_at_its_place() {
    both("reach::a59_another_process_opens_memory_at_its_place", |family| {
        let fake = Fake::find(family);
        let gpu = fake.gpu(0);
        for offset in OFFSETS {
            let whole = gpu.alloc(LEN + 20_000).unwrap();
            let memory = whole.part(offset, LEN).unwrap();
            gpu.write(&memory, 0, &pattern(offset, LEN)).unwrap();
            let handle = gpu.share(&memory).unwrap();
            assert_eq!(SharedMemory::from_bytes(&handle.to_bytes()), handle);
            // The driver does not open a handle in the process that made it.
            assert_eq!(gpu.open_shared(&handle).unwrap_err().kind(), ErrorKind::Registration);
            let env = [
                ("UCM_TEST_HANDLE", hex(&handle.to_bytes())),
                ("UCM_TEST_SEED", offset.to_string()),
            ];
            let env: Vec<(&str, &str)> = env.iter().map(|(k, v)| (*k, v.as_str())).collect();
            again("reach::opener_of_shared_memory", family, &env);
            let mut got = vec![0; LEN];
            gpu.read(&memory, 0, &mut got).unwrap();
            let mut wanted = pattern(offset, LEN);
            wanted[LEN - 3..].copy_from_slice(b"end");
            assert!(got == wanted, "the other process wrote elsewhere");
        }
        drop(gpu);
        fake.assert_clean("shared");
    });
}

#[test]
#[ignore = "the other process of the test above"]
fn opener_of_shared_memory() {
    let Ok(handle) = std::env::var("UCM_TEST_HANDLE") else { return };
    let bytes: [u8; 88] = from_hex(&handle).try_into().unwrap();
    let seed: usize = std::env::var("UCM_TEST_SEED").unwrap().parse().unwrap();
    both("reach::opener_of_shared_memory", |family| {
        let fake = Fake::find(family);
        let gpu = fake.gpu(0);
        let memory = gpu.open_shared(&SharedMemory::from_bytes(&bytes)).unwrap();
        assert_eq!((memory.len(), memory.location()), (LEN, gpu.location()));
        let mut got = vec![0; LEN];
        gpu.read(&memory, 0, &mut got).unwrap();
        assert!(got == pattern(seed, LEN));
        gpu.write(&memory, LEN - 3, b"end").unwrap();
        // A range beyond the allocation, and a handle that is none.
        for (at, value) in [(72, 0xff), (64, 0xff), (80, 0xff)] {
            let mut wrong = bytes;
            wrong[at + 2] = value;
            let error = gpu.open_shared(&SharedMemory::from_bytes(&wrong));
            if at == 80 {
                // The allocation's length is only what the owner says: the driver's counts.
                assert!(error.is_ok());
            } else {
                assert_eq!(error.unwrap_err().kind(), ErrorKind::OutOfBounds);
            }
        }
        let mut both_wrong = bytes;
        both_wrong[74] = 0xff;
        both_wrong[82] = 0xff;
        let error = gpu.open_shared(&SharedMemory::from_bytes(&both_wrong)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfBounds);
        let mut garbage = bytes;
        garbage[0] ^= 1;
        let error = gpu.open_shared(&SharedMemory::from_bytes(&garbage)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Registration);
        drop((memory, gpu));
        fake.assert_clean("opened");
    });
}

/// The descriptor names the same bytes, at the offset that comes with it.
#[test]
fn a_dmabuf_has_the_bytes_at_its_offset() {
    both("reach::a_dmabuf_has_the_bytes_at_its_offset", |family| {
        let fake = Fake::find(family);
        let gpu = fake.gpu(0);
        let whole = gpu.alloc(LEN + 20_000).unwrap();
        for offset in [0, 100, 4095] {
            let memory = whole.part(offset, LEN).unwrap();
            gpu.write(&memory, 0, &pattern(offset, LEN)).unwrap();
            let dmabuf = gpu.dmabuf(&memory).unwrap();
            assert_eq!((dmabuf.offset, dmabuf.len), (offset as u64, LEN as u64));
            let mut got = vec![0; LEN];
            File::from(dmabuf.fd).read_exact_at(&mut got, dmabuf.offset).unwrap();
            assert!(got == pattern(offset, LEN));
        }
        drop((whole, gpu));
        fake.assert_clean("dmabuf");
    });
}

/// Addresses carry the device: memory of another device is never taken for the engine's own.
#[test]
fn the_location_travels_with_the_address() {
    both("reach::the_location_travels_with_the_address", |family| {
        let fake = Fake::find(family);
        let (first, second): (Gpu, Gpu) = (fake.gpu(0), fake.gpu(1));
        let own = |gpu: &Gpu| matches!(gpu.location(), Location::Cuda(0) | Location::Hip(0));
        assert!(own(&first) && !own(&second));
        let engine = DeviceEngine::builder(&first).build().unwrap();
        assert_eq!(
            engine.register(second.alloc(64).unwrap()).unwrap_err().kind(),
            ErrorKind::Unsupported
        );
        let a = engine.register(first.alloc(64).unwrap()).unwrap();
        let items = vec![Transfer {
            src: Addr { region: a, offset: 60 },
            dst: Addr { region: a, offset: 0 },
            len: 5,
        }];
        let rejected = engine.submit(TransferPlan { items, holds: vec![] }).unwrap_err();
        assert_eq!(rejected.error.kind(), ErrorKind::OutOfBounds);
        drop((engine, first, second));
        fake.assert_clean("locations");
    });
}
