//! How much the queue holds, and how much it may.
//!
//! **Invariant:** what a task takes at admission is given back exactly once, when the piece of work
//! it was taken for is dropped.

use std::sync::Arc;

use crate::{ErrorKind, QueueError, metrics::Count};

/// Limits of what may be admitted and not yet ended.
#[derive(Debug)]
pub(crate) struct Admission {
    max_tasks: u64,
    max_shards: u64,
    max_dump_bytes: u64,
    tasks: Count,
    shards: Count,
    load_bytes: Count,
    dump_bytes: Count,
}

impl Admission {
    /// Limits with nothing admitted.
    pub(crate) fn new(max_tasks: u64, max_shards: u64, max_dump_bytes: u64) -> Arc<Self> {
        Arc::new(Self {
            max_tasks,
            max_shards,
            max_dump_bytes,
            tasks: Count::default(),
            shards: Count::default(),
            load_bytes: Count::default(),
            dump_bytes: Count::default(),
        })
    }

    /// A share for one load task of `shards` shards and `bytes` bytes.
    pub(crate) fn load(self: &Arc<Self>, shards: u64, bytes: u64) -> Result<Share, QueueError> {
        fits("shards", shards, self.max_shards)?;
        take("tasks", &self.tasks, 1, self.max_tasks)?;
        let mut share =
            Share { of: Arc::clone(self), tasks: 1, shards: 0, load_bytes: 0, dump_bytes: 0 };
        take("shards", &self.shards, shards, self.max_shards)?;
        share.shards = shards;
        self.load_bytes.add(bytes);
        share.load_bytes = bytes;
        Ok(share)
    }

    /// One share per shard of a dump task, `total` bytes together.
    pub(crate) fn dump(
        self: &Arc<Self>,
        lens: impl Iterator<Item = u64>,
        total: u64,
    ) -> Result<Vec<Share>, QueueError> {
        fits("dump bytes", total, self.max_dump_bytes)?;
        take("dump bytes", &self.dump_bytes, total, self.max_dump_bytes)?;
        let share = |dump_bytes| Share {
            of: Arc::clone(self),
            tasks: 0,
            shards: 0,
            load_bytes: 0,
            dump_bytes,
        };
        Ok(lens.map(share).collect())
    }

    /// Bytes of load tasks admitted and not yet ended.
    pub(crate) fn load_bytes_held(&self) -> u64 {
        self.load_bytes.value()
    }

    /// Bytes of dumps admitted and not yet ended.
    pub(crate) fn dump_bytes_held(&self) -> u64 {
        self.dump_bytes.value()
    }
}

/// What one piece of work takes of the limits; dropping it gives it back.
#[derive(Debug)]
pub(crate) struct Share {
    of: Arc<Admission>,
    tasks: u64,
    shards: u64,
    load_bytes: u64,
    dump_bytes: u64,
}

impl Drop for Share {
    fn drop(&mut self) {
        self.of.tasks.sub(self.tasks);
        self.of.shards.sub(self.shards);
        self.of.load_bytes.sub(self.load_bytes);
        self.of.dump_bytes.sub(self.dump_bytes);
    }
}

fn fits(what: &str, asked: u64, limit: u64) -> Result<(), QueueError> {
    if asked <= limit {
        return Ok(());
    }
    Err(QueueError::new(
        ErrorKind::TooLarge,
        format!("a task of {asked} {what} can never be admitted, the limit is {limit}: split it"),
    ))
}

fn take(what: &str, count: &Count, asked: u64, limit: u64) -> Result<(), QueueError> {
    count.reserve(asked, limit).map_err(|held| {
        QueueError::new(
            ErrorKind::Busy,
            format!(
                "the queue holds {held} {what}, {asked} more would exceed its limit of {limit}: \
                 try again when something has ended"
            ),
        )
    })
}
