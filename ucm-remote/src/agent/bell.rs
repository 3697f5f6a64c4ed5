//! What a waiting call is told, and how it is woken.
//!
//! **Invariant:** what was told is taken exactly once, or dropped with the bell; telling never blocks.

use std::{
    collections::VecDeque,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use super::{arena::ArenaLease, pin::Pin};
use crate::service::LinkError;

/// News of one key of a call.
#[derive(Debug)]
pub(super) enum Told {
    /// All its bytes are there, and stay while this lives.
    Ready(Pin),
    /// One of its fetches has failed; with it, whether what was there of the object is given up.
    Failed(LinkError, bool),
    /// Its fetch shared an exchange with one that was refused: ask again.
    Again,
    /// It may use the arena.
    Granted(ArenaLease),
    /// Its round lies in the arena.
    Landed(ArenaLease),
}

/// See the module description.
#[derive(Debug, Default)]
pub(super) struct Bell {
    state: Mutex<State>,
    rung: Condvar,
}

#[derive(Debug, Default)]
struct State {
    told: VecDeque<(usize, Told)>,
    stopped: bool,
}

impl Bell {
    /// Tells something about a key. Nothing is told any more after [`stop`](Self::stop).
    pub(super) fn tell(&self, index: usize, told: Told) {
        let mut state = self.lock();
        if state.stopped {
            drop(state);
            // What it holds is given back without the lock.
            drop(told);
            return;
        }
        state.told.push_back((index, told));
        drop(state);
        self.rung.notify_all();
    }

    /// Tells several things at once: who waits is woken once.
    pub(super) fn tell_all(&self, told: Vec<(usize, Told)>) {
        let mut state = self.lock();
        if state.stopped {
            drop(state);
            drop(told);
            return;
        }
        state.told.extend(told);
        drop(state);
        self.rung.notify_all();
    }

    /// Ends the wait of whoever waits, for good.
    pub(super) fn stop(&self) {
        let mut state = self.lock();
        state.stopped = true;
        let left = std::mem::take(&mut state.told);
        drop(state);
        self.rung.notify_all();
        drop(left);
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.lock().stopped
    }

    /// News that are there already.
    pub(super) fn look(&self) -> Option<(usize, Told)> {
        self.lock().told.pop_front()
    }

    /// The next news; `None` at the deadline, or when it was stopped.
    pub(super) fn wait(&self, deadline: Instant) -> Option<(usize, Told)> {
        let mut state = self.lock();
        loop {
            if let Some(told) = state.told.pop_front() {
                return Some(told);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || state.stopped {
                return None;
            }
            let waited = self.rung.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it is held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
