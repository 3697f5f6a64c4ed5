//! The barest way to move a file's bytes: a ring, memory, and nothing else. What `ucm-bench file` compares
//! the file backend with.
//!
//! **Invariant:** no checks, no names, no objects: offsets in one file, in order, `depth` at a time. Calls
//! that move fewer bytes than asked for end the measurement.

use std::{
    fs::{File, OpenOptions},
    io,
    os::{fd::AsRawFd, unix::fs::OpenOptionsExt},
    path::Path,
    ptr::NonNull,
    sync::Arc,
};

use io_uring::{IoUring, opcode, types};
use rustix::mm::{MapFlags, ProtFlags};

use crate::IoMemory;

const HUGE: usize = 2 << 20;

/// Pages of this process, huge ones if there are some.
#[derive(Debug)]
pub struct Arena {
    base: NonNull<u8>,
    len: usize,
    huge: bool,
}

// SAFETY: an address of memory that lives as long as the value; it is used through raw copies and calls.
unsafe impl Send for Arena {}
// SAFETY: as above.
unsafe impl Sync for Arena {}

impl Arena {
    /// At least `len` bytes.
    ///
    /// # Errors
    /// The system's, when there is no memory.
    pub fn new(len: usize) -> io::Result<Self> {
        let len = len.max(1).next_multiple_of(HUGE);
        let map = |flags| {
            let rights = ProtFlags::READ | ProtFlags::WRITE;
            let flags = flags | MapFlags::PRIVATE | MapFlags::POPULATE;
            // SAFETY: a new anonymous mapping at an address the kernel chooses.
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, rights, flags) }
        };
        let (base, huge) = match map(MapFlags::HUGETLB) {
            Ok(base) => (base, true),
            Err(_) => (map(MapFlags::empty())?, false),
        };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, len, huge })
    }

    /// Whether it lies in huge pages.
    #[must_use]
    pub fn is_huge(&self) -> bool {
        self.huge
    }

    /// The checksum of a part, as loads that are read in place compute it.
    ///
    /// # Panics
    /// When the part leaves the arena.
    #[must_use]
    pub fn checksum(&self, at: usize, len: usize) -> u64 {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.len), "outside of the arena");
        // SAFETY: at <= len.
        let base = unsafe { self.base.add(at) };
        // SAFETY: inside the mapping, which lives as long as the arena.
        unsafe { crate::xxh3::hash(base, len) }
    }

    /// A part of it as memory of an operation; parts may overlap, and then their bytes are anybody's.
    ///
    /// # Panics
    /// When the part leaves the arena.
    #[must_use]
    pub fn part(this: &Arc<Self>, at: usize, len: usize) -> IoMemory {
        assert!(at.checked_add(len).is_some_and(|end| end <= this.len), "outside of the arena");
        // SAFETY: at <= len.
        let base = unsafe { this.base.add(at) };
        // SAFETY: inside the mapping, which the hold keeps; only raw copies reach it.
        unsafe { IoMemory::from_raw(base, len, Box::new(Arc::clone(this))) }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this length; every part has ended, they hold the arena.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
        if let Err(error) = unmapped {
            tracing::error!(%error, "an arena stays mapped");
        }
    }
}

/// A file that is read and written from front to back.
pub struct BareFile {
    file: File,
    ring: IoUring,
    arena: Arc<Arena>,
    piece: usize,
    pieces: usize,
    registered: bool,
}

impl std::fmt::Debug for BareFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BareFile").field("piece", &self.piece).finish_non_exhaustive()
    }
}

impl BareFile {
    /// Opens or makes a file of `pieces` pieces of `piece` bytes (a multiple of 4096), `depth` of which are
    /// moved at a time. `O_DIRECT`, and registered buffers if they are allowed.
    ///
    /// # Errors
    /// The system's.
    pub fn new(path: &Path, piece: usize, pieces: usize, depth: usize) -> io::Result<Self> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .custom_flags(libc::O_DIRECT)
            .open(path)?;
        let whole = (piece as u64).saturating_mul(pieces as u64);
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, whole)?;
        let arena = Arc::new(Arena::new(piece.saturating_mul(depth))?);
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .build(u32::try_from(depth).unwrap_or(u32::MAX))?;
        let all = libc::iovec { iov_base: arena.base.as_ptr().cast(), iov_len: arena.len };
        // SAFETY: the arena lives as long as the ring.
        let registered = unsafe { ring.submitter().register_buffers(&[all]) }.is_ok();
        Ok(Self { file, ring, arena, piece, pieces, registered })
    }

    /// Whether buffers are registered, and whether they are huge pages.
    #[must_use]
    pub fn memory(&self) -> (bool, bool) {
        (self.registered, self.arena.huge)
    }

    /// Reads everything once.
    ///
    /// # Errors
    /// The system's, or a short read.
    pub fn read_all(&mut self) -> io::Result<()> {
        self.move_all(false)
    }

    /// Writes everything once.
    ///
    /// # Errors
    /// The system's, or a short write.
    pub fn write_all(&mut self) -> io::Result<()> {
        self.move_all(true)
    }

    fn move_all(&mut self, write: bool) -> io::Result<()> {
        let depth = (self.arena.len / self.piece).min(self.ring.params().sq_entries() as usize);
        let mut free: Vec<usize> = (0..depth).collect();
        let (mut next, mut done, mut failed) = (0, 0, None);
        while done < next || (next < self.pieces && failed.is_none()) {
            while next < self.pieces
                && failed.is_none()
                && let Some(slot) = free.pop()
            {
                self.push(write, next, slot);
                next += 1;
            }
            self.ring.submit_and_wait(1)?;
            for entry in self.ring.completion() {
                done += 1;
                free.push(usize::try_from(entry.user_data()).unwrap_or(0));
                match usize::try_from(entry.result()) {
                    Ok(n) if n == self.piece => {}
                    Ok(n) => failed = Some(io::Error::other(format!("{n} bytes were moved"))),
                    Err(_) => failed = Some(io::Error::from_raw_os_error(-entry.result())),
                }
            }
        }
        failed.map_or(Ok(()), Err)
    }

    fn push(&mut self, write: bool, number: usize, slot: usize) {
        let fd = types::Fd(self.file.as_raw_fd());
        let at = (number * self.piece) as u64;
        let len = u32::try_from(self.piece).unwrap_or(u32::MAX);
        let base = self.arena.base.as_ptr().wrapping_add(slot * self.piece);
        let entry = match (write, self.registered) {
            (false, true) => opcode::ReadFixed::new(fd, base, len, 0).offset(at).build(),
            (false, false) => opcode::Read::new(fd, base, len).offset(at).build(),
            (true, true) => opcode::WriteFixed::new(fd, base, len, 0).offset(at).build(),
            (true, false) => opcode::Write::new(fd, base, len).offset(at).build(),
        };
        // SAFETY: slot < depth, so the piece lies in the arena, which waits in `move_all` for its end.
        let pushed = unsafe { self.ring.submission().push(&entry.user_data(slot as u64)) };
        debug_assert!(pushed.is_ok(), "no more than the ring's entries are on their way");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_moves_the_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("bare");
        let mut bare = BareFile::new(&path, 8192, 20, 4).unwrap();
        Arena::part(&bare.arena, 0, 4 * 8192).write(0, &[7; 4 * 8192]).unwrap();
        bare.write_all().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), vec![7; 20 * 8192]);
        std::fs::write(&path, vec![9; 20 * 8192]).unwrap();
        bare.read_all().unwrap();
        let mut bytes = vec![0; 4 * 8192];
        Arena::part(&bare.arena, 0, 4 * 8192).read(0, &mut bytes).unwrap();
        assert_eq!(bytes, vec![9; 4 * 8192]);
        std::fs::write(&path, vec![9; 19 * 8192 + 1]).unwrap();
        bare.read_all().unwrap_err();
    }
}
