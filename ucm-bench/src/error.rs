//! What can end a benchmark early.
//!
//! Owns: the error type and the exit codes.
//! **Invariant:** each kind has one exit code, and they never change meaning.

use std::{io, path::Path};

/// Exit codes of `ucm-bench`.
pub mod exit_code {
    /// Everything was done.
    pub const DONE: u8 = 0;
    /// An `--assert` did not hold.
    pub const ASSERTION: u8 = 1;
    /// The command line is wrong.
    pub const USAGE: u8 = 2;
    /// Something the workload needs is not there.
    pub const ENVIRONMENT: u8 = 3;
    /// Input, output or another process failed.
    pub const IO: u8 = 4;
    /// Bytes differ from what was written.
    pub const WRONG_BYTES: u8 = 5;
}

/// Why a benchmark could not finish, or finished badly.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BenchError {
    /// One or more `--assert` did not hold; the text names field, value and bound.
    #[error("{0}")]
    Assertion(String),
    /// The command line asks for something impossible.
    #[error("{0}")]
    Usage(String),
    /// Something is missing on this machine; the text says what to do.
    #[error("{0}")]
    Environment(String),
    /// Input or output failed.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// What the system said.
        source: io::Error,
    },
    /// Another process failed or sent nonsense.
    #[error("{0}")]
    Peer(String),
    /// Verification found bytes that differ.
    #[error("{count} wrong bytes; first: {first}")]
    WrongBytes {
        /// How many bytes differ.
        count: u64,
        /// Where the first one was, and where its value came from.
        first: String,
    },
}

impl BenchError {
    /// An IO error with what was tried, for example ``read `file` ``.
    pub fn io(what: impl Into<String>, source: io::Error) -> Self {
        Self::Io { what: what.into(), source }
    }

    /// An IO error on a path.
    pub fn path(verb: &str, path: &Path, source: io::Error) -> Self {
        Self::io(format!("cannot {verb} {}", path.display()), source)
    }

    /// The exit code of the process, see [`exit_code`].
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Assertion(_) => exit_code::ASSERTION,
            Self::Usage(_) => exit_code::USAGE,
            Self::Environment(_) => exit_code::ENVIRONMENT,
            Self::Io { .. } | Self::Peer(_) => exit_code::IO,
            Self::WrongBytes { .. } => exit_code::WRONG_BYTES,
        }
    }
}
