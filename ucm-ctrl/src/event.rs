//! A 32-bit event counter that processes can sleep on.
//!
//! Bits 0 and 1 say who must be told when the counter moves, bit 2 that somebody is about to wake the
//! sleepers; the counter itself is in bits 3..32.
//! **Invariant:** a sleeper sets its flag before it looks at the condition one last time, and the
//! counter moves after the condition has changed, so no wake-up is lost; flags are cleared by the
//! bump, so a sleeper that died costs at most one futile wake-up. Whoever clears the sleepers' flag
//! leaves `WAKING` until it has woken them: should it be stopped or die in between, the next one
//! that moves the counter wakes them.

use std::time::Instant;

use crate::{
    failpoint::failpoint,
    sync::{AtomicU32, Ordering},
};

/// Somebody sleeps on this word.
pub(crate) const SLEEPERS: u32 = 1;
/// Somebody wants the doorbells of the pinned members rung.
pub(crate) const ARMED: u32 = 2;
/// Somebody has cleared `SLEEPERS` and not woken them yet.
const WAKING: u32 = 4;
const FLAGS: u32 = SLEEPERS | ARMED | WAKING;
const STEP: u32 = 8;

/// A counter that was moved on: who must be told.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub(crate) struct Bumped {
    old: u32,
    new: u32,
}

impl Bumped {
    fn has_sleepers(self) -> bool {
        self.old & (SLEEPERS | WAKING) != 0
    }

    /// Whether the doorbells of the pinned members are to be rung.
    pub(crate) fn is_armed(self) -> bool {
        self.old & ARMED != 0
    }
}

/// See the module description. Lives in shared memory.
#[cfg_attr(not(ucm_loom), repr(transparent))]
#[derive(Debug, Default)]
pub(crate) struct EventWord {
    word: AtomicU32,
    #[cfg(ucm_loom)]
    lot: futex::Lot,
}

impl EventWord {
    /// The counter without its flags.
    pub(crate) fn count(&self) -> u32 {
        Self::count_in(self.word.load(Ordering::SeqCst))
    }

    /// The counter in a whole word.
    pub(crate) fn count_in(word: u32) -> u32 {
        word & !FLAGS
    }

    /// Sets `flag` and returns the whole word, to be handed to [`sleep`](Self::sleep).
    pub(crate) fn arm(&self, flag: u32) -> u32 {
        self.word.fetch_or(flag, Ordering::SeqCst) | flag
    }

    /// Moves the counter on and takes the flags; to be followed by [`wake`](Self::wake).
    pub(crate) fn bump(&self) -> Bumped {
        let mut old = self.word.load(Ordering::SeqCst);
        loop {
            let waking = if old & (SLEEPERS | WAKING) != 0 { WAKING } else { 0 };
            let new = (old & !FLAGS).wrapping_add(STEP) | waking;
            match self.word.compare_exchange_weak(old, new, Ordering::SeqCst, Ordering::Relaxed) {
                Ok(_) => return Bumped { old, new },
                Err(now) => old = now,
            }
        }
    }

    /// Wakes those who slept when the counter was moved on.
    pub(crate) fn wake(&self, bumped: Bumped) {
        if bumped.has_sleepers() {
            self.wake_anyway(bumped);
        }
    }

    /// As [`wake`](Self::wake), but wakes even when nobody seems to sleep.
    pub(crate) fn wake_anyway(&self, bumped: Bumped) {
        self.wake_all();
        // Whoever sleeps by now has changed the word, and keeps the flag: that costs a futile wake-up.
        let _ = self.word.compare_exchange(
            bumped.new,
            bumped.new & !WAKING,
            Ordering::SeqCst,
            Ordering::Relaxed,
        );
    }

    /// Moves the counter on and wakes those who sleep on it. Safe in a signal handler.
    pub(crate) fn ring(&self) {
        self.ring_if(|| false);
    }

    /// As [`ring`](Self::ring), but wakes even when nobody seems to sleep if `anyway`, asked once the
    /// counter has moved, says so.
    pub(crate) fn ring_if(&self, anyway: impl FnOnce() -> bool) {
        let bumped = self.bump();
        failpoint!("ring.bump.after");
        if anyway() {
            self.wake_anyway(bumped);
        } else {
            self.wake(bumped);
        }
    }

    /// As [`ring`](Self::ring), but wakes even when nobody seems to sleep: for cleaning up after a
    /// member that may have died between the bump and the wake, and for a process that wakes its own
    /// threads, which must not depend on what others have written over the flags.
    pub(crate) fn ring_anyway(&self) {
        let bumped = self.bump();
        self.wake_anyway(bumped);
    }

    /// Wakes everybody who sleeps on the word.
    pub(crate) fn wake_all(&self) {
        #[cfg(not(ucm_loom))]
        futex::wake_all(&self.word);
        #[cfg(ucm_loom)]
        self.lot.wake_all();
    }

    /// What another member that writes nonsense does.
    #[cfg(all(test, not(ucm_loom)))]
    pub(crate) fn overwrite(&self, word: u32) {
        self.word.store(word, Ordering::SeqCst);
    }

    /// Sleeps while the word equals `seen`, at most until the deadline. Returns early at will
    /// (signals); the caller looks at its condition again.
    pub(crate) fn sleep(&self, seen: u32, deadline: Option<Instant>) {
        #[cfg(not(ucm_loom))]
        futex::sleep(&self.word, seen, deadline);
        #[cfg(ucm_loom)]
        self.lot.sleep(&self.word, seen, deadline);
    }
}

#[cfg(not(ucm_loom))]
pub(crate) mod futex {
    //! The kernel's futex on shared memory.

    use std::{
        sync::atomic::AtomicU32,
        time::{Duration, Instant},
    };

    use rustix::thread::futex;

    pub(crate) fn wake_all(word: &AtomicU32) {
        // Waking cannot fail on a mapped word; there is nothing to do about it if it does.
        let _ = futex::wake(word, futex::Flags::empty(), i32::MAX.cast_unsigned());
    }

    pub(crate) fn sleep(word: &AtomicU32, seen: u32, deadline: Option<Instant>) {
        let timeout = match deadline {
            None => None,
            Some(at) => {
                let left = at.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return;
                }
                // The kernel refuses absurd values; a year is for ever.
                let left = left.min(Duration::from_secs(365 * 86_400));
                rustix::fs::Timespec::try_from(left).ok()
            }
        };
        // EAGAIN (the word moved), EINTR and ETIMEDOUT all mean "look again".
        let _ = futex::wait(word, futex::Flags::empty(), seen, timeout.as_ref());
    }
}

#[cfg(ucm_loom)]
mod futex {
    //! A futex in terms of the checker's mutex and condition variable: a lost wake-up is a deadlock,
    //! which it reports.

    #![expect(clippy::unwrap_used, reason = "nobody panics in a model that passes")]

    use std::time::Instant;

    use crate::sync::{AtomicU32, Condvar, Mutex, Ordering};

    #[derive(Debug)]
    pub(crate) struct Lot {
        mutex: Mutex<()>,
        condvar: Condvar,
    }

    impl Default for Lot {
        fn default() -> Self {
            Self { mutex: Mutex::new(()), condvar: Condvar::new() }
        }
    }

    impl Lot {
        pub(crate) fn wake_all(&self) {
            let _guard = self.mutex.lock().unwrap();
            self.condvar.notify_all();
        }

        pub(crate) fn sleep(&self, word: &AtomicU32, seen: u32, deadline: Option<Instant>) {
            let guard = self.mutex.lock().unwrap();
            if word.load(Ordering::SeqCst) != seen || deadline.is_some() {
                return;
            }
            drop(self.condvar.wait(guard).unwrap());
        }
    }
}
