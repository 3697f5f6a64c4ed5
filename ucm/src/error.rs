//! The facade's error: whichever layer it comes from, with one kind for all.
//!
//! **Invariant:** the numbers of the kinds never change; the cause is kept, never turned into text.

use std::io;

/// What kind of failure this is. Values are stable and are the exit codes of the `ucm` command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The configuration is wrong.
    Config = 2,
    /// The machine lacks something: memory, huge pages, permissions, kernel features.
    Environment = 3,
    /// A device, file or peer failed.
    Io = 4,
    /// Bytes are not what they should be.
    Corrupt = 5,
    /// The cache of this directory is of another version or geometry.
    Incompatible = 6,
    /// This member may not use the cache any more.
    Fenced = 7,
    /// The request makes no sense or cannot be served now.
    Refused = 8,
}

/// Error of every fallible call of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The configuration is wrong; the text names the setting, the value and what is possible.
    #[error("configuration: {0}")]
    Config(String),
    /// The control plane refused.
    #[error(transparent)]
    Control(#[from] ucm_ctrl::CtrlError),
    /// The data plane or the rendezvous refused.
    #[error(transparent)]
    Data(#[from] ucm_data::DataError),
    /// A transfer engine refused.
    #[error(transparent)]
    Transfer(#[from] ucm_transport::TransferError),
    /// A backend refused.
    #[error(transparent)]
    Store(#[from] ucm_store::StoreError),
    /// A queue refused.
    #[error(transparent)]
    Queue(#[from] ucm_queue::QueueError),
    /// The remote pool refused.
    #[error("{what}")]
    Remote {
        /// What kind of failure it is.
        kind: ErrorKind,
        /// What was refused, and what would help.
        what: String,
    },
    /// The operating system refused.
    #[error("{what}: {source}")]
    Os {
        /// What was tried.
        what: String,
        /// The system's answer.
        source: io::Error,
    },
}

impl Error {
    /// Kind of the failure.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        use ucm_ctrl::ErrorKind as Ctrl;
        use ucm_data::ErrorKind as Data;
        match self {
            Self::Config(_) => ErrorKind::Config,
            Self::Control(error) => match error.kind() {
                Ctrl::Geometry => ErrorKind::Config,
                Ctrl::Version => ErrorKind::Incompatible,
                Ctrl::Corrupt => ErrorKind::Corrupt,
                Ctrl::Fenced => ErrorKind::Fenced,
                Ctrl::Os => ErrorKind::Environment,
                _ => ErrorKind::Refused,
            },
            Self::Data(error) => match error.kind() {
                Data::Invalid => ErrorKind::Config,
                Data::Layout => ErrorKind::Incompatible,
                Data::Corrupt => ErrorKind::Corrupt,
                _ => ErrorKind::Environment,
            },
            Self::Transfer(_) | Self::Store(_) | Self::Os { .. } => ErrorKind::Io,
            Self::Queue(_) => ErrorKind::Refused,
            Self::Remote { kind, .. } => *kind,
        }
    }

    pub(crate) fn os(what: impl Into<String>, source: io::Error) -> Self {
        Self::Os { what: what.into(), source }
    }
}
