//! Transfer engines of ucm.
//!
//! Owns: memory locations, registered regions, transfer plans, the planner and the engines.
//! **Invariant:** memory named by a submitted plan, and everything the plan holds, stays untouched
//! until the plan's ticket has reached a terminal state ("memory belongs to the operation").
//! This crate knows no cache keys and no cache policy.

mod engine;
mod error;
mod host;
mod memory;
mod plan;
mod planner;
mod region_table;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub use engine::{Capabilities, Completion, Quiesce, Ticket, TransferEngine};
pub use error::{ErrorKind, Rejected, TransferError};
pub use host::{HostEngine, HostEngineBuilder};
pub use memory::{Location, Memory, RegionId};
pub use plan::{Addr, Hold, Transfer, TransferPlan};
pub use planner::{Group, PlanLimits, Planned, RegionInfo, plan};
pub use region_table::{Region, RegionLease, RegionTable, RegionView};
