//! Aligned memory of this process for headers, last blocks, and what cannot be read in place.
//!
//! **Invariant:** a buffer is given out to one owner at a time, and what is kept for reuse is
//! bounded; its content is whatever was in it.

use std::{
    mem,
    ptr::NonNull,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use super::sys::RawSpan;
use crate::{StoreError, raw::Pages};

/// Bytes kept for reuse.
const KEPT_BYTES: usize = 64 << 20;
/// Lengths are rounded up to this.
const PAGE: usize = 4096;

/// Buffers for reuse.
#[derive(Clone, Debug, Default)]
pub(super) struct Buffers(Arc<Mutex<Free>>);

#[derive(Debug, Default)]
struct Free {
    buffers: Vec<(usize, Pages)>,
    bytes: usize,
}

/// Memory of this process; goes back to where it came from when it is dropped.
#[derive(Debug)]
pub(super) struct Buffer {
    pages: Option<Pages>,
    len: usize,
    home: Buffers,
}

impl Buffers {
    /// At least `len` bytes, aligned to 4096.
    pub(super) fn take(&self, len: usize) -> Result<Buffer, StoreError> {
        let len = len.max(1).checked_next_multiple_of(PAGE).unwrap_or(usize::MAX);
        let mut free = self.lock();
        let fits = free.buffers.iter().rposition(|(has, _)| (len..=len * 2).contains(has));
        if let Some(at) = fits {
            let (has, pages) = free.buffers.swap_remove(at);
            free.bytes -= has;
            return Ok(Buffer { pages: Some(pages), len: has, home: self.clone() });
        }
        drop(free);
        Ok(Buffer { pages: Some(Pages::new(len)?), len, home: self.clone() })
    }

    fn lock(&self) -> MutexGuard<'_, Free> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Buffer {
    /// The part from `start` on of this length, cut to the buffer.
    pub(super) fn span(&mut self, start: usize, len: usize) -> RawSpan {
        let start = start.min(self.len);
        let len = len.min(self.len - start);
        // SAFETY: start <= length of the pages.
        let base = unsafe { self.base().add(start) };
        // SAFETY: inside the pages, which live as long as the buffer; only transfers that its owner
        // started use the span, and the owner looks at the bytes between transfers only.
        unsafe { RawSpan::new(base, len) }
    }

    /// All bytes. No transfer is on its way.
    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: initialised when allocated, owned by this value alone; transfers are over.
        unsafe { std::slice::from_raw_parts(self.base().as_ptr(), self.len) }
    }

    /// All bytes, to be written. No transfer is on its way.
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.base().as_ptr(), self.len) }
    }

    fn base(&self) -> NonNull<u8> {
        self.pages.as_ref().map_or_else(NonNull::dangling, Pages::base)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let Some(pages) = mem::take(&mut self.pages) else { return };
        let mut free = self.home.lock();
        if free.bytes + self.len <= KEPT_BYTES {
            free.bytes += self.len;
            free.buffers.push((self.len, pages));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_come_back_and_what_is_kept_is_bounded() {
        let home = Buffers::default();
        let mut one = home.take(1).unwrap();
        one.bytes_mut()[4095] = 7;
        let base = one.base();
        assert_eq!((one.bytes().len(), base.as_ptr().align_offset(4096)), (4096, 0));
        drop(one);
        assert_eq!(home.take(4000).unwrap().base(), base);
        assert_ne!(home.take(100_000).unwrap().base(), base);
        let many: Vec<_> = (0..5).map(|_| home.take(20 << 20).unwrap()).collect();
        drop(many);
        let free = home.lock();
        assert_eq!(free.buffers.iter().map(|(len, _)| len).sum::<usize>(), free.bytes);
        assert!(free.bytes <= KEPT_BYTES && free.buffers.len() > 3);
    }
}
