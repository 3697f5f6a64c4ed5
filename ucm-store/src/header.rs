//! The 4096-byte header in front of every object, byte by byte.
//!
//! **Invariant:** a header that [`parse`](Header::parse) accepts was written whole by
//! [`encode`](Header::encode) of this format version; everything in it is covered by its checksum.
//!
//! All numbers are little-endian.
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 8 | magic `UCMOBJ\r\n` |
//! | 8 | 4 | format version, 1 |
//! | 12 | 4 | header length, 4096 |
//! | 16 | 16 | block id |
//! | 32 | 4 | shard index |
//! | 36 | 4 | zero |
//! | 40 | 8 | generation: Unix time of the dump in nanoseconds, growing from dump to dump of a process |
//! | 48 | 8 | payload length in bytes |
//! | 56 | 8 | XXH3-64 (seed 0) of the payload |
//! | 64 | 8 | XXH3-64 (seed 0) of the descriptor |
//! | 72 | 4 | descriptor length in bytes, at most 4008 |
//! | 76 | 4 | zero |
//! | 80 | 8 | XXH3-64 (seed 0) of all 4096 bytes of the header with this field zero |
//! | 88 | n | namespace descriptor |
//! | 88 + n | … | zero up to 4096 |
//! | 4096 | … | payload, then zero up to a multiple of 4096 |

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{SystemTime, UNIX_EPOCH},
};

use crate::{ErrorKind, StoreError, xxh3::xxh3_64};

/// Length of the header, and what everything in the file is aligned to.
pub(crate) const HEADER_BYTES: usize = 4096;
/// Longest namespace descriptor.
pub(crate) const MAX_DESCRIPTOR_BYTES: usize = HEADER_BYTES - DESCRIPTOR_AT;

/// Makes the generations of headers, of all dumps of one backend.
#[derive(Debug, Default)]
pub(crate) struct Generations(AtomicU64);

impl Generations {
    /// Time in nanoseconds, growing from dump to dump of this process.
    pub(crate) fn next(&self) -> u64 {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now = u64::try_from(since.as_nanos()).unwrap_or(u64::MAX);
        let next = |last: u64| now.max(last.saturating_add(1));
        let update =
            self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |last| Some(next(last)));
        next(update.unwrap_or_else(|last| last))
    }
}

const MAGIC: [u8; 8] = *b"UCMOBJ\r\n";
const VERSION: u32 = 1;
const DESCRIPTOR_AT: usize = 88;
const CHECKSUM_AT: usize = 80;

/// A header block; aligned, so that it can be read with `O_DIRECT` too.
#[derive(Clone)]
#[repr(C, align(4096))]
pub(crate) struct HeaderBlock(pub(crate) [u8; HEADER_BYTES]);

const _: () = assert!(size_of::<HeaderBlock>() == HEADER_BYTES);

/// What a header says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Header<'a> {
    pub(crate) block: [u8; 16],
    pub(crate) shard: u32,
    pub(crate) generation: u64,
    pub(crate) payload_bytes: u64,
    pub(crate) payload_hash: u64,
    pub(crate) descriptor: &'a [u8],
}

/// Length of a file whose payload has this many bytes; `None` if no file can be that long.
pub(crate) fn file_bytes(payload_bytes: u64) -> Option<u64> {
    let padded = payload_bytes.checked_next_multiple_of(HEADER_BYTES as u64)?;
    padded.checked_add(HEADER_BYTES as u64).filter(|n| *n <= i64::MAX as u64)
}

impl<'a> Header<'a> {
    /// Writes the header. The descriptor was checked to fit when the backend was opened.
    pub(crate) fn encode(&self) -> HeaderBlock {
        let mut block = HeaderBlock([0; HEADER_BYTES]);
        let mut at = 0;
        let mut put = |bytes: &[u8]| {
            if let Some(into) = block.0.get_mut(at..at + bytes.len()) {
                into.copy_from_slice(bytes);
            }
            at += bytes.len();
        };
        let descriptor_bytes = u32::try_from(self.descriptor.len()).unwrap_or(u32::MAX);
        put(&MAGIC);
        put(&VERSION.to_le_bytes());
        put(&4096u32.to_le_bytes());
        put(&self.block);
        put(&self.shard.to_le_bytes());
        put(&0u32.to_le_bytes());
        put(&self.generation.to_le_bytes());
        put(&self.payload_bytes.to_le_bytes());
        put(&self.payload_hash.to_le_bytes());
        put(&xxh3_64(self.descriptor).to_le_bytes());
        put(&descriptor_bytes.to_le_bytes());
        put(&0u32.to_le_bytes());
        put(&0u64.to_le_bytes());
        put(self.descriptor);
        let checksum = xxh3_64(&block.0);
        put_at(&mut block.0, CHECKSUM_AT, &checksum.to_le_bytes());
        block
    }

    /// Reads a header, and finds out whether it is one.
    ///
    /// # Errors
    /// `Corrupt`, saying what differs.
    pub(crate) fn parse(block: &'a HeaderBlock) -> Result<Self, StoreError> {
        let bytes = &block.0;
        let corrupt = |what: String| StoreError::new(ErrorKind::Corrupt, what);
        if field::<8>(bytes, 0) != MAGIC {
            return Err(corrupt("no magic: not an object".into()));
        }
        let version = u32::from_le_bytes(field(bytes, 8));
        if version != VERSION {
            return Err(corrupt(format!("format version {version}, this build reads {VERSION}")));
        }
        let mut plain = block.clone();
        put_at(&mut plain.0, CHECKSUM_AT, &[0; 8]);
        let (stored, computed) = (u64::from_le_bytes(field(bytes, CHECKSUM_AT)), xxh3_64(&plain.0));
        if stored != computed {
            return Err(corrupt(format!("header checksum {stored:#x}, computed {computed:#x}")));
        }
        let len = u32::from_le_bytes(field(bytes, 72)) as usize;
        let descriptor = len
            .checked_add(DESCRIPTOR_AT)
            .and_then(|end| bytes.get(DESCRIPTOR_AT..end))
            .ok_or_else(|| corrupt(format!("a descriptor of {len} bytes in a header of 4096")))?;
        if u64::from_le_bytes(field(bytes, 64)) != xxh3_64(descriptor) {
            return Err(corrupt("the hash of the descriptor differs from the descriptor".into()));
        }
        Ok(Self {
            block: field(bytes, 16),
            shard: u32::from_le_bytes(field(bytes, 32)),
            generation: u64::from_le_bytes(field(bytes, 40)),
            payload_bytes: u64::from_le_bytes(field(bytes, 48)),
            payload_hash: u64::from_le_bytes(field(bytes, 56)),
            descriptor,
        })
    }

    /// Compares with what is asked for. The length is compared apart: an object of another length
    /// is whole all the same.
    ///
    /// # Errors
    /// `Corrupt`, saying what differs.
    pub(crate) fn check_identity(
        &self,
        block: &[u8; 16],
        shard: u32,
        descriptor: &[u8],
    ) -> Result<(), StoreError> {
        let corrupt = |what: String| Err(StoreError::new(ErrorKind::Corrupt, what));
        if self.block != *block || self.shard != shard {
            return corrupt(format!(
                "the file holds block {:032x} shard {}, not block {:032x} shard {shard}",
                u128::from_be_bytes(self.block),
                self.shard,
                u128::from_be_bytes(*block),
            ));
        }
        if self.descriptor != descriptor {
            return corrupt(format!(
                "the object belongs to another namespace ({} bytes of descriptor)",
                self.descriptor.len()
            ));
        }
        Ok(())
    }
}

fn field<const N: usize>(bytes: &[u8; HEADER_BYTES], at: usize) -> [u8; N] {
    match bytes.get(at..).and_then(|rest| rest.first_chunk::<N>()) {
        Some(chunk) => *chunk,
        None => unreachable!("invariant: fields lie inside the header"),
    }
}

fn put_at(bytes: &mut [u8; HEADER_BYTES], at: usize, what: &[u8; 8]) {
    if let Some(into) = bytes.get_mut(at..at + 8) {
        into.copy_from_slice(what);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(descriptor: &[u8]) -> Header<'_> {
        Header {
            block: *b"0123456789abcdef",
            shard: 0x0403_0201,
            generation: 0x1817_1615_1413_1211,
            payload_bytes: 1_000_000,
            payload_hash: 0x2827_2625_2423_2221,
            descriptor,
        }
    }

    #[test]
    fn the_bytes_are_where_the_table_says() {
        let block = header(b"model=x").encode();
        let b = &block.0;
        assert_eq!(b[..8], *b"UCMOBJ\r\n");
        assert_eq!((b[8], b[12], b[13]), (1, 0, 16));
        assert_eq!(b[16..32], *b"0123456789abcdef");
        assert_eq!(b[32..36], [1, 2, 3, 4]);
        assert_eq!(b[40..48], [0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18]);
        assert_eq!(b[48..56], 1_000_000u64.to_le_bytes());
        assert_eq!(b[56..64], [0x21, 0x22, 0x23, 0x24, 0x25, 0x26, 0x27, 0x28]);
        assert_eq!(b[64..72], xxh3_64(b"model=x").to_le_bytes());
        assert_eq!(b[72..80], [7, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(b[88..95], *b"model=x");
        assert!(b[95..].iter().all(|b| *b == 0));
        assert_eq!(Header::parse(&block).unwrap(), header(b"model=x"));
    }

    #[test]
    fn any_flipped_bit_is_found() {
        let longest = vec![5; MAX_DESCRIPTOR_BYTES];
        for descriptor in [&b""[..], b"d", &longest] {
            let good = header(descriptor).encode();
            assert_eq!(Header::parse(&good).unwrap(), header(descriptor));
            for at in 0..HEADER_BYTES {
                let mut bad = good.clone();
                bad.0[at] ^= 1 << (at % 8);
                let err = Header::parse(&bad).unwrap_err();
                assert_eq!(err.kind(), ErrorKind::Corrupt, "byte {at}");
            }
        }
    }

    #[test]
    fn a60_identity_is_compared_in_full() {
        let h = header(b"ns");
        h.check_identity(&h.block, h.shard, b"ns").unwrap();
        let mut other = h.block;
        other[15] ^= 1;
        for result in [
            h.check_identity(&other, h.shard, b"ns"),
            h.check_identity(&h.block, h.shard + 1, b"ns"),
            h.check_identity(&h.block, h.shard, b"nt"),
            h.check_identity(&h.block, h.shard, b"n"),
        ] {
            assert_eq!(result.unwrap_err().kind(), ErrorKind::Corrupt);
        }
    }

    #[test]
    fn file_lengths_are_checked() {
        assert_eq!(file_bytes(1), Some(8192));
        assert_eq!(file_bytes(4096), Some(8192));
        assert_eq!(file_bytes(4097), Some(12288));
        assert_eq!(file_bytes(u64::MAX), None);
        assert_eq!(file_bytes(i64::MAX as u64), None);
    }
}
