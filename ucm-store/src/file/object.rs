//! Writing and reading one object.
//!
//! **Invariant:** a read succeeds only if magic, version, key, descriptor, lengths and checksum are
//! right for the bytes that lie in the destination; a write succeeds only if the object has its name.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
};

use super::{
    Inner,
    config::Durability,
    failpoint::{FileStep, failpoint},
    header::{HEADER_BYTES, Header, HeaderBlock, file_bytes},
    space::Aside,
    sys::{self, Incomplete, RawSpan},
};
use crate::{ErrorKind, IoMemory, Op, StoreError, op, xxh3};

/// Bytes read or written per step: they are hashed while they are in the second-level cache.
const STEP_BYTES: usize = 256 * 1024;

/// A failed read.
#[derive(Debug)]
pub(super) struct Unread {
    pub(super) error: StoreError,
    /// Whether the file itself is proved to be no good object.
    pub(super) proved: bool,
}

impl From<StoreError> for Unread {
    fn from(error: StoreError) -> Self {
        Self { error, proved: false }
    }
}

impl Inner {
    /// Loads one object into the memory of its operation.
    pub(super) fn load(&self, op: &Op) -> Result<(), StoreError> {
        op::refuse_empty(op)?;
        self.failpoints.check(FileStep::Open).map_err(|e| self.io_error("open", op, &e))?;
        let file = self
            .space
            .open_object(op.block(), op.shard(), false)
            .map_err(|e| self.unopened(op, &e))?;
        self.read(op, file.as_fd()).map_err(|unread| {
            if unread.proved {
                self.quarantine(op, file.as_fd(), &unread.error);
            }
            unread.error
        })
    }

    fn read(&self, op: &Op, file: BorrowedFd<'_>) -> Result<(), Unread> {
        let len = op.memory().len();
        let mut block = HeaderBlock([0; HEADER_BYTES]);
        let (head, body) = spans(&mut block, op.memory());
        let end = HEADER_BYTES.saturating_add(len);
        let first = end.min(HEADER_BYTES + STEP_BYTES);
        let step = |start: usize, end: usize| {
            self.failpoints.check(FileStep::Read).map_err(|e| self.io_error("read", op, &e))?;
            sys::read(file, head, body, start, end).map_err(|e| self.unread(op, e, len))
        };
        // The object may be shorter than asked for: then the header tells, not the missing bytes.
        let shorter = match step(0, first) {
            Ok(()) => None,
            Err(unread) if unread.error.kind() == ErrorKind::Corrupt => Some(unread),
            Err(unread) => return Err(unread),
        };
        let header = check_header(op, &block, &self.descriptor)?;
        check_length(&header, len)?;
        if let Some(unread) = shorter {
            return Err(unread);
        }
        let stat = rustix::fs::fstat(file).map_err(|e| self.io_error("stat", op, &e.into()))?;
        self.renew(file, stat.st_mtime);
        let wanted = file_bytes(header.payload_bytes).unwrap_or(u64::MAX);
        if u64::try_from(stat.st_size).ok() != Some(wanted) {
            let error = StoreError::new(
                ErrorKind::Corrupt,
                format!("a file of {} bytes where {wanted} belong", stat.st_size),
            );
            return Err(Unread { error, proved: true });
        }
        // SAFETY: the operation keeps its memory valid until it is finished.
        let mut hash = unsafe { xxh3::RawHash::new(op.memory().as_ptr(), len) };
        hash.advance(first - HEADER_BYTES);
        let mut at = first;
        while at < end {
            let next = end.min(at + STEP_BYTES);
            step(at, next)?;
            hash.advance(next - HEADER_BYTES);
            at = next;
        }
        let computed = hash.finish();
        if computed != header.payload_hash {
            let error = StoreError::new(
                ErrorKind::Corrupt,
                format!("payload checksum {computed:#x}, stored {:#x}", header.payload_hash),
            );
            // The memory may be shared: only the file's own bytes prove the file wrong.
            let proved = !self.file_is_good(file, len, header.payload_hash);
            return Err(Unread { error, proved });
        }
        Ok(())
    }

    pub(super) fn unopened(&self, op: &Op, error: &io::Error) -> StoreError {
        match error.kind() {
            io::ErrorKind::NotFound => StoreError::new(ErrorKind::Missing, "no such object"),
            _ => self.io_error("open", op, error),
        }
    }

    fn unread(&self, op: &Op, incomplete: Incomplete, len: usize) -> Unread {
        match incomplete {
            Incomplete::EndOfFile(at) => {
                let wanted = HEADER_BYTES + len;
                let message = format!("the file ends at byte {at} of {wanted}");
                Unread { error: StoreError::new(ErrorKind::Corrupt, message), proved: true }
            }
            Incomplete::Failed(e) => self.io_error("read", op, &e).into(),
        }
    }

    pub(super) fn quarantine(&self, op: &Op, file: BorrowedFd<'_>, why: &StoreError) {
        let aside = self
            .failpoints
            .check(FileStep::Quarantine)
            .and_then(|()| self.space.put_aside(op.block(), op.shard(), file));
        let key = (*op.block(), op.shard());
        match aside {
            Ok(Aside::Gone) => {}
            Ok(aside) => {
                self.counters.count_corrupt(aside);
                tracing::warn!(%why, ?aside, object = %name(op), "a corrupt object");
            }
            Err(error) => {
                // It keeps its name; at least this process says no when asked for it.
                self.refuse(key);
                tracing::warn!(%why, %error, object = %name(op), "a corrupt object stays");
            }
        }
    }

    /// Stores one object.
    pub(super) fn dump(&self, op: &Op) -> Result<(), StoreError> {
        op::refuse_empty(op)?;
        let len = op.memory().len();
        if file_bytes(len as u64).is_none() {
            let message = format!("{len} bytes are too long for a file");
            return Err(StoreError::new(ErrorKind::Invalid, message));
        }
        let temp = self
            .failpoints
            .check(FileStep::Create)
            .and_then(|()| self.space.temp(self.mode.direct))
            .map_err(|e| self.io_error("create", op, &e))?;
        failpoint!("file.create.after");
        if self.mode.direct {
            self.write_direct(op, temp.fd(), len)
        } else {
            self.write(op, temp.fd(), len)
        }
        .map_err(|e| self.io_error("write", op, &e))?;
        failpoint!("file.write.after");
        if self.durability == Durability::Fsync {
            self.failpoints
                .check(FileStep::Sync)
                .and_then(|()| temp.sync())
                .map_err(|e| self.io_error("sync", op, &e))?;
            failpoint!("file.sync.after");
        }
        failpoint!("file.publish.before");
        self.failpoints
            .check(FileStep::Rename)
            .and_then(|()| temp.publish(op.block(), op.shard()))
            .map_err(|e| self.io_error("publish", op, &e))?;
        failpoint!("file.publish.after");
        let key = (*op.block(), op.shard());
        self.accept(key);
        // Packed, when the limit was another: the newer one is served.
        self.packed.remove(&[key]).map_err(|e| self.io_error("replace", op, &e))?;
        if self.durability == Durability::Fsync {
            self.space.sync_dir(op.block()).map_err(|e| self.io_error("sync", op, &e))?;
        }
        Ok(())
    }

    fn write(&self, op: &Op, file: BorrowedFd<'_>, len: usize) -> io::Result<()> {
        let mut block = HeaderBlock([0; HEADER_BYTES]);
        let (head, body) = spans(&mut block, op.memory());
        let end = HEADER_BYTES + len;
        // SAFETY: the operation keeps its memory valid until it is finished.
        let mut hash = unsafe { xxh3::RawHash::new(op.memory().as_ptr(), len) };
        let mut at = HEADER_BYTES;
        while at < end {
            let next = end.min(at + STEP_BYTES);
            hash.advance(next - HEADER_BYTES);
            self.failpoints.check(FileStep::Write)?;
            sys::write(file, head, body, at, next).map_err(unwritten)?;
            at = next;
            failpoint!("file.write.half");
        }
        let mut block = self.header_of(op, hash.finish());
        let padded = end.next_multiple_of(HEADER_BYTES);
        if padded > end {
            // Zeroes up to the end, without writing them.
            rustix::fs::ftruncate(file, padded as u64)?;
        }
        let (head, body) = spans(&mut block, op.memory());
        sys::write(file, head, body, 0, HEADER_BYTES).map_err(unwritten)
    }

    /// The header of what an operation stores now.
    pub(super) fn header_of(&self, op: &Op, payload_hash: u64) -> HeaderBlock {
        let header = Header {
            block: *op.block(),
            shard: op.shard(),
            generation: self.generations.next(),
            payload_bytes: op.memory().len() as u64,
            payload_hash,
            descriptor: &self.descriptor,
        };
        header.encode()
    }

    pub(super) fn io_error(&self, what: &str, op: &Op, error: &io::Error) -> StoreError {
        let kind = match error.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT) => ErrorKind::NoSpace,
            _ => ErrorKind::Io,
        };
        let path = self.space.path().display();
        StoreError::new(kind, format!("{what} {} in {path}: {error}", name(op)))
    }
}

pub(super) fn check_header<'a>(
    op: &Op,
    block: &'a HeaderBlock,
    descriptor: &[u8],
) -> Result<Header<'a>, Unread> {
    let proved = |error| Unread { error, proved: true };
    let header = Header::parse(block).map_err(proved)?;
    header.check_identity(op.block(), op.shard(), descriptor).map_err(proved)?;
    Ok(header)
}

pub(super) fn check_length(header: &Header<'_>, len: usize) -> Result<(), Unread> {
    if header.payload_bytes == len as u64 {
        return Ok(());
    }
    // Whole, but not what was asked for: it may be the question that is wrong.
    let message = format!("the object has {} bytes, not {len}", header.payload_bytes);
    Err(StoreError::new(ErrorKind::Corrupt, message).into())
}

fn spans(block: &mut HeaderBlock, memory: &IoMemory) -> (RawSpan, RawSpan) {
    let head = std::ptr::NonNull::from(&mut block.0).cast();
    // SAFETY: the callers keep the block alive and look at it only between transfers.
    let head = unsafe { RawSpan::new(head, HEADER_BYTES) };
    // SAFETY: the owner of the memory keeps it valid; the callers hold it.
    let body = unsafe { RawSpan::new(memory.as_ptr(), memory.len()) };
    (head, body)
}

pub(super) fn unwritten(incomplete: Incomplete) -> io::Error {
    match incomplete {
        Incomplete::EndOfFile(at) => {
            io::Error::new(io::ErrorKind::WriteZero, format!("nothing was written at byte {at}"))
        }
        Incomplete::Failed(e) => e,
    }
}

fn name(op: &Op) -> String {
    format!("block {:032x} shard {}", u128::from_be_bytes(*op.block()), op.shard())
}
