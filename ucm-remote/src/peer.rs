//! What a peer says of itself.
//!
//! **Invariant:** these are numbers of a moment; nothing is decided by them but where to try first.

use crate::MediumUsage;

/// How a peer's memory is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PeerUsage {
    /// Its medium, in bytes.
    pub medium: MediumUsage,
    /// Committed objects that can be found.
    pub objects: u64,
    /// Objects evicted so far.
    pub evictions: u64,
    /// Bytes of a page.
    pub page_bytes: u64,
}
