//! The crate's error: a stable kind and a message with the numbers.
//!
//! **Invariant:** the numbers of the kinds never change; new ones are added at the end.

/// What kind of failure this is. Values are stable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The object is not there. A value more than a failure.
    Missing = 1,
    /// The object is there but not what was asked for: magic, version, key, length, descriptor or
    /// checksum differ. It is never served.
    Corrupt = 2,
    /// The operating system or the service reported a failure.
    Io = 3,
    /// No space left for a dump.
    NoSpace = 4,
    /// The backend accepts nothing at the moment (stores off, breaker open, shut down).
    Unavailable = 5,
    /// The operation was dropped without an end; its memory is free again.
    Lost = 6,
    /// The request makes no sense for this backend.
    Invalid = 7,
    /// The operation was cancelled before it started.
    Cancelled = 8,
}

/// Error of one operation.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{kind:?}: {message}")]
pub struct StoreError {
    kind: ErrorKind,
    message: String,
}

impl StoreError {
    /// A new error of this kind. The message names the numbers and the remedy.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }

    /// Kind of the failure.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }
}
