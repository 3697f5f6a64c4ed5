//! The index: buckets of six tagged entries and an overflow chain through the slots.
//!
//! **Invariant:** every change of a bucket is committed by one store, made under its lock; entries
//! never move. So a lock-free reader misses no resident key in the entries, and a bucket whose
//! lock holder died needs an unlock, not a repair.

#[cfg(not(ucm_loom))]
use std::time::{Duration, Instant};

#[cfg(not(ucm_loom))]
use crate::event;
use crate::{
    failpoint::failpoint,
    key::Hashed,
    layout::{Bucket, Slot},
    member::{MemberInner, MemberState, MemberWord},
    pins::is_unpinned,
    region::PoolTables,
    slot::{Phase, SlotWord},
    sync::{AtomicU32, Backoff, Ordering},
};

/// A key in the form the tables compare.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RawKey {
    pub(crate) lo: u64,
    pub(crate) hi: u64,
    pub(crate) shard: u32,
    pub(crate) hashed: Hashed,
}

impl Slot {
    pub(crate) fn load(&self) -> SlotWord {
        SlotWord(self.word.load(Ordering::SeqCst))
    }

    pub(crate) fn change(&self, from: SlotWord, to: SlotWord) -> bool {
        self.word.compare_exchange(from.0, to.0, Ordering::SeqCst, Ordering::Relaxed).is_ok()
    }

    pub(crate) fn holds(&self, key: &RawKey) -> bool {
        self.block_lo.load(Ordering::Acquire) == key.lo
            && self.block_hi.load(Ordering::Acquire) == key.hi
            && self.shard.load(Ordering::Acquire) == key.shard
    }

    pub(crate) fn set_key(&self, key: &RawKey) {
        self.block_lo.store(key.lo, Ordering::Release);
        failpoint!("key.lo.after");
        self.block_hi.store(key.hi, Ordering::Release);
        failpoint!("key.hi.after");
        self.shard.store(key.shard, Ordering::Release);
    }

    pub(crate) fn unpinned(&self) -> bool {
        is_unpinned(&self.pins)
    }
}

fn entry(tag: u32, slot: u32) -> u64 {
    (u64::from(tag) << 32) | (u64::from(slot) + 1)
}

/// Slot + 1 and tag of an entry.
fn split(entry: u64) -> (u32, u32) {
    let tag = u32::try_from(entry >> 32).unwrap_or(0);
    let slot = u32::try_from(entry & u64::from(u32::MAX)).unwrap_or(0);
    (slot, tag)
}

/// Slot and tag of an entry; `None` for an empty one.
fn parse(entry: u64) -> Option<(u32, u32)> {
    let (slot, tag) = split(entry);
    slot.checked_sub(1).map(|slot| (slot, tag))
}

/// More than any pool has.
const NO_SLOT: u32 = u32::MAX;

/// What a look into a bucket under its lock found.
#[derive(Debug)]
pub(crate) enum Found {
    /// The key is resident, or an evictor has just claimed it and may give it back.
    Resident,
    /// The key is not in the bucket (leftovers of it were removed).
    Absent,
}

impl PoolTables {
    pub(crate) fn bucket_index(&self, hashed: Hashed) -> usize {
        let mask = self.buckets.len() as u64 - 1;
        usize::try_from(hashed.position & mask).unwrap_or(0)
    }

    pub(crate) fn slot(&self, index: u32) -> Option<&Slot> {
        self.slots.get(index as usize)
    }

    /// Looks for a key without a lock. What it returns is a candidate: pin it, then look again.
    pub(crate) fn find(&self, key: &RawKey) -> Option<(u32, &Slot, SlotWord)> {
        let bucket = self.buckets.get(self.bucket_index(key.hashed))?;
        for entry in &bucket.entries {
            if let Some((index, tag)) = parse(entry.load(Ordering::Acquire))
                && tag == key.hashed.tag
                && let Some(found) = self.candidate(index, key)
            {
                return Some(found);
            }
        }
        if bucket.overflow.load(Ordering::Acquire) == 0 {
            return None;
        }
        self.find_in_chain(bucket, key)
    }

    #[cold]
    fn find_in_chain<'a>(
        &'a self,
        bucket: &'a Bucket,
        key: &RawKey,
    ) -> Option<(u32, &'a Slot, SlotWord)> {
        // A removal during the walk may lead it astray: walk again. A chain never has more members
        // than slots; a longer walk is a cycle made by corruption.
        for _ in 0..64 {
            let version = bucket.chain_version.load(Ordering::Acquire);
            let mut next = bucket.overflow.load(Ordering::Acquire);
            for _ in 0..self.slots.len() {
                let Some(index) = next.checked_sub(1) else { break };
                if let Some(found) = self.candidate(index, key) {
                    return Some(found);
                }
                next = self.slot(index)?.next.load(Ordering::Acquire);
            }
            if bucket.chain_version.load(Ordering::Acquire) == version {
                return None;
            }
        }
        None
    }

    /// Begins to read a key's bucket, for a look at it soon.
    pub(crate) fn fetch_bucket(&self, key: &RawKey) {
        if let Some(bucket) = self.buckets.get(self.bucket_index(key.hashed)) {
            bucket.overflow.load(Ordering::Relaxed);
        }
    }

    /// Begins to read the slot that probably has the key. No slot has the number returned when
    /// there is none.
    pub(crate) fn fetch_slot(&self, key: &RawKey) -> u32 {
        let Some(bucket) = self.buckets.get(self.bucket_index(key.hashed)) else { return NO_SLOT };
        // Without branches on what was read: a wrong guess would wait for the memory.
        let mut likely = NO_SLOT;
        for entry in &bucket.entries {
            let (slot, tag) = split(entry.load(Ordering::Acquire));
            likely = if tag == key.hashed.tag { slot.wrapping_sub(1) } else { likely };
        }
        if let Some(slot) = self.slot(likely) {
            slot.word.load(Ordering::Relaxed);
        }
        likely
    }

    /// The slot, if it has the key.
    pub(crate) fn candidate(&self, index: u32, key: &RawKey) -> Option<(u32, &Slot, SlotWord)> {
        let slot = self.slot(index)?;
        let word = slot.load();
        let there = word.phase().is_resident() || word.phase().is_claimed();
        (there && slot.holds(key)).then_some((index, slot, word))
    }

    /// Locks the bucket of a key in the name of a member. `None` when it cannot be had in time:
    /// its holder was stopped in mid-change, and nobody shall stop with it.
    pub(crate) fn lock<'a>(
        &'a self,
        member: &'a MemberInner,
        hashed: Hashed,
        patience: Patience,
    ) -> Option<Locked<'a>> {
        let bucket = self.buckets.get(self.bucket_index(hashed))?;
        acquire_lock(&bucket.lock, member, patience).then(|| Locked {
            tables: self,
            bucket,
            member,
        })
    }
}

/// One value of a bucket's lock word: 0 when free, else bits 0..8 seat + 1 of the holder, 8..31
/// its generation, 31 somebody sleeps on the word. The generation keeps whoever has found a holder
/// dead from breaking a lock of the seat's next holder.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct LockWord(u32);

impl LockWord {
    const SLEEPING: u32 = 1 << 31;
    const GENERATION_MASK: u32 = (1 << 23) - 1;

    pub(crate) fn of(seat: u8, generation: u32) -> Self {
        Self((u32::from(seat) + 1) | ((generation & Self::GENERATION_MASK) << 8))
    }

    fn holder(self) -> Option<u8> {
        self.0.to_le_bytes()[0].checked_sub(1)
    }

    /// The stay that the word names, as far as the word has room for it.
    fn is_of(self, seat: u8, generation: u32) -> bool {
        self.0 & !Self::SLEEPING == Self::of(seat, generation).0
    }

    fn sleeping(self) -> Self {
        Self(self.0 | Self::SLEEPING)
    }
}

/// How long to wait for a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Patience {
    /// Some microseconds: there are other slots to be had.
    Brief,
    /// As long as the holder may just be slow (see [`Backoff`]).
    Enough,
}

/// False when the lock was not to be had in time.
fn acquire_lock(lock: &AtomicU32, member: &MemberInner, patience: Patience) -> bool {
    let mut mine = LockWord::of(member.index, member.generation);
    let mut backoff = Backoff::default();
    loop {
        if lock.compare_exchange(0, mine.0, Ordering::SeqCst, Ordering::Relaxed).is_ok() {
            return true;
        }
        if backoff.snooze() < 64 || cfg!(ucm_loom) {
            continue;
        }
        let seen = LockWord(lock.load(Ordering::SeqCst));
        if seen.0 != 0 && is_nobodys(seen, member) && break_lock(lock, seen) {
            member.count(|c| &c.corruptions, 1);
            member.count(|c| &c.repairs, 1);
            continue;
        }
        if patience == Patience::Brief || backoff.has_waited_enough() {
            return false;
        }
        let marked = seen.sleeping();
        if seen.0 != 0
            && (seen == marked
                || lock
                    .compare_exchange(seen.0, marked.0, Ordering::SeqCst, Ordering::Relaxed)
                    .is_ok())
        {
            // Whoever has slept must assume that others sleep too.
            mine = mine.sleeping();
            failpoint!("lock.sleep.before");
            sleep_on(lock, marked.0);
            if let Some(holder) = marked.holder()
                && holder != member.index
                && lock.load(Ordering::SeqCst) == marked.0
                && member.is_dead(holder)
                && break_lock(lock, marked)
            {
                member.count(|c| &c.locks_recovered, 1);
                member.count(|c| &c.repairs, 1);
            }
        }
    }
}

/// True for a lock that nobody can hold: the stay it names has ended (its locks went with it), or
/// never was. Only damaged memory has such locks.
fn is_nobodys(seen: LockWord, member: &MemberInner) -> bool {
    let holder = seen.holder().and_then(|seat| Some((seat, member.control.region.member(seat)?)));
    holder.is_none_or(|(seat, record)| {
        let word = MemberWord(record.word.load(Ordering::SeqCst));
        word.state() == MemberState::Free || !seen.is_of(seat, word.generation())
    })
}

/// Whether any stay on this seat holds the lock.
pub(crate) fn is_locked_by(lock: &AtomicU32, seat: u8) -> bool {
    LockWord(lock.load(Ordering::SeqCst)).holder() == Some(seat)
}

/// Frees the lock if this stay of a dead member holds it.
pub(crate) fn break_lock_of(lock: &AtomicU32, dead: u8, generation: u32) -> bool {
    let seen = LockWord(lock.load(Ordering::SeqCst));
    seen.is_of(dead, generation) && break_lock(lock, seen)
}

/// Frees a lock whose holder is proven dead. Buckets are consistent at every instant, so there is
/// nothing to repair. False when somebody else was faster.
fn break_lock(lock: &AtomicU32, seen: LockWord) -> bool {
    let broken = lock.compare_exchange(seen.0, 0, Ordering::SeqCst, Ordering::Relaxed).is_ok();
    if broken {
        failpoint!("lock.break.after");
        wake(lock);
    }
    broken
}

/// Sleeps while the lock stays as it was seen, a few milliseconds at most.
#[cfg(not(ucm_loom))]
fn sleep_on(lock: &AtomicU32, seen: u32) {
    event::futex::sleep(lock, seen, Some(Instant::now() + Duration::from_millis(5)));
}

#[cfg(not(ucm_loom))]
fn wake(lock: &AtomicU32) {
    event::futex::wake_all(lock);
}

#[cfg(ucm_loom)]
fn sleep_on(_: &AtomicU32, _: u32) {}

#[cfg(ucm_loom)]
fn wake(_: &AtomicU32) {}

/// A bucket under lock; unlocked on drop.
pub(crate) struct Locked<'a> {
    tables: &'a PoolTables,
    bucket: &'a Bucket,
    member: &'a MemberInner,
}

impl Locked<'_> {
    /// Looks for a key. Removes entries of slots that have left it already.
    pub(crate) fn look(&self, key: &RawKey) -> Found {
        self.cut_damaged_chain();
        // Each removal from the chain starts the walk anew. There is hardly ever one.
        for _ in 0..64 {
            if let Some(found) = self.look_once(key) {
                return found;
            }
        }
        // Damaged memory, or a very unlucky one. Nothing may be inserted; the next look removes more.
        Found::Resident
    }

    /// A chain ends before it names a slot twice, or one that does not exist. Damage is cut off:
    /// what it led to is found by evictors, and by nobody else.
    fn cut_damaged_chain(&self) {
        let mut link = &self.bucket.overflow;
        let mut steps = 0;
        while let Some(index) = link.load(Ordering::Relaxed).checked_sub(1) {
            let next = self.tables.slot(index).map(|slot| &slot.next);
            steps += 1;
            match next {
                Some(next) if steps <= self.tables.slots.len() => link = next,
                Some(_) => return self.cut(&self.bucket.overflow),
                None => return self.cut(link),
            }
        }
    }

    fn cut(&self, link: &AtomicU32) {
        link.store(0, Ordering::Release);
        self.bucket.chain_version.fetch_add(1, Ordering::Release);
        self.member.count(|c| &c.corruptions, 1);
    }

    /// `None` after a removal that the walk cannot survive.
    fn look_once(&self, key: &RawKey) -> Option<Found> {
        for entry in &self.bucket.entries {
            let Some((index, tag)) = parse(entry.load(Ordering::SeqCst)) else { continue };
            if index as usize >= self.tables.slots.len() {
                entry.store(0, Ordering::Release);
                self.member.count(|c| &c.corruptions, 1);
                continue;
            }
            if tag != key.hashed.tag {
                continue;
            }
            match self.judge(index, key) {
                Verdict::Other => {}
                Verdict::Resident => return Some(Found::Resident),
                Verdict::Left => entry.store(0, Ordering::Release),
            }
        }
        for index in self.chain() {
            match self.judge(index, key) {
                Verdict::Other => {}
                Verdict::Resident => return Some(Found::Resident),
                Verdict::Left => {
                    self.unchain(index);
                    return None;
                }
            }
        }
        Some(Found::Absent)
    }

    fn judge(&self, index: u32, key: &RawKey) -> Verdict {
        // While an entry is in its bucket and the lock is held, the slot's key cannot change: its
        // next holder unlinks it first, under this lock.
        match self.tables.slot(index) {
            Some(slot) if slot.holds(key) => match slot.load().phase() {
                Phase::Detached | Phase::Draining | Phase::Free | Phase::Invalid => Verdict::Left,
                _ => Verdict::Resident,
            },
            _ => Verdict::Other,
        }
    }

    /// Links a slot under a key that is absent.
    pub(crate) fn insert(&self, key: &RawKey, index: u32) {
        for entry_word in &self.bucket.entries {
            if entry_word.load(Ordering::SeqCst) == 0 {
                entry_word.store(entry(key.hashed.tag, index), Ordering::Release);
                return;
            }
        }
        if let Some(slot) = self.tables.slot(index) {
            slot.next.store(self.bucket.overflow.load(Ordering::SeqCst), Ordering::Release);
            failpoint!("link.chain.after");
            self.bucket.overflow.store(index + 1, Ordering::Release);
        }
    }

    /// Unlinks a slot if it is linked here; true when it was.
    pub(crate) fn remove(&self, index: u32) -> bool {
        for entry in &self.bucket.entries {
            if parse(entry.load(Ordering::SeqCst)).is_some_and(|(slot, _)| slot == index) {
                entry.store(0, Ordering::Release);
                return true;
            }
        }
        self.unchain(index)
    }

    fn chain(&self) -> impl Iterator<Item = u32> {
        let mut next = self.bucket.overflow.load(Ordering::SeqCst);
        let mut steps = 0;
        std::iter::from_fn(move || {
            let index = next.checked_sub(1)?;
            steps += 1;
            if steps > self.tables.slots.len() {
                return None;
            }
            next = self.tables.slot(index)?.next.load(Ordering::SeqCst);
            Some(index)
        })
    }

    fn unchain(&self, index: u32) -> bool {
        let mut link = &self.bucket.overflow;
        for _ in 0..self.tables.slots.len() {
            let at = link.load(Ordering::SeqCst);
            let Some(slot) = at.checked_sub(1).and_then(|at| self.tables.slot(at)) else {
                return false;
            };
            if at == index + 1 {
                link.store(slot.next.load(Ordering::SeqCst), Ordering::Release);
                failpoint!("unlink.chain.after");
                self.bucket.chain_version.fetch_add(1, Ordering::Release);
                return true;
            }
            link = &slot.next;
        }
        false
    }
}

enum Verdict {
    Other,
    Resident,
    Left,
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        failpoint!("unlock.word.before");
        if self.bucket.lock.swap(0, Ordering::SeqCst) & LockWord::SLEEPING != 0 {
            failpoint!("unlock.wake.before");
            wake(&self.bucket.lock);
        }
    }
}

/// Calls `see` for all linked slots of a bucket, with the tag of those in entries, until it says
/// `false`. Without a lock, for inspection.
pub(crate) fn for_each_linked(
    tables: &PoolTables,
    bucket: &Bucket,
    mut see: impl FnMut(u32, Option<u32>) -> bool,
) {
    for entry in &bucket.entries {
        if let Some((slot, tag)) = parse(entry.load(Ordering::Acquire)) {
            see(slot, Some(tag));
        }
    }
    let mut next = bucket.overflow.load(Ordering::Acquire);
    while let Some(index) = next.checked_sub(1)
        && see(index, None)
        && let Some(slot) = tables.slot(index)
    {
        next = slot.next.load(Ordering::Acquire);
    }
}
