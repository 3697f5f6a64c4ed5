//! An engine that holds plans back until a test lets them go.
//!
//! **Invariant:** a held plan keeps its items and holds, and no byte of it has moved; when the gate
//! withholds ends, all bytes have moved and nobody has been told.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    task::Waker,
    time::Instant,
};

use super::WATCHDOG;
use crate::{
    Capabilities, Completion, ErrorKind, Memory, Quiesce, RegionId, Rejected, Ticket,
    TransferEngine, TransferError, TransferPlan,
};

/// Wraps an engine so that tests decide when plans begin and how they end.
///
/// Open (the start state), it passes everything on. Closed, plans wait until
/// [`release`](Self::release) or [`open`](Self::open). A plan that the engine inside rejects
/// *after* having been held ends with that error, because its ticket is out already.
#[derive(Debug)]
pub struct GateEngine {
    inner: Arc<dyn TransferEngine>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    closed: bool,
    next_ticket: u64,
    held: VecDeque<(Ticket, TransferPlan)>,
    failures: VecDeque<ErrorKind>,
    /// Inner tickets in flight → ours.
    running: HashMap<Ticket, Ticket>,
    /// Ends polled before `running` knew their ticket.
    early: HashMap<Ticket, Completion>,
    done: Vec<Completion>,
    waker: Option<Waker>,
}

impl GateEngine {
    /// Wraps `inner`, open.
    pub fn new(inner: Arc<dyn TransferEngine>) -> Arc<Self> {
        let state = Mutex::default();
        Arc::new(Self { inner, state, changed: Condvar::new() })
    }

    /// Holds all plans submitted from now on.
    pub fn close(&self) {
        self.lock().closed = true;
    }

    /// Lets all held plans go, and later ones pass.
    pub fn open(&self) {
        self.lock().closed = false;
        self.release(usize::MAX);
    }

    /// Lets the oldest `count` held plans go; returns how many there were.
    pub fn release(&self, count: usize) -> usize {
        for released in 0..count {
            let Some((ticket, plan)) = self.lock().held.pop_front() else { return released };
            self.start(ticket, plan);
        }
        count
    }

    /// The next plan that would begin ends with this kind of error instead, with no byte moved.
    pub fn fail_next(&self, kind: ErrorKind) {
        self.lock().failures.push_back(kind);
    }

    /// Number of plans held.
    pub fn held(&self) -> usize {
        self.lock().held.len()
    }

    /// Sleeps until `count` plans are held.
    ///
    /// # Panics
    /// When that does not happen within [`WATCHDOG`].
    pub fn wait_held(&self, count: usize) {
        let deadline = Instant::now() + WATCHDOG;
        let mut state = self.lock();
        while state.held.len() < count {
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "{} of {count} plans held", state.held.len());
            state =
                self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Gives a plan to the engine inside, under a ticket that is out already.
    fn start(&self, ticket: Ticket, plan: TransferPlan) {
        let failure = self.lock().failures.pop_front();
        let outcome = match failure {
            Some(kind) => {
                let error = TransferError::new(kind, "injected by the gate");
                Err(Rejected { plan, error })
            }
            None => self.inner.submit(plan),
        };
        let mut state = self.lock();
        let waker = match outcome {
            Ok(inner) => match state.early.remove(&inner) {
                Some(completion) => state.end(Completion { ticket, ..completion }),
                None => {
                    state.running.insert(inner, ticket);
                    // It may have ended before it was known here: let the owner look.
                    state.waker.clone()
                }
            },
            Err(Rejected { plan, error }) => {
                state.end(Completion { ticket, result: Err(error), holds: plan.holds })
            }
        };
        drop(state);
        self.changed.notify_all();
        wake(waker);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn end(&mut self, completion: Completion) -> Option<Waker> {
        self.done.push(completion);
        self.waker.clone()
    }

    fn holds_back(&self, target: Quiesce) -> bool {
        self.held.iter().any(|(ticket, plan)| match target {
            Quiesce::All => true,
            Quiesce::Ticket(t) => t == *ticket,
            Quiesce::Region(id) => plan.uses(id),
        })
    }
}

impl TransferPlan {
    fn uses(&self, id: RegionId) -> bool {
        self.items.iter().any(|t| t.src.region == id || t.dst.region == id)
    }
}

fn wake(waker: Option<Waker>) {
    if let Some(waker) = waker {
        waker.wake();
    }
}

impl TransferEngine for GateEngine {
    fn name(&self) -> &'static str {
        "gate"
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn register(&self, memory: Memory) -> Result<RegionId, TransferError> {
        self.inner.register(memory)
    }

    fn deregister(&self, region: RegionId) -> Result<(), TransferError> {
        let held = self.lock().held.iter().filter(|(_, plan)| plan.uses(region)).count();
        if held > 0 {
            let message = format!("{held} held plans use region {}", region.index);
            return Err(TransferError::new(ErrorKind::Busy, message));
        }
        self.inner.deregister(region)
    }

    fn submit(&self, plan: TransferPlan) -> Result<Ticket, Rejected> {
        let mut state = self.lock();
        state.next_ticket += 1;
        let ticket = Ticket(state.next_ticket);
        if state.closed || !state.failures.is_empty() {
            if state.closed {
                state.held.push_back((ticket, plan));
                drop(state);
                self.changed.notify_all();
            } else {
                drop(state);
                self.start(ticket, plan);
            }
            return Ok(ticket);
        }
        drop(state);
        let inner = self.inner.submit(plan)?;
        let mut state = self.lock();
        let waker = match state.early.remove(&inner) {
            Some(completion) => state.end(Completion { ticket, ..completion }),
            None => {
                state.running.insert(inner, ticket);
                None
            }
        };
        drop(state);
        wake(waker);
        Ok(ticket)
    }

    fn poll(&self, out: &mut Vec<Completion>) -> usize {
        let mut ended = Vec::new();
        self.inner.poll(&mut ended);
        let mut state = self.lock();
        for completion in ended {
            match state.running.remove(&completion.ticket) {
                Some(ticket) => state.done.push(Completion { ticket, ..completion }),
                None => {
                    state.early.insert(completion.ticket, completion);
                }
            }
        }
        let count = state.done.len();
        out.append(&mut state.done);
        count
    }

    fn set_waker(&self, waker: Option<Waker>) {
        let mut state = self.lock();
        state.waker.clone_from(&waker);
        let now = if state.done.is_empty() { None } else { waker.clone() };
        drop(state);
        self.inner.set_waker(waker);
        wake(now);
    }

    fn quiesce(&self, target: Quiesce, deadline: Instant) -> Result<(), TransferError> {
        let mut state = self.lock();
        while state.holds_back(target) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let message = format!("the gate holds plans of {target:?}");
                return Err(TransferError::new(ErrorKind::Stuck, message));
            }
            state =
                self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        let of_ours = |t: Ticket| state.running.iter().find(|(_, o)| **o == t).map(|(i, _)| *i);
        let target = match target {
            Quiesce::Ticket(ours) => match of_ours(ours) {
                Some(inner) => Quiesce::Ticket(inner),
                None => return Ok(()),
            },
            other => other,
        };
        drop(state);
        self.inner.quiesce(target, deadline)
    }
}
