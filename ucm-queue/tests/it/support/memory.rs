//! Slot memory over ordinary host memory: the bridge the facade builds over its segments.

use std::{any::Any, sync::Arc};

use ucm_ctrl::SlotId;
use ucm_queue::SlotMemory;
use ucm_store::IoMemory;
use ucm_transport::{Addr, Memory, RegionId};

#[derive(Debug)]
pub(crate) struct Cells {
    memory: Memory,
    region: RegionId,
    count: u32,
    cell: u64,
    unreachable: bool,
}

impl Cells {
    pub(crate) fn new(memory: Memory, region: RegionId, count: u32, cell: u64) -> Arc<Self> {
        assert!(u64::from(count) * cell <= memory.len() as u64);
        Arc::new(Self { memory, region, count, cell, unreachable: false })
    }

    /// The same cells, as if the engine could not reach them.
    pub(crate) fn unreachable(&self) -> Arc<Self> {
        let Self { memory, region, count, cell, .. } = self;
        let memory = memory.clone();
        Arc::new(Self { memory, region: *region, count: *count, cell: *cell, unreachable: true })
    }
}

impl SlotMemory for Cells {
    fn slots(&self) -> u32 {
        self.count
    }

    fn slot_bytes(&self) -> u64 {
        self.cell
    }

    fn slot_addr(&self, slot: SlotId) -> Option<Addr> {
        let offset = u64::from(slot.0) * self.cell;
        let reachable = slot.0 < self.count && !self.unreachable;
        reachable.then_some(Addr { region: self.region, offset })
    }

    fn io_memory(
        &self,
        slot: SlotId,
        offset: u64,
        len: u64,
        hold: Box<dyn Any + Send>,
    ) -> Option<IoMemory> {
        if slot.0 >= self.count || offset.checked_add(len)? > self.cell {
            return None;
        }
        let offset = usize::try_from(u64::from(slot.0) * self.cell + offset).ok()?;
        // SAFETY: the cell lies in the memory, by the check in `new`.
        let base = unsafe { self.memory.as_ptr().add(offset) };
        let hold = Box::new((hold, self.memory.clone()));
        // SAFETY: `hold` keeps the memory mapped, and nobody makes references to its bytes.
        Some(unsafe { IoMemory::from_raw(base, usize::try_from(len).ok()?, hold) })
    }
}
