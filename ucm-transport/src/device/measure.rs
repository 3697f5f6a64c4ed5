//! Up to which size the kernel moves fragments faster than the copy engines do, on this device.
//!
//! **Invariant:** memory of a measurement that does not end is kept, never freed under it.

use std::{
    mem::ManuallyDrop,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    driver::{CopyOp, Fragment},
    error::{Call, DriverError},
    handles::{DeviceBytes, Event, Scratch, Stream, settled},
    opened::Device,
    work::Direction,
};

/// Sizes that are tried, as fragments of KV blocks have them.
const SIZES: [usize; 6] = [512, 1728, 4096, 8448, 37_440, 73_728];
/// Fragments of one try.
const COUNT: usize = 64;
/// The best of so many tries counts.
const TRIES: usize = 3;
/// Longest time of one try.
const DEADLINE: Duration = Duration::from_secs(5);
/// Longest time to prove that a try which failed has ended.
const SETTLE: Duration = Duration::from_secs(1);

/// When small fragments go to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum KernelUse {
    /// Up to the size that a measurement at the start finds, for each direction.
    #[default]
    Measured,
    /// Up to this mean size in bytes.
    UpTo(u64),
    /// Never.
    Never,
}

/// Fragments of at most this mean size go to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct SwitchPoint {
    /// From the host to the device, and within the device; 0: never.
    pub to_device: u64,
    /// From the device to the host; 0: never.
    pub from_device: u64,
}

impl SwitchPoint {
    pub(super) fn of(device: &Arc<Device>, wanted: KernelUse) -> Self {
        let abilities = device.abilities();
        if !abilities.gather || !abilities.host_addresses {
            return Self::default();
        }
        match wanted {
            KernelUse::Never => Self::default(),
            KernelUse::UpTo(bytes) => Self { to_device: bytes, from_device: bytes },
            KernelUse::Measured => measure(device).unwrap_or_else(|error| {
                tracing::warn!("the kernel for fragments is not used: {error}");
                Self::default()
            }),
        }
    }
}

/// What a try works on. Kept for ever when a try does not end.
struct Bench {
    device: Arc<Device>,
    stream: Stream,
    event: Event,
    host: Scratch,
    list: Scratch,
    memory: DeviceBytes,
}

fn measure(device: &Arc<Device>) -> Call<SwitchPoint> {
    let bytes = SIZES.iter().max().copied().unwrap_or(0) * COUNT * 2;
    let mut bench = ManuallyDrop::new(Bench {
        device: Arc::clone(device),
        stream: Stream::new(device, false)?,
        event: Event::new(device)?,
        host: Scratch::new(device, bytes)?,
        list: Scratch::new(device, COUNT * size_of::<Fragment>())?,
        memory: DeviceBytes::alloc(device, bytes)?,
    });
    let found = try_all(&mut bench);
    if found.is_ok() || settled(&bench.event, &bench.stream, SETTLE) {
        drop(ManuallyDrop::into_inner(bench));
    }
    found
}

fn try_all(bench: &mut Bench) -> Call<SwitchPoint> {
    let mut switch = SwitchPoint::default();
    for direction in [Direction::ToDevice, Direction::FromDevice] {
        for size in SIZES {
            let by_kernel = best(bench, size, direction, true)?;
            let by_copies = best(bench, size, direction, false)?;
            if by_kernel >= by_copies {
                break;
            }
            match direction {
                Direction::ToDevice => switch.to_device = size as u64,
                Direction::FromDevice => switch.from_device = size as u64,
            }
        }
    }
    Ok(switch)
}

fn best(bench: &mut Bench, size: usize, direction: Direction, kernel: bool) -> Call<Duration> {
    let mut best = Duration::MAX;
    for _ in 0..TRIES {
        best = best.min(one_try(bench, size, direction, kernel)?);
    }
    Ok(best)
}

fn one_try(bench: &mut Bench, size: usize, direction: Direction, kernel: bool) -> Call<Duration> {
    // Gaps between the fragments, so that nothing can be merged.
    let ops: Vec<CopyOp> = (0..COUNT)
        .map(|at| {
            let offset = (at * size * 2) as u64;
            let (host, device) = (bench.host.addr() + offset, bench.memory.addr() + offset);
            match direction {
                Direction::ToDevice => CopyOp { dst: device, src: host, len: size },
                Direction::FromDevice => CopyOp { dst: host, src: device, len: size },
            }
        })
        .collect();
    let fragments: Vec<Fragment> =
        ops.iter().map(|op| Fragment { src: op.src, dst: op.dst, len: op.len as u64 }).collect();
    let begin = Instant::now();
    let list = bench.list.put(&fragments);
    let entered = bench.device.enter()?;
    let stream = bench.stream.raw();
    let issued = match (kernel, list, entered.abilities().batch) {
        (true, Some(list), _) => {
            let count = u32::try_from(COUNT).unwrap_or(0);
            // SAFETY: all memory belongs to the bench, which is dropped after the event or never.
            unsafe { entered.gather(list, count, stream) }
        }
        (false, _, true) => {
            // SAFETY: as above.
            unsafe { entered.copy_batch(&ops, stream) }
        }
        _ => ops.iter().try_for_each(|op| {
            // SAFETY: as above.
            unsafe { entered.copy(*op, stream) }
        }),
    };
    drop(entered);
    issued?;
    bench.event.record(&bench.stream)?;
    while !bench.event.has_ended()? {
        if begin.elapsed() > DEADLINE {
            return Err(DriverError::nonsense("a measurement", "it does not end"));
        }
        std::thread::yield_now();
    }
    Ok(begin.elapsed())
}
