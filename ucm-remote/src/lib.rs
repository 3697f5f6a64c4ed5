//! The remote pool's vocabulary: objects that live in the memory of other machines.
//!
//! Peers own memory and keep *objects* in it (a block's bytes as one addressable thing, on pages of
//! one size); a directory says who might have which object; a client puts, gets, and gets ranges.
//! One [`Agent`] a node holds the memory ([`HostMedium`]), fetches for all ranks and serves other nodes
//! ([`PeerService`]); ranks are its clients ([`PoolClient`]). What is decided without IO stands in
//! [`core`]. What they must agree on:
//!
//! * [`Medium`] is the only allocation authority over its memory. An object becomes readable by its
//!   commit, never before, and leaves only when no lease protects it.
//! * [`PeerService`] is a medium as others reach it: the same verbs in batches, with sessions, leases and
//!   ranged reads.
//! * [`Directory`] holds hints. A wrong or missing answer costs a try, never a wrong byte.
//! * [`RemotePool`] is the client. It answers each key with one [`GetOutcome`] or [`PutOutcome`]; no
//!   failure of one key touches another.
//!
//! Every read is bound to (key, boot token of the peer, generation of the object): a handle from
//! before a restart or an eviction is [`GetOutcome::Stale`], not old bytes.
//!
//! **Invariant:** lengths are known to the receiver before a byte moves; what arrives shorter or
//! longer is no object.

#![forbid(unsafe_code)]

mod agent;
mod backend;
mod client;
pub mod core;
mod directory;
mod embedded;
mod host_medium;
mod medium;
mod object;
mod outcome;
mod paged;
mod peer;
mod placement;
mod pool;
mod ranks;
#[cfg(feature = "redis")]
mod redis_directory;
mod served_directory;
mod service;

pub use agent::{Agent, AgentBuilder, AgentError, AgentStats};
pub use backend::{PoolBackend, PoolBackendOptions};
pub use client::PoolClient;
pub use directory::{Directory, DirectoryError, Epoch, Member, Placement, Record, Tier};
pub use embedded::{EmbeddedDirectory, EmbeddedLimits};
pub use host_medium::HostMedium;
pub use medium::{Medium, MediumUsage, PageList, Pending, Stored};
pub use object::{ByteRange, Generation, ObjectKey, PeerId, RangeError, check_ranges};
pub use outcome::{GetOutcome, PutOutcome, RemoveOutcome};
pub use paged::{PagedError, PagedLimits, PagedMedium, Segment};
pub use peer::PeerUsage;
pub use placement::{ByHash, LocalFirst, MostFree, PlacementStrategy};
pub use pool::{Destination, GetRequest, PutRequest, RemotePool, Source};
#[cfg(feature = "redis")]
pub use redis_directory::{RedisDirectory, RedisOptions};
pub use served_directory::{DirectoryClient, DirectoryServer};
pub use service::PeerService;
pub use ucm_data::Token;
