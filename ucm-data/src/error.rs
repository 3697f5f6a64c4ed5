//! The crate's error: a stable kind, a message with the numbers and the remedy, and, for shortages,
//! the numbers themselves.
//!
//! **Invariant:** every failure leaves this crate as a `DataError`; nothing panics on the state of
//! the machine or on bytes from another process.

use std::fmt;

/// What kind of failure this is. Values are stable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A number in the configuration overflows, is zero, or is not aligned.
    Invalid = 1,
    /// Not enough memory of the wanted kind. [`DataError::shortage`] has the numbers.
    Shortage = 2,
    /// Bytes or descriptors from another process are not what they must be.
    Corrupt = 3,
    /// The live cache has another protocol, layout version or fingerprint.
    Layout = 4,
    /// The operating system refused a call.
    Os = 5,
    /// Missing rights, or the other side belongs to another user.
    Denied = 6,
    /// The deadline passed.
    Deadline = 7,
    /// Descriptors did not fit under RLIMIT_NOFILE. Can be retried.
    DescriptorLimit = 8,
    /// A live cache exists but none of its members can be reached.
    Unreachable = 9,
    /// The seat is taken or out of range.
    Seat = 10,
    /// A device refused to register a piece of memory.
    Registration = 11,
    /// A background thread of this component panicked.
    Poisoned = 12,
    /// A forked child used what belongs to its parent.
    Forked = 13,
    /// A slot or offset outside the pool.
    OutOfBounds = 14,
}

/// Numbers of a shortage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// Size of one page of the wanted kind, in bytes.
    pub page_bytes: u64,
    /// Bytes that were wanted.
    pub wanted_bytes: u64,
    /// Bytes that were available at that moment.
    pub available_bytes: u64,
}

/// Error of every fallible call of this crate.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{kind:?}: {message}")]
pub struct DataError {
    kind: ErrorKind,
    message: String,
    shortage: Option<Shortage>,
    errno: Option<i32>,
}

impl DataError {
    /// A new error of this kind. The message names the numbers and the remedy.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), shortage: None, errno: None }
    }

    /// Kind of the failure.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Wanted and available, for [`ErrorKind::Shortage`].
    #[must_use]
    pub fn shortage(&self) -> Option<Shortage> {
        self.shortage
    }

    /// The operating system's error number, if one is behind this.
    #[must_use]
    pub fn errno(&self) -> Option<i32> {
        self.errno
    }

    /// True where the same call may succeed later without anything being reconfigured.
    #[must_use]
    pub fn is_retriable(&self) -> bool {
        matches!(self.kind, ErrorKind::DescriptorLimit | ErrorKind::Deadline)
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Invalid, message)
    }

    pub(crate) fn corrupt(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Corrupt, message)
    }

    pub(crate) fn os(what: impl fmt::Display, errno: rustix::io::Errno) -> Self {
        Self {
            errno: Some(errno.raw_os_error()),
            ..Self::new(ErrorKind::Os, format!("{what}: {errno}"))
        }
    }

    pub(crate) fn with_shortage(mut self, shortage: Shortage) -> Self {
        self.shortage = Some(shortage);
        self
    }

    pub(crate) fn with_errno(mut self, errno: rustix::io::Errno) -> Self {
        self.errno = Some(errno.raw_os_error());
        self
    }
}
