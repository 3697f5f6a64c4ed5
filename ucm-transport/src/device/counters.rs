//! What a device engine has done.
//!
//! **Invariant:** every byte that took the slow path is counted, and so is every plan whose memory
//! could not be freed.

/// Figures of one engine since it began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceCounters {
    /// Plans that ended.
    pub plans: u64,
    /// Bytes of plans that ended well.
    pub bytes: u64,
    /// Copies given to the driver one by one.
    pub copied_single: u64,
    /// Copies given to the driver by batch calls.
    pub copied_batched: u64,
    /// Fragments moved by the kernel.
    pub copied_gathered: u64,
    /// Bytes whose host side was not pinned: the driver stages them.
    pub unpinned_bytes: u64,
    /// Bytes of regions that were to be pinned and are not.
    pub unpinned_regions_bytes: u64,
    /// Driver calls that failed while plans were under way.
    pub driver_errors: u64,
    /// Questions whether an event has ended.
    pub polls: u64,
    /// Plans whose memory is kept, because nothing proves that their copies have ended.
    pub quarantined: u64,
    /// Plans of all engines of this process whose memory was given up with their engine.
    pub leaked: u64,
}
