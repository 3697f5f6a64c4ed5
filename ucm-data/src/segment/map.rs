//! Mapped segments: from slot numbers to addresses and bytes.
//!
//! **Invariant:** every address handed out lies inside a mapping that lives as long as the `Mapped`;
//! a slot never reaches into its neighbour.

use std::ptr::NonNull;

use crate::fork::Birthplace;
use crate::segment::Segments;
use crate::segment::geometry::{Addressing, Geometry, SlotAddr};
use crate::segment::tier::PageTier;
use crate::segment::window::Window;
use crate::{DataError, ErrorKind};

/// A pool mapped into this process.
///
/// Thread-safe. Other processes write the same memory: which slot may be read or written when is
/// decided by the control plane, not here. After `fork`, the child has no mapping: its calls answer
/// `None` or `Forked`.
#[derive(Debug)]
pub struct Mapped {
    addressing: Addressing,
    slot_bytes: usize,
    windows: Vec<Window>,
    segments: Segments,
    birthplace: Birthplace,
}

impl Mapped {
    pub(crate) fn new(segments: Segments) -> Result<Self, DataError> {
        let geometry = segments.geometry();
        let mut windows = Vec::with_capacity(geometry.segments().len());
        for (info, fd) in geometry.segments().iter().zip(segments.fds()) {
            let overflow = || DataError::invalid(format!("segment of {} bytes", info.bytes));
            let len = usize::try_from(info.bytes).map_err(|_| overflow())?;
            let align = usize::try_from(info.tier.page_bytes()).map_err(|_| overflow())?;
            let window = Window::map(fd, len, align)?;
            if info.tier == PageTier::Transparent {
                window.advise_huge().map_err(|e| DataError::os("asking for huge pages", e))?;
            }
            windows.push(window);
        }
        let slot_bytes = usize::try_from(geometry.slot_bytes())
            .map_err(|_| DataError::invalid("slot does not fit the address space"))?;
        Ok(Self {
            addressing: geometry.addressing(),
            slot_bytes,
            windows,
            birthplace: Birthplace::here(),
            segments,
        })
    }

    /// Geometry of the pool.
    #[must_use]
    pub fn geometry(&self) -> &Geometry {
        self.segments.geometry()
    }

    /// The segments behind the mapping.
    #[must_use]
    pub fn segments(&self) -> &Segments {
        &self.segments
    }

    /// Where a slot lies; `None` past the last one.
    #[inline]
    #[must_use]
    pub fn slot(&self, slot: u32) -> Option<SlotAddr> {
        self.addressing.locate(slot)
    }

    /// Address of a slot's first byte, valid for `slot_bytes` bytes while `self` lives; `None` past
    /// the last slot and in a forked child.
    #[inline]
    #[must_use]
    pub fn slot_ptr(&self, slot: u32) -> Option<NonNull<u8>> {
        if !self.birthplace.is_here_fast() {
            return None;
        }
        let at = self.slot(slot)?;
        self.windows.get(at.segment as usize)?.at(at.offset, self.slot_bytes)
    }

    /// Address and length of a whole segment.
    #[must_use]
    pub fn segment_range(&self, segment: u32) -> Option<(NonNull<u8>, usize)> {
        if !self.birthplace.is_here_fast() {
            return None;
        }
        self.windows.get(segment as usize).map(|w| (w.base(), w.len()))
    }

    /// Copies `src` into a slot, from byte `offset` on.
    ///
    /// # Errors
    /// `OutOfBounds` if the range is not inside the slot, `Forked` in a forked child.
    pub fn write(&self, slot: u32, offset: u64, src: &[u8]) -> Result<(), DataError> {
        let (window, at) = self.inside(slot, offset, src.len())?;
        if window.write(at, src) { Ok(()) } else { Err(self.outside(slot, offset, src.len())) }
    }

    /// Copies bytes of a slot, from byte `offset` on, into `dst`.
    ///
    /// # Errors
    /// `OutOfBounds` if the range is not inside the slot, `Forked` in a forked child.
    pub fn read(&self, slot: u32, offset: u64, dst: &mut [u8]) -> Result<(), DataError> {
        let (window, at) = self.inside(slot, offset, dst.len())?;
        if window.read(at, dst) { Ok(()) } else { Err(self.outside(slot, offset, dst.len())) }
    }

    pub(crate) fn windows(&self) -> &[Window] {
        &self.windows
    }

    pub(crate) fn birthplace(&self) -> Birthplace {
        self.birthplace
    }

    fn inside(&self, slot: u32, offset: u64, len: usize) -> Result<(&Window, u64), DataError> {
        self.birthplace.check()?;
        let fits = usize::try_from(offset)
            .ok()
            .and_then(|offset| offset.checked_add(len))
            .is_some_and(|end| end <= self.slot_bytes);
        let found = self.slot(slot).filter(|_| fits).and_then(|at| {
            Some((self.windows.get(at.segment as usize)?, at.offset.checked_add(offset)?))
        });
        found.ok_or_else(|| self.outside(slot, offset, len))
    }

    fn outside(&self, slot: u32, offset: u64, len: usize) -> DataError {
        DataError::new(
            ErrorKind::OutOfBounds,
            format!(
                "{len} bytes at offset {offset} of slot {slot}; the pool has {} slots of {} bytes",
                self.geometry().slots(),
                self.slot_bytes
            ),
        )
    }
}
