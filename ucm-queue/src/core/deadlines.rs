//! When requests must end.
//!
//! **Invariant:** most entries, or few, are of requests that have not ended: what ends early leaves
//! its entry behind, and entries are sorted out before they outnumber the open ones.

use std::{cmp::Reverse, collections::BinaryHeap, time::Instant};

/// So few entries are not worth looking through.
const FEW: usize = 64;

/// The deadlines of requests, first one first.
#[derive(Default)]
pub(super) struct Deadlines {
    /// Time, task and request. Not taken out when a request ends before.
    heap: BinaryHeap<Reverse<(Instant, u64, u32)>>,
    /// Entries of requests that have not ended.
    open: usize,
}

impl Deadlines {
    /// Request `request` of task `task` must end at `at`.
    pub(super) fn push(&mut self, at: Instant, task: u64, request: u32) {
        self.heap.push(Reverse((at, task, request)));
        self.open += 1;
    }

    /// A request that had a deadline has ended, by it or before.
    pub(super) fn ended(&mut self) {
        self.open = self.open.saturating_sub(1);
    }

    /// Takes out the first request whose time has come; it may have ended already.
    pub(super) fn pop_due(&mut self, now: Instant) -> Option<(u64, u32)> {
        let Reverse((at, task, request)) = self.heap.peek().copied()?;
        if at > now {
            return None;
        }
        self.heap.pop();
        Some((task, request))
    }

    /// The first deadline of a request that `is_open`.
    pub(super) fn first(&mut self, is_open: impl Fn(u64, u32) -> bool) -> Option<Instant> {
        while let Some(Reverse((at, task, request))) = self.heap.peek().copied() {
            if is_open(task, request) {
                return Some(at);
            }
            self.heap.pop();
        }
        None
    }

    /// Drops what has ended once it is more than half of all: a look per entry, paid for by as many
    /// ends.
    pub(super) fn compact(&mut self, is_open: impl Fn(u64, u32) -> bool) {
        if self.heap.len() > FEW && self.heap.len() / 2 > self.open {
            self.heap.retain(|Reverse((_, task, request))| is_open(*task, *request));
            self.open = self.heap.len();
        }
    }

    /// Entries, of ended requests too.
    #[cfg(feature = "testing")]
    pub(super) fn len(&self) -> usize {
        self.heap.len()
    }
}
