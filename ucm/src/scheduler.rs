//! The scheduler's role: knows what is in the cache, promises it, never touches its bytes.
//!
//! **Invariant:** nothing of the data plane is mapped.

use std::time::Instant;

use ucm_ctrl::{
    BlockId, Inspection, Key, LeaseOutcome, Member, MemberSpec, Pool, PoolId, Presence,
};

use crate::{
    Config, Error,
    instance::{self, Instance},
};

/// A member without a device. Thread-safe. Dropping it releases its leases and leaves.
#[derive(Debug)]
pub struct Scheduler {
    pools: Vec<Pool>,
    member: Member,
    created: bool,
}

impl Scheduler {
    pub(crate) fn join(config: &Config) -> Result<Self, Error> {
        let first = config.cache.scheduler_first.into();
        let instance = instance::enter(config, MemberSpec::scheduler(), first, &|_, _| {})?;
        // The descriptors stay held: if all ranks end, a rank that comes back finds the cache.
        let Instance { member, created, segments, .. } = instance;
        let pools = (0..segments.len())
            .map(|index| member.pool(PoolId(u8::try_from(index).unwrap_or(u8::MAX))))
            .collect::<Result<_, _>>()?;
        Ok(Self { pools, member, created })
    }

    /// Bytes of a slot for this process: there are none.
    #[must_use]
    pub fn data_at(
        &self,
        _pool: PoolId,
        _slot: ucm_ctrl::SlotId,
    ) -> Option<std::convert::Infallible> {
        None
    }

    /// Says for each key whether it is there.
    ///
    /// # Errors
    /// `Refused` for a pool that does not exist, `Fenced`.
    pub fn lookup(&self, pool: PoolId, keys: &[Key]) -> Result<Vec<Presence>, Error> {
        let mut out = vec![Presence::Absent; keys.len()];
        self.pool(pool)?.lookup(keys, &mut out)?;
        Ok(out)
    }

    /// Length of the longest prefix of keys that can be loaded without the backend.
    ///
    /// # Errors
    /// As [`lookup`](Self::lookup).
    pub fn prefix_lookup(&self, pool: PoolId, keys: &[Key]) -> Result<usize, Error> {
        Ok(self.pool(pool)?.prefix_lookup(keys)?)
    }

    /// Promises the longest ready prefix of keys for `consumers` later loads until the deadline.
    ///
    /// # Errors
    /// As [`lookup`](Self::lookup); `Refused` for no consumers.
    pub fn lease(
        &self,
        pool: PoolId,
        keys: &[Key],
        consumers: u16,
        deadline: Instant,
    ) -> Result<LeaseOutcome, Error> {
        Ok(self.pool(pool)?.lease(keys, consumers, deadline)?)
    }

    /// Renews blocks in the cache; returns resident shards renewed.
    ///
    /// # Errors
    /// `Fenced`.
    pub fn touch(&self, blocks: &[BlockId]) -> Result<usize, Error> {
        let mut touched = 0;
        for pool in &self.pools {
            touched += pool.touch(blocks)?;
        }
        Ok(touched)
    }

    /// This scheduler's membership in the control region.
    #[must_use]
    pub fn member(&self) -> &Member {
        &self.member
    }

    /// True when this process created the cache.
    #[must_use]
    pub fn created(&self) -> bool {
        self.created
    }

    /// A walk over the control region.
    #[must_use]
    pub fn inspect(&self) -> Inspection {
        self.member.control().inspect()
    }

    fn pool(&self, pool: PoolId) -> Result<&Pool, Error> {
        self.pools.get(usize::from(pool.0)).ok_or_else(|| {
            Error::Control(ucm_ctrl::CtrlError::Invalid(format!(
                "there is no pool {}, the cache has {}",
                pool.0,
                self.pools.len()
            )))
        })
    }
}
