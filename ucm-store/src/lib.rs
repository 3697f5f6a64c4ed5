//! Storage backends of ucm.
//!
//! Owns: the [`Backend`] trait, the operations it completes, and the backends themselves.
//! **Invariant:** every operation ends exactly once, and its memory comes back only when nothing
//! writes or reads it any more. This crate knows no ranks and no queues.
//!
//! | backend | what it is for |
//! |---|---|
//! | [`FileBackend`] | objects in files: verified on load, published atomically, shared by processes |
//! | `ObjectBackend` | objects in S3, GCS, Azure or a directory (feature `object-store`) |
//! | [`MemoryBackend`] | objects in this process |
//! | [`Stack`] | several backends as tiers: load cascade, promotion, write-through, touch cascade |
//! | [`Spread`] | several backends of the same speed, each with its share of the blocks: one for each disk |
//! | [`PatternBackend`] | objects that are computed: benchmarks and tests that verify every byte |
//! | [`LatencyBackend`] | any backend with the timing of a device |
//! | [`FaultBackend`] | any backend, failing on purpose |
//! | [`Metered`] | any backend, counted |
//!
//! ```
//! use std::sync::{Arc, mpsc};
//! use ucm_store::{Backend, Completed, IoMemory, MemoryBackend, Op, Sink};
//!
//! struct Channel(mpsc::Sender<Completed>);
//! impl Sink for Channel {
//!     fn complete(&self, completed: Completed) {
//!         let _ = self.0.send(completed);
//!     }
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let (sender, ends) = mpsc::channel();
//! let sink: Arc<dyn Sink> = Arc::new(Channel(sender));
//! let backend = MemoryBackend::new();
//!
//! let memory = IoMemory::private(5)?;
//! memory.write(0, b"bytes")?;
//! backend.dump(vec![Op::new([7; 16], 0, 1, memory, sink.clone())]);
//! ends.recv()?.result?;
//!
//! backend.load(vec![Op::new([7; 16], 0, 2, IoMemory::private(5)?, sink)]);
//! let loaded = ends.recv()?;
//! loaded.result?;
//! let mut bytes = [0; 5];
//! loaded.memory.read(0, &mut bytes)?;
//! assert_eq!(&bytes, b"bytes");
//! # Ok(())
//! # }
//! ```

mod backend;
#[cfg(any(test, feature = "__bare"))]
#[doc(hidden)]
pub mod bare;
mod delay_line;
mod error;
mod fault;
mod file;
mod gate;
mod header;
mod health;
mod latency;
mod memory;
mod meter;
#[cfg(feature = "object-store")]
mod object;
mod op;
mod pattern;
mod pattern_backend;
mod random;
mod raw;
mod spread;
mod stack;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod timer;
mod xxh3;

pub use backend::{Backend, BackendCapabilities, Presence};
pub use error::{ErrorKind, StoreError};
pub use fault::{Damage, Fault, FaultBackend, Rule};
#[cfg(feature = "failpoints")]
pub use file::FAILPOINTS;
pub use file::{
    Durability, FileBackend, FileConfig, FileFault, FileIo, FileMode, FileReport, FileStep,
    MemoryOwner, Stall,
};
pub use gate::Gate;
pub use latency::{Delay, LatencyBackend};
pub use memory::MemoryBackend;
pub use meter::{Meter, MeterReport, Metered};
#[cfg(feature = "object-store")]
pub use object::{ObjectBackend, ObjectConfig, ObjectReport};
pub use op::{Completed, IoMemory, Op, Sink};
pub use pattern::{PatternMismatch, Seems, fill_pattern, pattern_word, verify_pattern};
pub use pattern_backend::PatternBackend;
pub use spread::Spread;
pub use stack::{Admission, Candidate, Promotion, Stack, Tier, TierReport, Writes};
