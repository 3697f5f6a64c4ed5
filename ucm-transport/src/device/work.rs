//! From a planned transfer to addresses: what goes to the driver, in runs of one direction.
//!
//! **Invariant:** every address lies in a region of the plan's lease, and no copy crosses the border
//! of two pinned pieces.

use std::ops::Range;

use super::{driver::CopyOp, pins::HostPins};
use crate::{Addr, Location, Planned, RegionLease, TransferError};

/// Which way a run of copies goes, as seen from the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    /// The destination is device memory.
    ToDevice,
    /// The destination is host memory.
    FromDevice,
}

/// Copies of one direction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) ops: Range<usize>,
    pub(super) direction: Direction,
    pub(super) bytes: u64,
    /// Whether all of its host memory is pinned: batches and kernels want that.
    pub(super) pinned: bool,
}

/// A plan as the driver gets it.
#[derive(Debug, Default)]
pub(super) struct Work {
    pub(super) ops: Vec<CopyOp>,
    pub(super) runs: Vec<Run>,
    /// Bytes whose host side is not pinned: they take the slow path.
    pub(super) unpinned_bytes: u64,
}

/// An end of an item, resolved.
struct Side<'a> {
    addr: u64,
    pins: &'a HostPins,
    on_host: bool,
}

impl Work {
    /// Turns planned items into copies. The planner has checked all ranges; the checks here keep the
    /// copies safe even if it had not.
    pub(super) fn resolve(
        planned: &Planned,
        lease: &RegionLease<HostPins>,
    ) -> Result<Self, TransferError> {
        let mut this = Self::default();
        for group in &planned.groups {
            let direction =
                if on_host(group.dst) { Direction::FromDevice } else { Direction::ToDevice };
            let mut run = Run { ops: this.ops.len()..0, direction, bytes: 0, pinned: true };
            for item in planned.items.get(group.items.clone()).unwrap_or_default() {
                let src = side(lease, item.src, item.len)?;
                let dst = side(lease, item.dst, item.len)?;
                run.bytes += item.len;
                let unpinned = |side: &Side<'_>| side.on_host && !side.pins.pinned;
                if unpinned(&src) || unpinned(&dst) {
                    this.unpinned_bytes += item.len;
                    run.pinned = false;
                }
                let mut done = 0;
                while done < item.len {
                    let (from, to) = (src.addr + done, dst.addr + done);
                    let len = src.pins.together(from, item.len - done);
                    let len = dst.pins.together(to, len);
                    let bytes = usize::try_from(len)
                        .map_err(|_| TransferError::invalid(format!("a piece of {len} bytes")))?;
                    this.ops.push(CopyOp { dst: to, src: from, len: bytes });
                    done += len;
                }
            }
            run.ops.end = this.ops.len();
            this.runs.push(run);
        }
        Ok(this)
    }
}

fn on_host(location: Location) -> bool {
    matches!(location, Location::Host | Location::PinnedHost)
}

fn side<'a>(
    lease: &'a RegionLease<HostPins>,
    at: Addr,
    len: u64,
) -> Result<Side<'a>, TransferError> {
    let region = lease.find(at.region).ok_or_else(|| TransferError::stale(at.region))?;
    let memory = region.memory();
    let size = memory.len() as u64;
    match at.offset.checked_add(len) {
        Some(end) if end <= size => Ok(Side {
            addr: memory.as_ptr().as_ptr().expose_provenance() as u64 + at.offset,
            pins: region.attached(),
            on_host: on_host(memory.location()),
        }),
        _ => Err(TransferError::out_of_bounds(at.offset, len, size)),
    }
}
