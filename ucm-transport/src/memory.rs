//! Memory that engines may be told about, and the handle they give back for it.
//!
//! **Invariant:** a [`Memory`] stays mapped for as long as the value (or a clone) lives; other
//! processes may write it at any time, so it is never lent out as a Rust slice.

use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    any::Any,
    fmt,
    ptr::NonNull,
    sync::Arc,
};

use crate::TransferError;

/// Where bytes live. Travels with every address, so that an engine can choose its path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Location {
    /// Ordinary host memory.
    Host,
    /// Host memory registered (page-locked) with a device driver.
    PinnedHost,
    /// Memory of the CUDA device with this ordinal.
    Cuda(u16),
    /// Memory of the HIP device with this ordinal.
    Hip(u16),
    /// Memory of a remote peer, by the engine's connection index.
    Peer(u32),
}

/// An engine's handle for a registered region: index and generation, so that a stale handle is
/// refused instead of naming a later region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RegionId {
    /// Index in the engine's region table.
    pub index: u32,
    /// Generation of that index; never reused within one engine.
    pub generation: u32,
}

/// A piece of memory that can be registered with an engine.
///
/// Clones share the same bytes and keep them mapped. Thread-safe: all access is by raw copies.
/// Concurrent access to overlapping bytes is a race *of the bytes* (a reader may see a mix), which
/// the layers above exclude by pins and generations.
#[derive(Clone)]
pub struct Memory {
    base: NonNull<u8>,
    len: usize,
    location: Location,
    _keep: Arc<dyn Any + Send + Sync>,
}

// SAFETY: `Memory` is a pointer plus a keep-alive that is itself Send + Sync; the bytes are only
// touched by raw copies, never through references.
unsafe impl Send for Memory {}
// SAFETY: as above; no method hands out a reference to the bytes.
unsafe impl Sync for Memory {}

struct HeapPages {
    ptr: NonNull<u8>,
    layout: Layout,
}

// SAFETY: plain heap memory, freed once by its only owner.
unsafe impl Send for HeapPages {}
// SAFETY: no method reads or writes through a shared reference.
unsafe impl Sync for HeapPages {}

impl Drop for HeapPages {
    fn drop(&mut self) {
        // SAFETY: allocated in `Memory::host` with exactly this layout, freed only here.
        unsafe { dealloc(self.ptr.as_ptr(), self.layout) }
    }
}

impl Memory {
    /// Allocates `len` zeroed bytes of host memory, aligned to 4096 bytes.
    ///
    /// # Errors
    /// [`TransferError`] of kind `Invalid` if `len` is zero or too large for an allocation,
    /// `Registration` if there is no memory.
    pub fn host(len: usize) -> Result<Self, TransferError> {
        let layout =
            Layout::from_size_align(len, 4096).ok().filter(|l| l.size() > 0).ok_or_else(|| {
                TransferError::invalid(format!("cannot allocate a region of {len} bytes"))
            })?;
        // SAFETY: the layout has a non-zero size.
        let raw = unsafe { alloc_zeroed(layout) };
        let ptr = NonNull::new(raw).ok_or_else(|| {
            TransferError::new(
                crate::ErrorKind::Registration,
                format!("no memory for a region of {len} bytes"),
            )
        })?;
        Ok(Self {
            base: ptr,
            len,
            location: Location::Host,
            _keep: Arc::new(HeapPages { ptr, layout }),
        })
    }

    /// Describes memory owned by somebody else.
    ///
    /// # Safety
    /// `base..base+len` must stay valid for reads and writes (for a device location: be a valid
    /// device address range) until `keep` and all its clones are dropped, and no Rust reference to
    /// these bytes may exist in this process meanwhile.
    pub unsafe fn from_raw(
        base: NonNull<u8>,
        len: usize,
        location: Location,
        keep: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        Self { base, len, location, _keep: keep }
    }

    /// A part of this memory, which keeps all of it mapped.
    ///
    /// # Errors
    /// Kind `OutOfBounds` when the range leaves the memory, `Invalid` for zero bytes.
    pub fn part(&self, offset: usize, len: usize) -> Result<Self, TransferError> {
        if len == 0 {
            return Err(TransferError::invalid("a part of zero bytes"));
        }
        match offset.checked_add(len) {
            Some(end) if end <= self.len => {
                // SAFETY: offset <= len of the live mapping.
                let base = unsafe { self.base.add(offset) };
                Ok(Self { base, len, ..self.clone() })
            }
            _ => Err(TransferError::out_of_bounds(offset as u64, len as u64, self.len as u64)),
        }
    }

    /// Names memory that no address of this process reaches.
    #[cfg(feature = "tcp")]
    pub(crate) fn elsewhere(len: usize, location: Location) -> Self {
        Self { base: NonNull::dangling(), len, location, _keep: Arc::new(()) }
    }

    /// The same bytes, under another name for where they live.
    pub(crate) fn at(self, location: Location) -> Self {
        Self { location, ..self }
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True for a region of no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where the bytes live.
    #[must_use]
    pub fn location(&self) -> Location {
        self.location
    }

    /// First byte. Using the pointer is subject to the rules of [`Memory::from_raw`].
    #[must_use]
    pub fn as_ptr(&self) -> NonNull<u8> {
        self.base
    }

    /// Copies bytes out of host memory.
    ///
    /// # Errors
    /// Kind `OutOfBounds` when the range leaves the region, `Unsupported` for device memory.
    pub fn read(&self, offset: usize, into: &mut [u8]) -> Result<(), TransferError> {
        let src = self.host_range(offset, into.len())?;
        // SAFETY: the range was checked to lie inside the live mapping; `into` is exclusive.
        unsafe { std::ptr::copy_nonoverlapping(src.as_ptr(), into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    /// Copies bytes into host memory.
    ///
    /// # Errors
    /// As [`Memory::read`].
    pub fn write(&self, offset: usize, from: &[u8]) -> Result<(), TransferError> {
        let dst = self.host_range(offset, from.len())?;
        // SAFETY: the range was checked to lie inside the live mapping.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), dst.as_ptr(), from.len()) };
        Ok(())
    }

    fn host_range(&self, offset: usize, len: usize) -> Result<NonNull<u8>, TransferError> {
        if !matches!(self.location, Location::Host | Location::PinnedHost) {
            return Err(TransferError::unsupported(format!(
                "{:?} is not host memory",
                self.location
            )));
        }
        match offset.checked_add(len) {
            // SAFETY: offset <= len of the live mapping.
            Some(end) if end <= self.len => Ok(unsafe { self.base.add(offset) }),
            _ => Err(TransferError::out_of_bounds(offset as u64, len as u64, self.len as u64)),
        }
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory")
            .field("len", &self.len)
            .field("location", &self.location)
            .finish_non_exhaustive()
    }
}
