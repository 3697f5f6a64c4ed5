//! Whole nodes of real processes: this binary starts itself again as ranks and schedulers
//! (`child::entry`), talks to them over pipes, and ends them with real signals.
//!
//! Mutants seen to fail here: rotation off (R3), claiming a whole task at once (R3, exactly once),
//! no death notice to waiters (D3), a scheduler that maps the data plane (S1), a fingerprint without
//! the slot count (D8).

#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

mod child;
#[cfg(feature = "failpoints")]
mod crash;
mod death;
mod groups;
mod joining;
mod loading;
mod parent;
mod pool;
mod scheduler;
