//! Which slot to take: free ones first, then CLOCK with a second chance.
//!
//! The hand moves slot by slot; an accessed bit is cleared and passed, a pinned or filling slot is
//! passed with its bit untouched, the first unpinned slot without a bit is the victim; after one
//! full lap the next evictable slot is taken whatever its bit, so a search takes at most two laps.
//! (F. J. Corbató, "A paging experiment with the Multics system", 1968.)
//!
//! **Invariant:** a slot leaves its key only through [`PoolTables::evict`], which no two searches
//! can win for the same slot, and which gives it back when a pin has come in between.

use crate::{
    bucket::{Patience, RawKey},
    failpoint::failpoint,
    freemap,
    key::{BlockId, Hasher},
    layout::{PoolHot, Slot},
    leftover::is_private,
    member::MemberInner,
    region::PoolTables,
    slot::{Phase, SlotWord},
    sync::{Ordering, seqcst_point},
};

/// Slots a preallocation looks at before it gives up, so that it never delays a task noticeably.
const PREALLOC_SCAN: u32 = 65_536;

impl PoolTables {
    /// Sets the accessed bit. Reads first: a hot slot's bit is set already, and the line stays
    /// shared between the cores.
    pub(crate) fn mark(&self, slot: u32) {
        if let Some(word) = self.accessed.get(slot as usize / 64) {
            let bit = 1 << (slot % 64);
            if word.load(Ordering::Relaxed) & bit == 0 {
                word.fetch_or(bit, Ordering::Relaxed);
            }
        }
    }

    pub(crate) fn is_marked(&self, slot: u32) -> bool {
        self.accessed
            .get(slot as usize / 64)
            .is_some_and(|w| w.load(Ordering::Relaxed) & (1 << (slot % 64)) != 0)
    }

    fn unmark(&self, slot: u32) {
        if let Some(word) = self.accessed.get(slot as usize / 64) {
            word.fetch_and(!(1 << (slot % 64)), Ordering::Relaxed);
        }
    }

    pub(crate) fn hot(&self) -> &PoolHot {
        #[expect(clippy::indexing_slicing, reason = "the table has one item by construction")]
        &self.hot[0]
    }

    /// Finds a slot for a key that is absent. The slot comes back `Detached` in the member's name;
    /// `None` means that every slot is pinned or being filled.
    pub(crate) fn obtain(&self, member: &MemberInner, hasher: Hasher) -> Option<u32> {
        member.count(|c| &c.victim_searches, 1);
        if member.has_leftovers() {
            member.retry_leftovers();
        }
        if let Some(slot) = freemap::take(self.free_regular(), |slot| self.claim_free(member, slot))
        {
            return Some(slot);
        }
        if self.hot().full.0.load(Ordering::SeqCst) != 0 && !self.is_flag_stale(member) {
            return None;
        }
        self.sweep(member, hasher)
    }

    /// Whoever made a slot evictable may have been stopped before it cleared the flag, so each search
    /// looks at one slot of its own, another one each time.
    fn is_flag_stale(&self, member: &MemberInner) -> bool {
        let searches =
            member.record().map_or(0, |r| r.counters.victim_searches.load(Ordering::Relaxed));
        self.evictable(self.hand_position(searches)).is_some()
    }

    /// Two laps at most. The first, shared with all others who search, ages; the second takes the
    /// next evictable slot whatever its bit.
    fn sweep(&self, member: &MemberInner, hasher: Hasher) -> Option<u32> {
        let slots = u64::from(self.regular);
        let hand = &self.hot().cursor.0;
        let mut hopeless = true;
        for step in 0..slots {
            let at = self.hand_position(hand.fetch_add(1, Ordering::Relaxed));
            if let Some(word) = self.evictable(at) {
                hopeless = false;
                if self.is_marked(at) {
                    self.unmark(at);
                } else if self.evict(member, hasher, at, word, || true) {
                    member.count(|c| &c.victim_steps, step + 1);
                    return Some(at);
                }
            }
        }
        // When all were pinned, the next searches shall answer at once. Whoever makes a slot
        // evictable clears the flag *after* doing so; the second lap, after setting it, is the
        // other half of that handshake. It visits every slot itself, wherever others move the hand.
        if hopeless {
            self.hot().full.0.store(1, Ordering::SeqCst);
            failpoint!("full.set.after");
            seqcst_point();
        }
        let start = hand.load(Ordering::Relaxed);
        for step in 0..slots {
            let at = self.hand_position(start.wrapping_add(step));
            if let Some(word) = self.evictable(at)
                && self.evict(member, hasher, at, word, || true)
            {
                hand.fetch_add(step + 1, Ordering::Relaxed);
                member.count(|c| &c.victim_steps, slots + step + 1);
                self.not_full();
                return Some(at);
            }
        }
        member.count(|c| &c.victim_steps, 2 * slots);
        None
    }

    fn hand_position(&self, hand: u64) -> u32 {
        u32::try_from(hand % u64::from(self.regular)).unwrap_or(0)
    }

    /// To be called whenever a slot may have become evictable or free.
    pub(crate) fn not_full(&self) {
        failpoint!("full.clear.before");
        seqcst_point();
        if self.hot().full.0.load(Ordering::SeqCst) != 0 {
            self.hot().full.0.store(0, Ordering::SeqCst);
        }
    }

    /// Finds a slot for preallocation: free, or unpinned without accessed bit; then the same among
    /// the reserved slots, whose bits age with each search. `None` when there is none.
    pub(crate) fn obtain_idle(&self, member: &MemberInner, hasher: Hasher) -> Option<(u32, bool)> {
        let free = |slot| self.claim_free(member, slot);
        if let Some(slot) = freemap::take(self.free_regular(), free) {
            return Some((slot, false));
        }
        if let Some(victim) = self.peek_cold(member, hasher) {
            return Some((victim, false));
        }
        let free = |slot: u32| self.claim_free(member, slot + self.regular);
        if let Some(slot) = freemap::take(self.free_reserved(), free) {
            return Some((slot + self.regular, true));
        }
        self.sweep_reserved(member, hasher).map(|victim| (victim, true))
    }

    /// First evictable regular slot without accessed bit, ahead of the hand. Neither moves the hand
    /// nor clears bits: preallocation takes what is cold already and ages nothing.
    fn peek_cold(&self, member: &MemberInner, hasher: Hasher) -> Option<u32> {
        let start = self.hand_position(self.hot().cursor.0.load(Ordering::Relaxed));
        let mut step = 0;
        let limit = self.regular.min(PREALLOC_SCAN);
        while step < limit {
            let at = (start + step) % self.regular;
            let word = self.accessed.get(at as usize / 64)?.load(Ordering::Relaxed);
            let left_in_word = 64 - at % 64;
            let cold = !word >> (at % 64);
            if cold == 0 {
                step += left_in_word.min(self.regular - at);
                continue;
            }
            let skip = cold.trailing_zeros();
            if skip > 0 {
                step += skip.min(self.regular - at);
                continue;
            }
            if let Some(word) = self.evictable(at)
                && self.evict(member, hasher, at, word, || !self.is_marked(at))
            {
                return Some(at);
            }
            step += 1;
        }
        None
    }

    fn sweep_reserved(&self, member: &MemberInner, hasher: Hasher) -> Option<u32> {
        let total = u32::try_from(self.slots.len()).unwrap_or(u32::MAX);
        let reserved = u64::from(total - self.regular);
        for _ in 0..reserved {
            let step = self.hot().reserved_cursor.0.fetch_add(1, Ordering::Relaxed) % reserved;
            let at = self.regular + u32::try_from(step).unwrap_or(0);
            if let Some(word) = self.evictable(at) {
                if self.is_marked(at) {
                    self.unmark(at);
                } else if self.evict(member, hasher, at, word, || !self.is_marked(at)) {
                    return Some(at);
                }
            }
        }
        None
    }

    fn evictable(&self, slot: u32) -> Option<SlotWord> {
        let slot = self.slot(slot)?;
        let word = slot.load();
        (word.phase().is_evictable() && slot.unpinned()).then_some(word)
    }

    /// Takes a slot away from its key, unless a pin has come in between or `still` has become false
    /// (Dekker: the claimer changes the word, then reads the pins; a pinner sets its bit, then
    /// reads the word). The slot comes back `Detached` and unlinked.
    pub(crate) fn evict(
        &self,
        member: &MemberInner,
        hasher: Hasher,
        index: u32,
        seen: SlotWord,
        still: impl Fn() -> bool,
    ) -> bool {
        let Some(slot) = self.slot(index) else { return false };
        failpoint!("evict.claim.before");
        let claimed = seen.claimed(member.index);
        if !slot.change(seen, claimed) {
            return false;
        }
        seqcst_point();
        failpoint!("evict.claim.after");
        // The lock before the point of no return: a key whose bucket is in the hands of a stopped
        // member stays where it is. The claim keeps the key words as they are.
        if slot.unpinned()
            && still()
            && let Some(bucket) = self.lock(member, slot.key(hasher).hashed, Patience::Brief)
        {
            failpoint!("evict.lock.after");
            let taken = slot.change(claimed, claimed.to(Phase::Detached, Some(member.index)));
            if taken {
                failpoint!("evict.detach.after");
                bucket.remove(index);
                failpoint!("evict.entry.after");
                member.count(|c| &c.evictions, 1);
            }
            return taken;
        }
        slot.change(claimed, seen);
        failpoint!("evict.undo.after");
        // Somebody may have found everything taken while this slot looked so.
        self.not_full();
        false
    }

    fn claim_free(&self, member: &MemberInner, index: u32) -> bool {
        let Some(slot) = self.slot(index) else { return false };
        let seen = slot.load();
        // A late waiter of a drained fill may still hold the slot. No such pin can be added: who
        // pins a free slot now sees that it is not what it looked for, and lets go.
        seen.phase() == Phase::Free
            && slot.unpinned()
            && slot.change(seen, seen.next_generation().to(Phase::Detached, Some(member.index)))
    }

    /// Unlinks a slot that has left its key; false when its bucket could not be locked in time.
    pub(crate) fn vacate(
        &self,
        member: &MemberInner,
        hasher: Hasher,
        index: u32,
        patience: Patience,
    ) -> bool {
        self.slot(index)
            .and_then(|slot| self.lock(member, slot.key(hasher).hashed, patience))
            .map(|bucket| bucket.remove(index))
            .is_some()
    }

    /// Unlinks a slot that another member owns and may give back at any moment, as long as its word is
    /// `word`: no later, because it may be another key's then.
    pub(crate) fn vacate_while(
        &self,
        member: &MemberInner,
        hasher: Hasher,
        index: u32,
        word: SlotWord,
    ) {
        // Read before the word is looked at again, so it is the bucket of that word's key. Its owner
        // needs the lock before it can free the slot.
        if let Some(slot) = self.slot(index)
            && let Some(bucket) = self.lock(member, slot.key(hasher).hashed, Patience::Brief)
            && slot.load() == word
        {
            bucket.remove(index);
        }
    }

    /// Gives a slot that is the member's alone, and linked nowhere, back to the free ones.
    pub(crate) fn release(&self, member: &MemberInner, index: u32) {
        if let Some(slot) = self.slot(index) {
            let word = slot.load();
            let mine = is_private(word.phase()) && word.owner() == Some(member.index);
            if mine && slot.change(word, word.to(Phase::Free, None)) {
                failpoint!("release.word.after");
                self.hint_free(index);
            }
        }
    }

    /// Makes a slot whose word says `Free` findable.
    pub(crate) fn hint_free(&self, index: u32) {
        match index.checked_sub(self.regular) {
            None => freemap::set(self.free_regular(), index),
            Some(reserved) => freemap::set(self.free_reserved(), reserved),
        }
        self.not_full();
    }
}

impl Slot {
    /// The key in the slot, as long as nobody changes it.
    pub(crate) fn key(&self, hasher: Hasher) -> RawKey {
        let lo = self.block_lo.load(Ordering::Acquire);
        let hi = self.block_hi.load(Ordering::Acquire);
        let shard = self.shard.load(Ordering::Acquire);
        RawKey { lo, hi, shard, hashed: Hasher::shard(hasher.block(lo, hi), shard) }
    }

    pub(crate) fn block(&self) -> BlockId {
        BlockId::from_halves(
            self.block_lo.load(Ordering::Acquire),
            self.block_hi.load(Ordering::Acquire),
        )
    }
}
