//! The raw copies of the host engine, and how a plan is split among workers.
//!
//! **Invariant:** a [`CopyOp`] is built only from ranges checked against their regions, and lives
//! only as long as the region lease of its plan.
//!
//! Why plain `memcpy`, in pieces of 512 KiB. Measured on a 2-core EPYC (Zen 5, 32 MiB L3), GB/s,
//! medians of 7 interleaved runs, copies of 256 KiB (4 MiB in brackets):
//!
//! | working set | `memcpy` | `rep movsb` | AVX2 streaming stores | AVX-512 streaming stores |
//! |---|---|---|---|---|
//! | 4 MiB, in L3 | 61 (52) | 61 (61) | 41 (42) | 41 (43) |
//! | 16 MiB, about L3 | 39 (26) | 45 (42) | 36 (39) | 39 (41) |
//! | 512 MiB, in memory | 23 (20) | 24 (23) | 24 (23) | 27 (26) |
//!
//! Streaming gains 15 % when nothing is cached and loses a third when the destination is; whoever
//! reads the destination next pays again. A copier does not know which case it has, so it is not
//! kept. What does pay everywhere is to stay below the size at which glibc itself changes to
//! streaming (somewhat below 1 MiB here, it depends on the share of the L3): `memcpy` in pieces,
//! GB/s, medians of 15 interleaved runs on the same machine with other load,
//!
//! | working set, copy | 128 KiB | 256 KiB | 512 KiB | 1 MiB | whole |
//! |---|---|---|---|---|---|
//! | 16 MiB, 1 MiB | 57 | 56 | 58 | 46 | 46 |
//! | 64 MiB, 4 MiB | 20 | 22 | 21 | 18 | 17 |
//! | 512 MiB, 4 MiB | 7.8 | 7.7 | 8.6 | 6.3 | 6.3 |

use std::{ops::Range, ptr::NonNull};

use crate::{RegionLease, Transfer, TransferError};

/// Longest single `memcpy`; see the table above.
const PIECE_BYTES: usize = 512 << 10;

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
        let mut ops = Vec::with_capacity(items.len());
        for t in items {
            let (src, dst) = (address(t.src, t.len)?, address(t.dst, t.len)?);
            ops.push(Self { src, dst, len: usize::try_from(t.len).unwrap_or(usize::MAX) });
        }
        Ok(ops)
    }

    /// Moves the bytes.
    ///
    /// # Safety
    /// The lease that this operation was resolved with must still be alive.
    pub(super) unsafe fn run(self) {
        // Regions may be parts of one allocation, so source and destination may overlap in a way
        // no planner sees; `copy` is defined for that, and as fast as the other.
        let mut done = 0;
        while done < self.len {
            let len = PIECE_BYTES.min(self.len - done);
            // SAFETY: done < len, so the source stays in its range.
            let src = unsafe { self.src.add(done) };
            // SAFETY: as above, for the destination.
            let dst = unsafe { self.dst.add(done) };
            // SAFETY: both ranges lie in live mappings (caller and `resolve`); no references to
            // the bytes exist in this process (`Memory::from_raw`).
            unsafe { std::ptr::copy(src.as_ptr(), dst.as_ptr(), len) };
            done += len;
        }
    }
}

/// Cuts long copies and groups short ones into runs of about `span_bytes`; `usize::MAX` makes one.
pub(super) fn spans(ops: Vec<CopyOp>, span_bytes: usize) -> (Vec<CopyOp>, Vec<Range<usize>>) {
    if span_bytes == usize::MAX || ops.is_empty() {
        let whole = 0..ops.len();
        return (ops, if whole.is_empty() { Vec::new() } else { vec![whole] });
    }
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
