//! The client's side.
//!
//! **Invariant:** a key is all or nothing: its destination holds every asked byte, or its outcome
//! says that it does not.

use std::{fmt, time::Instant};

use ucm_transport::Addr;

use crate::{ByteRange, GetOutcome, ObjectKey, PutOutcome, RemoveOutcome};

/// Where the bytes of one range go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Destination {
    /// Which bytes of the object.
    pub range: ByteRange,
    /// First byte of the destination, in a registered region.
    pub to: Addr,
}

/// What to bring of one object. Without ranges it is `Invalid`; a whole object is one range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GetRequest {
    /// Which object.
    pub key: ObjectKey,
    /// Its exact length in bytes; another length is `Stale` or `Corrupt`, never served.
    pub len: u64,
    /// Ranges in any order, inside the object, sharing no byte.
    pub ranges: Vec<Destination>,
    /// Whether the caller will ask for the rest too: the whole object may be fetched ahead.
    pub will_read_all: bool,
}

/// Where the bytes of one range come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// Which bytes of the object.
    pub range: ByteRange,
    /// First byte of the source, in a registered region.
    pub from: Addr,
}

/// An object to store. Its ranges must cover it exactly: a gap or an overlap is `Invalid`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PutRequest {
    /// Which object.
    pub key: ObjectKey,
    /// Its length in bytes.
    pub len: u64,
    /// Ranges in any order.
    pub ranges: Vec<Source>,
}

/// Gets and puts objects, wherever they are. Thread-safe. Calls block until every key has ended, at
/// most until the deadline; one outcome per request, in order; a failed key touches no other.
pub trait RemotePool: Send + Sync + fmt::Debug {
    /// Brings objects, or parts of them, into registered memory. When the call has returned, nothing
    /// writes any destination any more.
    fn get(&self, requests: &[GetRequest], deadline: Instant) -> Vec<GetOutcome>;

    /// Stores objects from registered memory. When the call has returned, nothing reads any source
    /// any more.
    fn put(&self, requests: &[PutRequest], deadline: Instant) -> Vec<PutOutcome>;

    /// Says of each object whether somebody seems to have it: its length. A hint.
    fn exists(&self, keys: &[ObjectKey], deadline: Instant)
    -> Vec<Result<Option<u64>, GetOutcome>>;

    /// Removes objects everywhere.
    fn remove(&self, keys: &[ObjectKey], deadline: Instant) -> Vec<RemoveOutcome>;

    /// Marks objects as recently used where they are; failures are counted, not returned.
    fn touch(&self, keys: &[ObjectKey]);
}
