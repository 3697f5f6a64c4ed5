//! One process through the public interface.
//!
//! Mutants seen to fail here: one engine for two queues without lanes, one backend for two pools
//! without the pool in the block id.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

mod metrics;
mod pools;
