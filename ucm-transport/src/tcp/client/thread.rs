//! Who makes progress: the engine's own thread, or whoever waits.
//!
//! **Invariant:** one thread at a time leads; it waits in `poll` without any lock, and everything
//! that concerns it rings its bell.

use std::{
    sync::{Arc, PoisonError, Weak, atomic::Ordering},
    time::{Duration, Instant},
};

use rustix::{
    buffer::spare_capacity,
    event::{PollFd, PollFlags, Timespec, epoll, poll},
};

use super::{Ends, Inner, lane::Lane};
use crate::tcp::bell;

pub(super) const BELL: u64 = 0;

/// Body of the engine's thread: deadlines always, lanes while somebody is to be woken.
pub(super) fn run(weak: &Weak<Inner>, epoll: &std::os::fd::OwnedFd) {
    let mut events: Vec<epoll::Event> = Vec::with_capacity(64);
    let mut earliest = None;
    loop {
        let left = earliest.map(|at: Instant| at.saturating_duration_since(Instant::now()));
        let timeout = left.and_then(|left| {
            // Rounded up, so that what is due is due on waking.
            Timespec::try_from(left + Duration::from_micros(100)).ok()
        });
        events.clear();
        let waited = epoll::wait(epoll, spare_capacity(&mut events), timeout.as_ref());
        let Some(inner) = weak.upgrade() else { return };
        if inner.stopping.load(Ordering::SeqCst) {
            return;
        }
        if let Err(error) = waited
            && error != rustix::io::Errno::INTR
        {
            tracing::error!(%error, "the thread of the tcp engine cannot wait; it is poisoned");
            inner.poisoned.store(true, Ordering::SeqCst);
            return;
        }
        for event in &events {
            let event: &epoll::Event = event;
            let token = event.data.u64();
            if token == BELL {
                bell::hush(&inner.bell);
                continue;
            }
            let lane = inner.lanes().get(&token).cloned();
            let Some(lane) = lane else { continue };
            if !inner.is_threaded() {
                // A waker that was taken away: whoever waits reads now.
                let _ = epoll::delete(epoll, lane.fd());
                continue;
            }
            let flags = event.flags;
            if flags.intersects(epoll::EventFlags::OUT) {
                inner.flush(&lane);
                if !lane.is_blocked() && !lane.is_dead() {
                    inner.watch(&lane);
                }
            }
            // What is left in the socket is reported again, what is in the lane's buffer is not.
            while inner.receive(&lane) {}
        }
        let clock = inner.earliest.load(Ordering::SeqCst);
        if inner.instant(clock).is_some_and(|at| at <= Instant::now()) {
            // First, so that a deadline that comes in meanwhile is not overlooked.
            inner.earliest.store(u64::MAX, Ordering::SeqCst);
            if let Some(next) = inner.expire(Instant::now()) {
                inner.earliest.fetch_min(inner.clock(next), Ordering::SeqCst);
            }
        }
        earliest = inner.instant(inner.earliest.load(Ordering::SeqCst));
    }
}

impl Inner {
    /// Waits until `done`, making progress where nobody else does; `false` at the deadline.
    pub(super) fn wait_until(
        self: &Arc<Self>,
        deadline: Instant,
        done: impl Fn(&Ends) -> bool,
    ) -> bool {
        loop {
            let ends = self.ends();
            if done(&ends) {
                return true;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            if self.is_threaded() || self.leading.swap(true, Ordering::SeqCst) {
                drop(self.ended.wait_timeout(ends, left).unwrap_or_else(PoisonError::into_inner));
                continue;
            }
            drop(ends);
            self.lead(|inner| {
                let ends = inner.ends();
                if done(&ends) || inner.is_threaded() {
                    return None;
                }
                Some(deadline.saturating_duration_since(Instant::now())).filter(|l| !l.is_zero())
            });
            self.step_down();
        }
    }

    /// Makes what progress can be made without waiting.
    pub(super) fn look(self: &Arc<Self>) {
        if self.is_threaded() || self.leading.swap(true, Ordering::SeqCst) {
            return;
        }
        let mut first = true;
        self.lead(|_| std::mem::take(&mut first).then_some(Duration::ZERO));
        self.step_down();
    }

    fn step_down(&self) {
        let ends = self.ends();
        self.leading.store(false, Ordering::SeqCst);
        drop(ends);
        // Somebody who waits leads on.
        self.ended.notify_all();
    }

    /// Reads and writes the busy lanes for as long as `wait` says how long to wait.
    fn lead(self: &Arc<Self>, mut wait: impl FnMut(&Self) -> Option<Duration>) {
        let mut lanes: Vec<Arc<Lane>> = Vec::new();
        while let Some(limit) = wait(self) {
            lanes.clear();
            {
                let mut busy = self.busy();
                busy.retain(|lane| lane.idle_since().is_none() && !lane.is_dead());
                lanes.extend(busy.iter().cloned());
            }
            let mut fds: Vec<PollFd<'_>> = Vec::with_capacity(lanes.len() + 1);
            fds.push(PollFd::new(&self.lead_bell, PollFlags::IN));
            for lane in &lanes {
                let room = if lane.is_blocked() { PollFlags::OUT } else { PollFlags::empty() };
                fds.push(PollFd::from_borrowed_fd(lane.fd(), PollFlags::IN | room));
            }
            let timeout = Timespec::try_from(limit).ok();
            match poll(&mut fds, timeout.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "the tcp engine cannot wait for its lanes");
                    return;
                }
            }
            let mut ready = fds.iter().map(PollFd::revents);
            if ready.next().is_some_and(|bell| !bell.is_empty()) {
                bell::hush(&self.lead_bell);
            }
            let ready: Vec<PollFlags> = ready.collect();
            for (lane, flags) in lanes.iter().zip(ready) {
                if flags.intersects(PollFlags::OUT) {
                    self.flush(lane);
                }
                if !flags.difference(PollFlags::OUT).is_empty() {
                    while self.receive(lane) {}
                }
            }
        }
    }
}
