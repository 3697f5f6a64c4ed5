//! Geometry of a pool: slot addressing, and the encoded form that members exchange.
//!
//! Encoded form (little-endian):
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 8 | magic `UCMGEOM\0` |
//! | 8 | 4 | version, 1 |
//! | 12 | 4 | number of segments n |
//! | 16 | 8 | slot payload bytes |
//! | 24 | 8 | slot stride in bytes |
//! | 32 | 4 | number of slots |
//! | 36 | 4 | slots per segment |
//! | 40 | 1 | preferred tier |
//! | 41 | 7 | zero |
//! | 48 | 16·n | per segment: bytes (8), tier (1), zero (3), NUMA node or `u32::MAX` (4) |
//!
//! **Invariant:** a `Geometry` value is consistent: every slot lies inside one segment, whoever the
//! numbers came from.

use crate::DataError;
use crate::segment::config::{MAX_SEGMENTS, SMALL_PAGE};
use crate::segment::tier::PageTier;

const MAGIC: [u8; 8] = *b"UCMGEOM\0";
const VERSION: u32 = 1;
const HEAD_BYTES: usize = 48;
const ENTRY_BYTES: usize = 16;
const NO_NODE: u32 = u32::MAX;

/// Where a slot lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotAddr {
    /// Index of the segment.
    pub segment: u32,
    /// Byte offset in it.
    pub offset: u64,
}

/// One segment of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentInfo {
    /// Length in bytes, a multiple of the tier's page size.
    pub bytes: u64,
    /// Tier reached.
    pub tier: PageTier,
    /// NUMA node it is bound to, if bound to one.
    pub node: Option<u32>,
}

/// Geometry of a pool. Plain data; checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Geometry {
    slot_bytes: u64,
    preferred: PageTier,
    addressing: Addressing,
    segments: Vec<SegmentInfo>,
}

impl Geometry {
    pub(crate) fn new(
        slot_bytes: u64,
        addressing: Addressing,
        preferred: PageTier,
        segments: Vec<SegmentInfo>,
    ) -> Result<Self, DataError> {
        let Addressing { slots, per_segment, stride, .. } = addressing;
        let bad = |text: String| Err(DataError::corrupt(format!("geometry: {text}")));
        if slots == 0 || per_segment == 0 || slot_bytes == 0 {
            return bad(format!(
                "{slots} slots of {slot_bytes} bytes, {per_segment} per segment: none may be 0"
            ));
        }
        if stride < slot_bytes || !stride.is_multiple_of(64) {
            return bad(format!("stride {stride} does not hold slots of {slot_bytes} bytes"));
        }
        let wanted = slots.div_ceil(per_segment) as usize;
        if wanted > MAX_SEGMENTS || segments.len() != wanted {
            return bad(format!(
                "{} segments where {slots} slots need {wanted} (at most {MAX_SEGMENTS})",
                segments.len()
            ));
        }
        let mut left = slots;
        for (index, segment) in segments.iter().enumerate() {
            let here = left.min(per_segment);
            left -= here;
            let used = u64::from(here).checked_mul(stride);
            let fits = used.is_some_and(|used| used <= segment.bytes);
            if !fits || isize::try_from(segment.bytes).is_err() {
                return bad(format!(
                    "segment {index} of {} bytes does not hold {here} slots of {stride} bytes",
                    segment.bytes
                ));
            }
            if !segment.bytes.is_multiple_of(SMALL_PAGE) {
                return bad(format!(
                    "segment {index} has {} bytes, not whole pages",
                    segment.bytes
                ));
            }
        }
        Ok(Self { slot_bytes, preferred, addressing, segments })
    }

    /// Payload bytes of one slot.
    #[must_use]
    pub fn slot_bytes(&self) -> u64 {
        self.slot_bytes
    }

    /// Distance of two slots in bytes.
    #[must_use]
    pub fn stride_bytes(&self) -> u64 {
        self.addressing.stride
    }

    /// Number of slots.
    #[must_use]
    pub fn slots(&self) -> u32 {
        self.addressing.slots
    }

    /// Slots in every segment but the last.
    #[must_use]
    pub fn slots_per_segment(&self) -> u32 {
        self.addressing.per_segment
    }

    /// All segments.
    #[must_use]
    pub fn segments(&self) -> &[SegmentInfo] {
        &self.segments
    }

    /// Bytes of all segments.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.segments.iter().map(|s| s.bytes).fold(0, u64::saturating_add)
    }

    /// Tier that was asked for.
    #[must_use]
    pub fn preferred(&self) -> PageTier {
        self.preferred
    }

    /// Worst tier of any segment.
    #[must_use]
    pub fn reached(&self) -> PageTier {
        self.segments.iter().map(|s| s.tier).max().unwrap_or(PageTier::Small)
    }

    /// True if a segment is on a worse tier than it could have been on. A segment that is no
    /// multiple of 1 GiB is not expected on 1 GiB pages.
    #[must_use]
    pub fn is_degraded(&self) -> bool {
        self.degraded_bytes() > 0
    }

    /// Bytes of the segments that are on a worse tier than they could have been on.
    #[must_use]
    pub fn degraded_bytes(&self) -> u64 {
        let degraded = |s: &&SegmentInfo| {
            let gib = PageTier::Huge1G.page_bytes();
            let best = if self.preferred == PageTier::Huge1G && !s.bytes.is_multiple_of(gib) {
                PageTier::Huge2M
            } else {
                self.preferred
            };
            s.tier > best
        };
        self.segments.iter().filter(degraded).map(|s| s.bytes).fold(0, u64::saturating_add)
    }

    /// Where a slot lies; `None` past the last slot.
    #[must_use]
    pub fn locate(&self, slot: u32) -> Option<SlotAddr> {
        self.addressing.locate(slot)
    }

    pub(crate) fn addressing(&self) -> Addressing {
        self.addressing
    }

    /// The encoded form, see the module's table.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEAD_BYTES + self.segments.len() * ENTRY_BYTES);
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&VERSION.to_le_bytes());
        let count = u32::try_from(self.segments.len()).unwrap_or(u32::MAX);
        out.extend_from_slice(&count.to_le_bytes());
        out.extend_from_slice(&self.slot_bytes.to_le_bytes());
        out.extend_from_slice(&self.addressing.stride.to_le_bytes());
        out.extend_from_slice(&self.addressing.slots.to_le_bytes());
        out.extend_from_slice(&self.addressing.per_segment.to_le_bytes());
        out.push(self.preferred.code());
        out.extend_from_slice(&[0; 7]);
        for segment in &self.segments {
            out.extend_from_slice(&segment.bytes.to_le_bytes());
            out.push(segment.tier.code());
            out.extend_from_slice(&[0; 3]);
            out.extend_from_slice(&segment.node.unwrap_or(NO_NODE).to_le_bytes());
        }
        out
    }

    /// Reads the encoded form. Refuses anything that `encode` does not write.
    ///
    /// # Errors
    /// `Layout` for another version, `Corrupt` for everything else.
    pub fn decode(bytes: &[u8]) -> Result<Self, DataError> {
        let mut input = Reader { bytes };
        if input.array::<8>()? != MAGIC {
            return Err(DataError::corrupt("geometry: wrong magic"));
        }
        let version = input.u32()?;
        if version != VERSION {
            return Err(DataError::new(
                crate::ErrorKind::Layout,
                format!("geometry of version {version}, this build reads version {VERSION}"),
            ));
        }
        let count = input.u32()? as usize;
        let slot_bytes = input.u64()?;
        let stride = input.u64()?;
        let slots = input.u32()?;
        let per_segment = input.u32()?;
        let preferred = input.tier()?;
        input.zeros::<7>()?;
        if count > MAX_SEGMENTS || input.bytes.len() != count * ENTRY_BYTES {
            return Err(DataError::corrupt(format!(
                "geometry: {} bytes left for {count} segments",
                input.bytes.len()
            )));
        }
        let mut segments = Vec::with_capacity(count);
        for _ in 0..count {
            let bytes = input.u64()?;
            let tier = input.tier()?;
            input.zeros::<3>()?;
            let node = Some(input.u32()?).filter(|&node| node != NO_NODE);
            segments.push(SegmentInfo { bytes, tier, node });
        }
        Self::new(slot_bytes, Addressing::new(slots, per_segment, stride), preferred, segments)
    }
}

/// The map from slot numbers to addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Addressing {
    slots: u32,
    per_segment: u32,
    stride: u64,
    /// Set when `per_segment` is a power of two.
    shift: Option<u32>,
}

impl Addressing {
    pub(crate) fn new(slots: u32, per_segment: u32, stride: u64) -> Self {
        let shift = per_segment.is_power_of_two().then(|| per_segment.trailing_zeros());
        Self { slots, per_segment, stride, shift }
    }

    #[inline]
    pub(crate) fn locate(&self, slot: u32) -> Option<SlotAddr> {
        if slot >= self.slots {
            return None;
        }
        Some(match self.shift {
            Some(shift) => self.by_shift(slot, shift),
            None => self.by_division(slot),
        })
    }

    #[inline]
    fn by_shift(&self, slot: u32, shift: u32) -> SlotAddr {
        let row = slot & ((1 << shift) - 1);
        SlotAddr { segment: slot >> shift, offset: u64::from(row) * self.stride }
    }

    #[inline]
    fn by_division(&self, slot: u32) -> SlotAddr {
        let row = slot % self.per_segment;
        SlotAddr { segment: slot / self.per_segment, offset: u64::from(row) * self.stride }
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
}

impl Reader<'_> {
    fn array<const N: usize>(&mut self) -> Result<[u8; N], DataError> {
        let (head, rest) = self
            .bytes
            .split_first_chunk::<N>()
            .ok_or_else(|| DataError::corrupt("geometry: ends too early"))?;
        self.bytes = rest;
        Ok(*head)
    }

    fn u32(&mut self) -> Result<u32, DataError> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, DataError> {
        self.array().map(u64::from_le_bytes)
    }

    fn tier(&mut self) -> Result<PageTier, DataError> {
        let [code] = self.array()?;
        PageTier::from_code(code)
            .ok_or_else(|| DataError::corrupt(format!("geometry: unknown page tier {code}")))
    }

    fn zeros<const N: usize>(&mut self) -> Result<(), DataError> {
        if self.array::<N>()? == [0; N] {
            Ok(())
        } else {
            Err(DataError::corrupt("geometry: reserved bytes are not zero"))
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::segment::config::{Packing, SegmentsConfig};

    fn geometry_of(config: &SegmentsConfig) -> Geometry {
        let plan = config.plan().unwrap();
        let segments = (0..plan.segments)
            .map(|i| SegmentInfo {
                bytes: plan.used_bytes(config.slots, i).next_multiple_of(4096),
                tier: PageTier::Small,
                node: (i % 2 == 1).then_some(i),
            })
            .collect();
        let addressing = Addressing::new(config.slots, plan.per_segment, plan.stride);
        Geometry::new(config.slot_bytes, addressing, config.prefer, segments).unwrap()
    }

    fn any_config() -> impl Strategy<Value = SegmentsConfig> {
        (1u64..=8 << 20, 1u32..=200_000, 0u32..=10, any::<bool>()).prop_filter_map(
            "no plan",
            |(slot_bytes, slots, scale, dense)| {
                let config = SegmentsConfig {
                    segment_bytes: (slot_bytes.next_multiple_of(4096) << scale).max(1 << 20),
                    packing: if dense { Packing::Dense } else { Packing::PowerOfTwo },
                    ..SegmentsConfig::new(slot_bytes, slots)
                };
                config.plan().is_ok().then_some(config)
            },
        )
    }

    proptest! {
        #[test]
        fn m1_shift_equals_division(
            shift in 0u32..31, slots in 1u32.., stride in 1u64..1 << 32, slot in any::<u32>()
        ) {
            let addressing = Addressing::new(slots, 1 << shift, stride);
            prop_assert_eq!(addressing.shift, Some(shift));
            prop_assert_eq!(addressing.by_shift(slot, shift), addressing.by_division(slot));
            let expected = (slot < slots).then(|| addressing.by_division(slot));
            prop_assert_eq!(addressing.locate(slot), expected);
        }

        #[test]
        fn m1_slots_never_cross_a_segment_and_never_overlap(
            config in any_config(), picks in prop::collection::vec(any::<u32>(), 20)
        ) {
            let geometry = geometry_of(&config);
            let ends = [0, config.slots - 1, config.slots / 2];
            for slot in picks.into_iter().map(|p| p % config.slots).chain(ends) {
                let at = geometry.locate(slot).unwrap();
                let segment = geometry.segments()[at.segment as usize];
                prop_assert!(at.offset + config.slot_bytes <= segment.bytes);
                if let Some(next) = geometry.locate(slot + 1) {
                    let same = next.segment == at.segment;
                    prop_assert!(same && next.offset == at.offset + geometry.stride_bytes()
                        || !same && next.segment == at.segment + 1 && next.offset == 0);
                    prop_assert!(geometry.stride_bytes() >= config.slot_bytes);
                } else {
                    prop_assert_eq!(slot, config.slots - 1);
                }
            }
        }

        #[test]
        fn encoded_geometry_comes_back_equal(config in any_config()) {
            let geometry = geometry_of(&config);
            prop_assert_eq!(Geometry::decode(&geometry.encode()).unwrap(), geometry);
        }

        #[test]
        fn decode_never_accepts_an_inconsistent_geometry(
            config in any_config(), at in any::<prop::sample::Index>(), value in any::<u8>()
        ) {
            let geometry = geometry_of(&config);
            let mut bytes = geometry.encode();
            let index = at.index(bytes.len());
            bytes[index] = value;
            if let Ok(decoded) = Geometry::decode(&bytes) {
                let last = decoded.locate(decoded.slots() - 1).unwrap();
                let segment = decoded.segments()[last.segment as usize];
                prop_assert!(last.offset + decoded.stride_bytes() <= segment.bytes);
                prop_assert_eq!(decoded.encode(), bytes);
            }
        }
    }

    #[test]
    fn truncated_or_foreign_bytes_are_refused() {
        let bytes = geometry_of(&SegmentsConfig::new(5000, 70)).encode();
        for len in 0..bytes.len() {
            assert!(Geometry::decode(&bytes[..len]).is_err(), "accepted {len} bytes");
        }
        let mut longer = bytes.clone();
        longer.push(0);
        assert!(Geometry::decode(&longer).is_err());
        let mut other = bytes;
        other[8] = 2;
        let error = Geometry::decode(&other).unwrap_err();
        assert_eq!(error.kind(), crate::ErrorKind::Layout);
        assert!(error.to_string().contains("version 2") && error.to_string().contains("version 1"));
    }
}
