//! Single flight: which bytes of which objects are on their way to this node, and who waits for them.
//!
//! One table serves all ranks of a node. A request for bytes that are there is served at once, for
//! bytes on their way it waits, and only what is left is fetched: each byte crosses the wire once,
//! however many ranks ask in whatever pieces.
//!
//! **Invariant:** no byte of an object is in flight twice; a reader is told exactly once for each time
//! it asks, when all its bytes are there or one of its fetches has failed; an object is forgotten only
//! when nothing of it is in flight and nobody waits.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    hash::Hash,
};

use super::ExtentSet;
use crate::{ByteRange, Generation, RangeError, check_ranges};

/// Names one waiting request, chosen by the caller, never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ReaderId(pub u64);

/// Names one fetch; never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FetchId(pub u64);

/// Bytes to bring; whoever is handed this must report its end with [`Flights::landed`] or
/// [`Flights::failed`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fetch {
    /// Its name.
    pub id: FetchId,
    /// The part of the object.
    pub range: ByteRange,
}

/// What a request needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Asked {
    /// All its bytes are there: it does not wait.
    pub ready: bool,
    /// What nobody has fetched yet: the caller's work now.
    pub fetches: Vec<Fetch>,
    /// Background fetches that somebody waits for now.
    pub promoted: Vec<FetchId>,
    /// Bytes that were there.
    pub present_bytes: u64,
    /// Bytes that somebody else is fetching.
    pub joined_bytes: u64,
}

/// How a request was received.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Ask {
    /// See [`Asked`].
    Admitted(Asked),
    /// The ranges make no sense; nothing was changed.
    Invalid(RangeError),
    /// The object has another length here: one of the two is not what it says. Nothing was changed.
    Length(u64),
    /// The table has as many objects as it may have. Nothing was changed.
    Busy,
}

/// What the end of a fetch means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended<K> {
    /// Of which object.
    pub key: K,
    /// Of which storing of it.
    pub generation: Generation,
    /// Which bytes.
    pub range: ByteRange,
    /// Readers to be told: all their bytes are there, or (after a failure) they have to
    /// [`ask`](Flights::ask) again or give up.
    pub readers: Vec<ReaderId>,
    /// Every byte of the object is there: it can be committed.
    pub complete: bool,
}

#[derive(Debug, Default)]
struct Object {
    len: u64,
    present: ExtentSet,
    /// What is on its way, by first byte; disjoint.
    flying: BTreeMap<u64, Flying>,
    /// What each reader still waits for.
    readers: HashMap<ReaderId, ExtentSet>,
}

#[derive(Clone, Copy, Debug)]
struct Flying {
    fetch: Fetch,
    background: bool,
}

/// See the module description. `K` names objects.
#[derive(Debug)]
pub struct Flights<K> {
    objects: HashMap<(K, Generation), Object>,
    /// Object and first byte of each fetch.
    fetches: HashMap<FetchId, ((K, Generation), u64)>,
    readers: HashMap<ReaderId, (K, Generation)>,
    next: u64,
    limit: usize,
    piece: u64,
}

impl<K: Clone + Eq + Hash> Flights<K> {
    /// For at most `limit` objects at a time; fetches have at most `piece` bytes each (at least 1), so
    /// that readers can begin before a large object is whole.
    #[must_use]
    pub fn new(limit: usize, piece: u64) -> Self {
        Self {
            objects: HashMap::new(),
            fetches: HashMap::new(),
            readers: HashMap::new(),
            next: 0,
            limit,
            piece: piece.max(1),
        }
    }

    /// Asks for ranges of an object of `len` bytes. A reader that was told of a failure asks again for
    /// what it wants; what it asked for before is forgotten.
    pub fn ask(
        &mut self,
        key: &K,
        generation: Generation,
        len: u64,
        reader: ReaderId,
        ranges: &[ByteRange],
    ) -> Ask {
        if let Err(error) = check_ranges(ranges, len) {
            return Ask::Invalid(error);
        }
        let name = (key.clone(), generation);
        match self.objects.get(&name) {
            Some(object) if object.len != len => return Ask::Length(object.len),
            None if self.objects.len() >= self.limit => return Ask::Busy,
            _ => {}
        }
        self.leave(reader);
        let mut asked = Asked::default();
        let object = self.objects.entry(name.clone()).or_insert_with(|| Object::new(len));
        let wanted: ExtentSet = ranges.iter().copied().collect();
        let mut missing = ExtentSet::default();
        for range in wanted.iter() {
            missing.extend(object.present.missing(range));
        }
        asked.present_bytes = wanted.bytes() - missing.bytes();
        let mut open = missing.clone();
        for flying in object.flying.values_mut() {
            let joined: Vec<ByteRange> = missing.present(flying.fetch.range).collect();
            if !joined.is_empty() && std::mem::take(&mut flying.background) {
                asked.promoted.push(flying.fetch.id);
            }
            joined.into_iter().for_each(|range| open.remove(range));
        }
        asked.joined_bytes = missing.bytes() - open.bytes();
        asked.ready = missing.is_empty();
        if !asked.ready {
            object.readers.insert(reader, missing);
            self.readers.insert(reader, name.clone());
        }
        asked.fetches = self.launch(&name, &open, false);
        Ask::Admitted(asked)
    }

    /// Background fetches for what nobody has asked for of an object in the table, at most `budget`
    /// bytes.
    pub fn fill_holes(&mut self, key: &K, generation: Generation, budget: u64) -> Vec<Fetch> {
        let name = (key.clone(), generation);
        let Some(object) = self.objects.get(&name) else { return Vec::new() };
        let mut open: ExtentSet =
            object.present.missing(ByteRange { offset: 0, len: object.len }).collect();
        object.flying.values().for_each(|flying| open.remove(flying.fetch.range));
        let mut left = budget;
        let mut chosen = ExtentSet::default();
        for mut range in open.iter() {
            range.len = range.len.min(left);
            left -= range.len;
            chosen.insert(range);
        }
        self.launch(&name, &chosen, true)
    }

    fn launch(&mut self, name: &(K, Generation), open: &ExtentSet, background: bool) -> Vec<Fetch> {
        let mut fetches = Vec::new();
        let Some(object) = self.objects.get_mut(name) else { return fetches };
        for whole in open.iter() {
            let mut done = 0;
            while done < whole.len {
                let offset = whole.offset + done;
                let len = (whole.len - done).min(self.piece);
                done += len;
                self.next += 1;
                let fetch = Fetch { id: FetchId(self.next), range: ByteRange { offset, len } };
                object.flying.insert(offset, Flying { fetch, background });
                self.fetches.insert(fetch.id, (name.clone(), offset));
                fetches.push(fetch);
            }
        }
        fetches
    }

    /// The bytes of a fetch are there. `None` for a fetch that has ended already.
    pub fn landed(&mut self, fetch: FetchId) -> Option<Ended<K>> {
        self.end(fetch, |object, range| {
            object.present.insert(range);
            let mut ready = Vec::new();
            for (reader, waits) in &mut object.readers {
                waits.remove(range);
                if waits.is_empty() {
                    ready.push(*reader);
                }
            }
            ready
        })
    }

    /// The fetch has ended without bytes, and nothing can write them any more. `None` for a fetch that
    /// has ended already.
    pub fn failed(&mut self, fetch: FetchId) -> Option<Ended<K>> {
        self.end(fetch, |object, range| {
            let waits = |set: &ExtentSet| set.present(range).next().is_some();
            let told = object.readers.iter().filter(|(_, set)| waits(set));
            told.map(|(reader, _)| *reader).collect()
        })
    }

    fn end(
        &mut self,
        fetch: FetchId,
        then: impl FnOnce(&mut Object, ByteRange) -> Vec<ReaderId>,
    ) -> Option<Ended<K>> {
        let (name, offset) = self.fetches.remove(&fetch)?;
        let object = self.objects.get_mut(&name)?;
        let range = object.flying.remove(&offset)?.fetch.range;
        let mut readers = then(object, range);
        readers.sort_unstable();
        for reader in &readers {
            object.readers.remove(reader);
            self.readers.remove(reader);
        }
        let complete = object.is_complete();
        let (key, generation) = name;
        Some(Ended { key, generation, range, readers, complete })
    }

    /// A reader waits no longer (its deadline, its death). What is in flight for it goes on.
    pub fn leave(&mut self, reader: ReaderId) {
        if let Some(object) =
            self.readers.remove(&reader).and_then(|name| self.objects.get_mut(&name))
        {
            object.readers.remove(&reader);
        }
    }

    /// Takes an object out of the table, after its commit or to use its memory for something else.
    /// False while something of it is in flight or somebody waits.
    pub fn forget(&mut self, key: &K, generation: Generation) -> bool {
        let name = (key.clone(), generation);
        let idle = |object: &Object| object.flying.is_empty() && object.readers.is_empty();
        let may = self.objects.get(&name).is_none_or(idle);
        if may {
            self.objects.remove(&name);
        }
        may
    }

    /// The bytes of an object that are there; `None` when it is not in the table.
    #[must_use]
    pub fn present(&self, key: &K, generation: Generation) -> Option<&ExtentSet> {
        self.objects.get(&(key.clone(), generation)).map(|object| &object.present)
    }

    /// Objects in the table, fetches in flight, readers that wait.
    #[must_use]
    pub fn sizes(&self) -> (usize, usize, usize) {
        (self.objects.len(), self.fetches.len(), self.readers.len())
    }

    /// Objects of which nothing is in flight and for which nobody waits.
    pub fn idle(&self) -> impl Iterator<Item = &(K, Generation)> {
        let busy: HashSet<&(K, Generation)> = self.readers.values().collect();
        self.objects
            .iter()
            .filter(move |(name, object)| object.flying.is_empty() && !busy.contains(name))
            .map(|(name, _)| name)
    }
}

impl Object {
    fn new(len: u64) -> Self {
        Self { len, ..Self::default() }
    }

    fn is_complete(&self) -> bool {
        self.present.bytes() == self.len
    }
}
