//! A medium on host segments.
//!
//! **Invariant:** the lock is held for bookkeeping only: no copy, no call to anybody else under it.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use ucm_transport::{Addr, RegionId};

use crate::{
    ByteRange, Generation, Medium, MediumUsage, ObjectKey, PageList, Pending, PutOutcome,
    RemoveOutcome, Stored,
    core::{Change, Shelf, ShelfLimits},
};

/// A registered piece of memory that pages are cut from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// As the medium's engine names it.
    pub region: RegionId,
    /// First byte to be used.
    pub offset: u64,
    /// Bytes to be used; what is left after the last whole page stays unused.
    pub bytes: u64,
}

/// Bounds of a [`PagedMedium`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PagedLimits {
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Pending objects at a time.
    pub pending: usize,
    /// Leases at a time.
    pub leases: usize,
    /// Per mille of all pages that should be free: eviction begins below the first and ends at the
    /// second.
    pub free_permille: (u16, u16),
}

impl PagedLimits {
    /// Pages of so many bytes; 4,096 pending objects, 65,536 leases, eviction only when needed.
    #[must_use]
    pub fn new(page_bytes: u64) -> Self {
        Self { page_bytes, pending: 4096, leases: 65_536, free_permille: (0, 0) }
    }
}

/// Host memory that keeps objects on scattered pages of one size. Thread-safe.
#[derive(Debug)]
pub struct PagedMedium {
    /// First page of each segment, ascending.
    segments: Vec<(u32, Segment)>,
    page_bytes: u64,
    shelf: Mutex<Shelf>,
}

/// Why a medium cannot be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PagedError {
    /// Pages of no bytes.
    #[error("a page must have bytes")]
    NoPageSize,
    /// Not one page.
    #[error(
        "the segments have {bytes} bytes, a page {page_bytes}: not one page; give it more memory"
    )]
    NoPages {
        /// Bytes of all segments.
        bytes: u64,
        /// Bytes of a page.
        page_bytes: u64,
    },
    /// More than 2³² − 1 pages.
    #[error("{pages} pages; a medium has at most {}: take larger pages", u32::MAX)]
    TooMany {
        /// How many there would be.
        pages: u64,
    },
    /// A segment ends beyond 64 bits.
    #[error("segment {0} ends beyond 64 bits")]
    Address(usize),
    /// Its memory cannot be mapped.
    #[error("{0}")]
    Mapping(String),
}

impl PagedMedium {
    /// Cuts segments into pages. The caller keeps their regions registered while the medium lives.
    ///
    /// # Errors
    /// See [`PagedError`].
    pub fn new(segments: &[Segment], limits: PagedLimits) -> Result<Self, PagedError> {
        let page_bytes = limits.page_bytes;
        if page_bytes == 0 {
            return Err(PagedError::NoPageSize);
        }
        let mut firsts = Vec::with_capacity(segments.len());
        let mut total = 0_u64;
        for (index, segment) in segments.iter().enumerate() {
            if segment.offset.checked_add(segment.bytes).is_none() {
                return Err(PagedError::Address(index));
            }
            let first = u32::try_from(total).map_err(|_| PagedError::TooMany { pages: total })?;
            firsts.push((first, *segment));
            total = total.saturating_add(segment.bytes / page_bytes);
        }
        let pages = u32::try_from(total).map_err(|_| PagedError::TooMany { pages: total })?;
        if pages == 0 {
            let bytes = segments.iter().fold(0_u64, |sum, s| sum.saturating_add(s.bytes));
            return Err(PagedError::NoPages { bytes, page_bytes });
        }
        let share = |permille: u16| {
            u32::try_from(u64::from(pages) * u64::from(permille.min(1000)) / 1000).unwrap_or(pages)
        };
        let (high, low) = limits.free_permille;
        let shelf = Shelf::new(ShelfLimits {
            page_bytes,
            pages,
            pending: limits.pending,
            leases: limits.leases,
            watermarks: (share(high), share(low.max(high))),
        });
        Ok(Self { segments: firsts, page_bytes, shelf: Mutex::new(shelf) })
    }

    fn shelf(&self) -> MutexGuard<'_, Shelf> {
        // Nothing panics while it is held.
        self.shelf.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn addr(&self, page: u32) -> Option<Addr> {
        let behind = self.segments.partition_point(|(first, _)| *first <= page);
        let (first, segment) = self.segments.get(behind.checked_sub(1)?)?;
        let offset = segment.offset + u64::from(page - first) * self.page_bytes;
        Some(Addr { region: segment.region, offset })
    }

    fn list(&self, pages: &[u32], len: u64) -> PageList {
        let pages = pages.iter().filter_map(|page| self.addr(*page)).collect();
        PageList { pages, page_bytes: self.page_bytes, len }
    }

    /// What the owner has to announce since the last call.
    pub fn take_changes(&self) -> Vec<Change> {
        self.shelf().take_changes()
    }

    /// All committed objects as if they had just been stored: for a directory that has lost them.
    #[must_use]
    pub fn all_stored(&self) -> Vec<Change> {
        self.shelf()
            .objects()
            .map(|(key, generation, len)| Change::Stored(key, generation, len))
            .collect()
    }

    /// An object's generation and length, if it is committed.
    #[must_use]
    pub fn find(&self, key: &ObjectKey) -> Option<(Generation, u64)> {
        self.shelf().find(key)
    }

    /// Whether somebody writes an object of this key.
    #[must_use]
    pub fn is_writing(&self, key: &ObjectKey) -> bool {
        self.shelf().is_writing(key)
    }

    /// As [`commit`](Medium::commit), with a lease on the object from its first moment.
    ///
    /// # Errors
    /// As [`commit`](Medium::commit).
    pub fn commit_leased(&self, pending: Pending, until: Instant) -> Result<u64, PutOutcome> {
        self.shelf().commit_leased(pending, until)
    }

    /// Bytes of a page.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.page_bytes
    }

    /// Committed objects that can be found.
    #[must_use]
    pub fn objects(&self) -> usize {
        self.shelf().len()
    }

    /// Objects evicted so far.
    #[must_use]
    pub fn evictions(&self) -> u64 {
        self.shelf().evictions()
    }
}

impl Medium for PagedMedium {
    fn allocate(&self, key: &ObjectKey, len: u64) -> Result<(Pending, PageList), PutOutcome> {
        let (pending, pages) = self.shelf().allocate(key, len, Instant::now())?;
        Ok((pending, self.list(&pages, len)))
    }

    fn written(&self, pending: Pending, range: ByteRange) -> bool {
        self.shelf().written(pending, range)
    }

    fn commit(&self, pending: Pending) -> PutOutcome {
        self.shelf().commit(pending)
    }

    fn abort(&self, pending: Pending, write_ended: bool) {
        self.shelf().abort(pending, write_ended);
    }

    fn write_ended(&self, pending: Pending) {
        self.shelf().write_ended(pending);
    }

    fn lease(&self, key: &ObjectKey, until: Instant) -> Option<Stored> {
        let leased = self.shelf().lease(key, until, Instant::now())?;
        let pages = self.list(&leased.pages, leased.len);
        Some(Stored::new(leased.generation, pages, leased.lease, until))
    }

    fn release(&self, lease: u64) {
        self.shelf().release(lease);
    }

    fn touch(&self, keys: &[ObjectKey]) {
        let mut shelf = self.shelf();
        for key in keys {
            shelf.touch(key);
        }
    }

    fn remove(&self, key: &ObjectKey) -> RemoveOutcome {
        self.shelf().remove(key)
    }

    fn usage(&self) -> MediumUsage {
        self.shelf().usage()
    }
}
