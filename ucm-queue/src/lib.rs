//! Load and dump queues of ucm.
//!
//! One [`LoadQueue`] per rank and pool moves shards from a shared cache, or from a backend through
//! the cache, into the caller's memory, and back. It owns the order of visits, the dispatcher, the
//! copier, deadlines and outcomes; how bytes move it asks an engine, where they are kept a backend.
//!
//! **Invariant:** every request ends exactly once, with a typed outcome; the memory of an operation
//! is held until the operation has ended, however its request ended.

#![forbid(unsafe_code)]

mod admission;
mod core;
mod driver;
mod dump;
mod error;
#[cfg(not(any(test, feature = "failpoints")))]
mod failpoint;
#[cfg(any(test, feature = "failpoints"))]
pub mod failpoint;
mod group;
mod hash;
mod inbox;
mod layers;
mod memory;
mod metrics;
mod outcome;
mod pace;
mod produced;
mod queue;
mod rearrange;
mod regions;
mod staging;
mod task;
#[cfg(feature = "testing")]
pub mod testing;

pub use dump::{DumpHandle, DumpProgress, DumpRef, DumpResult, DumpTask};
pub use error::{ErrorKind, QueueError};
pub use group::{CommitBoard, CommitGroup, Decided, GroupId, LocalBoard, SharedBoard};
pub use layers::{LayerGroup, Layers};
pub use memory::SlotMemory;
pub use metrics::{QueueMeter, QueueStats};
pub use outcome::{Outcome, TaskHandle};
pub use produced::{Produced, Producer};
pub use queue::{Builder, LoadQueue};
pub use rearrange::{Rearrange, rearrange};
pub use staging::{BufferId, BufferRegistrar, StagingLayout, StagingLease, StagingPool};
pub use task::{Deadline, Order, Request, ShardRef, Task};
