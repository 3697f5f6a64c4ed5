//! How much of an object a request asks for, and in which order.
//!
//! **Invariant:** spans keep the caller's order: the bytes of a request, one range after the other, are
//! the bytes of its spans, one after the other.

use crate::{ByteRange, RangeError, check_ranges};

/// Ranges of a request that follow each other in the object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The part of the object.
    pub range: ByteRange,
    /// Its first range in the request.
    pub first: usize,
    /// How many ranges it unites.
    pub count: usize,
}

/// What a request is, seen from the object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Coverage {
    /// Its ranges tile the object in ascending order: what is packed is the object.
    Whole,
    /// They cover the object in another order: what is packed is *not* the object.
    WholeOutOfOrder,
    /// They leave something out.
    Part,
}

/// Unites ranges where one ends where the next begins. The ranges must be good ones of one object
/// ([`check_ranges`]).
#[must_use]
pub fn merge(ranges: &[ByteRange]) -> Vec<Span> {
    let mut spans: Vec<Span> = Vec::new();
    for (first, range) in ranges.iter().enumerate() {
        match spans.last_mut() {
            Some(span) if span.range.end() == Some(range.offset) => {
                span.range.len = span.range.len.saturating_add(range.len);
                span.count += 1;
            }
            _ => spans.push(Span { range: *range, first, count: 1 }),
        }
    }
    spans
}

/// Checks a request and says what it covers.
///
/// # Errors
/// As [`check_ranges`].
pub fn coverage(ranges: &[ByteRange], object: u64) -> Result<Coverage, RangeError> {
    let bytes = check_ranges(ranges, object)?;
    Ok(match merge(ranges).as_slice() {
        // Disjoint ranges that have all bytes together cover the object.
        _ if bytes < object => Coverage::Part,
        [_] => Coverage::Whole,
        _ => Coverage::WholeOutOfOrder,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges(parts: &[(u64, u64)]) -> Vec<ByteRange> {
        parts.iter().map(|(offset, len)| ByteRange { offset: *offset, len: *len }).collect()
    }

    #[test]
    fn spans_unite_what_follows_and_nothing_else() {
        let spans = merge(&ranges(&[(0, 4), (4, 4), (12, 4), (8, 4), (12, 1)]));
        let seen: Vec<_> =
            spans.iter().map(|s| (s.range.offset, s.range.len, s.first, s.count)).collect();
        assert_eq!(seen, [(0, 8, 0, 2), (12, 4, 2, 1), (8, 5, 3, 2)]);
        assert_eq!(merge(&[]), []);
    }

    #[test]
    fn only_tiles_in_ascending_order_are_the_object() {
        let of = |parts: &[(u64, u64)]| coverage(&ranges(parts), 12);
        assert_eq!(of(&[(0, 12)]), Ok(Coverage::Whole));
        assert_eq!(of(&[(0, 5), (5, 1), (6, 6)]), Ok(Coverage::Whole));
        assert_eq!(of(&[(6, 6), (0, 6)]), Ok(Coverage::WholeOutOfOrder));
        assert_eq!(of(&[(0, 6), (7, 5)]), Ok(Coverage::Part));
        assert_eq!(of(&[]), Err(RangeError::None));
        assert!(of(&[(0, 6), (5, 7)]).is_err());
    }
}
