//! The trait every transfer engine implements.
//!
//! **Invariant:** a plan that was accepted ends exactly once, and cannot be seen without its status.

use std::{task::Waker, time::Instant};

use crate::{Hold, Memory, RegionId, Rejected, TransferError, TransferPlan};

/// Names one submitted plan; unique within an engine for its whole life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// What an engine can do; reported by `ucm doctor` and as metrics.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// Most items the engine takes in one plan.
    pub max_items: usize,
    /// Most bytes of one item after planning.
    pub max_item_bytes: u64,
    /// Plans that may be in flight at once; one more is refused as `Busy`.
    pub max_in_flight: usize,
    /// Worker threads (0 = the caller's thread moves the bytes).
    pub workers: usize,
    /// Whether ended means proved by an event (`true`) or only by closing the connection.
    pub hard_completion: bool,
}

impl Capabilities {
    /// Capabilities of an engine without limits of its own, with `workers` threads.
    #[must_use]
    pub fn unlimited(workers: usize) -> Self {
        Self {
            max_items: usize::MAX,
            max_item_bytes: u64::MAX,
            max_in_flight: usize::MAX,
            workers,
            hard_completion: true,
        }
    }
}

/// The terminal state of one plan. Cannot be read without its status.
pub struct Completion {
    /// Which plan.
    pub ticket: Ticket,
    /// Bytes moved, or why the destination must be taken as undefined.
    pub result: Result<u64, TransferError>,
    /// What the plan held, given back now that nothing touches the memory any more.
    pub holds: Vec<Hold>,
}

impl std::fmt::Debug for Completion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Completion")
            .field("ticket", &self.ticket)
            .field("result", &self.result)
            .finish_non_exhaustive()
    }
}

/// What must have ended when [`TransferEngine::quiesce`] returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Quiesce {
    /// Everything submitted before the call.
    All,
    /// Every plan that reads or writes this region.
    Region(RegionId),
    /// One plan.
    Ticket(Ticket),
}

/// Moves bytes between registered regions.
///
/// All methods are safe to call from many threads. A submitted plan ends exactly once, as one
/// [`Completion`]; until then its memory and holds belong to the engine.
pub trait TransferEngine: Send + Sync + std::fmt::Debug {
    /// Short name for reports ("host", "cuda", …).
    fn name(&self) -> &'static str;

    /// What this engine can do, as probed.
    fn capabilities(&self) -> Capabilities;

    /// Makes memory usable in plans.
    ///
    /// # Errors
    /// `Unsupported` for a location the engine cannot reach, `Registration` when the device or the
    /// operating system refuses; nothing stays registered then.
    fn register(&self, memory: Memory) -> Result<RegionId, TransferError>;

    /// Forgets a region.
    ///
    /// # Errors
    /// `Busy` while a plan uses it (nothing changes), `StaleRegion` for an unknown handle.
    fn deregister(&self, region: RegionId) -> Result<(), TransferError>;

    /// Starts a plan. Everything is checked before any byte moves.
    ///
    /// # Errors
    /// [`Rejected`] gives the plan back whole: bad ranges, stale regions, unsupported locations,
    /// a full queue (`Busy`), or a poisoned engine.
    fn submit(&self, plan: TransferPlan) -> Result<Ticket, Rejected>;

    /// Moves ended plans to `out` without blocking; returns how many.
    fn poll(&self, out: &mut Vec<Completion>) -> usize;

    /// Sets who is woken when a completion becomes ready to [`poll`](Self::poll). Replaces the
    /// earlier one. Engines without threads of their own complete inside `submit` or `poll`, and
    /// wake from there.
    fn set_waker(&self, waker: Option<Waker>);

    /// Blocks until the target has ended or the deadline passes.
    ///
    /// # Errors
    /// `Stuck` at the deadline: the memory still belongs to the engine.
    fn quiesce(&self, target: Quiesce, deadline: Instant) -> Result<(), TransferError>;
}
