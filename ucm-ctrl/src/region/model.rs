//! The region under loom: the same tables in ordinary collections of loom atomics.

use super::PoolTables;
use crate::{
    CtrlError, Geometry,
    geometry::free_map_words,
    key::Hasher,
    layout::{Bucket, LeaseRecord, MAX_MEMBERS, MemberRecord, PoolHot, Slot},
    sync::{AtomicU32, AtomicU64},
};

#[derive(Debug)]
pub(crate) struct Region {
    members: Vec<MemberRecord>,
    leases: Vec<LeaseRecord>,
    pools: Vec<PoolModel>,
    pub(super) geometry: Geometry,
    pub(super) hasher: Hasher,
}

#[derive(Debug)]
struct PoolModel {
    hot: PoolHot,
    buckets: Vec<Bucket>,
    slots: Vec<Slot>,
    accessed: Vec<AtomicU64>,
    free_regular: [Vec<AtomicU64>; 3],
    free_reserved: [Vec<AtomicU64>; 3],
}

fn many<T: Default>(count: usize) -> Vec<T> {
    (0..count).map(|_| T::default()).collect()
}

fn levels(map: &[Vec<AtomicU64>; 3]) -> [&[AtomicU64]; 3] {
    [&map[0], &map[1], &map[2]]
}

impl Region {
    pub(crate) fn create_private(
        geometry: &Geometry,
        boot_token: [u64; 2],
    ) -> Result<Self, CtrlError> {
        geometry.check()?;
        let region = Self {
            members: many(MAX_MEMBERS),
            leases: many(geometry.leases as usize),
            pools: geometry
                .pools
                .iter()
                .map(|pool| PoolModel {
                    hot: PoolHot::default(),
                    buckets: many(pool.buckets() as usize),
                    slots: many(pool.total() as usize),
                    accessed: many(pool.total().div_ceil(64) as usize),
                    free_regular: free_map_words(pool.slots).map(many),
                    free_reserved: free_map_words(pool.reserved).map(many),
                })
                .collect(),
            geometry: geometry.clone(),
            hasher: Hasher { seed: (boot_token[0], boot_token[1]), mask: u64::MAX },
        };
        for (index, pool) in geometry.pools.iter().enumerate() {
            if let Some(tables) = region.pool(index) {
                crate::freemap::fill(tables.free_regular, pool.slots);
                crate::freemap::fill(tables.free_reserved, pool.reserved);
            }
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

    pub(crate) fn leases(&self) -> &[LeaseRecord] {
        &self.leases
    }

    pub(crate) fn pool(&self, index: usize) -> Option<PoolTables<'_>> {
        let (pool, geometry) = (self.pools.get(index)?, self.geometry.pools.get(index)?);
        Some(PoolTables {
            hot: &pool.hot,
            buckets: &pool.buckets,
            slots: &pool.slots,
            accessed: &pool.accessed,
            free_regular: levels(&pool.free_regular),
            free_reserved: levels(&pool.free_reserved),
            regular: geometry.slots,
            shards_per_block: geometry.shards_per_block,
        })
    }
}

pub(crate) fn zeroed_counts(count: u32) -> Box<[AtomicU32]> {
    (0..count).map(|_| AtomicU32::new(0)).collect()
}
