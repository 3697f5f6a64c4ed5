//! Events of whoever produces the bytes of a dump.
//!
//! Host order is not device order: that a kernel was launched before a dump was submitted says
//! nothing about its stores. A dump that names an event is not looked at before the event.
//!
//! **Invariant:** an event happens once, well or not; a producer that is dropped counts as failed.

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

type Callback = Box<dyn FnOnce(bool) + Send>;

/// The producer's end. Thread-safe; a device's stream signals it from a host callback behind the
/// kernel.
#[derive(Debug)]
#[must_use = "dropped without a signal, it fails what waits for it"]
pub struct Producer {
    shared: Arc<Shared>,
}

/// What dumps wait for. Clones are the same event.
#[derive(Clone, Debug)]
pub struct Produced {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    happened: Option<bool>,
    waiting: Vec<Callback>,
}

impl Producer {
    /// An event that has not happened, and its producer.
    pub fn new() -> (Self, Produced) {
        let shared = Arc::<Shared>::default();
        (Self { shared: Arc::clone(&shared) }, Produced { shared })
    }

    /// The bytes are all there, visible to engines. Only the first call counts.
    pub fn signal(&self) {
        self.shared.happen(true);
    }
}

impl Drop for Producer {
    fn drop(&mut self) {
        self.shared.happen(false);
    }
}

impl Produced {
    /// Whether the bytes are there: `None` while that is open.
    #[must_use]
    pub fn happened(&self) -> Option<bool> {
        self.shared.lock().happened
    }

    /// Calls this once, when the event happens, or at once.
    pub(crate) fn when(&self, callback: Callback) {
        let mut state = self.shared.lock();
        match state.happened {
            None => state.waiting.push(callback),
            Some(well) => {
                drop(state);
                callback(well);
            }
        }
    }
}

impl Shared {
    fn happen(&self, well: bool) {
        let mut state = self.lock();
        if state.happened.is_some() {
            return;
        }
        state.happened = Some(well);
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.into_iter().for_each(|callback| callback(well));
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Event").field("happened", &self.lock().happened).finish_non_exhaustive()
    }
}
