//! The thread that looks whether the device still answers.
//!
//! **Invariant:** it makes no calls to the device; while nothing is on its way it sleeps. When the breaker
//! opens, what has not begun ends as `Unavailable`.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Instant,
};

use super::breaker::Breaker;
use crate::timer::{Alarm, Moment};

/// Breaker and alarm, shared with those who begin and end calls.
#[derive(Debug)]
pub(super) struct Watch {
    pub(super) breaker: Breaker,
    alarm: Alarm,
    stopped: AtomicBool,
}

impl Watch {
    pub(super) fn new(breaker: Breaker) -> io::Result<Self> {
        Ok(Self { breaker, alarm: Alarm::new()?, stopped: AtomicBool::new(false) })
    }

    /// A call begins; its number is for [`end`](Self::end).
    pub(super) fn begin(&self) -> u64 {
        let (number, only) = self.breaker.begin(Instant::now());
        if only {
            self.alarm.set(Moment::now().after(self.breaker.limit()));
        }
        number
    }

    pub(super) fn end(&self, number: u64) {
        if self.breaker.end(number, Instant::now()) {
            tracing::warn!("a file store's device answers again");
        }
    }

    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        self.alarm.set(Moment::now());
    }

    /// Starts the thread; `opened` is called when the breaker opens, and again while it is open.
    pub(super) fn start(
        this: &Arc<Self>,
        opened: impl Fn() + Send + 'static,
    ) -> io::Result<JoinHandle<()>> {
        let this = Arc::clone(this);
        thread::Builder::new().name("ucm-file-watch".into()).spawn(move || {
            loop {
                if this.alarm.wait().is_err() || this.stopped.load(Ordering::Acquire) {
                    return;
                }
                let (opens, again) = this.breaker.look(Instant::now());
                if opens {
                    tracing::error!(
                        seconds = this.breaker.limit().as_secs(),
                        "a file store's device does not answer"
                    );
                }
                if this.breaker.is_open() {
                    opened();
                }
                if let Some(wait) = again {
                    this.alarm.set(Moment::now().after(wait));
                }
                // A stop between its look at the flag and this alarm would be lost.
                if this.stopped.load(Ordering::Acquire) {
                    return;
                }
            }
        })
    }
}
