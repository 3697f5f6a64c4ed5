//! Does things later, in a thread that sleeps until the next one is due.
//!
//! **Invariant:** everything put in runs once, not before its time, or is dropped with the line.

use std::{
    cmp::Ordering,
    collections::BinaryHeap,
    fmt, io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
    time::Duration,
};

use crate::timer::{Alarm, Moment};

type Later = Box<dyn FnOnce() + Send>;

#[derive(Debug)]
pub(crate) struct DelayLine {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    alarm: Alarm,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    due: BinaryHeap<Entry>,
    next: u64,
    armed: Option<Moment>,
    stopped: bool,
}

struct Entry {
    at: Moment,
    number: u64,
    run: Later,
}

impl DelayLine {
    pub(crate) fn new() -> io::Result<Self> {
        let shared = Arc::new(Shared { alarm: Alarm::new()?, state: Mutex::default() });
        let of_thread = Arc::clone(&shared);
        let thread =
            thread::Builder::new().name("ucm-delay".into()).spawn(move || of_thread.run())?;
        Ok(Self { shared, thread: Some(thread) })
    }

    pub(crate) fn after(&self, delay: Duration, run: Later) {
        let at = Moment::now().after(delay);
        let mut state = self.shared.lock();
        let number = state.next;
        state.next += 1;
        state.due.push(Entry { at, number, run });
        self.shared.arm(&mut state);
    }
}

impl Shared {
    fn run(&self) {
        while let Ok(()) = self.alarm.wait() {
            let mut now_due = Vec::new();
            {
                let mut state = self.lock();
                if state.stopped {
                    return;
                }
                state.armed = None;
                let now = Moment::now();
                while state.due.peek().is_some_and(|entry| entry.at <= now) {
                    now_due.extend(state.due.pop());
                }
                self.arm(&mut state);
            }
            for entry in now_due {
                if catch_unwind(AssertUnwindSafe(entry.run)).is_err() {
                    tracing::error!("a delayed operation panicked");
                }
            }
        }
    }

    fn arm(&self, state: &mut State) {
        if let Some(at) = state.due.peek().map(|entry| entry.at)
            && state.armed.is_none_or(|armed| at < armed)
        {
            state.armed = Some(at);
            self.alarm.set(at);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for DelayLine {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.stopped = true;
        let left = std::mem::take(&mut state.due);
        self.shared.alarm.set(Moment::now());
        drop(state);
        drop(left);
        let me = thread::current().id();
        if let Some(thread) = self.thread.take()
            // What runs in the thread may drop the last reference to the line.
            && thread.thread().id() != me
            && thread.join().is_err()
        {
            tracing::warn!("a delay thread ended by a panic");
        }
    }
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Entry").field("at", &self.at).finish_non_exhaustive()
    }
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Entry {}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Entry {
    /// The earliest is the greatest, because heaps give the greatest first.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.number).cmp(&(self.at, self.number))
    }
}
