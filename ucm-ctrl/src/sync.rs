//! The atomics shim: std normally, loom under `--cfg ucm_loom`.
//!
//! **Invariant:** no other module of the crate names an atomic type of std or loom directly.

#[cfg(not(ucm_loom))]
mod imp {
    pub use std::sync::Arc;
    pub use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

    /// Unused words of a shared structure.
    pub(crate) type Pad<const WORDS: usize> = [AtomicU64; WORDS];

    /// Completes a sequentially consistent write followed by a read of another word. Nothing to do
    /// here: `SeqCst` operations have that order among themselves.
    pub(crate) fn seqcst_point() {}

    /// Tells the processor that the caller is spinning.
    pub(crate) fn spin_hint() {
        std::hint::spin_loop();
    }

    /// Gives the rest of the time slice away.
    pub(crate) fn yield_now() {
        std::thread::yield_now();
    }
}

#[cfg(ucm_loom)]
mod imp {
    pub use loom::sync::Arc;
    pub use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};

    /// Models have no use for padding.
    pub(crate) type Pad<const WORDS: usize> = [(); WORDS];

    /// loom takes `SeqCst` accesses for acquire and release only, but knows the fence.
    pub(crate) fn seqcst_point() {
        loom::sync::atomic::fence(Ordering::SeqCst);
    }

    pub(crate) fn spin_hint() {
        loom::thread::yield_now();
    }

    pub(crate) fn yield_now() {
        loom::thread::yield_now();
    }
}

pub use imp::{Arc, AtomicU32, AtomicU64, Ordering};
/// An event count: decides nothing, so a model need not explore it.
pub(crate) type Counter = std::sync::atomic::AtomicU64;
pub(crate) use imp::{Pad, seqcst_point, spin_hint, yield_now};

/// Spins a little, then yields: for waits that end within another thread's few instructions.
#[derive(Debug, Default)]
pub(crate) struct Backoff {
    rounds: u32,
}

impl Backoff {
    /// Waits a bit longer each time; returns how often it was called.
    pub(crate) fn snooze(&mut self) -> u32 {
        self.rounds += 1;
        if cfg!(ucm_loom) || self.rounds > 32 {
            yield_now();
        } else {
            for _ in 0..self.rounds {
                spin_hint();
            }
        }
        self.rounds
    }
}
