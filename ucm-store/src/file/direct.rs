//! Objects past the page cache: `O_DIRECT` reads and writes, in place where the memory allows it.
//!
//! Owns: what is read where, and the verdict about it. The calls are made by a ring or by a thread.
//! **Invariant:** an operation ends well only if header, identity, lengths and checksum are right for
//! the bytes that lie in its memory; the memory is let go only when no transfer is on its way.

use std::{
    hash::Hasher,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use twox_hash::XxHash3_64;

use super::{
    Inner,
    buffers::Buffer,
    failpoint::{FileStep, Injected},
    header::{HEADER_BYTES, HeaderBlock, file_bytes},
    object::{Unread, check_header, check_length},
    reading::Reading,
    sys::{self, Incomplete},
    transfer::{Progress, Transfer, empty},
};
use crate::{ErrorKind, IoMemory, Op, StoreError, op, xxh3};

/// Bytes hashed and copied at once: they stay in the second-level cache.
const PIECE: usize = 64 * 1024;

/// A read of one object on its way.
#[derive(Debug)]
pub(super) struct DirectRead {
    op: Op,
    file: OwnedFd,
    /// Header, then what is not read in place.
    buffer: Buffer,
    transfer: Transfer,
    /// Bytes of the payload that are read in place.
    in_place: usize,
    /// Whether the file is as long as the object asked for.
    whole: bool,
    file_len: u64,
}

/// Where a payload is read or written without a copy, and where with one.
fn split(memory: &IoMemory, in_place: bool, align: usize) -> usize {
    let aligned = memory.as_ptr().as_ptr().align_offset(align) == 0;
    if in_place && aligned { memory.len() / align * align } else { 0 }
}

impl Reading for DirectRead {
    fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    fn transfer(&mut self) -> &mut Transfer {
        &mut self.transfer
    }

    fn end(self: Box<Self>, inner: &Inner, moved: Result<(), Incomplete>) {
        let result = inner.judge(&self, moved).map_err(|unread| {
            if unread.proved {
                inner.quarantine(&self.op, self.file.as_fd(), &unread.error);
            }
            unread.error
        });
        self.op.finish(result);
    }
}

impl Inner {
    /// Opens the object of an operation and plans its read. What cannot be read ends here.
    pub(super) fn start_read(&self, op: Op) -> Option<Box<dyn Reading>> {
        match self.plan_read(&op) {
            Ok((file, buffer, transfer, in_place, whole, file_len)) => {
                Some(Box::new(DirectRead { op, file, buffer, transfer, in_place, whole, file_len }))
            }
            Err(error) => {
                op.finish(Err(error));
                None
            }
        }
    }

    fn plan_read(
        &self,
        op: &Op,
    ) -> Result<(OwnedFd, Buffer, Transfer, usize, bool, u64), StoreError> {
        op::refuse_empty(op)?;
        self.failpoints.check(FileStep::Open).map_err(|e| self.io_error("open", op, &e))?;
        let file = self
            .space
            .open_object(op.block(), op.shard(), true)
            .map_err(|e| self.unopened(op, &e))?;
        let stat = rustix::fs::fstat(&file).map_err(|e| self.io_error("stat", op, &e.into()))?;
        self.renew(file.as_fd(), stat.st_mtime);
        let file_len = u64::try_from(stat.st_size).unwrap_or(0);
        let len = op.memory().len();
        let whole = file_bytes(len as u64) == Some(file_len);
        if file_len < HEADER_BYTES as u64 {
            let error = StoreError::new(
                ErrorKind::Corrupt,
                format!("the file ends at byte {file_len}, inside the header"),
            );
            self.quarantine(op, file.as_fd(), &error);
            return Err(error);
        }
        // Another length: the header says whether the question or the file is wrong.
        let in_place =
            if whole { split(op.memory(), self.mode.in_place, self.mode.align) } else { 0 };
        let rest = if whole { len.next_multiple_of(HEADER_BYTES) - in_place } else { 0 };
        let mut buffer = self.buffers.take(HEADER_BYTES + rest)?;
        // SAFETY: the operation keeps its memory valid until it is finished, after the transfer.
        let place = unsafe { sys::RawSpan::new(op.memory().as_ptr(), in_place) };
        let spans = [buffer.span(0, HEADER_BYTES), place, buffer.span(HEADER_BYTES, rest)];
        Ok((file, buffer, Transfer::new(0, spans, self.mode.align), in_place, whole, file_len))
    }

    fn judge(&self, read: &DirectRead, moved: Result<(), Incomplete>) -> Result<(), Unread> {
        let DirectRead { op, buffer, in_place, .. } = read;
        match moved {
            Ok(()) => {}
            Err(Incomplete::Failed(e)) => return Err(self.io_error("read", op, &e).into()),
            // The file was long enough: a device that brings nothing proves nothing.
            Err(Incomplete::EndOfFile(at)) => {
                let e = io::Error::other(format!("reads bring nothing at byte {at}"));
                return Err(self.io_error("read", op, &e).into());
            }
        }
        let mut block = HeaderBlock([0; HEADER_BYTES]);
        let (head, rest) = buffer.bytes().split_at(HEADER_BYTES);
        block.0.copy_from_slice(head);
        let header = check_header(op, &block, &self.descriptor)?;
        let len = op.memory().len();
        check_length(&header, len)?;
        if !read.whole {
            let wanted = file_bytes(len as u64).unwrap_or(u64::MAX);
            let error = StoreError::new(
                ErrorKind::Corrupt,
                format!("a file of {} bytes where {wanted} belong", read.file_len),
            );
            return Err(Unread { error, proved: true });
        }
        let computed = if *in_place > 0 {
            if let Some(tail) = rest.get(..len - in_place) {
                op.memory().write(*in_place, tail)?;
            }
            // SAFETY: the operation keeps its memory valid until it is finished.
            unsafe { xxh3::hash(op.memory().as_ptr(), len) }
        } else {
            let mut hash = XxHash3_64::new();
            let payload = rest.get(..len).unwrap_or_default();
            for (n, piece) in payload.chunks(PIECE).enumerate() {
                hash.write(piece);
                op.memory().write(n * PIECE, piece)?;
            }
            hash.finish()
        };
        if computed != header.payload_hash {
            let error = StoreError::new(
                ErrorKind::Corrupt,
                format!("payload checksum {computed:#x}, stored {:#x}", header.payload_hash),
            );
            // Memory may be shared: only the file's own bytes prove the file wrong.
            let proved =
                *in_place == 0 || !self.file_is_good(read.file.as_fd(), len, header.payload_hash);
            return Err(Unread { error, proved });
        }
        Ok(())
    }

    /// Whether the payload in the file has this hash. Only failed loads ask.
    pub(super) fn file_is_good(&self, file: BorrowedFd<'_>, len: usize, payload_hash: u64) -> bool {
        let end = HEADER_BYTES + len.next_multiple_of(HEADER_BYTES);
        let Ok(mut buffer) = self.buffers.take(end) else { return true };
        let spans = [buffer.span(0, end), empty(), empty()];
        let moved = sys::read_all(file, &mut Transfer::new(0, spans, self.mode.align));
        let payload = buffer.bytes().get(HEADER_BYTES..HEADER_BYTES + len);
        match (moved, payload) {
            (Ok(()), Some(payload)) => crate::xxh3::xxh3_64(payload) == payload_hash,
            // A failing device proves nothing.
            _ => true,
        }
    }

    /// Writes header and payload of an operation with one call, past the page cache.
    pub(super) fn write_direct(&self, op: &Op, file: BorrowedFd<'_>, len: usize) -> io::Result<()> {
        // Devices only read this memory: in place even if others may take it over.
        let in_place = split(op.memory(), true, self.mode.align);
        let padded = len.next_multiple_of(HEADER_BYTES);
        let rest = padded - in_place;
        let full = |e: StoreError| io::Error::new(io::ErrorKind::OutOfMemory, e);
        let mut buffer = self.buffers.take(HEADER_BYTES + rest).map_err(full)?;
        self.failpoints.check(FileStep::Allocate)?;
        // Without space this fails before any byte is written; blocks in a row, and no growing file,
        // which writes would have to wait for. Not every file system can.
        let whole = (HEADER_BYTES + padded) as u64;
        match rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, whole) {
            Ok(()) | Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => {}
            Err(e) => return Err(e.into()),
        }
        let (head, tail) = buffer.bytes_mut().split_at_mut(HEADER_BYTES);
        let hash = if let Some((bytes, zeros)) =
            tail.get_mut(..rest).and_then(|t| t.split_at_mut_checked(len - in_place))
        {
            op.memory().read(in_place, bytes).map_err(io::Error::other)?;
            zeros.fill(0);
            if in_place == 0 {
                // What is written is what was hashed, whoever writes the memory meanwhile.
                crate::xxh3::xxh3_64(bytes)
            } else {
                // SAFETY: the operation keeps its memory valid until it is finished.
                unsafe { xxh3::hash(op.memory().as_ptr(), len) }
            }
        } else {
            return Err(io::Error::other("a buffer is too short"));
        };
        head.copy_from_slice(&self.header_of(op, hash).0);
        // SAFETY: the operation keeps its memory valid until it is finished.
        let place = unsafe { sys::RawSpan::new(op.memory().as_ptr(), in_place) };
        let spans = [buffer.span(0, HEADER_BYTES), place, buffer.span(HEADER_BYTES, rest)];
        let mut transfer = Transfer::new(0, spans, self.mode.align);
        loop {
            let moved = match self.failpoints.inject(FileStep::Write, transfer.left()) {
                Some(Injected::Error(e)) => Err(e),
                Some(Injected::Short(most)) => {
                    sys::writev(file, transfer.next()).map(|n| n.min(most))
                }
                Some(Injected::Stall(stall)) => {
                    stall.wait();
                    continue;
                }
                None => sys::writev(file, transfer.next()),
            };
            match transfer.advance(moved) {
                Progress::More => {}
                Progress::Ended(end) => return end.map_err(super::object::unwritten),
            }
        }
    }
}
