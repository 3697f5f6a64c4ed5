//! Settings of the file backend.
//!
//! **Invariant:** what cannot work is refused when the backend is opened, not later.

use std::path::PathBuf;

/// What survives what.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Durability {
    /// Dumps survive the process, not a crash of the machine.
    #[default]
    None,
    /// As `None`; dropping the backend writes everything to the device.
    OnClose,
    /// A dump ends only when its bytes and its name are on the device.
    Fsync,
}

/// Settings of a [`FileBackend`](crate::FileBackend).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FileConfig {
    /// Directory of the store; created if it is not there. Several processes, and several
    /// namespaces, may share it.
    pub dir: PathBuf,
    /// Everything that determines the bytes of an object besides its key (model, revision, dtype,
    /// layout, …), at most 4008 bytes. Stored with every object and compared on every load.
    pub descriptor: Vec<u8>,
    /// Threads that do the blocking calls; at least one. Default 4.
    pub threads: usize,
    /// When dumps are on the device. Default `None`.
    pub durability: Durability,
    /// Provably corrupt objects are kept aside for inspection, at most this many; more are
    /// deleted. Default 64.
    pub quarantine_files: usize,
}

impl FileConfig {
    /// A store in `dir` for the namespace with this descriptor.
    pub fn new(dir: impl Into<PathBuf>, descriptor: impl Into<Vec<u8>>) -> Self {
        Self {
            dir: dir.into(),
            descriptor: descriptor.into(),
            threads: 4,
            durability: Durability::default(),
            quarantine_files: 64,
        }
    }

    /// Sets the number of threads.
    #[must_use]
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = threads;
        self
    }

    /// Sets the durability.
    #[must_use]
    pub fn durability(mut self, durability: Durability) -> Self {
        self.durability = durability;
        self
    }

    /// Sets how many corrupt objects are kept aside.
    #[must_use]
    pub fn quarantine_files(mut self, files: usize) -> Self {
        self.quarantine_files = files;
        self
    }
}
