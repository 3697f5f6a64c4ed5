//! A whole rank (steward, dispatcher, dump thread) that does nothing, or waits for a fill.
//!
//! Owns: the rank, and what it holds.
//! **Invariant:** what waits is the rank's own queue, as in production.

use std::sync::Arc;

use ucm::{Addr, Config, FailKind, Memory, Node, Outcome, PoolId, Rank, TaskHandle};
use ucm_ctrl::{Acquired, Fill};
use ucm_store::PatternBackend;

use super::{peer, spec::key};
use crate::error::BenchError;

const POOL: PoolId = PoolId(0);
const SHARD_BYTES: u64 = 4096;
/// The key all ranks load.
const NUMBER: u64 = 1;

/// The configuration of a small cache for these ranks.
pub(crate) fn config(dir: &std::path::Path, ranks: u32) -> Result<String, BenchError> {
    let settings = [
        format!("cache.dir={}", dir.display()),
        format!("cache.ranks={ranks}"),
        "cache.pages=4k".into(),
        "pool.0.name=kv".into(),
        format!("pool.0.shard_bytes={SHARD_BYTES}"),
        "pool.0.slots=64".into(),
    ];
    let config = Config::load(None, [], &settings);
    config.and_then(|config| config.to_toml()).map_err(|e| BenchError::Usage(e.to_string()))
}

/// See the module description.
#[derive(Debug)]
pub(crate) struct Whole {
    rank: Rank,
    addr: Addr,
    held: Option<Fill>,
    load: Option<TaskHandle>,
}

impl Whole {
    pub(crate) fn start(index: u32, config: &str) -> Result<Self, BenchError> {
        let config = Config::from_toml(config).map_err(|e| BenchError::Usage(e.to_string()))?;
        let environment = |error: ucm::Error| BenchError::Environment(error.to_string());
        let rank = Node::new(config)
            .and_then(|node| node.rank(index).backend(Arc::new(PatternBackend::new(1))).start())
            .map_err(environment)?;
        let bytes = usize::try_from(SHARD_BYTES).unwrap_or(0);
        let memory = Memory::host(bytes).map_err(peer)?;
        let region = rank.register(memory).map_err(environment)?;
        Ok(Self { rank, addr: Addr { region, offset: 0 }, held: None, load: None })
    }

    pub(crate) fn hold(&mut self) -> Result<(), BenchError> {
        let pool = self.rank.pool(POOL).map_err(peer)?;
        match pool.acquire(&key(NUMBER)).map_err(peer)? {
            Acquired::Owner(fill) => self.held = Some(fill),
            other => return Err(peer(format!("the key should be new: {other:?}"))),
        }
        Ok(())
    }

    pub(crate) fn load(&mut self) -> Result<(), BenchError> {
        self.load = Some(self.rank.load(POOL, &[(key(NUMBER), self.addr)]).map_err(peer)?);
        Ok(())
    }

    pub(crate) fn give_up(&mut self) -> Result<(), BenchError> {
        let fill = self.held.take().ok_or_else(|| peer("nothing is held"))?;
        fill.fail(FailKind::Unavailable);
        Ok(())
    }

    pub(crate) fn loaded(&mut self) -> Result<(), BenchError> {
        let load = self.load.take().ok_or_else(|| peer("nothing was submitted"))?;
        match load.wait(None).as_deref() {
            Some([Outcome::Loaded]) => Ok(()),
            other => Err(peer(format!("the load ended as {other:?}"))),
        }
    }
}
