//! Notices that a device has stopped answering.
//!
//! Owns: the start times of calls on their way, and the decision; no call is made here.
//! **Invariant:** it is open while nothing has ended since the oldest call began and that is longer ago
//! than the limit, or while so many calls are that old that none is left to work with; it closes by
//! itself when calls end.

use std::{
    collections::BTreeMap,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// The calls on their way.
#[derive(Debug)]
pub(super) struct Breaker {
    limit: Duration,
    /// As many stalled calls leave nothing to work with.
    most: usize,
    state: Mutex<State>,
    idle: Condvar,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    calls: BTreeMap<u64, Instant>,
    last_end: Option<Instant>,
    open: bool,
    opened: u64,
}

impl Breaker {
    pub(super) fn new(limit: Duration, most: usize) -> Self {
        Self { limit, most: most.max(1), state: Mutex::default(), idle: Condvar::new() }
    }

    pub(super) fn limit(&self) -> Duration {
        self.limit
    }

    /// A call begins; says its number, and whether it is the only one.
    pub(super) fn begin(&self, now: Instant) -> (u64, bool) {
        let mut state = self.state();
        let number = state.next;
        state.next += 1;
        state.calls.insert(number, now);
        (number, state.calls.len() == 1)
    }

    /// It has ended. Says whether that closes the breaker.
    pub(super) fn end(&self, number: u64, now: Instant) -> bool {
        let mut state = self.state();
        state.calls.remove(&number);
        state.last_end = Some(now);
        if state.calls.is_empty() {
            self.idle.notify_all();
        }
        let was = state.open;
        state.open = state.open && self.stands_still(&state, now);
        was && !state.open
    }

    /// Looks at the clock. Says whether that opens the breaker, and when to look again.
    pub(super) fn look(&self, now: Instant) -> (bool, Option<Duration>) {
        let mut state = self.state();
        let was = state.open;
        state.open = self.stands_still(&state, now);
        let opens = state.open && !was;
        state.opened += u64::from(opens);
        if state.open {
            self.idle.notify_all();
        }
        let oldest = state.calls.values().next();
        let again = oldest.map(|began| {
            let left = self.limit.saturating_sub(now.saturating_duration_since(*began));
            // Old ones are looked at again when others may have joined them.
            if left.is_zero() { self.limit / 4 } else { left }
        });
        (opens, again)
    }

    pub(super) fn is_open(&self) -> bool {
        self.state().open
    }

    /// How often it opened, and how many calls are over the limit now.
    pub(super) fn report(&self, now: Instant) -> (u64, u64) {
        let state = self.state();
        (state.opened, self.stalled(&state, now) as u64)
    }

    /// Waits until no call is on its way; says `false` when the breaker opens instead.
    pub(super) fn wait_idle(&self) -> bool {
        let mut state = self.state();
        while !state.calls.is_empty() && !state.open {
            state = self.idle.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        !state.open
    }

    fn stalled(&self, state: &State, now: Instant) -> usize {
        let old = |began: &&Instant| now.saturating_duration_since(**began) >= self.limit;
        // Numbers are in order of their beginning.
        state.calls.values().take_while(old).count()
    }

    fn stands_still(&self, state: &State, now: Instant) -> bool {
        let stalled = self.stalled(state, now);
        let quiet =
            state.last_end.is_none_or(|end| now.saturating_duration_since(end) >= self.limit);
        stalled >= self.most || (stalled > 0 && quiet)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(10);

    /// Broken on purpose: one old call opens it although others end; it stays open; ends do not count.
    #[test]
    fn a49_it_opens_when_nothing_ends_and_closes_by_itself() {
        let breaker = Breaker::new(LIMIT, 3);
        let start = Instant::now();
        let at = |secs| start + Duration::from_secs(secs);
        assert_eq!(breaker.look(at(0)), (false, None));
        let (one, only) = breaker.begin(at(0));
        assert!(only);
        assert_eq!(breaker.look(at(4)), (false, Some(Duration::from_secs(6))));
        // Others end: one stalled call alone does not open it.
        let (two, only) = breaker.begin(at(5));
        assert!(!only && !breaker.end(two, at(9)));
        assert_eq!(breaker.look(at(10)), (false, Some(LIMIT / 4)));
        assert_eq!(breaker.report(at(10)), (0, 1));
        // Nothing has ended for ten seconds.
        assert_eq!(breaker.look(at(19)), (true, Some(LIMIT / 4)));
        assert_eq!(breaker.look(at(20)), (false, Some(LIMIT / 4)));
        assert!(breaker.is_open() && !breaker.wait_idle());
        assert!(breaker.end(one, at(21)));
        assert!(!breaker.is_open() && breaker.wait_idle());
        assert_eq!(breaker.report(at(21)), (1, 0));
    }

    #[test]
    fn a49_too_many_stalled_calls_open_it_although_others_end() {
        let breaker = Breaker::new(LIMIT, 3);
        let start = Instant::now();
        let late = start + LIMIT;
        let stuck: Vec<u64> = (0..3).map(|_| breaker.begin(start).0).collect();
        let (other, _) = breaker.begin(late);
        breaker.end(other, late);
        assert!(breaker.look(late).0);
        assert!(breaker.end(stuck[1], late));
        assert!(!breaker.look(late).0);
        breaker.end(stuck[0], late);
        breaker.end(stuck[2], late);
    }
}
