//! How the queue reaches bytes it never touches itself.
//!
//! **Invariant:** a slot or buffer has one address for the engine and one range for backends, and
//! both name the same bytes.

use std::{any::Any, fmt};

use ucm_ctrl::SlotId;
use ucm_store::IoMemory;
use ucm_transport::Addr;

/// Equal cells of memory: the slots of a cache pool, or the buffers of a staging pool.
///
/// Implemented where the memory is mapped (that takes `unsafe`, which this crate forbids). The
/// cells must be registered with the queue's engine before the queue starts, and stay so.
pub trait SlotMemory: Send + Sync + fmt::Debug {
    /// Number of cells; valid ids are below it.
    fn slots(&self) -> u32;

    /// Bytes of one cell.
    fn slot_bytes(&self) -> u64;

    /// First byte of a cell, as the engine knows it. `None` for an id out of range, and for a cell the
    /// engine cannot reach (its registration failed): such cells are copied by the processor, through
    /// the staging pool.
    fn slot_addr(&self, slot: SlotId) -> Option<Addr>;

    /// `len` bytes at `offset` of a cell for a backend; `hold` is dropped with the value. `None` (and
    /// `hold` dropped) for an id out of range or bytes that leave the cell.
    fn io_memory(
        &self,
        slot: SlotId,
        offset: u64,
        len: u64,
        hold: Box<dyn Any + Send>,
    ) -> Option<IoMemory>;
}
