//! Who might have which object.
//!
//! **Invariant:** everything a directory says is a hint: the owner of the memory decides, and a
//! directory that has lost everything costs hits, never correctness.

use std::{fmt, time::Instant};

use ucm_data::Token;

use crate::{Generation, ObjectKey, PeerId};

/// Places that a served directory tells of one key: enough to try another one, and a full batch stays
/// within a frame.
pub(crate) const PLACES: usize = 8;

/// Which kind of memory an object lies in; nearer first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Tier {
    /// Memory of a device.
    Device,
    /// Host memory.
    Host,
    /// Files or block devices.
    Storage,
}

/// One place of one object, as its owner announced it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Record {
    /// Who has it.
    pub peer: PeerId,
    /// Which run of that peer.
    pub boot: Token,
    /// Which storing of it.
    pub generation: Generation,
    /// Its length in bytes.
    pub len: u64,
    /// Where it lies.
    pub tier: Tier,
}

impl Record {
    /// A record of an object in host memory.
    #[must_use]
    pub fn new(peer: PeerId, boot: Token, generation: Generation, len: u64) -> Self {
        Self { peer, boot, generation, len, tier: Tier::Host }
    }
}

/// A peer as the directory knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Member {
    /// Its name.
    pub peer: PeerId,
    /// This run of it.
    pub boot: Token,
    /// Where it listens, as the transport writes addresses.
    pub address: String,
    /// Bytes it can hold.
    pub capacity_bytes: u64,
    /// Bytes that were free when it last reported.
    pub free_bytes: u64,
}

impl Member {
    /// A member that has not reported its memory yet.
    #[must_use]
    pub fn new(peer: PeerId, boot: Token, address: impl Into<String>) -> Self {
        Self { peer, boot, address: address.into(), capacity_bytes: 0, free_bytes: 0 }
    }
}

/// Where a new object should go: candidates, best first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placement(pub Vec<PeerId>);

/// Grows whenever a directory starts anew; a client never goes back to a lower one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Epoch(pub u64);

/// Why a directory gave no answer. None of these is a miss.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DirectoryError {
    /// It cannot be reached, or ended the connection.
    #[error("the directory cannot be reached: {0}")]
    Unavailable(String),
    /// It did not answer in time.
    #[error("the directory did not answer by the deadline")]
    Timeout,
    /// It refused: the token, the version, or this run of a peer.
    #[error("the directory refused: {0}")]
    Refused(String),
    /// What it said cannot be understood.
    #[error("the directory sent nonsense: {0}")]
    Corrupt(String),
}

/// Key → places, and the list of peers. Implementations are thread-safe; every call takes one
/// deadline and one round trip at most. Batches have one result per key, in order.
pub trait Directory: Send + Sync + fmt::Debug {
    /// The directory's epoch.
    ///
    /// # Errors
    /// See [`DirectoryError`].
    fn epoch(&self, deadline: Instant) -> Result<Epoch, DirectoryError>;

    /// Where each object might be; an empty list is a miss. Records that cannot be read are left out
    /// and counted by the implementation.
    ///
    /// # Errors
    /// No key was answered.
    fn locate(
        &self,
        keys: &[ObjectKey],
        deadline: Instant,
    ) -> Result<Vec<Vec<Record>>, DirectoryError>;

    /// An owner says what it has. A record of a newer generation replaces an older one of the same
    /// peer, never the other way round.
    ///
    /// # Errors
    /// Nothing is promised about any of them: announce again.
    fn announce(
        &self,
        records: &[(ObjectKey, Record)],
        deadline: Instant,
    ) -> Result<(), DirectoryError>;

    /// An owner says what it has no longer. Only records of exactly this run and generation go.
    ///
    /// # Errors
    /// As [`announce`](Self::announce).
    fn withdraw(
        &self,
        records: &[(ObjectKey, Record)],
        deadline: Instant,
    ) -> Result<(), DirectoryError>;

    /// A peer registers, or reports again. A refresh never brings back a record that has expired:
    /// such a peer is told `Refused` and registers with a new boot token.
    ///
    /// # Errors
    /// See [`DirectoryError`].
    fn register(&self, member: &Member, deadline: Instant) -> Result<Epoch, DirectoryError>;

    /// A peer leaves, or was proven dead: its records go, in time proportional to their number.
    ///
    /// # Errors
    /// See [`DirectoryError`].
    fn remove_peer(
        &self,
        peer: &PeerId,
        boot: Token,
        deadline: Instant,
    ) -> Result<(), DirectoryError>;

    /// All peers.
    ///
    /// # Errors
    /// See [`DirectoryError`].
    fn members(&self, deadline: Instant) -> Result<Vec<Member>, DirectoryError>;

    /// Where objects of these lengths should be put, one answer each.
    ///
    /// # Errors
    /// See [`DirectoryError`].
    fn place(
        &self,
        objects: &[(ObjectKey, u64)],
        deadline: Instant,
    ) -> Result<Vec<Placement>, DirectoryError>;
}
