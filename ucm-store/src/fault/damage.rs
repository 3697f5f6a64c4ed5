//! Ways in which bytes arrive wrong.
//!
//! **Invariant:** the backend inside works on memory of its own, so that the operation's memory has
//! exactly the damaged bytes, and nothing else of it is written.

use std::sync::{Arc, Mutex, PoisonError};

use super::injected;
use crate::{
    Backend, Completed, ErrorKind, IoMemory, Op, Sink, StoreError, meter::Direction, op, raw,
};

/// A way of arriving wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Damage {
    /// Only the first half is there. (A silent dump stores an object of half the length.)
    Short,
    /// Every other sector of 512 bytes is missing: it keeps what was there before (loads), or is
    /// zero (dumps).
    Torn,
    /// One bit in the middle is wrong.
    FlippedBit,
    /// The object of another key: the neighbouring shard (the index with its lowest bit flipped).
    WrongKey,
}

const SECTOR: usize = 512;

impl Damage {
    pub(super) fn apply(self, direction: Direction, backend: &dyn Backend, op: Op, noticed: bool) {
        if let Err(error) = op::refuse_empty(&op) {
            op.finish(Err(error));
            return;
        }
        match direction {
            Direction::Load => self.load(backend, op, noticed),
            Direction::Dump if noticed => {
                op.finish(Err(injected(ErrorKind::Io, &format!("{self:?} while writing"))));
            }
            Direction::Dump => self.dump(backend, op),
        }
    }

    fn load(self, backend: &dyn Backend, outer: Op, noticed: bool) {
        let scratch = match IoMemory::private(outer.memory().len()) {
            Ok(memory) => memory,
            Err(error) => return outer.finish(Err(error)),
        };
        let (block, shard) = (*outer.block(), self.shard(&outer));
        let sink = Arc::new(Scratch { damage: self, noticed, outer: Mutex::new(Some(outer)) });
        backend.load(vec![Op::new(block, shard, 0, scratch, sink)]);
    }

    fn dump(self, backend: &dyn Backend, outer: Op) {
        let bytes = raw::snapshot(outer.memory());
        let len = if self == Self::Short { bytes.len().div_ceil(2) } else { bytes.len() };
        let scratch = IoMemory::private(len).and_then(|memory| {
            match self {
                Self::Short => memory.write(0, bytes.split_at(len).0)?,
                _ => self.copy(&bytes, &memory)?,
            }
            Ok(memory)
        });
        let scratch = match scratch {
            Ok(memory) => memory,
            Err(error) => return outer.finish(Err(error)),
        };
        let (block, shard) = (*outer.block(), self.shard(&outer));
        let sink = Arc::new(Outer(Mutex::new(Some(outer))));
        backend.dump(vec![Op::new(block, shard, 0, scratch, sink)]);
    }

    fn shard(self, op: &Op) -> u32 {
        if self == Self::WrongKey { op.shard() ^ 1 } else { op.shard() }
    }

    /// Copies what arrives.
    fn copy(self, from: &[u8], to: &IoMemory) -> Result<(), StoreError> {
        match self {
            Self::Short => to.write(0, from.split_at(from.len() / 2).0),
            Self::Torn => {
                let sectors = from.chunks(SECTOR).enumerate();
                // The last one is missing in any case, so that short objects are torn too.
                let last = from.len().div_ceil(SECTOR) - 1;
                for (n, sector) in sectors.filter(|(n, _)| n % 2 == 0 && *n != last) {
                    to.write(n * SECTOR, sector)?;
                }
                Ok(())
            }
            Self::FlippedBit => {
                to.write(0, from)?;
                let middle = from.len() / 2;
                let flipped = from.get(middle).copied().unwrap_or(0) ^ 0x08;
                to.write(middle, &[flipped])
            }
            Self::WrongKey => to.write(0, from),
        }
    }
}

/// Takes a load that worked and hands the damaged bytes on.
struct Scratch {
    damage: Damage,
    noticed: bool,
    outer: Mutex<Option<Op>>,
}

impl Sink for Scratch {
    fn complete(&self, completed: Completed) {
        let Some(outer) = take(&self.outer) else { return };
        let result = completed.result.and_then(|()| {
            self.damage.copy(&raw::snapshot(&completed.memory), outer.memory())?;
            if self.noticed {
                return Err(injected(ErrorKind::Corrupt, &format!("{:?} bytes", self.damage)));
            }
            Ok(())
        });
        outer.finish(result);
    }
}

/// Ends another operation in the same way.
struct Outer(Mutex<Option<Op>>);

impl Sink for Outer {
    fn complete(&self, completed: Completed) {
        if let Some(outer) = take(&self.0) {
            outer.finish(completed.result);
        }
    }
}

fn take(op: &Mutex<Option<Op>>) -> Option<Op> {
    op.lock().unwrap_or_else(PoisonError::into_inner).take()
}
