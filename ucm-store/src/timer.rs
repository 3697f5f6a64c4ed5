//! A one-shot alarm that one thread sleeps on and any thread sets.
//!
//! **Invariant:** the sleeper returns at the earliest time set since it last returned, and setting
//! a time wakes nobody: the kernel keeps it (timerfd), so an alarm costs no context switch.

use std::{io, os::fd::OwnedFd, time::Duration};

use rustix::time::{
    ClockId, Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, clock_gettime,
    timerfd_create, timerfd_settime,
};

/// Nanoseconds of `CLOCK_MONOTONIC`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Moment(u64);

impl Moment {
    pub(crate) fn now() -> Self {
        let now = clock_gettime(ClockId::Monotonic);
        let secs = u64::try_from(now.tv_sec).unwrap_or(0);
        Self(secs * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0))
    }

    pub(crate) fn after(self, wait: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(wait.as_nanos()).unwrap_or(u64::MAX)))
    }
}

/// The alarm.
#[derive(Debug)]
pub(crate) struct Alarm(OwnedFd);

impl Alarm {
    pub(crate) fn new() -> io::Result<Self> {
        let fd = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC)?;
        Ok(Self(fd))
    }

    /// Sets the time, replacing an earlier one. A time in the past fires at once.
    pub(crate) fn set(&self, at: Moment) {
        // All zeroes would disarm; centuries ahead are as good as never.
        let at = at.0.clamp(1, 1 << 62);
        let it_value = Timespec {
            tv_sec: i64::try_from(at / 1_000_000_000).unwrap_or(i64::MAX),
            tv_nsec: i64::try_from(at % 1_000_000_000).unwrap_or(0),
        };
        let it_interval = Timespec { tv_sec: 0, tv_nsec: 0 };
        let spec = Itimerspec { it_interval, it_value };
        if let Err(error) = timerfd_settime(&self.0, TimerfdTimerFlags::ABSTIME, &spec) {
            // Only invalid arguments can fail, and these are valid.
            tracing::error!(%error, "an alarm could not be set");
        }
    }

    /// Sleeps until the time set last has come.
    pub(crate) fn wait(&self) -> io::Result<()> {
        let mut fired = [0u8; 8];
        loop {
            match rustix::io::read(&self.0, &mut fired) {
                Ok(_) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fires_not_before_its_time_and_at_once_for_the_past() {
        let alarm = Alarm::new().unwrap();
        let due = Moment::now().after(Duration::from_millis(3));
        alarm.set(due);
        alarm.wait().unwrap();
        assert!(Moment::now() >= due);
        alarm.set(Moment(0));
        alarm.wait().unwrap();
    }
}
