//! Clears up after a dead member.
//!
//! **Invariant:** idempotent and interruptible: every step looks at the state and changes it by
//! compare-and-swap; whoever reaps a member that died while reaping takes over its work.

use crate::{
    FailKind, Member, MemberId,
    bucket::break_lock,
    handles::announce,
    layout::MAX_MEMBERS,
    member::{MemberInner, MemberState, MemberWord},
    region::PoolTables,
    slot::{Phase, SlotWord},
    sync::Ordering,
};

/// What [`Member::reap`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reaped {
    /// False when the member had left, or somebody else is at it.
    pub done: bool,
    /// Fills and half-done evictions undone.
    pub slots: u64,
    /// Pins removed.
    pub pins: u64,
    /// Bucket locks freed.
    pub locks: u64,
}

impl Member {
    /// Clears up after the stay on a seat that `incarnation` names; does nothing when the seat is
    /// held by another stay by now. The rules of [`reap`](Self::reap) apply.
    pub fn reap_stay(&self, id: MemberId, incarnation: [u8; 16]) -> Reaped {
        let Some(record) = self.inner.control.region.member(id.0) else { return Reaped::default() };
        let word = MemberWord(record.word.load(Ordering::SeqCst));
        let (lo, hi) = crate::BlockId(incarnation).halves();
        let named = record.incarnation.iter().map(|half| half.load(Ordering::SeqCst)).eq([lo, hi]);
        // The record's halves belong to this generation if it is still there, and not in the middle
        // of being written.
        if !named || !matches!(word.state(), MemberState::Joined | MemberState::Reaping) {
            return Reaped::default();
        }
        self.reap(id, Some(word.generation()))
    }

    /// Clears up after another member. Call only with proof that its process is dead and its memory
    /// accesses have ended; `generation` is the one it joined with, `None` for whichever holds the
    /// seat. Safe to call from several members at once: one does the work.
    pub fn reap(&self, id: MemberId, generation: Option<u32>) -> Reaped {
        let me = &*self.inner;
        let mut reaped = Reaped::default();
        if me.check().is_err() || id.0 == me.index {
            return reaped;
        }
        let Some(record) = me.control.region.member(id.0) else { return reaped };
        let word = MemberWord(record.word.load(Ordering::SeqCst));
        if generation.is_some_and(|g| g != word.generation()) {
            return reaped;
        }
        let takeable = match word.state() {
            MemberState::Joined | MemberState::Joining | MemberState::Invalid => true,
            MemberState::Reaping => me.is_dead(word.reaper()) || word.reaper() == me.index,
            MemberState::Free => false,
        };
        let mine = MemberWord::with(MemberState::Reaping, me.index, word.generation());
        if !takeable
            || record
                .word
                .compare_exchange(word.0, mine.0, Ordering::SeqCst, Ordering::Relaxed)
                .is_err()
        {
            return reaped;
        }
        for pool in 0..me.control.geometry().pools.len() {
            let Some(tables) = me.control.region.pool(pool) else { continue };
            free_locks(tables, id.0, &mut reaped);
        }
        for pool in 0..me.control.geometry().pools.len() {
            let Some(tables) = me.control.region.pool(pool) else { continue };
            for index in 0..u32::try_from(tables.slots.len()).unwrap_or(u32::MAX) {
                recover_slot(me, tables, index, id.0, &mut reaped);
            }
            tables.not_full();
        }
        #[cfg(not(ucm_loom))]
        crate::lease::free_records_of(&me.control, id.0);
        let free = MemberWord::with(MemberState::Free, 0, word.generation());
        reaped.done = record
            .word
            .compare_exchange(mine.0, free.0, Ordering::SeqCst, Ordering::Relaxed)
            .is_ok();
        me.count(|c| &c.deaths, u64::from(reaped.done));
        me.count(|c| &c.slots_recovered, reaped.slots);
        me.count(|c| &c.pins_recovered, reaped.pins);
        me.count(|c| &c.locks_recovered, reaped.locks);
        // Whatever the dead member was reaping itself falls to us.
        for other in (0..MAX_MEMBERS).filter_map(|i| u8::try_from(i).ok()) {
            let Some(record) = me.control.region.member(other) else { continue };
            let word = MemberWord(record.word.load(Ordering::SeqCst));
            if reaped.done && word.state() == MemberState::Reaping && word.reaper() == id.0 {
                let taken = MemberWord::with(MemberState::Reaping, me.index, word.generation());
                if record
                    .word
                    .compare_exchange(word.0, taken.0, Ordering::SeqCst, Ordering::Relaxed)
                    .is_ok()
                {
                    self.reap(MemberId(other), Some(word.generation()));
                }
            }
        }
        reaped
    }
}

fn free_locks(tables: &PoolTables, dead: u8, reaped: &mut Reaped) {
    for bucket in tables.buckets.iter() {
        if bucket.lock.load(Ordering::Relaxed) != 0 && break_lock(&bucket.lock, dead) {
            reaped.locks += 1;
        }
    }
}

fn recover_slot(me: &MemberInner, tables: &PoolTables, index: u32, dead: u8, reaped: &mut Reaped) {
    let Some(slot) = tables.slot(index) else { return };
    let (word_index, bit) = (usize::from(dead) / 64, 1_u64 << (dead % 64));
    let word = slot.load();
    if word.owner() == Some(dead) {
        match word.phase() {
            // May be linked under its key, or under none. For a draining slot the caller's proof
            // includes that the dead process can write no more.
            Phase::Claimed | Phase::Detached | Phase::Draining => {
                let mine = word.to(Phase::Detached, Some(me.index));
                if slot.change(word, mine) {
                    tables.vacate(me, me.control.region.hasher(), index);
                    tables.release(index);
                    reaped.slots += 1;
                }
            }
            Phase::Filling => reaped.slots += u64::from(recover_fill(me, tables, index, word)),
            _ => {}
        }
    } else if word.phase() == Phase::Free {
        tables.hint_free(index);
    }
    // Pins last: they keep others from taking a slot that is being recovered.
    if let Some(pins) = slot.pins.get(word_index)
        && pins.load(Ordering::SeqCst) & bit != 0
    {
        pins.fetch_and(!bit, Ordering::SeqCst);
        reaped.pins += 1;
    }
}

/// A fill of a dead owner: loadable again if it was linked already, else free.
fn recover_fill(me: &MemberInner, tables: &PoolTables, index: u32, word: SlotWord) -> bool {
    let Some(slot) = tables.slot(index) else { return false };
    let key = slot.key(me.control.region.hasher());
    let Some(bucket) = tables.lock(me, key.hashed) else { return false };
    let failed = word.failed_as(FailKind::OwnerDied);
    if bucket.contains(index) {
        let recovered = slot.change(word, failed.to(Phase::Failed, None));
        drop(bucket);
        if recovered {
            announce(&me.control.region, slot);
        }
        recovered
    } else {
        let recovered = slot.change(word, failed.to(Phase::Free, None));
        drop(bucket);
        tables.hint_free(index);
        recovered
    }
}
