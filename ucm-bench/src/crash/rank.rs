//! A rank process of a crash measurement: loads and dumps at random until told to finish.
//!
//! Owns: its membership, its memory, its worker threads.
//! **Invariant:** every shard of every load that claims success is compared byte by byte.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use ucm::{
    Addr, Config, Key, Memory, Node, Outcome, PoolId, Rank, RegionId, Request, ShardRef, Task,
};
use ucm_store::{Delay, LatencyBackend, PatternBackend, fill_pattern, verify_pattern};

use super::spec::{GENERATION, Order, Reply, Spec, note_wrong};
use crate::{error::BenchError, ranks, rng::Rng};

const POOL: PoolId = PoolId(0);
const SHARDS_PER_BLOCK: u32 = 4;
/// Shards of one task.
const TASK: usize = 8;
const WORKERS: u64 = 2;
/// A task that takes longer is stuck.
const STUCK: Duration = Duration::from_secs(5);
const POISON: u8 = 0xEE;

/// Serves orders until the parent leaves.
pub(crate) fn run() -> Result<(), BenchError> {
    let mut rank: Option<Crew> = None;
    ranks::serve(|order: Order| {
        if let Order::Open { rank: index, life, spec } = order {
            let crew = Crew::start(index, life, *spec)?;
            let reply = crew.reply();
            rank = Some(crew);
            return Ok(reply);
        }
        let crew = rank.as_mut().ok_or_else(|| BenchError::Peer("an order before Open".into()))?;
        if matches!(order, Order::Finish) {
            crew.finish()?;
        }
        Ok(crew.reply())
    })
}

/// The workers of one rank.
struct Crew {
    site: Arc<Site>,
    workers: Vec<JoinHandle<Result<(), BenchError>>>,
}

struct Site {
    rank: Rank,
    spec: Spec,
    done: AtomicBool,
    ops: AtomicU64,
    stuck: AtomicU64,
}

impl Crew {
    fn start(index: u32, life: u64, spec: Spec) -> Result<Self, BenchError> {
        let environment =
            |e: &dyn std::fmt::Display| BenchError::Environment(format!("rank {index}: {e}"));
        let delay = Delay::Fixed(Duration::from_micros(spec.latency_us));
        let backend = LatencyBackend::new(PatternBackend::new(GENERATION), delay, 4)
            .map_err(|e| environment(&e))?;
        let rank = Config::from_toml(&spec.config)
            .and_then(Node::new)
            .and_then(|node| node.rank(index).backend(Arc::new(backend)).start())
            .map_err(|e| environment(&e))?;
        let site =
            Arc::new(Site { rank, spec, done: false.into(), ops: 0.into(), stuck: 0.into() });
        let worker = |number: u64| {
            let site = site.clone();
            let seed = site.spec.seed ^ (life << 16) ^ (u64::from(index) << 8) ^ number;
            std::thread::spawn(move || Worker::new(site, seed)?.work())
        };
        let workers = (0..WORKERS).map(worker).collect();
        Ok(Self { site, workers })
    }

    fn reply(&self) -> Reply {
        let member = self.site.rank.member();
        Reply {
            seat: member.id().0,
            generation: member.generation(),
            ops: self.site.ops.load(Ordering::Relaxed),
            stuck: self.site.stuck.load(Ordering::Relaxed),
        }
    }

    fn finish(&mut self) -> Result<(), BenchError> {
        self.site.done.store(true, Ordering::Relaxed);
        for worker in self.workers.drain(..) {
            worker.join().map_err(|_| BenchError::Peer("a worker panicked".into()))??;
        }
        Ok(())
    }
}

struct Worker {
    site: Arc<Site>,
    rng: Rng,
    memory: Memory,
    region: RegionId,
    shard: Vec<u8>,
}

impl Worker {
    fn new(site: Arc<Site>, seed: u64) -> Result<Self, BenchError> {
        let bytes = usize::try_from(site.spec.shard_bytes).unwrap_or(usize::MAX);
        let memory = Memory::host(bytes.saturating_mul(TASK)).map_err(peer)?;
        let region = site.rank.register(memory.clone()).map_err(peer)?;
        Ok(Self { site, rng: Rng::new(seed), memory, region, shard: vec![0; bytes] })
    }

    fn work(mut self) -> Result<(), BenchError> {
        while !self.site.done.load(Ordering::Relaxed) {
            match self.rng.below(8) {
                0 => self.dump()?,
                1 => {
                    let block = self.key().block;
                    self.site.rank.touch(&[block]).map_err(peer)?;
                }
                _ => self.load()?,
            }
            self.site.ops.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Small numbers are asked for more often, so that ranks meet.
    fn key(&mut self) -> Key {
        let spread = self.rng.below(self.site.spec.keys) + 1;
        let block = self.rng.below(spread);
        let shard = u32::try_from(self.rng.below(u64::from(SHARDS_PER_BLOCK))).unwrap_or(0);
        Key::new(u128::from(block).to_le_bytes(), shard)
    }

    fn keys(&mut self) -> Vec<(Key, Addr)> {
        let mut keys: Vec<Key> = (0..TASK).map(|_| self.key()).collect();
        keys.sort_unstable();
        keys.dedup();
        let bytes = self.site.spec.shard_bytes;
        let addr = |index: u64| Addr { region: self.region, offset: index * bytes };
        (0..).zip(keys).map(|(index, key)| (key, addr(index))).collect()
    }

    fn load(&mut self) -> Result<(), BenchError> {
        let keys = self.keys();
        self.memory.write(0, &vec![POISON; self.memory.len()]).map_err(peer)?;
        let shards =
            keys.iter().map(|(key, dst)| ShardRef { key: *key, dst: *dst, len: None }).collect();
        let request = Request { shards, deadline: None };
        let task = self.site.rank.submit(POOL, Task { requests: vec![request] }).map_err(peer)?;
        let outcomes = match task.wait(Some(Instant::now() + STUCK)) {
            Some(outcomes) => outcomes,
            None => {
                self.site.stuck.fetch_add(1, Ordering::Relaxed);
                task.wait(None).unwrap_or_default()
            }
        };
        for outcome in outcomes {
            let bad = match outcome {
                Outcome::Loaded => Vec::new(),
                Outcome::Recompute { shards, .. } => shards,
                _ => continue,
            };
            for (index, (key, addr)) in (0_u32..).zip(&keys) {
                if !bad.contains(&index) {
                    self.verify(*key, *addr)?;
                }
            }
        }
        Ok(())
    }

    fn verify(&mut self, key: Key, addr: Addr) -> Result<(), BenchError> {
        let offset = usize::try_from(addr.offset).unwrap_or(usize::MAX);
        self.memory.read(offset, &mut self.shard).map_err(peer)?;
        if let Err(mismatch) = verify_pattern(&self.shard, &key.block.0, key.shard, 0, GENERATION) {
            note_wrong(&self.site.spec, &format!("{key:?}: {mismatch}"));
        }
        Ok(())
    }

    fn dump(&mut self) -> Result<(), BenchError> {
        let keys = self.keys();
        for (key, addr) in &keys {
            fill_pattern(&mut self.shard, &key.block.0, key.shard, 0, GENERATION);
            let offset = usize::try_from(addr.offset).unwrap_or(usize::MAX);
            self.memory.write(offset, &self.shard).map_err(peer)?;
        }
        let handle = self.site.rank.dump(POOL, &keys, false).map_err(peer)?;
        if handle.wait_cached(Some(Instant::now() + STUCK)).is_none() {
            self.site.stuck.fetch_add(1, Ordering::Relaxed);
            let _ = handle.wait_cached(None);
        }
        Ok(())
    }
}

fn peer(error: impl std::fmt::Display) -> BenchError {
    BenchError::Peer(error.to_string())
}
