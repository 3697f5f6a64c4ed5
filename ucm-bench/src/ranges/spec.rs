//! Shapes: which bytes a restore reads, in which order, and what they are.
//!
//! Owns: pools, groups of layers, keys, places in the destination, content.
//! **Invariant:** every byte of an object says which object and which place it belongs to.

use std::{net::SocketAddr, path::PathBuf, str::FromStr};

use serde::{Deserialize, Serialize};
use ucm_remote::{ByteRange, ObjectKey};

/// One pool of the model: some of its layers have so many bytes each.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Pool {
    pub(crate) name: String,
    /// Numbers of the model's layers, ascending.
    pub(crate) layers: Vec<u32>,
    pub(crate) bytes: u64,
}

impl Pool {
    pub(crate) fn object_bytes(&self) -> u64 {
        self.layers.len() as u64 * self.bytes
    }
}

impl FromStr for Pool {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "{text:?}: a pool is NAME:LAYERS:BYTES, perhaps with :FIRST/STRIDE or :L1,L2,… behind it"
            )
        };
        let parts: Vec<&str> = text.split(':').collect();
        let (name, count, bytes, rest) = match parts.as_slice() {
            [name, count, bytes] => (*name, *count, *bytes, None),
            [name, count, bytes, rest] => (*name, *count, *bytes, Some(*rest)),
            _ => return Err(wrong()),
        };
        let count: u32 = count.parse().map_err(|_| wrong())?;
        let bytes: u64 = bytes.parse().map_err(|_| wrong())?;
        if !(1..=4096).contains(&count) || bytes == 0 || !bytes.is_multiple_of(8) || bytes > 1 << 30
        {
            return Err(format!("{text:?}: 1 to 4096 layers, of a multiple of 8 bytes each"));
        }
        let layers = match rest.map(|rest| (rest, rest.split_once('/'))) {
            None => (0..count).collect(),
            Some((_, Some((first, stride)))) => {
                let first: u32 = first.parse().map_err(|_| wrong())?;
                let stride: u32 = stride.parse().map_err(|_| wrong())?;
                let layers: Option<Vec<u32>> =
                    (0..count).map(|i| i.checked_mul(stride)?.checked_add(first)).collect();
                layers.filter(|_| stride > 0).ok_or_else(wrong)?
            }
            Some((list, None)) => {
                list.split(',').map(|l| l.parse().map_err(|_| wrong())).collect::<Result<_, _>>()?
            }
        };
        if layers.len() != count as usize
            || layers.windows(2).any(|w| matches!(w, [a, b] if a >= b))
        {
            return Err(format!("{text:?}: not {count} layers in ascending order"));
        }
        Ok(Self { name: name.to_owned(), layers, bytes })
    }
}

/// A known shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Shape {
    /// 61 layers of 73,728 bytes
    V32,
    /// 61 layers of 8,448 bytes
    Idx,
    /// Three pools: 30 x 37,440, 30 x 8,448 and 31 x 1,728 bytes
    V4,
}

impl Shape {
    pub(crate) fn pools(self) -> Vec<Pool> {
        let pool = |name: &str, layers: Vec<u32>, bytes| Pool { name: name.into(), layers, bytes };
        match self {
            Self::V32 => vec![pool("v32", (0..61).collect(), 73_728)],
            Self::Idx => vec![pool("idx", (0..61).collect(), 8_448)],
            Self::V4 => vec![
                pool("c4", (2..=60).step_by(2).collect(), 37_440),
                pool("c4_indexer", (2..=60).step_by(2).collect(), 8_448),
                pool("c128", std::iter::once(0).chain((1..60).step_by(2)).collect(), 1_728),
            ],
        }
    }
}

/// What is read.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Spec {
    pub(crate) pools: Vec<Pool>,
    pub(crate) pages: u64,
    pub(crate) requests: u64,
    /// Layers of a group.
    pub(crate) group: u32,
    /// Layers that are read, from the first.
    pub(crate) read: u32,
    pub(crate) interleave: bool,
    pub(crate) arena_bytes: u64,
    pub(crate) prefetch: bool,
    pub(crate) page_bytes: u64,
}

/// A part of one object, and its place in the destination of its request.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub(crate) number: u64,
    pub(crate) pool: usize,
    pub(crate) ranges: Vec<(ByteRange, u64)>,
}

impl Spec {
    /// Layers of the model.
    pub(crate) fn layers(&self) -> u32 {
        self.pools.iter().filter_map(|pool| pool.layers.last()).max().map_or(0, |last| last + 1)
    }

    pub(crate) fn groups(&self) -> u32 {
        self.layers().min(self.read).div_ceil(self.group)
    }

    /// Layers of a group that are read.
    pub(crate) fn layers_of(&self, group: u32) -> std::ops::Range<u32> {
        let end = self.layers().min(self.read);
        (group * self.group).min(end)..((group + 1) * self.group).min(end)
    }

    pub(crate) fn objects(&self) -> u64 {
        self.requests * self.pages * self.pools.len() as u64
    }

    /// The number of an object, its pool and its bytes.
    pub(crate) fn all(&self) -> Vec<(u64, usize, u64)> {
        let pools = self.pools.len() as u64;
        (0..self.objects())
            .map(|number| {
                let pool = usize::try_from(number / self.pages % pools).unwrap_or(0);
                (number, pool, self.pools.get(pool).map_or(0, Pool::object_bytes))
            })
            .collect()
    }

    /// Bytes of all objects of one request.
    pub(crate) fn request_bytes(&self) -> u64 {
        self.pages * self.pools.iter().map(Pool::object_bytes).sum::<u64>()
    }

    /// Bytes that a rank reads.
    pub(crate) fn asked_bytes(&self) -> u64 {
        let of = |group| {
            self.parts(0, group)
                .iter()
                .flat_map(|p| p.ranges.clone())
                .map(|(r, _)| r.len)
                .sum::<u64>()
        };
        self.requests * (0..self.groups()).map(of).sum::<u64>()
    }

    /// What a group of layers of a request needs: destinations are layer by layer, page by page.
    pub(crate) fn parts(&self, request: u64, group: u32) -> Vec<Part> {
        let layers = self.layers_of(group);
        let (mut parts, mut base) = (Vec::new(), 0);
        for (index, pool) in self.pools.iter().enumerate() {
            for page in 0..self.pages {
                let ranges: Vec<(ByteRange, u64)> = (0..)
                    .zip(&pool.layers)
                    .filter(|(_, layer)| layers.contains(layer))
                    .map(|(at, _)| {
                        let at: u64 = at;
                        let range = ByteRange { offset: at * pool.bytes, len: pool.bytes };
                        (range, base + (at * self.pages + page) * pool.bytes)
                    })
                    .collect();
                if !ranges.is_empty() {
                    let first = (request * self.pools.len() as u64 + index as u64) * self.pages;
                    parts.push(Part { number: first + page, pool: index, ranges });
                }
            }
            base += pool.object_bytes() * self.pages;
        }
        parts
    }
}

pub(crate) fn key(number: u64) -> ObjectKey {
    let mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut block = [0; 16];
    let bytes = mixed.to_le_bytes().into_iter().chain(number.to_le_bytes());
    block.iter_mut().zip(bytes).for_each(|(to, from)| *to = from);
    ObjectKey { block, identity: [2; 32] }
}

/// The eight bytes at `word` of an object; never the poison that destinations are filled with.
pub(crate) fn word(number: u64, word: u64) -> [u8; 8] {
    let mut x = number.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(word);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (x ^ (x >> 31)).to_le_bytes()
}

/// Bytes of an object from `offset` on, which is a multiple of 8.
pub(crate) fn content(number: u64, offset: u64, into: &mut [u8]) {
    for (at, place) in (offset / 8..).zip(into.chunks_mut(8)) {
        let bytes = word(number, at);
        place.iter_mut().zip(bytes).for_each(|(to, from)| *to = from);
    }
}

/// Orders to the children of this workload.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Order {
    /// Keep all objects and serve them; with a socket, lend them to neighbours.
    Own { spec: Spec, secret: Vec<u8>, socket: Option<PathBuf>, baseline: bool },
    /// Be a rank of the agent at this socket.
    Join { spec: Spec, socket: PathBuf },
    /// Be a rank that pulls for itself.
    Pull { spec: Spec, secret: Vec<u8>, server: SocketAddr, token: [u8; 16] },
    /// Read everything; `compute_ns` is the time that a layer takes.
    Restore { at_ns: u64, compute_ns: u64 },
    /// Read the first group of every request once more.
    Repeat,
    /// Compare every byte that was read.
    Verify,
    /// Forget what was read.
    Clear,
}

/// Their answers.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Reply {
    pub(crate) address: Option<SocketAddr>,
    pub(crate) baseline: Option<SocketAddr>,
    pub(crate) token: [u8; 16],
    pub(crate) boot: [u8; 16],
    pub(crate) generations: Vec<u64>,
    /// One value a request.
    pub(crate) restore_us: Vec<f64>,
    pub(crate) ttfl_us: Vec<f64>,
    pub(crate) stall_us: Vec<f64>,
    pub(crate) began_ns: u64,
    pub(crate) ended_ns: u64,
    pub(crate) wrong_bytes: u64,
    pub(crate) first_wrong: Option<String>,
    /// Of a rank that pulls for itself.
    pub(crate) wire_bytes: u64,
    pub(crate) remote_calls: u64,
    pub(crate) copy_bytes: u64,
    pub(crate) whole_bytes: u64,
    pub(crate) arena_wait_ns: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_those_of_the_specification() {
        let bytes = |shape: Shape| shape.pools().iter().map(Pool::object_bytes).sum::<u64>();
        assert_eq!(bytes(Shape::V32), 4_497_408);
        assert_eq!(bytes(Shape::Idx), 515_328);
        assert_eq!(bytes(Shape::V4), 1_430_208);
        let layers: usize = Shape::V4.pools().iter().map(|pool| pool.layers.len()).sum();
        assert_eq!(layers, 91);
    }

    #[test]
    fn pools_are_read_as_they_are_written() {
        let pool = |text: &str| text.parse::<Pool>().map(|pool| (pool.layers, pool.bytes));
        assert_eq!(pool("a:3:8"), Ok((vec![0, 1, 2], 8)));
        assert_eq!(pool("a:3:16:2/5"), Ok((vec![2, 7, 12], 16)));
        assert_eq!(pool("a:2:8:4,9"), Ok((vec![4, 9], 8)));
        for bad in
            ["a", "a:0:8", "a:1:7", "a:2:8:4", "a:2:8:9,4", "a:2:8:1/0", "a:1:8:x", "a:1:8:1:1"]
        {
            assert!(pool(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn groups_read_every_byte_once_into_places_of_their_own() {
        let pools = Shape::V4.pools();
        let spec = Spec {
            pools,
            pages: 3,
            requests: 2,
            group: 8,
            read: u32::MAX,
            interleave: false,
            arena_bytes: 0,
            prefetch: true,
            page_bytes: 65_536,
        };
        assert_eq!(spec.asked_bytes(), 2 * 3 * 1_430_208);
        let mut places = std::collections::BTreeSet::new();
        let mut bytes = std::collections::BTreeSet::new();
        for (number, group) in (0..2).flat_map(|r| (0..spec.groups()).map(move |g| (r, g))) {
            for part in spec.parts(number, group) {
                for (range, to) in part.ranges {
                    assert!(bytes.insert((part.number, range.offset)));
                    assert!(places.insert((number, to)));
                    assert!(to + range.len <= spec.request_bytes());
                }
            }
        }
        assert_eq!(bytes.len(), 2 * 3 * 91);
        assert_eq!(spec.all().len(), 18);
    }
}
