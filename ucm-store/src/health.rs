//! Whether a tier is worth asking.
//!
//! Owns: the failures of one direction of one tier, and the pause after too many; no clock, no IO.
//! **Invariant:** while it is off, one operation at a time tries, and the pause between tries doubles up
//! to [`MOST`]; the first answer turns it on. A tier in which nothing ends is not asked until something does.

use std::time::{Duration, Instant};

use crate::{ErrorKind, StoreError};

/// First pause.
const LEAST: Duration = Duration::from_secs(1);
/// Longest pause.
const MOST: Duration = Duration::from_secs(60);

/// What an operation's end says about its tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The tier works, whatever it answered.
    Answered,
    /// It does not.
    Failed,
    /// Nothing: it said itself that it takes nothing, or nobody wanted an answer any more.
    Silent,
}

impl Verdict {
    pub(crate) fn of(result: &Result<(), StoreError>) -> Self {
        match result.as_ref().map_err(StoreError::kind) {
            Err(ErrorKind::Io | ErrorKind::Lost) => Self::Failed,
            Err(ErrorKind::Unavailable | ErrorKind::Cancelled | ErrorKind::Invalid) => Self::Silent,
            _ => Self::Answered,
        }
    }
}

/// One direction of one tier.
#[derive(Debug)]
pub(crate) struct Health {
    /// So many failures in a row turn it off.
    failures_off: u32,
    /// Nothing has ended for so long: not asked.
    stall_after: Duration,
    failures: u32,
    off: Option<Off>,
    in_flight: usize,
    /// When something ended last, or began after a time without operations.
    moved: Option<Instant>,
    opened: u64,
}

#[derive(Debug)]
struct Off {
    until: Instant,
    pause: Duration,
}

impl Health {
    pub(crate) fn new(failures_off: u32, stall_after: Duration) -> Self {
        Self {
            failures_off: failures_off.max(1),
            stall_after,
            failures: 0,
            off: None,
            in_flight: 0,
            moved: None,
            opened: 0,
        }
    }

    /// How many of so many operations may be handed over now; these have begun.
    pub(crate) fn begin(&mut self, count: usize, now: Instant) -> usize {
        let count = self.allowed(count, now);
        if count > 0 {
            if self.in_flight == 0 {
                self.moved = Some(now);
            }
            self.in_flight += count;
        }
        count
    }

    fn allowed(&mut self, count: usize, now: Instant) -> usize {
        if self.is_stalled(now) {
            return 0;
        }
        match &mut self.off {
            None => count,
            Some(off) if now >= off.until => {
                // The others wait for what this one finds.
                off.until = now + off.pause;
                count.min(1)
            }
            Some(_) => 0,
        }
    }

    /// One of them has ended.
    pub(crate) fn end(&mut self, verdict: Verdict, now: Instant) {
        self.in_flight = self.in_flight.saturating_sub(1);
        self.moved = Some(now);
        match verdict {
            Verdict::Silent => {}
            Verdict::Answered => {
                self.failures = 0;
                self.off = None;
            }
            Verdict::Failed => {
                self.failures = self.failures.saturating_add(1);
                match &mut self.off {
                    // Others that had begun before fail, too: they are no further tries.
                    Some(off) if self.in_flight > 0 => off.until = off.until.max(now + off.pause),
                    Some(off) => {
                        off.pause = (off.pause * 2).min(MOST);
                        off.until = now + off.pause;
                    }
                    None if self.failures >= self.failures_off => {
                        self.opened += 1;
                        self.off = Some(Off { until: now + LEAST, pause: LEAST });
                    }
                    None => {}
                }
            }
        }
    }

    /// Whether it is off, or nothing ends in it.
    pub(crate) fn is_open(&self, now: Instant) -> bool {
        self.off.is_some() || self.is_stalled(now)
    }

    /// How often failures turned it off.
    pub(crate) fn opened(&self) -> u64 {
        self.opened
    }

    fn is_stalled(&self, now: Instant) -> bool {
        let quiet = |moved| now.saturating_duration_since(moved) >= self.stall_after;
        self.in_flight > 0 && self.moved.is_some_and(quiet)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STALL: Duration = Duration::from_secs(10);

    /// Broken on purpose: an answer does not reset the count; the pause does not double; all may try when
    /// it is over; ends of what began before count as tries.
    #[test]
    fn failures_in_a_row_turn_it_off_and_an_answer_on() {
        let mut health = Health::new(3, STALL);
        let mut now = Instant::now();
        assert_eq!(health.begin(5, now), 5);
        for verdict in [Verdict::Failed, Verdict::Failed, Verdict::Answered, Verdict::Failed] {
            health.end(verdict, now);
        }
        health.end(Verdict::Failed, now);
        assert!(!health.is_open(now));
        assert_eq!(health.begin(4, now), 4);
        health.end(Verdict::Failed, now);
        assert!(health.is_open(now));
        health.end(Verdict::Failed, now);
        health.end(Verdict::Failed, now);
        health.end(Verdict::Silent, now);
        for secs in [1, 2, 4, 8, 16, 32, 60, 60] {
            let pause = Duration::from_secs(secs);
            assert_eq!(health.begin(7, now + pause - Duration::from_millis(1)), 0);
            now += pause;
            assert_eq!((health.begin(7, now), health.begin(7, now)), (1, 0), "one at a time");
            health.end(Verdict::Failed, now);
        }
        now += MOST;
        assert_eq!(health.begin(7, now), 1);
        health.end(Verdict::Answered, now);
        assert_eq!((health.begin(7, now), health.opened()), (7, 1));
    }

    /// Broken on purpose: the time of the first of several, not of the last end, counts.
    #[test]
    fn a49_a_tier_in_which_nothing_ends_is_not_asked() {
        let mut health = Health::new(3, STALL);
        let start = Instant::now();
        assert_eq!(health.begin(2, start), 2);
        assert_eq!(health.begin(1, start + STALL / 2), 1);
        health.end(Verdict::Answered, start + STALL / 2);
        assert_eq!(health.begin(1, start + STALL), 1, "something ended a moment ago");
        let late = start + STALL + STALL / 2;
        assert_eq!(health.begin(9, late), 0);
        assert!(health.is_open(late));
        health.end(Verdict::Silent, late);
        assert_eq!(health.begin(9, late), 9);
    }
}
