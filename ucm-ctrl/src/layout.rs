//! The shared structures, byte by byte. `docs/format.md` draws them.
//!
//! **Invariant:** every field is an atomic; another process may write any of them at any time.

use crate::{
    event::EventWord,
    sync::{AtomicU32, AtomicU64, Counter, Pad},
};

/// Version of everything in this file. A member of another version is refused at attach.
pub const LAYOUT_VERSION: u32 = 3;
/// "UCMCTRL\x01", written last at creation.
#[cfg(not(ucm_loom))]
pub(crate) const MAGIC: u64 = u64::from_le_bytes(*b"UCMCTRL\x01");

/// Most members (ranks and schedulers) of one region.
pub const MAX_MEMBERS: usize = if cfg!(ucm_loom) { 4 } else { 128 };
/// Most pools of one region.
pub const MAX_POOLS: usize = 8;
/// Most groups that may be undecided, or not yet let go of, at once.
#[cfg(not(ucm_loom))]
pub(crate) const MAX_GROUPS: usize = 256;
/// Entries of a bucket; a model has a single one, so that chains are part of it.
pub(crate) const ENTRIES: usize = if cfg!(ucm_loom) { 1 } else { 6 };

#[cfg(not(ucm_loom))]
pub(crate) const HEADER_BYTES: usize = 4096;
/// The two sizes as the header records them.
#[cfg(not(ucm_loom))]
pub(crate) const LAYOUT_HEADER_BYTES: u32 = 4096;
#[cfg(not(ucm_loom))]
pub(crate) const LAYOUT_MEMBERS: u32 = 128;
#[cfg(not(ucm_loom))]
pub(crate) const MEMBER_BYTES: usize = 512;
#[cfg(not(ucm_loom))]
pub(crate) const LEASE_BYTES: usize = 32;
#[cfg(not(ucm_loom))]
pub(crate) const LAYOUT_GROUPS: u32 = 256;
#[cfg(not(ucm_loom))]
pub(crate) const GROUP_BYTES: usize = 128;
#[cfg(not(ucm_loom))]
pub(crate) const GROUP_HOT_BYTES: usize = 64;
#[cfg(not(ucm_loom))]
pub(crate) const POOL_BYTES: usize = 256;
#[cfg(not(ucm_loom))]
pub(crate) const BUCKET_BYTES: usize = 64;
#[cfg(not(ucm_loom))]
pub(crate) const SLOT_BYTES: usize = 64;

/// Description of one pool in the header.
#[cfg(not(ucm_loom))]
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct PoolHeader {
    pub(crate) slots: AtomicU32,
    pub(crate) reserved: AtomicU32,
    pub(crate) shards_per_block: AtomicU32,
    _pad: AtomicU32,
    pub(crate) shard_bytes: AtomicU64,
    _reserved: [AtomicU64; 5],
}

/// First page of the region. Constant after creation.
#[cfg(not(ucm_loom))]
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct Header {
    pub(crate) magic: AtomicU64,
    pub(crate) layout_version: AtomicU32,
    pub(crate) header_bytes: AtomicU32,
    pub(crate) boot_token: [AtomicU64; 2],
    pub(crate) total_bytes: AtomicU64,
    pub(crate) pools: AtomicU32,
    pub(crate) members: AtomicU32,
    pub(crate) leases: AtomicU32,
    pub(crate) groups: AtomicU32,
    _pad: [AtomicU32; 2],
    pub(crate) pool: [PoolHeader; MAX_POOLS],
}

/// Counters of one member, written by that member only. Cumulative over all holders of the record.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct Counters {
    pub(crate) hits: Counter,
    pub(crate) owners: Counter,
    pub(crate) takeovers: Counter,
    pub(crate) waiters: Counter,
    pub(crate) fulls: Counter,
    pub(crate) evictions: Counter,
    pub(crate) victim_searches: Counter,
    pub(crate) victim_steps: Counter,
    pub(crate) publishes: Counter,
    pub(crate) failures: Counter,
    pub(crate) drains: Counter,
    pub(crate) preallocs: Counter,
    pub(crate) prealloc_reserved: Counter,
    pub(crate) prealloc_nothing: Counter,
    pub(crate) touched: Counter,
    pub(crate) leases: Counter,
    pub(crate) deaths: Counter,
    pub(crate) slots_recovered: Counter,
    pub(crate) pins_recovered: Counter,
    pub(crate) locks_recovered: Counter,
    pub(crate) corruptions: Counter,
    pub(crate) recoveries: Counter,
    pub(crate) repairs: Counter,
    pub(crate) expelled: Counter,
    /// Hits of all threads but the one that counts in `hits`.
    pub(crate) further_hits: Counter,
    _reserved: Pad<7>,
}

/// One member (rank or scheduler) of the region.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct MemberRecord {
    /// Bits 0..8 state, 8..16 who reaps it, 32..64 generation.
    pub(crate) word: AtomicU64,
    pub(crate) pid: AtomicU32,
    /// Device id as two's complement; negative for schedulers.
    pub(crate) device: AtomicU32,
    pub(crate) local_ranks: AtomicU32,
    pub(crate) role: AtomicU32,
    pub(crate) joined_ms: AtomicU64,
    /// Names the stay; valid in state `Joined`.
    pub(crate) incarnation: [AtomicU64; 2],
    _reserved: Pad<2>,
    pub(crate) doorbell: Line<EventWord>,
    pub(crate) lease_bell: Line<EventWord>,
    pub(crate) counters: Counters,
    /// Rung when a group that the member belongs to is opened or decided.
    pub(crate) group_bell: Line<EventWord>,
}

/// A value alone on its cache line.
#[derive(Debug, Default)]
#[cfg_attr(not(ucm_loom), repr(C, align(64)))]
pub(crate) struct Line<T>(pub(crate) T);

/// Lease of a set of slots for a number of consumers.
#[cfg(any(not(ucm_loom), test))]
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct LeaseRecord {
    /// Bits 0..8 state, 8..16 holder, 16..32 consumers left, 32..64 generation.
    pub(crate) word: AtomicU64,
    /// Milliseconds of the monotonic clock; for inspection, the holder minds it.
    pub(crate) deadline_ms: AtomicU64,
    pub(crate) slots: AtomicU32,
    pub(crate) consumers: AtomicU32,
    _reserved: AtomicU64,
}

/// The votes of one group of members.
#[cfg(not(ucm_loom))]
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(crate) struct GroupRecord {
    /// Bits 0..8 state, 8..16 who opened it, 16 lasting, 32..64 generation.
    pub(crate) word: AtomicU64,
    /// Names the group; constant while the record is not free, as are `members` and `since_ms`.
    pub(crate) id: [AtomicU64; 2],
    /// Seats of its members.
    pub(crate) members: [AtomicU64; 2],
    /// Seats that have voted for it, each its own bit.
    pub(crate) ready: [AtomicU64; 2],
    /// Seats that have not taken note of the decision, each its own bit.
    pub(crate) holders: [AtomicU64; 2],
    /// When it was opened, milliseconds of the monotonic clock; for inspection.
    pub(crate) since_ms: AtomicU64,
    _reserved: Pad<6>,
}

/// What the group records have in common.
#[cfg(not(ucm_loom))]
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct GroupHot {
    /// 1 while a member waits for a free record.
    pub(crate) full: Line<AtomicU32>,
}

/// Words of a pool that change often, each on its own line.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct PoolHot {
    /// CLOCK hand of the regular slots; counts up for ever, taken modulo the slots.
    pub(crate) cursor: Line<AtomicU64>,
    /// CLOCK hand of the reserved slots.
    pub(crate) reserved_cursor: Line<AtomicU64>,
    /// 1 after a search found every slot pinned; cleared by whoever makes one evictable.
    pub(crate) full: Line<AtomicU32>,
    _spare: Line<AtomicU32>,
}

/// One bucket: a cache line.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct Bucket {
    /// [`LockWord`](crate::bucket::LockWord).
    pub(crate) lock: AtomicU32,
    /// Slot + 1 of the first slot of the overflow chain, 0 for none.
    pub(crate) overflow: AtomicU32,
    /// Moves with every removal from the overflow chain.
    pub(crate) chain_version: AtomicU32,
    _pad: AtomicU32,
    /// Bits 0..32 slot + 1 (0 for an empty entry), 32..64 tag.
    pub(crate) entries: [AtomicU64; ENTRIES],
}

/// One slot: a cache line.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct Slot {
    /// [`SlotWord`](crate::slot::SlotWord).
    pub(crate) word: AtomicU64,
    /// Members that pin the slot, one bit each.
    pub(crate) pins: [AtomicU64; 2],
    pub(crate) block_lo: AtomicU64,
    pub(crate) block_hi: AtomicU64,
    pub(crate) shard: AtomicU32,
    /// Moves when a fill ends; waiters sleep on it.
    pub(crate) version: EventWord,
    /// Next slot + 1 of the overflow chain.
    pub(crate) next: AtomicU32,
    /// Bytes that the fill of this generation brought; 0 for all of a shard. Written by the owner
    /// before the slot is `Ready`.
    pub(crate) bytes: AtomicU32,
    /// Start of the current or last fill, milliseconds of the monotonic clock.
    pub(crate) since_ms: AtomicU64,
}

#[cfg(not(ucm_loom))]
const _: () = {
    use std::mem::{align_of, offset_of, size_of};
    assert!(size_of::<Header>() <= HEADER_BYTES && LAYOUT_HEADER_BYTES as usize == HEADER_BYTES);
    assert!(LAYOUT_MEMBERS as usize == MAX_MEMBERS);
    assert!(size_of::<PoolHeader>() == 64);
    assert!(offset_of!(Header, pool) == 64);
    assert!(size_of::<MemberRecord>() == MEMBER_BYTES && align_of::<MemberRecord>() == 64);
    assert!(offset_of!(MemberRecord, doorbell) == 64);
    assert!(offset_of!(MemberRecord, lease_bell) == 128);
    assert!(offset_of!(MemberRecord, counters) == 192);
    assert!(offset_of!(MemberRecord, group_bell) == 448);
    assert!(size_of::<LeaseRecord>() == LEASE_BYTES);
    assert!(size_of::<GroupRecord>() == GROUP_BYTES && offset_of!(GroupRecord, since_ms) == 72);
    assert!(size_of::<GroupHot>() == GROUP_HOT_BYTES && LAYOUT_GROUPS as usize == MAX_GROUPS);
    assert!(size_of::<PoolHot>() == POOL_BYTES);
    assert!(size_of::<Bucket>() == BUCKET_BYTES && offset_of!(Bucket, entries) == 16);
    assert!(size_of::<Slot>() == SLOT_BYTES);
    assert!(offset_of!(Slot, version) == 44 && offset_of!(Slot, since_ms) == 56);
};
