//! Background pulls: what is missing of objects whose readers come back for more.
//!
//! They go one batch at a time, and only while nothing in the foreground is on the wire, so that a reader
//! waits for one batch of theirs at most.
//!
//! **Invariant:** what waits is bounded; an object waits once.

use std::{
    collections::{HashSet, VecDeque},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, atomic::Ordering},
    time::Instant,
};

use super::{Inner, fetch};

/// Objects of one batch.
const BATCH: usize = 256;

#[derive(Debug)]
pub(super) struct Puller {
    state: Mutex<State>,
    rung: Condvar,
    limit: usize,
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<u64>,
    queued: HashSet<u64>,
    in_flight: usize,
    dropped: u64,
    stopped: bool,
}

impl Puller {
    pub(super) fn new(limit: usize) -> Self {
        Self { state: Mutex::default(), rung: Condvar::new(), limit }
    }

    /// Asks for the rest of an object.
    pub(super) fn want(&self, assembly: u64) {
        let mut state = self.lock();
        if state.queued.contains(&assembly) || state.stopped {
            return;
        }
        if state.queue.len() >= self.limit {
            state.dropped += 1;
            return;
        }
        state.queue.push_back(assembly);
        state.queued.insert(assembly);
        drop(state);
        self.rung.notify_all();
    }

    /// A plan has ended.
    pub(super) fn ended(&self, foreground: bool) {
        let mut state = self.lock();
        if !foreground {
            state.in_flight = state.in_flight.saturating_sub(1);
        }
        let idle = state.queue.is_empty();
        drop(state);
        if !idle {
            self.rung.notify_all();
        }
    }

    pub(super) fn stop(&self) {
        let mut state = self.lock();
        state.stopped = true;
        state.queue.clear();
        state.queued.clear();
        drop(state);
        self.rung.notify_all();
    }

    pub(super) fn dropped(&self) -> u64 {
        self.lock().dropped
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it is held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next objects, when it is their turn; `None` when it is over.
    fn next(&self, inner: &Inner) -> Option<Vec<u64>> {
        let mut state = self.lock();
        loop {
            if state.stopped {
                return None;
            }
            // Whoever ends a plan counts it down first, and rings under the lock.
            let quiet = inner.foreground.load(Ordering::SeqCst) == 0 && state.in_flight == 0;
            if quiet && !state.queue.is_empty() {
                let count = state.queue.len().min(BATCH);
                let some: Vec<u64> = state.queue.drain(..count).collect();
                for id in &some {
                    state.queued.remove(id);
                }
                return Some(some);
            }
            state = self.rung.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// They are not filled yet: they come first next time.
    fn again(&self, rest: Vec<u64>) {
        let mut state = self.lock();
        if state.stopped {
            return;
        }
        for id in rest.into_iter().rev() {
            if state.queued.insert(id) {
                state.queue.push_front(id);
            }
        }
    }

    fn began(&self) {
        self.lock().in_flight += 1;
    }
}

/// Body of the puller's thread.
pub(super) fn run(inner: &Arc<Inner>) {
    while let Some(objects) = inner.puller.next(inner) {
        let budget = inner.options.batch_bytes;
        let (mut left, mut orders, mut rest) = (budget, Vec::new(), Vec::new());
        for id in objects {
            if left == 0 {
                rest.push(id);
                continue;
            }
            let more = inner.with(|table| table.fill(id, left));
            let bytes: u64 = more.iter().map(|order| order.fetch.range.len).sum();
            left = left.saturating_sub(bytes);
            if left == 0 {
                rest.push(id);
            }
            orders.extend(more);
        }
        inner.puller.again(rest);
        if !orders.is_empty() {
            fetch::submit(inner, orders, false, Instant::now() + inner.options.fetch_timeout);
        }
    }
}

impl Inner {
    /// A plan begins.
    pub(super) fn plan_begins(&self, foreground: bool) {
        if foreground {
            self.foreground.fetch_add(1, Ordering::SeqCst);
        } else {
            self.puller.began();
        }
    }

    /// A plan has ended.
    pub(super) fn plan_ended(&self, foreground: bool) {
        if foreground {
            self.foreground.fetch_sub(1, Ordering::SeqCst);
        }
        self.puller.ended(foreground);
    }
}
