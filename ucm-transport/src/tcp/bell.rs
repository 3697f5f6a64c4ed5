//! An eventfd that wakes a thread out of a poll.
//!
//! **Invariant:** a ring is never lost: it stays until it is hushed.

use std::{io, os::fd::OwnedFd};

use rustix::event::{EventfdFlags, eventfd};

pub(crate) fn new() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

pub(crate) fn ring(bell: &OwnedFd) {
    // A full counter is rung already.
    let _ = rustix::io::write(bell, &1_u64.to_ne_bytes());
}

pub(crate) fn hush(bell: &OwnedFd) {
    let _ = rustix::io::read(bell, &mut [0; 8]);
}
