//! The queue as callers see it: builder, submission, registration of memory, statistics.
//!
//! **Invariant:** a submission is refused with its numbers before any effect, or its handle ends.

use std::{
    fmt,
    sync::Arc,
    task::Waker,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use ucm_ctrl::{
    Member, Pool,
    sync::{AtomicU64, Ordering},
};
use ucm_store::Backend;
use ucm_transport::{Memory, RegionId, TransferEngine, TransferError};

use crate::{
    DumpHandle, DumpTask, ErrorKind, LayerGroup, Layers, Order, QueueError, QueueStats, SlotMemory,
    Task, TaskHandle,
    admission::Admission,
    core::{Core, Limits, Parts},
    driver::{Driver, Health, Vitals},
    inbox::{EngineWaker, Event, Inbox},
    metrics::{Metrics, QueueMeter},
    pace::Pace,
    regions::Regions,
    staging::{BufferRegistrar, StagingPool},
    task::{Bounds, Prepared},
};

/// Bytes a task reads in its turn if no staging buffer says how many.
const TURN_BYTES: u64 = 8 << 20;

/// Settings of a queue; made by [`LoadQueue::builder`].
#[derive(Debug)]
#[must_use]
pub struct Builder {
    member: Member,
    pool: Pool,
    slots: Arc<dyn SlotMemory>,
    backend: Arc<dyn Backend>,
    engine: Arc<dyn TransferEngine>,
    rank: u32,
    ranks: u32,
    order: Order,
    backend_depth: Option<usize>,
    backend_bytes: u64,
    dump_depth: usize,
    staging: [Option<StagingPool>; 2],
    registrar: Option<Arc<dyn BufferRegistrar>>,
    tasks_in_flight: usize,
    max_tasks: u64,
    max_shards: u64,
    max_dump_bytes: u64,
    grace: Duration,
    refuse_late: bool,
    #[cfg(feature = "testing")]
    panic_at_step: Option<u64>,
}

impl Builder {
    /// This rank and how many ranks of the node load the same tasks; 0 of 1 by default.
    pub fn rank(mut self, rank: u32, ranks: u32) -> Self {
        self.ranks = ranks.max(1);
        self.rank = rank % self.ranks;
        self
    }

    /// In which order shards are visited; rotated by default.
    pub fn order(mut self, order: Order) -> Self {
        self.order = order;
        self
    }

    /// Most backend loads in flight, at least 1; what the backend recommends by default.
    pub fn backend_depth(mut self, depth: usize) -> Self {
        self.backend_depth = Some(depth.max(1));
        self
    }

    /// Most bytes of backend loads in flight; one load is always allowed. No limit by default.
    pub fn backend_bytes(mut self, bytes: u64) -> Self {
        self.backend_bytes = bytes;
        self
    }

    /// Most backend dumps in flight, at least 1; 4 by default.
    pub fn dump_depth(mut self, depth: usize) -> Self {
        self.dump_depth = depth.max(1);
        self
    }

    /// Buffers for loads that find the cache full, or a slot that the engine cannot reach. Without
    /// buffers such shards fail as `NoSpace`, unless the queue itself is about to release a slot,
    /// or as `Unavailable`. A pool is of one queue.
    pub fn staging(mut self, buffers: StagingPool) -> Self {
        self.staging[0] = Some(buffers);
        self
    }

    /// The same for dumps, which never take a buffer from loads.
    pub fn dump_staging(mut self, buffers: StagingPool) -> Self {
        self.staging[1] = Some(buffers);
        self
    }

    /// Who is told of the staging buffers when the queue starts; what it says is counted as
    /// `staging_registered`, and a refusal changes nothing else.
    pub fn registrar(mut self, registrar: Arc<dyn BufferRegistrar>) -> Self {
        self.registrar = Some(registrar);
        self
    }

    /// Most load tasks with reads in flight, at least 1. Further tasks wait in line, first come
    /// first; a task that has read its share of the staging buffers, one at least (without a pool:
    /// 8 MiB), goes to the end of that line. No limit by default: then all tasks take turns shard by shard.
    pub fn tasks_in_flight(mut self, tasks: usize) -> Self {
        self.tasks_in_flight = tasks.max(1);
        self
    }

    /// Most tasks, and shards of them, that may be admitted and not ended; 4,096 and 2²⁰ by default.
    /// A request without shards counts as one. Loads and dumps are counted apart, up to the same
    /// limits.
    pub fn max_admitted(mut self, tasks: u64, shards: u64) -> Self {
        self.max_tasks = tasks;
        self.max_shards = shards;
        self
    }

    /// Most bytes of dumps that may be admitted and not ended at their last level; 1 GiB by
    /// default.
    pub fn max_dump_bytes(mut self, bytes: u64) -> Self {
        self.max_dump_bytes = bytes;
        self
    }

    /// Whether a request whose deadline would pass before it could end, at the pace measured so far,
    /// is refused at once as `TooLate`. Off by default.
    pub fn refuse_late(mut self, refuse: bool) -> Self {
        self.refuse_late = refuse;
        self
    }

    /// How long a close waits for operations in flight, and then again for copies; 5 s by default.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// Makes the dispatcher panic at its `nth` step (from 0).
    #[cfg(feature = "testing")]
    pub fn panic_at_step(mut self, nth: u64) -> Self {
        self.panic_at_step = Some(nth);
        self
    }

    /// Starts the dispatcher.
    ///
    /// # Errors
    /// `TooLarge` when the pool's shards do not fit into the slots or staging buffers, `Start` when
    /// the slot memory has fewer slots than the pool, or no thread can be made.
    pub fn start(self) -> Result<LoadQueue, QueueError> {
        let name = format!("ucm-queue-{}", self.rank);
        let grace = self.grace;
        let bell = self.member.doorbell();
        let (shared, core) = self.assemble(Instant::now())?;
        let driver = Driver {
            bell,
            inbox: shared.inbox.clone(),
            engine: shared.engine.clone(),
            vitals: shared.vitals.clone(),
            grace,
        };
        let thread =
            std::thread::Builder::new().name(name).spawn(move || driver.run(core)).map_err(
                |error| QueueError::new(ErrorKind::Start, format!("no dispatcher thread: {error}")),
            )?;
        Ok(LoadQueue { shared, thread: Some(thread) })
    }

    /// The callers' side and the core, not yet driven by anybody.
    pub(crate) fn assemble(self, now: Instant) -> Result<(Shared, Core), QueueError> {
        let bounds = self.bounds()?;
        let bell = self.member.doorbell();
        let inbox = Inbox::new(move || bell.ring());
        let metrics = Arc::new(Metrics::default());
        let pace = Arc::<Pace>::default();
        let depth = self.backend_depth.unwrap_or_else(|| self.backend.capabilities().depth);
        let limits = Limits {
            backend_depth: depth.max(1),
            backend_bytes: self.backend_bytes,
            dump_depth: self.dump_depth,
            // All ranks' dumps together leave three quarters of a cache of any size to loads.
            dump_slots: (self.pool.slots() as usize / 4 / self.ranks as usize).max(8),
            ranks: self.ranks,
            tasks_in_flight: self.tasks_in_flight,
            turn_bytes: self.turn_bytes(),
        };
        let staging = self.staging;
        if let Some(registrar) = &self.registrar {
            for pool in staging.iter().flatten() {
                match pool.register(&**registrar) {
                    Ok(()) => metrics.staging_registered.add(1),
                    Err(reason) => {
                        tracing::warn!(%reason, ?registrar, "staging buffers stay unregistered");
                    }
                }
            }
        }
        let [load_staging, dump_staging] = staging.clone();
        self.engine.set_waker(Some(Waker::from(Arc::new(EngineWaker(inbox.clone())))));
        let parts = Parts {
            limits,
            pool: self.pool,
            slots: self.slots,
            load_staging,
            dump_staging,
            backend: self.backend,
            engine: self.engine.clone(),
            inbox: inbox.clone(),
            metrics: metrics.clone(),
            pace: pace.clone(),
            #[cfg(feature = "testing")]
            panic_at_step: self.panic_at_step,
        };
        let shared = Shared {
            bounds,
            regions: Regions::default(),
            meter: QueueMeter {
                metrics,
                admission: Admission::new(self.max_tasks, self.max_shards, self.max_dump_bytes),
                staging,
            },
            inbox,
            vitals: Arc::default(),
            pace,
            refuse_late: self.refuse_late,
            engine: self.engine,
            next_id: AtomicU64::new(1),
        };
        Ok((shared, Core::new(parts, now)))
    }

    /// Bytes of a task's turn: its share of the staging buffers.
    fn turn_bytes(&self) -> u64 {
        self.staging[0].as_ref().map_or(TURN_BYTES, |pool| {
            let share = pool.depth() as usize / self.tasks_in_flight;
            pool.buffer_bytes().saturating_mul(share.max(1) as u64)
        })
    }

    fn bounds(&self) -> Result<Bounds, QueueError> {
        let shard_bytes = self.pool.shard_bytes();
        let cell = self.slots.slot_bytes();
        if shard_bytes > cell {
            return Err(QueueError::new(
                ErrorKind::TooLarge,
                format!("the pool's shards have {shard_bytes} bytes, the slots only {cell}"),
            ));
        }
        if self.slots.slots() < self.pool.slots() {
            return Err(QueueError::new(
                ErrorKind::Start,
                format!(
                    "the pool has {} slots, their memory only {}",
                    self.pool.slots(),
                    self.slots.slots()
                ),
            ));
        }
        for pool in self.staging.iter().flatten() {
            if pool.buffer_bytes() < shard_bytes {
                return Err(QueueError::new(
                    ErrorKind::TooLarge,
                    format!(
                        "the pool's shards have {shard_bytes} bytes, the staging buffers only {}",
                        pool.buffer_bytes()
                    ),
                ));
            }
        }
        Ok(Bounds {
            shard_bytes,
            shards_per_block: self.pool.shards_per_block(),
            ranks: self.ranks,
            rank: self.rank,
            order: self.order,
        })
    }
}

/// A rank's queue for one pool: loads shards through the shared cache into the caller's memory, and
/// dumps the other way.
///
/// Thread-safe; share it by reference or `Arc`. Dropping it cancels what is open, waits for what is
/// in flight (at most the builder's grace) and ends the dispatcher. The engine must be used by
/// nobody else, because the queue takes all its completions.
pub struct LoadQueue {
    shared: Shared,
    thread: Option<JoinHandle<()>>,
}

/// What submission works with.
pub(crate) struct Shared {
    bounds: Bounds,
    regions: Regions,
    pub(crate) meter: QueueMeter,
    pub(crate) inbox: Arc<Inbox>,
    vitals: Arc<Vitals>,
    pace: Arc<Pace>,
    refuse_late: bool,
    engine: Arc<dyn TransferEngine>,
    next_id: AtomicU64,
}

impl LoadQueue {
    /// Settings for a queue of `member` over `pool`, whose slots lie in `slots` (registered with
    /// `engine`).
    pub fn builder(
        member: &Member,
        pool: &Pool,
        slots: Arc<dyn SlotMemory>,
        backend: Arc<dyn Backend>,
        engine: Arc<dyn TransferEngine>,
    ) -> Builder {
        Builder {
            member: member.clone(),
            pool: pool.clone(),
            slots,
            backend,
            engine,
            rank: 0,
            ranks: 1,
            order: Order::Rotated,
            backend_depth: None,
            backend_bytes: u64::MAX,
            dump_depth: 4,
            staging: [None, None],
            registrar: None,
            tasks_in_flight: usize::MAX,
            max_tasks: 4096,
            max_shards: 1 << 20,
            max_dump_bytes: 1 << 30,
            grace: Duration::from_secs(5),
            refuse_late: false,
            #[cfg(feature = "testing")]
            panic_at_step: None,
        }
    }

    /// Registers memory with the engine and makes it usable as source and destination.
    ///
    /// # Errors
    /// What the engine says.
    pub fn register(&self, memory: Memory) -> Result<RegionId, TransferError> {
        self.shared.register(memory)
    }

    /// Makes a region of `len` bytes that is registered with the engine already usable as source
    /// and destination.
    pub fn add_region(&self, region: RegionId, len: u64) {
        self.shared.regions.insert(region, len);
    }

    /// Makes a region unusable for new tasks, without asking the engine: the other half of
    /// [`add_region`](Self::add_region). Returns its length if it was usable.
    pub fn remove_region(&self, region: RegionId) -> Option<u64> {
        self.shared.regions.remove(region)
    }

    /// Takes a region back. Tasks admitted before that name it and are not copied yet end
    /// `Recompute`.
    ///
    /// # Errors
    /// What the engine says: `Busy` while a copy uses it; it stays usable then.
    pub fn deregister(&self, region: RegionId) -> Result<(), TransferError> {
        self.shared.deregister(region)
    }

    /// Submits a load task. Returns at once; the handle's requests end one by one.
    ///
    /// # Errors
    /// See [`ErrorKind`]: nothing was accepted, and the message has the numbers.
    pub fn submit(&self, task: Task) -> Result<TaskHandle, QueueError> {
        self.shared.submit(task, Instant::now())
    }

    /// Submits one task per group of layers. Each group begins to read when the one before has
    /// nothing more to claim, so they end about in order. Returns at once.
    ///
    /// # Errors
    /// As [`submit`](Self::submit): if one group is refused, nothing was accepted.
    pub fn submit_layers(&self, groups: Vec<LayerGroup>) -> Result<Layers, QueueError> {
        self.shared.submit_layers(groups, Instant::now())
    }

    /// Submits a dump task. Returns at once.
    ///
    /// # Errors
    /// See [`ErrorKind`]; `Busy` is the back-pressure: too many bytes of dumps have not ended.
    pub fn dump(&self, task: DumpTask) -> Result<DumpHandle, QueueError> {
        self.shared.dump(task)
    }

    /// What the queue has done and holds.
    #[must_use]
    pub fn stats(&self) -> QueueStats {
        self.shared.meter.stats()
    }

    /// Reads [`stats`](Self::stats) for as long as somebody wants to, also after the queue's end.
    #[must_use]
    pub fn meter(&self) -> QueueMeter {
        self.shared.meter.clone()
    }

    /// Fails once the dispatcher is gone.
    ///
    /// # Errors
    /// `Poisoned` with the panic's message, or `Closed`.
    pub fn check(&self) -> Result<(), QueueError> {
        self.shared.check()
    }

    /// Ends everything and the dispatcher, like dropping the queue, and says how it went.
    ///
    /// # Errors
    /// `Poisoned` when the dispatcher had panicked.
    pub fn close(mut self) -> Result<(), QueueError> {
        self.shut_down();
        match self.shared.vitals.health() {
            Health::Poisoned(message) => Err(poisoned(&message)),
            _ => Ok(()),
        }
    }

    fn shut_down(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        self.shared.vitals.set(Health::Closed);
        // Refused only by a dispatcher that is gone already.
        let _ = self.shared.inbox.push(Event::Close);
        // The thread catches its panics.
        let _ = thread.join();
    }
}

impl Shared {
    pub(crate) fn register(&self, memory: Memory) -> Result<RegionId, TransferError> {
        let len = memory.len() as u64;
        let region = self.engine.register(memory)?;
        self.regions.insert(region, len);
        Ok(region)
    }

    fn deregister(&self, region: RegionId) -> Result<(), TransferError> {
        let len = self.regions.remove(region);
        let result = self.engine.deregister(region);
        if let (Err(_), Some(len)) = (&result, len) {
            self.regions.insert(region, len);
        }
        result
    }

    pub(crate) fn submit(&self, task: Task, now: Instant) -> Result<TaskHandle, QueueError> {
        self.counted(|| {
            let (prepared, handle) = self.prepare(task, now)?;
            self.push(Event::Submit(prepared))?;
            Ok(handle)
        })
    }

    pub(crate) fn submit_layers(
        &self,
        groups: Vec<LayerGroup>,
        now: Instant,
    ) -> Result<Layers, QueueError> {
        self.counted(|| {
            let mut prepared = Vec::with_capacity(groups.len());
            let mut handles = Vec::with_capacity(groups.len());
            let mut before = None;
            for LayerGroup { layers, task } in groups {
                let (mut next, handle) = self.prepare(task, now)?;
                next.after = before.replace(next.id);
                prepared.push(next);
                handles.push((layers, handle));
            }
            for next in prepared {
                self.push(Event::Submit(next))?;
            }
            Ok(Layers::new(handles))
        })
    }

    fn prepare(&self, task: Task, now: Instant) -> Result<(Box<Prepared>, TaskHandle), QueueError> {
        let shard_bytes = self.bounds.shard_bytes;
        let bytes = task.bytes_until(shard_bytes).last().unwrap_or(0);
        let ahead = self.meter.admission.load_bytes_held();
        if self.refuse_late {
            for (request, bytes) in task.requests.iter().zip(task.bytes_until(shard_bytes)) {
                let deadline = request.deadline.and_then(|deadline| deadline.at(now));
                let predicted = self.pace.time_of(ahead.saturating_add(bytes));
                if deadline.is_some_and(|at| at < now + predicted) {
                    let message = format!(
                        "{bytes} bytes behind {ahead} take about {predicted:?} at the pace so far, \
                         longer than the deadline allows: recompute instead"
                    );
                    return Err(QueueError::too_late(message, predicted));
                }
            }
        }
        let share = self.meter.admission.load(task.weight(), bytes)?;
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let inbox = self.inbox.clone();
        let (prepared, mut handle) =
            task.prepare(id, now, &self.bounds, &self.regions, share, inbox)?;
        handle.predicted = self.pace.time_of(ahead.saturating_add(bytes));
        Ok((prepared, handle))
    }

    pub(crate) fn dump(&self, task: DumpTask) -> Result<DumpHandle, QueueError> {
        self.counted(|| {
            let id = self.next_id.fetch_add(1, Ordering::Relaxed);
            let after = task.after.clone();
            let (prepared, handle) =
                task.prepare(id, &self.bounds, &self.regions, &self.meter.admission, &self.inbox)?;
            self.push(Event::Dump(prepared))?;
            if let Some(after) = after {
                let inbox = Arc::downgrade(&self.inbox);
                after.when(Box::new(move |well| {
                    // A queue that is gone has ended the dump.
                    let _ = inbox.upgrade().map(|inbox| inbox.push(Event::Produced(id, well)));
                }));
            }
            self.meter.metrics.dump_tasks.add(1);
            Ok(handle)
        })
    }

    fn counted<T>(&self, submit: impl FnOnce() -> Result<T, QueueError>) -> Result<T, QueueError> {
        let result = self.check().and_then(|()| submit());
        if let Err(error) = &result {
            self.meter.metrics.reject(error.kind());
        }
        result
    }

    fn check(&self) -> Result<(), QueueError> {
        match self.vitals.health() {
            Health::Alive => Ok(()),
            Health::Closed => Err(QueueError::new(ErrorKind::Closed, "the queue is closing")),
            Health::Poisoned(message) => Err(poisoned(&message)),
        }
    }

    fn push(&self, event: Event) -> Result<(), QueueError> {
        self.inbox.push(event).map_err(|_| {
            self.check()
                .err()
                .unwrap_or_else(|| QueueError::new(ErrorKind::Closed, "the dispatcher has ended"))
        })
    }
}

impl Drop for LoadQueue {
    fn drop(&mut self) {
        self.shut_down();
    }
}

impl fmt::Debug for LoadQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadQueue")
            .field("health", &self.shared.vitals.health())
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

fn poisoned(message: &str) -> QueueError {
    QueueError::new(
        ErrorKind::Poisoned,
        format!("the dispatcher panicked ({message}): make a new queue"),
    )
}
