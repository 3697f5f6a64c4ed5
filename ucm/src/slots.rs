//! The slots of a pool as queues and engines see them.
//!
//! **Invariant:** the mapping lives as long as anything that was handed out from it.

use std::{any::Any, ptr::NonNull, sync::Arc};

use ucm_ctrl::SlotId;
use ucm_data::Mapped;
use ucm_queue::SlotMemory;
use ucm_store::IoMemory;
use ucm_transport::{Addr, ErrorKind, Location, Memory, RegionId, TransferEngine};

use crate::Error;

/// A mapped pool, registered with an engine: one region a segment.
#[derive(Debug)]
pub(crate) struct PoolSlots {
    mapped: Arc<Mapped>,
    engine: Arc<dyn TransferEngine>,
    /// `None` for a segment that the engine could not register.
    regions: Vec<Option<RegionId>>,
}

impl PoolSlots {
    pub(crate) fn register(
        mapped: Arc<Mapped>,
        engine: Arc<dyn TransferEngine>,
    ) -> Result<Self, Error> {
        let mut slots = Self { mapped, engine, regions: Vec::new() };
        for index in 0..slots.mapped.geometry().segments().len() {
            let Some((base, len)) =
                u32::try_from(index).ok().and_then(|i| slots.mapped.segment_range(i))
            else {
                return Err(Error::Config(format!("invariant: segment {index} is mapped")));
            };
            let keep = slots.mapped.clone();
            // SAFETY: the segment is mapped for reading and writing as long as `keep` lives, and
            // this process makes no references to its bytes.
            let memory = unsafe { Memory::from_raw(base, len, Location::Host, keep) };
            // On failure the regions registered so far go with `slots`.
            match slots.engine.register(memory) {
                Ok(region) => slots.regions.push(Some(region)),
                Err(error) if error.kind() == ErrorKind::Registration => {
                    // Not a reason to do without the cache, but one to be slower, and to say so.
                    tracing::warn!(%error, segment = index, bytes = len, "not reachable by the engine");
                    slots.regions.push(None);
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(slots)
    }

    fn range(&self, slot: SlotId, offset: u64, len: u64) -> Option<(NonNull<u8>, usize)> {
        if offset.checked_add(len)? > self.slot_bytes() {
            return None;
        }
        let base = self.mapped.slot_ptr(slot.0)?;
        // SAFETY: the offset lies in the slot, which lies in the mapping.
        let base = unsafe { base.add(usize::try_from(offset).ok()?) };
        Some((base, usize::try_from(len).ok()?))
    }

    /// Bytes of the pool that the engine cannot reach: they are copied by the processor.
    pub(crate) fn unreachable_bytes(&self) -> u64 {
        let lost = self.regions.iter().enumerate().filter(|(_, region)| region.is_none());
        lost.filter_map(|(index, _)| self.mapped.segment_range(u32::try_from(index).ok()?))
            .map(|(_, len)| len as u64)
            .sum()
    }
}

impl SlotMemory for PoolSlots {
    fn slots(&self) -> u32 {
        self.mapped.geometry().slots()
    }

    fn slot_bytes(&self) -> u64 {
        self.mapped.geometry().slot_bytes()
    }

    fn slot_addr(&self, slot: SlotId) -> Option<Addr> {
        let at = self.mapped.slot(slot.0)?;
        let region = self.regions.get(usize::try_from(at.segment).ok()?)?;
        Some(Addr { region: (*region)?, offset: at.offset })
    }

    fn io_memory(
        &self,
        slot: SlotId,
        offset: u64,
        len: u64,
        hold: Box<dyn Any + Send>,
    ) -> Option<IoMemory> {
        let (base, len) = self.range(slot, offset, len)?;
        let hold = Box::new((hold, self.mapped.clone()));
        // SAFETY: the slot lies in the mapping, which lives as long as the hold; this process makes
        // no references to its bytes.
        Some(unsafe { IoMemory::from_raw(base, len, hold) })
    }
}

impl Drop for PoolSlots {
    fn drop(&mut self) {
        for region in self.regions.iter().flatten() {
            // Busy regions stay with the engine, which keeps the mapping alive for them.
            if let Err(error) = self.engine.deregister(*region) {
                tracing::debug!(%error, "a region of the cache stays registered");
            }
        }
    }
}

/// Equal buffers in this process's own memory: what a staging pool is made of.
#[derive(Debug)]
pub(crate) struct Buffers {
    memory: Memory,
    region: RegionId,
    engine: Arc<dyn TransferEngine>,
    count: u32,
    bytes: u64,
    stride: usize,
}

impl Buffers {
    pub(crate) fn new(
        count: u32,
        bytes: u64,
        engine: Arc<dyn TransferEngine>,
    ) -> Result<Self, Error> {
        let too_large = || {
            Error::Config(format!(
                "{count} staging buffers of {bytes} bytes do not fit into memory"
            ))
        };
        let stride = usize::try_from(bytes)
            .ok()
            .and_then(|b| b.checked_next_multiple_of(4096))
            .ok_or_else(too_large)?;
        let len = usize::try_from(count)
            .ok()
            .and_then(|n| n.checked_mul(stride))
            .ok_or_else(too_large)?;
        let memory = Memory::host(len)?;
        let region = engine.register(memory.clone())?;
        Ok(Self { memory, region, engine, count, bytes, stride })
    }

    fn offset(&self, cell: SlotId) -> Option<usize> {
        if cell.0 >= self.count {
            return None;
        }
        usize::try_from(cell.0).ok()?.checked_mul(self.stride)
    }
}

impl SlotMemory for Buffers {
    fn slots(&self) -> u32 {
        self.count
    }

    fn slot_bytes(&self) -> u64 {
        self.bytes
    }

    fn slot_addr(&self, cell: SlotId) -> Option<Addr> {
        Some(Addr { region: self.region, offset: self.offset(cell)? as u64 })
    }

    fn io_memory(
        &self,
        cell: SlotId,
        offset: u64,
        len: u64,
        hold: Box<dyn Any + Send>,
    ) -> Option<IoMemory> {
        if offset.checked_add(len)? > self.bytes {
            return None;
        }
        let offset = self.offset(cell)?.checked_add(usize::try_from(offset).ok()?)?;
        let len = usize::try_from(len).ok()?;
        // SAFETY: the cell lies inside the allocation of `count` strides.
        let base = unsafe { self.memory.as_ptr().add(offset) };
        let hold = Box::new((hold, self.memory.clone()));
        // SAFETY: the memory lives as long as the hold; this process makes no references to it.
        Some(unsafe { IoMemory::from_raw(base, len, hold) })
    }
}

impl Drop for Buffers {
    fn drop(&mut self) {
        if let Err(error) = self.engine.deregister(self.region) {
            tracing::debug!(%error, "the staging buffers stay registered");
        }
    }
}
