//! The crate's error: a stable kind, a message with the numbers, and an optional source.
//!
//! **Invariant:** the numbers of the kinds never change; new ones are added at the end.

use std::fmt;

use crate::TransferPlan;

/// What kind of failure this is. Values are stable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The request makes no sense (zero length, overlapping destinations, …).
    Invalid = 1,
    /// A range leaves its region.
    OutOfBounds = 2,
    /// The region handle is unknown or of an earlier generation.
    StaleRegion = 3,
    /// The engine cannot move bytes between these locations.
    Unsupported = 4,
    /// The engine's queue is full; nothing was accepted.
    Busy = 5,
    /// The copy failed; the destination's content is undefined.
    Failed = 6,
    /// The engine lost its worker or device and accepts nothing more.
    Poisoned = 7,
    /// Registration with the device or operating system failed.
    Registration = 8,
    /// Work could not be proved ended within the deadline.
    Stuck = 9,
    /// What the bytes belong to has changed: the peer restarted, or the source was replaced,
    /// evicted or revoked meanwhile. The destination's content is undefined.
    Stale = 10,
    /// The peer is dead or cannot be reached.
    PeerDown = 11,
    /// The deadline passed. Nothing touches the memory any more.
    Timeout = 12,
    /// The peer does not let us: authentication, access or protocol version.
    Denied = 13,
    /// The plan was cancelled. Nothing touches the memory any more.
    Cancelled = 14,
}

/// Error of every fallible call of this crate.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{kind:?}: {message}")]
pub struct TransferError {
    kind: ErrorKind,
    message: String,
}

impl TransferError {
    /// A new error of this kind. The message names the numbers and the remedy.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }

    /// Kind of the failure.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Invalid, message)
    }

    pub(crate) fn unsupported(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Unsupported, message)
    }

    pub(crate) fn out_of_bounds(offset: u64, len: u64, region: u64) -> Self {
        Self::new(
            ErrorKind::OutOfBounds,
            format!("{len} bytes at offset {offset} leave a region of {region} bytes"),
        )
    }
}

/// A plan that was not accepted, given back whole together with the reason.
pub struct Rejected {
    /// The plan, untouched.
    pub plan: TransferPlan,
    /// Why.
    pub error: TransferError,
}

impl fmt::Debug for Rejected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rejected").field("error", &self.error).finish_non_exhaustive()
    }
}
