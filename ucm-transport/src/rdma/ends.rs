//! Accepted plans, and how they end.
//!
//! **Invariant:** a plan ends once, when none of its parts is with an adapter any more; before anybody
//! can hear of it, its regions are free.

use std::{
    collections::HashMap,
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    task::Waker,
    time::Instant,
};

use super::plan::Attached;
use crate::{Completion, ErrorKind, Hold, Quiesce, RegionLease, Ticket, TransferError};

/// One accepted plan.
pub(super) struct Job {
    pub(super) ticket: Ticket,
    pub(super) deadline: Instant,
    state: Mutex<JobState>,
    /// Nothing more of it is to be posted.
    over: AtomicBool,
    /// It was cancelled, or its deadline has passed, and all was done to end it.
    expelled: AtomicBool,
    /// Read without the lock: what it uses does not change.
    lease: Mutex<Option<RegionLease<Attached>>>,
}

struct JobState {
    /// Parts that have not ended.
    parts: usize,
    bytes: u64,
    error: Option<TransferError>,
    holds: Vec<Hold>,
}

impl Job {
    /// Whatever becomes of it, the plan has failed. Says whether this is why.
    pub(super) fn fail(&self, error: TransferError) -> bool {
        let mut state = self.lock();
        let first = state.error.is_none() && state.parts > 0;
        if first {
            state.error = Some(error);
        }
        self.over.store(true, Ordering::SeqCst);
        first
    }

    /// Whether it has failed, so that nothing more of it need be posted.
    pub(super) fn is_over(&self) -> bool {
        self.over.load(Ordering::SeqCst)
    }

    /// Notes that it is being ended by force; says whether this is the first time.
    pub(super) fn expel(&self) -> bool {
        !self.expelled.swap(true, Ordering::SeqCst)
    }

    fn uses(&self, target: Quiesce) -> bool {
        match target {
            Quiesce::All => true,
            Quiesce::Ticket(ticket) => ticket == self.ticket,
            Quiesce::Region(id) => {
                let lease = self.lease.lock().unwrap_or_else(PoisonError::into_inner);
                lease.as_ref().is_some_and(|lease| lease.find(id).is_some())
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, JobState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job")
            .field("ticket", &self.ticket)
            .field("parts", &self.lock().parts)
            .finish_non_exhaustive()
    }
}

/// All plans of an engine.
#[derive(Debug)]
pub(super) struct Ends {
    max_in_flight: usize,
    state: Mutex<State>,
    ended: Condvar,
    poisoned: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    next_ticket: u64,
    jobs: HashMap<Ticket, Arc<Job>>,
    done: Vec<Completion>,
    waker: Option<Waker>,
    plans: u64,
    bytes: u64,
}

impl Ends {
    pub(super) fn new(max_in_flight: usize) -> Self {
        let state = Mutex::new(State { next_ticket: 1, ..State::default() });
        let (ended, poisoned) = (Condvar::new(), AtomicBool::new(false));
        Self { max_in_flight, state, ended, poisoned }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No foreign code runs under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn check(&self) -> Result<(), TransferError> {
        if self.poisoned.load(Ordering::SeqCst) {
            let text = "a waker or the thread of the rdma engine failed; make a new engine";
            return Err(TransferError::new(ErrorKind::Poisoned, text));
        }
        Ok(())
    }

    pub(super) fn poison(&self) {
        self.poisoned.store(true, Ordering::SeqCst);
    }

    /// Takes a plan in that is to move so many bytes in so many parts. Without parts it ends at once.
    pub(super) fn admit(
        &self,
        deadline: Instant,
        lease: RegionLease<Attached>,
        (parts, bytes): (usize, u64),
        holds: &mut Vec<Hold>,
    ) -> Result<Arc<Job>, TransferError> {
        let mut state = self.lock();
        let in_flight = state.jobs.len() + state.done.len();
        if in_flight >= self.max_in_flight {
            return Err(TransferError::new(
                ErrorKind::Busy,
                format!(
                    "{in_flight} plans are in flight or not polled yet, the limit is {}; poll \
                     completions first",
                    self.max_in_flight
                ),
            ));
        }
        let ticket = Ticket(state.next_ticket);
        state.next_ticket += 1;
        let holds = std::mem::take(holds);
        let job = Arc::new(Job {
            ticket,
            deadline,
            state: Mutex::new(JobState { parts, bytes, error: None, holds }),
            over: AtomicBool::new(false),
            expelled: AtomicBool::new(false),
            lease: Mutex::new(Some(lease)),
        });
        state.jobs.insert(ticket, Arc::clone(&job));
        drop(state);
        if parts == 0 {
            self.end(&job);
        }
        Ok(job)
    }

    /// One part less. The last one ends the plan.
    pub(super) fn part_ended(&self, job: &Arc<Job>, error: Option<TransferError>) {
        if let Some(error) = error {
            job.fail(error);
        }
        let mut state = job.lock();
        state.parts = state.parts.saturating_sub(1);
        let last = state.parts == 0;
        drop(state);
        if last {
            self.end(job);
        }
    }

    fn end(&self, job: &Arc<Job>) {
        let mut inner = job.lock();
        let result = inner.error.take().map_or(Ok(inner.bytes), Err);
        let holds = std::mem::take(&mut inner.holds);
        drop(inner);
        let lease = job.lease.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut state = self.lock();
        state.jobs.remove(&job.ticket);
        state.plans += 1;
        state.bytes += result.as_ref().copied().unwrap_or(0);
        let regions = lease.map(RegionLease::release);
        state.done.push(Completion { ticket: job.ticket, result, holds });
        let waker = state.waker.clone();
        drop(state);
        drop(regions);
        self.ended.notify_all();
        self.wake(waker);
    }

    fn wake(&self, waker: Option<Waker>) {
        let Some(waker) = waker else { return };
        if catch_unwind(AssertUnwindSafe(|| waker.wake())).is_err() {
            self.poison();
        }
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
        let now = if state.done.is_empty() { None } else { state.waker.clone() };
        drop(state);
        drop(earlier);
        self.wake(now);
    }

    pub(super) fn job(&self, ticket: Ticket) -> Option<Arc<Job>> {
        self.lock().jobs.get(&ticket).cloned()
    }

    /// Plans whose deadline has come, and the next deadline of the others.
    pub(super) fn due(&self, now: Instant) -> (Vec<Arc<Job>>, Option<Instant>) {
        let state = self.lock();
        let waiting = state.jobs.values().filter(|job| !job.expelled.load(Ordering::SeqCst));
        let next = waiting.clone().map(|job| job.deadline).filter(|at| *at > now).min();
        (waiting.filter(|job| job.deadline <= now).cloned().collect(), next)
    }

    pub(super) fn in_flight(&self) -> usize {
        self.lock().jobs.len()
    }

    pub(super) fn totals(&self) -> (u64, u64) {
        let state = self.lock();
        (state.plans, state.bytes)
    }

    /// Takes out what nobody will poll any more.
    pub(super) fn abandon(&self) -> (Vec<Completion>, Option<Waker>) {
        let mut state = self.lock();
        (std::mem::take(&mut state.done), state.waker.take())
    }

    /// Waits for the target, with `look` between short sleeps first, which may bring ends about.
    pub(super) fn quiesce(
        &self,
        target: Quiesce,
        deadline: Instant,
        look: impl Fn() -> bool,
    ) -> Result<(), TransferError> {
        let before = self.lock().next_ticket;
        let left = |state: &State| {
            let older = state.jobs.values().filter(|job| job.ticket.0 < before);
            older.filter(|job| job.uses(target)).count()
        };
        loop {
            if left(&self.lock()) == 0 {
                return Ok(());
            }
            if !look() {
                break;
            }
        }
        let mut state = self.lock();
        loop {
            let count = left(&state);
            if count == 0 {
                return Ok(());
            }
            let time = deadline.saturating_duration_since(Instant::now());
            if time.is_zero() {
                let text = format!("{count} plans of {target:?} had not ended at the deadline");
                return Err(TransferError::new(ErrorKind::Stuck, text));
            }
            let waited = self.ended.wait_timeout(state, time);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
