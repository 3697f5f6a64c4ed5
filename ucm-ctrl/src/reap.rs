//! Clears up after a dead member.
//!
//! **Invariant:** idempotent and interruptible: every step looks at the state and changes it by
//! compare-and-swap; whoever reaps a member that died while reaping takes over its work.

use crate::{
    FailKind, Member, MemberId,
    bucket::{Patience, break_lock_of, is_locked_by},
    expel::finish_expulsions,
    failpoint::failpoint,
    handles::announce_anyway,
    layout::{MAX_MEMBERS, MAX_POOLS, MemberRecord, Slot},
    member::{MemberInner, MemberState, MemberWord},
    region::{PoolTables, Region},
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
        if !named || matches!(word.state(), MemberState::Free | MemberState::Joining) {
            return Reaped::default();
        }
        self.reap(id, Some(word.generation()))
    }

    /// False when this member cannot clear up after others: it has been cleared up after itself, or has
    /// released a pin twice.
    #[must_use]
    pub fn may_reap(&self) -> bool {
        self.inner.may_clear_up()
    }

    /// Clears up after another member. Call only with proof that its process is dead and its memory
    /// accesses have ended; `generation` is the one it joined with, `None` for whichever holds the
    /// seat. Safe to call from several members at once: one does the work, and what others wait for is
    /// not left to one that was stopped meanwhile.
    ///
    /// When several members are dead, a lock of one may be in the way of another's recovery: it is
    /// broken on the word of the [`Liveness`](crate::Liveness) given to
    /// [`set_liveness`](Self::set_liveness). A slot in a bucket whose lock holder is stopped stays
    /// with this member, absent and unused, until that member goes on or ends.
    pub fn reap(&self, id: MemberId, generation: Option<u32>) -> Reaped {
        // A second thread must not go on clearing when the first has given the seat away.
        #[cfg(not(ucm_loom))]
        let _one = self.inner.reaping.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        reap(&self.inner, id, generation, takeable)
    }

    /// The same after a stay that was never more than begun: one that has joined meanwhile is left alone.
    pub fn reap_joining(&self, id: MemberId, generation: u32) -> Reaped {
        #[cfg(not(ucm_loom))]
        let _one = self.inner.reaping.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        reap(&self.inner, id, Some(generation), |_, word, _| word.state() == MemberState::Joining)
    }
}

/// Whether a stay in this state, on this seat, may be taken by a reaper.
type Takeable = fn(&MemberInner, MemberWord, u8) -> bool;

fn takeable(me: &MemberInner, word: MemberWord, index: u8) -> bool {
    match word.state() {
        MemberState::Joined
        | MemberState::Joining
        | MemberState::Expelled
        | MemberState::Invalid => true,
        // Its own reaper was leaving.
        MemberState::Reaping if word.reaper() == index => true,
        MemberState::Reaping => word.reaper() != me.index && me.is_dead(word.reaper()),
        MemberState::Free => false,
    }
}

fn reap(me: &MemberInner, id: MemberId, generation: Option<u32>, takeable: Takeable) -> Reaped {
    let mut reaped = Reaped::default();
    if !me.may_clear_up() || id.0 == me.index {
        return reaped;
    }
    let Some(record) = me.control.region.member(id.0) else { return reaped };
    let mut seats = Vec::from_iter(take_when_possible(me, record, id.0, generation, takeable));
    if seats.is_empty() {
        relieve(me, record, id.0, generation, &mut reaped);
    }
    while let Some(seat) = seats.pop() {
        failpoint!("reap.word.after");
        me.count(|c| &c.recoveries, 1);
        clear(me, &seat, &mut reaped);
        failpoint!("reap.clear.after");
        // Whatever the dead member was clearing itself falls to us, before its seat is free.
        inherit(me, seat.index, &mut seats);
        failpoint!("reap.inherit.after");
        let done = seat.free();
        failpoint!("reap.free.after");
        me.count(|c| &c.deaths, u64::from(done));
        reaped.done |= done && seat.index == id.0;
    }
    #[cfg(not(ucm_loom))]
    crate::group::ring_all(&me.control.region, true);
    finish_expulsions(me);
    me.retry_leftovers();
    me.count(|c| &c.slots_recovered, reaped.slots);
    me.count(|c| &c.pins_recovered, reaped.pins);
    me.count(|c| &c.locks_recovered, reaped.locks);
    me.count(|c| &c.repairs, reaped.locks);
    reaped
}

/// Whether this seat owns or pins a slot, holds a lock, or clears up after another.
pub(crate) fn holds_anything(region: &Region, seat: u8) -> bool {
    let clears = (0..).zip(region.members()).any(|(other, record)| {
        let word = MemberWord(record.word.load(Ordering::SeqCst));
        word.state() == MemberState::Reaping && word.reaper() == seat && other != seat
    });
    if clears {
        return true;
    }
    (0..MAX_POOLS).filter_map(|pool| region.pool(pool)).any(|tables| {
        let holds = |slot: &Slot| {
            let word = slot.load();
            // A slot that was never used names seat 0.
            let owned = word.phase() != Phase::Free && word.owner() == Some(seat);
            owned || is_pinned_by(slot, seat)
        };
        tables.slots.iter().any(holds)
            || tables.buckets.iter().any(|bucket| is_locked_by(&bucket.lock, seat))
    })
}

/// A member record that this member is clearing.
struct Seat<'a> {
    index: u8,
    record: &'a MemberRecord,
    word: MemberWord,
}

/// So often a word of a dead member is tried: others change it once or twice, unless they are hostile.
const TRIES: u32 = 8;

/// Enters oneself as the reaper of a stay; `None` when it is over, or somebody else is at it. An
/// operator may expel the member in between: that is no reason to leave it to anybody else.
fn take_when_possible<'a>(
    me: &MemberInner,
    record: &'a MemberRecord,
    index: u8,
    generation: Option<u32>,
    takeable: Takeable,
) -> Option<Seat<'a>> {
    for _ in 0..TRIES {
        let word = MemberWord(record.word.load(Ordering::SeqCst));
        if !takeable(me, word, index) || generation.is_some_and(|g| g != word.generation()) {
            return None;
        }
        failpoint!("reap.word.before");
        let seat = take(me, record, index, word);
        if seat.is_some() {
            return seat;
        }
    }
    None
}

/// Enters oneself as the reaper; `None` when somebody else was faster.
fn take<'a>(
    me: &MemberInner,
    record: &'a MemberRecord,
    index: u8,
    seen: MemberWord,
) -> Option<Seat<'a>> {
    let word = MemberWord::with(MemberState::Reaping, me.index, seen.generation());
    let won =
        record.word.compare_exchange(seen.0, word.0, Ordering::SeqCst, Ordering::Relaxed).is_ok();
    won.then_some(Seat { index, record, word })
}

impl Seat<'_> {
    fn free(&self) -> bool {
        let free = MemberWord::with(MemberState::Free, 0, self.word.generation());
        self.record
            .word
            .compare_exchange(self.word.0, free.0, Ordering::SeqCst, Ordering::Relaxed)
            .is_ok()
    }
}

fn inherit<'a>(me: &'a MemberInner, dead: u8, seats: &mut Vec<Seat<'a>>) {
    for other in (0..MAX_MEMBERS).filter_map(|i| u8::try_from(i).ok()) {
        let Some(record) = me.control.region.member(other) else { continue };
        let word = MemberWord(record.word.load(Ordering::SeqCst));
        if word.state() == MemberState::Reaping && word.reaper() == dead && other != me.index {
            seats.extend(take(me, record, other, word));
        }
    }
}

/// Somebody else clears up after this stay, and may be stopped in the midst of it: what others wait for is
/// not left to it. What only takes up room is.
fn relieve(
    me: &MemberInner,
    record: &MemberRecord,
    dead: u8,
    generation: Option<u32>,
    reaped: &mut Reaped,
) {
    let seen = MemberWord(record.word.load(Ordering::SeqCst));
    let other = seen.state() == MemberState::Reaping && seen.reaper() != me.index;
    if !other || generation.is_some_and(|g| g != seen.generation()) {
        return;
    }
    release_waiters(me, record, dead, seen, reaped);
}

/// Frees the dead one's locks, ends its fills, votes for it, and tells all of it, also what somebody has
/// done and may have died or been stopped before it told.
///
/// Only what is found while the record names the stay is touched.
fn release_waiters(
    me: &MemberInner,
    record: &MemberRecord,
    dead: u8,
    seen: MemberWord,
    reaped: &mut Reaped,
) {
    // After what was read: if the record is still the same, it is of that stay.
    // Another survivor may take it over meanwhile; the seat stays the dead one's.
    let still = || {
        let now = MemberWord(record.word.load(Ordering::SeqCst));
        now.state() == MemberState::Reaping && now.generation() == seen.generation()
    };
    for tables in pools(me) {
        free_locks(tables, dead, seen.generation(), reaped);
        for slot in tables.slots.iter() {
            let word = slot.load();
            let undone = undone(word).filter(|_| word.owner() == Some(dead));
            if let Some(undone) = undone
                && still()
                && slot.change(word, undone)
            {
                failpoint!("relieve.slot.after");
                reaped.slots += 1;
            }
            // A fill is pinned by its owner until all have been told of its end.
            if is_pinned_by(slot, dead) && still() {
                announce_anyway(&me.control.region, slot);
                failpoint!("relieve.tell.after");
            }
        }
    }
    #[cfg(not(ucm_loom))]
    {
        crate::lease::ring_all_bells(&me.control);
        crate::group::count_out(&me.control.region, dead, still);
    }
}

fn is_pinned_by(slot: &Slot, member: u8) -> bool {
    let word = slot.pins.get(usize::from(member) / 64);
    word.is_some_and(|pins| pins.load(Ordering::SeqCst) & (1 << (member % 64)) != 0)
}

fn pools(me: &MemberInner) -> impl Iterator<Item = &PoolTables> {
    (0..MAX_POOLS).filter_map(|pool| me.control.region.pool(pool))
}

/// What a dead member's slot becomes at once, whoever sees it: a fill makes its key loadable again (it is
/// linked), an eviction that has lost nothing yet is taken back.
fn undone(word: SlotWord) -> Option<SlotWord> {
    match word.phase() {
        Phase::Claimed | Phase::ClaimedReady => Some(word.unclaimed()),
        Phase::Filling => Some(word.failed_as(FailKind::OwnerDied).to(Phase::Failed, None)),
        _ => None,
    }
}

fn clear(me: &MemberInner, seat: &Seat<'_>, reaped: &mut Reaped) {
    let dead = seat.index;
    // What takes up room may have to wait for the bucket lock of a stopped member; nobody else has to.
    release_waiters(me, seat.record, dead, seat.word, reaped);
    for (pool, tables) in (0..).zip(pools(me)) {
        for (index, slot) in tables.slots.iter().enumerate() {
            let Ok(index) = u32::try_from(index) else { break };
            recover_slot(me, (pool, tables), index, slot, dead, reaped);
        }
        failpoint!("reap.slots.after");
        tables.not_full();
    }
    #[cfg(not(ucm_loom))]
    {
        crate::lease::free_records_of(&me.control, dead);
        failpoint!("reap.leases.after");
        crate::lease::ring_all_bells(&me.control);
        crate::group::clear(&me.control.region, dead);
        failpoint!("reap.groups.after");
    }
}

fn free_locks(tables: &PoolTables, dead: u8, generation: u32, reaped: &mut Reaped) {
    for bucket in tables.buckets.iter() {
        if bucket.lock.load(Ordering::Relaxed) != 0 && break_lock_of(&bucket.lock, dead, generation)
        {
            failpoint!("reap.lock.after");
            reaped.locks += 1;
        }
    }
}

fn recover_slot(
    me: &MemberInner,
    pool: (u8, &PoolTables),
    index: u32,
    slot: &Slot,
    dead: u8,
    reaped: &mut Reaped,
) {
    // Somebody who expels the member may put a fill into quarantine in between.
    let _ = (0..TRIES).any(|_| recover_word(me, pool, index, slot, dead, reaped));
    if is_pinned_by(slot, dead)
        && let Some(pins) = slot.pins.get(usize::from(dead) / 64)
    {
        // What was changed just now, or by somebody who may have died before it told the waiters.
        announce_anyway(&me.control.region, slot);
        failpoint!("reap.tell.after");
        // Pins last: they keep others from taking a slot that is being recovered.
        pins.fetch_and(!(1 << (dead % 64)), Ordering::SeqCst);
        failpoint!("reap.pin.after");
        reaped.pins += 1;
    }
}

/// False when somebody else has changed the word of the dead member's slot in between.
fn recover_word(
    me: &MemberInner,
    (pool, tables): (u8, &PoolTables),
    index: u32,
    slot: &Slot,
    dead: u8,
    reaped: &mut Reaped,
) -> bool {
    let word = slot.load();
    if word.phase() == Phase::Free {
        tables.hint_free(index);
    }
    if word.owner() != Some(dead) {
        return true;
    }
    let recovered = match (undone(word), word.phase()) {
        (Some(undone), _) => slot.change(word, undone),
        // May be linked under its key, or under none. For a draining slot the caller's proof
        // includes that the dead process can write no more.
        (None, Phase::Detached | Phase::Draining) => {
            let taken = slot.change(word, word.to(Phase::Detached, Some(me.index)));
            failpoint!("reap.take.after");
            if taken {
                // The reminder tries again: nobody waits here for the lock of a stopped member.
                me.give_back(pool, index, Patience::Brief);
            }
            taken
        }
        _ => return true,
    };
    failpoint!("reap.slot.after");
    reaped.slots += u64::from(recovered);
    recovered
}
