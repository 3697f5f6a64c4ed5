//! How fast a queue works, and how long a new task would take.
//!
//! **Invariant:** a prediction is made of what was measured while the queue had work; before anything
//! was measured it is zero, so nothing is refused on a guess.

use std::time::{Duration, Instant};

use ucm_ctrl::sync::{AtomicU64, Ordering};

/// Older work than this counts half.
const MEMORY: Duration = Duration::from_secs(1);
const MIB: u128 = 1 << 20;

/// The published pace: nanoseconds a MiB took.
#[derive(Debug, Default)]
pub(crate) struct Pace(AtomicU64);

impl Pace {
    /// How long `bytes` take at this pace.
    pub(crate) fn time_of(&self, bytes: u64) -> Duration {
        let ns = u128::from(self.0.load(Ordering::Relaxed)) * u128::from(bytes) / MIB;
        Duration::from_nanos(u64::try_from(ns).unwrap_or(u64::MAX))
    }
}

/// The core's measurement.
#[derive(Debug)]
pub(crate) struct PaceMeter {
    last: Option<Instant>,
    busy: Duration,
    bytes: u64,
}

impl PaceMeter {
    pub(crate) fn new() -> Self {
        Self { last: None, busy: Duration::ZERO, bytes: 0 }
    }

    /// A turn begins. The time since the last one counts if the queue had work all along.
    pub(crate) fn turn(&mut self, now: Instant, pace: &Pace) {
        if let Some(last) = self.last.take() {
            self.busy += now.saturating_duration_since(last);
        }
        if self.bytes > 0 {
            let ns = self.busy.as_nanos() * MIB / u128::from(self.bytes);
            pace.0.store(u64::try_from(ns).unwrap_or(u64::MAX), Ordering::Relaxed);
        }
        if self.busy > MEMORY {
            self.busy /= 2;
            self.bytes /= 2;
        }
    }

    /// A turn ends with work left or without.
    pub(crate) fn rest(&mut self, now: Instant, has_work: bool) {
        self.last = has_work.then_some(now);
    }

    /// Bytes have reached their destinations.
    pub(crate) fn moved(&mut self, bytes: u64) {
        self.bytes = self.bytes.saturating_add(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_time_with_work_counts() {
        let (mut meter, pace) = (PaceMeter::new(), Pace::default());
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        assert_eq!(pace.time_of(1 << 30), Duration::ZERO);
        meter.turn(at(0), &pace);
        meter.rest(at(0), true);
        meter.moved(4 << 20);
        meter.turn(at(8), &pace);
        meter.rest(at(8), false);
        assert_eq!(pace.time_of(1 << 20), Duration::from_millis(2));
        // An hour without work says nothing.
        meter.turn(at(3_600_000), &pace);
        assert_eq!(pace.time_of(10 << 20), Duration::from_millis(20));
    }
}
