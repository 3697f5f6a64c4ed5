//! The staging pool: equal buffers between sources and destinations that cannot meet directly.
//!
//! A shard is staged when it finds the cache full, when the engine cannot reach its slot, or when a
//! dump must be copied somewhere. Buffers are allocated and registered once, named by index and
//! generation, and lent as [`StagingLease`]s.
//!
//! **Invariant:** a buffer is free again only when the last clone of its lease is dropped, and
//! every operation that may touch the buffer holds a clone.

mod layout;

use std::{
    collections::{BTreeSet, VecDeque},
    fmt,
    ops::Range,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use ucm_ctrl::{
    SlotId,
    sync::{AtomicU64, Ordering},
};
use ucm_store::IoMemory;
use ucm_transport::Addr;

use crate::{ErrorKind, QueueError, SlotMemory};

pub use layout::StagingLayout;
pub(crate) use layout::stride;

/// Tells the pools of this process apart.
static EPOCHS: AtomicU64 = AtomicU64::new(1);

/// Names one use of one buffer; outdated as soon as the buffer is free again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BufferId {
    /// Which pool of this process.
    pub epoch: u64,
    /// Which buffer of the pool.
    pub index: u32,
    /// Which use of the buffer.
    pub generation: u64,
}

/// Something that reads faster into buffers it was told about beforehand: a backend with registered
/// buffers, a peer.
pub trait BufferRegistrar: Send + Sync + fmt::Debug {
    /// Takes note of all buffers of a pool, in the order of their indexes. The memory stays valid
    /// as long as the values that are kept.
    ///
    /// # Errors
    /// Anything: the queue goes on with the same buffers, unregistered, and reports it.
    fn register_buffers(&self, pool: &StagingPool, buffers: Vec<IoMemory>) -> Result<(), String>;
}

/// A fixed set of equal buffers. Thread-safe; clones share it.
#[derive(Clone)]
pub struct StagingPool {
    inner: Arc<Inner>,
}

struct Inner {
    memory: Arc<dyn SlotMemory>,
    first: u32,
    depth: u32,
    epoch: u64,
    state: Mutex<State>,
}

struct State {
    free: BTreeSet<u32>,
    /// By index; grows when a buffer becomes free.
    generations: Vec<u64>,
    /// Who waits for a buffer, first come first. Empty while a buffer is free.
    waiters: VecDeque<Arc<Waiter>>,
    in_use_max: u32,
}

#[derive(Default)]
struct Waiter {
    got: Mutex<Option<u32>>,
    handed: Condvar,
}

/// A buffer in use. Clones share it; it is free again when the last one is dropped.
#[derive(Clone)]
pub struct StagingLease {
    cell: Arc<Cell>,
}

struct Cell {
    pool: Arc<Inner>,
    index: u32,
    generation: u64,
}

impl StagingPool {
    /// The cells `cells` of `memory` as a pool.
    ///
    /// # Errors
    /// `Invalid` for no cells, or cells that the memory does not have.
    pub fn new(memory: Arc<dyn SlotMemory>, cells: Range<u32>) -> Result<Self, QueueError> {
        if cells.is_empty() || cells.end > memory.slots() {
            return Err(QueueError::new(
                ErrorKind::Invalid,
                format!("cells {cells:?} of a memory of {} cells are no pool", memory.slots()),
            ));
        }
        let depth = cells.end - cells.start;
        let state = Mutex::new(State {
            free: (0..depth).collect(),
            generations: vec![1; depth as usize],
            waiters: VecDeque::new(),
            in_use_max: 0,
        });
        let epoch = EPOCHS.fetch_add(1, Ordering::Relaxed);
        Ok(Self { inner: Arc::new(Inner { memory, first: cells.start, depth, epoch, state }) })
    }

    /// Number of buffers.
    #[must_use]
    pub fn depth(&self) -> u32 {
        self.inner.depth
    }

    /// Bytes of each buffer.
    #[must_use]
    pub fn buffer_bytes(&self) -> u64 {
        self.inner.memory.slot_bytes()
    }

    /// Takes the free buffer of the lowest index; `None` at once if there is none.
    #[must_use]
    pub fn try_acquire(&self) -> Option<StagingLease> {
        let mut state = self.inner.lock();
        let index = state.free.pop_first()?;
        Some(self.inner.lend(&mut state, index))
    }

    /// Takes a buffer, waiting for one until `deadline`. Waiters are served in the order they came,
    /// each release wakes one.
    #[must_use]
    pub fn acquire(&self, deadline: Option<Instant>) -> Option<StagingLease> {
        let mut state = self.inner.lock();
        if let Some(index) = state.free.pop_first() {
            return Some(self.inner.lend(&mut state, index));
        }
        let waiter = Arc::<Waiter>::default();
        state.waiters.push_back(Arc::clone(&waiter));
        drop(state);
        let index = match waiter.wait(deadline) {
            Some(index) => index,
            None => {
                let mut state = self.inner.lock();
                state.waiters.retain(|other| !Arc::ptr_eq(other, &waiter));
                // It may have been handed over just before: under the lock this is settled.
                waiter.lock().take()?
            }
        };
        let mut state = self.inner.lock();
        Some(self.inner.lend(&mut state, index))
    }

    /// Threads that wait for a buffer.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.inner.lock().waiters.len()
    }

    /// Buffers that somebody holds.
    #[must_use]
    pub fn in_use(&self) -> u32 {
        self.inner.depth - u32::try_from(self.inner.lock().free.len()).unwrap_or(0)
    }

    /// Most buffers that were held at once.
    #[must_use]
    pub fn in_use_max(&self) -> u32 {
        self.inner.lock().in_use_max
    }

    /// Where `len` bytes at `offset` of a buffer are, for whoever was given its name only.
    ///
    /// # Errors
    /// `Invalid` for a buffer of another pool, `Stale` when this use of the buffer is over,
    /// `OutOfBounds` when the range leaves it.
    pub fn resolve(&self, id: BufferId, offset: u64, len: u64) -> Result<Addr, QueueError> {
        let inner = &self.inner;
        if id.epoch != inner.epoch || id.index >= inner.depth {
            return Err(QueueError::new(
                ErrorKind::Invalid,
                format!("{id:?} is no buffer of pool {} of {} buffers", inner.epoch, inner.depth),
            ));
        }
        let state = inner.lock();
        let now = state.generations.get(id.index as usize).copied().unwrap_or(0);
        if now != id.generation || state.free.contains(&id.index) {
            return Err(QueueError::new(
                ErrorKind::Stale,
                format!("use {} of buffer {} is over, it is at {now}", id.generation, id.index),
            ));
        }
        drop(state);
        inner.addr(id.index, offset, len).ok_or_else(|| {
            QueueError::new(
                ErrorKind::OutOfBounds,
                format!(
                    "{len} bytes at offset {offset} leave a buffer of {} bytes",
                    self.buffer_bytes()
                ),
            )
        })
    }

    /// Offers the buffers to whoever reads faster into known ones.
    ///
    /// # Errors
    /// What the registrar says; the pool works as before.
    pub fn register(&self, registrar: &dyn BufferRegistrar) -> Result<(), String> {
        let inner = &self.inner;
        let buffers: Option<Vec<IoMemory>> = (0..inner.depth)
            .map(|index| {
                let cell = SlotId(inner.first + index);
                inner.memory.io_memory(cell, 0, self.buffer_bytes(), Box::new(()))
            })
            .collect();
        registrar.register_buffers(self, buffers.ok_or("a buffer has no memory")?)
    }
}

impl Inner {
    fn lend(self: &Arc<Self>, state: &mut State, index: u32) -> StagingLease {
        let generation = state.generations.get(index as usize).copied().unwrap_or(0);
        let in_use = self.depth - u32::try_from(state.free.len()).unwrap_or(0);
        state.in_use_max = state.in_use_max.max(in_use);
        StagingLease { cell: Arc::new(Cell { pool: Arc::clone(self), index, generation }) }
    }

    fn addr(&self, index: u32, offset: u64, len: u64) -> Option<Addr> {
        let end = offset.checked_add(len)?;
        let cell = self.memory.slot_addr(SlotId(self.first + index))?;
        let offset = cell.offset.checked_add(offset)?;
        (end <= self.memory.slot_bytes()).then_some(Addr { offset, ..cell })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiter {
    fn wait(&self, deadline: Option<Instant>) -> Option<u32> {
        let mut got = self.lock();
        loop {
            if let Some(index) = got.take() {
                return Some(index);
            }
            got = match deadline {
                None => self.handed.wait(got).unwrap_or_else(PoisonError::into_inner),
                Some(at) => {
                    let left = at.checked_duration_since(Instant::now())?;
                    let wait = self.handed.wait_timeout(got, left);
                    wait.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<u32>> {
        self.got.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl StagingLease {
    /// The name of this use of the buffer.
    #[must_use]
    pub fn id(&self) -> BufferId {
        let Cell { pool, index, generation } = &*self.cell;
        BufferId { epoch: pool.epoch, index: *index, generation: *generation }
    }

    /// Where `len` bytes at `offset` of the buffer are, as the engine knows them; `None` when they
    /// leave it.
    #[must_use]
    pub fn addr(&self, offset: u64, len: u64) -> Option<Addr> {
        self.cell.pool.addr(self.cell.index, offset, len)
    }

    /// `len` bytes at `offset` for a backend, which keeps a clone of the lease. `None` when they
    /// leave the buffer.
    #[must_use]
    pub fn io_memory(&self, offset: u64, len: u64) -> Option<IoMemory> {
        let Cell { pool, index, .. } = &*self.cell;
        pool.memory.io_memory(SlotId(pool.first + index), offset, len, Box::new(self.clone()))
    }
}

impl Drop for Cell {
    fn drop(&mut self) {
        let mut state = self.pool.lock();
        if let Some(generation) = state.generations.get_mut(self.index as usize) {
            *generation += 1;
        }
        match state.waiters.pop_front() {
            // Handed over directly, so that nobody who came later can take it.
            Some(waiter) => {
                *waiter.lock() = Some(self.index);
                waiter.handed.notify_one();
            }
            None => {
                state.free.insert(self.index);
            }
        }
    }
}

impl fmt::Debug for StagingPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StagingPool")
            .field("epoch", &self.inner.epoch)
            .field("depth", &self.depth())
            .field("in_use", &self.in_use())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for StagingLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("StagingLease").field(&self.id()).finish()
    }
}
