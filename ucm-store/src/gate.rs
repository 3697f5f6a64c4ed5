//! A place where operations wait until somebody lets them go.
//!
//! **Invariant:** what waits runs once, in the thread that releases it, or is dropped with the last
//! handle of the gate.

use std::{
    collections::VecDeque,
    fmt,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

type Held = Box<dyn FnOnce() + Send>;

/// Stalls operations of a [`FaultBackend`](crate::FaultBackend) until released by an event instead
/// of after a time. Clones are the same gate. Starts closed.
#[derive(Clone, Default)]
pub struct Gate {
    inner: Arc<Inner>,
}

#[derive(Default)]
struct Inner {
    state: Mutex<State>,
    arrived: Condvar,
}

#[derive(Default)]
struct State {
    open: bool,
    held: VecDeque<Held>,
    arrivals: u64,
}

impl Gate {
    /// A closed gate.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Lets everything go, now and later.
    pub fn open(&self) {
        self.lock().open = true;
        while self.release() {}
    }

    /// Holds what arrives from now on.
    pub fn close(&self) {
        self.lock().open = false;
    }

    /// Lets the one go that has waited longest; says whether there was one.
    pub fn release(&self) -> bool {
        let held = self.lock().held.pop_front();
        held.map(|go| go()).is_some()
    }

    /// Number of operations waiting.
    #[must_use]
    pub fn held(&self) -> usize {
        self.lock().held.len()
    }

    /// Sleeps until `count` operations wait, at most this long; says whether they do.
    #[must_use]
    pub fn wait_held(&self, count: usize, at_most: Duration) -> bool {
        let deadline = Instant::now() + at_most;
        let mut state = self.lock();
        while state.held.len() < count {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let waited = self.inner.arrived.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Runs `go` when the gate lets it.
    pub(crate) fn pass(&self, go: Held) {
        let mut state = self.lock();
        state.arrivals += 1;
        if state.open {
            drop(state);
            go();
            return;
        }
        state.held.push_back(go);
        drop(state);
        self.inner.arrived.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.inner.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.lock();
        f.debug_struct("Gate")
            .field("open", &state.open)
            .field("held", &state.held.len())
            .field("arrivals", &state.arrivals)
            .finish()
    }
}
