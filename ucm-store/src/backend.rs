//! The trait every backend implements.
//!
//! **Invariant:** a backend reports an object as stored or loaded only when it is whole.

use std::{fmt, sync::Arc};

use crate::{Op, StoreError};

/// What a backend says about one object. A hint: only a load proves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Presence {
    /// The object can probably be loaded.
    There,
    /// It is not there.
    Absent,
    /// The backend could not tell (unavailable, failing).
    Unknown,
}

/// What a backend can do, as probed at start.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BackendCapabilities {
    /// Short mode name for reports ("memory", "file: buffered", "file: io_uring, direct").
    pub mode: String,
    /// Operations that make sense in flight at once.
    pub depth: usize,
    /// Whether dumps survive the last process.
    pub durable: bool,
    /// Whether dumps are accepted at all.
    pub writable: bool,
}

impl BackendCapabilities {
    /// Capabilities of a writable backend in this mode.
    pub fn new(mode: impl Into<String>, depth: usize, durable: bool) -> Self {
        Self { mode: mode.into(), depth, durable, writable: true }
    }
}

/// A place that keeps shards beyond the host cache.
///
/// Completion-based: `load` and `dump` return at once, each [`Op`] ends through its sink, in any
/// order, on any thread (also inside the call). An object is (block id, shard index); its exact
/// length is the length of the operation's memory: shorter or longer objects are `Corrupt`.
///
/// # What may write into an operation's memory
/// The memory may be a slot that other processes share. When this process dies, they take the slot as soon
/// as its pidfd says so: nothing that was started here may write into it any more. Calls that a thread of
/// this process waits in are ended by then (`read`, `pread`; with `O_DIRECT` on local file systems). **Not**
/// ended are
///
/// * requests of an io_uring: the kernel takes the ring down later, in a worker of its own;
/// * direct reads over NFS whose thread was killed;
/// * whatever a ring or device does whose descriptor a forked child has inherited.
///
/// A backend that uses these reads into private memory and copies ([`IoMemory::write`](crate::IoMemory::write)),
/// or makes sure that others see proof of the end before they take the slot: a file with an OFD lock that is
/// registered with the ring and closed otherwise loses its lock when the ring is gone. Nobody asks for such
/// a lock yet: copy. Descriptors of rings and devices must not reach forked children.
pub trait Backend: Send + Sync + fmt::Debug {
    /// What this backend can do.
    fn capabilities(&self) -> BackendCapabilities;

    /// Starts reading objects into their memory.
    fn load(&self, ops: Vec<Op>);

    /// Starts storing objects from their memory. `Ok` means: atomically published, whole, at the
    /// backend's durability.
    fn dump(&self, ops: Vec<Op>);

    /// Says for each (block, shard) whether it is there.
    fn contains(&self, keys: &[([u8; 16], u32)]) -> Vec<Presence>;

    /// Refreshes the recency of all shards of these blocks; unknown blocks are ignored.
    ///
    /// # Errors
    /// Counted by the caller, never passed to whoever touched.
    fn touch(&self, blocks: &[[u8; 16]]) -> Result<(), StoreError>;

    /// Removes objects; removing an absent one is `Ok`. One result per key, in order.
    fn remove(&self, keys: &[([u8; 16], u32)]) -> Vec<Result<(), StoreError>>;
}

impl<B: Backend + ?Sized> Backend for Arc<B> {
    fn capabilities(&self) -> BackendCapabilities {
        (**self).capabilities()
    }

    fn load(&self, ops: Vec<Op>) {
        (**self).load(ops);
    }

    fn dump(&self, ops: Vec<Op>) {
        (**self).dump(ops);
    }

    fn contains(&self, keys: &[([u8; 16], u32)]) -> Vec<Presence> {
        (**self).contains(keys)
    }

    fn touch(&self, blocks: &[[u8; 16]]) -> Result<(), StoreError> {
        (**self).touch(blocks)
    }

    fn remove(&self, keys: &[([u8; 16], u32)]) -> Vec<Result<(), StoreError>> {
        (**self).remove(keys)
    }
}
