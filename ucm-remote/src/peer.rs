//! A medium as others reach it.
//!
//! **Invariant:** what a session has allocated and not committed is reclaimed when the session has
//! ended and its writes have provably ended, never before.

use std::{fmt, time::Instant};

use ucm_data::Token;

use crate::{
    ByteRange, Generation, GetOutcome, MediumUsage, ObjectKey, PageList, PeerId, Pending,
    PutOutcome, RemoveOutcome,
};

/// A client's stay with a peer. Ends with its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Session(pub u64);

/// What a peer accepts, as told in the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PeerLimits {
    /// Oldest and newest protocol version spoken.
    pub versions: (u32, u32),
    /// Bytes of one frame.
    pub frame_bytes: u64,
    /// Keys of one batch.
    pub batch_keys: u32,
    /// Bytes of one object.
    pub object_bytes: u64,
}

impl PeerLimits {
    /// Limits of a peer that speaks one version.
    #[must_use]
    pub fn new(version: u32, frame_bytes: u64, batch_keys: u32, object_bytes: u64) -> Self {
        Self { versions: (version, version), frame_bytes, batch_keys, object_bytes }
    }
}

/// An object found on a peer, under a lease that began when the question was sent.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Resolution {
    /// Which storing of the key.
    pub generation: Generation,
    /// Its length in bytes.
    pub len: u64,
    /// Where it lies, if the client may read the pages itself.
    pub pages: Option<PageList>,
    /// Names the lease.
    pub lease: u64,
    /// How long the lease lasts, in milliseconds from the sending of the question.
    pub lease_ms: u64,
}

impl Resolution {
    /// An object that is read through the peer.
    #[must_use]
    pub fn new(generation: Generation, len: u64, lease: u64, lease_ms: u64) -> Self {
        Self { generation, len, pages: None, lease, lease_ms }
    }
}

/// One peer. Implementations are thread-safe; batches have one result per key, in order; a call that
/// reaches its deadline answers `Timeout` for what is open, and nothing of it writes caller memory
/// afterwards.
pub trait Peer: Send + Sync + fmt::Debug {
    /// Who it is.
    fn id(&self) -> &PeerId;

    /// Which run of it: part of every handle that it gave.
    fn boot(&self) -> Token;

    /// What it accepts.
    fn limits(&self) -> PeerLimits;

    /// Takes pages for objects.
    fn allocate(
        &self,
        session: Session,
        objects: &[(ObjectKey, u64)],
        deadline: Instant,
    ) -> Vec<Result<(Pending, PageList), PutOutcome>>;

    /// Makes written objects readable.
    fn commit(&self, session: Session, pending: &[Pending], deadline: Instant) -> Vec<PutOutcome>;

    /// Gives pages back; they wait in quarantine while the session might still write them.
    fn abort(&self, session: Session, pending: &[Pending], deadline: Instant) -> Vec<PutOutcome>;

    /// Finds objects and leases them.
    fn resolve(
        &self,
        session: Session,
        keys: &[ObjectKey],
        deadline: Instant,
    ) -> Vec<Result<Resolution, GetOutcome>>;

    /// Reads ranges of a resolved object, packed in the given order, into `into`, whose length must
    /// be that of the ranges together. Bound to key and generation: `Stale` if either is gone.
    fn read_ranges(
        &self,
        session: Session,
        key: &ObjectKey,
        generation: Generation,
        ranges: &[ByteRange],
        into: &mut [u8],
        deadline: Instant,
    ) -> GetOutcome;

    /// Gives leases back.
    fn release(&self, session: Session, leases: &[u64]);

    /// Removes objects.
    fn remove(&self, session: Session, keys: &[ObjectKey], deadline: Instant)
    -> Vec<RemoveOutcome>;

    /// How full its medium is; `None` when it cannot be reached.
    fn usage(&self, deadline: Instant) -> Option<MediumUsage>;
}
