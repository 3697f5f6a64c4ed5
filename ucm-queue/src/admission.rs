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
    dump_tasks: Count,
    dump_shards: Count,
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
            dump_tasks: Count::default(),
            dump_shards: Count::default(),
            dump_bytes: Count::default(),
        })
    }

    /// A share for one load task that counts as `shards` shards, of `bytes` bytes.
    pub(crate) fn load(self: &Arc<Self>, shards: u64, bytes: u64) -> Result<Share, QueueError> {
        fits("shards", shards, self.max_shards)?;
        take("tasks", &self.tasks, 1, self.max_tasks)?;
        let mut share = Share::of(self);
        share.tasks = 1;
        take("shards", &self.shards, shards, self.max_shards)?;
        share.shards = shards;
        self.load_bytes.add(bytes);
        share.load_bytes = bytes;
        Ok(share)
    }

    /// A share for one dump task, and one for each of its shards; `total` bytes together.
    pub(crate) fn dump(
        self: &Arc<Self>,
        lens: impl ExactSizeIterator<Item = u64>,
        total: u64,
    ) -> Result<(Share, Vec<Share>), QueueError> {
        let shards = lens.len() as u64;
        fits("dump shards", shards, self.max_shards)?;
        fits("dump bytes", total, self.max_dump_bytes)?;
        take("dump tasks", &self.dump_tasks, 1, self.max_tasks)?;
        // Holds what is taken so far; given back if the rest cannot be had.
        let mut task = Share::of(self);
        task.dump_tasks = 1;
        take("dump shards", &self.dump_shards, shards, self.max_shards)?;
        task.dump_shards = shards;
        take("dump bytes", &self.dump_bytes, total, self.max_dump_bytes)?;
        task.dump_shards = 0;
        let shard = |dump_bytes| {
            let mut share = Share::of(self);
            (share.dump_shards, share.dump_bytes) = (1, dump_bytes);
            share
        };
        Ok((task, lens.map(shard).collect()))
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
    dump_tasks: u64,
    dump_shards: u64,
    dump_bytes: u64,
}

impl Share {
    /// Nothing yet.
    fn of(of: &Arc<Admission>) -> Self {
        let of = Arc::clone(of);
        Self {
            of,
            tasks: 0,
            shards: 0,
            load_bytes: 0,
            dump_tasks: 0,
            dump_shards: 0,
            dump_bytes: 0,
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.of.tasks.sub(self.tasks);
        self.of.shards.sub(self.shards);
        self.of.load_bytes.sub(self.load_bytes);
        self.of.dump_tasks.sub(self.dump_tasks);
        self.of.dump_shards.sub(self.dump_shards);
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
