//! One mapping of one segment: the only place of this crate that maps, advises and unmaps.
//!
//! **Invariant:** a window covers exactly `len` bytes of a sealed file, is never inherited by a forked
//! child, and is unmapped once, by the process that made it. Memory behind it is reached by raw
//! pointers only: other processes write it at any time.

use std::os::fd::AsFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU8, Ordering};

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::DataError;
use crate::fork::Birthplace;

/// A shared, writable mapping.
#[derive(Debug)]
pub(crate) struct Window {
    base: NonNull<u8>,
    len: usize,
    birthplace: Birthplace,
}

// SAFETY: a window is an address range; every access through it is a raw copy or an atomic, and
// which thread makes it does not matter.
unsafe impl Send for Window {}
// SAFETY: as for Send; `&Window` gives out raw pointers only.
unsafe impl Sync for Window {}

impl Window {
    /// Maps the first `len` bytes of `fd` at an address that is a multiple of `align`.
    pub(crate) fn map(fd: impl AsFd, len: usize, align: usize) -> Result<Self, DataError> {
        let what = || format!("mapping {len} bytes");
        let span = len
            .checked_add(align)
            .ok_or_else(|| DataError::invalid(format!("segment length {len} overflows")))?;
        // Reserve more than needed, then place the file at the aligned address inside.
        // SAFETY: a new private reservation without access; no existing memory is touched.
        let reserved = unsafe {
            let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
            rustix::mm::mmap_anonymous(ptr::null_mut(), span, ProtFlags::empty(), flags)
        }
        .map_err(|e| DataError::os(what(), e))?;
        let lead = reserved.addr().next_multiple_of(align) - reserved.addr();
        let base = reserved.wrapping_byte_add(lead);
        let tail = span - lead - len;
        // Outside of what is kept, give the reservation back.
        unmap(reserved, lead);
        unmap(base.wrapping_byte_add(len), tail);
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: replaces `len` bytes of our own reservation, which nobody else knows.
        let mapped =
            unsafe { rustix::mm::mmap(base, len, prot, MapFlags::SHARED | MapFlags::FIXED, fd, 0) };
        let window = mapped.ok().and_then(|p| NonNull::new(p.cast::<u8>())).map(|base| Self {
            base,
            len,
            birthplace: Birthplace::here(),
        });
        let Some(window) = window else {
            unmap(base, len);
            return Err(DataError::os(what(), mapped.err().unwrap_or(Errno::NOMEM)));
        };
        window.advise(0, len, Advice::LinuxDontFork).map_err(|e| DataError::os("DONTFORK", e))?;
        // A core dump must not contain the whole cache. Old kernels may refuse; harmless.
        let _ = window.advise(0, len, Advice::LinuxDontDump);
        Ok(window)
    }

    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Address of byte `offset`, if `bytes` bytes from there are inside.
    pub(crate) fn at(&self, offset: u64, bytes: usize) -> Option<NonNull<u8>> {
        let offset = usize::try_from(offset).ok()?;
        if offset.checked_add(bytes)? > self.len {
            return None;
        }
        // SAFETY: offset ≤ len, so the result stays inside the mapping or one past its end.
        Some(unsafe { self.base.add(offset) })
    }

    /// Copies into the window. `false` if the range is not inside.
    pub(crate) fn write(&self, offset: u64, src: &[u8]) -> bool {
        let Some(dst) = self.at(offset, src.len()) else { return false };
        // SAFETY: `dst` is valid for `src.len()` bytes of mapped memory and `src` is private memory,
        // so they do not overlap. Who may write when is decided by the control plane; a reader that
        // breaks that rule reads torn bytes, nothing else.
        unsafe { ptr::copy_nonoverlapping(src.as_ptr(), dst.as_ptr(), src.len()) };
        true
    }

    /// Copies out of the window. `false` if the range is not inside.
    pub(crate) fn read(&self, offset: u64, dst: &mut [u8]) -> bool {
        let Some(src) = self.at(offset, dst.len()) else { return false };
        // SAFETY: `src` is valid for `dst.len()` bytes of mapped memory and `dst` is private memory.
        // Bytes may change while they are copied; any byte pattern is a valid `u8`.
        unsafe { ptr::copy_nonoverlapping(src.as_ptr(), dst.as_mut_ptr(), dst.len()) };
        true
    }

    /// Asks for huge pages.
    pub(crate) fn advise_huge(&self) -> Result<(), Errno> {
        self.advise(0, self.len, Advice::LinuxHugepage)
    }

    /// Makes the pages of a range present and writable, changing no byte.
    pub(crate) fn populate(&self, offset: usize, len: usize, page: usize) -> Result<(), DataError> {
        loop {
            match self.advise(offset, len, Advice::LinuxPopulateWrite) {
                Ok(()) => return Ok(()),
                Err(Errno::INTR | Errno::AGAIN) => {}
                // Before Linux 5.14: touch each page instead.
                Err(Errno::INVAL) => {
                    self.touch(offset, len, page);
                    return Ok(());
                }
                Err(e) => {
                    let what = format!("populating {len} bytes at offset {offset}");
                    return Err(DataError::os(what, e));
                }
            }
        }
    }

    /// One atomic write per page that leaves the byte as it was.
    pub(crate) fn touch(&self, offset: usize, len: usize, page: usize) {
        let end = offset.saturating_add(len).min(self.len);
        for at in (offset..end).step_by(page.max(1)) {
            // SAFETY: at < len, so the address is inside the mapping.
            let byte = unsafe { self.base.add(at) };
            // SAFETY: mapped and writable for the life of `self`; used as an atomic only.
            let byte = unsafe { AtomicU8::from_ptr(byte.as_ptr()) };
            byte.fetch_or(0, Ordering::Relaxed);
        }
    }

    /// Binds pages that are not allocated yet.
    pub(crate) fn mbind(&self, mode: i32, nodes: &[u32]) -> Result<(), DataError> {
        let mut mask = vec![0 as libc::c_ulong; 4096 / libc::c_ulong::BITS as usize];
        for &node in nodes {
            if let Some(word) = mask.get_mut((node / libc::c_ulong::BITS) as usize) {
                *word |= 1 << (node % libc::c_ulong::BITS);
            }
        }
        // SAFETY: the range is this mapping, the mask is alive and 4096 bits long; the call reads
        // the mask and changes only the placement of the range.
        let rc = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.base.as_ptr(),
                self.len,
                mode,
                mask.as_ptr(),
                4096 as libc::c_ulong,
                0 as libc::c_uint,
            )
        };
        if rc == 0 {
            return Ok(());
        }
        let errno = Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL);
        Err(DataError::os(format!("mbind of {} bytes to nodes {nodes:?}", self.len), errno))
    }

    fn advise(&self, offset: usize, len: usize, advice: Advice) -> Result<(), Errno> {
        let offset = u64::try_from(offset).map_err(|_| Errno::INVAL)?;
        let at = self.at(offset, len).ok_or(Errno::INVAL)?;
        // SAFETY: the range is inside this mapping, and every advice used in this module keeps its
        // contents.
        unsafe { rustix::mm::madvise(at.as_ptr().cast(), len, advice) }
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // A forked child has no mapping here; the addresses may belong to somebody else there.
        if self.birthplace.is_here() {
            unmap(self.base.as_ptr().cast(), self.len);
        }
    }
}

fn unmap(at: *mut libc::c_void, len: usize) {
    if len == 0 {
        return;
    }
    // SAFETY: callers pass page-aligned ranges of their own mappings which nobody uses any more.
    if let Err(errno) = unsafe { rustix::mm::munmap(at, len) } {
        tracing::error!(%errno, len, "munmap failed; address space is lost");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(len: usize) -> std::os::fd::OwnedFd {
        let fd = rustix::fs::memfd_create("ucm-test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, len as u64).unwrap();
        fd
    }

    #[test]
    fn reads_and_writes_stay_inside_and_keep_alignment() {
        let fd = memory(8192);
        let window = Window::map(&fd, 8192, 2 << 20).unwrap();
        assert_eq!(window.base().addr().get() % (2 << 20), 0);
        assert!(window.write(8190, &[7, 8]));
        assert!(!window.write(8191, &[7, 8]));
        assert!(!window.write(u64::MAX, &[7]));
        let mut out = [0; 2];
        assert!(window.read(8190, &mut out));
        assert_eq!(out, [7, 8]);
        assert!(!window.read(8192, &mut out));
    }

    #[test]
    fn touching_changes_no_byte() {
        let fd = memory(3 * 4096);
        let window = Window::map(&fd, 3 * 4096, 4096).unwrap();
        assert!(window.write(4096, &[0xA5]));
        window.touch(0, 3 * 4096, 4096);
        window.populate(0, 3 * 4096, 4096).unwrap();
        let mut out = [0; 1];
        assert!(window.read(4096, &mut out));
        assert_eq!(out, [0xA5]);
    }

    #[test]
    fn mbind_to_node_0_is_accepted_and_an_absent_node_refused() {
        let fd = memory(1 << 20);
        let window = Window::map(&fd, 1 << 20, 4096).unwrap();
        match window.mbind(libc::MPOL_BIND, &[0]) {
            Ok(()) => assert!(window.mbind(libc::MPOL_BIND, &[4000]).is_err()),
            // A kernel without NUMA support.
            Err(e) => assert_eq!(e.errno(), Some(libc::ENOSYS), "{e}"),
        }
    }
}
