//! The dispatcher thread: sleeps on the member's doorbell, turns the core, and ends everything typed
//! if the core panics.
//!
//! **Invariant:** between two turns the thread either has seen everything that was pushed before it
//! took its ticket, or is woken by it; an idle queue does not wake up at all.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use ucm_ctrl::Doorbell;
use ucm_transport::{Quiesce, TransferEngine};

use crate::{core::Core, inbox::Inbox};

/// How the dispatcher stands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Health {
    /// Works.
    #[default]
    Alive,
    /// Was asked to stop.
    Closed,
    /// Panicked, with this message.
    Poisoned(String),
}

/// The state that callers and the thread share.
#[derive(Debug, Default)]
pub(crate) struct Vitals(Mutex<Health>);

impl Vitals {
    pub(crate) fn health(&self) -> Health {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn set(&self, health: Health) {
        let mut now = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Poison stays.
        if !matches!(*now, Health::Poisoned(_)) {
            *now = health;
        }
    }
}

/// What the thread needs beside the core.
pub(crate) struct Driver {
    pub(crate) bell: Doorbell,
    pub(crate) inbox: Arc<Inbox>,
    pub(crate) engine: Arc<dyn TransferEngine>,
    pub(crate) vitals: Arc<Vitals>,
    /// How long a close may wait for operations in flight.
    pub(crate) grace: Duration,
}

impl Driver {
    /// Runs until the queue is closed and drained, or the core panics.
    pub(crate) fn run(self, mut core: Core) {
        let result = catch_unwind(AssertUnwindSafe(|| self.work(&mut core)));
        if let Err(panic) = result {
            let message = message_of(&*panic);
            tracing::error!(message, "the dispatcher panicked; the queue accepts nothing more");
            self.vitals.set(Health::Poisoned(message));
        }
        // From here on submissions are refused; what was pushed and not taken ends by being dropped.
        self.inbox.close();
        // Dropping the core ends every request; operations in flight keep their memory.
        if catch_unwind(AssertUnwindSafe(|| drop(core))).is_err() {
            tracing::error!("ending the tasks of a panicked dispatcher panicked again");
        }
        self.drain_engine();
    }

    fn work(&self, core: &mut Core) {
        let mut events = Vec::new();
        let mut give_up = None;
        loop {
            let ticket = self.bell.ticket();
            self.inbox.take(&mut events);
            let now = Instant::now();
            let turn = core.turn(now, &mut events);
            if turn.finished {
                return;
            }
            if turn.prewarm {
                // Idle window: one key at a time; whatever rings interrupts at once.
                let due = |at: Option<Instant>| at.is_some_and(|at| at <= Instant::now());
                while self.inbox.is_empty()
                    && self.bell.ticket() == ticket
                    && !due(turn.wake_at)
                    && core.prewarm_step()
                {}
                continue;
            }
            let mut wake_at = turn.wake_at;
            if core.is_closing() {
                let limit = *give_up.get_or_insert_with(|| after(now, self.grace));
                if now >= limit {
                    return;
                }
                wake_at = Some(wake_at.map_or(limit, |at| at.min(limit)));
            }
            self.bell.wait(ticket, wake_at);
        }
    }

    /// Takes back what the engine still holds, so that pins are released and destinations quiesce.
    fn drain_engine(&self) {
        let limit = after(Instant::now(), self.grace);
        let drained = catch_unwind(AssertUnwindSafe(|| {
            self.engine.set_waker(None);
            let quiesced = self.engine.quiesce(Quiesce::All, limit);
            let mut ended = Vec::new();
            self.engine.poll(&mut ended);
            quiesced
        }));
        match drained {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::error!(%error, "copies are stuck; their memory stays held"),
            Err(_) => tracing::error!("the engine panicked while it was drained"),
        }
    }
}

/// A time beyond the clock's range is a year ahead.
fn after(now: Instant, time: Duration) -> Instant {
    const YEAR: Duration = Duration::from_secs(365 * 86_400);
    now.checked_add(time.min(YEAR)).unwrap_or(now)
}

fn message_of(panic: &(dyn std::any::Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(ToString::to_string)
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".to_owned())
}
