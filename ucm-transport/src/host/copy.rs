//! The raw copies of the host engine, and how a plan is split among workers.
//!
//! **Invariant:** a [`CopyOp`] is built only from ranges checked against their regions, and lives
//! only as long as the region lease of its plan.

use std::{ops::Range, ptr::NonNull};

use crate::{RegionLease, Transfer, TransferError};

/// One raw copy.
#[derive(Clone, Copy, Debug)]
pub(super) struct CopyOp {
    src: NonNull<u8>,
    dst: NonNull<u8>,
    len: usize,
}

// SAFETY: plain addresses; who may use them when is settled by the plan's region lease.
unsafe impl Send for CopyOp {}
// SAFETY: as above; a shared reference gives access to the addresses only.
unsafe impl Sync for CopyOp {}

impl CopyOp {
    /// Turns planned items into addresses. The planner has checked all ranges; the checks here
    /// keep the copies safe even if it had not.
    pub(super) fn resolve(
        items: &[Transfer],
        lease: &RegionLease<()>,
    ) -> Result<Vec<Self>, TransferError> {
        let address = |at: crate::Addr, len: u64| -> Result<NonNull<u8>, TransferError> {
            let region = lease.find(at.region).ok_or_else(|| TransferError::stale(at.region))?;
            let size = region.memory().len() as u64;
            match at.offset.checked_add(len) {
                Some(end) if end <= size => {
                    // The offset is below a `usize` length, so it fits.
                    let offset = usize::try_from(at.offset).unwrap_or(usize::MAX);
                    // SAFETY: offset + len <= size of the mapping, which the lease keeps alive.
                    Ok(unsafe { region.memory().as_ptr().add(offset) })
                }
                _ => Err(TransferError::out_of_bounds(at.offset, len, size)),
            }
        };
        let op = |t: &Transfer| {
            let (src, dst) = (address(t.src, t.len)?, address(t.dst, t.len)?);
            Ok(Self { src, dst, len: usize::try_from(t.len).unwrap_or(usize::MAX) })
        };
        items.iter().map(op).collect()
    }

    /// Moves the bytes.
    ///
    /// # Safety
    /// The lease that this operation was resolved with must still be alive.
    pub(super) unsafe fn run(self) {
        // Regions may be parts of one allocation, so source and destination may overlap in a way
        // no planner sees; `copy` is defined for that, and as fast as the other.
        // SAFETY: both ranges lie in live mappings (caller and `resolve`); no references to the
        // bytes exist in this process (`Memory::from_raw`).
        unsafe { std::ptr::copy(self.src.as_ptr(), self.dst.as_ptr(), self.len) };
    }
}

/// Cuts long copies and groups short ones into runs of about `span_bytes`.
pub(super) fn spans(ops: Vec<CopyOp>, span_bytes: usize) -> (Vec<CopyOp>, Vec<Range<usize>>) {
    let mut out = Vec::with_capacity(ops.len());
    let mut spans = Vec::new();
    let (mut start, mut filled) = (0, 0usize);
    for op in ops {
        let mut rest = op;
        while rest.len > 0 {
            // Do not leave a crumb: a remainder below half a span stays with the last piece.
            let room = span_bytes.saturating_sub(filled).max(1);
            let len = if rest.len < room + span_bytes / 2 { rest.len } else { room };
            out.push(CopyOp { len, ..rest });
            filled += len;
            rest.len -= len;
            // SAFETY: len <= the length before, so both stay inside their ranges.
            rest.src = unsafe { rest.src.add(len) };
            // SAFETY: as above.
            rest.dst = unsafe { rest.dst.add(len) };
            if filled >= span_bytes {
                spans.push(start..out.len());
                (start, filled) = (out.len(), 0);
            }
        }
    }
    if start < out.len() {
        spans.push(start..out.len());
    }
    (out, spans)
}
