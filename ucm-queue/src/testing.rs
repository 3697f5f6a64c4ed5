//! A queue without a thread: the test turns it, and says what time it is.
//!
//! **Invariant:** the core of a [`SimQueue`] is the one of a [`LoadQueue`](crate::LoadQueue); only
//! the loop around it is the test's.

use std::time::Instant;

use ucm_ctrl::Doorbell;
use ucm_transport::{Memory, RegionId, TransferError};

use crate::{
    Builder, DumpHandle, DumpTask, LayerGroup, Layers, QueueError, QueueStats, Task, TaskHandle,
    core::Core, inbox::Event, queue::Shared,
};

/// See the module description.
pub struct SimQueue {
    shared: Shared,
    core: Core,
    bell: Doorbell,
    seen: u32,
    wake_at: Option<Instant>,
    prewarm: bool,
    events: Vec<Event>,
}

impl SimQueue {
    /// The queue of this builder at simulated time `now`.
    ///
    /// # Errors
    /// As [`Builder::start`].
    pub fn new(builder: Builder, bell: Doorbell, now: Instant) -> Result<Self, QueueError> {
        let (shared, core) = builder.assemble(now)?;
        let seen = bell.ticket();
        let (wake_at, prewarm, events) = (None, false, Vec::new());
        Ok(Self { shared, core, bell, seen, wake_at, prewarm, events })
    }

    /// As [`LoadQueue::register`](crate::LoadQueue::register).
    ///
    /// # Errors
    /// What the engine says.
    pub fn register(&self, memory: Memory) -> Result<RegionId, TransferError> {
        self.shared.register(memory)
    }

    /// As [`LoadQueue::submit`](crate::LoadQueue::submit), at simulated time `now`.
    ///
    /// # Errors
    /// As there.
    pub fn submit(&self, task: Task, now: Instant) -> Result<TaskHandle, QueueError> {
        self.shared.submit(task, now)
    }

    /// As [`LoadQueue::submit_layers`](crate::LoadQueue::submit_layers), at simulated time `now`.
    ///
    /// # Errors
    /// As there.
    pub fn submit_layers(
        &self,
        groups: Vec<LayerGroup>,
        now: Instant,
    ) -> Result<Layers, QueueError> {
        self.shared.submit_layers(groups, now)
    }

    /// As [`LoadQueue::dump`](crate::LoadQueue::dump).
    ///
    /// # Errors
    /// As there.
    pub fn dump(&self, task: DumpTask) -> Result<DumpHandle, QueueError> {
        self.shared.dump(task)
    }

    /// Whether the dispatcher's thread would be awake at `now`.
    #[must_use]
    pub fn is_due(&self, now: Instant) -> bool {
        self.bell.ticket() != self.seen || self.wake_at.is_some_and(|at| at <= now)
    }

    /// When the thread would wake up without being rung.
    #[must_use]
    pub fn wake_at(&self) -> Option<Instant> {
        self.wake_at
    }

    /// One turn of the core.
    pub fn turn(&mut self, now: Instant) {
        self.seen = self.bell.ticket();
        self.shared.inbox.take(&mut self.events);
        let turn = self.core.turn(now, &mut self.events);
        self.wake_at = turn.wake_at;
        self.prewarm = turn.prewarm;
    }

    /// One step of the idle window, if it is open. Says whether there is more.
    pub fn prewarm_step(&mut self) -> bool {
        self.prewarm = self.prewarm && self.core.prewarm_step();
        self.prewarm
    }

    /// Asks for the end of everything.
    pub fn close(&self) {
        // Refused only by a closed inbox, and nobody closes this one.
        let _ = self.shared.inbox.push(Event::Close);
    }

    /// Whether nothing is in flight and no task is open.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.core.is_idle() && self.shared.inbox.is_empty()
    }

    /// Deadlines that the core keeps, of ended requests too.
    #[must_use]
    pub fn deadlines(&self) -> usize {
        self.core.deadlines()
    }

    /// What the queue has done and holds.
    #[must_use]
    pub fn stats(&self) -> QueueStats {
        self.shared.meter.stats()
    }
}

impl Drop for SimQueue {
    fn drop(&mut self) {
        // As a dispatcher that ends.
        self.shared.inbox.close();
    }
}

impl std::fmt::Debug for SimQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SimQueue")
            .field("core", &self.core.describe())
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}
