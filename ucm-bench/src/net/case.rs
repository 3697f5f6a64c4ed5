//! The pieces of one exchange.
//!
//! Owns: the shapes on the command line, and where their pieces lie.
//! **Invariant:** both processes derive the same pieces from the same text; no two pieces overlap on
//! either side.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::rng::Rng;

/// Bytes between two pieces, on both sides.
const GAP: u64 = 192;

/// One piece: from where in the source to where in the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) len: usize,
}

/// `BYTES` (one piece), `COUNTxBYTES` (that many), or `BYTES/OBJECT` (one piece in the middle of an
/// object).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub(crate) struct Case {
    text: String,
    count: u64,
    bytes: u64,
    object: u64,
}

impl Case {
    /// Its name in results: letters, digits and underscores.
    pub(crate) fn field(&self) -> String {
        self.text.replace('/', "_of_")
    }

    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    /// Bytes that move.
    pub(crate) fn total(&self) -> u64 {
        self.count * self.bytes
    }

    /// Bytes of source and of destination.
    pub(crate) fn memory(&self) -> usize {
        let gaps = if self.count > 1 { self.count * GAP } else { 0 };
        usize::try_from(self.object.max(self.total() + gaps)).unwrap_or(usize::MAX)
    }

    /// The pieces: sources in random order, destinations ascending.
    pub(crate) fn pieces(&self) -> Vec<Piece> {
        let stride = if self.count > 1 { self.bytes + GAP } else { 0 };
        let mut order: Vec<u64> = (0..self.count).collect();
        let mut rng = Rng::new(self.bytes);
        for last in (1..order.len()).rev() {
            let other = usize::try_from(rng.below(last as u64 + 1)).unwrap_or(0);
            order.swap(last, other);
        }
        let first = (self.object.saturating_sub(self.bytes) / 2) / 64 * 64;
        let first = if self.count > 1 { 0 } else { first };
        let at = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        order
            .into_iter()
            .zip(0..)
            .map(|(from, to): (u64, u64)| Piece {
                from: at(first + from * stride),
                to: at(to * stride),
                len: at(self.bytes),
            })
            .collect()
    }
}

impl FromStr for Case {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |part: &str| {
            part.parse::<u64>()
                .ok()
                .filter(|n| (1..=1 << 30).contains(n))
                .ok_or_else(|| format!("'{part}' in '{text}' is no number from 1 to 2^30"))
        };
        let (count, bytes, object) = match (text.split_once('x'), text.split_once('/')) {
            (Some((count, bytes)), _) => (number(count)?, number(bytes)?, 0),
            (None, Some((bytes, object))) => (1, number(bytes)?, number(object)?),
            (None, None) => (1, number(text)?, 0),
        };
        if count.saturating_mul(bytes + GAP) > 1 << 30 || (object > 0 && object < bytes) {
            return Err(format!("'{text}' does not fit into 2^30 bytes, or into its object"));
        }
        Ok(Self { text: text.to_owned(), count, bytes, object: object.max(bytes) })
    }
}

impl From<Case> for String {
    fn from(case: Case) -> Self {
        case.text
    }
}

impl TryFrom<String> for Case {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

/// The byte at a place of the source.
pub(crate) fn byte(at: usize) -> u8 {
    let word = (at as u64 / 8).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    word.to_le_bytes().get(at % 8).copied().unwrap_or(0)
}

/// All bytes of a source.
pub(crate) fn source(len: usize) -> Vec<u8> {
    (0..len).map(byte).collect()
}

/// Bytes whose first one lies at the start of a page, as registered memory does: the processor's
/// block copies are several times slower without that.
#[derive(Debug)]
pub(crate) struct Aligned {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Aligned {
    /// `len` bytes of this value.
    pub(crate) fn new(len: usize, value: u8) -> Self {
        const PAGE: usize = 4096;
        let bytes = vec![value; len + PAGE];
        let start = bytes.as_ptr().addr().next_multiple_of(PAGE) - bytes.as_ptr().addr();
        Self { bytes, start, len }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        self.bytes.get(self.start..self.start + self.len).unwrap_or_default()
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        self.bytes.get_mut(self.start..self.start + self.len).unwrap_or_default()
    }
}

/// Bytes of a destination that are not what the pieces say, and the first of them.
pub(crate) fn wrong(bytes: &[u8], pieces: &[Piece]) -> (u64, Option<usize>) {
    let mut count = 0;
    let mut first = None;
    for piece in pieces {
        for (at, from) in (piece.to..piece.to + piece.len).zip(piece.from..) {
            if bytes.get(at) != Some(&byte(from)) {
                count += 1;
                first.get_or_insert(at);
            }
        }
    }
    (count, first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_lie_apart_and_inside() {
        for text in ["4096", "61x1728", "2602x1728", "589824/4497408", "3x1"] {
            let case: Case = text.parse().unwrap();
            let pieces = case.pieces();
            assert_eq!(pieces.iter().map(|p| p.len as u64).sum::<u64>(), case.total());
            for side in [|p: &Piece| p.from, |p: &Piece| p.to] {
                let mut places: Vec<_> = pieces.iter().map(|p| (side(p), p.len)).collect();
                places.sort_unstable();
                assert!(places.windows(2).all(|w| w[0].0 + w[0].1 <= w[1].0), "{text}");
                assert!(places.last().is_some_and(|(at, len)| at + len <= case.memory()));
            }
        }
        for text in ["", "x", "0", "5x", "10/5", "100000x100000"] {
            assert!(text.parse::<Case>().is_err(), "{text}");
        }
    }

    #[test]
    fn aligned_bytes_are() {
        for len in [1, 4096, 10_000] {
            let mut aligned = Aligned::new(len, 7);
            assert_eq!(aligned.bytes_mut().len(), len);
            assert!(aligned.bytes().as_ptr().addr().is_multiple_of(4096));
        }
    }

    #[test]
    fn wrong_bytes_are_counted() {
        let pieces = [Piece { from: 10, to: 0, len: 4 }];
        let good = source(14).split_off(10);
        assert_eq!(wrong(&good, &pieces), (0, None));
        assert_eq!(wrong(&[good[0], !good[1], good[2], good[3]], &pieces), (1, Some(1)));
        assert_eq!(wrong(&good[..3], &pieces), (1, Some(3)));
    }
}
