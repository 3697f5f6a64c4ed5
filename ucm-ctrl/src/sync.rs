//! The atomics shim: std normally, loom under `--cfg ucm_loom`, shuttle when `--cfg ucm_shuttle` is
//! given as well.
//!
//! **Invariant:** no other module of the crate names an atomic type of std or a checker directly.

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

#[cfg(all(ucm_loom, ucm_shuttle))]
mod imp {
    pub use shuttle::sync::Arc;
    pub use shuttle::sync::atomic::{AtomicU32, AtomicU64, Ordering};
    pub(crate) use shuttle::sync::{Condvar, Mutex};

    /// Models have no use for padding.
    pub(crate) type Pad<const WORDS: usize> = [(); WORDS];

    /// All accesses are sequentially consistent here.
    pub(crate) fn seqcst_point() {}

    pub(crate) fn spin_hint() {
        shuttle::thread::yield_now();
    }

    pub(crate) fn yield_now() {
        shuttle::thread::yield_now();
    }
}

#[cfg(all(ucm_loom, not(ucm_shuttle)))]
mod imp {
    use std::ops::Deref;

    pub use loom::sync::Arc;
    pub use loom::sync::atomic::Ordering;
    use loom::sync::atomic::{AtomicU32 as Inner32, AtomicU64 as Inner64};
    pub(crate) use loom::sync::{Condvar, Mutex};

    /// Atomics whose decisive loads are read-modify-writes that change nothing. loom's partial order
    /// reduction remembers only the last access to an object: in "load, then compare-and-swap", the
    /// load hides the accesses of others before it, and their races with the swap go unexplored.
    /// Weaker loads stay what they are, so that stale values are explored where they may occur.
    macro_rules! decisive {
        ($name:ident, $inner:ident, $word:ty) => {
            /// An atomic of the model.
            #[derive(Debug, Default)]
            pub struct $name($inner);

            impl $name {
                /// As the original.
                pub fn new(word: $word) -> Self {
                    Self($inner::new(word))
                }

                /// As the original, but explored in full when `SeqCst`.
                pub fn load(&self, order: Ordering) -> $word {
                    match order {
                        Ordering::SeqCst => self.0.fetch_or(0, Ordering::Acquire),
                        order => self.0.load(order),
                    }
                }

                /// As the original; a swap when `SeqCst`, because loom may order a plain store
                /// between the two halves of another thread's read-modify-write.
                pub fn store(&self, word: $word, order: Ordering) {
                    match order {
                        Ordering::SeqCst => {
                            self.0.swap(word, Ordering::Release);
                        }
                        order => self.0.store(word, order),
                    }
                }
            }

            impl Deref for $name {
                type Target = $inner;

                fn deref(&self) -> &$inner {
                    &self.0
                }
            }
        };
    }

    decisive!(AtomicU32, Inner32, u32);
    decisive!(AtomicU64, Inner64, u64);

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
#[cfg(ucm_loom)]
pub(crate) use imp::{Condvar, Mutex};
pub(crate) use imp::{Pad, seqcst_point, spin_hint, yield_now};

/// A tenth of a second: longer than a busy machine keeps a runnable process from the processor. Who
/// takes longer for a few instructions was stopped.
#[cfg(not(ucm_loom))]
const STOPPED_AFTER: std::time::Duration = std::time::Duration::from_millis(100);

/// Spins a little, then yields: for waits that end within another thread's few instructions.
#[derive(Debug, Default)]
pub(crate) struct Backoff {
    rounds: u32,
    #[cfg(not(ucm_loom))]
    since: Option<std::time::Instant>,
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

    /// As [`snooze`](Self::snooze); true when it has taken so long that whoever is waited for must
    /// have been stopped. Never under loom, where nobody is.
    pub(crate) fn is_in_vain(&mut self) -> bool {
        self.snooze() > 64 && self.has_waited_enough()
    }

    #[cfg(not(ucm_loom))]
    #[cold]
    pub(crate) fn has_waited_enough(&mut self) -> bool {
        let waited = self.since.get_or_insert_with(std::time::Instant::now).elapsed();
        if self.rounds > 256 {
            std::thread::sleep(std::time::Duration::from_micros(50));
        }
        waited >= STOPPED_AFTER
    }

    #[cfg(ucm_loom)]
    pub(crate) fn has_waited_enough(&mut self) -> bool {
        false
    }
}
