//! Slots that have left their keys but not yet their buckets.
//!
//! A bucket whose lock holder was stopped in mid-change cannot be changed by anybody else. What
//! should be unlinked from it meanwhile stays with the member that wanted to, and is tried again
//! whenever that member needs a slot or clears up after another; and now and then by a thread that
//! lives as long as something is left, so that a member at rest keeps nothing for ever.
//!
//! **Invariant:** a slot becomes free only after it was unlinked, so an entry never leads to a slot
//! of another key.

#[cfg(not(ucm_loom))]
use std::{
    sync::Weak,
    thread::{self, Thread},
    time::Duration,
};

#[cfg(not(ucm_loom))]
use crate::attendant::{Alive, Attendant};
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
            self.leftover.fetch_add(1, Ordering::SeqCst);
            #[cfg(not(ucm_loom))]
            self.remind();
        }
        unlinked
    }

    /// Tries again what could not be unlinked before; true when nothing is left.
    pub(crate) fn retry_leftovers(&self) -> bool {
        let waiting = std::mem::take(&mut *self.leftovers());
        for (pool, index) in waiting {
            let done = self.give_back(pool, index, Patience::Brief);
            self.count(|c| &c.repairs, u64::from(done));
            self.leftover.fetch_sub(1, Ordering::SeqCst);
        }
        !self.has_leftovers()
    }

    /// Sees to it that a thread tries again. Without one (the process has too many) it is left to
    /// the next search for a slot.
    #[cfg(not(ucm_loom))]
    fn remind(&self) {
        if self.reminded.load(Ordering::SeqCst) != 0 {
            return;
        }
        // Held until the new one is stored: a third one may be due by then.
        let mut reminder = self.reminder();
        if self.reminded.swap(1, Ordering::SeqCst) != 0 {
            return;
        }
        // The one before has nothing left to do, and takes no lock any more.
        drop(reminder.take());
        let me = self.me.clone();
        let new = Attendant::start(&self.control, "ucm-leftovers", Thread::unpark, move |alive| {
            try_again_and_again(&me, &alive);
        });
        match new {
            Ok(thread) => *reminder = Some(thread),
            Err(_) => self.reminded.store(0, Ordering::SeqCst),
        }
    }

    /// For a member that leaves: no thread of it stays, and none is started again.
    #[cfg(not(ucm_loom))]
    pub(crate) fn end_reminder(&self) {
        if !self.control.region.is_ours() {
            // A child's copy: its lock may be held for ever.
            return;
        }
        self.reminded.store(1, Ordering::SeqCst);
        let last = self.reminder().take();
        drop(last);
    }

    #[cfg(not(ucm_loom))]
    fn reminder(&self) -> std::sync::MutexGuard<'_, Option<Attendant>> {
        self.reminder.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// True when the reminder may end. Whoever adds a leftover does so before it looks whether there
    /// is a reminder, so one of the two sees the other.
    #[cfg(not(ucm_loom))]
    fn is_reminder_done(&self) -> bool {
        if !self.may_write() {
            return true;
        }
        if !self.retry_leftovers() {
            return false;
        }
        self.reminded.store(0, Ordering::SeqCst);
        !self.has_leftovers() || self.reminded.swap(1, Ordering::SeqCst) != 0
    }

    pub(crate) fn has_leftovers(&self) -> bool {
        self.leftover.load(Ordering::SeqCst) != 0
    }

    fn leftovers(&self) -> std::sync::MutexGuard<'_, Vec<(u8, u32)>> {
        // Nothing panics while the lock is held.
        self.leftovers.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// Holds no member between two tries, so it never keeps one from leaving.
#[cfg(not(ucm_loom))]
fn try_again_and_again(member: &Weak<MemberInner>, alive: &Alive) {
    let mut pause = Duration::from_millis(10);
    loop {
        // Woken when the member leaves; anything else that wakes it does no harm.
        thread::park_timeout(pause);
        if alive.is_over() || member.upgrade().is_none_or(|member| member.is_reminder_done()) {
            return;
        }
        pause = (pause * 2).min(Duration::from_secs(1));
    }
}

/// Phases of a slot that is its owner's alone.
pub(crate) fn is_private(phase: Phase) -> bool {
    matches!(phase, Phase::Detached | Phase::Draining)
}
