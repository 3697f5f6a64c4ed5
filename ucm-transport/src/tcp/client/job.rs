//! Plans and calls in flight, and the exchanges that they are made of.
//!
//! **Invariant:** a job ends when its last exchange has, and an exchange ends only when nothing can
//! touch its pieces any more: it owns them, or has given them to a lane that gives them back.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use super::Attached;
use crate::{
    Completion, ErrorKind, Hold, RegionId, RegionLease, Ticket, TransferError,
    tcp::{sys::Scatter, wire::RequestKind},
};

/// A plan or a call.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) ticket: Ticket,
    pub(super) deadline: Instant,
    /// Its end goes to the one who waits for it, not to `poll`.
    pub(super) direct: bool,
    cancelled: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Exchanges that have not ended.
    open: usize,
    /// The regions it uses, until it has ended.
    lease: Option<RegionLease<Attached>>,
    bytes: u64,
    error: Option<TransferError>,
    holds: Vec<Hold>,
    reply: Vec<u8>,
    ended: Option<(Completion, Vec<u8>)>,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State").field("open", &self.open).finish_non_exhaustive()
    }
}

impl Job {
    pub(super) fn new(
        ticket: Ticket,
        deadline: Instant,
        direct: bool,
        lease: RegionLease<Attached>,
        (open, bytes): (usize, u64),
        holds: Vec<Hold>,
    ) -> Arc<Self> {
        let state = State { open, lease: Some(lease), bytes, holds, ..State::default() };
        let cancelled = AtomicBool::new(false);
        Arc::new(Self { ticket, deadline, direct, cancelled, state: Mutex::new(state) })
    }

    pub(super) fn cancel(&self) {
        self.cancelled.store(true, Ordering::SeqCst);
    }

    /// Why it must not go on, if it must not.
    pub(super) fn over(&self, now: Instant) -> Option<TransferError> {
        if self.cancelled.load(Ordering::SeqCst) {
            return Some(TransferError::new(ErrorKind::Cancelled, "the plan was cancelled"));
        }
        (self.deadline <= now)
            .then(|| TransferError::new(ErrorKind::Timeout, "the peer did not answer in time"))
    }

    pub(super) fn uses(&self, region: RegionId) -> bool {
        self.lock().lease.as_ref().is_some_and(|lease| lease.find(region).is_some())
    }

    /// Notes the end of an exchange; the completion when it was the last one.
    pub(super) fn exchange_ended(
        &self,
        result: Result<(), TransferError>,
        reply: Vec<u8>,
    ) -> Option<Completion> {
        let mut state = self.lock();
        state.open = state.open.saturating_sub(1);
        if let Err(error) = result {
            state.error.get_or_insert(error);
        }
        if !reply.is_empty() {
            state.reply = reply;
        }
        if state.open > 0 {
            return None;
        }
        let result = state.error.take().map_or(Ok(state.bytes), Err);
        let holds = std::mem::take(&mut state.holds);
        Some(Completion { ticket: self.ticket, result, holds })
    }

    /// The regions are free from now on: after the last exchange.
    pub(super) fn release(&self) {
        let lease = self.lock().lease.take();
        // Whose last reference this is, its owner's code may run here, without a lock.
        drop(lease.map(RegionLease::release));
    }

    pub(super) fn keep(&self, completion: Completion) {
        let mut state = self.lock();
        let reply = std::mem::take(&mut state.reply);
        state.ended = Some((completion, reply));
    }

    /// The end of a direct job, with the reply of a call.
    pub(super) fn take_end(&self) -> Option<(Completion, Vec<u8>)> {
        self.lock().ended.take()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One request and its reply.
#[derive(Debug)]
pub(super) struct Exchange {
    pub(super) job: Arc<Job>,
    pub(super) kind: RequestKind,
    /// The request's body, behind room for its head.
    pub(super) frame: Vec<u8>,
    /// Destinations of a read, sources of a write.
    pub(super) pieces: Scatter,
    /// Bytes of those pieces.
    pub(super) payload: u64,
    /// It was on a lane before.
    pub(super) resent: bool,
}

impl Exchange {
    /// Whether it may be sent once more: nothing of its reply was read, and doing it twice is the
    /// same as doing it once.
    pub(super) fn may_go_again(&self) -> bool {
        self.kind == RequestKind::Read && !self.resent && self.pieces.left() == self.payload
    }
}

/// An exchange that is over: nothing touches its pieces.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) job: Arc<Job>,
    pub(super) result: Result<(), TransferError>,
    pub(super) reply: Vec<u8>,
}

impl Ended {
    /// Ends an exchange whose pieces are its own.
    pub(super) fn failed(exchange: Exchange, error: TransferError) -> Self {
        Self { job: exchange.job, result: Err(error), reply: Vec::new() }
    }
}
