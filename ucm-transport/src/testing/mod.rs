//! What every engine must pass, and helpers for tests of engines and of their users.
//!
//! **Invariant:** nothing here waits by time; time only serves as a watchdog that fails a test.

#![expect(clippy::unwrap_used, reason = "test support: a failure here is a failed test")]

mod bell;
mod conformance;
mod gate;
mod harness;

pub use bell::Bell;
pub use conformance::conformance;
pub use gate::GateEngine;
#[cfg(test)]
pub(crate) use harness::StopOnDrop;
pub use harness::{Harness, Runner};

#[cfg(feature = "tcp")]
pub use crate::tcp::parse::tcp_frames;

use std::time::Duration;

/// Longest time that anything in a test may take.
pub const WATCHDOG: Duration = Duration::from_secs(60);

/// SplitMix64, so that every run of the suite does the same.
#[derive(Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    /// Evenly in `low..high`.
    pub(crate) fn range(&mut self, low: u64, high: u64) -> u64 {
        low + self.next() % (high - low)
    }

    pub(crate) fn bytes(&mut self, len: usize) -> Vec<u8> {
        let words = std::iter::repeat_with(|| self.next().to_le_bytes());
        words.take(len.div_ceil(8)).flatten().take(len).collect()
    }

    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            let j = usize::try_from(self.range(0, i as u64 + 1)).unwrap();
            items.swap(i, j);
        }
    }
}
