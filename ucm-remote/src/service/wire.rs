//! What peers say to each other inside the frames of the tcp engine, byte by byte.
//!
//! All numbers little-endian.
//!
//! | descriptor of | bytes | fields |
//! |---|---|---|
//! | a read | 72 | kind 1 (1), zero (7), block (16), identity (32), generation (8), object length (8) |
//! | a write | 24 | kind 2 (1), zero (7), pending id (8), generation (8) |
//!
//! A call is a head of 12 bytes: magic `UCMP` (4), version (2), operation (2), items (4), then the items.
//! Its answer is as many items in the same order.
//!
//! | operation | item asked | item answered |
//! |---|---|---|
//! | 1 resolve | key (48) | status (1), generation (8), length (8) |
//! | 2 allocate | key (48), length (8) | status (1), pending id (8), generation (8) |
//! | 3 commit | pending id (8), generation (8) | status (1) |
//! | 4 abort | pending id (8), generation (8) | status (1) |
//! | 5 remove | key (48) | status (1) |
//! | 6 stat | – | capacity, committed, pending, quarantine, leases, objects, evictions, page bytes (8 each) |
//! | 7 touch | key (48) | – |
//! | 8 lease | key (48) | status (1), generation (8), length (8), lease (8), milliseconds (4), page bytes (8), pages (4), per page: segment (4), offset (8) |
//! | 9 release | lease (8) | – |
//!
//! Statuses are the numbers of the outcomes: of gets for 1 and 8 (`Remote`: it is there), of puts for 2 to
//! 4, of removals for 5.
//!
//! **Invariant:** decoding allocates nothing beyond the bytes that were given, and never panics.

use crate::{
    Generation, GetOutcome, ObjectKey, PageList, PeerUsage, Pending, PutOutcome, RemoveOutcome,
    host_medium::segment,
};

/// Version of these calls.
pub(crate) const VERSION: u16 = 1;
/// Keys of one call at most.
pub(crate) const MAX_ITEMS: u32 = 4096;
const MAGIC: [u8; 4] = *b"UCMP";

/// What a call asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    Resolve = 1,
    Allocate = 2,
    Commit = 3,
    Abort = 4,
    Remove = 5,
    Stat = 6,
    Touch = 7,
    Lease = 8,
    Release = 9,
}

/// Why bytes are no message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Malformed(pub(crate) &'static str);

const SHORT: Malformed = Malformed("cut short");

/// Cuts fields off the front of a message.
#[derive(Debug)]
pub(crate) struct Fields<'a>(pub(crate) &'a [u8]);

impl<'a> Fields<'a> {
    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (first, rest) = self.0.split_first_chunk().ok_or(SHORT)?;
        self.0 = rest;
        Ok(*first)
    }

    pub(crate) fn bytes(&mut self, count: usize) -> Result<&'a [u8], Malformed> {
        let (first, rest) = self.0.split_at_checked(count).ok_or(SHORT)?;
        self.0 = rest;
        Ok(first)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, Malformed> {
        Ok(u8::from_le_bytes(self.array()?))
    }

    pub(crate) fn u16(&mut self) -> Result<u16, Malformed> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Malformed> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(crate) fn u64(&mut self) -> Result<u64, Malformed> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    pub(crate) fn key(&mut self) -> Result<ObjectKey, Malformed> {
        Ok(ObjectKey { block: self.array()?, identity: self.array()? })
    }

    pub(crate) fn pending(&mut self) -> Result<Pending, Malformed> {
        Ok(Pending { id: self.u64()?, generation: Generation(self.u64()?) })
    }

    pub(crate) fn end(&self) -> Result<(), Malformed> {
        if self.0.is_empty() { Ok(()) } else { Err(Malformed("bytes behind the end")) }
    }
}

pub(crate) fn put_key(out: &mut Vec<u8>, key: &ObjectKey) {
    out.extend_from_slice(&key.block);
    out.extend_from_slice(&key.identity);
}

pub(crate) fn put_pending(out: &mut Vec<u8>, pending: Pending) {
    out.extend_from_slice(&pending.id.to_le_bytes());
    out.extend_from_slice(&pending.generation.0.to_le_bytes());
}

/// What a read or a write is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Descriptor {
    Read { key: ObjectKey, generation: Generation, len: u64 },
    Write(Pending),
}

impl Descriptor {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(72);
        match self {
            Self::Read { key, generation, len } => {
                out.extend_from_slice(&[1, 0, 0, 0, 0, 0, 0, 0]);
                put_key(&mut out, key);
                out.extend_from_slice(&generation.0.to_le_bytes());
                out.extend_from_slice(&len.to_le_bytes());
            }
            Self::Write(pending) => {
                out.extend_from_slice(&[2, 0, 0, 0, 0, 0, 0, 0]);
                put_pending(&mut out, *pending);
            }
        }
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut fields = Fields(bytes);
        let descriptor = match fields.array()? {
            [1, 0, 0, 0, 0, 0, 0, 0] => Self::Read {
                key: fields.key()?,
                generation: Generation(fields.u64()?),
                len: fields.u64()?,
            },
            [2, 0, 0, 0, 0, 0, 0, 0] => Self::Write(fields.pending()?),
            _ => return Err(Malformed("a descriptor of an unknown kind")),
        };
        fields.end()?;
        Ok(descriptor)
    }
}

/// Begins a call of `items` items.
pub(crate) fn call(op: Op, items: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(12 + items * 56);
    out.extend_from_slice(&MAGIC);
    out.extend_from_slice(&VERSION.to_le_bytes());
    out.extend_from_slice(&(op as u16).to_le_bytes());
    out.extend_from_slice(&u32::try_from(items).unwrap_or(u32::MAX).to_le_bytes());
    out
}

/// The head of a call: what, how many, and the items.
pub(crate) fn parse_call(bytes: &[u8]) -> Result<(Op, u32, Fields<'_>), Malformed> {
    let mut fields = Fields(bytes);
    if fields.array()? != MAGIC {
        return Err(Malformed("no call of the remote pool"));
    }
    if fields.u16()? != VERSION {
        return Err(Malformed("another version of the remote pool; this peer speaks version 1"));
    }
    let (op, size) = match fields.u16()? {
        1 => (Op::Resolve, 48),
        2 => (Op::Allocate, 56),
        3 => (Op::Commit, 16),
        4 => (Op::Abort, 16),
        5 => (Op::Remove, 48),
        6 => (Op::Stat, 0),
        7 => (Op::Touch, 48),
        8 => (Op::Lease, 48),
        9 => (Op::Release, 8),
        _ => return Err(Malformed("an operation that does not exist")),
    };
    let items = fields.u32()?;
    if items > MAX_ITEMS {
        return Err(Malformed("more than 4096 items in a call"));
    }
    let want = if op == Op::Stat { 0 } else { u64::from(items) * size };
    if fields.0.len() as u64 != want {
        return Err(Malformed("another length than the items have"));
    }
    Ok((op, items, fields))
}

/// The outcome of this number.
pub(crate) fn get_outcome(status: u8) -> Result<GetOutcome, Malformed> {
    GetOutcome::from_number(status).ok_or(Malformed("an outcome that does not exist"))
}

/// The outcome of this number.
pub(crate) fn put_outcome(status: u8) -> Result<PutOutcome, Malformed> {
    PutOutcome::from_number(status).ok_or(Malformed("an outcome that does not exist"))
}

/// The outcome of this number.
pub(crate) fn remove_outcome(status: u8) -> Result<RemoveOutcome, Malformed> {
    RemoveOutcome::from_number(status).ok_or(Malformed("an outcome that does not exist"))
}

pub(crate) fn put_pages(out: &mut Vec<u8>, pages: &PageList) {
    out.extend_from_slice(&pages.page_bytes.to_le_bytes());
    out.extend_from_slice(&u32::try_from(pages.pages.len()).unwrap_or(u32::MAX).to_le_bytes());
    for page in &pages.pages {
        out.extend_from_slice(&page.region.index.to_le_bytes());
        out.extend_from_slice(&page.offset.to_le_bytes());
    }
}

/// The pages of an object of `len` bytes.
pub(crate) fn pages(fields: &mut Fields<'_>, len: u64) -> Result<PageList, Malformed> {
    let page_bytes = fields.u64()?;
    let count = fields.u32()?;
    if page_bytes == 0 || len.div_ceil(page_bytes) != u64::from(count) {
        return Err(Malformed("another number of pages than the object has"));
    }
    if (fields.0.len() as u64) < u64::from(count) * 12 {
        return Err(SHORT);
    }
    let mut pages = Vec::with_capacity(count as usize);
    for _ in 0..count {
        let index = fields.u32()?;
        pages.push(segment(index, fields.u64()?));
    }
    Ok(PageList { pages, page_bytes, len })
}

pub(crate) fn put_usage(out: &mut Vec<u8>, usage: &PeerUsage) {
    let medium = usage.medium;
    for number in [
        medium.capacity_bytes,
        medium.committed_bytes,
        medium.pending_bytes,
        medium.quarantine_bytes,
        medium.leases,
        usage.objects,
        usage.evictions,
        usage.page_bytes,
    ] {
        out.extend_from_slice(&number.to_le_bytes());
    }
}

pub(crate) fn usage(bytes: &[u8]) -> Result<PeerUsage, Malformed> {
    let mut fields = Fields(bytes);
    let mut usage = PeerUsage::default();
    usage.medium.capacity_bytes = fields.u64()?;
    usage.medium.committed_bytes = fields.u64()?;
    usage.medium.pending_bytes = fields.u64()?;
    usage.medium.quarantine_bytes = fields.u64()?;
    usage.medium.leases = fields.u64()?;
    usage.objects = fields.u64()?;
    usage.evictions = fields.u64()?;
    usage.page_bytes = fields.u64()?;
    // A newer peer may say more.
    Ok(usage)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_come_back_as_they_went_and_nothing_else_is_one() {
        let key = ObjectKey { block: [1; 16], identity: [2; 32] };
        let read = Descriptor::Read { key, generation: Generation(3), len: 4 };
        let write = Descriptor::Write(Pending { id: 5, generation: Generation(6) });
        for descriptor in [read, write] {
            let bytes = descriptor.encode();
            assert_eq!(Descriptor::decode(&bytes), Ok(descriptor));
            for end in 0..bytes.len() {
                assert!(Descriptor::decode(&bytes[..end]).is_err());
            }
            let mut more = bytes.clone();
            more.push(0);
            assert!(Descriptor::decode(&more).is_err());
            more = bytes;
            more[3] = 1;
            assert!(Descriptor::decode(&more).is_err());
        }
    }

    #[test]
    fn a_call_has_exactly_its_items() {
        let mut good = call(Op::Commit, 2);
        let pending = Pending { id: 1, generation: Generation(2) };
        put_pending(&mut good, pending);
        put_pending(&mut good, pending);
        let (op, items, mut fields) = parse_call(&good).unwrap();
        assert_eq!((op, items), (Op::Commit, 2));
        assert_eq!((fields.pending(), fields.pending()), (Ok(pending), Ok(pending)));
        assert_eq!(fields.end(), Ok(()));
        for end in 0..good.len() {
            assert!(parse_call(&good[..end]).is_err());
        }
        let mut other = good.clone();
        other[4] = 2;
        assert!(parse_call(&other).unwrap_err().0.contains("version"));
        other = good.clone();
        other[6] = 99;
        assert!(parse_call(&other).is_err());
        other = good;
        other[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(parse_call(&other).is_err());
        let mut bytes = Vec::new();
        let mut said = PeerUsage { objects: 7, page_bytes: 9, ..PeerUsage::default() };
        said.medium.leases = 3;
        put_usage(&mut bytes, &said);
        assert_eq!(usage(&bytes), Ok(said));
        assert!(usage(&bytes[1..]).is_err());
    }

    #[test]
    fn pages_are_as_many_as_the_object_has() {
        let list = PageList { pages: vec![segment(0, 7), segment(1, 9)], page_bytes: 10, len: 11 };
        let mut bytes = Vec::new();
        put_pages(&mut bytes, &list);
        assert_eq!(pages(&mut Fields(&bytes), 11), Ok(list));
        for len in [0, 10, 21, u64::MAX] {
            assert!(pages(&mut Fields(&bytes), len).is_err());
        }
        for end in 0..bytes.len() {
            assert!(pages(&mut Fields(&bytes[..end]), 11).is_err());
        }
    }
}
