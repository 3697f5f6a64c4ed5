//! The control plane of a node-level KV cache: which key is where, in which state, and who uses it.
//!
//! All ranks of a node map one sealed memfd ([`Control`]) and join it ([`Member`]). Through a
//! [`Pool`] they acquire keys: the answer is a [`Pin`] on ready bytes, the duty to fill a slot
//! ([`Fill`]), a place to wait for somebody else's fill ([`Waiter`]), or `Full`. The hit path takes
//! no lock; waiting uses no CPU; a dead member's locks, pins and fills are found and undone by any
//! other ([`Member::reap`]).
//!
//! **Invariant:** this crate never sees a pointer to cached bytes, a device, a file or a peer.
//!
//! ```
//! use ucm_ctrl::{Acquired, Control, Geometry, Key, MemberSpec, PoolId};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // 1,024 slots for shards of 1 MiB, four shards a block, no reserved slots.
//! let control = Control::private(&Geometry::single(1024, 0, 4, 1 << 20))?;
//! let rank = control.join(MemberSpec::rank(0, 1))?;
//! let pool = rank.pool(PoolId(0))?;
//! let key = Key::new([7; 16], 0);
//! if let Acquired::Owner(fill) = pool.acquire(&key)? {
//!     // … bring the bytes into slot fill.slot() …
//!     let pin = fill.publish().map_err(|_| "fenced")?;
//!     drop(pin);
//! }
//! assert!(matches!(pool.acquire(&key)?, Acquired::Hit(_)));
//! # Ok(())
//! # }
//! ```

#![cfg_attr(not(test), deny(clippy::indexing_slicing))]

#[cfg(not(ucm_loom))]
mod attendant;
mod bucket;
mod clock;
mod control;
mod error;
mod event;
mod expel;
#[cfg(not(any(test, feature = "failpoints")))]
mod failpoint;
#[cfg(any(test, feature = "failpoints"))]
pub mod failpoint;
mod fork;
mod freemap;
mod geometry;
#[cfg(not(ucm_loom))]
mod group;
mod handles;
mod inspect;
mod key;
mod layout;
#[cfg(not(ucm_loom))]
mod lease;
#[cfg(any(not(ucm_loom), test))]
mod lease_record;
mod leftover;
mod lookup;
mod member;
mod pins;
mod pool;
mod reap;
mod region;
mod slot;
pub mod sync;
#[cfg(not(ucm_loom))]
mod teller;
#[cfg(all(any(test, feature = "testing"), not(ucm_loom)))]
pub mod testing;

#[cfg(all(test, ucm_loom, not(ucm_shuttle)))]
mod loom_tests;
#[cfg(all(test, ucm_shuttle))]
mod shuttle_tests;
#[cfg(all(test, not(ucm_loom)))]
mod tests;

pub use control::{Control, Liveness, MemberId};
pub use error::{CtrlError, ErrorKind};
pub use expel::Expelled;
pub use geometry::{Geometry, MAX_SLOTS, PoolGeometry};
pub use handles::{Fill, FillState, IoToken, Pin, PublishError, WaitAny, WaitOutcome, Waiter};
pub use inspect::{GroupsInspection, Inspection, MemberInspection, PoolInspection, Statistics};
pub use key::{BlockId, Identity, Key, Namespace, ParallelAxis};
pub use layout::{LAYOUT_VERSION, MAX_MEMBERS, MAX_POOLS};
#[cfg(not(ucm_loom))]
pub use lease::{Lease, LeaseOutcome, LeaseTicket, Redeemed};
pub use lookup::Presence;
#[cfg(not(ucm_loom))]
pub use member::WeakMember;
pub use member::{Doorbell, Member, MemberSpec, MemberState, OBSERVER, Role};
pub use pool::{Acquired, Pool, PoolId, Prealloc, Removal, SlotId};
pub use reap::Reaped;
pub use slot::{FailKind, Phase};
#[cfg(not(ucm_loom))]
pub use teller::{GroupDecided, GroupVote, MemberStay};

/// Milliseconds of the system-wide monotonic clock: the same in all processes of the machine.
#[cfg(not(ucm_loom))]
pub(crate) fn clock_ms() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    let millis = u64::try_from(now.tv_nsec / 1_000_000).unwrap_or(0);
    seconds.saturating_mul(1000).saturating_add(millis)
}

#[cfg(ucm_loom)]
pub(crate) fn clock_ms() -> u64 {
    0
}
