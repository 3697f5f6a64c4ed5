//! Helpers and the conformance suite for backends, also of other crates.
//!
//! **Invariant:** nothing here waits by time; time only serves as a watchdog that fails a test.

#![expect(clippy::unwrap_used, reason = "test support: a failure here is a failed test")]

mod collector;
mod conformance;

pub use collector::Collector;
pub use conformance::{Keeps, conformance};
