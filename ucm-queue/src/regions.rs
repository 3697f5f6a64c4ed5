//! The engine's regions that sources and destinations may name, with their lengths.
//!
//! **Invariant:** a range is admitted only if it lies inside a region listed here at that moment.

use std::{
    collections::HashMap,
    sync::{PoisonError, RwLock},
};

use ucm_transport::RegionId;

use crate::{ErrorKind, QueueError, task::Extent};

/// Lengths by region.
#[derive(Debug, Default)]
pub(crate) struct Regions {
    lens: RwLock<HashMap<RegionId, u64>>,
}

impl Regions {
    pub(crate) fn insert(&self, region: RegionId, len: u64) {
        self.lens.write().unwrap_or_else(PoisonError::into_inner).insert(region, len);
    }

    pub(crate) fn remove(&self, region: RegionId) -> Option<u64> {
        self.lens.write().unwrap_or_else(PoisonError::into_inner).remove(&region)
    }

    /// Checks that every range lies in its region.
    pub(crate) fn check(&self, extents: impl Iterator<Item = Extent>) -> Result<(), QueueError> {
        let lens = self.lens.read().unwrap_or_else(PoisonError::into_inner);
        let mut last: Option<(RegionId, u64)> = None;
        for (addr, len) in extents {
            let region_len = match last {
                Some((region, region_len)) if region == addr.region => region_len,
                _ => *lens.get(&addr.region).ok_or_else(|| unknown(addr.region))?,
            };
            last = Some((addr.region, region_len));
            match addr.offset.checked_add(len) {
                Some(end) if end <= region_len => {}
                _ => return Err(outside(addr.offset, len, region_len)),
            }
        }
        Ok(())
    }
}

fn unknown(region: RegionId) -> QueueError {
    QueueError::new(
        ErrorKind::UnknownRegion,
        format!("{region:?} is not known to this queue: register it with `LoadQueue::register`"),
    )
}

fn outside(offset: u64, len: u64, region: u64) -> QueueError {
    QueueError::new(
        ErrorKind::OutOfBounds,
        format!("{len} bytes at offset {offset} leave a region of {region} bytes"),
    )
}
