//! Copies that the caller waits for, for tools and tests.
//!
//! **Invariant:** the driver sees memory of our own only, which is kept if a copy does not end: the
//! caller's memory is free when the call returns, whatever it returns.

use std::{
    mem::ManuallyDrop,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    driver::CopyOp,
    error::{Call, DriverError},
    handles::{Event, Scratch, Stream, settled},
    opened::Device,
};
use crate::{ErrorKind, Memory, TransferError};

/// Longest wait for one copy.
const DEADLINE: Duration = Duration::from_secs(30);
/// Longest time to prove that a copy which failed has ended.
const SETTLE: Duration = Duration::from_secs(1);
/// Copies go through a buffer of this size.
const CHUNK: usize = 1 << 20;

/// Copies bytes of device memory to `into`.
pub(super) fn read(
    device: &Arc<Device>,
    memory: &Memory,
    offset: usize,
    into: &mut [u8],
) -> Result<(), TransferError> {
    let addr = range(device, memory, offset, into.len())?;
    let staged = |call: DriverError| call.into_transfer(ErrorKind::Failed);
    let mut done = 0;
    for part in into.chunks_mut(CHUNK) {
        let buffer = Scratch::new(device, part.len()).map_err(staged)?;
        let op = CopyOp { dst: buffer.addr(), src: addr + done, len: part.len() };
        let buffer = copy(device, op, memory, buffer).map_err(staged)?;
        if let Some(from) = buffer.pointer() {
            // SAFETY: the buffer is ours and as long as the part; the copy into it has ended.
            unsafe {
                std::ptr::copy_nonoverlapping(from.as_ptr(), part.as_mut_ptr(), part.len());
            }
        }
        done += part.len() as u64;
    }
    Ok(())
}

/// Copies `from` to device memory.
pub(super) fn write(
    device: &Arc<Device>,
    memory: &Memory,
    offset: usize,
    from: &[u8],
) -> Result<(), TransferError> {
    let addr = range(device, memory, offset, from.len())?;
    let staged = |call: DriverError| call.into_transfer(ErrorKind::Failed);
    let mut done = 0;
    for part in from.chunks(CHUNK) {
        let buffer = Scratch::new(device, part.len()).map_err(staged)?;
        if let Some(to) = buffer.pointer() {
            // SAFETY: the buffer is ours, as long as the part, and nobody else knows it yet.
            unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), to.as_ptr(), part.len()) };
        }
        let op = CopyOp { dst: addr + done, src: buffer.addr(), len: part.len() };
        copy(device, op, memory, buffer).map_err(staged)?;
        done += part.len() as u64;
    }
    Ok(())
}

fn range(
    device: &Device,
    memory: &Memory,
    offset: usize,
    len: usize,
) -> Result<u64, TransferError> {
    if memory.location() != device.location() {
        let message = format!("{:?} is not memory of {:?}", memory.location(), device.location());
        return Err(TransferError::unsupported(message));
    }
    match offset.checked_add(len) {
        Some(end) if end <= memory.len() => {
            Ok(memory.as_ptr().as_ptr().expose_provenance() as u64 + offset as u64)
        }
        _ => Err(TransferError::out_of_bounds(offset as u64, len as u64, memory.len() as u64)),
    }
}

/// Does one copy and waits for it; gives the buffer back. If the copy is not proved to have ended,
/// everything it may touch is kept for ever.
fn copy(device: &Arc<Device>, op: CopyOp, memory: &Memory, buffer: Scratch) -> Call<Scratch> {
    let (stream, event) = (Stream::new(device, false)?, Event::new(device)?);
    let kept = ManuallyDrop::new((buffer, stream, event, memory.clone()));
    let (_, stream, event, _) = &*kept;
    let copied = one_copy(device, op, stream, event);
    if copied.is_ok() || settled(event, stream, SETTLE) {
        let (buffer, ..) = ManuallyDrop::into_inner(kept);
        return copied.map(|()| buffer);
    }
    copied.and(Err(DriverError::nonsense("a copy", "its memory is given up")))
}

fn one_copy(device: &Device, op: CopyOp, stream: &Stream, event: &Event) -> Call<()> {
    let entered = device.enter()?;
    // SAFETY: both ranges were checked; their owners are kept until the event has ended.
    unsafe { entered.copy(op, stream.raw()) }?;
    drop(entered);
    event.record(stream)?;
    let begin = Instant::now();
    while !event.has_ended()? {
        if begin.elapsed() > DEADLINE {
            return Err(DriverError::nonsense("a copy", format!("not ended in {DEADLINE:?}")));
        }
        std::thread::sleep(Duration::from_micros(20));
    }
    Ok(())
}
