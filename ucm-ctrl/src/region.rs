//! The control region as this process sees it: the mapping and typed access to its tables.
//!
//! **Invariant:** every access goes through a bounds check against sizes that this process computed
//! itself; nothing read from the region is used as an index unchecked.

use crate::{
    Geometry, PoolGeometry, fork,
    freemap::{self, FreeMap},
    key::Hasher,
    layout::{Bucket, MemberRecord, PoolHot, Slot},
    sync::AtomicU64,
};

#[cfg(not(ucm_loom))]
use crate::layout::LeaseRecord;

#[cfg(not(ucm_loom))]
mod memory;
#[cfg(not(ucm_loom))]
mod plan;
#[cfg(not(ucm_loom))]
pub(crate) use memory::{Region, Table};

#[cfg(ucm_loom)]
mod model;
#[cfg(ucm_loom)]
pub(crate) use model::{Region, Table};

/// The tables of one pool. Borrowed from the region, which keeps them mapped.
#[derive(Debug)]
pub(crate) struct PoolTables {
    pub(crate) hot: Table<PoolHot>,
    pub(crate) buckets: Table<Bucket>,
    pub(crate) slots: Table<Slot>,
    pub(crate) accessed: Table<AtomicU64>,
    pub(super) free_regular: [Table<AtomicU64>; 3],
    pub(super) free_reserved: [Table<AtomicU64>; 3],
    /// Slots below this index are regular, the others reserved.
    pub(crate) regular: u32,
    pub(crate) shards_per_block: u32,
}

impl PoolTables {
    pub(crate) fn free_regular(&self) -> FreeMap<'_> {
        self.free_regular.each_ref().map(|level| &level[..])
    }

    pub(crate) fn free_reserved(&self) -> FreeMap<'_> {
        self.free_reserved.each_ref().map(|level| &level[..])
    }

    /// Marks all slots of a fresh pool as free.
    fn fill_free_maps(&self, geometry: &PoolGeometry) {
        freemap::fill(self.free_regular(), geometry.slots);
        freemap::fill(self.free_reserved(), geometry.reserved);
    }
}

impl Region {
    pub(crate) fn member(&self, index: u8) -> Option<&MemberRecord> {
        self.members().get(usize::from(index))
    }

    #[cfg(not(ucm_loom))]
    pub(crate) fn lease(&self, index: u32) -> Option<&LeaseRecord> {
        self.leases().get(index as usize)
    }

    /// False in a child forked from the process that mapped the region.
    pub(crate) fn is_ours(&self) -> bool {
        fork::is_still(self.epoch)
    }

    pub(crate) fn hasher(&self) -> Hasher {
        self.hasher
    }

    pub(crate) fn pool(&self, index: usize) -> Option<&PoolTables> {
        self.pools.get(index)
    }

    pub(crate) fn geometry(&self) -> &Geometry {
        &self.geometry
    }
}
