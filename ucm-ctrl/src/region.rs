//! The control region as this process sees it: the mapping and typed access to its tables.
//!
//! **Invariant:** every access goes through a bounds check against sizes that this process computed
//! itself; nothing read from the region is used as an index unchecked.

use crate::{
    Geometry,
    key::Hasher,
    layout::{Bucket, LeaseRecord, MemberRecord, PoolHot, Slot},
    sync::AtomicU64,
};

#[cfg(not(ucm_loom))]
mod memory;
#[cfg(not(ucm_loom))]
pub(crate) use memory::{Region, zeroed_counts};

#[cfg(ucm_loom)]
mod model;
#[cfg(ucm_loom)]
pub(crate) use model::{Region, zeroed_counts};

/// The tables of one pool.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PoolTables<'a> {
    pub(crate) hot: &'a PoolHot,
    pub(crate) buckets: &'a [Bucket],
    pub(crate) slots: &'a [Slot],
    pub(crate) accessed: &'a [AtomicU64],
    pub(crate) free_regular: [&'a [AtomicU64]; 3],
    pub(crate) free_reserved: [&'a [AtomicU64]; 3],
    /// Slots below this index are regular, the others reserved.
    pub(crate) regular: u32,
    pub(crate) shards_per_block: u32,
}

impl Region {
    pub(crate) fn member(&self, index: u8) -> Option<&MemberRecord> {
        self.members().get(usize::from(index))
    }

    pub(crate) fn lease(&self, index: u32) -> Option<&LeaseRecord> {
        self.leases().get(index as usize)
    }

    pub(crate) fn hasher(&self) -> Hasher {
        self.hasher
    }

    pub(crate) fn geometry(&self) -> &Geometry {
        &self.geometry
    }
}
