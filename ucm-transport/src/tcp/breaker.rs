//! The circuit breaker of a peer: an IO-free state machine.
//!
//! **Invariant:** while it is open nothing is tried; after the delay exactly one trial is let
//! through, and only its success closes it.

use std::time::{Duration, Instant};

const FIRST_DELAY: Duration = Duration::from_millis(100);
const LONGEST_DELAY: Duration = Duration::from_secs(5);

/// Counts failures in a row.
#[derive(Debug)]
pub(crate) struct Breaker {
    /// Failures in a row that open it.
    limit: u32,
    failures: u32,
    open: Option<Open>,
}

#[derive(Debug)]
struct Open {
    until: Instant,
    delay: Duration,
    trial: bool,
}

impl Breaker {
    pub(crate) fn new(limit: u32) -> Self {
        Self { limit: limit.max(1), failures: 0, open: None }
    }

    /// Whether a connection may be tried now; the caller reports how it went. `Err` is the time
    /// left.
    pub(crate) fn admit(&mut self, now: Instant) -> Result<(), Duration> {
        match &mut self.open {
            None => Ok(()),
            Some(open) if open.trial || now < open.until => {
                Err(open.until.saturating_duration_since(now))
            }
            Some(open) => {
                open.trial = true;
                Ok(())
            }
        }
    }

    /// The peer has answered.
    pub(crate) fn succeeded(&mut self) {
        self.failures = 0;
        self.open = None;
    }

    /// The peer could not be connected, or did not answer in time.
    pub(crate) fn failed(&mut self, now: Instant) {
        self.failures = self.failures.saturating_add(1);
        if self.failures < self.limit {
            return;
        }
        let delay = match &self.open {
            None => FIRST_DELAY,
            Some(open) if !open.trial => return,
            Some(open) => (open.delay * 2).min(LONGEST_DELAY),
        };
        self.open = Some(Open { until: now + delay, delay, trial: false });
    }

    /// Whether it is open.
    pub(crate) fn is_open(&self) -> bool {
        self.open.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opens_after_failures_in_a_row_and_lets_one_trial_through() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut breaker = Breaker::new(2);
        breaker.failed(at(0));
        breaker.succeeded();
        breaker.failed(at(1));
        assert_eq!(breaker.admit(at(1)), Ok(()), "one in a row");
        breaker.failed(at(2));
        assert_eq!(breaker.admit(at(3)), Err(Duration::from_millis(99)));
        breaker.failed(at(50));
        assert_eq!(breaker.admit(at(102)), Ok(()), "late failures do not prolong it");
        assert!(breaker.admit(at(103)).is_err(), "one trial only");
        breaker.failed(at(110));
        assert!(breaker.admit(at(309)).is_err(), "the delay doubles");
        assert_eq!(breaker.admit(at(310)), Ok(()));
        breaker.succeeded();
        assert!(!breaker.is_open());
        assert_eq!(breaker.admit(at(311)), Ok(()));
    }

    #[test]
    fn the_delay_has_a_limit() {
        let mut now = Instant::now();
        let mut breaker = Breaker::new(1);
        breaker.failed(now);
        for _ in 0..20 {
            now += LONGEST_DELAY;
            assert_eq!(breaker.admit(now), Ok(()));
            breaker.failed(now);
        }
        assert_eq!(breaker.admit(now), Err(LONGEST_DELAY));
    }
}
