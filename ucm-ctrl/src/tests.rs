//! Tests of the whole crate in one process, by subject. Case ids stand in the names.
//!
//! **Invariant:** a test asserts states and bytes, and no test waits for time to pass where there
//! is an event to wait for.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod drain;
mod expel;
mod group;
mod hostile;
mod joining;
mod kit;
mod lease;
mod model;
mod prealloc;

mod reap;
mod roles;
mod scenarios;
mod stopped;
mod stress;
mod waiting;
