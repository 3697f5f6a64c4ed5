//! One part of the records, under one lock.
//!
//! A record lies in a slab; the records of a key form a chain, those of a run of a peer a ring through
//! the slab. The table holds slab numbers only and compares keys there: about 110 bytes a record.
//!
//! **Invariant:** each live slab entry is in exactly one chain and exactly one list; free entries are in
//! neither.

use std::hash::BuildHasher;

use hashbrown::{DefaultHashBuilder, HashTable};

use crate::{Generation, ObjectKey, Tier};

/// No entry.
const NONE: u32 = u32::MAX;

/// A run of a peer, by the number that the directory gave it; never used twice.
pub(super) type Run = u32;

#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    key: ObjectKey,
    pub(super) generation: Generation,
    pub(super) len: u64,
    pub(super) run: Run,
    pub(super) tier: Tier,
    /// Next record of the key.
    chain: u32,
    /// Neighbours among the run's records.
    before: u32,
    after: u32,
}

#[derive(Debug, Default)]
pub(super) struct Shard {
    hasher: DefaultHashBuilder,
    /// First record of each key.
    heads: HashTable<u32>,
    slab: Vec<Entry>,
    free: Vec<u32>,
    /// First record of each run.
    runs: hashbrown::HashMap<Run, u32>,
}

impl Shard {
    fn hash(&self, key: &ObjectKey) -> u64 {
        self.hasher.hash_one(key)
    }

    fn get(&self, index: u32) -> Option<&Entry> {
        self.slab.get(index as usize)
    }

    fn get_mut(&mut self, index: u32) -> Option<&mut Entry> {
        self.slab.get_mut(index as usize)
    }

    fn head(&self, key: &ObjectKey) -> u32 {
        let is_it = |index: &u32| self.get(*index).is_some_and(|entry| entry.key == *key);
        self.heads.find(self.hash(key), is_it).copied().unwrap_or(NONE)
    }

    /// Records of a key.
    pub(super) fn records(&self, key: &ObjectKey) -> impl Iterator<Item = &Entry> {
        let mut at = self.head(key);
        std::iter::from_fn(move || {
            let entry = self.get(at)?;
            at = entry.chain;
            Some(entry)
        })
    }

    fn find(&self, key: &ObjectKey, run: Run) -> Option<u32> {
        let mut at = self.head(key);
        while let Some(entry) = self.get(at) {
            if entry.run == run {
                return Some(at);
            }
            at = entry.chain;
        }
        None
    }

    pub(super) fn records_count(&self) -> usize {
        self.slab.len() - self.free.len()
    }

    /// Bytes of the tables, as allocated.
    pub(super) fn bytes(&self) -> usize {
        self.slab.capacity() * size_of::<Entry>()
            + self.free.capacity() * size_of::<u32>()
            + self.heads.allocation_size()
            + self.runs.allocation_size()
    }

    /// Adds a record, or replaces an older generation of the same run. False when there is no room.
    pub(super) fn announce(
        &mut self,
        key: &ObjectKey,
        run: Run,
        (generation, len, tier): (Generation, u64, Tier),
        room: usize,
    ) -> bool {
        if let Some(entry) = self.find(key, run).and_then(|index| self.get_mut(index)) {
            if entry.generation < generation {
                (entry.generation, entry.len, entry.tier) = (generation, len, tier);
            }
            return true;
        }
        if self.records_count() >= room {
            return false;
        }
        let chain = self.head(key);
        let after = self.runs.get(&run).copied().unwrap_or(NONE);
        let entry = Entry { key: *key, generation, len, run, tier, chain, before: NONE, after };
        let index = match self.free.pop() {
            Some(index) => index,
            None => {
                let Ok(index) = u32::try_from(self.slab.len()) else { return false };
                if index == NONE {
                    return false;
                }
                self.slab.push(entry);
                index
            }
        };
        if let Some(place) = self.get_mut(index) {
            *place = entry;
        }
        if let Some(next) = self.get_mut(after) {
            next.before = index;
        }
        self.runs.insert(run, index);
        self.set_head(key, chain, index);
        true
    }

    /// Puts `new` where the table says `old`; `NONE` is no entry.
    fn set_head(&mut self, key: &ObjectKey, old: u32, new: u32) {
        let hash = self.hash(key);
        let Self { heads, slab, hasher, .. } = self;
        match heads.find_entry(hash, |index| *index == old) {
            Ok(mut found) if new != NONE => *found.get_mut() = new,
            Ok(found) => drop(found.remove()),
            Err(_) => {
                let rehash = |index: &u32| {
                    slab.get(*index as usize).map_or(0, |entry| hasher.hash_one(entry.key))
                };
                heads.insert_unique(hash, new, rehash);
            }
        }
    }

    /// Takes out the record of exactly this run and generation.
    pub(super) fn withdraw(&mut self, key: &ObjectKey, run: Run, generation: Generation) -> bool {
        let found = self
            .find(key, run)
            .filter(|index| self.get(*index).is_some_and(|entry| entry.generation == generation));
        found.is_some_and(|index| {
            self.remove(index);
            true
        })
    }

    /// Takes out at most `most` records of a run; true when none is left.
    pub(super) fn clear(&mut self, run: Run, most: usize) -> bool {
        for _ in 0..most {
            let Some(index) = self.runs.get(&run).copied() else { return true };
            self.remove(index);
        }
        !self.runs.contains_key(&run)
    }

    fn remove(&mut self, index: u32) {
        let Some(entry) = self.get(index).copied() else { return };
        self.unchain(index, &entry);
        match self.get_mut(entry.before) {
            Some(before) => before.after = entry.after,
            None if entry.after == NONE => drop(self.runs.remove(&entry.run)),
            None => drop(self.runs.insert(entry.run, entry.after)),
        }
        if let Some(after) = self.get_mut(entry.after) {
            after.before = entry.before;
        }
        self.free.push(index);
    }

    fn unchain(&mut self, index: u32, entry: &Entry) {
        let head = self.head(&entry.key);
        if head == index {
            return self.set_head(&entry.key, index, entry.chain);
        }
        let mut at = head;
        while let Some(before) = self.get_mut(at) {
            if before.chain == index {
                before.chain = entry.chain;
                return;
            }
            at = before.chain;
        }
    }
}
