//! Packs the ranges of a batch into rounds of one arena lease.
//!
//! **Invariant:** parts lie back to back in the caller's order, no range is split, and no round is
//! larger than the lease.

use crate::ByteRange;

/// Where a range of the batch lies in a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Which request of the batch.
    pub request: usize,
    /// Which of its ranges.
    pub index: usize,
    /// The part of the object.
    pub range: ByteRange,
    /// First byte in the arena lease.
    pub at: u64,
}

/// What one lease takes at a time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Round {
    /// Its parts.
    pub parts: Vec<Part>,
    /// Their bytes.
    pub bytes: u64,
}

/// A range that no round can take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("range {index} of request {request} has {len} bytes, an arena lease {capacity}")]
pub struct PackError {
    /// Which request.
    pub request: usize,
    /// Which of its ranges.
    pub index: usize,
    /// How long it is.
    pub len: u64,
    /// How much a lease takes.
    pub capacity: u64,
}

/// Packs the ranges of several requests, in order, into as few rounds as their order allows.
///
/// # Errors
/// For each request with a range larger than `capacity` bytes, its first such range. The other
/// requests are packed: a request that cannot be served costs its siblings nothing.
#[must_use]
pub fn pack(requests: &[&[ByteRange]], capacity: u64) -> (Vec<Round>, Vec<PackError>) {
    let (mut rounds, mut refused) = (Vec::new(), Vec::new());
    let mut round = Round::default();
    for (request, ranges) in requests.iter().enumerate() {
        let too_large = ranges.iter().position(|range| range.len > capacity);
        if let Some((index, range)) = too_large.and_then(|at| Some((at, ranges.get(at)?))) {
            refused.push(PackError { request, index, len: range.len, capacity });
            continue;
        }
        for (index, range) in ranges.iter().enumerate() {
            if round.bytes + range.len > capacity {
                rounds.push(std::mem::take(&mut round));
            }
            round.parts.push(Part { request, index, range: *range, at: round.bytes });
            round.bytes += range.len;
        }
    }
    if !round.parts.is_empty() {
        rounds.push(round);
    }
    (rounds, refused)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges(parts: &[(u64, u64)]) -> Vec<ByteRange> {
        parts.iter().map(|(offset, len)| ByteRange { offset: *offset, len: *len }).collect()
    }

    fn seen(rounds: &[Round]) -> Vec<Vec<(usize, u64, u64)>> {
        let parts =
            |round: &Round| round.parts.iter().map(|p| (p.request, p.range.offset, p.at)).collect();
        rounds.iter().map(parts).collect()
    }

    #[test]
    fn g4_ranges_beyond_the_arena_take_several_rounds() {
        let object = ranges(&[(0, 4000), (8000, 4000), (16000, 4000)]);
        let (rounds, refused) = pack(&[&object], 8192);
        assert_eq!(seen(&rounds), [vec![(0, 0, 0), (0, 8000, 4000)], vec![(0, 16000, 0)]]);
        assert_eq!((rounds[0].bytes, rounds[1].bytes, refused), (8000, 4000, vec![]));
    }

    #[test]
    fn g5_a_range_beyond_the_arena_refuses_its_request_only() {
        let bad = ranges(&[(0, 5000), (5000, 5000), (10_000, 10_480)]);
        let good = ranges(&[(7, 100)]);
        let (rounds, refused) = pack(&[&bad, &good], 8192);
        assert_eq!(seen(&rounds), [vec![(1, 7, 0)]]);
        let error = PackError { request: 0, index: 2, len: 10_480, capacity: 8192 };
        assert_eq!(refused, [error]);
        assert!(error.to_string().contains("10480 bytes, an arena lease 8192"), "{error}");
    }

    #[test]
    fn g6_g8_an_exact_fit_is_one_round() {
        let chunks: Vec<_> = (0..5).map(|i| (i * 4096, 4096)).collect();
        let (rounds, _) = pack(&[&ranges(&chunks)], 8192);
        assert_eq!(rounds.iter().map(|r| r.bytes).collect::<Vec<_>>(), [8192, 8192, 4096]);
        let (rounds, _) = pack(&[&ranges(&[(3, 8192)])], 8192);
        assert_eq!(rounds.len(), 1);
        let (rounds, refused) = pack(&[&ranges(&[(3, 8193)])], 8192);
        assert_eq!((rounds.len(), refused.len()), (0, 1));
        assert_eq!(pack(&[], 8192), (vec![], vec![]));
    }
}
