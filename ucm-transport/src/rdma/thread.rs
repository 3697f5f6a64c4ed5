//! The engine's thread: takes completions, keeps deadlines, hears of peers that end.
//!
//! While something is under way it looks without a pause for a moment after each completion; then it
//! asks to be told of the next one, looks once more, and sleeps.
//!
//! **Invariant:** it never sleeps on a connection that has work, unless an announcement of its next
//! completion was asked for after the last look but one.

use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use rustix::{
    buffer::spare_capacity,
    event::{Timespec, epoll},
};

use super::{inner::Inner, peer::Moves};
use crate::tcp::bell;

pub(super) const BELL: u64 = 0;
pub(super) const CHANNEL: u64 = 1;
/// Number of the first connection.
pub(super) const FIRST: u64 = 2;
/// Time between tries to destroy a queue pair.
const AGAIN: Duration = Duration::from_millis(100);

/// Nobody waits for a thread that is gone.
struct PoisonOnPanic<'a>(&'a Inner);

impl Drop for PoisonOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.ends.poison();
        }
    }
}

/// Body of the thread.
pub(super) fn run(inner: &Arc<Inner>) {
    let _guard = PoisonOnPanic(inner);
    let mut events: Vec<epoll::Event> = Vec::with_capacity(64);
    let mut last = Instant::now();
    while !inner.stopping.load(Ordering::SeqCst) {
        let now = Instant::now();
        inner.expire(now);
        let (some, busy) = inner.look(false);
        if some {
            last = now;
            continue;
        }
        if busy && now.saturating_duration_since(last) < inner.settings.spin {
            (0..32).for_each(|_| std::hint::spin_loop());
            continue;
        }
        for peer in inner.all_peers() {
            let mut moves = Moves::default();
            peer.lock().arm(now, &mut moves);
            inner.finish(&peer, moves);
        }
        // What completed before it was asked for is not announced, so no peer is passed over.
        if inner.look(true).0 {
            last = now;
            continue;
        }
        let due = inner.next_due();
        let due =
            if inner.bury() > 0 { Some(due.map_or(AGAIN, |due| due.min(AGAIN))) } else { due };
        // Rounded up: to wake before it is time would be to wake twice.
        let due = due.map(|due| Timespec {
            tv_sec: i64::try_from(due.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(due.subsec_nanos()),
        });
        inner.sleeps.fetch_add(1, Ordering::Relaxed);
        events.clear();
        if let Err(error) = epoll::wait(&inner.epoll, spare_capacity(&mut events), due.as_ref())
            && error != rustix::io::Errno::INTR
        {
            tracing::error!("the rdma engine cannot wait: {error}");
            inner.ends.poison();
            std::thread::sleep(AGAIN);
        }
        for event in events.drain(..) {
            match event.data.u64() {
                BELL => bell::hush(&inner.bell),
                CHANNEL => {
                    inner.dialer.channel.hush();
                    inner.all_peers().iter().for_each(|peer| peer.lock().disarm());
                }
                number => inner.lost(number),
            }
        }
        last = Instant::now();
    }
}
