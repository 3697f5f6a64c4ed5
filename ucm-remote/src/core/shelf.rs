//! What lies where in a medium: pending and committed objects, leases, eviction.
//!
//! **Invariant:** a page belongs to exactly one of: the free pages, a pending object, a committed
//! object, an object that left its key but not its last lease, or an aborted object whose writer may
//! still write it. Nothing moves a page on because time has passed, but the end of a lease, which its
//! holder was told beforehand.

use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    time::Instant,
};

use super::{ExtentSet, FreePages};
use crate::{ByteRange, Generation, MediumUsage, ObjectKey, Pending, PutOutcome, RemoveOutcome};

/// Bounds of a [`Shelf`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShelfLimits {
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Pages.
    pub pages: u32,
    /// Pending objects at a time.
    pub pending: usize,
    /// Leases at a time.
    pub leases: usize,
    /// Eviction begins when fewer pages than this are free (`high`), and goes on until this many are
    /// (`low`): `(high, low)`. `(0, 0)` evicts only for an allocation that needs it.
    pub watermarks: (u32, u32),
}

/// Something the owner has to announce.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// An object became readable, with its length.
    Stored(ObjectKey, Generation, u64),
    /// An object cannot be found any more.
    Gone(ObjectKey, Generation, u64),
}

/// A committed object under a new lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leased {
    /// Names the lease.
    pub lease: u64,
    /// Which storing of the key.
    pub generation: Generation,
    /// Its length in bytes.
    pub len: u64,
    /// Its pages.
    pub pages: Box<[u32]>,
}

#[derive(Debug)]
struct Writing {
    key: ObjectKey,
    len: u64,
    pages: Box<[u32]>,
    written: ExtentSet,
}

#[derive(Debug)]
struct Object {
    key: ObjectKey,
    len: u64,
    pages: Box<[u32]>,
    leases: u32,
    /// Used since the hand last passed.
    used: bool,
    /// Left its key; its pages go with its last lease.
    gone: bool,
}

/// See the module description. Not thread-safe by itself; the clock comes in with each call.
#[derive(Debug)]
pub struct Shelf {
    limits: ShelfLimits,
    free: FreePages,
    /// By generation: unique within a medium, so it names an object and an allocation alike.
    objects: HashMap<u64, Object>,
    writing: HashMap<u64, Writing>,
    /// Aborted; somebody may still write the pages.
    zombies: HashMap<u64, Box<[u32]>>,
    keys: HashMap<ObjectKey, u64>,
    writing_keys: HashMap<ObjectKey, u64>,
    /// Order of eviction: second chance, oldest first. May name objects that are gone.
    order: VecDeque<u64>,
    leases: HashMap<u64, (u64, Instant)>,
    ends: BTreeSet<(Instant, u64)>,
    changes: Vec<Change>,
    next: u64,
    evictions: u64,
    /// Pages of committed objects, of pending ones, and of those that wait for somebody.
    committed: usize,
    pending: usize,
    waiting: usize,
}

impl Shelf {
    /// An empty one.
    #[must_use]
    pub fn new(limits: ShelfLimits) -> Self {
        Self {
            free: FreePages::new(if limits.page_bytes == 0 { 0 } else { limits.pages }),
            limits,
            objects: HashMap::new(),
            writing: HashMap::new(),
            zombies: HashMap::new(),
            keys: HashMap::new(),
            writing_keys: HashMap::new(),
            order: VecDeque::new(),
            leases: HashMap::new(),
            ends: BTreeSet::new(),
            changes: Vec::new(),
            next: 0,
            evictions: 0,
            committed: 0,
            pending: 0,
            waiting: 0,
        }
    }

    /// Takes pages for an object, evicting unleased ones if need be.
    ///
    /// # Errors
    /// `Invalid` (no bytes), `TooLarge`, `AlreadyExists`, `Conflict`, `Busy` (somebody writes the key,
    /// or too much is pending), `NoSpace`. Nothing was allocated.
    pub fn allocate(
        &mut self,
        key: &ObjectKey,
        len: u64,
        now: Instant,
    ) -> Result<(Pending, Box<[u32]>), PutOutcome> {
        self.expire(now);
        let capacity = u64::from(self.free.pages());
        let count = if self.limits.page_bytes == 0 {
            capacity
        } else {
            len.div_ceil(self.limits.page_bytes)
        };
        match self.keys.get(key).and_then(|id| self.objects.get(id)) {
            Some(object) if object.len == len => return Err(PutOutcome::AlreadyExists),
            Some(_) => return Err(PutOutcome::Conflict),
            None if len == 0 => return Err(PutOutcome::Invalid),
            None if count > capacity || capacity == 0 => return Err(PutOutcome::TooLarge),
            None => {}
        }
        if self.writing_keys.contains_key(key) || self.writing.len() >= self.limits.pending {
            return Err(PutOutcome::Busy);
        }
        let count = u32::try_from(count).map_err(|_| PutOutcome::TooLarge)?;
        self.make_room(count);
        let pages = self.free.take(count).ok_or(PutOutcome::NoSpace)?;
        self.next += 1;
        let id = self.next;
        let writing =
            Writing { key: *key, len, pages: pages.clone(), written: ExtentSet::default() };
        self.pending += pages.len();
        self.writing.insert(id, writing);
        self.writing_keys.insert(*key, id);
        let (high, low) = self.limits.watermarks;
        if self.free.free() < high {
            self.make_room(low);
        }
        Ok((Pending { id, generation: Generation(id) }, pages))
    }

    /// A part of a pending object was written. False, without effect, for an unknown object, a part
    /// outside it, or one that overlaps an earlier part.
    pub fn written(&mut self, pending: Pending, range: ByteRange) -> bool {
        let Some(writing) = self.writing.get_mut(&pending.id) else { return false };
        let inside = range.len > 0 && range.end().is_some_and(|end| end <= writing.len);
        let good = inside && writing.written.present(range).next().is_none();
        if good {
            writing.written.insert(range);
        }
        good
    }

    /// Makes a pending object readable once all of its bytes were written; `Invalid`, and still pending,
    /// before. `Stale` for an unknown one.
    pub fn commit(&mut self, pending: Pending) -> PutOutcome {
        match self.writing.get(&pending.id) {
            None => return PutOutcome::Stale,
            Some(writing) if writing.written.bytes() != writing.len => return PutOutcome::Invalid,
            Some(_) => {}
        }
        let Some(writing) = self.take_writing(pending.id) else { return PutOutcome::Stale };
        let Writing { key, len, pages, .. } = writing;
        self.committed += pages.len();
        self.keys.insert(key, pending.id);
        self.order.push_back(pending.id);
        let object = Object { key, len, pages, leases: 0, used: false, gone: false };
        self.objects.insert(pending.id, object);
        self.changes.push(Change::Stored(key, Generation(pending.id), len));
        PutOutcome::Created
    }

    /// As [`commit`](Self::commit), with a lease on the new object from its first moment: nothing can
    /// evict it in between. The limit of leases does not count here; pending objects have one.
    ///
    /// # Errors
    /// As [`commit`](Self::commit).
    pub fn commit_leased(&mut self, pending: Pending, until: Instant) -> Result<u64, PutOutcome> {
        match self.commit(pending) {
            PutOutcome::Created => {}
            other => return Err(other),
        }
        let object = self.objects.get_mut(&pending.id).ok_or(PutOutcome::Stale)?;
        object.leases += 1;
        self.next += 1;
        self.leases.insert(self.next, (pending.id, until));
        self.ends.insert((until, self.next));
        Ok(self.next)
    }

    fn take_writing(&mut self, id: u64) -> Option<Writing> {
        let writing = self.writing.remove(&id)?;
        self.writing_keys.remove(&writing.key);
        self.pending -= writing.pages.len();
        Some(writing)
    }

    /// Gives the pages of a pending object back: at once if nothing can write them any more, else at
    /// [`write_ended`](Self::write_ended). An unknown one is ignored.
    pub fn abort(&mut self, pending: Pending, write_ended: bool) {
        if let Some(writing) = self.take_writing(pending.id) {
            if write_ended {
                self.free.give(&writing.pages);
            } else {
                self.waiting += writing.pages.len();
                self.zombies.insert(pending.id, writing.pages);
            }
        }
    }

    /// Nothing can write the pages of this aborted object any more. An unknown one is ignored.
    pub fn write_ended(&mut self, pending: Pending) {
        if let Some(pages) = self.zombies.remove(&pending.id) {
            self.waiting -= pages.len();
            self.free.give(&pages);
        }
    }

    /// Finds a committed object and protects it until `until`, or until the lease is released. `None` is
    /// a miss, or too many leases.
    pub fn lease(&mut self, key: &ObjectKey, until: Instant, now: Instant) -> Option<Leased> {
        self.expire(now);
        let id = *self.keys.get(key)?;
        if self.leases.len() >= self.limits.leases {
            return None;
        }
        let object = self.objects.get_mut(&id)?;
        object.used = true;
        object.leases = object.leases.checked_add(1)?;
        self.next += 1;
        let lease = self.next;
        self.leases.insert(lease, (id, until));
        self.ends.insert((until, lease));
        let (len, pages) = (object.len, object.pages.clone());
        Some(Leased { lease, generation: Generation(id), len, pages })
    }

    /// Gives a lease back. An unknown or expired one is ignored.
    pub fn release(&mut self, lease: u64) {
        if let Some((id, until)) = self.leases.remove(&lease) {
            self.ends.remove(&(until, lease));
            self.drop_lease(id);
        }
    }

    /// Ends all leases whose time has come. Called by what allocates or leases.
    pub fn expire(&mut self, now: Instant) {
        while let Some((until, lease)) = self.ends.first().copied()
            && until <= now
        {
            self.release(lease);
        }
    }

    fn drop_lease(&mut self, id: u64) {
        let Some(object) = self.objects.get_mut(&id) else { return };
        object.leases = object.leases.saturating_sub(1);
        if object.gone && object.leases == 0 {
            self.free_object(id);
        }
    }

    fn free_object(&mut self, id: u64) {
        if let Some(object) = self.objects.remove(&id) {
            self.waiting -= object.pages.len();
            self.free.give(&object.pages);
        }
    }

    /// Marks an object as used. False when it is not there.
    pub fn touch(&mut self, key: &ObjectKey) -> bool {
        let object = self.keys.get(key).and_then(|id| self.objects.get_mut(id));
        object.is_some_and(|object| {
            object.used = true;
            true
        })
    }

    /// Takes an object away from its key; its pages go with its last lease.
    pub fn remove(&mut self, key: &ObjectKey) -> RemoveOutcome {
        let Some(id) = self.keys.remove(key) else { return RemoveOutcome::Miss };
        self.unkeyed(id);
        RemoveOutcome::Removed
    }

    fn unkeyed(&mut self, id: u64) {
        let Some(object) = self.objects.get_mut(&id) else { return };
        object.gone = true;
        self.committed -= object.pages.len();
        self.waiting += object.pages.len();
        let (key, len, leased) = (object.key, object.len, object.leases > 0);
        self.changes.push(Change::Gone(key, Generation(id), len));
        if !leased {
            self.free_object(id);
        }
        // What eviction passes over anyway must not fill the memory.
        if self.order.len() > 64 + 2 * self.objects.len() {
            let Self { order, objects, .. } = self;
            order.retain(|id| objects.get(id).is_some_and(|object| !object.gone));
        }
    }

    /// Evicts until so many pages are free, if unleased objects have as many. Each object gets a second
    /// chance when it was used since the hand last passed it.
    fn make_room(&mut self, free: u32) {
        // Once to take the marks off, once to evict.
        let mut steps = self.order.len().saturating_mul(2);
        while self.free.free() < free && steps > 0 {
            steps -= 1;
            let Some(id) = self.order.pop_front() else { return };
            let Some(object) = self.objects.get_mut(&id).filter(|object| !object.gone) else {
                continue;
            };
            if object.leases > 0 || std::mem::take(&mut object.used) {
                self.order.push_back(id);
                continue;
            }
            let key = object.key;
            self.keys.remove(&key);
            self.evictions += 1;
            self.unkeyed(id);
        }
    }

    /// What has to be announced since the last call.
    pub fn take_changes(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.changes)
    }

    /// Committed objects with their lengths, for announcing everything again.
    pub fn objects(&self) -> impl Iterator<Item = (ObjectKey, Generation, u64)> + '_ {
        self.keys.iter().filter_map(|(key, id)| {
            self.objects.get(id).map(|object| (*key, Generation(*id), object.len))
        })
    }

    /// The object's generation and length, if it is committed.
    #[must_use]
    pub fn find(&self, key: &ObjectKey) -> Option<(Generation, u64)> {
        let id = self.keys.get(key)?;
        self.objects.get(id).map(|object| (Generation(*id), object.len))
    }

    /// Whether somebody writes an object of this key.
    #[must_use]
    pub fn is_writing(&self, key: &ObjectKey) -> bool {
        self.writing_keys.contains_key(key)
    }

    /// Committed objects that can be found.
    #[must_use]
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Whether no object can be found.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// How full it is. `quarantine_bytes` are those of aborted and of removed objects.
    #[must_use]
    pub fn usage(&self) -> MediumUsage {
        let bytes = |pages: usize| pages as u64 * self.limits.page_bytes;
        MediumUsage {
            capacity_bytes: bytes(self.free.pages() as usize),
            committed_bytes: bytes(self.committed),
            pending_bytes: bytes(self.pending),
            quarantine_bytes: bytes(self.waiting),
            leases: self.leases.len() as u64,
        }
    }

    /// Objects evicted so far.
    #[must_use]
    pub fn evictions(&self) -> u64 {
        self.evictions
    }
}
