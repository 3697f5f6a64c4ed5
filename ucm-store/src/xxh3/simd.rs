//! The block loop of XXH3 with vector instructions.
//!
//! **Invariant:** each kernel gives exactly what the plain one gives.

use std::arch::x86_64::{
    __m256i, _mm256_add_epi64, _mm256_loadu_si256, _mm256_mul_epu32, _mm256_set1_epi64x,
    _mm256_shuffle_epi32, _mm256_slli_epi64, _mm256_srli_epi64, _mm256_storeu_si256,
    _mm256_xor_si256,
};

use super::{BLOCK, PRIME32_1, SECRET, STRIPE, secret};

/// Swaps the halves of each pair of 64-bit lanes.
const SWAP: i32 = 0b01_00_11_10;
#[expect(clippy::cast_possible_wrap, reason = "a 32-bit number")]
const PRIME: i64 = PRIME32_1 as i64;

/// # Safety
/// `count` blocks are valid at `from`, and the CPU has AVX2.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn blocks_avx2(acc: &mut [u64; 8], from: *const u8, count: usize) {
    let halves = acc.as_mut_ptr().cast::<__m256i>();
    // SAFETY: `acc` is two vectors long.
    let second = unsafe { halves.add(1) };
    // SAFETY: as above.
    let (mut a, mut b) =
        (unsafe { _mm256_loadu_si256(halves) }, unsafe { _mm256_loadu_si256(second) });
    for block in 0..count {
        for stripe in 0..BLOCK / STRIPE {
            // SAFETY: block < count.
            let at = unsafe { from.add(block * BLOCK + stripe * STRIPE) }.cast::<__m256i>();
            let (low, high) = keys_256(stripe * 8);
            // SAFETY: the first half of a stripe inside the blocks.
            a = add_256(a, unsafe { _mm256_loadu_si256(at) }, low);
            // SAFETY: a stripe is two vectors long.
            let at = unsafe { at.add(1) };
            // SAFETY: the second half of it.
            b = add_256(b, unsafe { _mm256_loadu_si256(at) }, high);
        }
        let (low, high) = keys_256(SECRET.len() - STRIPE);
        (a, b) = (scramble_256(a, low), scramble_256(b, high));
    }
    // SAFETY: as for the loads.
    unsafe { _mm256_storeu_si256(halves, a) };
    // SAFETY: as for the loads.
    unsafe { _mm256_storeu_si256(second, b) };
}

#[target_feature(enable = "avx2")]
fn keys_256(offset: usize) -> (__m256i, __m256i) {
    let at = secret(offset).as_ptr().cast::<__m256i>();
    // SAFETY: 64 bytes, two vectors.
    let high = unsafe { at.add(1) };
    // SAFETY: as above.
    (unsafe { _mm256_loadu_si256(at) }, unsafe { _mm256_loadu_si256(high) })
}

#[target_feature(enable = "avx2")]
fn add_256(sum: __m256i, data: __m256i, key: __m256i) -> __m256i {
    let keyed = _mm256_xor_si256(data, key);
    let product = _mm256_mul_epu32(keyed, _mm256_srli_epi64::<32>(keyed));
    let sum = _mm256_add_epi64(sum, _mm256_shuffle_epi32::<SWAP>(data));
    _mm256_add_epi64(sum, product)
}

#[target_feature(enable = "avx2")]
fn scramble_256(sum: __m256i, key: __m256i) -> __m256i {
    let mixed = _mm256_xor_si256(sum, _mm256_srli_epi64::<47>(sum));
    let mixed = _mm256_xor_si256(mixed, key);
    let prime = _mm256_set1_epi64x(PRIME);
    let low = _mm256_mul_epu32(mixed, prime);
    let high = _mm256_mul_epu32(_mm256_srli_epi64::<32>(mixed), prime);
    _mm256_add_epi64(low, _mm256_slli_epi64::<32>(high))
}
