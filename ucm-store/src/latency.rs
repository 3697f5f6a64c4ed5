//! Gives a backend the timing of a device: a delay per operation, and how many are served at once.
//!
//! **Invariant:** an operation ends not before its delay has passed since its service began, and
//! at most `depth` operations are in service at any time.

mod core;

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    thread::{self, JoinHandle},
    time::Duration,
};

use self::core::{Core, Starting};
use crate::{
    Backend, BackendCapabilities, ErrorKind, Meter, Op, Presence, StoreError, meter::Direction,
    random::SplitMix,
};

type Key = ([u8; 16], u32);

/// How long an operation takes, from the start of its service to its end.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Delay {
    /// Always the same.
    Fixed(Duration),
    /// Evenly between two values.
    Uniform(Duration, Duration),
    /// Memoryless, with this mean: many short ones, some long ones.
    Exponential(Duration),
    /// Usually the first; with this probability (0 to 1) the second.
    Mixed(Duration, Duration, f64),
}

impl Delay {
    fn draw(self, random: &mut SplitMix) -> Duration {
        match self {
            Self::Fixed(delay) => delay,
            Self::Uniform(a, b) => {
                let (low, high) = (a.min(b), a.max(b));
                low + (high - low).mul_f64(random.unit())
            }
            Self::Exponential(mean) => mean.mul_f64(-(1.0 - random.unit()).ln()),
            Self::Mixed(usual, rare, share) => {
                if random.unit() < share {
                    rare
                } else {
                    usual
                }
            }
        }
    }
}

/// A backend as slow as you like.
///
/// Each operation enters service as soon as fewer than `depth` are in service, and ends exactly
/// when its delay has passed, or later if the backend inside needs longer: like a device doing DMA
/// the bytes are moved *during* the delay. An operation that had to queue enters service at the
/// moment its predecessor was due. Operations due together end as one batch. The queue is not
/// bounded here: callers bound what they submit.
///
/// One thread per backend, which sleeps until the next operation is due; idle, it never wakes.
/// `contains`, `touch` and `remove` are passed on at once. Dropping the backend ends queued
/// operations as `Cancelled`; those in service end with their result, without further delay.
#[derive(Debug)]
pub struct LatencyBackend<B: Backend + 'static> {
    shared: Arc<Shared<B>>,
    thread: Option<JoinHandle<()>>,
}

impl<B: Backend + 'static> LatencyBackend<B> {
    /// Wraps `inner`; `depth` is at least one.
    ///
    /// # Errors
    /// `Io` when the operating system refuses a timer or a thread.
    pub fn new(inner: B, delay: Delay, depth: usize) -> Result<Self, StoreError> {
        Self::with_seed(inner, delay, depth, 0)
    }

    /// As [`new`](Self::new), with the seed of random delays.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_seed(inner: B, delay: Delay, depth: usize, seed: u64) -> Result<Self, StoreError> {
        let refused = |what: &str, e: std::io::Error| {
            StoreError::new(ErrorKind::Io, format!("{what} for a latency backend: {e}"))
        };
        let core = Core::new(delay, depth, seed).map_err(|e| refused("no timer", e))?;
        let shared = Arc::new(Shared { inner, core: Arc::new(core) });
        let of_thread = Arc::clone(&shared);
        let thread = thread::Builder::new()
            .name("ucm-latency".into())
            .spawn(move || of_thread.run())
            .map_err(|e| refused("no thread", e))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Operations as the device sees them: in flight means in service.
    pub fn meter(&self) -> &Meter {
        &self.shared.core.meter
    }

    /// The backend inside.
    pub fn inner(&self) -> &B {
        &self.shared.inner
    }
}

impl<B: Backend + 'static> Backend for LatencyBackend<B> {
    fn capabilities(&self) -> BackendCapabilities {
        let inner = self.shared.inner.capabilities();
        let mode = format!("{} + {:?}", inner.mode, self.shared.core.delay);
        BackendCapabilities { mode, depth: self.shared.core.depth, ..inner }
    }

    fn load(&self, ops: Vec<Op>) {
        self.shared.start(self.shared.core.submit(Direction::Load, ops));
    }

    fn dump(&self, ops: Vec<Op>) {
        self.shared.start(self.shared.core.submit(Direction::Dump, ops));
    }

    fn contains(&self, keys: &[Key]) -> Vec<Presence> {
        self.shared.inner.contains(keys)
    }

    fn touch(&self, blocks: &[[u8; 16]]) -> Result<(), StoreError> {
        self.shared.inner.touch(blocks)
    }

    fn remove(&self, keys: &[Key]) -> Vec<Result<(), StoreError>> {
        self.shared.inner.remove(keys)
    }
}

impl<B: Backend + 'static> Drop for LatencyBackend<B> {
    fn drop(&mut self) {
        isolate(|| self.shared.core.stop());
        let me = thread::current().id();
        if let Some(thread) = self.thread.take()
            // A sink called by the thread may drop the last reference to the backend.
            && thread.thread().id() != me
            && thread.join().is_err()
        {
            tracing::warn!("the thread of a latency backend ended by a panic");
        }
    }
}

/// What the thread works with. Operations inside `inner` refer to the core only: otherwise a
/// backend that never ends an operation would keep itself alive.
#[derive(Debug)]
struct Shared<B> {
    inner: B,
    core: Arc<Core>,
}

impl<B: Backend> Shared<B> {
    /// The thread: sleeps until something is due.
    fn run(&self) {
        while let Some((ended, starting)) = self.core.wait() {
            // Foreign code: neither a sink nor a backend may end this thread.
            isolate(|| Op::finish_all(ended));
            isolate(|| self.start(starting));
        }
    }

    fn start(&self, starting: Starting) {
        let (mut loads, mut dumps) = (Vec::new(), Vec::new());
        for (direction, id, op) in starting {
            let core = Arc::clone(&self.core);
            let inner = op.intercept(move |op, result| core.landed(direction, id, op, result));
            match direction {
                Direction::Load => loads.push(inner),
                Direction::Dump => dumps.push(inner),
            }
        }
        if !loads.is_empty() {
            self.inner.load(loads);
        }
        if !dumps.is_empty() {
            self.inner.dump(dumps);
        }
    }
}

fn isolate(foreign: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(foreign)).is_err() {
        tracing::error!("a sink or backend panicked in the thread of a latency backend");
    }
}

#[cfg(test)]
mod tests;
