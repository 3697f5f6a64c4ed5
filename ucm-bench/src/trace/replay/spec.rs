//! What the parent tells the ranks of a replay, and what they answer.
//!
//! Owns: the orders, the replies, and the keys of blocks.
//! **Invariant:** parent and ranks derive the same keys from the same numbers.

use serde::{Deserialize, Serialize};
use ucm::{Identity, Key, Namespace, QueueStats};

/// Generation of all payloads.
pub(super) const GENERATION: u64 = 1;

/// One replay.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Spec {
    /// Cache configuration (TOML).
    pub(super) config: String,
    pub(super) ranks: u32,
    pub(super) shard_bytes: u64,
    pub(super) shards_per_block: u32,
    /// Blocks of the largest request.
    pub(super) max_blocks: u32,
    /// Directory of the file backend; without, every shard exists and its bytes are generated.
    pub(super) store: Option<String>,
}

/// Identity of everything a replay stores.
pub(super) fn identity() -> Identity {
    Namespace {
        model: "ucm-bench".into(),
        revision: "replay 1".into(),
        dtype: "pattern".into(),
        ..Namespace::default()
    }
    .identity()
}

/// Derives keys.
#[derive(Debug)]
pub(super) struct Keys(Identity);

impl Keys {
    pub(super) fn new() -> Self {
        Self(identity())
    }

    /// Shards of one block, in order.
    pub(super) fn of(&self, block: u32, shards: u32) -> impl Iterator<Item = Key> + use<> {
        let block = self.0.block_id(format!("block {block}").as_bytes());
        (0..shards).map(move |shard| Key { block, shard })
    }
}

/// What a rank is told. Blocks are named by their numbers in the trace.
#[derive(Debug, Deserialize, Serialize)]
pub(super) enum Order {
    /// Join the cache.
    Open { rank: u32, spec: Box<Spec> },
    /// Load all shards of these blocks, layer by layer.
    Load { blocks: Vec<u32> },
    /// Put the bytes of this rank's share of these blocks where a device would have them.
    Compute { blocks: Vec<u32> },
    /// Dump what was computed last, through the cache into the backend.
    Dump,
    /// Copy what is resident of these blocks with nothing but memcpy.
    Copy { blocks: Vec<u32> },
    /// Follow these requests reference by reference, as the models do.
    Follow { requests: Vec<Vec<u32>> },
}

/// What a rank answers.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(super) struct Reply {
    /// Begin and end of the timed part on the monotonic clock.
    pub(super) start_ns: u64,
    pub(super) end_ns: u64,
    /// Bytes moved in it.
    pub(super) bytes: u64,
    /// Where this rank's shards came from.
    pub(super) shards: Shards,
    /// Loads that reached this rank's backend.
    pub(super) backend_loads: u64,
    /// Block references that were resident when asked for (`Follow` only).
    pub(super) hits: u64,
    /// Bytes compared with what they must be, how many differ, and where the first was.
    pub(super) checked_bytes: u64,
    pub(super) wrong_bytes: u64,
    pub(super) first_wrong: Option<String>,
    /// Page tier, engine, backend mode (`Open` only).
    pub(super) page_tier: String,
    pub(super) engine: String,
    pub(super) backend: String,
}

/// Unique shards of load tasks by where their bytes came from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub(super) struct Shards {
    /// Ready in the cache.
    pub(super) hit: u64,
    /// Another rank was loading it.
    pub(super) waited: u64,
    /// Loaded by this rank into the cache.
    pub(super) owned: u64,
    /// Loaded around a full cache.
    pub(super) bypass: u64,
}

impl Shards {
    pub(super) fn between(before: &QueueStats, after: &QueueStats) -> Self {
        Self {
            hit: after.hit_shards - before.hit_shards,
            waited: after.waited_shards - before.waited_shards,
            owned: after.owned_shards - before.owned_shards,
            bypass: after.bypass_shards - before.bypass_shards,
        }
    }

    pub(super) fn add(&mut self, more: Self) {
        self.hit += more.hit;
        self.waited += more.waited;
        self.owned += more.owned;
        self.bypass += more.bypass;
    }

    pub(super) fn total(self) -> u64 {
        self.hit + self.waited + self.owned + self.bypass
    }
}
