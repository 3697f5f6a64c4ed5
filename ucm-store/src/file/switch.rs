//! When dumps are refused: after a full disk, for a while.
//!
//! **Invariant:** while it is off, one dump at a time tries whether there is space again, and the pause
//! between tries doubles up to [`MOST`]; the first one that works turns it on.

use std::time::{Duration, Instant};

/// First pause.
const LEAST: Duration = Duration::from_secs(1);
/// Longest pause.
const MOST: Duration = Duration::from_secs(60);

/// On, or off until a time.
#[derive(Debug, Default)]
pub(super) struct Switch {
    off: Option<Off>,
}

#[derive(Debug)]
struct Off {
    until: Instant,
    pause: Duration,
}

impl Switch {
    /// Whether a dump may try. If not: how long none may.
    pub(super) fn ask(&mut self, now: Instant) -> Result<(), Duration> {
        let Some(off) = &mut self.off else { return Ok(()) };
        if now < off.until {
            return Err(off.until - now);
        }
        // The others wait for what this one finds.
        off.until = now + off.pause;
        Ok(())
    }

    /// There was no space, also after evicting. Says whether dumps were on.
    pub(super) fn full(&mut self, now: Instant) -> bool {
        let was = self.off.as_ref().map(|off| off.pause);
        let pause = was.map_or(LEAST, |pause| (pause * 2).min(MOST));
        self.off = Some(Off { until: now + pause, pause });
        was.is_none()
    }

    /// A dump worked. Says whether dumps were off.
    pub(super) fn worked(&mut self) -> bool {
        self.off.take().is_some()
    }

    pub(super) fn is_off(&self) -> bool {
        self.off.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Broken on purpose: the pause does not grow; everybody may try when it is over.
    #[test]
    fn a46_one_tries_and_the_pause_doubles() {
        let mut switch = Switch::default();
        let mut now = Instant::now();
        switch.ask(now).unwrap();
        assert!(switch.full(now) && switch.is_off());
        for secs in [1, 2, 4, 8, 16, 32, 60, 60] {
            let pause = Duration::from_secs(secs);
            assert_eq!(switch.ask(now), Err(pause));
            now += pause;
            switch.ask(now).unwrap();
            assert!(switch.ask(now).is_err(), "one at a time");
            assert!(!switch.full(now));
        }
        now += MOST;
        switch.ask(now).unwrap();
        assert!(switch.worked() && !switch.worked() && !switch.is_off());
        switch.ask(now).unwrap();
        assert!(switch.full(now));
        assert_eq!(switch.ask(now), Err(LEAST));
    }
}
