//! A waker that tests can wait on.
//!
//! **Invariant:** a ring between reading [`Bell::rings`] and [`Bell::wait_past`] is never missed.

use std::{
    sync::{Arc, Condvar, Mutex, PoisonError},
    task::{Wake, Waker},
    time::{Duration, Instant},
};

use super::WATCHDOG;

/// Counts wake-ups and lets a test sleep until the next one.
#[derive(Debug, Default)]
pub struct Bell {
    rings: Mutex<u64>,
    rung: Condvar,
}

impl Bell {
    /// A bell that has not rung.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// A waker that rings it.
    #[must_use]
    pub fn waker(self: &Arc<Self>) -> Waker {
        Waker::from(Arc::clone(self))
    }

    /// How often it rang.
    pub fn rings(&self) -> u64 {
        *self.rings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sleeps until it rang more than `seen` times.
    ///
    /// # Panics
    /// When that does not happen within [`WATCHDOG`].
    pub fn wait_past(&self, seen: u64) {
        let deadline = Instant::now() + WATCHDOG;
        let mut rings = self.rings.lock().unwrap_or_else(PoisonError::into_inner);
        while *rings <= seen {
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "no wake-up within {WATCHDOG:?}: one was lost");
            rings = self.rung.wait_timeout(rings, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Sleeps until it rings, at most this long; says whether it rang. For tests that must see
    /// that nothing happens.
    pub fn wait_at_most(&self, time: Duration) -> bool {
        let rings = self.rings.lock().unwrap_or_else(PoisonError::into_inner);
        let seen = *rings;
        let none = |now: &mut u64| *now == seen;
        let (now, _) =
            self.rung.wait_timeout_while(rings, time, none).unwrap_or_else(PoisonError::into_inner);
        *now != seen
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        *self.rings.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.rung.notify_all();
    }
}
