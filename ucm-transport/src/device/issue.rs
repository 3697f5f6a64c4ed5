//! Gives the copies of a plan to the driver: one by one, many by one call, or by the kernel.
//!
//! **Invariant:** once a copy call was made, the plan counts as begun, whatever the call answered:
//! only an event recorded afterwards tells that its memory is free.

use std::sync::atomic::Ordering;

use super::{
    driver::{CopyOp, Driver, Fragment, RawStream},
    error::{Class, DriverError},
    handles::Scratch,
    shared::Shared,
    work::{Direction, Run, Work},
};

/// Most copies by one batch call.
const BATCH: usize = 8192;
/// Fewer fragments than this are not worth a kernel.
const FEW: usize = 8;

/// What became of a plan's copies.
#[derive(Debug, Default)]
pub(super) struct Issued {
    /// Something was given to the driver.
    pub(super) begun: bool,
    /// Why not everything was.
    pub(super) error: Option<DriverError>,
    /// What the kernel reads; free when the plan has ended.
    pub(super) scratch: Vec<Scratch>,
    pub(super) single: u64,
    pub(super) batched: u64,
    pub(super) gathered: u64,
}

/// Gives all copies to the stream, up to the first failure.
pub(super) fn issue(
    shared: &Shared,
    driver: &dyn Driver,
    stream: RawStream,
    work: &Work,
) -> Issued {
    let mut issued = Issued::default();
    for run in &work.runs {
        let ops = work.ops.get(run.ops.clone()).unwrap_or_default();
        let done = if by_kernel(shared, run, ops.len()) {
            gather(shared, driver, stream, ops, &mut issued)
        } else {
            copies(shared, driver, stream, ops, run.pinned, &mut issued)
        };
        if let Err(error) = done {
            issued.error = Some(error);
            break;
        }
    }
    issued
}

/// Small fragments are cheaper for a kernel than for the copy engines; the border was measured.
fn by_kernel(shared: &Shared, run: &Run, count: usize) -> bool {
    let up_to = match run.direction {
        Direction::ToDevice => shared.switch.to_device,
        Direction::FromDevice => shared.switch.from_device,
    };
    let abilities = shared.device.abilities();
    abilities.gather
        && abilities.host_addresses
        && run.pinned
        && count >= FEW
        && run.bytes / (count as u64) <= up_to
}

fn gather(
    shared: &Shared,
    driver: &dyn Driver,
    stream: RawStream,
    ops: &[CopyOp],
    issued: &mut Issued,
) -> Result<(), DriverError> {
    let fragments: Vec<Fragment> =
        ops.iter().map(|op| Fragment { src: op.src, dst: op.dst, len: op.len as u64 }).collect();
    let scratch = shared.scratch(size_of_val(fragments.as_slice()));
    let put = scratch.and_then(|mut scratch| {
        let at = scratch.put(&fragments);
        at.map(|at| (at, scratch))
            .ok_or_else(|| DriverError::nonsense("host_alloc", "less memory than asked for"))
    });
    let (at, scratch) = match put {
        Ok(put) => put,
        Err(error) if error.class == Class::Lost => return Err(error),
        Err(error) => {
            tracing::warn!("no memory for the kernel's list, copying without it: {error}");
            return copies(shared, driver, stream, ops, true, issued);
        }
    };
    issued.begun = true;
    issued.scratch.push(scratch);
    let count = u32::try_from(fragments.len()).unwrap_or(u32::MAX);
    // SAFETY: the device is current; the fragments lie in regions of the plan's lease, and list and
    // lease stay until the plan's event has ended.
    unsafe { driver.gather(at, count, stream) }?;
    issued.gathered += u64::from(count);
    Ok(())
}

fn copies(
    shared: &Shared,
    driver: &dyn Driver,
    stream: RawStream,
    ops: &[CopyOp],
    pinned: bool,
    issued: &mut Issued,
) -> Result<(), DriverError> {
    for chunk in ops.chunks(BATCH) {
        let batch = pinned
            && chunk.len() > 1
            && driver.abilities().batch
            && !shared.batch_refused.load(Ordering::Relaxed);
        if batch {
            issued.begun = true;
            // SAFETY: the device is current, and all ranges lie in regions of the plan's lease, which
            // stays until the plan's event has ended.
            match unsafe { driver.copy_batch(chunk, stream) } {
                Ok(()) => {
                    issued.batched += chunk.len() as u64;
                    continue;
                }
                Err(error) if error.class == Class::NotSupported => {
                    // Some memory cannot be batched on some drivers. The same bytes to the same
                    // places once more do no harm.
                    tracing::warn!("batch copies are not used any more: {error}");
                    shared.batch_refused.store(true, Ordering::Relaxed);
                }
                Err(error) => return Err(error),
            }
        }
        for op in chunk {
            issued.begun = true;
            // SAFETY: as above.
            unsafe { driver.copy(*op, stream) }?;
            issued.single += 1;
        }
    }
    Ok(())
}
