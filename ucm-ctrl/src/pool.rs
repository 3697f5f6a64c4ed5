//! One slot class of the cache, as one member uses it: acquire, look up, touch, preallocate.
//!
//! **Invariant:** for any interleaving of members on one absent key exactly one gets `Owner`; what
//! a member holds a pin on is never taken away from its key.

use std::fmt;

use crate::{
    BlockId, CtrlError, Fill, Key, Pin, Waiter,
    bucket::{Found, Patience, RawKey},
    failpoint::failpoint,
    handles::{Handle, monotonic_ms},
    key::Hasher,
    layout::{MemberRecord, Slot},
    member::MemberInner,
    region::PoolTables,
    slot::{Phase, SlotWord},
    sync::{Arc, Backoff, Ordering},
};

/// Index of a pool in its region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PoolId(pub u8);

/// Index of a slot in its pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotId(pub u32);

/// Answer of [`Pool::acquire`].
#[derive(Debug)]
#[must_use]
pub enum Acquired {
    /// The bytes are there.
    Hit(Pin),
    /// The caller fills the slot; nobody else does.
    Owner(Fill),
    /// Somebody else fills the slot.
    Waiter(Waiter),
    /// Every slot is pinned or being filled: bypass the cache.
    Full,
}

/// What a preallocation did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Prealloc {
    /// An idle slot now waits for the key.
    Made,
    /// The same, in a reserved slot.
    MadeReserved,
    /// The key was resident already.
    Resident,
    /// No slot could be had without evicting something pinned or accessed.
    NoSlot,
    /// The block has no such shard.
    NoSuchShard,
}

/// What a removal did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Removal {
    /// The key is gone.
    Removed,
    /// The key was not there.
    Absent,
    /// Somebody pins or fills it.
    InUse,
}

/// A pool of a control region in the name of one member. Cheap to clone; thread-safe. No call waits
/// longer than another member's few instructions under a bucket lock; should that member be stopped
/// right there, the call gives up after a tenth of a second, with `Full` or `NoSlot`.
#[derive(Clone)]
pub struct Pool {
    pub(crate) member: Arc<MemberInner>,
    pub(crate) id: PoolId,
}

/// How linking a slot under its new key went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Linked {
    Done,
    /// The key is resident by now.
    Raced,
    /// The bucket is in the hands of a member that was stopped.
    Busy,
}

#[derive(Clone, Copy)]
struct Hit {
    slot: u32,
    generation: u64,
}

enum Insertion {
    Done(Acquired),
    Raced,
    Full,
}

impl Pool {
    pub(crate) fn new(member: &Arc<MemberInner>, id: PoolId) -> Result<Self, CtrlError> {
        let pools = member.control.geometry().pools.len();
        if usize::from(id.0) >= pools {
            return Err(CtrlError::Invalid(format!(
                "there is no pool {}, the cache has {pools}",
                id.0
            )));
        }
        Ok(Self { member: member.clone(), id })
    }

    /// Index of this pool.
    #[must_use]
    pub fn id(&self) -> PoolId {
        self.id
    }

    /// Slots of this pool, regular and reserved.
    #[must_use]
    pub fn slots(&self) -> u32 {
        self.geometry().map_or(0, crate::PoolGeometry::total)
    }

    /// Shards of one block in this pool.
    #[must_use]
    pub fn shards_per_block(&self) -> u32 {
        self.geometry().map_or(0, |g| g.shards_per_block)
    }

    /// Bytes of one shard in this pool.
    #[must_use]
    pub fn shard_bytes(&self) -> u64 {
        self.geometry().map_or(0, |g| g.shard_bytes)
    }

    fn geometry(&self) -> Option<&crate::PoolGeometry> {
        self.member.control.geometry().pools.get(usize::from(self.id.0))
    }

    /// Pins the key if it is resident, or claims a slot for it. Never blocks.
    ///
    /// # Errors
    /// `Invalid` for a shard outside `0..shards_per_block`; `Fenced` when this member may not use
    /// the cache any more.
    #[inline]
    pub fn acquire(&self, key: &Key) -> Result<Acquired, CtrlError> {
        match self.hit(key) {
            Some(hit) => Ok(Acquired::Hit(Pin::new(Handle::new(self, hit.slot, hit.generation)))),
            None => self.acquire_slowly(key),
        }
    }

    /// Pins the key if it is ready and nothing stands in the way. Apart from [`enter`](Self::enter),
    /// so that the answer fits into registers.
    fn hit(&self, key: &Key) -> Option<Hit> {
        let record = self.member.joined_record()?;
        let tables = self.tables().ok().filter(|tables| key.shard < tables.shards_per_block)?;
        let raw = self.raw(key);
        let (index, slot, word) = tables.find(&raw)?;
        if word.phase() != Phase::Ready {
            return None;
        }
        // Read together with the slot, not after the pin's locked instruction.
        let marked = tables.is_marked(index);
        self.member.pin(self.id.0, index, &slot.pins);
        let word = slot.load();
        if word.phase() != Phase::Ready || !slot.holds(&raw) {
            self.unpin(tables, index, slot);
            return None;
        }
        self.count_hit(record, tables, index, marked);
        Some(Hit { slot: index, generation: word.generation() })
    }

    fn count_hit(&self, record: &MemberRecord, tables: &PoolTables, index: u32, marked: bool) {
        if !marked {
            tables.mark(index);
        }
        failpoint!("hit.mark.after");
        self.member.count_hit(record);
    }

    fn acquire_slowly(&self, key: &Key) -> Result<Acquired, CtrlError> {
        let tables = self.enter_tables(key)?;
        let raw = self.raw(key);
        let mut backoff = Backoff::default();
        loop {
            if let Some((index, slot, _)) = tables.find(&raw) {
                if let Some(acquired) = self.enter(tables, index, slot, &raw, true) {
                    return Ok(acquired);
                }
            } else {
                match self.insert(tables, &raw) {
                    Insertion::Done(acquired) => return Ok(acquired),
                    Insertion::Full if tables.find(&raw).is_none() => break,
                    Insertion::Full | Insertion::Raced => {}
                }
            }
            // An evictor stopped in mid-claim must not stop us: the cache can be bypassed.
            if backoff.is_in_vain() {
                break;
            }
        }
        self.member.count(|c| &c.fulls, 1);
        Ok(Acquired::Full)
    }

    /// Pins the key if it is ready or being filled; claims nothing. `None` when a load would be
    /// needed.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire).
    pub fn acquire_resident(&self, key: &Key) -> Result<Option<Acquired>, CtrlError> {
        let tables = self.enter_tables(key)?;
        let raw = self.raw(key);
        let mut backoff = Backoff::default();
        while let Some((index, slot, word)) = tables.find(&raw) {
            if matches!(word.phase(), Phase::Idle | Phase::Failed) {
                return Ok(None);
            }
            match self.enter(tables, index, slot, &raw, false) {
                Some(Acquired::Full) => return Ok(None),
                Some(acquired) => return Ok(Some(acquired)),
                None if backoff.is_in_vain() => break,
                None => {}
            }
        }
        Ok(None)
    }

    /// Pins a candidate and judges it. `None`: it was not what it seemed, look again. Without
    /// `claim`, a slot that nobody fills is answered with `Full` ("nothing to be had").
    pub(crate) fn enter(
        &self,
        tables: &PoolTables,
        index: u32,
        slot: &Slot,
        key: &RawKey,
        claim: bool,
    ) -> Option<Acquired> {
        let me = &*self.member;
        me.pin(self.id.0, index, &slot.pins);
        loop {
            let word = slot.load();
            if !word.phase().is_resident() || !slot.holds(key) {
                self.unpin(tables, index, slot);
                return None;
            }
            let handle = |word: SlotWord| Handle::new(self, index, word.generation());
            match word.phase() {
                Phase::Ready => {
                    if let Some(record) = me.record() {
                        self.count_hit(record, tables, index, false);
                    }
                    return Some(Acquired::Hit(Pin::new(handle(word))));
                }
                Phase::Filling => {
                    me.count(|c| &c.waiters, 1);
                    return Some(Acquired::Waiter(Waiter::new(handle(word))));
                }
                _ if !claim => {
                    self.unpin(tables, index, slot);
                    return Some(Acquired::Full);
                }
                _ => {
                    failpoint!("takeover.word.before");
                    let mine = word.next_generation().to(Phase::Filling, Some(me.index));
                    if slot.change(word, mine) {
                        failpoint!("takeover.word.after");
                        slot.since_ms.store(monotonic_ms(), Ordering::Relaxed);
                        tables.mark(index);
                        me.count(|c| &c.owners, 1);
                        failpoint!("takeover.mark.after");
                        me.count(|c| &c.takeovers, 1);
                        return Some(Acquired::Owner(Fill::new(handle(mine))));
                    }
                }
            }
        }
    }

    fn insert(&self, tables: &PoolTables, key: &RawKey) -> Insertion {
        let me = &*self.member;
        let Some(index) = tables.obtain(me, self.hasher()) else { return Insertion::Full };
        let Some(slot) = tables.slot(index) else { return Insertion::Full };
        failpoint!("insert.slot.after");
        me.pin(self.id.0, index, &slot.pins);
        failpoint!("insert.pin.after");
        slot.set_key(key);
        failpoint!("insert.key.after");
        let detached = slot.load();
        let filling = detached.fresh().to(Phase::Filling, Some(me.index));
        let linked = self.link(tables, index, slot, key, [detached, filling]);
        failpoint!("insert.link.after");
        if linked != Linked::Done {
            self.unpin(tables, index, slot);
            tables.release(me, index);
            return if linked == Linked::Busy { Insertion::Full } else { Insertion::Raced };
        }
        me.count(|c| &c.owners, 1);
        Insertion::Done(Acquired::Owner(Fill::new(Handle::new(self, index, filling.generation()))))
    }

    /// Links a detached slot under its new key, changing its word.
    pub(crate) fn link(
        &self,
        tables: &PoolTables,
        index: u32,
        slot: &Slot,
        key: &RawKey,
        [from, to]: [SlotWord; 2],
    ) -> Linked {
        let Some(bucket) = tables.lock(&self.member, key.hashed, Patience::Enough) else {
            return Linked::Busy;
        };
        failpoint!("link.lock.after");
        if let Found::Resident = bucket.look(key) {
            return Linked::Raced;
        }
        slot.since_ms.store(monotonic_ms(), Ordering::Relaxed);
        tables.mark(index);
        failpoint!("link.mark.after");
        // The entry first: a detached slot counts as absent whether or not an entry leads to it, so
        // that a death in between leaves a slot with an owner on record.
        bucket.insert(key, index);
        failpoint!("link.entry.after");
        if !slot.change(from, to) {
            bucket.remove(index);
            return Linked::Raced;
        }
        failpoint!("link.word.after");
        // Idle slots are evictable; searches that ran meanwhile found this one taken.
        tables.not_full();
        Linked::Done
    }

    /// Reserves an idle slot for a key that will probably be asked for next: linked, unpinned,
    /// accessed bit set. Never evicts anything pinned or accessed.
    ///
    /// # Errors
    /// `Fenced` when this member may not use the cache any more.
    pub fn prealloc(&self, key: &Key) -> Result<Prealloc, CtrlError> {
        self.member.check()?;
        if key.shard >= self.shards_per_block() {
            return Ok(Prealloc::NoSuchShard);
        }
        let tables = self.tables()?;
        let raw = self.raw(key);
        let me = &*self.member;
        if tables.find(&raw).is_some() {
            return Ok(Prealloc::Resident);
        }
        let Some((index, reserved)) = tables.obtain_idle(me, self.hasher()) else {
            me.count(|c| &c.prealloc_nothing, 1);
            return Ok(Prealloc::NoSlot);
        };
        let Some(slot) = tables.slot(index) else { return Ok(Prealloc::NoSlot) };
        failpoint!("prealloc.slot.after");
        slot.set_key(&raw);
        failpoint!("prealloc.key.after");
        let detached = slot.load();
        let idle = detached.fresh().to(Phase::Idle, None);
        let linked = self.link(tables, index, slot, &raw, [detached, idle]);
        if linked != Linked::Done {
            tables.release(me, index);
            let busy = linked == Linked::Busy;
            return Ok(if busy { Prealloc::NoSlot } else { Prealloc::Resident });
        }
        failpoint!("prealloc.link.after");
        me.count(|c| &c.preallocs, 1);
        me.count(|c| &c.prealloc_reserved, u64::from(reserved));
        Ok(if reserved { Prealloc::MadeReserved } else { Prealloc::Made })
    }

    /// Renews all resident shards of these blocks; returns how many. Unknown blocks are ignored.
    ///
    /// # Errors
    /// `Fenced`.
    pub fn touch(&self, blocks: &[BlockId]) -> Result<usize, CtrlError> {
        self.member.check()?;
        let tables = self.tables()?;
        let hasher = self.hasher();
        let mut touched = 0;
        for block in blocks {
            let (lo, hi) = block.halves();
            let hash = hasher.block(lo, hi);
            for shard in 0..tables.shards_per_block {
                let raw = RawKey { lo, hi, shard, hashed: Hasher::shard(hash, shard) };
                if let Some((index, ..)) = tables.find(&raw) {
                    tables.mark(index);
                    touched += 1;
                }
            }
        }
        self.member.count(|c| &c.touched, touched as u64);
        Ok(touched)
    }

    /// Takes a key out of the cache, if nobody uses it.
    ///
    /// # Errors
    /// `Fenced`.
    pub fn remove(&self, key: &Key) -> Result<Removal, CtrlError> {
        self.member.check()?;
        let tables = self.tables()?;
        let raw = self.raw(key);
        let mut backoff = Backoff::default();
        while let Some((index, slot, word)) = tables.find(&raw) {
            if word.phase() == Phase::Filling || !slot.unpinned() {
                return Ok(Removal::InUse);
            }
            // The key cannot have changed if the claim succeeds on the very word seen with it.
            if word.phase().is_evictable()
                && tables.evict(&self.member, self.hasher(), index, word, || true)
            {
                failpoint!("remove.evict.after");
                tables.release(&self.member, index);
                return Ok(Removal::Removed);
            }
            if backoff.is_in_vain() {
                return Ok(Removal::InUse);
            }
        }
        Ok(Removal::Absent)
    }

    pub(crate) fn tables(&self) -> Result<&PoolTables, CtrlError> {
        self.member
            .control
            .region
            .pool(usize::from(self.id.0))
            .ok_or_else(|| CtrlError::Invalid(format!("there is no pool {}", self.id.0)))
    }

    fn enter_tables(&self, key: &Key) -> Result<&PoolTables, CtrlError> {
        self.member.check()?;
        let tables = self.tables()?;
        if key.shard >= tables.shards_per_block {
            return Err(CtrlError::Invalid(format!(
                "shard {} of a block with {} shards",
                key.shard, tables.shards_per_block
            )));
        }
        Ok(tables)
    }

    fn hasher(&self) -> Hasher {
        self.member.control.region.hasher()
    }

    pub(crate) fn raw(&self, key: &Key) -> RawKey {
        let (lo, hi) = key.block.halves();
        let hashed = Hasher::shard(self.hasher().block(lo, hi), key.shard);
        RawKey { lo, hi, shard: key.shard, hashed }
    }

    fn unpin(&self, tables: &PoolTables, index: u32, slot: &Slot) {
        if self.member.unpin(self.id.0, index, &slot.pins) {
            tables.not_full();
        }
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("id", &self.id)
            .field("member", &self.member.index)
            .finish_non_exhaustive()
    }
}
