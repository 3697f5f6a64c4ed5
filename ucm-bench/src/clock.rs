//! Time and processor use, comparable between processes.
//!
//! Owns: readings of the system-wide monotonic clock and of this process's processor time.
//! **Invariant:** two processes of one machine read the same clock.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, Timespec, clock_gettime};

fn nanos(time: Timespec) -> u64 {
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    seconds.saturating_mul(1_000_000_000).saturating_add(u64::try_from(time.tv_nsec).unwrap_or(0))
}

/// Nanoseconds of the monotonic clock.
pub(crate) fn now_ns() -> u64 {
    nanos(clock_gettime(ClockId::Monotonic))
}

/// Processor time of this process (all threads, user and system) in nanoseconds.
pub(crate) fn cpu_ns() -> u64 {
    nanos(clock_gettime(ClockId::ProcessCPUTime))
}

/// Sleeps until the monotonic clock reads `at_ns`; the last stretch is spun, so that processes that
/// wait for the same time start together.
pub(crate) fn wait_until(at_ns: u64) {
    const SPIN_NS: u64 = 200_000;
    let left = at_ns.saturating_sub(now_ns());
    if left > SPIN_NS {
        std::thread::sleep(Duration::from_nanos(left - SPIN_NS));
    }
    while now_ns() < at_ns {
        std::hint::spin_loop();
    }
}

/// Turns instants of this process into readings of the monotonic clock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Anchor {
    instant: Instant,
    ns: u64,
}

impl Anchor {
    pub(crate) fn now() -> Self {
        Self { instant: Instant::now(), ns: now_ns() }
    }

    pub(crate) fn ns(self, at: Instant) -> u64 {
        let signed = |d: Duration| u64::try_from(d.as_nanos()).unwrap_or(u64::MAX);
        match at.checked_duration_since(self.instant) {
            Some(after) => self.ns.saturating_add(signed(after)),
            None => self.ns.saturating_sub(signed(self.instant.saturating_duration_since(at))),
        }
    }
}
