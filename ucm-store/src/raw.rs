//! Raw access to the memory of operations, and private memory of the crate.
//!
//! **Invariant:** bytes that another process may write are only copied, never borrowed; everything
//! else works on the copy.

use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    ptr::NonNull,
    sync::Arc,
};

use crate::{ErrorKind, IoMemory, StoreError};

/// A copy of all bytes of an operation.
pub(crate) fn snapshot(memory: &IoMemory) -> Arc<[u8]> {
    let mut copy = Arc::<[u8]>::new_uninit_slice(memory.len());
    if let Some(into) = Arc::get_mut(&mut copy) {
        let into = into.as_mut_ptr().cast::<u8>();
        // SAFETY: the source is valid for its length (`IoMemory::from_raw`), the target is a fresh
        // allocation of the same length.
        unsafe { std::ptr::copy_nonoverlapping(memory.as_ptr().as_ptr(), into, memory.len()) };
    }
    // SAFETY: a fresh `Arc` is unique, so all bytes were written just now.
    unsafe { copy.assume_init() }
}

/// Memory that lends out bytes of this process, to be dumped: nobody writes them.
pub(crate) fn lend(bytes: Arc<[u8]>) -> IoMemory {
    let (base, len) = (NonNull::from(&*bytes).cast(), bytes.len());
    // SAFETY: the bytes live as long as the hold; dumps only read their memory.
    unsafe { IoMemory::from_raw(base, len, Box::new(bytes)) }
}

/// Zeroed pages on the heap.
#[derive(Debug)]
pub(crate) struct Pages {
    base: NonNull<u8>,
    layout: Layout,
}

// SAFETY: plain heap memory, freed once by its only owner.
unsafe impl Send for Pages {}

impl Pages {
    pub(crate) fn new(len: usize) -> Result<Self, StoreError> {
        let layout =
            Layout::from_size_align(len, 4096).ok().filter(|l| l.size() > 0).ok_or_else(|| {
                StoreError::new(
                    ErrorKind::Invalid,
                    format!("cannot allocate a buffer of {len} bytes"),
                )
            })?;
        // SAFETY: the layout has a non-zero size.
        let base = unsafe { alloc_zeroed(layout) };
        let base = NonNull::new(base).ok_or_else(|| {
            StoreError::new(ErrorKind::NoSpace, format!("no memory for a buffer of {len} bytes"))
        })?;
        Ok(Self { base, layout })
    }

    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with exactly this layout, freed only here.
        unsafe { dealloc(self.base.as_ptr(), self.layout) }
    }
}
