//! How many buffers of what size a byte budget buys.
//!
//! **Invariant:** what is derived never exceeds the budget; what the caller gave is kept.

use crate::{ErrorKind, QueueError};

/// Buffers aimed at: enough to read, copy and wait at the same time, few enough to be large.
const DEPTH: u64 = 8;
/// Larger buffers make turns longer and gain nothing.
const BUFFER_BYTES_MAX: u64 = 16 << 20;
/// More buffers than this serve nobody.
const DEPTH_MAX: u64 = 64;
const PAGE: u64 = 4096;

/// Size and number of staging buffers of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagingLayout {
    /// Bytes of a buffer: one or more whole shards.
    pub buffer_bytes: u64,
    /// Number of buffers.
    pub depth: u32,
}

impl StagingLayout {
    /// The layout for shards of `shard_bytes`, when `ranks` ranks share a host budget of
    /// `budget_bytes`. Explicit values win; what is not given is derived from the rank's share:
    /// eight buffers of whole shards, none over 16 MiB, at most 64.
    ///
    /// # Errors
    /// `TooLarge`, with the numbers, when a given buffer holds no shard or the share no buffer.
    pub fn for_budget(
        budget_bytes: u64,
        ranks: u32,
        shard_bytes: u64,
        buffer_bytes: Option<u64>,
        depth: Option<u32>,
    ) -> Result<Self, QueueError> {
        let share = budget_bytes / u64::from(ranks.max(1));
        let stride = stride(shard_bytes.max(1));
        let buffer_bytes = match (buffer_bytes, depth) {
            (Some(bytes), _) => bytes,
            (None, depth) => {
                let depth = depth.map_or(DEPTH, u64::from).max(1);
                let most = (share / depth).min(BUFFER_BYTES_MAX).max(stride);
                most / stride * stride
            }
        };
        if buffer_bytes < shard_bytes {
            return Err(QueueError::new(
                ErrorKind::TooLarge,
                format!(
                    "a shard has {shard_bytes} bytes, a staging buffer only {buffer_bytes}: make \
                     the buffers larger"
                ),
            ));
        }
        let depth = match depth {
            Some(depth) => u64::from(depth),
            None => (share / buffer_bytes.next_multiple_of(PAGE)).min(DEPTH_MAX),
        };
        match u32::try_from(depth) {
            Ok(depth) if depth > 0 => Ok(Self { buffer_bytes, depth }),
            _ => Err(QueueError::new(
                ErrorKind::TooLarge,
                format!(
                    "a budget of {budget_bytes} bytes for {ranks} ranks leaves {share} each, less \
                     than one buffer of {buffer_bytes}: raise the budget"
                ),
            )),
        }
    }

    /// Bytes of all buffers, each on pages of its own.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.buffer_bytes.next_multiple_of(PAGE).saturating_mul(u64::from(self.depth))
    }
}

/// Room that a shard takes in a buffer, so that the next one starts where direct IO can write.
pub(crate) fn stride(shard_bytes: u64) -> u64 {
    let align = if shard_bytes < PAGE { 64 } else { PAGE };
    shard_bytes.checked_next_multiple_of(align).unwrap_or(shard_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn layout(budget: u64, ranks: u32, shard: u64) -> (u64, u32) {
        let layout = StagingLayout::for_budget(budget, ranks, shard, None, None).unwrap();
        (layout.buffer_bytes, layout.depth)
    }

    #[test]
    fn a_budget_buys_these_buffers() {
        // The table in docs/queue.md.
        assert_eq!(layout(4 * MIB, 1, 64 << 10), (512 << 10, 8));
        assert_eq!(layout(64 * MIB, 1, 64 << 10), (8 * MIB, 8));
        assert_eq!(layout(64 * MIB, 1, MIB), (8 * MIB, 8));
        assert_eq!(layout(256 * MIB, 1, MIB), (16 * MIB, 16));
        assert_eq!(layout(1024 * MIB, 1, 4 * MIB), (16 * MIB, 64));
        assert_eq!(layout(64 * MIB, 4, 4 * MIB), (4 * MIB, 4));
        assert_eq!(layout(64 * MIB, 1, 18_874_368), (18_874_368, 3));
        assert_eq!(layout(64 * MIB, 1, 8448), (682 * 12288, 8));
    }

    #[test]
    fn t4_all_ranks_together_stay_within_the_host_budget() {
        for ranks in 1..=16 {
            for shard in [100, 4096, 8448, 73_728, MIB, 3 * MIB] {
                for budget in [64 * MIB, 100_000_000, 1024 * MIB] {
                    let layout =
                        StagingLayout::for_budget(budget, ranks, shard, None, None).unwrap();
                    assert!(layout.total_bytes() * u64::from(ranks) <= budget, "{layout:?}");
                    assert!(layout.buffer_bytes >= shard && layout.depth > 0);
                }
            }
        }
    }

    #[test]
    fn explicit_values_win() {
        let plan = |bytes, depth| StagingLayout::for_budget(64 * MIB, 1, MIB, bytes, depth);
        assert_eq!(
            plan(Some(2 * MIB), None).unwrap(),
            StagingLayout { buffer_bytes: 2 * MIB, depth: 32 }
        );
        assert_eq!(
            plan(None, Some(4)).unwrap(),
            StagingLayout { buffer_bytes: 16 * MIB, depth: 4 }
        );
        assert_eq!(
            plan(Some(MIB), Some(100)).unwrap(),
            StagingLayout { buffer_bytes: MIB, depth: 100 }
        );
    }

    #[test]
    fn p4_what_cannot_fit_is_refused_with_its_numbers() {
        let small = StagingLayout::for_budget(64 * MIB, 1, MIB, Some(1000), None).unwrap_err();
        assert_eq!(small.kind(), ErrorKind::TooLarge);
        assert!(small.to_string().contains("1048576") && small.to_string().contains("1000"));
        let poor = StagingLayout::for_budget(MIB, 4, MIB, None, None).unwrap_err();
        assert!(poor.to_string().contains("262144"), "{poor}");
    }
}
