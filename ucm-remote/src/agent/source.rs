//! Where an object is fetched from: one storing of it, and the way to its bytes.
//!
//! **Invariant:** what was attached or leased for a source is given back when nobody has it any more.

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use ucm_transport::{Addr, RegionId, TcpEngine, TransferEngine as _};

use crate::{Generation, PageList, PeerId, Record, service::Link};

/// One storing of an object, reachable. Cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct Source(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    record: Record,
    link: Link,
    way: Way,
}

#[derive(Debug)]
pub(super) enum Way {
    /// The peer's service sends the bytes.
    Tcp(Attached),
    /// Its pages are mapped here.
    Shm(Mapped),
}

/// A region of the tcp engine.
pub(super) struct Attached {
    pub(super) engine: Arc<TcpEngine>,
    pub(super) region: RegionId,
}

/// Pages of a peer of this node, under its lease.
#[derive(Debug)]
pub(super) struct Mapped {
    /// As our engine names them.
    pub(super) pages: PageList,
    /// Nothing that was copied later is good.
    pub(super) until: Instant,
    pub(super) lease: u64,
    pub(super) ended: Arc<Ended>,
}

/// Leases of others that are to be given back.
#[derive(Debug, Default)]
pub(super) struct Ended(Mutex<Vec<(Link, u64)>>);

impl Source {
    pub(super) fn new(record: Record, link: Link, way: Way) -> Self {
        Self(Arc::new(Inner { record, link, way }))
    }

    pub(super) fn generation(&self) -> Generation {
        self.0.record.generation
    }

    pub(super) fn record(&self) -> &Record {
        &self.0.record
    }

    pub(super) fn peer(&self) -> &PeerId {
        &self.0.record.peer
    }

    pub(super) fn way(&self) -> &Way {
        &self.0.way
    }

    /// Whether both are read in the same way from the same run.
    pub(super) fn is_beside(&self, other: &Self) -> bool {
        let same_way = matches!(
            (self.way(), other.way()),
            (Way::Tcp(_), Way::Tcp(_)) | (Way::Shm(_), Way::Shm(_))
        );
        same_way && self.0.record.boot == other.0.record.boot
    }
}

impl Attached {
    pub(super) fn at(&self, offset: u64) -> Addr {
        Addr { region: self.region, offset }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Way::Shm(mapped) = &self.way {
            mapped.ended.lock().push((self.link.clone(), mapped.lease));
        }
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        // The last plan that used it has ended: plans hold sources.
        if let Err(error) = self.engine.deregister(self.region) {
            tracing::warn!(%error, "a source could not be detached");
        }
    }
}

impl fmt::Debug for Attached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attached").field("region", &self.region).finish_non_exhaustive()
    }
}

impl Ended {
    pub(super) fn take(&self) -> Vec<(Link, u64)> {
        std::mem::take(&mut *self.lock())
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(Link, u64)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
