//! A rank whose cache is full, so that every load is staged, on a simulated device.
//!
//! Owns: the node of one process, its storage of a fixed rate, its device, the destination memory.
//! **Invariant:** the fills that keep the cache full live as long as the lane.

use std::{path::Path, sync::Arc, time::Duration};

use ucm::{Addr, Config, Key, Memory, Node, Outcome, PoolId, Rank, RegionId, Request, ShardRef};
use ucm_ctrl::{Acquired, Fill};
use ucm_store::{Backend, Delay, LatencyBackend, PatternBackend, verify_pattern};
use ucm_transport::{DeviceRates, SimDevice};

use super::Args;
use crate::error::BenchError;

pub(super) const POOL: PoolId = PoolId(0);
const GENERATION: u64 = 1;
const SLOTS: u32 = 4;
const POISON: u8 = 0xEE;

/// Settings of a lane.
pub(super) struct Setup {
    pub(super) shard_bytes: u64,
    pub(super) buffer_bytes: u64,
    pub(super) depth: u32,
    pub(super) backend_depth: usize,
    pub(super) places: u64,
    /// Whether all slots are taken away.
    pub(super) full: bool,
}

/// See the module description.
pub(super) struct Lane {
    pub(super) rank: Rank,
    pub(super) device: Arc<SimDevice>,
    pub(super) memory: Memory,
    pub(super) shard_bytes: u64,
    region: RegionId,
    _fills: Vec<Fill>,
}

/// The generation that all objects of this benchmark have.
pub(super) fn pattern() -> PatternBackend {
    PatternBackend::new(GENERATION)
}

/// Shard number `n` of the benchmark.
pub(super) fn key(n: u64) -> Key {
    let mut block = [0x5a; 16];
    let (number, _) = block.split_at_mut(8);
    number.copy_from_slice(&n.to_le_bytes());
    Key::new(block, 0)
}

impl Lane {
    /// A lane of `depth` buffers for a makespan.
    pub(super) fn open(args: &Args, depth: u32, dir: &Path) -> Result<Self, BenchError> {
        // One read at a time, as long as its bytes take: the rate is exact however deep the queue.
        let ns = u128::from(args.shard_bytes) * 1_000_000_000 / u128::from(args.read_bytes_per_s);
        let delay = Delay::Fixed(Duration::from_nanos(u64::try_from(ns).unwrap_or(u64::MAX)));
        let storage = LatencyBackend::new(pattern(), delay, 1)
            .map_err(|e| BenchError::Environment(format!("storage: {e}")))?;
        let rates = DeviceRates { bytes_per_s: args.restore_bytes_per_s, ..DeviceRates::default() };
        let shards = u64::from(args.concurrency) * u64::from(args.shards);
        let setup = Setup {
            shard_bytes: args.shard_bytes,
            buffer_bytes: args.buffer_bytes(depth),
            depth,
            // Enough to keep the storage busy while one buffer is copied; more is only a longer
            // line for whoever comes next.
            backend_depth: args.shards as usize + 2,
            places: shards.max(u64::from(args.big_shards) + 1),
            full: true,
        };
        Self::with(&setup, Arc::new(storage), rates, dir)
    }

    pub(super) fn with(
        setup: &Setup,
        backend: Arc<dyn Backend>,
        rates: DeviceRates,
        dir: &Path,
    ) -> Result<Self, BenchError> {
        let settings = [
            format!("cache.dir={}", dir.display()),
            "cache.ranks=1".into(),
            "cache.pages=4k".into(),
            "pool.0.name=kv".into(),
            format!("pool.0.shard_bytes={}", setup.shard_bytes),
            format!("pool.0.slots={SLOTS}"),
            format!("queue.backend_depth={}", setup.backend_depth),
            format!("queue.tasks_in_flight={}", setup.depth),
            format!("queue.staging_bytes={}", setup.buffer_bytes * u64::from(setup.depth)),
            format!("queue.staging_buffer_bytes={}", setup.buffer_bytes),
            format!("queue.staging_buffers={}", with_those_of_dumps(setup.depth)),
        ];
        let config =
            Config::load(None, [], &settings).map_err(|e| BenchError::Usage(e.to_string()))?;
        let node = Node::new(config).map_err(|e| BenchError::Usage(e.to_string()))?;
        let device = SimDevice::start(rates).map_err(environment)?;
        let rank = node
            .rank(0)
            .backend(backend)
            .engine(device.clone())
            .start()
            .map_err(|e| BenchError::Environment(format!("the rank cannot start: {e}")))?;
        let len = usize::try_from(setup.places * setup.shard_bytes)
            .map_err(|_| BenchError::Usage("too many bytes".into()))?;
        let memory = Memory::host(len).map_err(environment)?;
        let region =
            rank.register(memory.clone()).map_err(|e| BenchError::Environment(e.to_string()))?;
        let mut fills = Vec::new();
        let taken = if setup.full { u64::from(SLOTS) } else { 0 };
        for n in 0..taken {
            let pool = rank.pool(POOL).map_err(|e| BenchError::Environment(e.to_string()))?;
            if let Ok(Acquired::Owner(fill)) = pool.acquire(&key(u64::MAX - n)) {
                fills.push(fill);
            }
        }
        let shard_bytes = setup.shard_bytes;
        Ok(Self { rank, device, memory, shard_bytes, region, _fills: fills })
    }

    pub(super) fn addr(&self, place: u64) -> Addr {
        Addr { region: self.region, offset: place * self.shard_bytes }
    }

    /// A request of `shards` shards from number `first`, to the places from `place`.
    pub(super) fn request(&self, first: u64, shards: u64, place: u64) -> Request {
        let shard = |n| ShardRef { key: key(first + n), dst: self.addr(place + n), len: None };
        Request { shards: (0..shards).map(shard).collect(), deadline: None }
    }

    /// Makes a place hold what no shard is.
    pub(super) fn poison(&self, place: u64) -> Result<(), BenchError> {
        let (at, len) = self.range(place);
        self.memory.write(at, &vec![POISON; len]).map_err(environment)
    }

    /// Wrong bytes at a place that should hold shard `n`.
    pub(super) fn wrong_bytes(&self, n: u64, place: u64) -> Result<u64, BenchError> {
        let (at, len) = self.range(place);
        let mut bytes = vec![0; len];
        self.memory.read(at, &mut bytes).map_err(environment)?;
        let key = key(n);
        Ok(match verify_pattern(&bytes, &key.block.0, key.shard, 0, GENERATION) {
            Ok(()) => 0,
            Err(_) => len as u64,
        })
    }

    fn range(&self, place: u64) -> (usize, usize) {
        let at = usize::try_from(place * self.shard_bytes).unwrap_or(usize::MAX);
        (at, usize::try_from(self.shard_bytes).unwrap_or(usize::MAX))
    }
}

/// Fails unless everything was loaded.
pub(super) fn all_loaded(outcomes: Option<Vec<Outcome>>) -> Result<(), BenchError> {
    match outcomes {
        Some(all) if all.iter().all(|outcome| *outcome == Outcome::Loaded) => Ok(()),
        other => Err(BenchError::Peer(format!("a load ended as {other:?}"))),
    }
}

pub(super) fn environment(error: impl std::fmt::Display) -> BenchError {
    BenchError::Environment(error.to_string())
}

/// A quarter of all buffers serves dumps: how many there must be so that loads have `depth`.
fn with_those_of_dumps(depth: u32) -> u32 {
    (depth..=2 * depth).find(|all| all - all / 4 == depth).unwrap_or(depth)
}

#[cfg(test)]
mod tests {
    use super::with_those_of_dumps;

    #[test]
    fn loads_have_the_depth_asked_for() {
        for depth in 1..=64 {
            let all = with_those_of_dumps(depth);
            assert_eq!(all - all / 4, depth);
        }
    }
}
