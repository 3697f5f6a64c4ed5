//! The one planner of all engines: checks, sorts, merges and cuts items. No IO, no clock, no state.
//!
//! **Invariant:** the planned items move exactly the bytes that the given items ask for: the map
//! from destination byte to source byte is the same before and after.

use std::ops::Range;

use crate::{ErrorKind, Location, RegionId, Transfer, TransferError};

/// What the planner must know about a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionInfo {
    /// Length in bytes.
    pub len: u64,
    /// Where its bytes live.
    pub location: Location,
}

/// Limits of an engine, applied after merging.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanLimits {
    /// Most bytes of one planned item; longer ones are cut. Zero counts as one.
    pub max_item_bytes: u64,
    /// Most items of one [`Group`]; longer runs become several groups. Zero counts as one.
    pub max_group_items: usize,
}

impl PlanLimits {
    /// No limits: items are merged as far as they go.
    pub const NONE: Self = Self { max_item_bytes: u64::MAX, max_group_items: usize::MAX };
}

/// A run of planned items between one pair of locations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Location of all sources.
    pub src: Location,
    /// Location of all destinations.
    pub dst: Location,
    /// Which of [`Planned::items`].
    pub items: Range<usize>,
}

/// Items ready for an engine, sorted by (location pair, source, destination).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Planned {
    /// Merged and cut items.
    pub items: Vec<Transfer>,
    /// The items by location pair, in order, none empty.
    pub groups: Vec<Group>,
    /// Sum of all lengths.
    pub bytes: u64,
}

/// Plans `items` against the regions that `region` knows and the location pairs that `supports`
/// allows. Everything is checked before anything is returned.
///
/// # Errors
/// `Invalid` for a zero length, a sum over `u64::MAX`, two destinations that overlap, or a source
/// that overlaps a destination (the order of items carries no meaning, so the result would be
/// undefined); `StaleRegion` for an unknown handle; `OutOfBounds` when a range leaves its region;
/// `Unsupported` for a location pair that the engine does not serve.
pub fn plan(
    items: &[Transfer],
    limits: PlanLimits,
    region: impl Fn(RegionId) -> Option<RegionInfo>,
    supports: impl Fn(Location, Location) -> bool,
) -> Result<Planned, TransferError> {
    let mut work = Vec::with_capacity(items.len());
    let mut bytes = 0u64;
    let mut src_info = Cached::default();
    let mut dst_info = Cached::default();
    for (index, item) in items.iter().enumerate() {
        if item.len == 0 {
            return Err(TransferError::invalid(format!("item {index} has a length of zero")));
        }
        let src = src_info.look_up(item.src.region, &region)?;
        let dst = dst_info.look_up(item.dst.region, &region)?;
        in_bounds(item.src.offset, item.len, src.len)?;
        in_bounds(item.dst.offset, item.len, dst.len)?;
        bytes = bytes.checked_add(item.len).ok_or_else(|| {
            TransferError::invalid(format!("the plan asks for more than {} bytes", u64::MAX))
        })?;
        work.push(Work { pair: (src.location, dst.location), item: *item });
    }
    if let Some(bad) = first_unsupported(&work, &supports) {
        let (src, dst) = bad;
        return Err(TransferError::unsupported(format!(
            "no way from {src:?} to {dst:?} in this engine"
        )));
    }
    check_overlaps(items)?;
    if !work.is_sorted_by_key(Work::key) {
        work.sort_unstable_by_key(Work::key);
    }
    merge(&mut work);
    Ok(cut(&work, limits, bytes))
}

/// One item with the locations of its ends.
#[derive(Clone, Copy)]
struct Work {
    pair: (Location, Location),
    item: Transfer,
}

impl Work {
    fn key(&self) -> ((Location, Location), RegionId, RegionId, u64, u64) {
        let Transfer { src, dst, .. } = self.item;
        (self.pair, src.region, dst.region, src.offset, dst.offset)
    }

    fn same_regions(&self, other: &Self) -> bool {
        self.item.src.region == other.item.src.region
            && self.item.dst.region == other.item.dst.region
    }

    /// Whether `next` goes on exactly where this item ends, on both sides.
    fn continues_with(&self, next: &Self) -> bool {
        self.same_regions(next)
            && next.item.src.offset - self.item.src.offset == self.item.len
            && next.item.dst.offset.wrapping_sub(self.item.dst.offset) == self.item.len
    }
}

/// The last region looked up: items come in runs of the same region.
#[derive(Default)]
struct Cached(Option<(RegionId, RegionInfo)>);

impl Cached {
    fn look_up(
        &mut self,
        id: RegionId,
        region: impl Fn(RegionId) -> Option<RegionInfo>,
    ) -> Result<RegionInfo, TransferError> {
        match self.0 {
            Some((known, info)) if known == id => Ok(info),
            _ => {
                let info = region(id).ok_or_else(|| TransferError::stale(id))?;
                self.0 = Some((id, info));
                Ok(info)
            }
        }
    }
}

fn in_bounds(offset: u64, len: u64, region: u64) -> Result<(), TransferError> {
    match offset.checked_add(len) {
        Some(end) if end <= region => Ok(()),
        _ => Err(TransferError::out_of_bounds(offset, len, region)),
    }
}

fn first_unsupported(
    work: &[Work],
    supports: impl Fn(Location, Location) -> bool,
) -> Option<(Location, Location)> {
    let mut last = None;
    for w in work {
        if last != Some(w.pair) {
            if !supports(w.pair.0, w.pair.1) {
                return Some(w.pair);
            }
            last = Some(w.pair);
        }
    }
    None
}

/// A byte range of one region; ordered by place.
type Piece = (RegionId, u64, u64);

fn check_overlaps(items: &[Transfer]) -> Result<(), TransferError> {
    let end = |offset: u64, len: u64| offset.saturating_add(len);
    let mut dsts: Vec<Piece> = Vec::with_capacity(items.len());
    dsts.extend(items.iter().map(|t| (t.dst.region, t.dst.offset, end(t.dst.offset, t.len))));
    if !dsts.is_sorted() {
        dsts.sort_unstable();
    }
    for (a, b) in dsts.iter().zip(dsts.iter().skip(1)) {
        if a.0 == b.0 && b.1 < a.2 {
            return Err(TransferError::invalid(format!(
                "destinations {}..{} and {}..{} of region {} overlap",
                a.1, a.2, b.1, b.2, a.0.index
            )));
        }
    }
    let written = |region: RegionId| {
        let first = dsts.partition_point(|d| d.0 < region);
        dsts.get(first).is_some_and(|d| d.0 == region)
    };
    // Sources are few regions in long runs: ask once per run, and search only where both happen.
    let mut run: Option<(RegionId, bool)> = None;
    for t in items {
        let both = match run {
            Some((region, both)) if region == t.src.region => both,
            _ => written(t.src.region),
        };
        run = Some((t.src.region, both));
        if !both {
            continue;
        }
        let src: Piece = (t.src.region, t.src.offset, end(t.src.offset, t.len));
        let next = dsts.partition_point(|d| (d.0, d.2) <= (src.0, src.1));
        if let Some(d) = dsts.get(next).filter(|d| d.0 == src.0 && d.1 < src.2) {
            return Err(TransferError::invalid(format!(
                "source {}..{} overlaps destination {}..{} of the same region {}",
                src.1, src.2, d.1, d.2, src.0.index
            )));
        }
    }
    Ok(())
}

/// Merges items that are contiguous on both sides. `work` is sorted by source.
fn merge(work: &mut Vec<Work>) {
    // With disjoint sources, the only item that can continue another is its neighbour. A source
    // that feeds several destinations breaks that, and needs the order of diagonals first.
    let fan_out = work
        .iter()
        .zip(work.iter().skip(1))
        .any(|(a, b)| a.same_regions(b) && b.item.src.offset - a.item.src.offset < a.item.len);
    if fan_out {
        work.sort_unstable_by_key(|w| {
            let Transfer { src, dst, .. } = w.item;
            let diagonal = dst.offset.wrapping_sub(src.offset);
            (w.pair, src.region, dst.region, diagonal, src.offset)
        });
    }
    work.dedup_by(|next, kept| {
        let joined = kept.same_regions(next)
            && next.item.src.offset >= kept.item.src.offset
            && kept.continues_with(next);
        if joined {
            kept.item.len += next.item.len;
        }
        joined
    });
    if fan_out {
        work.sort_unstable_by_key(Work::key);
    }
}

fn cut(work: &[Work], limits: PlanLimits, bytes: u64) -> Planned {
    let max_bytes = limits.max_item_bytes.max(1);
    let max_items = limits.max_group_items.max(1);
    let mut out = Planned { items: Vec::with_capacity(work.len()), groups: Vec::new(), bytes };
    for w in work {
        let mut rest = w.item;
        while rest.len > 0 {
            let len = rest.len.min(max_bytes);
            let at = out.items.len();
            match out.groups.last_mut() {
                Some(g) if (g.src, g.dst) == w.pair && g.items.len() < max_items => {
                    g.items.end = at + 1;
                }
                _ => out.groups.push(Group { src: w.pair.0, dst: w.pair.1, items: at..at + 1 }),
            }
            out.items.push(Transfer { len, ..rest });
            rest.src.offset += len;
            rest.dst.offset += len;
            rest.len -= len;
        }
    }
    out
}

impl TransferError {
    pub(crate) fn stale(id: RegionId) -> Self {
        Self::new(
            ErrorKind::StaleRegion,
            format!(
                "region {} of generation {} is not registered (any more)",
                id.index, id.generation
            ),
        )
    }
}

#[cfg(test)]
mod tests;
