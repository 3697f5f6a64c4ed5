//! To which operations a fault happens.
//!
//! **Invariant:** a rule counts only operations that match it.

use super::Fault;
use crate::{Op, meter::Direction};

/// A fault and the operations it happens to: all, unless narrowed.
#[derive(Clone, Debug)]
#[must_use = "add it to a `FaultBackend`"]
pub struct Rule {
    fault: Fault,
    direction: Option<Direction>,
    block: Option<[u8; 16]>,
    shard: Option<u32>,
    skip: u64,
    times: u64,
}

impl Rule {
    /// This fault, always.
    pub fn new(fault: Fault) -> Self {
        Self { fault, direction: None, block: None, shard: None, skip: 0, times: u64::MAX }
    }

    /// Only loads.
    pub fn loads(mut self) -> Self {
        self.direction = Some(Direction::Load);
        self
    }

    /// Only dumps.
    pub fn dumps(mut self) -> Self {
        self.direction = Some(Direction::Dump);
        self
    }

    /// Only shards of this block.
    pub fn block(mut self, block: [u8; 16]) -> Self {
        self.block = Some(block);
        self
    }

    /// Only this shard (of any block, unless a block is given).
    pub fn shard(mut self, shard: u32) -> Self {
        self.shard = Some(shard);
        self
    }

    /// Not the first `count` operations that match.
    pub fn skip(mut self, count: u64) -> Self {
        self.skip = count;
        self
    }

    /// At most so often.
    pub fn times(mut self, count: u64) -> Self {
        self.times = count;
        self
    }

    /// The fault, if it happens to this operation.
    pub(super) fn draw(&mut self, direction: Direction, op: &Op) -> Option<Fault> {
        let matches = self.direction.is_none_or(|d| d == direction)
            && self.block.is_none_or(|b| b == *op.block())
            && self.shard.is_none_or(|s| s == op.shard());
        if !matches || self.times == 0 {
            return None;
        }
        if self.skip > 0 {
            self.skip -= 1;
            return None;
        }
        self.times -= 1;
        Some(self.fault.clone())
    }
}
