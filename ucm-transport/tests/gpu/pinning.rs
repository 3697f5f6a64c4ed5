//! Host memory is pinned in pieces, all or nothing, and what is not pinned is counted (A16, A17).

use std::sync::Arc;

use ucm_data::{
    PageTier, RegisterPolicy, RegisterRegion as _, Registration, Segments, SegmentsConfig,
};
use ucm_transport::{
    Addr, DeviceEngine, ErrorKind, Location, Memory, PinPolicy, Transfer, TransferEngine,
    TransferPlan, testing::Runner,
};

use crate::{child::both, fake::Fake, harness::pattern};

const PAGE: usize = 4096;

fn pin_call(fake: &Fake) -> &'static str {
    fake.name("cuMemHostRegister_v2", "hipHostRegister")
}

/// Loads all of a host region to the device by one item, and compares.
fn load(fake: &Fake, engine: &Arc<DeviceEngine>, host: &Memory) {
    let len = host.len();
    let wanted = pattern(7, len);
    host.write(0, &wanted).unwrap();
    let gpu = fake.gpu(0);
    let device = gpu.alloc(len).unwrap();
    let mut runner = Runner::new(Arc::clone(engine) as Arc<dyn TransferEngine>);
    let src = Addr { region: engine.register(host.clone()).unwrap(), offset: 0 };
    let dst = Addr { region: engine.register(device.clone()).unwrap(), offset: 0 };
    let items = vec![Transfer { src, dst, len: len as u64 }];
    let ticket = engine.submit(TransferPlan { items, holds: vec![] }).unwrap();
    assert_eq!(runner.wait(ticket).result.unwrap(), len as u64);
    let mut got = vec![0; len];
    gpu.read(&device, 0, &mut got).unwrap();
    assert!(got == wanted);
    engine.deregister(src.region).unwrap();
    engine.deregister(dst.region).unwrap();
}

/// One item over many pieces is cut at their borders. Mutant: uncut, the driver refuses it.
#[test]
fn a_copy_never_crosses_the_border_of_a_piece() {
    both("pinning::a_copy_never_crosses_the_border_of_a_piece", |family| {
        let fake = Fake::find(family);
        let gpu = fake.gpu(0);
        let builder = DeviceEngine::builder(&gpu).pin_piece_bytes(2 * PAGE);
        let engine = Arc::new(builder.build().unwrap());
        let whole = Memory::host(64 * PAGE).unwrap();
        for (offset, len) in [(0, 64 * PAGE), (17, 9 * PAGE), (2 * PAGE - 1, 2), (0, PAGE)] {
            let before = fake.calls_of(pin_call(&fake));
            load(&fake, &engine, &whole.part(offset, len).unwrap());
            let pieces = (offset % PAGE + len).div_ceil(2 * PAGE) as u64;
            assert_eq!(fake.calls_of(pin_call(&fake)) - before, pieces, "{len} at {offset}");
        }
        assert_eq!(engine.counters().unpinned_bytes, 0);
        drop((engine, gpu));
        fake.assert_clean("pieces");
    });
}

/// Any piece refused: nothing stays pinned, the piece is named, no error is left behind.
#[test]
fn a16_a_refused_piece_is_named_and_rolls_all_back() {
    both("pinning::a16_a_refused_piece_is_named_and_rolls_all_back", |family| {
        let fake = Fake::find(family);
        let gpu = fake.gpu(0);
        let builder = DeviceEngine::builder(&gpu).pin_piece_bytes(PAGE);
        let engine = Arc::new(builder.build().unwrap());
        let memory = Memory::host(8 * PAGE).unwrap();
        for piece in 0..8 {
            fake.fail(pin_call(&fake), piece, 1, 2);
            let error = engine.register(memory.clone()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Registration);
            let text = error.to_string();
            assert!(text.contains(&format!("piece {piece} of 8")), "{text}");
            assert_eq!((fake.live("pins"), fake.pending_error()), (0, 0));
        }
        fake.heal();
        load(&fake, &engine, &memory);
        drop((engine, gpu));
        fake.assert_clean("roll-back");
    });
}

/// A17: memory that is not pinned still works, and every byte of it is counted.
#[test]
fn a17_memory_that_is_not_pinned_is_counted() {
    both("pinning::a17_memory_that_is_not_pinned_is_counted", |family| {
        let fake = Fake::find(family);
        let gpu = fake.gpu(0);
        let build = |pin| Arc::new(DeviceEngine::builder(&gpu).pin(pin).build().unwrap());
        let memory = Memory::host(3 * PAGE).unwrap();
        let engine = build(PinPolicy::Prefer);
        load(&fake, &engine, &memory);
        assert_eq!(engine.counters().unpinned_bytes, 0);
        fake.fail(pin_call(&fake), 0, 1, 2);
        load(&fake, &engine, &memory);
        let counters = engine.counters();
        assert_eq!(counters.unpinned_regions_bytes, 3 * PAGE as u64);
        assert_eq!(counters.unpinned_bytes, 3 * PAGE as u64);
        let never = build(PinPolicy::Never);
        load(&fake, &never, &memory);
        assert_eq!(never.counters().unpinned_bytes, 3 * PAGE as u64);
        // Nor do batch and kernel get it.
        let (host, device) = (never.register(memory).unwrap(), gpu.alloc(3 * PAGE).unwrap());
        let device = never.register(device).unwrap();
        let at = |region, offset| Addr { region, offset };
        let items = (0..20)
            .map(|n| Transfer { src: at(host, n * 100), dst: at(device, n * 300), len: 50 })
            .collect();
        let single = never.counters().copied_single;
        let mut runner = Runner::new(Arc::clone(&never) as Arc<dyn TransferEngine>);
        let ticket = never.submit(TransferPlan { items, holds: vec![] }).unwrap();
        runner.wait(ticket).result.unwrap();
        assert_eq!(never.counters().copied_single - single, 20);
        drop(runner);
        drop((engine, never, gpu));
        fake.assert_clean("unpinned memory");
    });
}

/// Memory that somebody else pinned is refused as such, and taken when it is called pinned.
#[test]
fn memory_pinned_by_others_is_named_so() {
    both("pinning::memory_pinned_by_others_is_named_so", |family| {
        let fake = Fake::find(family);
        let gpu = fake.gpu(0);
        let engine = Arc::new(DeviceEngine::builder(&gpu).build().unwrap());
        fake.fail(pin_call(&fake), 0, 1, 712);
        let memory = Memory::host(PAGE).unwrap();
        let error = engine.register(memory.clone()).unwrap_err();
        assert!(error.to_string().contains("register it as pinned memory"), "{error}");
        let (base, len) = (memory.as_ptr(), memory.len());
        // SAFETY: the memory itself keeps it alive.
        let pinned =
            unsafe { Memory::from_raw(base, len, Location::PinnedHost, Arc::new(memory.clone())) };
        let before = fake.calls_of(pin_call(&fake));
        load(&fake, &engine, &pinned);
        assert_eq!(fake.calls_of(pin_call(&fake)), before);
        drop((engine, gpu));
        fake.assert_clean("pinned by others");
    });
}

/// Segments of the node cache, pinned by the data plane's own registration: the engine sees it, and
/// cuts at its pieces; a piece in use outlives its registration.
#[test]
fn segments_of_the_node_are_pinned_once_for_all_engines() {
    both("pinning::segments_of_the_node_are_pinned_once_for_all_engines", |family| {
        let fake = Fake::find(family);
        let gpu = fake.gpu(0);
        let config = SegmentsConfig { prefer: PageTier::Small, ..SegmentsConfig::new(8192, 40) };
        let mapped = Segments::create(&config).unwrap().map().unwrap();
        let pinner = gpu.pinner(16 << 10);
        let policy = RegisterPolicy::AllOrNothing;
        let registration = Registration::new(Arc::clone(&mapped), pinner.clone(), policy).unwrap();
        let pieces = registration.pieces().len() as u64;
        assert_eq!(fake.live("pins"), pieces);
        assert!(pinner.max_piece_bytes() == 16 << 10 && pieces > 4);

        let len = 48 << 10;
        let base = mapped.slot_ptr(1).unwrap();
        // SAFETY: the mapping lives as long as `mapped`, which is kept.
        let slots =
            unsafe { Memory::from_raw(base, len, Location::Host, Arc::new(Arc::clone(&mapped))) };
        let engine = Arc::new(DeviceEngine::builder(&gpu).build().unwrap());
        load(&fake, &engine, &slots);
        assert_eq!(fake.live("pins"), pieces, "nothing is pinned a second time");

        // Unregistered in the middle of a copy: the pieces in use stay.
        let target = engine.register(gpu.alloc(len).unwrap()).unwrap();
        let source = engine.register(slots.clone()).unwrap();
        let (src, dst) = (Addr { region: source, offset: 0 }, Addr { region: target, offset: 0 });
        let mut runner = Runner::new(Arc::clone(&engine) as Arc<dyn TransferEngine>);
        fake.hold(true);
        let items = vec![Transfer { src, dst, len: len as u64 }];
        let ticket = engine.submit(TransferPlan { items, holds: vec![] }).unwrap();
        drop(registration);
        assert_eq!(fake.live("pins"), 4, "those of the region that is copied");
        fake.hold(false);
        runner.wait(ticket).result.unwrap();
        engine.deregister(source).unwrap();
        assert_eq!(fake.live("pins"), 0);
        drop((runner, engine, gpu, pinner));
        fake.assert_clean("segments");
    });
}
