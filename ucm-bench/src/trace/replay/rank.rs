//! A rank process of a replay.
//!
//! Owns: its membership, the memory that stands for a device, its backend.
//! **Invariant:** device memory holds poison whenever a load begins, and every byte a load brought is
//! compared with what it must be before the rank answers.

use std::sync::Arc;

use ucm::{
    Addr, Backend, BlockId, Config, Key, Memory, Node, Outcome, PoolId, Rank, RegionId, TaskHandle,
};
use ucm_ctrl::{Acquired, Presence};
use ucm_store::{
    FileBackend, FileConfig, Meter, Metered, PatternBackend, fill_pattern, verify_pattern,
};

use super::spec::{GENERATION, Keys, Order, Reply, Shards, Spec, identity};
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
            Order::Load { blocks } => loader.load(&blocks),
            Order::Compute { blocks } => loader.compute(&blocks),
            Order::Dump => loader.dump(),
            Order::Copy { blocks } => loader.copy(&blocks),
            Order::Follow { requests } => loader.follow(&requests),
        }
    })
}

/// A backend whose loads are counted.
enum Source {
    File(Arc<Metered<FileBackend>>),
    Pattern(Arc<Metered<PatternBackend>>),
}

impl Source {
    fn open(spec: &Spec) -> Result<Self, BenchError> {
        let Some(dir) = &spec.store else {
            return Ok(Self::Pattern(Arc::new(Metered::new(PatternBackend::new(GENERATION)))));
        };
        let config =
            FileConfig::new(dir, identity().descriptor().to_vec()).io(ucm_store::FileIo::Buffered);
        let backend = FileBackend::open(config)
            .map_err(|e| BenchError::Environment(format!("backend: {e}")))?;
        Ok(Self::File(Arc::new(Metered::new(backend))))
    }

    fn backend(&self) -> Arc<dyn Backend> {
        match self {
            Self::File(backend) => backend.clone(),
            Self::Pattern(backend) => backend.clone(),
        }
    }

    fn meter(&self) -> &Meter {
        match self {
            Self::File(backend) => backend.meter(),
            Self::Pattern(backend) => backend.meter(),
        }
    }
}

struct Loader {
    spec: Spec,
    index: u32,
    rank: Rank,
    source: Source,
    keys: Keys,
    /// Stands for device memory: room for the largest request.
    memory: Memory,
    region: RegionId,
    shard: usize,
    poison: Vec<u8>,
    /// One shard, for comparisons.
    scratch: Vec<u8>,
    /// Destination of the memcpy floor, as large as the device memory; made when asked for.
    floor: Vec<u8>,
    /// Keys and places of what `Compute` made.
    computed: Vec<(Key, Addr)>,
}

impl Loader {
    fn open(index: u32, spec: Spec) -> Result<Self, BenchError> {
        let environment = |e: &dyn std::fmt::Display| BenchError::Environment(e.to_string());
        let source = Source::open(&spec)?;
        let config =
            Config::from_toml(&spec.config).map_err(|e| BenchError::Usage(e.to_string()))?;
        let node = Node::new(config).map_err(|e| BenchError::Usage(e.to_string()))?;
        let rank = node
            .rank(index)
            .backend(source.backend())
            .start()
            .map_err(|e| environment(&format!("rank {index} cannot join: {e}")))?;
        let shard = usize::try_from(spec.shard_bytes).map_err(|e| environment(&e))?;
        let shards = u64::from(spec.max_blocks) * u64::from(spec.shards_per_block);
        let len = usize::try_from(shards * spec.shard_bytes).map_err(|e| environment(&e))?;
        let memory = Memory::host(len).map_err(|e| environment(&e))?;
        let region = rank.register(memory.clone()).map_err(|e| environment(&e))?;
        let loader = Self {
            spec,
            index,
            rank,
            source,
            keys: Keys::new(),
            memory,
            region,
            shard,
            poison: vec![POISON; shard],
            scratch: vec![0; shard],
            floor: Vec::new(),
            computed: Vec::new(),
        };
        (0..shards).try_for_each(|place| loader.poison(place))?;
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

    fn addr(&self, place: u64) -> Addr {
        Addr { region: self.region, offset: place * self.spec.shard_bytes }
    }

    fn offset(&self, place: u64) -> usize {
        usize::try_from(place).unwrap_or(usize::MAX).saturating_mul(self.shard)
    }

    fn poison(&self, place: u64) -> Result<(), BenchError> {
        self.memory.write(self.offset(place), &self.poison).map_err(peer)
    }

    /// Shards of blocks, layer by layer: (key, place in device memory).
    fn layers(&self, blocks: &[u32]) -> Vec<Vec<(Key, u64)>> {
        let layers = self.spec.shards_per_block;
        let mut by_layer = vec![Vec::with_capacity(blocks.len()); layers as usize];
        for (at, block) in (0_u64..).zip(blocks) {
            let shards = self.keys.of(*block, layers);
            for ((place, key), layer) in (at * u64::from(layers)..).zip(shards).zip(&mut by_layer) {
                layer.push((key, place));
            }
        }
        by_layer
    }

    /// One task a layer, all submitted at once, as an engine does that overlaps loading with the
    /// layers it computes already.
    fn load(&mut self, blocks: &[u32]) -> Result<Reply, BenchError> {
        let layers = self.layers(blocks);
        let tasks: Vec<Vec<(Key, Addr)>> = layers
            .iter()
            .map(|layer| layer.iter().map(|(key, place)| (*key, self.addr(*place))).collect())
            .collect();
        let before = self.rank.stats(POOL).map_err(peer)?;
        let loads_before = self.source.meter().report().loads;
        let start_ns = clock::now_ns();
        let mut handles = Vec::with_capacity(tasks.len());
        for task in &tasks {
            handles.push(self.rank.load(POOL, task).map_err(peer)?);
        }
        handles.into_iter().try_for_each(all_loaded)?;
        let end_ns = clock::now_ns();
        let after = self.rank.stats(POOL).map_err(peer)?;
        let count = tasks.iter().map(|task| task.len() as u64).sum::<u64>();
        let mut reply = Reply {
            start_ns,
            end_ns,
            bytes: count * self.spec.shard_bytes,
            shards: Shards::between(&before, &after),
            backend_loads: self.source.meter().report().loads - loads_before,
            ..Reply::default()
        };
        for (key, place) in layers.into_iter().flatten() {
            self.verify(&key, place, &mut reply)?;
        }
        Ok(reply)
    }

    /// Compares one place with what it must hold, and poisons it.
    fn verify(&mut self, key: &Key, place: u64, reply: &mut Reply) -> Result<(), BenchError> {
        self.memory.read(self.offset(place), &mut self.scratch).map_err(peer)?;
        compare(&self.scratch, key, self.index, reply);
        self.poison(place)
    }

    /// Every rank computes the same KV; block i of the request is dumped by rank i of N.
    fn compute(&mut self, blocks: &[u32]) -> Result<Reply, BenchError> {
        let mine: Vec<u32> = (0..)
            .zip(blocks)
            .filter(|(at, _): &(u32, _)| at % self.spec.ranks == self.index)
            .map(|(_, block)| *block)
            .collect();
        self.computed.clear();
        for (key, place) in self.layers(&mine).into_iter().flatten() {
            fill_pattern(&mut self.scratch, &key.block.0, key.shard, 0, GENERATION);
            self.memory.write(self.offset(place), &self.scratch).map_err(peer)?;
            self.computed.push((key, self.addr(place)));
        }
        Ok(Reply::default())
    }

    fn dump(&mut self) -> Result<Reply, BenchError> {
        let computed = std::mem::take(&mut self.computed);
        let start_ns = clock::now_ns();
        // What may be on its way at once is bounded; parts of 64 shards never exceed it alone.
        let mut handles = Vec::new();
        for part in computed.chunks(64) {
            handles.push(self.rank.dump(POOL, part, true).map_err(peer)?);
        }
        for handle in handles {
            let results = handle.wait_durable(None).unwrap_or_default();
            if let Some(error) = results.iter().find_map(|result| result.err()) {
                return Err(BenchError::Environment(format!("a shard was not stored: {error}")));
            }
        }
        let end_ns = clock::now_ns();
        let bytes = computed.len() as u64 * self.spec.shard_bytes;
        (0..computed.len() as u64).try_for_each(|place| self.poison(place))?;
        Ok(Reply { start_ns, end_ns, bytes, ..Reply::default() })
    }

    /// The floor: the same copies without anything around them.
    fn copy(&mut self, blocks: &[u32]) -> Result<Reply, BenchError> {
        let pool = self.rank.pool(POOL).map_err(peer)?;
        let data = self.rank.data(POOL).map_err(peer)?;
        self.floor.resize(self.memory.len(), POISON);
        let mut pins = Vec::new();
        for (key, _) in self.layers(blocks).into_iter().flatten() {
            if let Some(Acquired::Hit(pin)) = pool.acquire_resident(&key).map_err(peer)? {
                pins.push(pin);
            }
        }
        let start_ns = clock::now_ns();
        for (pin, to) in pins.iter().zip(self.floor.chunks_mut(self.shard)) {
            data.read(pin.slot().0, 0, to).map_err(peer)?;
        }
        let end_ns = clock::now_ns();
        let bytes = pins.len() as u64 * self.spec.shard_bytes;
        Ok(Reply { start_ns, end_ns, bytes, ..Reply::default() })
    }

    /// Reference by reference in the order of the models: what is there when a request comes is a
    /// hit; hits first, then the others one after the other, both from the deepest block to the
    /// root. Each reference is a task of one shard.
    fn follow(&mut self, requests: &[Vec<u32>]) -> Result<Reply, BenchError> {
        let mut reply = Reply::default();
        let before = self.rank.stats(POOL).map_err(peer)?;
        let loads_before = self.source.meter().report().loads;
        let mut spent_ns = 0;
        for blocks in requests {
            let keys: Vec<Key> = blocks.iter().flat_map(|block| self.keys.of(*block, 1)).collect();
            let mut presence = vec![Presence::Absent; keys.len()];
            let mut handles = Vec::with_capacity(keys.len());
            let start_ns = clock::now_ns();
            let pool = self.rank.pool(POOL).map_err(peer)?;
            pool.lookup(&keys, &mut presence).map_err(peer)?;
            let found = |wanted: bool| {
                let all = keys.iter().zip(&presence).enumerate().rev();
                all.filter(move |(_, (_, there))| (**there == Presence::Ready) == wanted)
                    .map(|(place, (key, _))| (place as u64, *key))
            };
            // Hits change no order, so they need not wait for each other.
            for (place, key) in found(true) {
                handles.push(self.rank.load(POOL, &[(key, self.addr(place))]).map_err(peer)?);
                reply.hits += 1;
            }
            handles.drain(..).try_for_each(all_loaded)?;
            let mut loaded: Vec<(u64, Key)> = found(true).collect();
            for (place, key) in found(false) {
                // A chain that names a block twice loads it once.
                let mut there = [Presence::Absent];
                pool.lookup(&[key], &mut there).map_err(peer)?;
                if there != [Presence::Ready] {
                    let task = self.rank.load(POOL, &[(key, self.addr(place))]).map_err(peer)?;
                    all_loaded(task)?;
                    loaded.push((place, key));
                }
            }
            spent_ns += clock::now_ns() - start_ns;
            reply.bytes += loaded.len() as u64 * self.spec.shard_bytes;
            for (place, key) in loaded {
                self.verify(&key, place, &mut reply)?;
            }
        }
        let after = self.rank.stats(POOL).map_err(peer)?;
        reply.end_ns = spent_ns;
        reply.shards = Shards::between(&before, &after);
        reply.backend_loads = self.source.meter().report().loads - loads_before;
        Ok(reply)
    }
}

/// Counts wrong bytes of a shard from the first wrong word on, and says what that word seems to be.
fn compare(bytes: &[u8], key: &Key, rank: u32, reply: &mut Reply) {
    reply.checked_bytes += bytes.len() as u64;
    let BlockId(block) = &key.block;
    if let Err(wrong) = verify_pattern(bytes, block, key.shard, 0, GENERATION) {
        reply.wrong_bytes += bytes.len() as u64 - wrong.offset_words * 8;
        reply.first_wrong.get_or_insert_with(|| format!("rank {rank}, {key:?}: {wrong}"));
    }
}

fn all_loaded(task: TaskHandle) -> Result<(), BenchError> {
    match task.wait(None) {
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

#[cfg(test)]
mod tests {
    use ucm_store::fill_pattern;

    use super::{GENERATION, Key, Keys, POISON, Reply, compare};

    #[test]
    fn every_wrong_byte_is_found() {
        let key = Keys::new().of(7, 3).last().unwrap();
        let mut bytes = vec![0; 4096];
        fill_pattern(&mut bytes, &key.block.0, key.shard, 0, GENERATION);
        let check = |bytes: &[u8], key: &Key| {
            let mut reply = Reply::default();
            compare(bytes, key, 1, &mut reply);
            assert_eq!(reply.checked_bytes, 4096);
            (reply.wrong_bytes, reply.first_wrong)
        };
        assert_eq!(check(&bytes, &key), (0, None));
        for at in [0, 2049, 4095] {
            let mut wrong = bytes.clone();
            wrong[at] ^= 1;
            let (count, text) = check(&wrong, &key);
            assert!(count > 0 && count <= 4096, "byte {at}");
            assert!(text.unwrap().contains("rank 1"));
        }
        let other = Keys::new().of(7, 3).next().unwrap();
        assert_eq!(check(&bytes, &other).0, 4096);
        assert_eq!(check(&[POISON; 4096], &key).0, 4096);
    }
}
