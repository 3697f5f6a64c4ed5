//! Storing small objects: one write for many, then one entry each in the index.
//!
//! **Invariant:** what is hashed is what is written (a copy); an object's entry is written after its bytes.

use std::{
    fs, io,
    os::fd::{AsFd, OwnedFd},
};

use crate::xxh3::xxh3_64;
use rustix::fs::{FlockOperation, Mode as Rights, OFlags};

use super::{
    Packed,
    entry::{ENTRY_BYTES, Entry, Front, Kind},
};
use crate::{
    ErrorKind, Op, StoreError,
    file::{
        Durability, Inner,
        failpoint::{FileStep, Injected, failpoint},
        header::HEADER_BYTES,
        object::unwritten,
        sys,
        transfer::{Progress, Transfer, empty},
    },
    op,
};

/// Payload bytes of one write, about.
const BATCH_BYTES: usize = 1 << 20;

/// The segment that this process writes; locked while it does.
#[derive(Debug)]
pub(super) struct Writer {
    id: u64,
    file: OwnedFd,
    end: u64,
    /// The bytes from the last multiple of 4096 to the end: they are written again with the next batch.
    tail: Vec<u8>,
}

impl Packed {
    /// Stores objects and ends their operations.
    pub(in crate::file) fn store(&self, inner: &Inner, ops: Vec<Op>) {
        let mut writer = self.writers().pop();
        let mut batch = Vec::new();
        let mut bytes = 0;
        let mut ops = ops.into_iter().peekable();
        while let Some(op) = ops.next() {
            if let Err(error) = op::refuse_empty(&op) {
                op.finish(Err(error));
            } else {
                bytes += op.memory().len();
                batch.push(op);
            }
            if !batch.is_empty() && (bytes >= BATCH_BYTES || ops.peek().is_none()) {
                let result = inner.with_room(bytes as u64, || {
                    let result = self.store_batch(inner, &mut writer, &batch);
                    if result.is_err() {
                        // What lies behind its end is nobody's.
                        writer = None;
                    }
                    result
                });
                Op::finish_all(batch.drain(..).map(|op| (op, result.clone())));
                bytes = 0;
            }
        }
        self.writers().extend(writer);
    }

    fn writers(&self) -> std::sync::MutexGuard<'_, Vec<Writer>> {
        self.writers.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn store_batch(
        &self,
        inner: &Inner,
        writer: &mut Option<Writer>,
        batch: &[Op],
    ) -> Result<(), StoreError> {
        let failed = |what: &'static str| {
            move |e: io::Error| {
                let kind = match e.raw_os_error() {
                    Some(libc::ENOSPC | libc::EDQUOT) => ErrorKind::NoSpace,
                    _ if e.kind() == io::ErrorKind::TimedOut => ErrorKind::Unavailable,
                    _ => ErrorKind::Io,
                };
                StoreError::new(kind, format!("{what} {} packed objects: {e}", batch.len()))
            }
        };
        if writer.as_ref().is_some_and(|w| w.end >= self.segment_bytes) {
            *writer = None;
        }
        let writer = match writer {
            Some(writer) => writer,
            None => {
                let made = inner.failpoints.check(FileStep::Create).and_then(|()| self.create());
                writer.insert(made.map_err(failed("create a segment for"))?)
            }
        };
        let total: u64 = batch.iter().map(|op| Entry::stride(payload_bytes(op))).sum();
        let before = writer.tail.len();
        let len = usize::try_from(total).unwrap_or(usize::MAX).saturating_add(before);
        let padded = len.next_multiple_of(HEADER_BYTES);
        let mut buffer = self.buffers.take(padded)?;
        let bytes = buffer.bytes_mut();
        let (old, rest) = bytes.split_at_mut(before);
        old.copy_from_slice(&writer.tail);
        let mut entries = Vec::with_capacity(batch.len());
        let mut rest = rest;
        let mut at = writer.end;
        for op in batch {
            let payload_bytes = payload_bytes(op);
            let stride = usize::try_from(Entry::stride(payload_bytes)).unwrap_or(usize::MAX);
            let (record, others) = rest
                .split_at_mut_checked(stride)
                .ok_or_else(|| StoreError::new(ErrorKind::Invalid, "a batch is too long"))?;
            rest = others;
            let (head, body) = record.split_at_mut(ENTRY_BYTES);
            let (payload, zeros) = body.split_at_mut(op.memory().len());
            op.memory().read(0, payload)?;
            zeros.fill(0);
            let entry = Entry {
                kind: Kind::Record,
                block: *op.block(),
                shard: op.shard(),
                segment: writer.id,
                place: u32::try_from(at / ENTRY_BYTES as u64).unwrap_or(u32::MAX),
                payload_bytes,
                generation: inner.generations.next(),
                payload_hash: xxh3_64(payload),
            };
            head.copy_from_slice(&entry.encode());
            entries.push(Entry { kind: Kind::Put, ..entry });
            at += stride as u64;
        }
        let zeros = padded - len;
        rest.get_mut(..zeros).unwrap_or_default().fill(0);
        let spans = [buffer.span(0, padded), empty(), empty()];
        let from = writer.end - before as u64;
        let mut transfer = Transfer::new(from, spans, HEADER_BYTES);
        write_all(inner, &writer.file, &mut transfer).map_err(failed("write"))?;
        failpoint!("packed.write.after");
        if inner.durability == Durability::Fsync {
            inner
                .failpoints
                .check(FileStep::Sync)
                .and_then(|()| Ok(rustix::fs::fdatasync(&writer.file)?))
                .map_err(failed("sync"))?;
        }
        inner
            .failpoints
            .check(FileStep::Rename)
            .and_then(|()| self.append(&entries))
            .map_err(failed("publish"))?;
        if inner.durability == Durability::Fsync {
            self.state().log.sync().map_err(failed("sync the index of"))?;
        }
        writer.end = at;
        let keep = at % HEADER_BYTES as u64;
        let tail = usize::try_from(keep).unwrap_or(0);
        let last = buffer.bytes().get(len - tail..len).unwrap_or_default();
        writer.tail = last.to_vec();
        Ok(())
    }

    /// A new segment, locked, with its front.
    fn create(&self) -> io::Result<Writer> {
        loop {
            let mut id = [0; 8];
            rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty())?;
            let id = u64::from_ne_bytes(id);
            let mut flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
            flags.set(OFlags::DIRECT, self.direct);
            let path = self.segment_path(id);
            let file = rustix::fs::open(&path, flags, Rights::from_raw_mode(0o644))?;
            failpoint!("packed.create.after");
            let locked = rustix::fs::flock(&file, FlockOperation::LockExclusive).is_ok();
            // Before the lock, a starting process may have taken the file for a dead one's.
            if locked && rustix::fs::fstat(&file)?.st_nlink == 0 {
                continue;
            }
            let mut buffer = self.buffers.take(HEADER_BYTES).map_err(io::Error::other)?;
            let front = Front::Segment(id).encode(&self.descriptor);
            buffer.bytes_mut().get_mut(..HEADER_BYTES).unwrap_or_default().copy_from_slice(&front);
            let spans = [buffer.span(0, HEADER_BYTES), empty(), empty()];
            let mut transfer = Transfer::new(0, spans, HEADER_BYTES);
            let written = sys::write_all(file.as_fd(), &mut transfer).map_err(unwritten);
            if let Err(e) = written {
                // It would be removed at the next start, too.
                drop(fs::remove_file(&path));
                return Err(e);
            }
            return Ok(Writer { id, file, end: HEADER_BYTES as u64, tail: Vec::new() });
        }
    }
}

fn payload_bytes(op: &Op) -> u32 {
    u32::try_from(op.memory().len()).unwrap_or(u32::MAX)
}

fn write_all(inner: &Inner, file: &OwnedFd, transfer: &mut Transfer) -> io::Result<()> {
    loop {
        let moved = match inner.failpoints.inject(FileStep::Write, transfer.left()) {
            Some(Injected::Error(e)) => Err(e),
            Some(Injected::Short(most)) => {
                sys::writev(file.as_fd(), transfer.next()).map(|n| n.min(most))
            }
            Some(Injected::Stall(stall)) => {
                stall.wait();
                continue;
            }
            None => sys::writev(file.as_fd(), transfer.next()),
        };
        if let Progress::Ended(end) = transfer.advance(moved) {
            return end.map_err(unwritten);
        }
    }
}
