//! What the index says: where packed objects lie, in order of their keys.
//!
//! **Invariant:** entries take effect in the order in which they stand in the file; an object of a
//! segment that was dropped is absent; the same entries give the same answers in every process.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::entry::{Entry, Kind};

pub(super) type Key = ([u8; 16], u32);

/// Where an object lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// Number of the segment in [`Index::segment`].
    pub(super) segment: u32,
    pub(super) place: u32,
    pub(super) payload_bytes: u32,
}

/// The index in memory: 32 bytes an object, and the tree around them.
#[derive(Debug, Default)]
pub(super) struct Index {
    objects: BTreeMap<Key, Place>,
    /// Segments ever heard of, by number; ids of dropped ones stay.
    segments: Vec<u64>,
    numbers: HashMap<u64, u32>,
    dropped: HashSet<u32>,
    /// Entries that say what still holds, at most as many as objects and segments.
    pub(super) entries: u64,
}

impl Index {
    /// All entries of a file, at once: sorted first, so that the tree is built from left to right.
    pub(super) fn build(entries: impl IntoIterator<Item = Entry>) -> Self {
        let mut index = Self::default();
        let mut changes: Vec<(Key, Option<Place>)> = Vec::new();
        for entry in entries {
            index.entries += 1;
            let key = (entry.block, entry.shard);
            match entry.kind {
                Kind::Put => {
                    let place = index.place(&entry);
                    changes.push((key, place));
                }
                Kind::Remove => changes.push((key, None)),
                Kind::Drop => {
                    let number = index.number(entry.segment);
                    index.dropped.extend(number);
                }
                Kind::Record => {}
            }
        }
        // Stable: of a key's changes the last stays last, and of equal keys the last is taken.
        changes.sort_by_key(|(key, _)| *key);
        changes.reverse();
        changes.dedup_by_key(|(key, _)| *key);
        changes.reverse();
        let dropped = &index.dropped;
        index.objects = changes
            .into_iter()
            .filter_map(|(key, place)| Some((key, place?)))
            .filter(|(_, place)| !dropped.contains(&place.segment))
            .collect();
        index
    }

    /// One more entry.
    pub(super) fn apply(&mut self, entry: &Entry) {
        self.entries += 1;
        let key = (entry.block, entry.shard);
        match entry.kind {
            Kind::Put => {
                if let Some(place) = self.place(entry)
                    && !self.dropped.contains(&place.segment)
                {
                    self.objects.insert(key, place);
                } else {
                    self.objects.remove(&key);
                }
            }
            Kind::Remove => {
                self.objects.remove(&key);
            }
            Kind::Drop => self.drop_segment(entry.segment),
            Kind::Record => {}
        }
    }

    /// Forgets a segment's objects.
    pub(super) fn drop_segment(&mut self, id: u64) {
        if let Some(number) = self.number(id)
            && self.dropped.insert(number)
        {
            self.objects.retain(|_, place| place.segment != number);
        }
    }

    pub(super) fn remove(&mut self, key: &Key) {
        self.objects.remove(key);
    }

    pub(super) fn place_of(&self, key: &Key) -> Option<Place> {
        self.objects.get(key).copied()
    }

    pub(super) fn segment(&self, number: u32) -> Option<u64> {
        self.segments.get(number as usize).copied()
    }

    /// Segments with shards of this block.
    pub(super) fn segments_of(&self, block: &[u8; 16]) -> HashSet<u64> {
        let shards = self.objects.range((*block, 0)..=(*block, u32::MAX));
        shards.filter_map(|(_, place)| self.segment(place.segment)).collect()
    }

    /// Segments in which something lies.
    pub(super) fn live_segments(&self) -> HashSet<u64> {
        let numbers: HashSet<u32> = self.objects.values().map(|place| place.segment).collect();
        numbers.into_iter().filter_map(|number| self.segment(number)).collect()
    }

    pub(super) fn objects(&self) -> impl Iterator<Item = (&Key, &Place)> {
        self.objects.iter()
    }

    pub(super) fn len(&self) -> usize {
        self.objects.len()
    }

    fn place(&mut self, entry: &Entry) -> Option<Place> {
        let segment = self.number(entry.segment)?;
        Some(Place { segment, place: entry.place, payload_bytes: entry.payload_bytes })
    }

    fn number(&mut self, id: u64) -> Option<u32> {
        if let Some(number) = self.numbers.get(&id) {
            return Some(*number);
        }
        let number = u32::try_from(self.segments.len()).ok()?;
        self.segments.push(id);
        self.numbers.insert(id, number);
        Some(number)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn entry(kind: Kind, key: u8, segment: u64, place: u32) -> Entry {
        let block = [key % 7; 16];
        let shard = u32::from(key / 7 % 3);
        let (payload_bytes, generation, payload_hash) = (place * 3 + 1, 0, 0);
        Entry { kind, block, shard, segment, place, payload_bytes, generation, payload_hash }
    }

    fn seen(index: &Index) -> Vec<(Key, u64, u32)> {
        let objects = index.objects();
        objects.map(|(k, p)| (*k, index.segment(p.segment).unwrap(), p.place)).collect()
    }

    proptest! {
        /// All at once, one by one, and in two parts: the same, and what a plain model says.
        ///
        /// Broken on purpose: the first of equal keys is taken; a dropped segment's objects stay; an
        /// object is put into a dropped segment.
        #[test]
        fn entries_mean_the_same_however_they_are_read(
            steps in prop::collection::vec((0u8..12, any::<u8>(), 0u64..5, 0u32..9), 0..120),
            cut in 0usize..120,
        ) {
            let entries: Vec<Entry> = steps.into_iter().map(|(kind, key, segment, place)| {
                let kind = match kind { 0 => Kind::Drop, 1..=3 => Kind::Remove, _ => Kind::Put };
                entry(kind, key, segment, place)
            }).collect();
            let mut model: BTreeMap<Key, (u64, u32)> = BTreeMap::new();
            let mut dropped = HashSet::new();
            for e in &entries {
                let key = (e.block, e.shard);
                match e.kind {
                    Kind::Put => { model.insert(key, (e.segment, e.place)); }
                    Kind::Remove => { model.remove(&key); }
                    Kind::Drop => { dropped.insert(e.segment); }
                    Kind::Record => {}
                }
                model.retain(|_, (segment, _)| !dropped.contains(segment));
            }
            let model: Vec<_> = model.into_iter().map(|(k, (s, p))| (k, s, p)).collect();
            let (first, second) = entries.split_at(cut.min(entries.len()));
            let mut parts = Index::build(first.iter().copied());
            second.iter().for_each(|e| parts.apply(e));
            prop_assert_eq!(&seen(&parts), &model);
            let mut single = Index::default();
            entries.iter().for_each(|e| single.apply(e));
            prop_assert_eq!(&seen(&single), &model);
            // A dropped segment is dropped for good, so only entries before the drop differ.
            let all = seen(&Index::build(entries.iter().copied()));
            prop_assert_eq!(&all, &model);
        }
    }
}
