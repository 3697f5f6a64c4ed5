//! Which bytes of an object are there.
//!
//! **Invariant:** extents are disjoint, do not touch, are not empty, and ascend.

use crate::ByteRange;

/// A set of bytes, as disjoint extents.
///
/// Cost: a search and a shift of the extents behind; a request in order keeps one extent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExtentSet {
    /// Start and end of each.
    extents: Vec<(u64, u64)>,
}

impl ExtentSet {
    /// Bytes in the set.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.extents.iter().map(|(start, end)| end - start).sum()
    }

    /// True for no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.extents.is_empty()
    }

    /// The extents, ascending.
    pub fn iter(&self) -> impl Iterator<Item = ByteRange> + '_ {
        self.extents.iter().map(|(start, end)| ByteRange { offset: *start, len: end - start })
    }

    /// Adds the bytes of a range. A range beyond 64 bits ends with them.
    pub fn insert(&mut self, range: ByteRange) {
        let (mut start, mut end) = bounds(range);
        if start == end {
            return;
        }
        // All that overlap or touch become one.
        let from = self.extents.partition_point(|(_, e)| *e < start);
        let to = self.extents.partition_point(|(s, _)| *s <= end);
        if let Some(united) = self.extents.get(from..to) {
            if let (Some((s, _)), Some((_, e))) = (united.first(), united.last()) {
                start = start.min(*s);
                end = end.max(*e);
            }
            self.extents.splice(from..to, [(start, end)]);
        }
    }

    /// Takes the bytes of a range out.
    pub fn remove(&mut self, range: ByteRange) {
        let (start, end) = bounds(range);
        if start == end {
            return;
        }
        let from = self.extents.partition_point(|(_, e)| *e <= start);
        let to = self.extents.partition_point(|(s, _)| *s < end);
        if let Some(cut) = self.extents.get(from..to) {
            let left = cut.first().filter(|(s, _)| *s < start).map(|(s, _)| (*s, start));
            let right = cut.last().filter(|(_, e)| *e > end).map(|(_, e)| (end, *e));
            self.extents.splice(from..to, left.into_iter().chain(right));
        }
    }

    /// Whether all bytes of the range are in the set.
    #[must_use]
    pub fn covers(&self, range: ByteRange) -> bool {
        self.missing(range).next().is_none()
    }

    /// Parts of the range that are not in the set, ascending.
    pub fn missing(&self, range: ByteRange) -> impl Iterator<Item = ByteRange> + '_ {
        let (mut at, end) = bounds(range);
        let from = self.extents.partition_point(|(_, e)| *e <= at);
        let mut within = self.extents.get(from..).unwrap_or_default().iter();
        std::iter::from_fn(move || {
            loop {
                if at >= end {
                    return None;
                }
                let (start, stop) = within.next().copied().unwrap_or((end, end));
                let gap = (at, start.min(end));
                at = stop.max(at);
                if gap.0 < gap.1 {
                    return Some(ByteRange { offset: gap.0, len: gap.1 - gap.0 });
                }
            }
        })
    }

    /// Parts of the range that are in the set, ascending.
    pub fn present(&self, range: ByteRange) -> impl Iterator<Item = ByteRange> + '_ {
        let (start, end) = bounds(range);
        let from = self.extents.partition_point(|(_, e)| *e <= start);
        let rest = self.extents.get(from..).unwrap_or_default().iter();
        rest.take_while(move |(s, _)| start < end && *s < end).map(move |(s, e)| {
            let (s, e) = (start.max(*s), end.min(*e));
            ByteRange { offset: s, len: e - s }
        })
    }
}

fn bounds(range: ByteRange) -> (u64, u64) {
    (range.offset, range.offset.saturating_add(range.len))
}

impl Extend<ByteRange> for ExtentSet {
    fn extend<I: IntoIterator<Item = ByteRange>>(&mut self, ranges: I) {
        ranges.into_iter().for_each(|range| self.insert(range));
    }
}

impl FromIterator<ByteRange> for ExtentSet {
    fn from_iter<I: IntoIterator<Item = ByteRange>>(ranges: I) -> Self {
        let mut set = Self::default();
        set.extend(ranges);
        set
    }
}
