//! Finding ranges of one plan that must not overlap.
//!
//! **Invariant:** a plan that passes has the same result in whatever order its items are moved.

use crate::{Addr, RegionId, Transfer, TransferError};

/// Refuses overlapping destinations, and sources that overlap a destination. All items were found
/// to lie in their regions.
///
/// # Errors
/// `Invalid`, naming both ranges.
pub(super) fn check(items: &[Transfer]) -> Result<(), TransferError> {
    let in_order = items
        .iter()
        .zip(items.iter().skip(1))
        .all(|(a, b)| (a.dst.region, a.dst.offset + (a.len - 1)) < (b.dst.region, b.dst.offset));
    let sources_apart = match (items.first(), regions_differ(items)) {
        (None, _) => return Ok(()),
        (Some(_), apart) => apart,
    };
    // The usual plan: destinations ascend, and no region is both read and written.
    if in_order && sources_apart {
        return Ok(());
    }
    let destinations = Destinations::new(items, in_order)?;
    if !sources_apart {
        destinations.check_sources(items)?;
    }
    Ok(())
}

/// Whether no region is both source and destination; may say no without being sure.
fn regions_differ(items: &[Transfer]) -> bool {
    let Some(first) = items.first() else { return true };
    let (src, dst) = (first.src.region, first.dst.region);
    let (one_src, one_dst) = items
        .iter()
        .fold((true, true), |(s, d), t| (s & (t.src.region == src), d & (t.dst.region == dst)));
    match (one_src, one_dst) {
        (true, true) => src != dst,
        (true, false) => items.iter().all(|t| t.dst.region != src),
        (false, true) => items.iter().all(|t| t.src.region != dst),
        (false, false) => false,
    }
}

/// First and last byte of a destination; ordered by place.
type Piece = (RegionId, u64, u64);

fn piece(at: Addr, len: u64) -> Piece {
    // No overflow: the range lies in its region, and is not empty.
    (at.region, at.offset, at.offset + (len - 1))
}

/// All destinations in order, found not to overlap.
struct Destinations(Vec<Piece>);

impl Destinations {
    fn new(items: &[Transfer], in_order: bool) -> Result<Self, TransferError> {
        let one_region =
            items.iter().zip(items.iter().skip(1)).all(|(a, b)| a.dst.region == b.dst.region);
        let mut all: Vec<Piece> = items.iter().map(|t| piece(t.dst, t.len)).collect();
        if in_order {
            return Ok(Self(all));
        }
        if one_region {
            all.sort_unstable_by_key(|p| p.1);
        } else {
            all.sort_unstable();
        }
        for (a, b) in all.iter().zip(all.iter().skip(1)) {
            if a.0 == b.0 && b.1 <= a.2 {
                return Err(TransferError::invalid(format!(
                    "destinations {}..={} and {}..={} of region {} overlap",
                    a.1, a.2, b.1, b.2, a.0.index
                )));
            }
        }
        Ok(Self(all))
    }

    fn check_sources(&self, items: &[Transfer]) -> Result<(), TransferError> {
        for t in items {
            let (region, first, last) = piece(t.src, t.len);
            let next = self.0.partition_point(|d| (d.0, d.2) < (region, first));
            if let Some(d) = self.0.get(next).filter(|d| d.0 == region && d.1 <= last) {
                return Err(TransferError::invalid(format!(
                    "source {first}..={last} overlaps destination {}..={} of the same region {}",
                    d.1, d.2, region.index
                )));
            }
        }
        Ok(())
    }
}
