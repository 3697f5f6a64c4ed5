//! What submitters, workers and pollers of the host engine share.
//!
//! **Invariant:** a job leaves `jobs` exactly once, when no piece of it runs and none is left to
//! start; only then do its regions, its holds and its completion become available.

use std::{
    collections::{HashMap, VecDeque},
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    task::Waker,
    time::Instant,
};

use super::copy::CopyOp;
use crate::{
    Completion, ErrorKind, Hold, Quiesce, Region, RegionId, RegionLease, SourceCheck, Ticket,
    TransferError, TransferPlan,
};

#[derive(Debug)]
pub(super) struct Shared {
    state: Mutex<State>,
    /// Workers sleep here.
    work: Condvar,
    /// `quiesce` sleeps here.
    ended: Condvar,
}

#[derive(Debug)]
struct State {
    next_ticket: u64,
    jobs: HashMap<Ticket, Job>,
    /// Jobs with pieces that nobody has taken yet, oldest first.
    queue: VecDeque<Ticket>,
    done: Vec<Completion>,
    waker: Option<Waker>,
    sleeping: usize,
    stop: bool,
    poisoned: bool,
    pieces_taken: u64,
    panic_at: Option<u64>,
}

/// One accepted plan.
pub(super) struct Job {
    ops: Arc<Vec<CopyOp>>,
    spans: Vec<Range<usize>>,
    /// First span that nobody has taken.
    next: usize,
    /// Spans that run at the moment.
    active: usize,
    bytes: u64,
    error: Option<TransferError>,
    lease: RegionLease<()>,
    check: Option<Arc<dyn SourceCheck>>,
    holds: Vec<Hold>,
}

impl Job {
    pub(super) fn new(
        ops: Vec<CopyOp>,
        spans: Vec<Range<usize>>,
        bytes: u64,
        lease: RegionLease<()>,
        check: Option<Arc<dyn SourceCheck>>,
    ) -> Self {
        Self {
            ops: Arc::new(ops),
            spans,
            next: 0,
            active: 0,
            bytes,
            error: None,
            lease,
            check,
            holds: Vec::new(),
        }
    }

    fn is_over(&self) -> bool {
        self.active == 0 && self.next >= self.spans.len()
    }
}

impl std::fmt::Debug for Job {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Job")
            .field("spans", &self.spans.len())
            .field("next", &self.next)
            .field("active", &self.active)
            .finish_non_exhaustive()
    }
}

/// A span taken from a job, to be run outside the lock.
pub(super) struct Piece {
    pub(super) ticket: Ticket,
    pub(super) ops: Arc<Vec<CopyOp>>,
    pub(super) range: Range<usize>,
    /// Asked after the copies.
    pub(super) check: Option<Arc<dyn SourceCheck>>,
    pub(super) inject_panic: bool,
}

/// How a piece ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PieceEnd {
    /// All its bytes were moved, and were current.
    Moved,
    /// The source changed while it was read.
    Stale,
    /// The worker panicked.
    Panicked,
}

/// What remains to be done without the lock: here foreign code runs.
#[derive(Default)]
#[must_use]
struct After {
    waker: Option<Waker>,
    regions: Vec<(RegionId, Arc<Region<()>>)>,
}

impl Shared {
    pub(super) fn new(panic_at: Option<u64>) -> Self {
        let state = State {
            next_ticket: 1,
            jobs: HashMap::new(),
            queue: VecDeque::new(),
            done: Vec::new(),
            waker: None,
            sleeping: 0,
            stop: false,
            poisoned: false,
            pieces_taken: 0,
            panic_at,
        };
        Self { state: Mutex::new(state), work: Condvar::new(), ended: Condvar::new() }
    }

    /// Accepts a job, and takes the plan's holds only then. With `inline`, the caller gets the
    /// whole job as one piece to run.
    pub(super) fn admit(
        &self,
        mut job: Job,
        plan: &mut TransferPlan,
        max_in_flight: usize,
        inline: bool,
    ) -> Result<(Ticket, Option<Piece>), TransferError> {
        let mut state = self.lock();
        if state.poisoned {
            return Err(poisoned());
        }
        let in_flight = state.jobs.len() + state.done.len();
        if in_flight >= max_in_flight {
            return Err(TransferError::new(
                ErrorKind::Busy,
                format!(
                    "{in_flight} plans are in flight or not polled yet, the limit is {max_in_flight}; \
                     poll completions first"
                ),
            ));
        }
        let ticket = Ticket(state.next_ticket);
        state.next_ticket += 1;
        job.holds = std::mem::take(&mut plan.holds);
        plan.items = Vec::new();
        let spans = job.spans.len();
        let mut piece = None;
        if inline && spans > 0 {
            job.next = spans;
            job.active = 1;
            let (ops, range) = (Arc::clone(&job.ops), 0..job.ops.len());
            let inject_panic = state.count_piece();
            let check = job.check.clone();
            piece = Some(Piece { ticket, ops, range, check, inject_panic });
        }
        state.jobs.insert(ticket, job);
        if spans == 0 {
            let mut after = After::default();
            self.end_if_over(&mut state, ticket, &mut after);
            drop(state);
            self.finish(after);
        } else if !inline {
            state.queue.push_back(ticket);
            let to_wake = state.sleeping.min(spans);
            drop(state);
            for _ in 0..to_wake {
                self.work.notify_one();
            }
        }
        Ok((ticket, piece))
    }

    /// Sleeps until there is a piece to run; `None` when the engine stops.
    pub(super) fn take(&self) -> Option<Piece> {
        let mut state = self.lock();
        loop {
            if let Some(piece) = state.take_piece() {
                return Some(piece);
            }
            if state.stop || state.poisoned {
                return None;
            }
            state.sleeping += 1;
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.sleeping -= 1;
        }
    }

    /// Records the end of a piece.
    pub(super) fn piece_ended(&self, ticket: Ticket, end: PieceEnd) {
        let panicked = end == PieceEnd::Panicked;
        let mut after = After::default();
        let mut state = self.lock();
        if let Some(job) = state.jobs.get_mut(&ticket) {
            job.active -= 1;
            match end {
                PieceEnd::Moved => {}
                PieceEnd::Stale => {
                    job.error.get_or_insert_with(TransferError::source_changed);
                }
                PieceEnd::Panicked => job.error = Some(poisoned()),
            }
        }
        if panicked {
            state.poisoned = true;
            self.cancel_waiting(&mut state, &poisoned(), &mut after);
        }
        self.end_if_over(&mut state, ticket, &mut after);
        drop(state);
        if panicked {
            self.work.notify_all();
        }
        self.finish(after);
    }

    pub(super) fn poll(&self, out: &mut Vec<Completion>) -> usize {
        let mut state = self.lock();
        let count = state.done.len();
        out.append(&mut state.done);
        count
    }

    pub(super) fn set_waker(&self, waker: Option<Waker>) {
        let mut state = self.lock();
        let earlier = std::mem::replace(&mut state.waker, waker);
        // A completion that came before the waker must not wait for the next one.
        let waker = state.woken_if_done();
        drop(state);
        drop(earlier);
        self.finish(After { waker, ..After::default() });
    }

    pub(super) fn quiesce(&self, target: Quiesce, deadline: Instant) -> Result<(), TransferError> {
        let mut state = self.lock();
        let before = Ticket(state.next_ticket);
        loop {
            let left = state.jobs.iter().filter(|(t, j)| concerns(target, before, **t, j)).count();
            if left == 0 {
                return Ok(());
            }
            let Some(wait) =
                deadline.checked_duration_since(Instant::now()).filter(|d| !d.is_zero())
            else {
                return Err(TransferError::new(
                    ErrorKind::Stuck,
                    format!("{left} plans of {target:?} had not ended at the deadline"),
                ));
            };
            state = self.ended.wait_timeout(state, wait).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Lets running copies end and drops what has not begun. Workers leave.
    pub(super) fn stop(&self) {
        let mut state = self.lock();
        state.stop = true;
        let gone = TransferError::new(ErrorKind::Failed, "the engine was dropped");
        let mut after = After::default();
        self.cancel_waiting(&mut state, &gone, &mut after);
        drop(state);
        self.work.notify_all();
        drop(after);
    }

    /// Drops completions that nobody can poll any more.
    pub(super) fn abandon(&self) {
        let mut state = self.lock();
        let done = std::mem::take(&mut state.done);
        let waker = state.waker.take();
        drop(state);
        drop(done);
        drop(waker);
    }

    /// Gives up all pieces that have not begun; jobs without a running piece end.
    fn cancel_waiting(&self, state: &mut State, error: &TransferError, after: &mut After) {
        for ticket in std::mem::take(&mut state.queue) {
            if let Some(job) = state.jobs.get_mut(&ticket) {
                job.next = job.spans.len();
                job.error.get_or_insert_with(|| error.clone());
            }
            self.end_if_over(state, ticket, after);
        }
    }

    fn end_if_over(&self, state: &mut State, ticket: Ticket, after: &mut After) {
        if !state.jobs.get(&ticket).is_some_and(Job::is_over) {
            return;
        }
        if let Some(job) = state.jobs.remove(&ticket) {
            after.regions.extend(job.lease.release());
            let result = job.error.map_or(Ok(job.bytes), Err);
            state.done.push(Completion { ticket, result, holds: job.holds });
        }
        self.ended.notify_all();
        after.waker = state.woken_if_done();
    }

    fn finish(&self, after: After) {
        let After { waker, regions } = after;
        drop(regions);
        let Some(waker) = waker else { return };
        if catch_unwind(AssertUnwindSafe(|| waker.wake())).is_err() {
            tracing::error!("the waker of the host engine panicked; the engine is poisoned");
            let mut after = After::default();
            let mut state = self.lock();
            state.poisoned = true;
            self.cancel_waiting(&mut state, &poisoned(), &mut after);
            drop(state);
            self.work.notify_all();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn take_piece(&mut self) -> Option<Piece> {
        let ticket = *self.queue.front()?;
        let inject_panic = self.count_piece();
        let job = self.jobs.get_mut(&ticket)?;
        let range = job.spans.get(job.next)?.clone();
        job.next += 1;
        job.active += 1;
        let (ops, check) = (Arc::clone(&job.ops), job.check.clone());
        if job.next == job.spans.len() {
            self.queue.pop_front();
        }
        Some(Piece { ticket, ops, range, check, inject_panic })
    }

    fn count_piece(&mut self) -> bool {
        let nth = self.pieces_taken;
        self.pieces_taken += 1;
        self.panic_at == Some(nth)
    }

    fn woken_if_done(&self) -> Option<Waker> {
        if self.done.is_empty() { None } else { self.waker.clone() }
    }
}

fn concerns(target: Quiesce, before: Ticket, ticket: Ticket, job: &Job) -> bool {
    match target {
        Quiesce::All => ticket < before,
        Quiesce::Region(id) => job.lease.find(id).is_some(),
        Quiesce::Ticket(t) => ticket == t,
    }
}

fn poisoned() -> TransferError {
    TransferError::new(
        ErrorKind::Poisoned,
        "a worker of the host engine panicked; make a new engine",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Memory, RegionTable};

    /// A job of four pieces, the first two of which run.
    fn two_running() -> (Shared, RegionTable, RegionId, Ticket) {
        let regions = RegionTable::default();
        let id = regions.register(Memory::host(64).unwrap(), ()).unwrap();
        let lease = regions.view().lease(&[id]).unwrap();
        let job = Job::new(Vec::new(), vec![0..0; 4], 64, lease, None);
        let shared = Shared::new(None);
        let mut plan = TransferPlan { items: vec![], holds: vec![Box::new(1)] };
        let (ticket, piece) = shared.admit(job, &mut plan, 8, false).unwrap();
        assert!(piece.is_none() && plan.holds.is_empty());
        assert!(shared.take().is_some() && shared.take().is_some());
        (shared, regions, id, ticket)
    }

    fn stuck(shared: &Shared) -> bool {
        shared.quiesce(Quiesce::All, Instant::now()).is_err()
    }

    #[test]
    fn a_plan_ends_with_its_last_piece_only() {
        let (shared, regions, id, ticket) = two_running();
        let mut out = Vec::new();
        assert!(shared.take().is_some() && shared.take().is_some());
        for _ in 0..3 {
            shared.piece_ended(ticket, PieceEnd::Moved);
            assert_eq!(shared.poll(&mut out), 0);
            assert!(stuck(&shared));
            assert_eq!(regions.deregister(id).unwrap_err().kind(), ErrorKind::Busy);
        }
        shared.piece_ended(ticket, PieceEnd::Moved);
        assert!(!stuck(&shared));
        assert_eq!(shared.poll(&mut out), 1);
        assert_eq!((out[0].result.clone().unwrap(), out[0].holds.len()), (64, 1));
        regions.deregister(id).unwrap();
    }

    #[test]
    fn a_panic_ends_the_plan_after_the_pieces_that_still_run() {
        let (shared, regions, id, ticket) = two_running();
        let mut out = Vec::new();
        shared.piece_ended(ticket, PieceEnd::Panicked);
        assert!(shared.take().is_none(), "nothing is started any more");
        assert_eq!((shared.poll(&mut out), stuck(&shared)), (0, true));
        assert_eq!(regions.deregister(id).unwrap_err().kind(), ErrorKind::Busy);
        shared.piece_ended(ticket, PieceEnd::Moved);
        assert_eq!((shared.poll(&mut out), stuck(&shared)), (1, false));
        assert_eq!(out[0].result.as_ref().unwrap_err().kind(), ErrorKind::Poisoned);
        regions.deregister(id).unwrap();
    }

    #[test]
    fn stopping_waits_for_pieces_that_run() {
        let (shared, _regions, _id, ticket) = two_running();
        let mut out = Vec::new();
        shared.stop();
        assert!(shared.take().is_none());
        shared.piece_ended(ticket, PieceEnd::Moved);
        assert_eq!(shared.poll(&mut out), 0);
        shared.piece_ended(ticket, PieceEnd::Moved);
        assert_eq!(shared.poll(&mut out), 1);
        assert_eq!(out[0].result.as_ref().unwrap_err().kind(), ErrorKind::Failed);
    }
}
