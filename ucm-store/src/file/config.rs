//! Settings of the file backend.
//!
//! **Invariant:** what cannot work is refused when the backend is opened, not later.

use std::{fmt, os::fd::OwnedFd, path::PathBuf, sync::Arc, time::Duration};

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

/// How bytes go to and from files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum FileIo {
    /// The best that works here: past the page cache through io_uring, else by threads, else
    /// through the page cache.
    #[default]
    Auto,
    /// Past the page cache if that works here, by threads.
    Threads,
    /// Through the page cache, by threads: for objects that fit there.
    Buffered,
}

/// Whose the memory of loads is. A device may write into it for a moment after this process died
/// ([`Backend`](crate::Backend)), which must not meet another process's bytes.
#[derive(Clone, Default)]
#[non_exhaustive]
pub enum MemoryOwner {
    /// Others may take it over when this process dies: rings read into memory of the backend, which
    /// is copied; threads read in place on local file systems.
    #[default]
    Shared,
    /// This process's alone: everything is read in place.
    Private,
    /// Others may take it over, but only when nobody holds a lock of this open file (OFD or `flock`)
    /// any more. Every ring keeps the file until its last request is gone; the backend closes its own
    /// descriptor. The caller must close his, too, and no forked child may keep one.
    Locked(Arc<OwnedFd>),
}

impl fmt::Debug for MemoryOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Shared => "Shared",
            Self::Private => "Private",
            Self::Locked(_) => "Locked",
        })
    }
}

/// What was found to work when a [`FileBackend`](crate::FileBackend) was opened.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FileMode {
    /// Rings that read; 0: threads read.
    pub rings: usize,
    /// Whether the page cache is passed by.
    pub direct: bool,
    /// Whether loads are read straight into their memory (if that is aligned).
    pub in_place: bool,
    /// What addresses in memory must be multiples of to be read or written in place, in bytes.
    pub align: usize,
    /// What was asked for or tried and does not work here, with the system's answers.
    pub missing: Vec<String>,
}

impl fmt::Display for FileMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.rings > 0 { "file: io_uring" } else { "file: threads" })?;
        f.write_str(if self.direct { ", direct" } else { ", buffered" })?;
        f.write_str(if self.in_place { ", in place" } else { ", copied" })
    }
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
    /// How bytes go to and from files. Default `Auto`.
    pub io: FileIo,
    /// Rings, each with a thread; at least one. Default: one for four cores, four at most.
    pub rings: usize,
    /// Reads in flight in each ring, 1 to 4096. Default 32.
    pub depth: usize,
    /// Whose the memory of loads is. Default `Shared`.
    pub memory: MemoryOwner,
    /// When dumps are on the device. Default `None`.
    pub durability: Durability,
    /// Objects of fewer bytes are packed, many in one file; 0: none. Default 131,072.
    pub packed_below: usize,
    /// Bytes after which another file is begun for packed objects, 1 MiB to 256 GiB. Default 64 MiB.
    pub segment_bytes: u64,
    /// Bytes that this namespace may take on its file system, as allocated there; 0: no limit. Above
    /// it, what was used longest ago goes, down to nine tenths. Each process may exceed it by a
    /// sixty-fourth until it notices. Default 0.
    pub quota_bytes: u64,
    /// How long a call may take before the device counts as not answering. Default 10 s.
    pub stall_after: Duration,
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
            io: FileIo::default(),
            rings: std::thread::available_parallelism().map_or(1, |n| n.get().div_ceil(4).min(4)),
            depth: 32,
            memory: MemoryOwner::default(),
            durability: Durability::default(),
            packed_below: 128 << 10,
            segment_bytes: 64 << 20,
            quota_bytes: 0,
            stall_after: Duration::from_secs(10),
            quarantine_files: 64,
        }
    }

    /// Sets the number of threads.
    #[must_use]
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = threads;
        self
    }

    /// Sets how bytes go to and from files.
    #[must_use]
    pub fn io(mut self, io: FileIo) -> Self {
        self.io = io;
        self
    }

    /// Sets the number of rings.
    #[must_use]
    pub fn rings(mut self, rings: usize) -> Self {
        self.rings = rings;
        self
    }

    /// Sets the reads in flight in each ring.
    #[must_use]
    pub fn depth(mut self, depth: usize) -> Self {
        self.depth = depth;
        self
    }

    /// Says whose the memory of loads is.
    #[must_use]
    pub fn memory(mut self, memory: MemoryOwner) -> Self {
        self.memory = memory;
        self
    }

    /// Sets the durability.
    #[must_use]
    pub fn durability(mut self, durability: Durability) -> Self {
        self.durability = durability;
        self
    }

    /// Sets below how many bytes objects are packed.
    #[must_use]
    pub fn packed_below(mut self, bytes: usize) -> Self {
        self.packed_below = bytes;
        self
    }

    /// Sets after how many bytes another file is begun for packed objects.
    #[must_use]
    pub fn segment_bytes(mut self, bytes: u64) -> Self {
        self.segment_bytes = bytes;
        self
    }

    /// Sets the quota.
    #[must_use]
    pub fn quota_bytes(mut self, bytes: u64) -> Self {
        self.quota_bytes = bytes;
        self
    }

    /// Sets after what time a device counts as not answering.
    #[must_use]
    pub fn stall_after(mut self, time: Duration) -> Self {
        self.stall_after = time;
        self
    }

    /// Sets how many corrupt objects are kept aside.
    #[must_use]
    pub fn quarantine_files(mut self, files: usize) -> Self {
        self.quarantine_files = files;
        self
    }
}
