//! The crate's error: a stable kind and a message with the numbers and the remedy.
//!
//! **Invariant:** an error of `submit` or `dump` means that nothing was accepted and nothing will
//! be read or written for it.

/// What kind of failure this is. Values are stable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The task contradicts itself (one key with two lengths, source and destination mixed up, …).
    Invalid = 1,
    /// A shard, or a whole task, is larger than what it must fit into.
    TooLarge = 2,
    /// A source or destination leaves its region.
    OutOfBounds = 3,
    /// Two destinations of one task overlap.
    Overlap = 4,
    /// A source or destination names a region this queue was not told about.
    UnknownRegion = 5,
    /// The queue holds as much as it may; try again when something has ended.
    Busy = 6,
    /// The dispatcher died; nothing is accepted any more.
    Poisoned = 7,
    /// The queue is shutting down.
    Closed = 8,
    /// The queue could not be started.
    Start = 9,
    /// The name of a staging buffer whose use is over.
    Stale = 10,
    /// Its deadline would pass before it could end; the prediction is in the message.
    TooLate = 11,
}

impl ErrorKind {
    /// Number of kinds, for tables indexed by kind.
    pub(crate) const COUNT: usize = 12;

    /// All kinds.
    pub const ALL: [Self; 11] = [
        Self::Invalid,
        Self::TooLarge,
        Self::OutOfBounds,
        Self::Overlap,
        Self::UnknownRegion,
        Self::Busy,
        Self::Poisoned,
        Self::Closed,
        Self::Start,
        Self::Stale,
        Self::TooLate,
    ];
}

/// Error of every fallible call of this crate.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{kind:?}: {message}")]
pub struct QueueError {
    kind: ErrorKind,
    message: String,
    predicted: Option<std::time::Duration>,
}

impl QueueError {
    pub(crate) fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), predicted: None }
    }

    pub(crate) fn too_late(message: String, predicted: std::time::Duration) -> Self {
        Self { kind: ErrorKind::TooLate, message, predicted: Some(predicted) }
    }

    /// How long the refused request would have taken, for `TooLate`.
    #[must_use]
    pub fn predicted(&self) -> Option<std::time::Duration> {
        self.predicted
    }

    /// Kind of the failure.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }
}
