//! Sizes of a control region, and where each table lies in it.
//!
//! **Invariant:** offsets are computed from the geometry by every process for itself, in checked
//! arithmetic; they are never read from shared memory.

use crate::{
    CtrlError,
    layout::{
        BUCKET_BYTES, HEADER_BYTES, LEASE_BYTES, MAX_MEMBERS, MAX_POOLS, MEMBER_BYTES, POOL_BYTES,
        SLOT_BYTES,
    },
};

/// Most slots of one pool (regular and reserved together).
pub const MAX_SLOTS: u64 = (1 << 31) - 2;
const MAX_LEASES: u32 = 1 << 20;
const MAX_SHARD_BYTES: u64 = 1 << 40;

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
        if cfg!(ucm_loom) { 1 } else { self.total().div_ceil(3).next_power_of_two() }
    }
}

/// Words of the three levels of a free map over `slots` slots.
pub(crate) fn free_map_words(slots: u32) -> [usize; 3] {
    let l0 = slots.div_ceil(64).max(1);
    let l1 = l0.div_ceil(64);
    let l2 = l1.div_ceil(64);
    [l0 as usize, l1 as usize, l2 as usize]
}

/// Byte offsets of one pool's tables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PoolLayout {
    pub(crate) hot: usize,
    pub(crate) buckets: usize,
    pub(crate) slots: usize,
    pub(crate) accessed: usize,
    pub(crate) free_regular: usize,
    pub(crate) free_reserved: usize,
}

/// Byte offsets of everything in a region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RegionLayout {
    pub(crate) members: usize,
    pub(crate) leases: usize,
    pub(crate) pools: Vec<PoolLayout>,
    pub(crate) total: usize,
}

impl RegionLayout {
    pub(crate) fn of(geometry: &Geometry) -> Result<Self, CtrlError> {
        geometry.check()?;
        let mut at = Cursor(HEADER_BYTES);
        let members = at.take(MAX_MEMBERS, MEMBER_BYTES)?;
        let leases = at.take(geometry.leases as usize, LEASE_BYTES)?;
        let mut pools = Vec::with_capacity(geometry.pools.len());
        for pool in &geometry.pools {
            let free = |slots| free_map_words(slots).iter().sum::<usize>();
            pools.push(PoolLayout {
                hot: at.take(1, POOL_BYTES)?,
                buckets: at.take(pool.buckets() as usize, BUCKET_BYTES)?,
                slots: at.take(pool.total() as usize, SLOT_BYTES)?,
                accessed: at.take(pool.total().div_ceil(64) as usize, 8)?,
                free_regular: at.take(free(pool.slots), 8)?,
                free_reserved: at.take(free(pool.reserved), 8)?,
            });
        }
        let total = at.take(0, 1)?.next_multiple_of(4096);
        Ok(Self { members, leases, pools, total })
    }
}

struct Cursor(usize);

impl Cursor {
    /// Reserves `count` items at the next cache line.
    fn take(&mut self, count: usize, bytes: usize) -> Result<usize, CtrlError> {
        let start = self.0.next_multiple_of(64);
        let end = count.checked_mul(bytes).and_then(|len| start.checked_add(len));
        match end {
            Some(end) if end <= isize::MAX as usize - 8192 => {
                self.0 = end;
                Ok(start)
            }
            _ => Err(CtrlError::Geometry(format!(
                "a table of {count} × {bytes} bytes does not fit into memory"
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn m4_bad_geometry_is_refused_with_the_value() {
        let good = Geometry::single(10, 2, 4, 4096);
        assert!(RegionLayout::of(&good).is_ok());
        type Spoil = fn(&mut Geometry);
        let cases: [(Spoil, &str); 7] = [
            (|g| g.pools[0].slots = 0, "0 slots"),
            (|g| g.pools[0].slots = u32::MAX, "4294967295 slots"),
            (|g| g.pools[0].shards_per_block = 0, "0 given"),
            (|g| g.pools[0].shard_bytes = 0, "0 bytes"),
            (|g| g.pools[0].shard_bytes = u64::MAX, "18446744073709551615 bytes"),
            (|g| g.pools.clear(), "0 pools"),
            (|g| g.leases = u32::MAX, "4294967295 leases"),
        ];
        for (spoil, number) in cases {
            let mut geometry = good.clone();
            spoil(&mut geometry);
            let error = RegionLayout::of(&geometry).unwrap_err().to_string();
            assert!(error.contains(number), "{error}");
        }
    }

    #[test]
    fn at_most_128_bytes_per_slot() {
        for slots in [1_000_u32, 4_096, 65_536, 1_000_000, 10_000_000] {
            let layout =
                RegionLayout::of(&Geometry::single(slots, slots / 64, 64, 1 << 20)).unwrap();
            let tables = layout.total - layout.pools[0].hot;
            let per_slot = tables as f64 / f64::from(slots + slots / 64);
            assert!(per_slot <= 128.0, "{slots} slots: {per_slot} bytes each");
        }
    }
}
