//! What is tried on a real device. Where there is none, each case prints `SKIP` and why.

use std::{
    process::Command,
    sync::Arc,
    time::{Duration, Instant},
};

use ucm_data::{PageTier, RegisterPolicy, Registration, Segments, SegmentsConfig};
use ucm_transport::{
    Addr, DeviceEngine, DeviceEngineBuilder, EndNotice, Gpu, GpuFamily, KernelUse, Memory,
    PinPolicy, RegionId, SharedMemory, Transfer, TransferEngine, TransferPlan,
    testing::{Runner, conformance},
};

use crate::harness::{OnDevice, Place, pattern};

/// Makes a test of each case, for one family.
macro_rules! cases {
    ($family:expr) => {
        cases::cases!($family; conforms, fragments_of_every_alignment, segments_are_pinned_in_pieces,
            another_process_opens_memory, dmabuf_or_a_reason, peers_or_a_reason, figures);
    };
    ($family:expr; $($case:ident),*) => {
        $(#[test]
        #[ignore = "wants a real device: cargo xtask hw"]
        fn $case() {
            cases::$case($family, concat!(stringify!($case)));
        })*
    };
}
pub(crate) use cases;

/// The first device, or the reason why the case is skipped.
#[expect(clippy::print_stdout, reason = "the runner counts this line")]
fn device(family: GpuFamily) -> Option<Gpu> {
    match Gpu::open(family, 0) {
        Ok(gpu) => Some(gpu),
        Err(reason) => {
            println!("SKIP {reason}");
            None
        }
    }
}

#[expect(clippy::print_stdout, reason = "figures are for the person who runs this")]
fn tell(line: &str) {
    println!("{line}");
}

type Settings = fn(DeviceEngineBuilder) -> DeviceEngineBuilder;

pub(crate) fn conforms(family: GpuFamily, _name: &str) {
    let Some(gpu) = device(family) else { return };
    let ways: [(bool, bool); 3] = [(false, true), (true, false), (true, true)];
    let settings: [Settings; 5] = [
        |builder| builder,
        |builder| builder.kernel(KernelUse::Never),
        |builder| builder.kernel(KernelUse::UpTo(u64::MAX)),
        |builder| builder.notice(EndNotice::Called).load_streams(1).store_streams(1),
        |builder| builder.pin(PinPolicy::Never).pin_piece_bytes(64 << 10),
    ];
    let place = |on_device| if on_device { Place::Device(gpu.clone()) } else { Place::Host };
    for (source, destination) in ways {
        for settings in settings {
            let (source, destination) = (place(source), place(destination));
            conformance(&OnDevice { gpus: vec![gpu.clone()], source, destination, settings });
        }
    }
}

/// An engine with a host and a device region of the same length.
struct Bench {
    gpu: Gpu,
    engine: Arc<DeviceEngine>,
    runner: Runner,
    host: Memory,
    device: Memory,
    ids: (RegionId, RegionId),
}

impl Bench {
    fn new(gpu: &Gpu, len: usize, kernel: KernelUse) -> Self {
        let builder = DeviceEngine::builder(gpu).kernel(kernel).load_streams(4).store_streams(4);
        let engine = Arc::new(builder.build().unwrap());
        let runner = Runner::new(Arc::clone(&engine) as Arc<dyn TransferEngine>);
        let (host, device) = (Memory::host(len).unwrap(), gpu.alloc(len).unwrap());
        let ids =
            (engine.register(host.clone()).unwrap(), engine.register(device.clone()).unwrap());
        Self { gpu: gpu.clone(), engine, runner, host, device, ids }
    }

    fn item(&self, from: usize, to: usize, len: usize, load: bool) -> Transfer {
        let at = |region, offset: usize| Addr { region, offset: offset as u64 };
        let (src, dst) = if load { self.ids } else { (self.ids.1, self.ids.0) };
        Transfer { src: at(src, from), dst: at(dst, to), len: len as u64 }
    }

    fn run(&mut self, items: Vec<Transfer>) {
        let ticket = self.engine.submit(TransferPlan { items, holds: vec![] }).unwrap();
        self.runner.wait(ticket).result.unwrap();
    }
}

/// The kernel moves any length between any two alignments, and nothing beside.
pub(crate) fn fragments_of_every_alignment(family: GpuFamily, _name: &str) {
    let Some(gpu) = device(family) else { return };
    const LEN: usize = 4 << 20;
    for load in [true, false] {
        let mut bench = Bench::new(&gpu, LEN, KernelUse::UpTo(u64::MAX));
        let (old, new) = (pattern(1, LEN), pattern(2, LEN));
        let (at_host, at_device) = if load { (&new, &old) } else { (&old, &new) };
        bench.host.write(0, at_host).unwrap();
        gpu.write(&bench.device, 0, at_device).unwrap();
        let (mut items, mut wanted) = (Vec::new(), old.clone());
        let mut place = 64;
        for len in [1, 2, 3, 5, 8, 15, 16, 17, 31, 64, 100, 1728, 2047, 2048, 2049, 8448] {
            for (from, to) in (0..18).flat_map(|a| [(a, 0), (0, a), (a, a), (a, 17 - a)]) {
                if place + len + 64 > LEN {
                    break;
                }
                items.push(bench.item(place + from, place + to, len, load));
                wanted[place + to..place + to + len]
                    .copy_from_slice(&new[place + from..place + from + len]);
                place = (place + len + 64).next_multiple_of(32);
            }
        }
        let count = items.len() as u64;
        bench.run(items);
        let mut got = vec![0; LEN];
        if load {
            gpu.read(&bench.device, 0, &mut got).unwrap();
        } else {
            bench.host.read(0, &mut got).unwrap();
        }
        let wrong = got.iter().zip(&wanted).position(|(a, b)| a != b);
        assert_eq!(wrong, None, "first wrong byte (load: {load})");
        if gpu.abilities().fragment_kernel {
            assert_eq!(bench.engine.counters().copied_gathered, count);
        }
    }
}

/// A pool of the node cache, in huge pages where there are any.
pub(crate) fn segments_are_pinned_in_pieces(family: GpuFamily, _name: &str) {
    let Some(gpu) = device(family) else { return };
    let config = SegmentsConfig { prefer: PageTier::Huge2M, ..SegmentsConfig::new(1 << 20, 256) };
    let segments = Segments::create(&config).unwrap();
    let mapped = segments.map().unwrap();
    let begin = Instant::now();
    let policy = RegisterPolicy::AllOrNothing;
    let registration =
        Registration::new(Arc::clone(&mapped), gpu.pinner(64 << 20), policy).unwrap();
    let tiers: Vec<_> = mapped.geometry().segments().iter().map(|s| s.tier).collect();
    tell(&format!("256 MiB of {tiers:?} pinned in 64 MiB pieces: {:?}", begin.elapsed()));
    let (base, len) = mapped.segment_range(0).unwrap();
    // SAFETY: the mapping lives as long as the memory; nobody borrows its bytes.
    let memory = unsafe {
        Memory::from_raw(base, len, ucm_transport::Location::Host, Arc::new(Arc::clone(&mapped)))
    };
    memory.write(0, &pattern(3, len)).unwrap();
    let engine = Arc::new(DeviceEngine::builder(&gpu).build().unwrap());
    let device = gpu.alloc(len).unwrap();
    let src = Addr { region: engine.register(memory).unwrap(), offset: 0 };
    let dst = Addr { region: engine.register(device.clone()).unwrap(), offset: 0 };
    let mut runner = Runner::new(Arc::clone(&engine) as Arc<dyn TransferEngine>);
    // One copy over all pieces.
    let items = vec![Transfer { src, dst, len: len as u64 }];
    let ticket = engine.submit(TransferPlan { items, holds: vec![] }).unwrap();
    drop(registration);
    runner.wait(ticket).result.unwrap();
    let mut got = vec![0; len];
    gpu.read(&device, 0, &mut got).unwrap();
    assert!(got == pattern(3, len));
}

const SHARED: &str = "UCM_HW_SHARED";

pub(crate) fn another_process_opens_memory(family: GpuFamily, name: &str) {
    let Some(gpu) = device(family) else { return };
    const LEN: usize = 3 << 20;
    const OFFSET: usize = 12_345;
    let wanted = pattern(4, LEN);
    if let Ok(text) = std::env::var(SHARED) {
        let bytes: Vec<u8> = (0..text.len() / 2)
            .map(|at| u8::from_str_radix(&text[at * 2..at * 2 + 2], 16).unwrap())
            .collect();
        let handle = SharedMemory::from_bytes(&bytes.try_into().unwrap());
        let memory = gpu.open_shared(&handle).unwrap();
        let mut got = vec![0; LEN];
        gpu.read(&memory, 0, &mut got).unwrap();
        assert!(got == wanted);
        return;
    }
    let whole = gpu.alloc(LEN + OFFSET + 100).unwrap();
    let memory = whole.part(OFFSET, LEN).unwrap();
    gpu.write(&memory, 0, &wanted).unwrap();
    match gpu.share(&memory) {
        Ok(handle) => {
            let text: String = handle.to_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
            let status = Command::new(std::env::current_exe().unwrap())
                .args([name, "--exact", "--ignored"])
                .env(SHARED, text)
                .status()
                .unwrap();
            assert!(status.success());
        }
        Err(reason) => tell(&format!("SKIP memory is not shared here: {reason}")),
    }
}

pub(crate) fn dmabuf_or_a_reason(family: GpuFamily, _name: &str) {
    let Some(gpu) = device(family) else { return };
    let memory = gpu.alloc(4 << 20).unwrap();
    match gpu.dmabuf(&memory.part(5000, 1 << 20).unwrap()) {
        Ok(dmabuf) => {
            assert_eq!((dmabuf.len, dmabuf.offset < 1 << 20), (1 << 20, true));
            tell("dmabuf: exported");
        }
        Err(reason) => tell(&format!("SKIP no dmabuf here: {reason}")),
    }
}

pub(crate) fn peers_or_a_reason(family: GpuFamily, _name: &str) {
    let Some(gpu) = device(family) else { return };
    if Gpu::count(family).unwrap() < 2 {
        return tell("SKIP one device only");
    }
    let peer = Gpu::open(family, 1).unwrap();
    if let Err(reason) = gpu.reach_peer(&peer) {
        return tell(&format!("SKIP no way between devices 0 and 1: {reason}"));
    }
    let settings = |builder: DeviceEngineBuilder| builder.peer(&peer);
    conformance(&OnDevice {
        gpus: vec![gpu.clone(), peer.clone()],
        source: Place::Device(gpu),
        destination: Place::Device(peer.clone()),
        settings,
    });
}

/// Fragments against one big copy of as many bytes, both ways, on each path; four streams.
pub(crate) fn figures(family: GpuFamily, _name: &str) {
    let Some(gpu) = device(family) else { return };
    tell(&format!("{:?} {:?}", gpu.info(), gpu.abilities()));
    const TRIES: usize = 15;
    for kernel in [KernelUse::Measured, KernelUse::Never, KernelUse::UpTo(u64::MAX)] {
        let mut bench = Bench::new(&gpu, 256 << 20, kernel);
        tell(&format!("kernel {kernel:?}: {:?}", bench.engine.switch_point()));
        for (count, len) in [(61, 73_728), (532, 8448), (2602, 1728), (61, 1728)] {
            for load in [true, false] {
                let pieces: Vec<Transfer> = (0..count)
                    .map(|n| bench.item(n * (len + 64), (count - n) * (len + 64), len, load))
                    .collect();
                let whole = vec![bench.item(0, 0, count * len, load)];
                let mut times: [Vec<Duration>; 2] = Default::default();
                for _ in 0..TRIES {
                    for (items, times) in [&pieces, &whole].into_iter().zip(&mut times) {
                        let begin = Instant::now();
                        bench.run(items.clone());
                        times.push(begin.elapsed());
                    }
                }
                let median = |times: &mut Vec<Duration>| {
                    times.sort_unstable();
                    times[TRIES / 2].as_secs_f64()
                };
                let [pieces, whole] = &mut times;
                let (pieces, whole) = (median(pieces), median(whole));
                let way = if load { "to device" } else { "from device" };
                tell(&format!(
                    "{count} x {len} {way}: {:.1} us, {:.1} GB/s; whole {:.1} us; ratio {:.2}",
                    pieces * 1e6,
                    (count * len) as f64 / pieces / 1e9,
                    whole * 1e6,
                    pieces / whole
                ));
            }
        }
        streams(&mut bench);
    }
    assert_eq!(gpu.location(), Gpu::open(family, 0).unwrap().location());
}

/// Four plans at once against one after the other.
fn streams(bench: &mut Bench) {
    const BYTES: usize = 32 << 20;
    let plans: Vec<Vec<Transfer>> =
        (0..4).map(|n| vec![bench.item(n * BYTES, n * BYTES, BYTES, true)]).collect();
    let begin = Instant::now();
    plans.iter().for_each(|items| bench.run(items.clone()));
    let one_by_one = begin.elapsed();
    let begin = Instant::now();
    let tickets: Vec<_> = plans
        .into_iter()
        .map(|items| bench.engine.submit(TransferPlan { items, holds: vec![] }).unwrap())
        .collect();
    tickets.into_iter().for_each(|ticket| drop(bench.runner.wait(ticket)));
    let at_once = begin.elapsed();
    tell(&format!(
        "4 x 32 MiB on {}: {one_by_one:?} one by one, {at_once:?} at once",
        bench.gpu.info().name
    ));
}
