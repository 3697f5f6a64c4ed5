//! A KV cache close to the GPUs: all ranks of a node share one host-memory cache, and each rank's
//! queues bring shards from a backend into it and on to the device, each byte once.
//!
//! One builder, [`Node`]; a [`Rank`] per device loads and dumps; a [`Scheduler`] asks what is there
//! and promises it. Settings come from code or from [`Config`].
//!
//! **Invariant:** this crate only composes; every mechanism lives in the crate that owns it.

mod backends;
mod config;
mod error;
mod instance;
mod meta;
pub mod metrics;
mod node;
mod rank;
mod remote;
mod scheduler;
mod slots;

pub use config::{
    AxisConfig, BackendConfig, BackendKind, CacheConfig, Config, DurabilityKind, NamespaceConfig,
    ObjectWrites, OrderKind, Pages, PlacementKind, PoolConfig, QueueConfig, RemoteConfig,
    SchedulerFirst, SocketKind,
};
pub use error::{Error, ErrorKind};
pub use node::{Inspected, Node, NodeBuilder, Observer, RankBuilder, expel, inspect};
pub use rank::{Rank, RankReport};
pub use remote::{Fetched, Peer, PoolVisitor};
pub use scheduler::Scheduler;

pub use ucm_ctrl::{
    BlockId, Expelled, FailKind, Identity, Inspection, Key, Lease, LeaseOutcome, LeaseTicket,
    Namespace, OBSERVER, ParallelAxis, PoolId, Presence, Redeemed, Statistics,
};
pub use ucm_queue::{
    CommitGroup, Deadline, DumpHandle, DumpRef, DumpTask, Outcome, QueueStats, Request, ShardRef,
    Task, TaskHandle,
};
pub use ucm_remote::{
    AgentStats, GetOutcome, Member, ObjectKey, PeerUsage, PutOutcome, RemoveOutcome,
};
pub use ucm_store::Backend;
pub use ucm_transport::{Addr, Location, Memory, RegionId, TransferEngine};

/// The code of the project's first page is compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
mod readme {}
