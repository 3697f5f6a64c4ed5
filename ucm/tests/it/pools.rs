//! Several pools of one node: same keys, different bytes, at the same time.

use std::sync::Arc;

use ucm::{Addr, Backend, BackendKind, Key, Memory, Node, Outcome, PoolId, Rank, RegionId};
use ucm_store::{MemoryBackend, fill_pattern, verify_pattern};

const SHARD: usize = 8192;
const KEYS: usize = 40;
/// Less than the keys: loads go to the backend again and again.
const SLOTS: u32 = 16;

fn node(dir: &std::path::Path, shards: [u64; 2], files: bool) -> Node {
    Node::builder("pools")
        .dir(dir.join("cache"))
        .pool(shards[0], 1, SLOTS)
        .pool(shards[1], 1, SLOTS)
        .configure(|config| {
            config.cache.pages = ucm::Pages::Small;
            if files {
                config.backend.kind = BackendKind::File;
                config.backend.dir = dir.join("objects");
            }
        })
        .build()
        .unwrap()
}

fn key(number: usize) -> Key {
    Key::new((number as u128).to_le_bytes(), 0)
}

struct Side {
    pool: PoolId,
    shard: usize,
    memory: Memory,
    region: RegionId,
}

impl Side {
    fn new(rank: &Rank, pool: u8, shard: usize) -> Self {
        let memory = Memory::host(shard * KEYS).unwrap();
        let region = rank.register(memory.clone()).unwrap();
        Self { pool: PoolId(pool), shard, memory, region }
    }

    fn shards(&self) -> Vec<(Key, Addr)> {
        let at = |n: usize| Addr { region: self.region, offset: (n * self.shard) as u64 };
        (0..KEYS).map(|n| (key(n), at(n))).collect()
    }

    /// The generation of the pattern is the pool.
    fn fill(&self) {
        let mut bytes = vec![0; self.shard];
        for n in 0..KEYS {
            fill_pattern(&mut bytes, &key(n).block.0, 0, 0, u64::from(self.pool.0));
            self.memory.write(n * self.shard, &bytes).unwrap();
        }
    }

    fn poison(&self) {
        self.memory.write(0, &vec![0xEE; self.memory.len()]).unwrap();
    }

    fn verify(&self) {
        let mut bytes = vec![0; self.shard];
        for n in 0..KEYS {
            self.memory.read(n * self.shard, &mut bytes).unwrap();
            verify_pattern(&bytes, &key(n).block.0, 0, 0, u64::from(self.pool.0))
                .unwrap_or_else(|e| panic!("key {n} of pool {}: {e}", self.pool.0));
        }
    }
}

fn same_keys_in_both_pools(rank: &Rank, shards: [usize; 2]) {
    let sides = [Side::new(rank, 0, shards[0]), Side::new(rank, 1, shards[1])];
    for side in &sides {
        side.fill();
        let results =
            rank.dump(side.pool, &side.shards(), true).unwrap().wait_durable(None).unwrap();
        assert!(results.iter().all(Result::is_ok), "{results:?}");
    }
    for _ in 0..50 {
        sides.iter().for_each(Side::poison);
        let tasks: Vec<_> =
            sides.iter().map(|side| rank.load(side.pool, &side.shards()).unwrap()).collect();
        for (side, task) in sides.iter().zip(tasks) {
            assert_eq!(task.wait(None), Some(vec![Outcome::Loaded]));
            side.verify();
        }
    }
    for pool in 0..2 {
        let stats = rank.stats(PoolId(pool)).unwrap();
        assert!(stats.tasks >= 50, "{stats:?}");
    }
    assert_eq!(rank.inspect().problems, Vec::<String>::new());
}

#[test]
fn pools_of_equal_shard_size_never_meet_in_a_file_tier() {
    let dir = tempfile::tempdir().unwrap();
    let rank = node(dir.path(), [SHARD as u64; 2], true).rank(0).start().unwrap();
    same_keys_in_both_pools(&rank, [SHARD; 2]);
}

#[test]
fn pools_never_meet_in_one_backend_of_the_callers() {
    let dir = tempfile::tempdir().unwrap();
    let backend: Arc<dyn Backend> = Arc::new(MemoryBackend::new());
    let rank = node(dir.path(), [SHARD as u64; 2], false).rank(0).backend(backend).start().unwrap();
    same_keys_in_both_pools(&rank, [SHARD; 2]);
}

#[test]
fn pools_of_different_shard_size_work_side_by_side() {
    let dir = tempfile::tempdir().unwrap();
    let rank = node(dir.path(), [1728, SHARD as u64], true).rank(0).start().unwrap();
    same_keys_in_both_pools(&rank, [1728, SHARD]);
}

#[test]
fn equal_pool_names_and_endless_names_are_refused() {
    let named = |a: &str, b: &str| {
        Node::builder("pools")
            .pool(64, 1, 4)
            .pool(64, 1, 4)
            .configure(|config| {
                config.pool[0].name = a.into();
                config.pool[1].name = b.into();
            })
            .build()
    };
    assert!(named("a", "b").is_ok());
    assert!(named("a", "a").unwrap_err().to_string().contains("\"a\""));
    assert!(named("a", &"ü".repeat(40)).unwrap_err().to_string().contains("64 bytes"));
    assert!(named("", "b").is_err());
}
