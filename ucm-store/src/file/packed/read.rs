//! Loading small objects: what lies together is read together.
//!
//! **Invariant:** an object is served only if the record in the segment is the one that was asked for, at
//! its place, and the bytes have its checksum.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use crate::xxh3::xxh3_64;

use super::{
    Packed,
    entry::{ENTRY_BYTES, Entry, Kind},
};
use crate::{
    ErrorKind, Op, StoreError,
    file::{
        Inner,
        buffers::Buffer,
        header::HEADER_BYTES,
        reading::Reading,
        sys::Incomplete,
        transfer::{Transfer, empty},
    },
};

/// Most bytes of one read: a MiB of payload and what lies around it.
const GROUP_BYTES: u64 = (1 << 20) + (1 << 18);
/// Bytes between two objects that are read rather than left out.
const GAP_BYTES: u64 = 16 * 1024;

/// An operation on a packed object, and where that lies.
#[derive(Debug)]
pub(in crate::file) struct Located {
    pub(super) op: Op,
    pub(super) segment: u64,
    pub(super) place: u32,
    pub(super) payload_bytes: u32,
}

/// Operations on objects that lie close together in one segment.
#[derive(Debug)]
pub(in crate::file) struct Group {
    segment: u64,
    items: Vec<(Op, u32)>,
    start: u64,
    end: u64,
}

#[derive(Debug)]
struct GroupRead {
    group: Group,
    file: Arc<OwnedFd>,
    buffer: Buffer,
    transfer: Transfer,
}

impl Group {
    /// The operations, unfinished.
    pub(in crate::file) fn into_ops(self) -> impl Iterator<Item = Op> {
        self.items.into_iter().map(|(op, _)| op)
    }
}

/// Puts what lies close together into one read each. Ends what cannot be right.
pub(in crate::file) fn groups(mut found: Vec<Located>) -> Vec<Group> {
    found.sort_by_key(|at| (at.segment, at.place));
    let mut groups: Vec<Group> = Vec::new();
    for Located { op, segment, place, payload_bytes } in found {
        if op.memory().len() as u64 != u64::from(payload_bytes) {
            let len = op.memory().len();
            let message = format!("the object has {payload_bytes} bytes, not {len}");
            op.finish(Err(StoreError::new(ErrorKind::Corrupt, message)));
            continue;
        }
        let start = Entry::offset(place);
        let end = start + Entry::stride(payload_bytes);
        match groups.last_mut() {
            Some(last)
                if last.segment == segment
                    && start <= last.end.saturating_add(GAP_BYTES)
                    && end - last.start.min(end) <= GROUP_BYTES =>
            {
                last.end = last.end.max(end);
                last.items.push((op, place));
            }
            _ => groups.push(Group { segment, items: vec![(op, place)], start, end }),
        }
    }
    groups
}

impl Packed {
    /// Opens a group's segment and plans its read. What cannot be read ends here.
    pub(in crate::file) fn start(&self, inner: &Inner, group: Group) -> Option<Box<dyn Reading>> {
        let page = HEADER_BYTES as u64;
        let start = group.start / page * page;
        let len = usize::try_from(group.end.next_multiple_of(page) - start).unwrap_or(usize::MAX);
        let step = crate::file::failpoint::FileStep::Open;
        let opened = inner
            .failpoints
            .check(step)
            .map_err(|e| StoreError::new(ErrorKind::Io, format!("open a segment: {e}")))
            .and_then(|()| Ok((self.segment(group.segment)?, self.buffers.take(len)?)));
        match opened {
            Ok((file, mut buffer)) => {
                let spans = [buffer.span(0, len), empty(), empty()];
                let transfer = Transfer::new(start, spans, HEADER_BYTES);
                Some(Box::new(GroupRead { group, file, buffer, transfer }))
            }
            Err(error) => {
                if error.kind() == ErrorKind::Corrupt {
                    self.condemn_segment(inner, group.segment, &error);
                }
                Op::finish_all(group.into_ops().map(|op| (op, Err(error.clone()))));
                None
            }
        }
    }

    /// A segment whose front is wrong: nothing in it can be proved to belong here.
    fn condemn_segment(&self, inner: &Inner, id: u64, why: &StoreError) {
        tracing::warn!(%why, segment = %format!("{id:016x}"), "a corrupt segment");
        let aside = self.path.join("quarantine").join(format!("segment-{id:016x}"));
        let kept = std::fs::rename(self.segment_path(id), aside).is_ok();
        inner.count_packed_corrupt(kept);
        if let Err(error) = self.drop_segment(id) {
            tracing::warn!(%error, "a corrupt segment stays in the index");
        }
    }
}

impl Reading for GroupRead {
    fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    fn transfer(&mut self) -> &mut Transfer {
        &mut self.transfer
    }

    fn end(self: Box<Self>, inner: &Inner, moved: Result<(), Incomplete>) {
        let Self { group, buffer, file, .. } = *self;
        let stat = rustix::fs::fstat(&file);
        let len = stat.map_or(u64::MAX, |s| u64::try_from(s.st_size).unwrap_or(0));
        if let Ok(stat) = stat {
            inner.renew(file.as_fd(), stat.st_mtime);
        }
        let failed = match moved {
            Ok(()) => None,
            Err(Incomplete::EndOfFile(_)) if len < group.end => Some(StoreError::new(
                ErrorKind::Corrupt,
                format!("a segment of {len} bytes, where an object ends at {}", group.end),
            )),
            Err(Incomplete::EndOfFile(at)) => {
                Some(StoreError::new(ErrorKind::Io, format!("reads bring nothing at byte {at}")))
            }
            Err(Incomplete::Failed(e)) => {
                Some(StoreError::new(ErrorKind::Io, format!("read of a segment: {e}")))
            }
        };
        let page = HEADER_BYTES as u64;
        let start = group.start / page * page;
        let mut bad = Vec::new();
        let ended: Vec<_> = group
            .items
            .into_iter()
            .map(|(op, place)| {
                let at = usize::try_from(Entry::offset(place) - start).unwrap_or(usize::MAX);
                let record = buffer.bytes().get(at..).unwrap_or_default();
                let result = match &failed {
                    Some(error) => Err(error.clone()),
                    None => take(&op, group.segment, place, record),
                };
                if result.as_ref().is_err_and(|e| e.kind() == ErrorKind::Corrupt) {
                    let long = record.len().min(ENTRY_BYTES + op.memory().len());
                    let bytes = record.get(..long).unwrap_or_default().to_vec();
                    bad.push(((*op.block(), op.shard()), bytes));
                }
                (op, result)
            })
            .collect();
        // The verdict is known to others before the operation's owner hears of it.
        inner.condemn_packed(&bad);
        Op::finish_all(ended);
    }
}

/// Verifies a record and copies its payload out.
fn take(op: &Op, segment: u64, place: u32, record: &[u8]) -> Result<(), StoreError> {
    let corrupt = |what: String| StoreError::new(ErrorKind::Corrupt, what);
    let entry =
        Entry::parse(record).ok_or_else(|| corrupt("the record's head is damaged".into()))?;
    let here = entry.kind == Kind::Record && entry.segment == segment && entry.place == place;
    let asked = (entry.block, entry.shard) == (*op.block(), op.shard());
    let len = op.memory().len();
    if !here || !asked || entry.payload_bytes as usize != len {
        return Err(corrupt("another record than the index says".into()));
    }
    let payload = record
        .get(ENTRY_BYTES..ENTRY_BYTES + len)
        .ok_or_else(|| corrupt("the record is cut off".into()))?;
    let computed = xxh3_64(payload);
    if computed != entry.payload_hash {
        let stored = entry.payload_hash;
        return Err(corrupt(format!("payload checksum {computed:#x}, stored {stored:#x}")));
    }
    op.memory().write(0, payload)
}
