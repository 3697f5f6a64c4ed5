//! What has been used and lies on other nodes: they are told by a thread of its own, so that no call waits
//! for a peer that does not answer.
//!
//! **Invariant:** what waits is bounded; an object waits once.

use std::{
    collections::HashSet,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
};

use super::Inner;
use crate::ObjectKey;

/// Objects that wait; more are forgotten, which costs a hint.
const WAITING: usize = 16 << 10;
/// Objects that are told of together.
const BATCH: usize = 1024;

#[derive(Debug, Default)]
pub(super) struct Toucher {
    state: Mutex<State>,
    rung: Condvar,
}

#[derive(Debug, Default)]
struct State {
    waiting: HashSet<ObjectKey>,
    stopped: bool,
}

impl Toucher {
    pub(super) fn want(&self, keys: impl IntoIterator<Item = ObjectKey>) {
        let mut state = self.lock();
        if state.stopped {
            return;
        }
        for key in keys {
            if state.waiting.len() < WAITING {
                state.waiting.insert(key);
            }
        }
        drop(state);
        self.rung.notify_all();
    }

    pub(super) fn stop(&self) {
        let mut state = self.lock();
        state.stopped = true;
        state.waiting.clear();
        drop(state);
        self.rung.notify_all();
    }

    /// The next ones; `None` when it is over.
    fn next(&self) -> Option<Vec<ObjectKey>> {
        let mut state = self.lock();
        while !state.stopped && state.waiting.is_empty() {
            state = self.rung.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.stopped {
            return None;
        }
        let some: Vec<ObjectKey> = state.waiting.iter().take(BATCH).copied().collect();
        some.iter().for_each(|key| {
            state.waiting.remove(key);
        });
        Some(some)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it is held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Body of the thread.
pub(super) fn run(inner: &Arc<Inner>) {
    while let Some(keys) = inner.toucher.next() {
        inner.touch_away(&keys);
    }
}
