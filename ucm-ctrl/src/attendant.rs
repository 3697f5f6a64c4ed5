//! Threads that work for one member and end with it.
//!
//! **Invariant:** when an attendant has been dropped its thread has ended, unless it is the very thread
//! that drops it, or this process is a forked child, which has no such thread. A thread that may be
//! the one looks at [`Alive`] before it sleeps: nobody wakes it any more.

use std::{
    fmt, io,
    sync::{Arc, Weak},
    thread::{self, JoinHandle, Thread},
    time::Duration,
};

use crate::Control;

/// Between two wake-ups of a thread that is to end.
const FIRST_PAUSE: Duration = Duration::from_micros(20);
const LAST_PAUSE: Duration = Duration::from_millis(10);

/// Told to a thread that it may go on; not so once its attendant is being dropped.
pub(crate) struct Alive(Weak<()>);

impl Alive {
    pub(crate) fn is_over(&self) -> bool {
        self.0.strong_count() == 0
    }
}

/// See the module description.
pub(crate) struct Attendant {
    alive: Option<Arc<()>>,
    thread: Option<JoinHandle<()>>,
    control: Control,
    wake: Box<dyn Fn(&Thread) + Send + Sync>,
}

impl Attendant {
    /// Starts a thread; `wake` gets it out of its sleep to look at what it was told of its life.
    pub(crate) fn start(
        control: &Control,
        name: &str,
        wake: impl Fn(&Thread) + Send + Sync + 'static,
        run: impl FnOnce(Alive) + Send + 'static,
    ) -> io::Result<Self> {
        let alive = Arc::new(());
        let told = Alive(Arc::downgrade(&alive));
        let thread = thread::Builder::new().name(name.into()).spawn(move || run(told))?;
        Ok(Self {
            alive: Some(alive),
            thread: Some(thread),
            control: control.clone(),
            wake: Box::new(wake),
        })
    }
}

impl Drop for Attendant {
    fn drop(&mut self) {
        self.alive = None;
        let Some(thread) = self.thread.take() else { return };
        if !self.control.region.is_ours() {
            // It is the parent's; one of this child's own may have its number by now.
            #[expect(
                clippy::mem_forget,
                reason = "neither join nor detach a thread of the parent"
            )]
            std::mem::forget(thread);
            return;
        }
        if thread.thread().id() == thread::current().id() {
            return;
        }
        // What it sleeps on may lie in the region, where another member can spoil any one wake-up.
        let mut pause = FIRST_PAUSE;
        loop {
            (self.wake)(thread.thread());
            if thread.is_finished() {
                break;
            }
            thread::sleep(pause);
            pause = (pause * 2).min(LAST_PAUSE);
        }
        // It does not panic, and if it did, nothing would be lost.
        let _ = thread.join();
    }
}

impl fmt::Debug for Attendant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attendant").field("thread", &self.thread).finish_non_exhaustive()
    }
}
