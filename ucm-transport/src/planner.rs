//! The one planner of all engines: checks, sorts, merges and cuts items. No IO, no clock, no state.
//!
//! **Invariant:** the planned items move exactly the bytes that the given items ask for: the map
//! from destination byte to source byte is the same before and after.

use std::ops::Range;

mod overlap;

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
    /// Sort by source, and merge everything that is contiguous. Without it items keep their order
    /// within their location pair, and only neighbours are merged: for engines to which an item
    /// costs less than sorting it (a CPU copy).
    pub sort: bool,
}

impl PlanLimits {
    /// No limits: items are merged as far as they go.
    pub const NONE: Self =
        Self { max_item_bytes: u64::MAX, max_group_items: usize::MAX, sort: true };
    /// No limits and no sorting.
    pub const UNSORTED: Self = Self { sort: false, ..Self::NONE };
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
    /// The regions that the items use, each once.
    pub regions: Vec<RegionId>,
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
    let checked = Checked::new(items, region, supports)?;
    overlap::check(items)?;
    let mut planned = Planned { regions: checked.regions(), ..Planned::default() };
    planned.bytes = checked.bytes;
    let runs = if limits.sort { checked.sorted_runs(items) } else { checked.runs(items) };
    planned.items.reserve(runs.iter().map(|(_, run)| run.len()).sum());
    for (pair, run) in runs {
        planned.push(pair, &run, limits);
    }
    Ok(planned)
}

impl Planned {
    /// Cuts items of one location pair by the limits, and groups them.
    fn push(&mut self, (src, dst): LocationPair, run: &[Transfer], limits: PlanLimits) {
        let max_bytes = limits.max_item_bytes.max(1);
        let max_items = limits.max_group_items.max(1);
        let mut start = self.items.len();
        for item in run {
            let mut rest = *item;
            while rest.len > 0 {
                let len = rest.len.min(max_bytes);
                self.items.push(Transfer { len, ..rest });
                rest.src.offset += len;
                rest.dst.offset += len;
                rest.len -= len;
                let end = self.items.len();
                if end - start == max_items {
                    self.groups.push(Group { src, dst, items: start..end });
                    start = end;
                }
            }
        }
        let end = self.items.len();
        if start < end {
            self.groups.push(Group { src, dst, items: start..end });
        }
    }
}

type LocationPair = (Location, Location);

/// A pair of regions that occurs in a plan.
#[derive(Clone, Copy)]
struct RegionPair {
    src: RegionId,
    dst: RegionId,
    src_info: RegionInfo,
    dst_info: RegionInfo,
}

impl RegionPair {
    fn locations(&self) -> LocationPair {
        (self.src_info.location, self.dst_info.location)
    }
}

/// Items found to be valid each for itself.
struct Checked {
    /// Plans name few regions, so pairs are found by looking through them.
    pairs: Vec<RegionPair>,
    /// For each item, its place in `pairs`; empty when there is one pair only.
    pair_of: Vec<u32>,
    bytes: u64,
}

impl Checked {
    fn new(
        items: &[Transfer],
        region: impl Fn(RegionId) -> Option<RegionInfo>,
        supports: impl Fn(Location, Location) -> bool,
    ) -> Result<Self, TransferError> {
        if u32::try_from(items.len()).is_err() {
            return Err(TransferError::invalid(format!(
                "a plan of {} items; the limit is {}",
                items.len(),
                u32::MAX
            )));
        }
        let look_up = |id| region(id).ok_or_else(|| TransferError::stale(id));
        let mut this = Self { pairs: Vec::new(), pair_of: Vec::new(), bytes: 0 };
        let mut current: Option<RegionPair> = None;
        let mut current_at = 0;
        for (index, item) in items.iter().enumerate() {
            let (src, dst) = (item.src.region, item.dst.region);
            let pair = match current {
                Some(pair) if pair.src == src && pair.dst == dst => pair,
                _ => {
                    let found = this.pairs.iter().position(|p| p.src == src && p.dst == dst);
                    let at = found.unwrap_or(this.pairs.len());
                    if found.is_none() {
                        let (src_info, dst_info) = (look_up(src)?, look_up(dst)?);
                        if !supports(src_info.location, dst_info.location) {
                            return Err(TransferError::unsupported(format!(
                                "no way from {:?} to {:?} in this engine",
                                src_info.location, dst_info.location
                            )));
                        }
                        this.pairs.push(RegionPair { src, dst, src_info, dst_info });
                    }
                    if this.pairs.len() > 1 && this.pair_of.is_empty() {
                        this.pair_of.resize(index, 0);
                    }
                    // At most as many pairs as items.
                    current_at = u32::try_from(at).unwrap_or(u32::MAX);
                    let Some(pair) = this.pairs.get(at).copied() else { continue };
                    current = Some(pair);
                    pair
                }
            };
            if this.pairs.len() > 1 {
                this.pair_of.push(current_at);
            }
            if item.len == 0 {
                return Err(TransferError::invalid(format!("item {index} has a length of zero")));
            }
            in_bounds(item.src.offset, item.len, pair.src_info.len)?;
            in_bounds(item.dst.offset, item.len, pair.dst_info.len)?;
            this.bytes = this.bytes.checked_add(item.len).ok_or_else(|| {
                TransferError::invalid(format!("the plan asks for more than {} bytes", u64::MAX))
            })?;
        }
        Ok(this)
    }

    fn regions(&self) -> Vec<RegionId> {
        let mut all: Vec<_> = self.pairs.iter().flat_map(|p| [p.src, p.dst]).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// The items by location pair, in the order given, neighbours merged.
    fn runs(&self, items: &[Transfer]) -> Vec<(LocationPair, Vec<Transfer>)> {
        let mut runs: Vec<(LocationPair, Vec<Transfer>)> = Vec::new();
        if let [only] = self.pairs.as_slice() {
            runs.push((only.locations(), items.to_vec()));
        }
        for (item, of) in items.iter().zip(&self.pair_of) {
            let Some(pair) = self.pairs.get(*of as usize) else { continue };
            match runs.iter_mut().find(|(known, _)| *known == pair.locations()) {
                Some((_, run)) => run.push(*item),
                None => runs.push((pair.locations(), vec![*item])),
            }
        }
        runs.iter_mut().for_each(|(_, run)| merge(run));
        runs
    }

    /// The items by location pair and regions, sorted by source, everything contiguous merged.
    fn sorted_runs(&self, items: &[Transfer]) -> Vec<(LocationPair, Vec<Transfer>)> {
        let mut order: Vec<usize> = (0..self.pairs.len()).collect();
        order.sort_unstable_by_key(|at| self.pairs.get(*at).map(|p| (p.locations(), p.src, p.dst)));
        let mut by_pair: Vec<Vec<Transfer>> = vec![Vec::new(); self.pairs.len()];
        match by_pair.as_mut_slice() {
            [only] => *only = items.to_vec(),
            lists => {
                for (item, of) in items.iter().zip(&self.pair_of) {
                    if let Some(list) = lists.get_mut(*of as usize) {
                        list.push(*item);
                    }
                }
            }
        }
        let mut runs: Vec<(LocationPair, Vec<Transfer>)> = Vec::new();
        for at in order {
            let (Some(pair), Some(list)) = (self.pairs.get(at), by_pair.get_mut(at)) else {
                continue;
            };
            sort_and_merge(list);
            match runs.last_mut() {
                Some((locations, run)) if *locations == pair.locations() => run.append(list),
                _ => runs.push((pair.locations(), std::mem::take(list))),
            }
        }
        runs
    }
}

fn in_bounds(offset: u64, len: u64, region: u64) -> Result<(), TransferError> {
    match offset.checked_add(len) {
        Some(end) if end <= region => Ok(()),
        _ => Err(TransferError::out_of_bounds(offset, len, region)),
    }
}

/// Sorts items of one pair of regions by source and merges what is contiguous on both sides.
fn sort_and_merge(run: &mut Vec<Transfer>) {
    let by_source = |t: &Transfer| (t.src.offset, t.dst.offset);
    let fan_out = |run: &[Transfer]| {
        run.iter().zip(run.iter().skip(1)).any(|(a, b)| b.src.offset - a.src.offset < a.len)
    };
    sort_by_key(run, by_source);
    // With disjoint sources, the only item that can continue another is its neighbour. A source
    // that feeds several destinations breaks that, and needs the order of diagonals first.
    let fans_out = fan_out(run);
    if fans_out {
        sort_by_key(run, |t| (t.dst.offset.wrapping_sub(t.src.offset), t.src.offset));
    }
    merge(run);
    if fans_out {
        sort_by_key(run, by_source);
    }
}

fn sort_by_key(run: &mut [Transfer], key: impl Fn(&Transfer) -> (u64, u64)) {
    if !run.is_sorted_by_key(&key) {
        run.sort_unstable_by_key(key);
    }
}

/// Joins neighbours where the second goes on exactly where the first ends, on both sides.
fn merge(run: &mut Vec<Transfer>) {
    run.dedup_by(|next, kept| {
        let joined = next.src.offset.wrapping_sub(kept.src.offset) == kept.len
            && next.dst.offset.wrapping_sub(kept.dst.offset) == kept.len
            && next.src.region == kept.src.region
            && next.dst.region == kept.dst.region;
        if joined {
            kept.len += next.len;
        }
        joined
    });
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
