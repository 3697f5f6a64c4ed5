//! Slots that have left their keys but not yet their buckets.
//!
//! A bucket whose lock holder was stopped in mid-change cannot be changed by anybody else. What
//! should be unlinked from it meanwhile stays with the member that wanted to, and is tried again
//! whenever that member needs a slot or clears up after another.
//!
//! **Invariant:** a slot becomes free only after it was unlinked, so an entry never leads to a slot
//! of another key.

use crate::{
    bucket::Patience, failpoint::failpoint, member::MemberInner, slot::Phase, sync::Ordering,
};

impl MemberInner {
    /// Unlinks and frees a slot that this member owns and whose key counts as absent. True when
    /// that is done, false when it has to wait.
    pub(crate) fn give_back(&self, pool: u8, index: u32, patience: Patience) -> bool {
        let region = &self.control.region;
        let Some(tables) = region.pool(usize::from(pool)) else { return true };
        let unlinked = tables.vacate(self, region.hasher(), index, patience);
        if unlinked {
            failpoint!("giveback.unlink.after");
            tables.release(self, index);
            failpoint!("giveback.free.after");
        } else {
            self.leftovers().push((pool, index));
            self.leftover.fetch_add(1, Ordering::Relaxed);
        }
        unlinked
    }

    /// Tries again what could not be unlinked before; true when nothing is left.
    pub(crate) fn retry_leftovers(&self) -> bool {
        let waiting = std::mem::take(&mut *self.leftovers());
        for (pool, index) in waiting {
            let done = self.give_back(pool, index, Patience::Brief);
            self.count(|c| &c.repairs, u64::from(done));
            self.leftover.fetch_sub(1, Ordering::Relaxed);
        }
        !self.has_leftovers()
    }

    pub(crate) fn has_leftovers(&self) -> bool {
        self.leftover.load(Ordering::Relaxed) != 0
    }

    fn leftovers(&self) -> std::sync::MutexGuard<'_, Vec<(u8, u32)>> {
        // Nothing panics while the lock is held.
        self.leftovers.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// Phases of a slot that is its owner's alone.
pub(crate) fn is_private(phase: Phase) -> bool {
    matches!(phase, Phase::Detached | Phase::Draining)
}
