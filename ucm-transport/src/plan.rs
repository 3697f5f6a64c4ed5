//! What to move: items between registered regions, and what must stay alive meanwhile.
//!
//! **Invariant:** holds outlive every access to the memory that the items name.

use std::{any::Any, fmt};

use crate::RegionId;

/// A byte position in a registered region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Addr {
    /// Region, as the engine registered it.
    pub region: RegionId,
    /// Offset in bytes.
    pub offset: u64,
}

/// One contiguous piece to move. `len` is in bytes and never zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Transfer {
    /// Where the bytes come from.
    pub src: Addr,
    /// Where they go.
    pub dst: Addr,
    /// Number of bytes.
    pub len: u64,
}

/// Anything that must live until the plan has ended: a cache pin, a staging lease, a mapping.
pub type Hold = Box<dyn Any + Send>;

/// Items that complete together under one ticket.
#[derive(Default)]
pub struct TransferPlan {
    /// The pieces to move; order carries no meaning.
    pub items: Vec<Transfer>,
    /// Dropped by the engine only after the plan's terminal state.
    pub holds: Vec<Hold>,
}

impl fmt::Debug for TransferPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TransferPlan")
            .field("items", &self.items)
            .field("holds", &self.holds.len())
            .finish()
    }
}
