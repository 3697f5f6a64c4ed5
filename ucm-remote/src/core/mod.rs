//! What the client, the peer and the node's agent decide, without IO: events in, actions out.
//!
//! **Invariant:** nothing here sleeps, locks, or knows how bytes move.

mod cost;
mod coverage;
mod extents;
mod flight;
mod pack;
mod pages;
mod shelf;
mod walk;

pub use cost::{CostModel, Transport};
pub use coverage::{Coverage, Span, coverage, merge};
pub use extents::ExtentSet;
pub use flight::{Ask, Asked, Ended, Fetch, FetchId, Flights, ReaderId};
pub use pack::{PackError, Part, Round, pack};
pub use pages::FreePages;
pub use shelf::{Change, Leased, Shelf, ShelfLimits};
pub use walk::{Fragment, WalkError, walk};
