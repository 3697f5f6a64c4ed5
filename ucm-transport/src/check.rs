//! Asking whether a source is still what the caller believes it to be.
//!
//! **Invariant:** a check that has said no never says yes again: generations do not return.

use std::fmt;

use crate::{ErrorKind, TransferError};

/// Binds a transfer to a version of its source (key and generation, a lease).
///
/// Engines that read memory which its owner may rewrite ask before the first byte and after the
/// last: a plan succeeds only if the source was current throughout. Calls are frequent and must not
/// block. Any `Fn() -> bool` is a check.
pub trait SourceCheck: Send + Sync {
    /// Whether the source is still the one that was asked for.
    fn is_current(&self) -> bool;
}

impl<F: Fn() -> bool + Send + Sync> SourceCheck for F {
    fn is_current(&self) -> bool {
        self()
    }
}

impl fmt::Debug for dyn SourceCheck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SourceCheck")
    }
}

impl TransferError {
    pub(crate) fn source_changed() -> Self {
        Self::new(
            ErrorKind::Stale,
            "the source is no longer the generation that was asked for; look it up again",
        )
    }
}
