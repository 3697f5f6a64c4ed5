//! What the parent tells the processes of a control-plane measurement, and what they answer.
//!
//! Owns: the orders, the replies, and the keys.
//! **Invariant:** all processes derive the same key from the same number.

use serde::{Deserialize, Serialize};
use ucm_ctrl::{Geometry, Key, PoolGeometry, PoolId};

use crate::rng::Rng;

/// Blocks of one preallocation task.
pub(crate) const TASK_BLOCKS: u32 = 256;
/// Slots of the pool that processes wait in.
const WAIT_SLOTS: u32 = 4096;

/// Pool of the shared region whose keys are hit.
pub(crate) const HIT_POOL: PoolId = PoolId(0);
/// Pool of the shared region whose fills are waited for.
pub(crate) const WAIT_POOL: PoolId = PoolId(1);

/// The region that all processes share.
pub(crate) fn shared_geometry(slots: u32) -> Geometry {
    let pool = |slots| PoolGeometry { slots, reserved: 0, shards_per_block: 1, shard_bytes: 1 };
    Geometry { pools: vec![pool(slots), pool(WAIT_SLOTS)], leases: 0 }
}

/// The key of a number, spread like the hash of a block.
pub(crate) fn key(number: u64) -> Key {
    shard(number, 0)
}

/// A shard of the block of a number.
pub(crate) fn shard(number: u64, shard: u32) -> Key {
    let mut rng = Rng::new(number);
    let [lo, hi] = [rng.bits(), rng.bits()].map(u128::from);
    Key::new(((hi << 64) | lo).to_le_bytes(), shard)
}

/// A table that one process makes for itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub(crate) struct Size {
    pub(crate) slots: u32,
    pub(crate) keys: u32,
}

/// In which order a cache key and the bare futex wake the listener: `true` for the key. By chance,
/// because a scheduler may treat every second wake-up differently.
pub(crate) fn wake_order(first: u64, count: u32) -> Vec<bool> {
    let mut order: Vec<bool> = (0..count * 2).map(|at| at < count).collect();
    let mut rng = Rng::new(first);
    for at in 1..order.len() {
        let other = usize::try_from(rng.below(at as u64 + 1)).unwrap_or(0);
        order.swap(at, other);
    }
    order
}

/// What a process is told.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) enum Order {
    /// Make a table of this size and fill it. Answer: bytes of shared memory.
    Make(Size),
    /// Measure hits, lookups and floors in it. Answer: [`Speeds`].
    Measure { size: Size, seed: u64 },
    /// Measure misses under pressure. Answer: nanoseconds of each.
    Miss { slots: u32 },
    /// Measure acquires after preallocation and without. Answer: [`Prealloc`].
    Prealloc { slots: u32 },
    /// Join the shared region and map the bare futex, both files of the parent.
    Join { region: String, futex: String },
    /// Make this many keys of the shared region resident.
    Fill { keys: u32 },
    /// At `at_ns`, hit these keys. Answer: some [`Together`].
    Together { keys: u32, at_ns: u64, seed: u64 },
    /// Do nothing. Answer: none.
    Rest,
    /// Become the owner of a key in the pool for waiting.
    Own { key: u64 },
    /// Start a thread that waits for that key. Answer: its [`Task`].
    Await { key: u64 },
    /// Publish the key.
    Publish,
    /// Join the thread that waited.
    Awaited,
    /// Start a thread that waits for keys from `first` on and for the bare futex, in
    /// [`wake_order`]. Answer: its [`Task`].
    Listen { first: u64, count: u32 },
    /// Publish those keys and ring the futex, each when the listener sleeps. Answer: [`Instants`]
    /// right before each.
    Ring { first: u64, count: u32, listener: Task },
    /// Answer: [`Instants`] at which the listener ran again.
    Heard,
    /// Start a whole rank (steward, queues) with this configuration. Answer: the process.
    Start { rank: u32, config: String },
    /// Own a key in that rank's cache without filling it.
    Hold,
    /// Submit a load of that key, which waits for the owner.
    Load,
    /// Give the key up: one of those that wait loads it.
    GiveUp,
    /// Wait for the load to end.
    Loaded,
}

/// A thread of a process.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub(crate) struct Task {
    pub(crate) pid: u32,
    pub(crate) thread: u32,
}

/// Nanoseconds per operation, each the median of interleaved passes.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub(crate) struct Speeds {
    pub(crate) hit_ns: f64,
    pub(crate) lookup_ns: f64,
    pub(crate) prefix_ns: f64,
    pub(crate) read_floor_ns: f64,
    pub(crate) chase_floor_ns: f64,
    pub(crate) pin_floor_ns: f64,
    /// Medians of the differences between neighbouring passes.
    pub(crate) over_read_ns: f64,
    pub(crate) over_chase_ns: f64,
}

/// Nanoseconds per operation.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub(crate) struct Prealloc {
    /// Acquires after preallocation.
    pub(crate) with_ns: f64,
    /// The same without.
    pub(crate) without_ns: f64,
    /// The preallocations themselves.
    pub(crate) prealloc_ns: f64,
    /// Share of preallocations that made a slot.
    pub(crate) made_ratio: f64,
}

/// Nanoseconds per hit while others hit the same keys: the median of passes, and the processor time
/// of all.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub(crate) struct Together {
    pub(crate) wall_ns: f64,
    pub(crate) cpu_ns: f64,
}

/// Readings of the monotonic clock, one for each wake-up.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(crate) struct Instants {
    /// Through the cache.
    pub(crate) cache_ns: Vec<u64>,
    /// Through the bare futex.
    pub(crate) futex_ns: Vec<u64>,
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::{key, shard, wake_order};

    #[test]
    fn w3_keys_and_futex_are_mixed_alike_in_both_processes() {
        let order = wake_order(7, 500);
        assert_eq!((order.len(), order.iter().filter(|key| **key).count()), (1000, 500));
        assert_eq!(order, wake_order(7, 500));
        let changes = order.windows(2).filter(|pair| pair[0] != pair[1]).count();
        assert!((400..600).contains(&changes), "{changes}");
    }

    #[test]
    fn numbers_have_keys_of_their_own() {
        let keys: HashSet<_> = (0..10_000).map(|n| key(n).block).collect();
        assert_eq!(keys.len(), 10_000);
        assert_eq!(key(7), shard(7, 0));
        assert_ne!(shard(7, 0), shard(7, 1));
        assert_eq!(shard(7, 0).block, shard(7, 1).block);
    }
}
