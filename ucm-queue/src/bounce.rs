//! The few buffers a shard passes through when it cannot use a cache slot.
//!
//! **Invariant:** a buffer is free again only when the last clone of its lease is dropped, and
//! every operation that may touch the buffer holds a clone.

use std::{
    collections::BTreeSet,
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

use ucm_ctrl::SlotId;
use ucm_store::IoMemory;
use ucm_transport::Addr;

use crate::SlotMemory;

/// A fixed set of buffers.
#[derive(Clone)]
pub(crate) struct Bounce {
    inner: Option<Arc<Inner>>,
}

struct Inner {
    memory: Arc<dyn SlotMemory>,
    total: usize,
    free: Mutex<BTreeSet<u32>>,
}

/// A buffer in use. Clones share it.
#[derive(Clone)]
pub(crate) struct Lease {
    cell: Arc<Cell>,
}

struct Cell {
    inner: Arc<Inner>,
    index: u32,
}

impl Bounce {
    /// A set without buffers.
    pub(crate) fn none() -> Self {
        Self { inner: None }
    }

    /// The cells `range` of `memory`.
    pub(crate) fn new(memory: Arc<dyn SlotMemory>, range: std::ops::Range<u32>) -> Self {
        if range.is_empty() {
            return Self::none();
        }
        let (total, free) = (range.len(), Mutex::new(range.collect()));
        Self { inner: Some(Arc::new(Inner { memory, total, free })) }
    }

    /// Whether there are buffers at all.
    pub(crate) fn exists(&self) -> bool {
        self.inner.is_some()
    }

    /// Takes the free buffer of the lowest index, if there is one.
    pub(crate) fn try_acquire(&self) -> Option<Lease> {
        let inner = self.inner.as_ref()?;
        let index = inner.free.lock().unwrap_or_else(PoisonError::into_inner).pop_first()?;
        Some(Lease { cell: Arc::new(Cell { inner: Arc::clone(inner), index }) })
    }

    /// Buffers that somebody holds.
    pub(crate) fn in_use(&self) -> u64 {
        self.inner.as_ref().map_or(0, |inner| {
            let free = inner.free.lock().unwrap_or_else(PoisonError::into_inner).len();
            (inner.total - free) as u64
        })
    }
}

impl Lease {
    /// The buffer as the engine knows it.
    pub(crate) fn addr(&self) -> Option<Addr> {
        self.cell.inner.memory.slot_addr(SlotId(self.cell.index))
    }

    /// The buffer's first `len` bytes for a backend, which keeps a clone of the lease.
    pub(crate) fn io_memory(&self, len: u64) -> Option<IoMemory> {
        let hold = Box::new(self.clone());
        self.cell.inner.memory.io_memory(SlotId(self.cell.index), len, hold)
    }
}

impl Drop for Cell {
    fn drop(&mut self) {
        self.inner.free.lock().unwrap_or_else(PoisonError::into_inner).insert(self.index);
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").field("index", &self.cell.index).finish_non_exhaustive()
    }
}
