//! Registered regions of an engine: handles with generations, and who uses them.
//!
//! **Invariant:** a region with a live [`RegionLease`] cannot be removed, and a handle of an
//! earlier generation never names a later region.

use std::sync::{
    Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
    atomic::{AtomicU32, Ordering},
};

use crate::{ErrorKind, Memory, RegionId, RegionInfo, TransferError};

/// Regions of one engine, each with what the engine attached to it (`T`: a driver handle, a key).
///
/// Thread-safe. Looking up takes a shared lock; registering an exclusive one.
#[derive(Debug)]
pub struct RegionTable<T = ()> {
    slots: RwLock<Slots<T>>,
}

#[derive(Debug)]
struct Slots<T> {
    all: Vec<Slot<T>>,
    /// Places to take again. One whose generations are used up is not among them.
    free: Vec<u32>,
}

#[derive(Debug)]
struct Slot<T> {
    /// Generation of the region in this place, or of the next one.
    generation: u32,
    entry: Option<Arc<Region<T>>>,
}

/// One registered region.
#[derive(Debug)]
pub struct Region<T> {
    memory: Memory,
    attached: T,
    uses: AtomicU32,
}

impl<T> Region<T> {
    /// The memory as registered.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// What the engine attached.
    pub fn attached(&self) -> &T {
        &self.attached
    }
}

impl<T> Default for RegionTable<T> {
    fn default() -> Self {
        Self { slots: RwLock::new(Slots { all: Vec::new(), free: Vec::new() }) }
    }
}

impl<T> RegionTable<T> {
    /// Adds a region.
    ///
    /// # Errors
    /// `Invalid` for memory of no bytes; `Registration` when 2³² handles are used up.
    pub fn register(&self, memory: Memory, attached: T) -> Result<RegionId, TransferError> {
        if memory.is_empty() {
            return Err(TransferError::invalid("a region of zero bytes cannot be registered"));
        }
        let mut slots = self.write();
        let region = Arc::new(Region { memory, attached, uses: AtomicU32::new(0) });
        let free = slots.free.pop();
        let at = free.map_or(slots.all.len(), |index| usize::try_from(index).unwrap_or(usize::MAX));
        let index = u32::try_from(at).map_err(|_| {
            TransferError::new(ErrorKind::Registration, format!("{at} regions are registered"))
        })?;
        match slots.all.get_mut(at) {
            Some(slot) => {
                slot.entry = Some(region);
                Ok(RegionId { index, generation: slot.generation })
            }
            None => {
                slots.all.push(Slot { generation: 1, entry: Some(region) });
                Ok(RegionId { index, generation: 1 })
            }
        }
    }

    /// Removes a region and returns it, so that the engine can undo what it attached.
    ///
    /// # Errors
    /// `StaleRegion` for an unknown handle, `Busy` while a plan uses it; nothing changes then.
    pub fn deregister(&self, id: RegionId) -> Result<Arc<Region<T>>, TransferError> {
        let mut slots = self.write();
        let slot = slots
            .all
            .get_mut(id.index as usize)
            .filter(|s| s.generation == id.generation)
            .ok_or_else(|| TransferError::stale(id))?;
        let region = slot.entry.take().ok_or_else(|| TransferError::stale(id))?;
        // Leases are taken under the shared lock only, so the count cannot grow here.
        let uses = region.uses.load(Ordering::Acquire);
        if uses > 0 {
            slot.entry = Some(region);
            return Err(TransferError::new(
                ErrorKind::Busy,
                format!("region {} is used by {uses} plans in flight; quiesce it first", id.index),
            ));
        }
        if let Some(next) = slot.generation.checked_add(1) {
            slot.generation = next;
            slots.free.push(id.index);
        }
        Ok(region)
    }

    /// A view for planning; regions cannot come or go while it lives.
    pub fn view(&self) -> RegionView<'_, T> {
        RegionView { slots: self.slots.read().unwrap_or_else(PoisonError::into_inner) }
    }

    /// Number of registered regions.
    pub fn len(&self) -> usize {
        self.view().slots.all.iter().filter(|s| s.entry.is_some()).count()
    }

    /// True when nothing is registered.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn write(&self) -> RwLockWriteGuard<'_, Slots<T>> {
        self.slots.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A consistent view of the table.
#[derive(Debug)]
pub struct RegionView<'a, T> {
    slots: RwLockReadGuard<'a, Slots<T>>,
}

impl<T> RegionView<'_, T> {
    /// What the planner needs to know; `None` for a stale handle.
    pub fn info(&self, id: RegionId) -> Option<RegionInfo> {
        let memory = &self.region(id)?.memory;
        Some(RegionInfo { len: memory.len() as u64, location: memory.location() })
    }

    /// Marks these regions as used until the lease is dropped.
    ///
    /// # Errors
    /// `StaleRegion` for an unknown handle; nothing is marked then.
    pub fn lease(&self, regions: &[RegionId]) -> Result<RegionLease<T>, TransferError> {
        let mut lease = RegionLease { regions: Vec::with_capacity(regions.len()) };
        for id in regions.iter().copied() {
            if lease.find(id).is_none() {
                let region = self.region(id).ok_or_else(|| TransferError::stale(id))?;
                region.uses.fetch_add(1, Ordering::Relaxed);
                lease.regions.push((id, Arc::clone(region)));
            }
        }
        Ok(lease)
    }

    fn region(&self, id: RegionId) -> Option<&Arc<Region<T>>> {
        self.slots
            .all
            .get(id.index as usize)
            .filter(|s| s.generation == id.generation)
            .and_then(|s| s.entry.as_ref())
    }
}

/// The regions of one plan in flight; dropping it is the proof that the plan touches them no more.
#[derive(Debug)]
pub struct RegionLease<T> {
    regions: Vec<(RegionId, Arc<Region<T>>)>,
}

impl<T> RegionLease<T> {
    /// A region of this lease.
    pub fn find(&self, id: RegionId) -> Option<&Arc<Region<T>>> {
        self.regions.iter().find(|(known, _)| *known == id).map(|(_, region)| region)
    }
}

impl<T> RegionLease<T> {
    /// Ends the use, and returns what is left to drop: the last reference to a region may run the
    /// code of whoever owns its memory, which an engine does not want under its lock.
    pub fn release(mut self) -> Vec<(RegionId, Arc<Region<T>>)> {
        self.end();
        std::mem::take(&mut self.regions)
    }

    fn end(&self) {
        for (_, region) in &self.regions {
            region.uses.fetch_sub(1, Ordering::Release);
        }
    }
}

impl<T> Drop for RegionLease<T> {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stale_handles_never_name_a_later_region() {
        let table = RegionTable::<()>::default();
        let first = table.register(Memory::host(8).unwrap(), ()).unwrap();
        assert_eq!(table.view().info(first).unwrap().len, 8);
        table.deregister(first).unwrap();
        let second = table.register(Memory::host(16).unwrap(), ()).unwrap();
        assert_eq!(second.index, first.index, "the place is used again");
        assert_ne!(second.generation, first.generation);
        assert_eq!(table.view().info(first), None);
        assert_eq!(table.deregister(first).unwrap_err().kind(), ErrorKind::StaleRegion);
        assert_eq!(table.view().info(second).unwrap().len, 16);
    }

    #[test]
    fn leased_regions_stay() {
        let table = RegionTable::<u8>::default();
        let a = table.register(Memory::host(8).unwrap(), 1).unwrap();
        let b = table.register(Memory::host(8).unwrap(), 2).unwrap();
        let lease = table.view().lease(&[a, b, a]).unwrap();
        assert_eq!(table.deregister(a).unwrap_err().kind(), ErrorKind::Busy);
        assert_eq!(table.deregister(b).unwrap_err().kind(), ErrorKind::Busy);
        assert_eq!(*lease.find(b).unwrap().attached(), 2);
        drop(lease);
        assert_eq!(*table.deregister(a).unwrap().attached(), 1);
        assert_eq!(table.view().lease(&[b, a]).unwrap_err().kind(), ErrorKind::StaleRegion);
        table.deregister(b).unwrap();
        assert!(table.is_empty());
    }
}
