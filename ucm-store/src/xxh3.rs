//! XXH3-64 (seed 0) over raw memory, in steps, so that bytes are hashed while they are in cache.
//!
//! **Invariant:** the result equals `xxhash_rust::xxh3::xxh3_64` of the same bytes. The memory may be
//! shared with other processes: it is read word by word through raw pointers, never borrowed.

#[cfg(target_arch = "x86_64")]
mod simd;

use std::ptr::NonNull;

use xxhash_rust::xxh3::xxh3_64;

const STRIPE: usize = 64;
/// Stripes per block: (192 bytes of secret − one stripe) / 8.
const BLOCK: usize = 16 * STRIPE;
/// Up to this length XXH3 is another function.
const SHORT: usize = 240;

const PRIME32_1: u64 = 0x9E37_79B1;
const PRIME32_2: u64 = 0x85EB_CA77;
const PRIME32_3: u64 = 0xC2B2_AE3D;
const PRIME64_1: u64 = 0x9E37_79B1_85EB_CA87;
const PRIME64_2: u64 = 0xC2B2_AE3D_27D4_EB4F;
const PRIME64_3: u64 = 0x1656_67B1_9E37_79F9;
const PRIME64_4: u64 = 0x85EB_CA77_C2B2_AE63;
const PRIME64_5: u64 = 0x27D4_EB2F_1656_67C5;

/// The default secret of XXH3.
const SECRET: [u8; 192] = [
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
];

/// A hash in progress over `len` bytes at one place.
#[derive(Debug)]
pub(crate) struct RawHash {
    base: NonNull<u8>,
    len: usize,
    /// Bytes taken in so far: whole blocks.
    done: usize,
    acc: [u64; 8],
    kernel: Kernel,
}

/// Takes in whole blocks from a place on.
type Kernel = unsafe fn(&mut [u64; 8], *const u8, usize);

impl RawHash {
    /// Starts over `len` bytes at `base`.
    ///
    /// # Safety
    /// The range stays valid for reads until the hash is finished or dropped.
    pub(crate) unsafe fn new(base: NonNull<u8>, len: usize) -> Self {
        let acc = [
            PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1,
        ];
        Self { base, len, done: 0, acc, kernel: kernel() }
    }

    /// Takes in what can be taken in of the first `available` bytes, which are there by now.
    pub(crate) fn advance(&mut self, available: usize) {
        // The last block, whole or not, belongs to `finish`.
        let blocks_end = (self.len.max(1) - 1) / BLOCK * BLOCK;
        let end = available.min(blocks_end) / BLOCK * BLOCK;
        if self.len <= SHORT || end <= self.done {
            return;
        }
        // SAFETY: done <= end <= len, and the range is valid (`new`).
        let from = unsafe { self.base.add(self.done) };
        // SAFETY: as above; the kernel was chosen for this CPU.
        unsafe { (self.kernel)(&mut self.acc, from.as_ptr(), (end - self.done) / BLOCK) };
        self.done = end;
    }

    /// The hash of all bytes.
    pub(crate) fn finish(mut self) -> u64 {
        if self.len <= SHORT {
            let mut copy = [0u8; SHORT];
            // SAFETY: len <= SHORT bytes are valid at base (`new`); `copy` is ours.
            unsafe { self.base.as_ptr().copy_to_nonoverlapping(copy.as_mut_ptr(), self.len) };
            let (bytes, _) = copy.split_at(self.len);
            return xxh3_64(bytes);
        }
        self.advance(self.len);
        let stripes = (self.len - 1 - self.done) / STRIPE;
        for stripe in 0..stripes {
            // SAFETY: done + (stripe + 1) * STRIPE <= len - 1.
            let at = unsafe { self.base.add(self.done + stripe * STRIPE) };
            // SAFETY: as above; one stripe is valid there.
            unsafe { accumulate(&mut self.acc, at.as_ptr(), secret(stripe * 8)) };
        }
        // SAFETY: len > SHORT >= STRIPE.
        let last = unsafe { self.base.add(self.len - STRIPE) };
        // SAFETY: the last stripe is valid.
        unsafe { accumulate(&mut self.acc, last.as_ptr(), secret(SECRET.len() - STRIPE - 7)) };
        merge(&self.acc, (self.len as u64).wrapping_mul(PRIME64_1))
    }
}

/// The hash of `len` bytes at `base`.
///
/// # Safety
/// The range is valid for reads.
pub(crate) unsafe fn hash(base: NonNull<u8>, len: usize) -> u64 {
    // SAFETY: passed on.
    unsafe { RawHash::new(base, len) }.finish()
}

fn kernel() -> Kernel {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        return simd::blocks_avx2;
    }
    blocks
}

/// # Safety
/// `count` blocks are valid at `from`.
#[inline(always)]
unsafe fn blocks(acc: &mut [u64; 8], from: *const u8, count: usize) {
    for block in 0..count {
        for stripe in 0..BLOCK / STRIPE {
            // SAFETY: block < count.
            let at = unsafe { from.add(block * BLOCK + stripe * STRIPE) };
            // SAFETY: a stripe inside the blocks.
            unsafe { accumulate(acc, at, secret(stripe * 8)) };
        }
        scramble(acc);
    }
}

/// # Safety
/// One stripe is valid at `from`.
#[inline(always)]
unsafe fn accumulate(acc: &mut [u64; 8], from: *const u8, secret: &[u8; STRIPE]) {
    // SAFETY: a stripe is 64 valid bytes; they are copied out at once, because another process may
    // change them at any time.
    let data = unsafe { from.cast::<[u64; 8]>().read_unaligned() }.map(u64::from_le);
    let keys = words(secret);
    for lane in 0..8 {
        let keyed = data[lane] ^ keys[lane];
        let product = (keyed & 0xFFFF_FFFF).wrapping_mul(keyed >> 32);
        acc[lane] = acc[lane].wrapping_add(data[lane ^ 1]).wrapping_add(product);
    }
}

#[inline(always)]
fn scramble(acc: &mut [u64; 8]) {
    let keys = words(secret(SECRET.len() - STRIPE));
    for (lane, key) in acc.iter_mut().zip(keys) {
        *lane = (*lane ^ (*lane >> 47) ^ key).wrapping_mul(PRIME32_1);
    }
}

fn merge(acc: &[u64; 8], start: u64) -> u64 {
    let keys = words(secret(11));
    let mixed = (0..4).map(|i| {
        let product =
            u128::from(acc[2 * i] ^ keys[2 * i]) * u128::from(acc[2 * i + 1] ^ keys[2 * i + 1]);
        #[expect(clippy::cast_possible_truncation, reason = "the two halves of a product")]
        let folded = product as u64 ^ (product >> 64) as u64;
        folded
    });
    let hash = mixed.fold(start, u64::wrapping_add);
    let hash = (hash ^ (hash >> 37)).wrapping_mul(0x1656_6791_9E37_79F9);
    hash ^ (hash >> 32)
}

/// 64 bytes of the secret; offsets are constants below 129.
#[inline(always)]
fn secret(offset: usize) -> &'static [u8; STRIPE] {
    match SECRET.split_at_checked(offset).and_then(|(_, rest)| rest.first_chunk()) {
        Some(chunk) => chunk,
        None => unreachable!("invariant: secret offsets are at most 128"),
    }
}

#[inline(always)]
fn words(bytes: &[u8; STRIPE]) -> [u64; 8] {
    std::array::from_fn(|i| {
        let word = std::array::from_fn(|b| bytes[8 * i + b]);
        u64::from_le_bytes(word)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(bytes: &[u8]) -> u64 {
        // SAFETY: a slice is valid for its length.
        unsafe { hash(NonNull::from(bytes).cast(), bytes.len()) }
    }

    fn sample(len: usize) -> Vec<u8> {
        (0..len).map(|i| (i.wrapping_mul(2_654_435_761) >> 13).to_le_bytes()[0]).collect()
    }

    #[test]
    fn equals_the_reference_for_all_lengths_around_its_seams() {
        let bytes = sample(70_000);
        let near = |n: usize| n.saturating_sub(3)..n + 4;
        let seams = [0, 16, 128, 240, 256, 512, 1024, 1088, 2048, 4096, 10_240, 65_536];
        for len in seams.into_iter().flat_map(near).chain([69_998, 69_999]) {
            let part = &bytes[..len];
            assert_eq!(of(part), xxh3_64(part), "length {len}");
            assert_eq!(of(&bytes[1..=len]), xxh3_64(&bytes[1..=len]), "odd address, {len}");
        }
    }

    #[test]
    fn every_kernel_gives_the_same() {
        let bytes = sample(9000);
        let plain = |kernel: Kernel| {
            // SAFETY: a slice is valid for its length.
            let mut h = unsafe { RawHash::new(NonNull::from(&bytes[..]).cast(), bytes.len()) };
            h.kernel = kernel;
            h.finish()
        };
        assert_eq!(plain(blocks), xxh3_64(&bytes));
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            assert_eq!(plain(simd::blocks_avx2), xxh3_64(&bytes));
        }
    }

    #[test]
    fn steps_do_not_matter() {
        let bytes = sample(10_000);
        for step in [1, 1000, 1024, 4096, 9999] {
            // SAFETY: a slice is valid for its length.
            let mut h = unsafe { RawHash::new(NonNull::from(&bytes[..]).cast(), bytes.len()) };
            (0..=bytes.len()).step_by(step).for_each(|n| h.advance(n));
            assert_eq!(h.finish(), xxh3_64(&bytes));
        }
    }
}
