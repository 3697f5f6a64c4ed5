//! What the parent tells the ranks of a load measurement, and what they answer.
//!
//! Owns: the orders, the replies, and the keys of each run.
//! **Invariant:** parent and ranks derive the same keys from the same numbers.

use serde::{Deserialize, Serialize};
use ucm::{Identity, Key, Namespace};

/// Backend under the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum BackendChoice {
    /// Files in a directory
    File,
    /// A device with a fixed latency
    Slow,
    /// Generated at memory speed
    Memory,
}

/// How the file backend reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum FileIoChoice {
    /// From the device, through rings if that works here
    Auto,
    /// From the device, by threads
    Threads,
    /// From the page cache
    Buffered,
}

/// In which order ranks visit the shards of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum OrderChoice {
    /// Own stride first
    Rotated,
    /// 0, 1, 2, … without waiting
    Natural,
    /// 0, 1, 2, …, each shard waited for before the next
    Lockstep,
}

/// One measurement.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Spec {
    /// Cache configuration (TOML).
    pub(crate) config: String,
    pub(crate) ranks: u32,
    pub(crate) blocks: u32,
    pub(crate) shards_per_block: u32,
    pub(crate) shard_bytes: u64,
    pub(crate) backend: BackendChoice,
    pub(crate) backend_dir: String,
    pub(crate) file_io: FileIoChoice,
    pub(crate) latency_us: u64,
    pub(crate) backend_depth: u32,
    pub(crate) order: OrderChoice,
    pub(crate) jitter_us: u64,
    pub(crate) verify: bool,
}

impl Spec {
    pub(crate) fn shards(&self) -> u64 {
        u64::from(self.blocks) * u64::from(self.shards_per_block)
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.shards() * self.shard_bytes
    }

    /// The keys of one run, in tasks: task s has shard s of every block.
    pub(crate) fn tasks(&self, run: u32) -> Vec<Vec<Key>> {
        let identity = identity();
        let block = |b: u32| identity.block_id(format!("run {run} block {b}").as_bytes());
        let blocks: Vec<_> = (0..self.blocks).map(block).collect();
        (0..self.shards_per_block)
            .map(|shard| blocks.iter().map(|block| Key { block: *block, shard }).collect())
            .collect()
    }
}

/// Identity of everything the benchmark stores.
pub(crate) fn identity() -> Identity {
    Namespace {
        model: "ucm-bench".into(),
        revision: "1".into(),
        dtype: "pattern".into(),
        ..Namespace::default()
    }
    .identity()
}

/// Generation of all payloads.
pub(crate) const GENERATION: u64 = 1;

/// What a rank is told.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) enum Order {
    /// Join the cache.
    Open { rank: u32, spec: Box<Spec> },
    /// Store the objects of a run in the backend.
    Store { run: u32 },
    /// At `at_ns`, load everything through the cache.
    Load { run: u32, at_ns: u64, order: OrderChoice },
    /// At `at_ns`, copy the same bytes from the resident slots with nothing but memcpy.
    Copy { run: u32, at_ns: u64 },
    /// Take all keys of a run out of the cache.
    Clear { run: u32 },
}

/// What a rank answers.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(crate) struct Reply {
    /// Begin and end on the monotonic clock.
    pub(crate) start_ns: u64,
    pub(crate) end_ns: u64,
    /// Processor time of the process meanwhile.
    pub(crate) cpu_ns: u64,
    /// Duration of each task.
    pub(crate) task_us: Vec<f64>,
    /// Loads that reached this rank's backend.
    pub(crate) backend_loads: u64,
    /// (time, loads in flight) after each change in this rank's backend.
    pub(crate) timeline: Vec<(u64, u64)>,
    /// Bytes that differ, and where the first was.
    pub(crate) wrong_bytes: u64,
    pub(crate) first_wrong: Option<String>,
    /// Page tier, engine, backend mode.
    pub(crate) page_tier: String,
    pub(crate) engine: String,
    pub(crate) backend: String,
}
