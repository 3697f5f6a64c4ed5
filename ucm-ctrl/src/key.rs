//! Cache keys, and the one function that derives them from everything that determines the bytes.
//!
//! **Invariant:** two engine keys get the same block id only under equal namespaces (up to a
//! collision of BLAKE3 truncated to 128 bits).

use std::fmt;

/// Identity of one of the engine's KV blocks: 16 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub [u8; 16]);

impl BlockId {
    pub(crate) fn halves(self) -> (u64, u64) {
        let wide = u128::from_le_bytes(self.0);
        let [lo, hi] = [wide & u128::from(u64::MAX), wide >> 64];
        // Both halves fit by construction.
        (u64::try_from(lo).unwrap_or(0), u64::try_from(hi).unwrap_or(0))
    }

    pub(crate) fn from_halves(lo: u64, hi: u64) -> Self {
        Self((u128::from(lo) | (u128::from(hi) << 64)).to_le_bytes())
    }
}

impl fmt::Debug for BlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for byte in self.0 {
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl From<[u8; 16]> for BlockId {
    fn from(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }
}

/// Cache key: a shard of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// The engine's block.
    pub block: BlockId,
    /// Index of the shard in the block, `0..shards_per_block` of its pool.
    pub shard: u32,
}

impl Key {
    /// Shard `shard` of `block`.
    pub fn new(block: impl Into<BlockId>, shard: u32) -> Self {
        Self { block: block.into(), shard }
    }
}

/// One axis of parallelism that decides which part of the KV a rank holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParallelAxis {
    /// Name of the axis ("tp", "pp", "cp", …).
    pub name: String,
    /// This rank's coordinate on it. Give 0 when all ranks of the axis hold the same bytes.
    pub rank: u32,
    /// Size of the axis.
    pub degree: u32,
}

/// Everything apart from the engine's key that determines the bytes of a block.
///
/// The canonical encoding ([`descriptor`](Self::descriptor)) is stored with every object in a
/// backend and compared on load; its hash is mixed into every block id.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Namespace {
    /// Model name.
    pub model: String,
    /// Revision of the weights.
    pub revision: String,
    /// Element type of the KV cache, with its scale format.
    pub dtype: String,
    /// Name and version of the memory layout (K/V order, head split, …).
    pub layout: String,
    /// Tokens in a block.
    pub block_tokens: u32,
    /// Axes of parallelism.
    pub axes: Vec<ParallelAxis>,
    /// Tenant salt; equal content under different salts is never shared.
    pub salt: Vec<u8>,
    /// Anything else that determines the bytes, as name/value pairs in the caller's order.
    pub extra: Vec<(String, String)>,
}

impl Namespace {
    /// Canonical encoding: every field length-prefixed (u32 little-endian), lists counted, so that
    /// no two different namespaces encode alike.
    #[must_use]
    pub fn descriptor(&self) -> Vec<u8> {
        let mut out = b"ucm-namespace-1\0".to_vec();
        for field in [&self.model, &self.revision, &self.dtype, &self.layout] {
            put_bytes(&mut out, field.as_bytes());
        }
        out.extend_from_slice(&self.block_tokens.to_le_bytes());
        put_len(&mut out, self.axes.len());
        for axis in &self.axes {
            put_bytes(&mut out, axis.name.as_bytes());
            out.extend_from_slice(&axis.rank.to_le_bytes());
            out.extend_from_slice(&axis.degree.to_le_bytes());
        }
        put_bytes(&mut out, &self.salt);
        put_len(&mut out, self.extra.len());
        for (name, value) in &self.extra {
            put_bytes(&mut out, name.as_bytes());
            put_bytes(&mut out, value.as_bytes());
        }
        out
    }

    /// Prepares the identity function of this namespace.
    #[must_use]
    pub fn identity(&self) -> Identity {
        let descriptor = self.descriptor();
        Identity { key: *blake3::hash(&descriptor).as_bytes(), descriptor }
    }
}

/// The identity function of one namespace: engine key of any length → block id.
#[derive(Clone, PartialEq, Eq)]
pub struct Identity {
    key: [u8; 32],
    descriptor: Vec<u8>,
}

impl Identity {
    /// Derives the block id of an engine key: keyed BLAKE3 (the key being the hash of the
    /// descriptor), first 16 bytes.
    #[must_use]
    pub fn block_id(&self, engine_key: &[u8]) -> BlockId {
        let hash = blake3::keyed_hash(&self.key, engine_key);
        let mut id = [0; 16];
        for (to, from) in id.iter_mut().zip(hash.as_bytes()) {
            *to = *from;
        }
        BlockId(id)
    }

    /// The namespace's canonical encoding, as backends store it.
    #[must_use]
    pub fn descriptor(&self) -> &[u8] {
        &self.descriptor
    }

    /// BLAKE3 hash of the descriptor.
    #[must_use]
    pub fn descriptor_hash(&self) -> [u8; 32] {
        self.key
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity")
            .field("descriptor_bytes", &self.descriptor.len())
            .finish_non_exhaustive()
    }
}

fn put_len(out: &mut Vec<u8>, len: usize) {
    // Lists and strings of 4 GiB do not occur; saturating keeps the encoding unambiguous anyway,
    // because the bytes themselves follow.
    out.extend_from_slice(&u32::try_from(len).unwrap_or(u32::MAX).to_le_bytes());
}

fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    put_len(out, bytes.len());
    out.extend_from_slice(bytes);
}

/// Position of a key in the index: first bucket and tag.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Hashed {
    pub(crate) position: u64,
    pub(crate) tag: u32,
}

/// Spreads block ids over buckets. Block ids are usually hashes already, but need not be: folded
/// multiplication (as in wyhash) with a per-region seed makes any set of ids spread.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hasher {
    pub(crate) seed: (u64, u64),
    /// All ones; tests narrow it to force collisions.
    pub(crate) mask: u64,
}

impl Hasher {
    pub(crate) fn block(self, lo: u64, hi: u64) -> u64 {
        let folded = fold(
            lo ^ self.seed.0 ^ 0x9e37_79b9_7f4a_7c15,
            hi ^ self.seed.1 ^ 0xe703_7ed1_a0b4_28db,
        );
        folded & self.mask
    }

    /// Shards of a block lie in consecutive buckets, so that walks over a whole block (touch)
    /// stream through memory; blocks are spread at random, and sums of random runs spread as well.
    pub(crate) fn shard(block: u64, shard: u32) -> Hashed {
        let [tag, _] = [block >> 32, block];
        let tag = u32::try_from(tag).unwrap_or(0) ^ shard.wrapping_mul(0x9e37_79b1);
        Hashed { position: block.wrapping_add(u64::from(shard)), tag }
    }
}

fn fold(a: u64, b: u64) -> u64 {
    let wide = u128::from(a) * u128::from(b);
    let lo = u64::try_from(wide & u128::from(u64::MAX)).unwrap_or(0);
    let hi = u64::try_from(wide >> 64).unwrap_or(0);
    lo ^ hi
}

#[cfg(test)]
mod tests {
    use super::*;

    fn namespace() -> Namespace {
        Namespace {
            model: "qwen3-8b".into(),
            revision: "main".into(),
            dtype: "bf16".into(),
            layout: "nhd/1".into(),
            block_tokens: 128,
            axes: vec![ParallelAxis { name: "tp".into(), rank: 1, degree: 4 }],
            salt: b"tenant".to_vec(),
            extra: vec![("engine".into(), "1".into())],
        }
    }

    /// A41: a difference in exactly one field gives another id for every engine key.
    #[test]
    fn s4_every_field_of_the_namespace_changes_the_id() {
        let base = namespace();
        let mut others = vec![base.clone(); 12];
        others[0].model.push('x');
        others[1].revision.push('x');
        others[2].dtype = "fp8".into();
        others[3].layout = "nhd/2".into();
        others[4].block_tokens = 64;
        others[5].axes[0].rank = 2;
        others[6].axes[0].degree = 8;
        others[7].axes[0].name = "pp".into();
        others[8].salt = b"tenanu".to_vec();
        others[9].extra[0].1 = "2".into();
        others[10].extra.clear();
        // Moving a byte across a field border must not collide.
        others[11].model = "qwen3-8bm".into();
        others[11].revision = "ain".into();
        let id = base.identity().block_id(b"engine key");
        for other in &others {
            assert_ne!(other.descriptor(), base.descriptor());
            assert_ne!(other.identity().block_id(b"engine key"), id, "{other:?}");
        }
        assert_eq!(base.identity().block_id(b"engine key"), id);
    }

    #[test]
    fn s4_engine_keys_of_any_length_get_distinct_ids() {
        let identity = namespace().identity();
        let mut seen = std::collections::HashSet::new();
        for len in [0_usize, 1, 15, 16, 17, 32, 36, 64, 1000] {
            assert!(seen.insert(identity.block_id(&vec![7; len])));
        }
        assert!(seen.insert(identity.block_id("a string key".as_bytes())));
    }

    #[test]
    fn halves_round_trip() {
        let id = BlockId([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]);
        let (lo, hi) = id.halves();
        assert_eq!(BlockId::from_halves(lo, hi), id);
    }
}
