//! The crate's error. A miss, a full cache and a deadline are values, not errors.
//!
//! **Invariant:** every error names the number or the remedy.

use std::io;

use crate::MemberId;

/// What kind of failure this is. Values are stable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A size or count that cannot be served.
    Geometry = 1,
    /// The region is of another layout version.
    Version = 2,
    /// Not a control region, or damaged.
    Corrupt = 3,
    /// No member record is free.
    MembersFull = 4,
    /// This member was removed, poisoned, or is a fork of the real one.
    Fenced = 5,
    /// The operating system refused.
    Os = 6,
    /// An argument out of range.
    Invalid = 7,
}

/// Error of every fallible call of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CtrlError {
    /// A size or count that cannot be served, with the number.
    #[error("bad cache geometry: {0}")]
    Geometry(String),
    /// The region was made by another version of ucm.
    #[error(
        "the control region has layout version {found}, this program speaks version {expected}: \
         run the same version of ucm in all ranks of a node, or use another instance directory"
    )]
    Version {
        /// Version in the region.
        found: u32,
        /// Version of this program.
        expected: u32,
    },
    /// Not a control region, or damaged.
    #[error("the control region is damaged: {0}")]
    Corrupt(String),
    /// No member record is free.
    #[error("all {0} member records are in use: too many ranks and schedulers share this cache")]
    MembersFull(usize),
    /// The wanted member record is in use.
    #[error("member record {0:?} is in use")]
    MemberTaken(MemberId),
    /// This handle may not touch the cache any more.
    #[error("this member may not use the cache any more: {0}")]
    Fenced(&'static str),
    /// The operating system refused.
    #[error("{what}: {source}")]
    Os {
        /// What was tried.
        what: &'static str,
        /// The system's answer.
        source: io::Error,
    },
    /// An argument out of range.
    #[error("{0}")]
    Invalid(String),
}

impl CtrlError {
    /// Kind of the failure.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Geometry(_) => ErrorKind::Geometry,
            Self::Version { .. } => ErrorKind::Version,
            Self::Corrupt(_) => ErrorKind::Corrupt,
            Self::MembersFull(_) | Self::MemberTaken(_) => ErrorKind::MembersFull,
            Self::Fenced(_) => ErrorKind::Fenced,
            Self::Os { .. } => ErrorKind::Os,
            Self::Invalid(_) => ErrorKind::Invalid,
        }
    }

    #[cfg(not(ucm_loom))]
    pub(crate) fn os(what: &'static str, source: rustix::io::Errno) -> Self {
        Self::Os { what, source: source.into() }
    }
}
