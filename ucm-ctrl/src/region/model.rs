//! The region under loom: the same tables in ordinary collections of loom atomics.
//!
//! **Invariant:** the sizes are those of the geometry, as in real memory.

use super::PoolTables;
use crate::{
    CtrlError, Geometry, fork,
    geometry::free_map_words,
    key::Hasher,
    layout::{MAX_MEMBERS, MemberRecord},
};

#[derive(Debug)]
pub(crate) struct Region {
    members: Vec<MemberRecord>,
    pub(super) pools: Vec<PoolTables>,
    pub(super) geometry: Geometry,
    pub(super) hasher: Hasher,
    pub(super) epoch: u32,
}

/// A table in ordinary memory.
pub(crate) type Table<T> = Vec<T>;

fn many<T: Default>(count: usize) -> Vec<T> {
    (0..count).map(|_| T::default()).collect()
}

impl Region {
    pub(crate) fn create_private(
        geometry: &Geometry,
        boot_token: [u64; 2],
    ) -> Result<Self, CtrlError> {
        geometry.check()?;
        let region = Self {
            members: many(MAX_MEMBERS),
            pools: geometry
                .pools
                .iter()
                .map(|pool| PoolTables {
                    hot: many(1),
                    buckets: many(pool.buckets() as usize),
                    slots: many(pool.total() as usize),
                    accessed: many(pool.total().div_ceil(64) as usize),
                    free_regular: free_map_words(pool.slots).map(many),
                    free_reserved: free_map_words(pool.reserved).map(many),
                    regular: pool.slots,
                    shards_per_block: pool.shards_per_block,
                })
                .collect(),
            geometry: geometry.clone(),
            hasher: Hasher { seed: (boot_token[0], boot_token[1]), mask: u64::MAX },
            epoch: fork::current(),
        };
        for (tables, pool) in region.pools.iter().zip(&geometry.pools) {
            tables.fill_free_maps(pool);
        }
        Ok(region)
    }

    pub(crate) fn boot_token(&self) -> [u64; 2] {
        [self.hasher.seed.0, self.hasher.seed.1]
    }

    pub(crate) fn total_bytes(&self) -> usize {
        0
    }

    pub(crate) fn members(&self) -> &[MemberRecord] {
        &self.members
    }
}
