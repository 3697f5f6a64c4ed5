//! Memory that keeps objects on pages.
//!
//! **Invariant:** a medium decides alone what lies where. Pages of a pending object are reused only
//! when its write has provably ended, pages of a committed one only when its last lease has.

use std::{fmt, time::Instant};

use ucm_transport::Addr;

use crate::{ByteRange, Generation, ObjectKey, PutOutcome, RemoveOutcome};

/// Pages of one object, in the order of its bytes. They need not follow each other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PageList {
    /// First byte of each page, as the transfer engine of the medium names it.
    pub pages: Vec<Addr>,
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Bytes of the object; the last page may be used in part.
    pub len: u64,
}

/// An object that is being written. Not readable; names exactly one allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Pending {
    /// Number of the allocation.
    pub id: u64,
    /// The generation the object will have.
    pub generation: Generation,
}

/// A committed object under a lease.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stored {
    /// Which storing of the key.
    pub generation: Generation,
    /// Where it lies.
    pub pages: PageList,
    /// Names the lease.
    pub lease: u64,
    /// Until when the pages stay, if the lease is not given back before.
    pub until: Instant,
}

impl Stored {
    /// A committed object.
    #[must_use]
    pub fn new(generation: Generation, pages: PageList, lease: u64, until: Instant) -> Self {
        Self { generation, pages, lease, until }
    }
}

/// How full a medium is, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MediumUsage {
    /// All pages.
    pub capacity_bytes: u64,
    /// Pages of committed objects.
    pub committed_bytes: u64,
    /// Pages of pending objects.
    pub pending_bytes: u64,
    /// Pages that wait for the proven end of a write.
    pub quarantine_bytes: u64,
    /// Leases that are out.
    pub leases: u64,
}

/// A page allocator with committed objects. Thread-safe; no call blocks on another process.
pub trait Medium: Send + Sync + fmt::Debug {
    /// Takes pages for an object of `len` bytes, evicting unleased objects if need be. Fails as
    /// `AlreadyExists`, `Conflict`, `TooLarge`, `NoSpace`, or `Busy` while somebody else writes the
    /// key.
    ///
    /// # Errors
    /// Nothing was allocated.
    fn allocate(&self, key: &ObjectKey, len: u64) -> Result<(Pending, PageList), PutOutcome>;

    /// Says that this part of a pending object has been written. `false`, without effect, for an
    /// unknown object, a part outside it, or one that overlaps an earlier part.
    fn written(&self, pending: Pending, range: ByteRange) -> bool;

    /// Makes the object readable, if all of its bytes have been written; else it stays pending
    /// (`Invalid`).
    fn commit(&self, pending: Pending) -> PutOutcome;

    /// Gives the pages back. `write_ended` says that nothing can write them any more; otherwise they
    /// wait in quarantine for [`write_ended`](Self::write_ended).
    fn abort(&self, pending: Pending, write_ended: bool);

    /// Nothing can write the pages of this aborted object any more.
    fn write_ended(&self, pending: Pending);

    /// Finds a committed object and protects it until `until`; `None` is a miss.
    fn lease(&self, key: &ObjectKey, until: Instant) -> Option<Stored>;

    /// Gives a lease back. An unknown or expired one is ignored.
    fn release(&self, lease: u64);

    /// Marks objects as recently used; unknown ones are ignored.
    fn touch(&self, keys: &[ObjectKey]);

    /// Takes an object away from its key.
    fn remove(&self, key: &ObjectKey) -> RemoveOutcome;

    /// How full it is.
    fn usage(&self) -> MediumUsage;
}
