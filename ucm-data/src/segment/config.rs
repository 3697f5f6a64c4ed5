//! What a pool should look like, and the checked arithmetic that turns it into a plan.
//!
//! **Invariant:** a [`Plan`] contains no number that overflowed, no unaligned number and no slot that
//! straddles two segments; everything else was refused with the offending value.

use crate::DataError;
use crate::segment::numa::NumaPolicy;
use crate::segment::tier::PageTier;

/// Most segments of one pool.
pub(crate) const MAX_SEGMENTS: usize = 4096;
/// Smallest unit of a segment.
pub(crate) const SMALL_PAGE: u64 = 4096;

/// How many slots go into one segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Packing {
    /// A power of two, so that addressing is shift and mask.
    #[default]
    PowerOfTwo,
    /// As many as fit; addressing divides. Fewer, larger segments for odd slot sizes.
    Dense,
}

/// Description of a pool's memory.
#[derive(Clone, Debug)]
pub struct SegmentsConfig {
    /// Payload bytes of one slot.
    pub slot_bytes: u64,
    /// Number of slots.
    pub slots: u32,
    /// Largest segment in bytes, a multiple of 4096. Default 1 GiB.
    pub segment_bytes: u64,
    /// Alignment of slots in bytes, a power of two from 64 to 2 MiB. `None`: 4096, or 64 for slots
    /// smaller than 4096 bytes.
    pub slot_align: Option<u64>,
    /// How many slots go into one segment.
    pub packing: Packing,
    /// Best tier to try; the ladder goes down from here.
    pub prefer: PageTier,
    /// If set, this tier or an error.
    pub strict: Option<PageTier>,
    /// Where pages are placed.
    pub numa: NumaPolicy,
    /// Threads that allocate (segments in parallel). At least 1.
    pub threads: usize,
}

impl SegmentsConfig {
    /// `slots` slots of `slot_bytes` bytes, 2 MiB huge pages if there are any, else what there is.
    #[must_use]
    pub fn new(slot_bytes: u64, slots: u32) -> Self {
        Self {
            slot_bytes,
            slots,
            segment_bytes: 1 << 30,
            slot_align: None,
            packing: Packing::default(),
            prefer: PageTier::Huge2M,
            strict: None,
            numa: NumaPolicy::Local,
            threads: std::thread::available_parallelism().map_or(1, |n| n.get().min(8)),
        }
    }

    /// Checks every number and computes the layout. Allocates nothing.
    pub(crate) fn plan(&self) -> Result<Plan, DataError> {
        let invalid = |text: String| Err(DataError::invalid(text));
        if self.slot_bytes == 0 {
            return invalid("slot_bytes is 0; a slot needs at least 1 byte".into());
        }
        if self.slots == 0 {
            return invalid("slots is 0; a pool needs at least 1 slot".into());
        }
        if self.threads == 0 {
            return invalid("threads is 0; at least 1 thread must allocate".into());
        }
        let align =
            self.slot_align.unwrap_or(if self.slot_bytes >= SMALL_PAGE { SMALL_PAGE } else { 64 });
        if !align.is_power_of_two() || !(64..=2 << 20).contains(&align) {
            return invalid(format!(
                "slot_align is {align}; it must be a power of two from 64 to 2097152"
            ));
        }
        if self.segment_bytes == 0 || !self.segment_bytes.is_multiple_of(SMALL_PAGE) {
            return invalid(format!(
                "segment_bytes is {}; it must be a positive multiple of 4096",
                self.segment_bytes
            ));
        }
        if i64::try_from(self.segment_bytes).is_err() {
            return invalid(format!(
                "segment_bytes is {}; no file can be larger than {} bytes",
                self.segment_bytes,
                i64::MAX
            ));
        }
        let Some(stride) = self.slot_bytes.checked_next_multiple_of(align) else {
            return invalid(format!(
                "slot_bytes is {}; rounded up to {align} it overflows 64 bits",
                self.slot_bytes
            ));
        };
        if stride > self.segment_bytes {
            return invalid(format!(
                "a slot takes {stride} bytes but segment_bytes is {}; raise segment_bytes to at \
                 least {}",
                self.segment_bytes,
                stride.checked_next_multiple_of(SMALL_PAGE).unwrap_or(stride)
            ));
        }
        let total = stride.checked_mul(u64::from(self.slots));
        if total.and_then(|t| i64::try_from(t).ok()).is_none() {
            return invalid(format!(
                "{} slots of {stride} bytes overflow the address space",
                self.slots
            ));
        }
        let per_segment = self.slots_per_segment(stride);
        let segments = self.slots.div_ceil(per_segment);
        if segments as usize > MAX_SEGMENTS {
            return invalid(format!(
                "the pool needs {segments} segments of at most {} bytes, more than {MAX_SEGMENTS}; \
                 raise segment_bytes",
                self.segment_bytes
            ));
        }
        Ok(Plan { stride, per_segment, segments })
    }

    fn slots_per_segment(&self, stride: u64) -> u32 {
        let fit = u32::try_from(self.segment_bytes / stride).unwrap_or(u32::MAX).max(1);
        match self.packing {
            Packing::Dense => fit.min(self.slots),
            Packing::PowerOfTwo if self.slots <= fit => {
                self.slots.checked_next_power_of_two().unwrap_or(1 << 31)
            }
            Packing::PowerOfTwo => 1 << fit.ilog2(),
        }
    }
}

/// Checked layout of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) stride: u64,
    pub(crate) per_segment: u32,
    pub(crate) segments: u32,
}

impl Plan {
    /// Bytes that slots occupy in segment `index`.
    pub(crate) fn used_bytes(&self, slots: u32, index: u32) -> u64 {
        let first = u64::from(index) * u64::from(self.per_segment);
        let here = u64::from(slots).saturating_sub(first).min(u64::from(self.per_segment));
        here * self.stride
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;

    fn refused(config: &SegmentsConfig, value: &str) {
        let error = config.plan().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains(value), "{error} does not name {value}");
    }

    #[test]
    fn m4_every_bad_number_is_refused_with_its_value() {
        let good = SegmentsConfig::new(1 << 20, 100);
        good.plan().unwrap();
        refused(&SegmentsConfig { slot_bytes: 0, ..good.clone() }, "slot_bytes is 0");
        refused(&SegmentsConfig { slots: 0, ..good.clone() }, "slots is 0");
        refused(&SegmentsConfig { threads: 0, ..good.clone() }, "threads is 0");
        refused(&SegmentsConfig { slot_align: Some(96), ..good.clone() }, "slot_align is 96");
        refused(&SegmentsConfig { slot_align: Some(32), ..good.clone() }, "slot_align is 32");
        refused(&SegmentsConfig { slot_align: Some(4 << 20), ..good.clone() }, "4194304");
        refused(&SegmentsConfig { segment_bytes: 0, ..good.clone() }, "segment_bytes is 0");
        refused(&SegmentsConfig { segment_bytes: 1_000_001, ..good.clone() }, "1000001");
        refused(&SegmentsConfig { segment_bytes: 1 << 63, ..good.clone() }, "9223372036854775808");
        refused(
            &SegmentsConfig { slot_bytes: u64::MAX - 5, ..good.clone() },
            "18446744073709551610",
        );
        refused(&SegmentsConfig { slot_bytes: 3 << 30, ..good.clone() }, "3221225472");
        let huge = 1u64 << 40;
        refused(
            &SegmentsConfig {
                slot_bytes: huge,
                slots: u32::MAX,
                segment_bytes: huge,
                ..good.clone()
            },
            "4294967295",
        );
        refused(
            &SegmentsConfig { slots: 5000, slot_bytes: 4096, segment_bytes: 4096, ..good },
            "5000 segments",
        );
    }

    #[test]
    fn default_packing_is_a_power_of_two_and_dense_is_not() {
        let mut config = SegmentsConfig::new(3 << 20, 1000);
        assert_eq!(config.plan().unwrap(), Plan { stride: 3 << 20, per_segment: 256, segments: 4 });
        config.packing = Packing::Dense;
        assert_eq!(config.plan().unwrap(), Plan { stride: 3 << 20, per_segment: 341, segments: 3 });
    }

    #[test]
    fn a_small_pool_is_one_segment_of_just_its_slots() {
        let config = SegmentsConfig::new(100, 5);
        let plan = config.plan().unwrap();
        assert_eq!(plan, Plan { stride: 128, per_segment: 8, segments: 1 });
        assert_eq!(plan.used_bytes(5, 0), 5 * 128);
    }
}
