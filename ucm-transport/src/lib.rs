//! Transfer engines of ucm.
//!
//! Owns: memory locations, registered regions, transfer plans, the planner and the engines.
//! **Invariant:** memory named by a submitted plan, and everything the plan holds, stays untouched
//! until the plan's ticket has reached a terminal state ("memory belongs to the operation").
//! This crate knows no cache keys and no cache policy.

mod engine;
mod error;
mod memory;
mod plan;

pub use engine::{Capabilities, Completion, Quiesce, Ticket, TransferEngine};
pub use error::{ErrorKind, Rejected, TransferError};
pub use memory::{Location, Memory, RegionId};
pub use plan::{Addr, Hold, Transfer, TransferPlan};
