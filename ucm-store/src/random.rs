//! Seeded random numbers for delays and faults.
//!
//! **Invariant:** the same seed gives the same numbers on every machine.

/// SplitMix64: small, fast, good enough to schedule faults.
#[derive(Clone, Debug)]
pub(crate) struct SplitMix(u64);

impl SplitMix {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    /// Evenly in 0..1.
    pub(crate) fn unit(&mut self) -> f64 {
        // The upper 53 bits fill a mantissa exactly.
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}
