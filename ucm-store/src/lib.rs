//! Storage backends of ucm.
//!
//! Owns: the [`Backend`] trait, the operations it completes, and the backends themselves.
//! **Invariant:** every operation ends exactly once, and its memory comes back only when nothing
//! writes or reads it any more. This crate knows no ranks and no queues.

mod backend;
mod delay_line;
mod error;
mod fault;
mod file;
mod gate;
mod latency;
mod memory;
mod meter;
mod op;
mod pattern;
mod pattern_backend;
mod random;
mod raw;
mod stack;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod timer;
mod xxh3;

pub use backend::{Backend, BackendCapabilities, Presence};
pub use error::{ErrorKind, StoreError};
pub use fault::{Damage, Fault, FaultBackend, Rule};
pub use file::{Durability, FileBackend, FileConfig, FileReport, FileStep};
pub use gate::Gate;
pub use latency::{Delay, LatencyBackend};
pub use memory::MemoryBackend;
pub use meter::{Meter, MeterReport, Metered};
pub use op::{Completed, IoMemory, Op, Sink};
pub use pattern::{PatternMismatch, Seems, fill_pattern, pattern_word, verify_pattern};
pub use pattern_backend::PatternBackend;
pub use stack::{Candidate, Promotion, Stack, Tier, TierReport};
