//! Bytes of copies on their way.
//!
//! **Invariant:** what was taken is given back exactly once; the sum never exceeds the limit.

use std::{
    sync::{Arc, Condvar, Mutex, PoisonError},
    time::{Duration, Instant},
};

/// A bounded sum of bytes.
#[derive(Debug)]
pub(super) struct Budget {
    limit: u64,
    taken: Mutex<u64>,
    empty: Condvar,
}

impl Budget {
    pub(super) fn new(limit: u64) -> Arc<Self> {
        Arc::new(Self { limit, taken: Mutex::new(0), empty: Condvar::new() })
    }

    pub(super) fn take(self: &Arc<Self>, bytes: u64) -> Option<Taken> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        *taken = taken.checked_add(bytes).filter(|sum| *sum <= self.limit)?;
        Some(Taken { budget: Arc::clone(self), bytes })
    }

    /// Waits until nothing is on its way, at most so long; says how many bytes are.
    pub(super) fn wait_empty(&self, at_most: Duration) -> u64 {
        let deadline = Instant::now().checked_add(at_most);
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        while *taken > 0 {
            let left = deadline.map(|d| d.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                break;
            }
            let left = left.unwrap_or(Duration::from_secs(3600));
            let waited = self.empty.wait_timeout(taken, left);
            taken = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        *taken
    }
}

/// Bytes of one copy; given back when dropped.
#[derive(Debug)]
pub(super) struct Taken {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Drop for Taken {
    fn drop(&mut self) {
        let mut taken = self.budget.taken.lock().unwrap_or_else(PoisonError::into_inner);
        *taken -= self.bytes;
        if *taken == 0 {
            self.budget.empty.notify_all();
        }
    }
}
