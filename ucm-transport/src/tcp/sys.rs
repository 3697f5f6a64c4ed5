//! Vectored socket IO on memory that is not ours to borrow.
//!
//! **Invariant:** all calls are non-blocking, so no thread stays inside a system call that could
//! still write a destination: whoever holds the lock of a lane knows that nothing moves.

use std::{
    io,
    os::fd::{AsRawFd as _, BorrowedFd},
    ptr::NonNull,
};

use crate::{Location, Memory, TransferError};

/// Most pieces of one system call (`IOV_MAX`).
const CALL_PIECES: usize = 1024;

/// Pieces of memory in the order of a stream, used up from the front. Keeps what it names.
#[derive(Debug, Default)]
pub(super) struct Scatter {
    pieces: Vec<libc::iovec>,
    /// First piece that is not used up.
    at: usize,
    left: u64,
    /// Keeps memory that is named; consecutive pieces of the same are kept once.
    memory: Vec<Memory>,
    /// Buffers of ours that are named. A vector's bytes stay where they are when it moves.
    buffers: Vec<Vec<u8>>,
}

// SAFETY: addresses of memory that this value keeps (`push`, `push_buffer`), which may be used from
// any thread.
unsafe impl Send for Scatter {}

impl Scatter {
    pub(super) fn with_capacity(pieces: usize) -> Self {
        Self { pieces: Vec::with_capacity(pieces), ..Self::default() }
    }

    /// Adds a range of host memory.
    ///
    /// # Errors
    /// `OutOfBounds` when the range leaves the memory, `Unsupported` for memory not on the host.
    pub(super) fn push(
        &mut self,
        memory: &Memory,
        offset: u64,
        len: u64,
    ) -> Result<(), TransferError> {
        if !matches!(memory.location(), Location::Host | Location::PinnedHost) {
            let text = format!("a socket cannot reach {:?}", memory.location());
            return Err(TransferError::unsupported(text));
        }
        let size = memory.len() as u64;
        if offset.checked_add(len).is_none_or(|end| end > size) {
            return Err(TransferError::out_of_bounds(offset, len, size));
        }
        let same =
            |known: &Memory| known.as_ptr() == memory.as_ptr() && known.len() == memory.len();
        if !self.memory.last().is_some_and(same) {
            self.memory.push(memory.clone());
        }
        // Both are at most a `usize` length.
        let at = usize::try_from(offset).unwrap_or(usize::MAX);
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        // SAFETY: at + len <= length of the mapping.
        let base = unsafe { memory.as_ptr().add(at) };
        self.push_raw(base, len);
        Ok(())
    }

    /// Adds a buffer of ours; [`buffer`](Self::buffer) shows it again by its number.
    pub(super) fn push_buffer(&mut self, mut buffer: Vec<u8>) -> usize {
        if let Some(base) = NonNull::new(buffer.as_mut_ptr()) {
            self.push_raw(base, buffer.len());
        }
        self.buffers.push(buffer);
        self.buffers.len() - 1
    }

    /// A buffer of ours.
    pub(super) fn buffer(&self, number: usize) -> &[u8] {
        // No system call runs on the pieces while `self` is borrowed: they need it mutably.
        self.buffers.get(number).map(Vec::as_slice).unwrap_or_default()
    }

    /// Takes a buffer of ours out. The pieces must be used up.
    pub(super) fn take_buffer(&mut self, number: usize) -> Vec<u8> {
        if self.left > 0 {
            return Vec::new();
        }
        self.buffers.get_mut(number).map(std::mem::take).unwrap_or_default()
    }

    fn push_raw(&mut self, base: NonNull<u8>, len: usize) {
        if len > 0 {
            self.pieces.push(libc::iovec { iov_base: base.as_ptr().cast(), iov_len: len });
            self.left += len as u64;
        }
    }

    /// Adds all pieces of another one, of which nothing is used up, behind these.
    pub(super) fn append(&mut self, mut other: Self) {
        self.left += other.left;
        self.pieces.extend(other.pieces.drain(other.at..));
        self.memory.append(&mut other.memory);
        self.buffers.append(&mut other.buffers);
    }

    /// Bytes that are not used up.
    pub(super) fn left(&self) -> u64 {
        self.left
    }

    fn next(&self) -> &[libc::iovec] {
        let rest = self.pieces.get(self.at..).unwrap_or_default();
        rest.get(..CALL_PIECES).unwrap_or(rest)
    }

    fn advance(&mut self, mut count: usize) {
        self.left = self.left.saturating_sub(count as u64);
        while let Some(piece) = self.pieces.get_mut(self.at) {
            if count < piece.iov_len {
                // SAFETY: count < length of the piece.
                piece.iov_base = unsafe { piece.iov_base.cast::<u8>().add(count) }.cast();
                piece.iov_len -= count;
                return;
            }
            count -= piece.iov_len;
            self.at += 1;
            if count == 0 {
                return;
            }
        }
    }

    /// Copies bytes that have been read already into the first pieces; returns how many fitted.
    pub(super) fn fill(&mut self, mut from: &[u8]) -> usize {
        let mut done = 0;
        while let Some(piece) = self.pieces.get(self.at).filter(|_| !from.is_empty()) {
            let (now, rest) = from.split_at(piece.iov_len.min(from.len()));
            // SAFETY: the piece is valid for writes of this length (`push`), and `now` is borrowed,
            // so it is apart from memory that nobody borrows.
            unsafe {
                std::ptr::copy_nonoverlapping(now.as_ptr(), piece.iov_base.cast(), now.len())
            };
            done += now.len();
            self.advance(now.len());
            from = rest;
        }
        done
    }

    /// Copies the next bytes out without using them up; returns how many.
    #[cfg(feature = "tls")]
    pub(super) fn peek(&self, into: &mut [u8]) -> usize {
        let mut done = 0;
        for piece in self.pieces.get(self.at..).unwrap_or_default() {
            let Some(room) = into.get_mut(done..).filter(|room| !room.is_empty()) else { break };
            let count = piece.iov_len.min(room.len());
            // SAFETY: the piece is valid for reads of this length (`push`), and `room` is exclusive.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    piece.iov_base.cast::<u8>(),
                    room.as_mut_ptr(),
                    count,
                );
            }
            done += count;
        }
        done
    }

    /// Uses up bytes that were sent some other way.
    #[cfg(feature = "tls")]
    pub(super) fn skip(&mut self, count: usize) {
        self.advance(count);
    }

    /// Receives into the next pieces. 0 is the end of the stream.
    pub(super) fn receive(&mut self, fd: BorrowedFd<'_>) -> io::Result<usize> {
        let mut header = header(self.next());
        let flags = libc::MSG_DONTWAIT;
        // SAFETY: the header names pieces that are valid for writes (`push`).
        let count = unsafe { libc::recvmsg(fd.as_raw_fd(), &raw mut header, flags) };
        let count = usize::try_from(count).map_err(|_| io::Error::last_os_error())?;
        self.advance(count);
        Ok(count)
    }

    /// Sends the next pieces; with `more`, what follows may share a packet with the last of them.
    pub(super) fn send(&mut self, fd: BorrowedFd<'_>, more: bool) -> io::Result<usize> {
        let header = header(self.next());
        let more = more || self.pieces.len().saturating_sub(self.at) > CALL_PIECES;
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL | if more { libc::MSG_MORE } else { 0 };
        // SAFETY: the header names pieces that are valid for reads (`push`).
        let count = unsafe { libc::sendmsg(fd.as_raw_fd(), &raw const header, flags) };
        let count = usize::try_from(count).map_err(|_| io::Error::last_os_error())?;
        self.advance(count);
        Ok(count)
    }
}

fn header(pieces: &[libc::iovec]) -> libc::msghdr {
    // SAFETY: a header of zeros is a header without address, pieces and control data.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    // The kernel only reads the list; the type is shared with calls that write it.
    header.msg_iov = pieces.as_ptr().cast_mut();
    header.msg_iovlen = pieces.len();
    header
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_used_up_in_order_however_they_are_cut() {
        let memory = Memory::host(100).unwrap();
        for cut in 1..30 {
            let mut scatter = Scatter::with_capacity(3);
            scatter.push(&memory, 50, 7).unwrap();
            scatter.push(&memory, 0, 20).unwrap();
            scatter.push(&memory, 90, 1).unwrap();
            assert!(scatter.push(&memory, 90, 11).is_err());
            let bytes: Vec<u8> = (1..=28).collect();
            let mut left = 28;
            for part in bytes.chunks(cut) {
                assert_eq!(scatter.fill(part), part.len());
                left -= part.len() as u64;
                assert_eq!(scatter.left(), left);
            }
            assert_eq!(scatter.fill(&[9]), 0, "nothing is left to fill");
            let mut all = vec![0; 100];
            memory.read(0, &mut all).unwrap();
            assert_eq!((&all[50..57], &all[..20], all[90]), (&bytes[..7], &bytes[7..27], 28));
        }
    }
}
