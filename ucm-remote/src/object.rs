//! Names of objects and peers, and ranges inside objects.
//!
//! **Invariant:** ranges are checked as a whole before any of them is used.

use std::{fmt, sync::Arc};

/// Names an object: the block id that the identity function gave, and a digest of everything that
/// identity depends on. Both are compared wherever an object is served, so that two blocks whose
/// short ids collide are never taken for each other.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectKey {
    /// Block id.
    pub block: [u8; 16],
    /// 256-bit digest of namespace and engine key.
    pub identity: [u8; 32],
}

impl fmt::Debug for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.block.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Names a peer for as long as it is configured; which run of it, its boot token says. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PeerId(Arc<str>);

impl PeerId {
    /// A peer of this name.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self(name.into())
    }

    /// Its name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for PeerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Counts the times a peer has stored something under a key; part of every handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Generation(pub u64);

/// A part of an object, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ByteRange {
    /// First byte.
    pub offset: u64,
    /// Number of bytes, never zero in a valid request.
    pub len: u64,
}

impl ByteRange {
    /// One past the last byte; `None` beyond 64 bits.
    #[must_use]
    pub fn end(self) -> Option<u64> {
        self.offset.checked_add(self.len)
    }
}

/// Why ranges cannot be served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RangeError {
    /// There are none.
    #[error("no range was given")]
    None,
    /// One has no bytes.
    #[error("range {index} at byte {offset} has no bytes")]
    Empty {
        /// Which one.
        index: usize,
        /// Where.
        offset: u64,
    },
    /// One leaves the object.
    #[error("range {index}, {len} bytes from {offset}, leaves an object of {object} bytes")]
    Outside {
        /// Which one.
        index: usize,
        /// Where.
        offset: u64,
        /// How long.
        len: u64,
        /// Length of the object.
        object: u64,
    },
    /// Two share bytes.
    #[error("ranges {first} and {second} share byte {byte}")]
    Overlap {
        /// One of them.
        first: usize,
        /// The other.
        second: usize,
        /// The first byte they share.
        byte: u64,
    },
}

/// Checks ranges of an object of `object` bytes: at least one, none empty, all inside, no two
/// sharing a byte; any order. Returns their bytes together.
///
/// # Errors
/// The first rule that is broken, with the numbers.
pub fn check_ranges(ranges: &[ByteRange], object: u64) -> Result<u64, RangeError> {
    let mut sorted = Vec::with_capacity(ranges.len());
    for (index, range) in ranges.iter().enumerate() {
        let ByteRange { offset, len } = *range;
        if len == 0 {
            return Err(RangeError::Empty { index, offset });
        }
        match range.end().filter(|end| *end <= object) {
            Some(end) => sorted.push((offset, end, index)),
            None => return Err(RangeError::Outside { index, offset, len, object }),
        }
    }
    if sorted.is_empty() {
        return Err(RangeError::None);
    }
    sorted.sort_unstable();
    for pair in sorted.windows(2) {
        if let [(_, end, first), (byte, _, second)] = *pair
            && byte < end
        {
            return Err(RangeError::Overlap { first, second, byte });
        }
    }
    // Disjoint parts of one object do not exceed its length.
    Ok(sorted.iter().map(|(start, end, _)| end - start).sum())
}

#[cfg(test)]
mod tests {
    use super::{ByteRange, RangeError, check_ranges};

    fn check(ranges: &[(u64, u64)], object: u64) -> Result<u64, RangeError> {
        let ranges: Vec<_> =
            ranges.iter().map(|(offset, len)| ByteRange { offset: *offset, len: *len }).collect();
        check_ranges(&ranges, object)
    }

    #[test]
    fn good_ranges_come_in_any_order_and_may_touch() {
        assert_eq!(check(&[(0, 10)], 10), Ok(10));
        assert_eq!(check(&[(5, 5), (0, 5)], 10), Ok(10));
        assert_eq!(check(&[(8, 1), (0, 1), (4, 2)], 9), Ok(4));
        assert_eq!(check(&[(0, u64::MAX)], u64::MAX), Ok(u64::MAX));
    }

    #[test]
    fn each_rule_is_enforced_with_the_numbers() {
        assert_eq!(check(&[], 10), Err(RangeError::None));
        assert_eq!(check(&[(0, 1), (3, 0)], 10), Err(RangeError::Empty { index: 1, offset: 3 }));
        let outside =
            |index, offset, len| Err(RangeError::Outside { index, offset, len, object: 10 });
        assert_eq!(check(&[(0, 11)], 10), outside(0, 0, 11));
        assert_eq!(check(&[(0, 1), (10, 1)], 10), outside(1, 10, 1));
        assert_eq!(check(&[(u64::MAX, 2)], 10), outside(0, u64::MAX, 2));
        assert_eq!(
            check(&[(4, 4), (0, 5)], 10),
            Err(RangeError::Overlap { first: 1, second: 0, byte: 4 })
        );
        assert_eq!(
            check(&[(2, 3), (2, 3)], 10),
            Err(RangeError::Overlap { first: 0, second: 1, byte: 2 })
        );
    }
}
