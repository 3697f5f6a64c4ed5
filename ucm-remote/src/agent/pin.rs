//! What keeps delivered bytes where they are.
//!
//! **Invariant:** pages that somebody copies from are neither freed nor written while the pin lives.

use std::{fmt, sync::Arc};

use super::{Inner, arena::ArenaLease};
use crate::service::Leased;

/// Given back by dropping it, from any thread, without blocking.
pub(crate) struct Pin(Held);

enum Held {
    Object(#[expect(dead_code, reason = "dropping it is its use")] Leased),
    Assembly(Arc<Inner>, u64),
    Arena(#[expect(dead_code, reason = "dropping it is its use")] ArenaLease),
}

impl Pin {
    pub(super) fn object(leased: Leased) -> Self {
        Self(Held::Object(leased))
    }

    /// A hold that has been counted already.
    pub(super) fn assembly(inner: &Arc<Inner>, id: u64) -> Self {
        Self(Held::Assembly(Arc::clone(inner), id))
    }

    pub(super) fn arena(lease: ArenaLease) -> Self {
        Self(Held::Arena(lease))
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        if let Held::Assembly(inner, id) = &self.0 {
            inner.with(|table| table.release(*id));
        }
    }
}

impl fmt::Debug for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match &self.0 {
            Held::Object(_) => "Pin(object)",
            Held::Assembly(..) => "Pin(assembly)",
            Held::Arena(_) => "Pin(arena)",
        })
    }
}
