//! Sizes of a control region.
//!
//! **Invariant:** a geometry is checked before anything is computed from it; what is refused is
//! refused with its number.

use crate::{CtrlError, layout::MAX_POOLS};

/// Most slots of one pool (regular and reserved together).
pub const MAX_SLOTS: u64 = (1 << 31) - 2;
const MAX_LEASES: u32 = 1 << 20;
/// What fits into a slot's length.
const MAX_SHARD_BYTES: u64 = u32::MAX as u64;

/// One slot class of a cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolGeometry {
    /// Slots of the regular pool.
    pub slots: u32,
    /// Further slots that only [`prealloc`](crate::Pool::prealloc) may take.
    pub reserved: u32,
    /// Shards of one block in this pool; shard indices are `0..shards_per_block`.
    pub shards_per_block: u32,
    /// Bytes of one shard. The control plane only compares it between members.
    pub shard_bytes: u64,
}

/// Sizes of a control region, fixed at creation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Slot classes, at most 8.
    pub pools: Vec<PoolGeometry>,
    /// Leases that may exist at once.
    pub leases: u32,
}

impl Geometry {
    /// A region with one pool and room for 1,024 leases.
    #[must_use]
    pub fn single(slots: u32, reserved: u32, shards_per_block: u32, shard_bytes: u64) -> Self {
        Self {
            pools: vec![PoolGeometry { slots, reserved, shards_per_block, shard_bytes }],
            leases: 1024,
        }
    }

    pub(crate) fn check(&self) -> Result<(), CtrlError> {
        let bad = |what: String| Err(CtrlError::Geometry(what));
        if self.pools.is_empty() || self.pools.len() > MAX_POOLS {
            return bad(format!("{} pools given, 1 to {MAX_POOLS} are possible", self.pools.len()));
        }
        if self.leases > MAX_LEASES {
            return bad(format!("{} leases given, at most {MAX_LEASES} are possible", self.leases));
        }
        for (index, pool) in self.pools.iter().enumerate() {
            let total = u64::from(pool.slots) + u64::from(pool.reserved);
            if pool.slots == 0 || total > MAX_SLOTS {
                return bad(format!(
                    "pool {index}: {} slots and {} reserved slots given, 1 to {MAX_SLOTS} in total are possible",
                    pool.slots, pool.reserved
                ));
            }
            if pool.shards_per_block == 0 {
                return bad(format!("pool {index}: a block needs at least one shard, 0 given"));
            }
            if pool.shard_bytes == 0 || pool.shard_bytes > MAX_SHARD_BYTES {
                return bad(format!(
                    "pool {index}: shards of {} bytes given, 1 to {MAX_SHARD_BYTES} are possible",
                    pool.shard_bytes
                ));
            }
        }
        Ok(())
    }
}

impl PoolGeometry {
    /// All slots, regular and reserved.
    #[must_use]
    pub fn total(&self) -> u32 {
        self.slots.saturating_add(self.reserved)
    }

    /// One and a half to three slots a bucket on average, of six entries.
    pub(crate) fn buckets(&self) -> u32 {
        if cfg!(ucm_loom) { 2 } else { self.total().div_ceil(3).next_power_of_two() }
    }
}

/// Words of the three levels of a free map over `slots` slots.
pub(crate) fn free_map_words(slots: u32) -> [usize; 3] {
    let l0 = slots.div_ceil(64).max(1);
    let l1 = l0.div_ceil(64);
    let l2 = l1.div_ceil(64);
    [l0 as usize, l1 as usize, l2 as usize]
}
