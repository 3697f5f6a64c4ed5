//! Staged shards: those that pass through a buffer of the staging pool.
//!
//! A load that finds the cache full is read into a buffer. A task fills its buffers shard by shard, so
//! a large request is split at shard boundaries and each part goes back to its owner by itself. A
//! shard whose slot the engine cannot reach is copied into a buffer by the processor first.
//!
//! Buffers come after slots and before plans: whoever holds a buffer waits for no slot, and whoever
//! copies waits for no buffer. So nothing waits in a circle.
//!
//! **Invariant:** a task that holds a buffer takes another only while no task without one waits.

use std::sync::Arc;

use ucm_ctrl::{FailKind, Pin};
use ucm_store::IoMemory;
use ucm_transport::Addr;

use crate::{
    staging::{StagingLease, stride},
    task::UnitState,
};

use super::{Core, copy::Source, load::Origin};

/// Bytes that a copy by the processor moves at a time; stays in its nearest cache.
const CHUNK: usize = 64 << 10;

/// Room for one shard in a buffer.
pub(super) struct Room {
    lease: StagingLease,
    offset: u64,
    /// Counts the rooms a task has.
    _of: Arc<()>,
}

/// The buffer that a task is filling.
pub(super) struct Part {
    lease: StagingLease,
    used: u64,
}

/// A shard whose slot the engine cannot reach, waiting for a buffer.
pub(super) struct Unreachable {
    pub(super) task: u64,
    pub(super) unit: u32,
    origin: Origin,
    pin: Pin,
    len: u64,
}

impl Room {
    pub(super) fn whole(lease: StagingLease) -> Self {
        Self { lease, offset: 0, _of: Arc::default() }
    }

    pub(super) fn addr(&self, len: u64) -> Option<Addr> {
        self.lease.addr(self.offset, len)
    }

    pub(super) fn io_memory(&self, len: u64) -> Option<IoMemory> {
        self.lease.io_memory(self.offset, len)
    }
}

impl Core {
    /// Room for the next shard of a task: in the buffer it is filling, or in a new one.
    pub(super) fn room(&mut self, id: u64, len: u64) -> Option<Room> {
        if let Some(room) = self.next_in_part(id, len) {
            return Some(room);
        }
        let starving = self
            .runnable
            .iter()
            .any(|other| *other != id && self.tasks.get(other).is_some_and(|task| task.starved));
        let task = self.tasks.get_mut(&id)?;
        task.part = None;
        let holds = Arc::strong_count(&task.rooms) > 1;
        if holds && starving {
            self.parts.metrics.staging_yields.add(1);
            return None;
        }
        let lease = self.take_buffer();
        let task = self.tasks.get_mut(&id)?;
        task.starved = lease.is_none() && !holds;
        task.part = Some(Part { lease: lease?, used: 0 });
        self.next_in_part(id, len)
    }

    fn take_buffer(&mut self) -> Option<StagingLease> {
        let pool = self.parts.load_staging.as_ref()?;
        pool.try_acquire().or_else(|| {
            // Buffers kept for shards to come serve those that are here first.
            for task in self.tasks.values_mut() {
                task.part = None;
            }
            pool.try_acquire()
        })
    }

    fn next_in_part(&mut self, id: u64, len: u64) -> Option<Room> {
        let most = self.parts.load_staging.as_ref()?.buffer_bytes();
        let task = self.tasks.get_mut(&id)?;
        let part = task.part.as_mut()?;
        if part.used.checked_add(len)? > most {
            return None;
        }
        let offset = part.used;
        part.used = offset.saturating_add(stride(len));
        Some(Room { lease: part.lease.clone(), offset, _of: Arc::clone(&task.rooms) })
    }

    /// A shard is in a slot that the engine cannot reach.
    pub(super) fn stage_slot(&mut self, task: u64, unit: u32, pin: Pin, origin: Origin) {
        if self.parts.load_staging.is_none() {
            drop(pin);
            self.unit_ended(task, unit, Err(FailKind::Unavailable));
            return;
        }
        let Some(state) = self.unit_mut(task, unit) else { return };
        if state.state == UnitState::Done {
            return;
        }
        state.state = UnitState::Copying;
        let len = state.len;
        self.unreachable.push_back(Unreachable { task, unit, origin, pin, len });
        self.stage_unreachable();
    }

    /// Copies what waits for a buffer into those that are free.
    pub(super) fn stage_unreachable(&mut self) {
        while !self.unreachable.is_empty() {
            let Some(lease) = self.take_buffer() else { return };
            let Some(next) = self.unreachable.pop_front() else { return };
            self.step();
            let Unreachable { task, unit, origin, pin, len } = next;
            let room = Room::whole(lease);
            let from = self.parts.slots.io_memory(pin.slot(), 0, len, Box::new(()));
            let copied = copy(from, room.io_memory(len));
            drop(pin);
            if let Some(state) = self.unit_mut(task, unit) {
                state.state = UnitState::Unresolved;
            }
            match copied {
                Some(()) => {
                    self.parts.metrics.staged_shards.add(1);
                    self.copy_in(task, unit, Source::Staged(room), origin);
                }
                None => self.unit_ended(task, unit, Err(FailKind::Other)),
            }
        }
    }
}

/// Copies all bytes of one piece of memory to another of the same length, by the processor.
pub(super) fn copy(from: Option<IoMemory>, to: Option<IoMemory>) -> Option<()> {
    let (from, to) = (from?, to?);
    let mut chunk = vec![0_u8; CHUNK.min(from.len())];
    let mut at = 0;
    while at < from.len() {
        let len = CHUNK.min(from.len() - at);
        let (part, _) = chunk.split_at_mut(len);
        from.read(at, part).ok()?;
        to.write(at, part).ok()?;
        at += len;
    }
    Some(())
}
