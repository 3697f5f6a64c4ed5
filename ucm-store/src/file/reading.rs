//! A read on its way, of whatever kind.
//!
//! **Invariant:** it keeps everything that its transfer needs until it is ended or dropped; whoever has
//! it knows that no call is on its way then.

use std::{
    fmt,
    os::fd::BorrowedFd,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
};

use super::{
    Inner,
    failpoint::{FileStep, Injected},
    packed::{self, Group},
    sys::{self, Incomplete},
    transfer::{Progress, Transfer},
};
use crate::Op;

/// What a ring or a thread does the calls of.
pub(super) trait Reading: Send + fmt::Debug {
    /// The file, open until the end.
    fn fd(&self) -> BorrowedFd<'_>;
    /// What is left to do.
    fn transfer(&mut self) -> &mut Transfer;
    /// Verifies what came and ends the operations.
    fn end(self: Box<Self>, inner: &Inner, moved: Result<(), Incomplete>);
}

/// A read that has not begun.
#[derive(Debug)]
pub(super) enum Start {
    /// Nobody has looked yet where the objects lie.
    Find(Vec<Op>),
    /// A file of its own.
    Object(Op),
    /// Packed objects.
    Group(Group),
}

impl Start {
    /// The operations, unfinished.
    pub(super) fn into_ops(self) -> Vec<Op> {
        match self {
            Self::Find(ops) => ops,
            Self::Object(op) => vec![op],
            Self::Group(group) => group.into_ops().collect(),
        }
    }
}

/// A read whose time is watched.
#[derive(Debug)]
pub(super) struct Watched {
    pub(super) reading: Box<dyn Reading>,
    call: u64,
}

impl Inner {
    /// As [`begin`](Self::begin), with an eye on the clock, which opening a file may need, too.
    pub(super) fn begin_watched(&self, start: Start) -> Option<Watched> {
        let call = self.call_begins();
        // A panic in a sink ends the call as well.
        let begun = catch_unwind(AssertUnwindSafe(|| self.begin(start)));
        match begun {
            Ok(Some(reading)) => Some(Watched { reading, call }),
            Ok(None) => {
                self.call_ends(call);
                None
            }
            Err(panic) => {
                self.call_ends(call);
                resume_unwind(panic)
            }
        }
    }

    /// Ends a watched read.
    pub(super) fn end_watched(&self, read: Watched, moved: Result<(), Incomplete>) {
        // The device has answered; what follows is ours.
        self.call_ends(read.call);
        read.reading.end(self, moved);
    }

    /// Finds out where objects lie. The device may not answer that, either: threads of this backend
    /// ask, never those that call it.
    pub(super) fn expand(&self, ops: Vec<Op>) -> Vec<Start> {
        let (packed, others) = self.watched(|| match self.failpoints.check(FileStep::Find) {
            Ok(()) => self.packed.find(ops),
            Err(_) => (Vec::new(), ops),
        });
        let groups = packed::groups(packed).into_iter().map(Start::Group);
        groups.chain(others.into_iter().map(Start::Object)).collect()
    }

    /// Begins a read, or ends its operations.
    fn begin(&self, start: Start) -> Option<Box<dyn Reading>> {
        match start {
            Start::Find(ops) => {
                // Whoever has such a one expands it first; dropped operations end as lost.
                tracing::error!(operations = ops.len(), "reads without a place");
                None
            }
            Start::Object(op) => self.start_read(op),
            Start::Group(group) => self.packed.start(self, group),
        }
    }

    /// Does all of a read in this thread.
    pub(super) fn read_in_thread(&self, mut read: Watched) {
        let moved = loop {
            let left = read.reading.transfer().left();
            let call = |read: &mut Watched| {
                let vector = read.reading.transfer().next();
                sys::readv(read.reading.fd(), vector)
            };
            let moved = match self.failpoints.inject(FileStep::Read, left) {
                Some(Injected::Error(e)) => Err(e),
                Some(Injected::Short(most)) => call(&mut read).map(|n| n.min(most)),
                Some(Injected::Stall(stall)) => {
                    stall.wait();
                    continue;
                }
                None => call(&mut read),
            };
            match read.reading.transfer().advance(moved) {
                Progress::More => {}
                Progress::Ended(end) => break end,
            }
        };
        self.end_watched(read, moved);
    }
}
