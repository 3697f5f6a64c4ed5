//! From a range of an object to the pieces of pages it lies on.
//!
//! **Invariant:** a range is checked as a whole, in 64-bit checked arithmetic, before the first
//! fragment is emitted; fragments follow each other without gap and together are the range.

use std::ops::ControlFlow;

use ucm_transport::Addr;

use crate::{ByteRange, PageList};

/// A part of a range that lies on one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fragment {
    /// Which page of the list.
    pub page: usize,
    /// Its first byte, as the medium's engine names it.
    pub addr: Addr,
    /// Bytes, never zero.
    pub len: u64,
    /// Bytes of the range before this fragment.
    pub before: u64,
}

/// Why a range cannot be walked. Nothing was emitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WalkError {
    /// The range has no bytes.
    #[error("the range at byte {offset} has no bytes")]
    Empty {
        /// Where.
        offset: u64,
    },
    /// Pages have no bytes.
    #[error("pages of zero bytes")]
    NoPageSize,
    /// There are no pages.
    #[error("no pages")]
    NoPages,
    /// The object has no bytes.
    #[error("an object of zero bytes")]
    EmptyObject,
    /// The object does not fit its pages exactly.
    #[error("{have} pages where {want} of {page_bytes} bytes hold an object of {object} bytes")]
    PageCount {
        /// Pages given.
        have: usize,
        /// Pages the object takes.
        want: u64,
        /// Bytes of a page.
        page_bytes: u64,
        /// Bytes of the object.
        object: u64,
    },
    /// The range leaves the object.
    #[error("{len} bytes from {offset} leave an object of {object} bytes")]
    Outside {
        /// Where it begins.
        offset: u64,
        /// How long it is.
        len: u64,
        /// Bytes of the object.
        object: u64,
    },
    /// A page reaches beyond what 64 bits can name.
    #[error("page {page} at offset {offset} ends beyond 64 bits")]
    Address {
        /// Which page of the list.
        page: usize,
        /// Its first byte.
        offset: u64,
    },
}

/// Emits the fragments of a range, in order, until `emit` breaks. Neighbours on consecutive pages are
/// not merged: that is the transfer planner's work.
///
/// # Errors
/// See [`WalkError`]; nothing was emitted.
pub fn walk<B>(
    list: &PageList,
    range: ByteRange,
    mut emit: impl FnMut(Fragment) -> ControlFlow<B>,
) -> Result<ControlFlow<B>, WalkError> {
    let touched = check(list, range)?;
    let (mut inside, mut before) = (range.offset % list.page_bytes, 0);
    for page in touched {
        let Some(at) = list.pages.get(page) else { break };
        let len = (list.page_bytes - inside).min(range.len - before);
        let addr = Addr { region: at.region, offset: at.offset.saturating_add(inside) };
        if let ControlFlow::Break(why) = emit(Fragment { page, addr, len, before }) {
            return Ok(ControlFlow::Break(why));
        }
        before += len;
        inside = 0;
    }
    Ok(ControlFlow::Continue(()))
}

/// The pages that a good range touches.
fn check(list: &PageList, range: ByteRange) -> Result<std::ops::RangeInclusive<usize>, WalkError> {
    let ByteRange { offset, len } = range;
    let (page_bytes, object) = (list.page_bytes, list.len);
    if len == 0 {
        return Err(WalkError::Empty { offset });
    }
    if page_bytes == 0 {
        return Err(WalkError::NoPageSize);
    }
    if list.pages.is_empty() {
        return Err(WalkError::NoPages);
    }
    if object == 0 {
        return Err(WalkError::EmptyObject);
    }
    let (have, want) = (list.pages.len(), object.div_ceil(page_bytes));
    if u64::try_from(have) != Ok(want) {
        return Err(WalkError::PageCount { have, want, page_bytes, object });
    }
    let outside = WalkError::Outside { offset, len, object };
    let last = range.end().filter(|end| *end <= object).ok_or(outside)? - 1;
    let index = |byte: u64| usize::try_from(byte / page_bytes).map_err(|_| outside);
    let touched = index(offset)?..=index(last)?;
    for page in touched.clone() {
        let Some(at) = list.pages.get(page) else { return Err(outside) };
        let start = u64::try_from(page).unwrap_or(u64::MAX).saturating_mul(page_bytes);
        let used = page_bytes.min(object.saturating_sub(start));
        if at.offset.checked_add(used).is_none() {
            return Err(WalkError::Address { page, offset: at.offset });
        }
    }
    Ok(touched)
}
