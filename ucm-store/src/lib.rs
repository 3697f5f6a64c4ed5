//! Storage backends of ucm.
//!
//! Owns: the [`Backend`] trait, the operations it completes, and the backends themselves.
//! **Invariant:** every operation ends exactly once, and its memory comes back only when nothing
//! writes or reads it any more. This crate knows no ranks and no queues.

mod backend;
mod error;
mod op;

pub use backend::{Backend, BackendCapabilities, Presence};
pub use error::{ErrorKind, StoreError};
pub use op::{Completed, IoMemory, Op, Sink};
