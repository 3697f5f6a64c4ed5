//! Tests with real processes: this binary starts itself again as a peer (`child::entry`), talks to
//! it over pipes, and ends it with real signals.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

mod child;
mod parent;
mod pattern;
mod shm;
mod tcp;
