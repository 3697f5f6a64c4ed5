//! A rank process of a load measurement.
//!
//! Owns: its membership, its destination memory, its backend.
//! **Invariant:** before each verified load the destination is filled with poison, so that bytes
//! left from an earlier one cannot pass for loaded ones.

use std::{sync::Arc, time::Instant};

use ucm::{
    Addr, Backend, Config, Key, Memory, Node, Outcome, PoolId, Rank, RegionId, Request, ShardRef,
    Task,
};
use ucm_store::{
    Delay, FileBackend, LatencyBackend, Meter, Metered, PatternBackend, verify_pattern,
};

use super::spec::{BackendChoice, FileIoChoice, GENERATION, Order, OrderChoice, Reply, Spec};
use crate::{clock, error::BenchError, ranks};

const POISON: u8 = 0xEE;
const POOL: PoolId = PoolId(0);

/// Serves orders until the parent leaves.
pub(crate) fn run() -> Result<(), BenchError> {
    let mut member: Option<Loader> = None;
    ranks::serve(|order: Order| {
        if let Order::Open { rank, spec } = order {
            let loader = Loader::open(rank, *spec)?;
            let reply = loader.introduce();
            member = Some(loader);
            return Ok(reply);
        }
        let loader =
            member.as_mut().ok_or_else(|| BenchError::Peer("an order before Open".into()))?;
        match order {
            Order::Open { .. } => Ok(Reply::default()),
            Order::Store { run } => loader.store(run),
            Order::Load { run, at_ns, order } => loader.load(run, at_ns, order),
            Order::Copy { run, at_ns } => loader.copy(run, at_ns),
            Order::Clear { run } => loader.clear(run),
        }
    })
}

/// A backend whose loads are counted.
enum Source {
    Slow(Arc<LatencyBackend<PatternBackend>>),
    Memory(Arc<Metered<PatternBackend>>),
    File(Arc<Metered<FileBackend>>),
}

impl Source {
    fn open(spec: &Spec) -> Result<Self, BenchError> {
        let store = |e: ucm_store::StoreError| BenchError::Environment(format!("backend: {e}"));
        let pattern = || PatternBackend::new(GENERATION);
        Ok(match spec.backend {
            BackendChoice::Slow => {
                let delay = Delay::Fixed(std::time::Duration::from_micros(spec.latency_us));
                let depth = spec.backend_depth as usize;
                Self::Slow(Arc::new(LatencyBackend::new(pattern(), delay, depth).map_err(store)?))
            }
            BackendChoice::Memory => Self::Memory(Arc::new(Metered::new(pattern()))),
            BackendChoice::File => {
                let config = ucm_store::FileConfig::new(
                    &spec.backend_dir,
                    super::spec::identity().descriptor().to_vec(),
                )
                .io(match spec.file_io {
                    FileIoChoice::Auto => ucm_store::FileIo::Auto,
                    FileIoChoice::Threads => ucm_store::FileIo::Threads,
                    FileIoChoice::Buffered => ucm_store::FileIo::Buffered,
                });
                Self::File(Arc::new(Metered::new(FileBackend::open(config).map_err(store)?)))
            }
        })
    }

    fn backend(&self) -> Arc<dyn Backend> {
        match self {
            Self::Slow(backend) => backend.clone(),
            Self::Memory(backend) => backend.clone(),
            Self::File(backend) => backend.clone(),
        }
    }

    fn meter(&self) -> &Meter {
        match self {
            Self::Slow(backend) => backend.meter(),
            Self::Memory(backend) => backend.meter(),
            Self::File(backend) => backend.meter(),
        }
    }
}

struct Loader {
    spec: Spec,
    index: u32,
    rank: Rank,
    source: Source,
    memory: Memory,
    region: RegionId,
    /// As large as the destination, for the memcpy floor.
    floor: Vec<u8>,
}

impl Loader {
    fn open(index: u32, spec: Spec) -> Result<Self, BenchError> {
        let source = Source::open(&spec)?;
        let config: Config =
            Config::from_toml(&spec.config).map_err(|e| BenchError::Usage(e.to_string()))?;
        let node = Node::new(config).map_err(|e| BenchError::Usage(e.to_string()))?;
        let rank = node
            .rank(index)
            .backend(source.backend())
            .start()
            .map_err(|e| BenchError::Environment(format!("rank {index} cannot join: {e}")))?;
        let len = usize::try_from(spec.bytes())
            .map_err(|_| BenchError::Usage("too many bytes".into()))?;
        let memory = Memory::host(len).map_err(|e| BenchError::Environment(e.to_string()))?;
        let region =
            rank.register(memory.clone()).map_err(|e| BenchError::Environment(e.to_string()))?;
        let loader = Self { spec, index, rank, source, memory, region, floor: vec![POISON; len] };
        loader.poison()?;
        Ok(loader)
    }

    fn introduce(&self) -> Reply {
        let report = self.rank.report();
        Reply {
            page_tier: report.pages.join(", "),
            engine: report.engine,
            backend: report.backend,
            ..Reply::default()
        }
    }

    /// Fills the destination with poison; also makes its pages present.
    fn poison(&self) -> Result<(), BenchError> {
        let chunk = vec![POISON; 1 << 20];
        let mut at = 0;
        while at < self.memory.len() {
            let len = chunk.len().min(self.memory.len() - at);
            let (part, _) = chunk.split_at(len);
            self.memory.write(at, part).map_err(peer)?;
            at += len;
        }
        Ok(())
    }

    fn destination(&self, task: usize, index: usize) -> Addr {
        let shard = task as u64 * u64::from(self.spec.blocks) + index as u64;
        Addr { region: self.region, offset: shard * self.spec.shard_bytes }
    }

    fn request(&self, task: usize, index: usize, key: Key) -> Request {
        let shard = ShardRef { key, dst: self.destination(task, index), len: None };
        Request { shards: vec![shard], deadline: None }
    }

    fn load(&mut self, run: u32, at_ns: u64, order: OrderChoice) -> Result<Reply, BenchError> {
        let tasks = self.spec.tasks(run);
        if self.spec.verify {
            self.poison()?;
        }
        let meter = self.source.meter();
        meter.reset();
        meter.keep_timeline();
        let anchor = clock::Anchor::now();
        clock::wait_until(at_ns + self.jitter_ns(run));
        let cpu = clock::cpu_ns();
        let start_ns = clock::now_ns();
        let task_us = match order {
            OrderChoice::Lockstep => self.load_in_lockstep(&tasks)?,
            OrderChoice::Rotated | OrderChoice::Natural => self.load_at_once(&tasks)?,
        };
        let end_ns = clock::now_ns();
        let cpu_ns = clock::cpu_ns() - cpu;
        let meter = self.source.meter();
        let timeline =
            meter.take_timeline().into_iter().map(|(at, n)| (anchor.ns(at), n)).collect();
        let mut reply = Reply {
            start_ns,
            end_ns,
            cpu_ns,
            task_us,
            backend_loads: meter.report().loads,
            timeline,
            ..Reply::default()
        };
        if self.spec.verify {
            self.verify(&tasks, &mut reply)?;
        }
        Ok(reply)
    }

    /// All tasks are submitted, then awaited in order.
    fn load_at_once(&self, tasks: &[Vec<Key>]) -> Result<Vec<f64>, BenchError> {
        let mut handles = Vec::with_capacity(tasks.len());
        for (number, keys) in tasks.iter().enumerate() {
            let shards = keys.iter().enumerate().map(|(index, key)| ShardRef {
                key: *key,
                dst: self.destination(number, index),
                len: None,
            });
            let request = Request { shards: shards.collect(), deadline: None };
            let begin = Instant::now();
            let task = self.rank.submit(POOL, Task { requests: vec![request] }).map_err(peer)?;
            handles.push((begin, task));
        }
        let mut task_us = Vec::with_capacity(handles.len());
        for (begin, handle) in handles {
            all_loaded(handle.wait(None))?;
            task_us.push(begin.elapsed().as_secs_f64() * 1e6);
        }
        Ok(task_us)
    }

    /// The old way: each shard is awaited before the next is asked for.
    fn load_in_lockstep(&self, tasks: &[Vec<Key>]) -> Result<Vec<f64>, BenchError> {
        let mut task_us = Vec::with_capacity(tasks.len());
        for (number, keys) in tasks.iter().enumerate() {
            let begin = Instant::now();
            for (index, key) in keys.iter().enumerate() {
                let request = self.request(number, index, *key);
                let task =
                    self.rank.submit(POOL, Task { requests: vec![request] }).map_err(peer)?;
                all_loaded(task.wait(None))?;
            }
            task_us.push(begin.elapsed().as_secs_f64() * 1e6);
        }
        Ok(task_us)
    }

    fn copy(&mut self, run: u32, at_ns: u64) -> Result<Reply, BenchError> {
        let pool = self.rank.pool(POOL).map_err(peer)?;
        let data = self.rank.data(POOL).map_err(peer)?;
        let mut pins = Vec::new();
        for key in self.spec.tasks(run).iter().flatten() {
            match pool.acquire(key).map_err(peer)? {
                ucm_ctrl::Acquired::Hit(pin) => pins.push(pin),
                other => {
                    return Err(BenchError::Peer(format!("{key:?} is not resident: {other:?}")));
                }
            }
        }
        let shard = usize::try_from(self.spec.shard_bytes).unwrap_or(usize::MAX);
        clock::wait_until(at_ns);
        let start_ns = clock::now_ns();
        for (pin, to) in pins.iter().zip(self.floor.chunks_mut(shard)) {
            data.read(pin.slot().0, 0, to).map_err(peer)?;
        }
        Ok(Reply { start_ns, end_ns: clock::now_ns(), ..Reply::default() })
    }

    fn clear(&mut self, run: u32) -> Result<Reply, BenchError> {
        let pool = self.rank.pool(POOL).map_err(peer)?;
        for key in self.spec.tasks(run).iter().flatten() {
            let removal = pool.remove(key).map_err(peer)?;
            if removal == ucm_ctrl::Removal::InUse {
                return Err(BenchError::Peer(format!(
                    "{key:?} is still in use after all tasks have ended"
                )));
            }
        }
        Ok(Reply::default())
    }

    /// Dumps what the pattern says, through the cache's dump path into the backend.
    fn store(&mut self, run: u32) -> Result<Reply, BenchError> {
        let tasks = self.spec.tasks(run);
        let mut bytes = vec![0; usize::try_from(self.spec.shard_bytes).unwrap_or(0)];
        for (number, keys) in tasks.iter().enumerate() {
            let mut shards = Vec::new();
            for (index, key) in keys.iter().enumerate() {
                let addr = self.destination(number, index);
                ucm_store::fill_pattern(&mut bytes, &key.block.0, key.shard, 0, GENERATION);
                let offset = usize::try_from(addr.offset).unwrap_or(usize::MAX);
                self.memory.write(offset, &bytes).map_err(peer)?;
                shards.push((*key, addr));
            }
            for part in shards.chunks(16) {
                let handle = self.rank.dump(POOL, part, true).map_err(peer)?;
                let results = handle.wait_durable(None).unwrap_or_default();
                if let Some(error) = results.iter().find_map(|result| result.err()) {
                    return Err(BenchError::Environment(format!(
                        "the backend did not store a shard: {error}"
                    )));
                }
            }
        }
        self.clear(run)
    }

    fn verify(&self, tasks: &[Vec<Key>], reply: &mut Reply) -> Result<(), BenchError> {
        let mut bytes = vec![0; usize::try_from(self.spec.shard_bytes).unwrap_or(0)];
        for (number, keys) in tasks.iter().enumerate() {
            for (index, key) in keys.iter().enumerate() {
                let offset = self.destination(number, index).offset;
                self.memory
                    .read(usize::try_from(offset).unwrap_or(usize::MAX), &mut bytes)
                    .map_err(peer)?;
                if let Err(mismatch) =
                    verify_pattern(&bytes, &key.block.0, key.shard, 0, GENERATION)
                {
                    reply.wrong_bytes += bytes.len() as u64 - mismatch.offset_words * 8;
                    let place = format!("rank {}, {key:?}: {mismatch}", self.index);
                    reply.first_wrong.get_or_insert(place);
                }
            }
        }
        Ok(())
    }

    fn jitter_ns(&self, run: u32) -> u64 {
        let seed = (u64::from(run) << 32) | u64::from(self.index);
        crate::rng::Rng::new(seed).below(self.spec.jitter_us.saturating_mul(1000))
    }
}

fn all_loaded(outcomes: Option<Vec<Outcome>>) -> Result<(), BenchError> {
    match outcomes {
        Some(outcomes) => match outcomes.into_iter().find(|outcome| *outcome != Outcome::Loaded) {
            None => Ok(()),
            Some(outcome) => Err(BenchError::Peer(format!("a request ended as {outcome:?}"))),
        },
        None => Err(BenchError::Peer("a wait without deadline ended without outcome".into())),
    }
}

fn peer(error: impl std::fmt::Display) -> BenchError {
    BenchError::Peer(error.to_string())
}
