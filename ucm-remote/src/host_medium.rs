//! A medium together with the memory that its pages lie in.
//!
//! **Invariant:** the region of a page's address is the number of its segment here, with generation 0;
//! every engine that is to reach the pages registers the segments for itself.

use std::{fmt, sync::Arc};

use ucm_data::Segments;
use ucm_transport::{Addr, Memory, RegionId};

use crate::{PagedError, PagedLimits, PagedMedium, Segment};

/// The address of a byte of a segment.
pub(crate) fn segment(index: u32, offset: u64) -> Addr {
    Addr { region: RegionId { index, generation: 0 }, offset }
}

/// Host memory that keeps objects, and can be served. Cheap to clone.
#[derive(Clone)]
pub struct HostMedium {
    segments: Arc<[Memory]>,
    medium: Arc<PagedMedium>,
    shared: Option<Segments>,
}

impl HostMedium {
    /// Cuts all of these segments into pages.
    ///
    /// # Errors
    /// As [`PagedMedium::new`].
    pub fn new(segments: Vec<Memory>, limits: PagedLimits) -> Result<Self, PagedError> {
        let named: Vec<Segment> = (0..)
            .zip(&segments)
            .map(|(index, memory)| Segment {
                region: segment(index, 0).region,
                offset: 0,
                bytes: memory.len() as u64,
            })
            .collect();
        let medium = Arc::new(PagedMedium::new(&named, limits)?);
        Ok(Self { segments: segments.into(), medium, shared: None })
    }

    /// As [`new`](Self::new), of memory that ranks in other processes can map.
    ///
    /// # Errors
    /// As [`new`](Self::new), and `Mapping` when it cannot be mapped here.
    pub fn shared(segments: &Segments, limits: PagedLimits) -> Result<Self, PagedError> {
        let memory = Memory::of_segments(segments)
            .map_err(|error| PagedError::Mapping(error.to_string()))?;
        Ok(Self { shared: Some(segments.clone()), ..Self::new(memory, limits)? })
    }

    pub(crate) fn shared_segments(&self) -> Option<&Segments> {
        self.shared.as_ref()
    }

    /// Its bookkeeping.
    #[must_use]
    pub fn medium(&self) -> &Arc<PagedMedium> {
        &self.medium
    }

    /// Its memory, by segment.
    #[must_use]
    pub fn segments(&self) -> &[Memory] {
        &self.segments
    }

    /// The memory of an address.
    pub(crate) fn memory(&self, addr: Addr) -> Option<&Memory> {
        let index = usize::try_from(addr.region.index).ok()?;
        self.segments.get(index).filter(|_| addr.region.generation == 0)
    }
}

impl fmt::Debug for HostMedium {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostMedium")
            .field("segments", &self.segments.len())
            .field("usage", &crate::Medium::usage(&*self.medium))
            .finish_non_exhaustive()
    }
}
