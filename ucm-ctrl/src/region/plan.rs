//! Where each table of a control region lies.
//!
//! **Invariant:** offsets are computed from the geometry by every process for itself, in checked
//! arithmetic; they are never read from shared memory.

use crate::{
    CtrlError, Geometry,
    geometry::free_map_words,
    layout::{
        BUCKET_BYTES, GROUP_BYTES, GROUP_HOT_BYTES, HEADER_BYTES, LEASE_BYTES, MAX_GROUPS,
        MAX_MEMBERS, MEMBER_BYTES, POOL_BYTES, SLOT_BYTES,
    },
};

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
    pub(crate) group_hot: usize,
    pub(crate) groups: usize,
    pub(crate) pools: Vec<PoolLayout>,
    pub(crate) total: usize,
}

impl Geometry {
    /// Bytes of shared memory a region of this geometry takes, all of them at creation.
    ///
    /// # Errors
    /// `Geometry` with the offending number.
    pub fn region_bytes(&self) -> Result<u64, CtrlError> {
        RegionLayout::of(self).map(|layout| layout.total as u64)
    }
}

impl RegionLayout {
    pub(crate) fn of(geometry: &Geometry) -> Result<Self, CtrlError> {
        geometry.check()?;
        let mut at = Cursor(HEADER_BYTES);
        let members = at.take(MAX_MEMBERS, MEMBER_BYTES)?;
        let leases = at.take(geometry.leases as usize, LEASE_BYTES)?;
        let group_hot = at.take(1, GROUP_HOT_BYTES)?;
        let groups = at.take(MAX_GROUPS, GROUP_BYTES)?;
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
        Ok(Self { members, leases, group_hot, groups, pools, total })
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
