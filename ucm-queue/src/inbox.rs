//! Where everything that happens to a queue arrives: submissions, ended IO, lost copies.
//!
//! **Invariant:** an event is either taken by the dispatcher or given back to whoever pushed it;
//! after `close` nothing stays inside.

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::Wake,
};

use ucm_store::{Completed, Sink};

use crate::{core::copy::PlanBody, dump::PreparedDump, task::Prepared};

/// Something the core must look at.
pub(crate) enum Event {
    /// A new load task.
    Submit(Box<Prepared>),
    /// A new dump task.
    Dump(Box<PreparedDump>),
    /// The producer of this gated dump has finished, well or not.
    Produced(u64, bool),
    /// The group of this dump has been decided.
    Decided(u64, bool),
    /// Take the vote of this dump back.
    GiveUp(u64),
    /// Cancel the load task of this id.
    Cancel(u64),
    /// A backend operation ended.
    Ended(Completed),
    /// The engine dropped a plan without ending it.
    CopyLost(Box<PlanBody>),
    /// End everything.
    Close,
}

/// The queue of events, and the bell that wakes the dispatcher.
pub(crate) struct Inbox {
    state: Mutex<State>,
    bell: Box<dyn Fn() + Send + Sync>,
}

#[derive(Default)]
struct State {
    events: Vec<Event>,
    closed: bool,
}

impl Inbox {
    /// An inbox that calls `bell` when something arrives in an empty queue.
    pub(crate) fn new(bell: impl Fn() + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self { state: Mutex::default(), bell: Box::new(bell) })
    }

    /// Appends an event; gives it back when the inbox is closed.
    pub(crate) fn push(&self, event: Event) -> Result<(), Event> {
        let mut state = self.lock();
        if state.closed {
            return Err(event);
        }
        let ring = state.events.is_empty();
        state.events.push(event);
        drop(state);
        if ring {
            (self.bell)();
        }
        Ok(())
    }

    /// Moves all events to the end of `into`.
    pub(crate) fn take(&self, into: &mut Vec<Event>) {
        let mut state = self.lock();
        if into.is_empty() {
            std::mem::swap(&mut state.events, into);
        } else {
            into.append(&mut state.events);
        }
    }

    /// Whether nothing waits to be taken.
    pub(crate) fn is_empty(&self) -> bool {
        self.lock().events.is_empty()
    }

    /// Refuses events from now on and drops those inside, which ends them.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        let events = std::mem::take(&mut state.events);
        drop(state);
        drop(events);
    }

    /// Wakes the dispatcher without an event.
    pub(crate) fn ring(&self) {
        (self.bell)();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Sink for Inbox {
    fn complete(&self, completed: Completed) {
        // A closed inbox gives the completion back; dropping it ends the IO of its memory.
        let _ = self.push(Event::Ended(completed));
    }

    fn complete_all(&self, batch: Vec<Completed>) {
        let mut state = self.lock();
        if state.closed {
            return;
        }
        let ring = state.events.is_empty();
        state.events.extend(batch.into_iter().map(Event::Ended));
        drop(state);
        if ring {
            (self.bell)();
        }
    }
}

/// Wakes the dispatcher when the engine has completions to poll.
pub(crate) struct EngineWaker(pub(crate) Arc<Inbox>);

impl Wake for EngineWaker {
    fn wake(self: Arc<Self>) {
        self.0.ring();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.0.ring();
    }
}

impl fmt::Debug for Inbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inbox").finish_non_exhaustive()
    }
}
