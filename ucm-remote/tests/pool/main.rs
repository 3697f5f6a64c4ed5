//! The remote pool between agents of one process: the conformance cases of the specification, by their
//! names, over tcp and over shm.
//!
//! Every byte says which key, which storing and which place it belongs to, and none is ever the poison
//! that memory is filled with beforehand; so a byte anywhere tells where it came from, or that nothing
//! came.

#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test may panic")]

mod announce;
mod backend;
mod faults;
mod install;
mod kit;
mod partition;
mod processes;
mod put;
mod ranged;
mod ranks;
