//! Shared data plane of a node-level KV cache: huge-page segments, descriptor passing, rendezvous.
//!
//! * [`Segments`] is the memory of one pool: sealed files on the best pages there are; [`Mapped`] is
//!   the same in a process's address space, with slot addressing; [`Registration`] pins it for a
//!   device.
//! * [`Rendezvous`] makes processes of one cache find each other and share descriptors; a
//!   [`Membership`] is a stay, with proven liveness of all others.
//!
//! This crate knows no keys and no cache policy.
//!
//! **Invariant:** nothing made here outlives the last process that uses it.

mod error;
#[cfg(not(any(test, feature = "failpoints")))]
mod failpoint;
#[cfg(any(test, feature = "failpoints"))]
pub mod failpoint;
mod fork;
mod rendezvous;
mod segment;
#[cfg(feature = "testing")]
pub mod testing;

pub use crate::error::{DataError, ErrorKind, Shortage};
pub use crate::fork::SharedFd;
pub use crate::rendezvous::{
    Admission, Admitted, Enter, LayoutTag, Liveness, MAX_SEATS, Membership, Occupied, Offer,
    PeerInfo, PeerWatch, Rendezvous, RendezvousConfig, RendezvousStats, Sockets, StewardHooks,
    Token, WhenAbsent,
};
pub use crate::segment::{
    Fallback, Geometry, Mapped, NumaOutcome, NumaPolicy, Packing, PageTier, Piece, RegisterFailure,
    RegisterPolicy, RegisterRegion, Registration, RegistrationSummary, SegmentInfo, Segments,
    SegmentsConfig, SlotAddr, check_memory,
};
