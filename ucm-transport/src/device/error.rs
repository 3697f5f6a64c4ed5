//! What a driver call answers when it fails.
//!
//! **Invariant:** the number is the driver's own; what the engine may conclude from it is decided in
//! one place, [`Class::of`].

use crate::{ErrorKind, TransferError};

/// Result of a driver call.
pub(super) type Call<T> = Result<T, DriverError>;

/// What may be concluded from a failed call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    /// The memory, or a part of it, is pinned already.
    AlreadyPinned,
    /// This driver, device or kind of memory cannot do it.
    NotSupported,
    /// The device or its context is gone: no later call can succeed, and nothing proves that copies
    /// in flight have ended.
    Lost,
    /// Anything else; the next call may work.
    Other,
}

impl Class {
    /// The numbers of CUDA and HIP agree in all of these.
    fn of(code: i32) -> Self {
        match code {
            712 => Self::AlreadyPinned,
            801 => Self::NotSupported,
            // Deinitialised, uncorrectable memory or link error, device unavailable, context
            // destroyed, and everything that kills a context: bad address, timeout, bad
            // instruction, failed launch.
            4 | 46 | 214 | 220 | 700 | 702 | 709 | 710 | 714..=719 => Self::Lost,
            _ => Self::Other,
        }
    }
}

/// A failed driver call.
#[derive(Clone, Debug)]
pub(super) struct DriverError {
    pub(super) call: &'static str,
    pub(super) code: i32,
    /// The driver's name of the error.
    pub(super) name: String,
    pub(super) class: Class,
}

impl DriverError {
    pub(super) fn new(call: &'static str, code: i32, name: impl Into<String>) -> Self {
        Self { call, code, name: name.into(), class: Class::of(code) }
    }

    /// The driver has no such function.
    pub(super) fn missing(call: &'static str) -> Self {
        Self { call, code: 801, name: "not in this driver".into(), class: Class::NotSupported }
    }

    /// What the driver answered makes no sense.
    pub(super) fn nonsense(call: &'static str, what: impl Into<String>) -> Self {
        Self { call, code: -1, name: what.into(), class: Class::Other }
    }

    /// The process was forked after the device was opened.
    pub(super) fn forked() -> Self {
        Self {
            call: "fork",
            code: -1,
            name: "a device cannot be used in a forked child; open it there".into(),
            class: Class::Lost,
        }
    }

    pub(super) fn into_transfer(self, kind: ErrorKind) -> TransferError {
        let kind = match self.class {
            Class::Lost => ErrorKind::Poisoned,
            Class::NotSupported => ErrorKind::Unsupported,
            Class::AlreadyPinned | Class::Other => kind,
        };
        TransferError::new(kind, self.to_string())
    }
}

impl std::fmt::Display for DriverError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} answered {} ({})", self.call, self.code, self.name)
    }
}
