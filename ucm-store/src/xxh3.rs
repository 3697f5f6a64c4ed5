//! XXH3-64 (seed 0) over raw memory, in steps, so that bytes are hashed while they are in cache.
//!
//! **Invariant:** the memory may be shared with other processes: it is copied piece by piece into
//! this thread's own buffer, and only the copy is hashed. (A piece stays in the first-level cache;
//! the copy costs a few percent of the hash.)

use std::{fmt, hash::Hasher, ptr::NonNull};

use twox_hash::XxHash3_64;

/// Bytes copied at once.
const PIECE: usize = 4096;

/// A hash in progress over `len` bytes at one place.
pub(crate) struct RawHash {
    base: NonNull<u8>,
    len: usize,
    /// Bytes taken in so far.
    done: usize,
    hash: Box<XxHash3_64>,
}

impl RawHash {
    /// Starts over `len` bytes at `base`.
    ///
    /// # Safety
    /// The range stays valid for reads until the hash is finished or dropped.
    pub(crate) unsafe fn new(base: NonNull<u8>, len: usize) -> Self {
        Self { base, len, done: 0, hash: Box::new(XxHash3_64::new()) }
    }

    /// Takes in what can be taken in of the first `available` bytes, which are there by now.
    pub(crate) fn advance(&mut self, available: usize) {
        let end = available.min(self.len);
        let mut piece = [0_u8; PIECE];
        while self.done < end {
            let (bytes, _) = piece.split_at_mut((end - self.done).min(PIECE));
            // SAFETY: done < end <= len, and the range is valid (`new`).
            let from = unsafe { self.base.add(self.done) };
            // SAFETY: as above for the length of `bytes`, which are this thread's own.
            unsafe { from.as_ptr().copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
            self.hash.write(bytes);
            self.done += bytes.len();
        }
    }

    /// The hash of all bytes.
    pub(crate) fn finish(mut self) -> u64 {
        self.advance(self.len);
        self.hash.finish()
    }
}

impl fmt::Debug for RawHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RawHash")
            .field("len", &self.len)
            .field("done", &self.done)
            .finish_non_exhaustive()
    }
}

/// The hash of bytes that nobody else writes.
pub(crate) fn xxh3_64(bytes: &[u8]) -> u64 {
    XxHash3_64::oneshot(bytes)
}

/// The hash of `len` bytes at `base`.
///
/// # Safety
/// The range is valid for reads.
pub(crate) unsafe fn hash(base: NonNull<u8>, len: usize) -> u64 {
    // SAFETY: the caller's promise covers the whole life of the hash.
    unsafe { RawHash::new(base, len) }.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equals_the_hash_of_the_whole_whatever_the_steps() {
        let bytes: Vec<u8> = (0..100_000_u32)
            .map(|i| (i.wrapping_mul(2_654_435_761) >> 24).to_le_bytes()[0])
            .collect();
        let base = NonNull::from(&bytes[..]).cast();
        for len in [0, 1, 63, 64, 240, 241, 4095, 4096, 4097, 100_000] {
            let expected = crate::xxh3::xxh3_64(&bytes[..len]);
            // SAFETY: the vector lives on and has `len` bytes.
            assert_eq!(unsafe { hash(base, len) }, expected, "{len}");
            for step in [1, 100, 4096, 5000] {
                // SAFETY: as above.
                let mut steps = unsafe { RawHash::new(base, len) };
                (0..len).step_by(step).for_each(|at| steps.advance(at));
                steps.advance(usize::MAX);
                assert_eq!(steps.finish(), expected, "{len} in steps of {step}");
            }
        }
    }
}
