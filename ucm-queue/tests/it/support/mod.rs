//! A node in one process: cache, slot memory, ranks, and a backend that tests control.

mod backend;
mod memory;
mod sim;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use ucm_ctrl::{Control, Geometry, Inspection, Key, Member, MemberSpec, Pool, PoolId};
use ucm_queue::{Builder, LoadQueue, Outcome, Request, ShardRef, StagingPool, Task, TaskHandle};
use ucm_store::{Backend, fill_pattern, verify_pattern};
use ucm_transport::{Addr, HostEngine, Memory, RegionId, TransferEngine, testing::GateEngine};

pub(crate) use backend::Script;
pub(crate) use memory::Cells;
pub(crate) use sim::{Copies, Fate, Random, SimRank, World};

/// Longest time that anything in a test may take.
pub(crate) const WATCHDOG: Duration = Duration::from_secs(60);

pub(crate) fn watchdog() -> Option<Instant> {
    Some(Instant::now() + WATCHDOG)
}

/// The key number `n`: shard `n % 4` of block `n / 4`.
pub(crate) fn key(n: u64) -> Key {
    let mut block = [0xb1; 16];
    block[..8].copy_from_slice(&(n / 4).to_le_bytes());
    Key::new(block, u32::try_from(n % 4).unwrap())
}

/// The cache of a node and the memory of its slots.
pub(crate) struct Node {
    pub(crate) control: Control,
    pub(crate) slots: Memory,
    pub(crate) count: u32,
    pub(crate) shard_bytes: u64,
    /// Whether engines cannot reach the slots.
    pub(crate) unreachable: bool,
}

impl Node {
    pub(crate) fn new(slots: u32, shard_bytes: u64) -> Self {
        Self::with_reserved(slots, 0, shard_bytes)
    }

    pub(crate) fn with_reserved(slots: u32, reserved: u32, shard_bytes: u64) -> Self {
        let control = Control::private(&Geometry::single(slots, reserved, 4, shard_bytes)).unwrap();
        let count = slots + reserved;
        let bytes = usize::try_from(u64::from(count) * shard_bytes).unwrap();
        Self {
            control,
            slots: Memory::host(bytes).unwrap(),
            count,
            shard_bytes,
            unreachable: false,
        }
    }

    /// Joins a rank with an engine of its own (copies in the dispatcher's thread, behind a gate).
    pub(crate) fn rank(&self) -> Rank {
        self.rank_with(Arc::new(HostEngine::builder().build().unwrap()))
    }

    pub(crate) fn rank_with(&self, engine: Arc<dyn TransferEngine>) -> Rank {
        let member = self.control.join(MemberSpec::rank(0, 1)).unwrap();
        let pool = member.pool(PoolId(0)).unwrap();
        let gate = GateEngine::new(engine);
        let region = gate.register(self.slots.clone()).unwrap();
        let cells = Cells::new(self.slots.clone(), region, self.count, self.shard_bytes);
        let cells = if self.unreachable { cells.unreachable() } else { cells };
        Rank { member, pool, gate, cells, shard_bytes: self.shard_bytes }
    }

    /// The cache is at rest: nothing pinned, filled or draining, and consistent.
    pub(crate) fn assert_at_rest(&self) {
        let inspection = self.inspect();
        let pool = &inspection.pools[0];
        assert_eq!((pool.pinned, pool.filling, pool.draining, pool.moving), (0, 0, 0, 0));
        assert_eq!(inspection.problems, Vec::<String>::new());
    }

    /// Sleeps until the ranks together have begun to wait `count` times.
    #[track_caller]
    pub(crate) fn wait_waiters(&self, count: u64) {
        eventually("the waiters", || self.inspect().statistics.waiters >= count);
    }

    pub(crate) fn inspect(&self) -> Inspection {
        self.control.inspect()
    }
}

/// One rank of a node.
pub(crate) struct Rank {
    pub(crate) member: Member,
    pub(crate) pool: Pool,
    pub(crate) gate: Arc<GateEngine>,
    pub(crate) cells: Arc<Cells>,
    pub(crate) shard_bytes: u64,
}

impl Rank {
    pub(crate) fn builder(&self, backend: Arc<dyn Backend>) -> Builder {
        LoadQueue::builder(&self.member, &self.pool, self.cells.clone(), backend, self.gate.clone())
    }

    /// Staging buffers of one shard each, registered with the engine.
    pub(crate) fn buffers(&self, count: u32) -> StagingPool {
        self.buffers_of(count, self.shard_bytes)
    }

    /// Staging buffers of `bytes` each, registered with the engine.
    pub(crate) fn buffers_of(&self, count: u32, bytes: u64) -> StagingPool {
        let memory = Memory::host(usize::try_from(u64::from(count) * bytes).unwrap()).unwrap();
        let region = self.gate.register(memory.clone()).unwrap();
        StagingPool::new(Cells::new(memory, region, count, bytes), 0..count).unwrap()
    }
}

/// Destination memory of equal places, filled with a byte no pattern starts with by chance.
pub(crate) struct Buffer {
    pub(crate) memory: Memory,
    pub(crate) region: RegionId,
    pub(crate) place: u64,
}

pub(crate) const UNTOUCHED: u8 = 0xa5;

impl Buffer {
    pub(crate) fn new(register: impl FnOnce(Memory) -> RegionId, places: u64, place: u64) -> Self {
        let memory = Memory::host(usize::try_from(places * place).unwrap()).unwrap();
        let buffer = Self { region: register(memory.clone()), memory, place };
        for index in 0..places {
            buffer.wipe(index);
        }
        buffer
    }

    pub(crate) fn of(queue: &LoadQueue, places: u64, place: u64) -> Self {
        Self::new(|memory| queue.register(memory).unwrap(), places, place)
    }

    pub(crate) fn addr(&self, index: u64) -> Addr {
        Addr { region: self.region, offset: index * self.place }
    }

    pub(crate) fn shard(&self, key: Key, index: u64) -> ShardRef {
        ShardRef { key, dst: self.addr(index), len: None }
    }

    pub(crate) fn bytes(&self, index: u64) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(self.place).unwrap()];
        self.memory.read(usize::try_from(index * self.place).unwrap(), &mut bytes).unwrap();
        bytes
    }

    pub(crate) fn write(&self, index: u64, bytes: &[u8]) {
        self.memory.write(usize::try_from(index * self.place).unwrap(), bytes).unwrap();
    }

    pub(crate) fn wipe(&self, index: u64) {
        self.write(index, &vec![UNTOUCHED; usize::try_from(self.place).unwrap()]);
    }

    /// Fills a place with the payload of `key`.
    pub(crate) fn fill(&self, key: Key, index: u64) {
        let mut bytes = vec![0; usize::try_from(self.place).unwrap()];
        fill_pattern(&mut bytes, &key.block.0, key.shard, 0, 0);
        self.write(index, &bytes);
    }

    #[track_caller]
    pub(crate) fn assert_holds(&self, key: Key, index: u64) {
        if let Err(wrong) = verify_pattern(&self.bytes(index), &key.block.0, key.shard, 0, 0) {
            panic!("place {index} should hold {key:?}: {wrong}");
        }
    }

    #[track_caller]
    pub(crate) fn assert_untouched(&self, index: u64) {
        assert!(self.bytes(index).iter().all(|b| *b == UNTOUCHED), "place {index} was written");
    }
}

/// One request per key, key `i` to place `i`.
pub(crate) fn task_of(buffer: &Buffer, keys: impl IntoIterator<Item = Key>) -> Task {
    let requests = (0..)
        .zip(keys)
        .map(|(i, key)| Request { shards: vec![buffer.shard(key, i)], deadline: None })
        .collect();
    Task { requests }
}

/// One request of all keys, key `i` to place `i`.
pub(crate) fn request_of(buffer: &Buffer, keys: impl IntoIterator<Item = Key>) -> Task {
    let shards = (0..).zip(keys).map(|(i, key)| buffer.shard(key, i)).collect();
    Task { requests: vec![Request { shards, deadline: None }] }
}

#[track_caller]
pub(crate) fn outcomes(handle: &TaskHandle) -> Vec<Outcome> {
    handle.wait(watchdog()).expect("the task ends")
}

#[track_caller]
pub(crate) fn assert_all_loaded(handle: &TaskHandle) {
    for (index, outcome) in outcomes(handle).into_iter().enumerate() {
        assert_eq!(outcome, Outcome::Loaded, "request {index}");
    }
}

/// Sleeps until `ready`, by looking again whenever `hint` allows; fails at the watchdog.
#[track_caller]
pub(crate) fn eventually(what: &str, mut ready: impl FnMut() -> bool) {
    let start = Instant::now();
    while !ready() {
        assert!(start.elapsed() < WATCHDOG, "{what} never happened");
        std::thread::yield_now();
    }
}

/// Panics that tests inject are no news.
pub(crate) fn quiet_injected_panics() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let payload = info.payload();
            let text = payload.downcast_ref::<&str>().copied();
            let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
            if !text.is_some_and(|text| text.contains("injected panic")) {
                hook(info);
            }
        }));
    });
}
