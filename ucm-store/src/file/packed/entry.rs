//! The 64 bytes in front of a packed object, and of the same form in the index; and the 4096-byte
//! block that segment files and the index begin with.
//!
//! **Invariant:** what [`Entry::parse`] and [`Front::check`] accept was written whole by this version;
//! `docs/store.md` has the bytes.

use crate::xxh3::xxh3_64;

use crate::{ErrorKind, StoreError, file::header::HEADER_BYTES};

/// Length of an entry; positions of objects are multiples of it.
pub(super) const ENTRY_BYTES: usize = 64;
/// Longest segment: positions are 32-bit multiples of [`ENTRY_BYTES`].
pub(super) const MAX_SEGMENT_BYTES: u64 = (u32::MAX as u64) * ENTRY_BYTES as u64;

const VERSION: u32 = 1;
const DESCRIPTOR_AT: usize = 88;

/// What an entry says about its object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// In a segment: the object's bytes follow.
    Record,
    /// In the index: the object lies there.
    Put,
    /// In the index: the object is there no more.
    Remove,
    /// In the index: the segment is there no more.
    Drop,
}

impl Kind {
    const ALL: [(Self, [u8; 4]); 4] = [
        (Self::Record, *b"UCMr"),
        (Self::Put, *b"UCMp"),
        (Self::Remove, *b"UCMd"),
        (Self::Drop, *b"UCMs"),
    ];
}

/// One packed object, in its segment and in the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) kind: Kind,
    pub(super) block: [u8; 16],
    pub(super) shard: u32,
    pub(super) segment: u64,
    /// Position of the record in its segment, in multiples of 64 bytes.
    pub(super) place: u32,
    pub(super) payload_bytes: u32,
    pub(super) generation: u64,
    pub(super) payload_hash: u64,
}

impl Entry {
    pub(super) fn encode(&self) -> [u8; ENTRY_BYTES] {
        let mut bytes = [0; ENTRY_BYTES];
        let mut at = 0;
        let mut put = |field: &[u8]| {
            if let Some(into) = bytes.get_mut(at..at + field.len()) {
                into.copy_from_slice(field);
            }
            at += field.len();
        };
        let magic = Kind::ALL.iter().find(|(kind, _)| *kind == self.kind);
        put(magic.map_or(&[0; 4], |(_, magic)| magic));
        put(&self.shard.to_le_bytes());
        put(&self.block);
        put(&self.segment.to_le_bytes());
        put(&self.place.to_le_bytes());
        put(&self.payload_bytes.to_le_bytes());
        put(&self.generation.to_le_bytes());
        put(&self.payload_hash.to_le_bytes());
        let (fields, sum) = bytes.split_at_mut(ENTRY_BYTES - 8);
        sum.copy_from_slice(&xxh3_64(fields).to_le_bytes());
        bytes
    }

    /// `None`: no entry, or a damaged one.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; ENTRY_BYTES] = bytes.first_chunk()?;
        let (fields, sum) = bytes.split_last_chunk::<8>()?;
        if u64::from_le_bytes(*sum) != xxh3_64(fields) {
            return None;
        }
        let magic: [u8; 4] = field(bytes, 0)?;
        Some(Self {
            kind: Kind::ALL.iter().find(|(_, known)| *known == magic)?.0,
            shard: u32::from_le_bytes(field(bytes, 4)?),
            block: field(bytes, 8)?,
            segment: u64::from_le_bytes(field(bytes, 24)?),
            place: u32::from_le_bytes(field(bytes, 32)?),
            payload_bytes: u32::from_le_bytes(field(bytes, 36)?),
            generation: u64::from_le_bytes(field(bytes, 40)?),
            payload_hash: u64::from_le_bytes(field(bytes, 48)?),
        })
    }

    /// Bytes from the record's first to the next record's.
    pub(super) fn stride(payload_bytes: u32) -> u64 {
        (ENTRY_BYTES as u64 + u64::from(payload_bytes)).next_multiple_of(ENTRY_BYTES as u64)
    }

    /// Position of the record in bytes.
    pub(super) fn offset(place: u32) -> u64 {
        u64::from(place) * ENTRY_BYTES as u64
    }
}

fn field<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk::<N>().copied()
}

/// Which file a front belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Front {
    Segment(u64),
    Index,
}

impl Front {
    fn magic(self) -> ([u8; 8], u64) {
        match self {
            Self::Segment(id) => (*b"UCMSEG\r\n", id),
            Self::Index => (*b"UCMIDX\r\n", 0),
        }
    }

    /// The first 4096 bytes of the file.
    pub(super) fn encode(self, descriptor: &[u8]) -> Vec<u8> {
        let (magic, id) = self.magic();
        let length = u32::try_from(descriptor.len()).unwrap_or(u32::MAX);
        let mut bytes = Vec::with_capacity(HEADER_BYTES);
        bytes.extend(magic);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(4096u32.to_le_bytes());
        bytes.extend(id.to_le_bytes());
        bytes.resize(64, 0);
        bytes.extend(xxh3_64(descriptor).to_le_bytes());
        bytes.extend(length.to_le_bytes());
        bytes.resize(DESCRIPTOR_AT, 0);
        bytes.extend(descriptor);
        bytes.resize(HEADER_BYTES, 0);
        let sum = xxh3_64(&bytes);
        if let Some(into) = bytes.get_mut(80..88) {
            into.copy_from_slice(&sum.to_le_bytes());
        }
        bytes
    }

    /// # Errors
    /// `Corrupt`, when these are not exactly the bytes that belong there.
    pub(super) fn check(self, bytes: &[u8], descriptor: &[u8]) -> Result<(), StoreError> {
        if bytes.get(..HEADER_BYTES) == Some(&self.encode(descriptor)[..]) {
            return Ok(());
        }
        let what = match self {
            Self::Segment(id) => format!("the front of segment {id:016x}"),
            Self::Index => "the front of the index".to_owned(),
        };
        Err(StoreError::new(
            ErrorKind::Corrupt,
            format!("{what} is damaged or another namespace's"),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(kind: Kind) -> Entry {
        Entry {
            kind,
            block: *b"0123456789abcdef",
            shard: 0x0403_0201,
            segment: 0x1817_1615_1413_1211,
            place: 0x2423_2221,
            payload_bytes: 1728,
            generation: 0x3837_3635_3433_3231,
            payload_hash: 0x4847_4645_4443_4241,
        }
    }

    #[test]
    fn the_bytes_are_where_the_table_says() {
        let b = entry(Kind::Put).encode();
        assert_eq!(b[..8], *b"UCMp\x01\x02\x03\x04");
        assert_eq!(b[8..24], *b"0123456789abcdef");
        assert_eq!(b[24..32], [0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18]);
        assert_eq!(b[32..40], [0x21, 0x22, 0x23, 0x24, 0xC0, 6, 0, 0]);
        assert_eq!(b[40..48], [0x31, 0x32, 0x33, 0x34, 0x35, 0x36, 0x37, 0x38]);
        assert_eq!(b[48..56], [0x41, 0x42, 0x43, 0x44, 0x45, 0x46, 0x47, 0x48]);
        assert_eq!(b[56..], xxh3_64(&b[..56]).to_le_bytes());
        let f = Front::Segment(7).encode(b"model=x");
        assert_eq!(f[..24], *b"UCMSEG\r\n\x01\0\0\0\x00\x10\0\0\x07\0\0\0\0\0\0\0");
        assert_eq!(f[72..76], [7, 0, 0, 0]);
        assert_eq!(f[88..95], *b"model=x");
    }

    #[test]
    fn any_flipped_bit_is_found() {
        for (kind, _) in Kind::ALL {
            let good = entry(kind).encode();
            assert_eq!(Entry::parse(&good), Some(entry(kind)));
            for bit in 0..ENTRY_BYTES * 8 {
                let mut bad = good;
                bad[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(Entry::parse(&bad), None, "bit {bit}");
            }
        }
        assert_eq!(Entry::parse(&[0; 64]), None);
        for front in [Front::Segment(1), Front::Index] {
            let good = front.encode(b"ns");
            front.check(&good, b"ns").unwrap();
            front.check(&good, b"nt").unwrap_err();
            Front::Segment(2).check(&good, b"ns").unwrap_err();
            for at in 0..HEADER_BYTES {
                let mut bad = good.clone();
                bad[at] ^= 1 << (at % 8);
                front.check(&bad, b"ns").unwrap_err();
            }
        }
    }
}
