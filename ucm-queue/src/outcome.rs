//! How a task ends for its caller: outcomes, the handle, and the promise the core keeps.
//!
//! **Invariant:** every request ends exactly once; a promise that is dropped ends what is still
//! open, so a lost request is impossible by construction. The end of a request says nothing about
//! its resources: those belong to the operations in flight.

use std::{
    fmt, io,
    os::fd::OwnedFd,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
    time::{Duration, Instant},
};

use rustix::event::{EventfdFlags, eventfd};
use ucm_ctrl::FailKind;

use crate::inbox::{Event, Inbox};

/// How one request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum Outcome {
    /// Every shard is in its destination.
    Loaded,
    /// The listed shards (indexes within the request) are not valid and must be recomputed; the
    /// others are in their destinations.
    Recompute {
        /// Which shards, ascending.
        shards: Vec<u32>,
        /// Why the first of them failed.
        kind: FailKind,
    },
    /// Cancelled; nothing writes the destinations any more, their content is undefined.
    Cancelled,
    /// The deadline passed; nothing writes the destinations any more, their content is undefined.
    Deadline,
    /// The request had to end while a copy could not be confirmed ended: the destinations must
    /// not be reused before [`TaskHandle::is_quiesced`] says so.
    Stuck,
}

/// The caller's end of a submitted task.
///
/// Thread-safe. Dropping it changes nothing: the task goes on. It is also a future that yields all
/// outcomes; a task without requests is done at once.
pub struct TaskHandle {
    id: u64,
    shared: Arc<TaskShared>,
    inbox: Arc<Inbox>,
    pub(crate) predicted: Duration,
}

impl TaskHandle {
    /// How long the task was expected to take when it was admitted, behind everything before it;
    /// zero before anything was measured.
    #[must_use]
    pub fn predicted(&self) -> Duration {
        self.predicted
    }

    /// Number of requests.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.shared.lock().outcomes.len()
    }

    /// The outcome of request `index` once it has ended.
    #[must_use]
    pub fn request(&self, index: usize) -> Option<Outcome> {
        self.shared.lock().outcomes.get(index).cloned().flatten()
    }

    /// Whether every request has ended.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.shared.lock().open == 0
    }

    /// All outcomes, in the order of the requests, once every request has ended.
    #[must_use]
    pub fn poll(&self) -> Option<Vec<Outcome>> {
        self.shared.lock().all()
    }

    /// Sleeps until every request has ended, at most until `deadline`; `None` when that passed
    /// first (the task goes on).
    #[must_use]
    pub fn wait(&self, deadline: Option<Instant>) -> Option<Vec<Outcome>> {
        self.shared.wait_until(deadline, State::all)
    }

    /// Sleeps until request `index` has ended, at most until `deadline`. `None` also for an index
    /// out of range.
    #[must_use]
    pub fn wait_request(&self, index: usize, deadline: Option<Instant>) -> Option<Outcome> {
        if index >= self.requests() {
            return None;
        }
        self.shared.lock().watchers += 1;
        let find = |state: &State| state.outcomes.get(index).cloned().flatten();
        let outcome = self.shared.wait_until(deadline, find);
        self.shared.lock().watchers -= 1;
        outcome
    }

    /// Asks for an early end. Requests still open end `Cancelled` once no copy writes their
    /// destinations any more; reads in flight keep their memory until they end.
    pub fn cancel(&self) {
        // A refused event means that the dispatcher is gone and has ended every request.
        let _ = self.inbox.push(Event::Cancel(self.id));
    }

    /// Whether every request has ended and no engine can write any destination any more.
    #[must_use]
    pub fn is_quiesced(&self) -> bool {
        self.shared.lock().quiesced()
    }

    /// Sleeps until the task [is quiesced](Self::is_quiesced), at most until `deadline`; says
    /// whether it is.
    #[must_use]
    pub fn wait_quiesced(&self, deadline: Option<Instant>) -> bool {
        self.shared.wait_until(deadline, |state| state.quiesced().then_some(())).is_some()
    }

    /// Preemption: [cancels](Self::cancel) and waits until no engine can write a destination.
    /// `false` when the deadline passed first.
    #[must_use]
    pub fn preempt(&self, deadline: Option<Instant>) -> bool {
        self.cancel();
        self.wait_quiesced(deadline)
    }

    /// A descriptor that becomes readable when a request ends: an eventfd that counts the ended
    /// requests. Made at the first call; later calls give duplicates.
    ///
    /// # Errors
    /// What the operating system says when it has no descriptor left.
    pub fn event_fd(&self) -> io::Result<OwnedFd> {
        let mut state = self.shared.lock();
        if let Some(fd) = &state.event_fd {
            return fd.try_clone();
        }
        let ended = state.outcomes.len() - state.open;
        let initial = u32::try_from(ended).unwrap_or(u32::MAX);
        let fd = eventfd(initial, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let copy = fd.try_clone()?;
        state.event_fd = Some(fd);
        Ok(copy)
    }
}

impl Future for TaskHandle {
    type Output = Vec<Outcome>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.shared.lock();
        if let Some(all) = state.all() {
            return Poll::Ready(all);
        }
        match &mut state.waker {
            Some(waker) => waker.clone_from(cx.waker()),
            none => *none = Some(cx.waker().clone()),
        }
        Poll::Pending
    }
}

impl fmt::Debug for TaskHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TaskHandle")
            .field("id", &self.id)
            .field("outcomes", &self.shared.lock().outcomes)
            .finish_non_exhaustive()
    }
}

/// What the caller and the core share of one task.
pub(crate) struct TaskShared {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    outcomes: Vec<Option<Outcome>>,
    open: usize,
    /// Copies into the destinations of each request that an engine has not ended.
    copies: Vec<u32>,
    copies_total: usize,
    /// Shards of each request, for the outcome of a promise that is dropped.
    shards: Vec<u32>,
    waker: Option<Waker>,
    event_fd: Option<OwnedFd>,
    /// Threads that sleep until a single request has ended; the others sleep for all of them and
    /// are not woken up in between.
    watchers: u32,
}

impl State {
    fn all(&self) -> Option<Vec<Outcome>> {
        if self.open > 0 {
            return None;
        }
        self.outcomes.iter().cloned().collect()
    }

    fn quiesced(&self) -> bool {
        self.open == 0 && self.copies_total == 0
    }
}

impl TaskShared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_until<T>(
        &self,
        deadline: Option<Instant>,
        mut ready: impl FnMut(&State) -> Option<T>,
    ) -> Option<T> {
        let mut state = self.lock();
        loop {
            if let Some(value) = ready(&state) {
                return Some(value);
            }
            state = match deadline {
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(at) => {
                    let left = at.checked_duration_since(Instant::now())?;
                    let waited = self.changed.wait_timeout(state, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    fn end(&self, request: u32, outcome: impl FnOnce(&State) -> Outcome) {
        let mut state = self.lock();
        let Some(None) = state.outcomes.get(request as usize) else { return };
        let outcome = outcome(&state);
        if let Some(place) = state.outcomes.get_mut(request as usize) {
            *place = Some(outcome);
        }
        state.open -= 1;
        if let Some(fd) = &state.event_fd {
            // A full counter is readable anyway.
            let _ = rustix::io::write(fd, &1_u64.to_ne_bytes());
        }
        let done = state.open == 0;
        let waker = if done { state.waker.take() } else { None };
        let notify = done || state.watchers > 0;
        drop(state);
        if notify {
            self.changed.notify_all();
        }
        if let Some(waker) = waker {
            // A waker is the caller's code; its panic must not end the dispatcher.
            let _ = catch_unwind(AssertUnwindSafe(|| waker.wake()));
        }
    }
}

/// The core's end of a task: each open request is ended through it exactly once.
pub(crate) struct Promise {
    shared: Arc<TaskShared>,
}

impl Promise {
    /// A promise for requests with these numbers of shards, and the caller's handle.
    pub(crate) fn new(id: u64, shards: Vec<u32>, inbox: Arc<Inbox>) -> (Self, TaskHandle) {
        let requests = shards.len();
        let shared = Arc::new(TaskShared {
            state: Mutex::new(State {
                outcomes: vec![None; requests],
                open: requests,
                copies: vec![0; requests],
                copies_total: 0,
                shards,
                waker: None,
                event_fd: None,
                watchers: 0,
            }),
            changed: Condvar::new(),
        });
        let predicted = Duration::ZERO;
        (Self { shared: Arc::clone(&shared) }, TaskHandle { id, shared, inbox, predicted })
    }

    /// Ends a request; a request that has ended stays as it is.
    pub(crate) fn end(&self, request: u32, outcome: Outcome) {
        self.shared.end(request, |_| outcome);
    }

    /// States that an engine may write destinations of these requests (named as often as copies
    /// are made) until the guard is dropped.
    pub(crate) fn copying(&self, requests: Vec<u32>) -> CopyGuard {
        let mut state = self.shared.lock();
        for request in &requests {
            if let Some(copies) = state.copies.get_mut(*request as usize) {
                *copies += 1;
            }
        }
        state.copies_total += requests.len();
        CopyGuard { shared: Arc::clone(&self.shared), requests }
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        let open = match self.shared.lock() {
            state if state.open == 0 => 0,
            state => state.outcomes.len(),
        };
        for request in 0..open {
            let Ok(request) = u32::try_from(request) else { return };
            self.shared.end(request, |state| {
                let at = request as usize;
                if state.copies.get(at).is_some_and(|copies| *copies > 0) {
                    return Outcome::Stuck;
                }
                let shards = state.shards.get(at).copied().unwrap_or(0);
                Outcome::Recompute { shards: (0..shards).collect(), kind: FailKind::Abandoned }
            });
        }
    }
}

/// Copies in flight into destinations of one task. Travels with the engine's plan.
pub(crate) struct CopyGuard {
    shared: Arc<TaskShared>,
    requests: Vec<u32>,
}

impl CopyGuard {
    /// States that the copies have ended; returns the requests they were for.
    pub(crate) fn end(mut self) -> Vec<u32> {
        self.release()
    }

    fn release(&mut self) -> Vec<u32> {
        let requests = std::mem::take(&mut self.requests);
        if requests.is_empty() {
            return requests;
        }
        let mut state = self.shared.lock();
        for request in &requests {
            if let Some(copies) = state.copies.get_mut(*request as usize) {
                *copies -= 1;
            }
        }
        state.copies_total -= requests.len();
        let quiesced = state.quiesced();
        drop(state);
        if quiesced {
            self.shared.changed.notify_all();
        }
        requests
    }
}

impl Drop for CopyGuard {
    fn drop(&mut self) {
        self.release();
    }
}
