//! The objects that are being fetched: where their bytes land, who waits for them, who reads them.
//!
//! An *assembly* is one object on its way from one storing of it (peer, run, generation) into one pending
//! object of the medium. Bytes of different storings never meet in one.
//!
//! **Invariant:** pages of an assembly are written only by fetches in flight, and given up only when
//! none is and nobody reads them; a complete one is committed together with a lease that lasts as long as
//! its readers.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::Instant,
};

use super::{bell::Bell, source::Source};
use crate::{
    ByteRange, GetOutcome, Medium as _, ObjectKey, PageList, PagedMedium, Pending, PutOutcome,
    Record, RemoveOutcome,
    core::{Ask, Fetch, FetchId, Flights, ReaderId},
    service::{LEASE, LinkError},
};

/// Failures of one assembly before it is given up.
const FAILURES: u32 = 2;

#[derive(Debug)]
pub(super) struct Table {
    medium: Arc<PagedMedium>,
    flights: Flights<u64>,
    assemblies: HashMap<u64, Assembly>,
    /// Which assembly of a key new readers join.
    current: HashMap<ObjectKey, u64>,
    readers: HashMap<ReaderId, Waiting>,
    /// Assemblies that are neither read nor waited for nor in flight, oldest first.
    idle: BTreeMap<u64, u64>,
    idle_limit: usize,
    next: u64,
    after: After,
    closed: bool,
}

#[derive(Debug)]
struct Assembly {
    key: ObjectKey,
    source: Source,
    pending: Pending,
    pages: Arc<PageList>,
    /// Readers that copy from its pages, or are told to.
    holds: usize,
    flying: usize,
    waiting: usize,
    /// It is committed, and this lease lasts until the last hold.
    lease: Option<u64>,
    /// It takes no new readers.
    doomed: bool,
    /// Its fetches share no exchange with others.
    alone: bool,
    failures: u32,
    /// How often something had to be fetched for a reader.
    launches: u32,
    /// Its place among the idle ones.
    idle: Option<u64>,
}

#[derive(Debug)]
struct Waiting {
    assembly: u64,
    bell: Arc<Bell>,
    index: usize,
}

/// What is to be done when the table is not locked any more.
#[derive(Debug, Default)]
pub(super) struct After {
    pub(super) tells: Vec<Tell>,
    /// Sources that are of no use any more.
    pub(super) sources: Vec<Source>,
    /// Bells that need not be kept.
    pub(super) bells: Vec<Arc<Bell>>,
    pub(super) committed: bool,
}

#[derive(Debug)]
pub(super) struct Tell {
    pub(super) bell: Arc<Bell>,
    pub(super) index: usize,
    pub(super) what: News,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum News {
    /// This assembly has all it asked for; a hold is counted.
    Ready(u64),
    Failed(LinkError, bool),
    Again,
}

/// A fetch that somebody has to submit.
#[derive(Clone, Debug)]
pub(super) struct Order {
    pub(super) assembly: u64,
    pub(super) fetch: Fetch,
    pub(super) pages: Arc<PageList>,
    pub(super) source: Source,
    pub(super) alone: bool,
}

/// What became of a question.
#[derive(Debug)]
pub(super) enum Found {
    /// In the medium, under a lease.
    Local { lease: u64, pages: PageList },
    /// In the medium with another length.
    OtherLength,
    /// All of it is in this assembly; a hold is counted.
    Present { assembly: u64, pages: Arc<PageList> },
    /// It waits; these have to be submitted.
    Waiting {
        reader: ReaderId,
        assembly: u64,
        pages: Arc<PageList>,
        /// Which storing.
        record: Record,
        orders: Vec<Order>,
        /// Bytes that others fetch.
        joined: u64,
        /// The rest of the object will probably be asked for.
        fill: bool,
    },
    /// Nobody fetches it.
    Absent,
    /// The table is full.
    Busy,
}

/// Who asks for what.
#[derive(Debug)]
pub(super) struct Question<'a> {
    pub(super) key: &'a ObjectKey,
    pub(super) len: u64,
    pub(super) ranges: &'a [ByteRange],
    pub(super) will_read_all: bool,
    pub(super) bell: &'a Arc<Bell>,
    pub(super) index: usize,
}

impl Table {
    pub(super) fn new(medium: Arc<PagedMedium>, objects: usize, piece: u64) -> Self {
        Self {
            medium,
            flights: Flights::new(objects, piece),
            assemblies: HashMap::new(),
            current: HashMap::new(),
            readers: HashMap::new(),
            idle: BTreeMap::new(),
            idle_limit: objects / 2,
            next: 0,
            after: After::default(),
            closed: false,
        }
    }

    /// From now on no memory of the medium is taken: what is read from somewhere stays as it is.
    pub(super) fn close(&mut self) {
        self.closed = true;
    }

    /// What the last calls left to be done without the lock.
    pub(super) fn take_after(&mut self) -> After {
        std::mem::take(&mut self.after)
    }

    /// Looks for bytes that are here or on their way. The request has been checked.
    pub(super) fn find(&mut self, question: &Question<'_>) -> Found {
        if let Some(id) = self.current.get(question.key).copied() {
            return self.join(id, question);
        }
        // Under the lock, so that nothing is committed between the two looks.
        match self.medium.lease(question.key, Instant::now() + LEASE) {
            Some(stored) if stored.pages.len == question.len => {
                Found::Local { lease: stored.lease, pages: stored.pages }
            }
            Some(stored) => {
                self.medium.release(stored.lease);
                Found::OtherLength
            }
            None => Found::Absent,
        }
    }

    /// As [`find`](Self::find); what nobody fetches is fetched from `source`. `Absent` when the medium
    /// has no place for it.
    pub(super) fn find_or_fetch(&mut self, question: &Question<'_>, source: &Source) -> Found {
        match self.find(question) {
            Found::Absent => {}
            found => return found,
        }
        while self.idle.len() >= self.idle_limit.max(1) && self.reclaim() {}
        let (pending, pages) = match self.allocate(question.key, question.len) {
            Ok(allocated) => allocated,
            // Somebody put it meanwhile.
            Err(PutOutcome::AlreadyExists | PutOutcome::Conflict) => return self.find(question),
            Err(_) => return Found::Absent,
        };
        self.next += 1;
        let id = self.next;
        let assembly = Assembly {
            key: *question.key,
            source: source.clone(),
            pending,
            pages: Arc::new(pages),
            holds: 0,
            flying: 0,
            waiting: 0,
            lease: None,
            doomed: false,
            alone: false,
            failures: 0,
            launches: 0,
            idle: None,
        };
        self.assemblies.insert(id, assembly);
        self.current.insert(*question.key, id);
        let found = self.join(id, question);
        self.settle(id);
        found
    }

    /// Takes memory of the medium; what is only partly here and of no use to anybody makes room.
    ///
    /// # Errors
    /// As [`Medium::allocate`](crate::Medium::allocate).
    pub(super) fn allocate(
        &mut self,
        key: &ObjectKey,
        len: u64,
    ) -> Result<(Pending, PageList), PutOutcome> {
        if self.closed {
            return Err(PutOutcome::PeerDown);
        }
        loop {
            match self.medium.allocate(key, len) {
                Err(PutOutcome::Busy) if self.medium.is_writing(key) => {
                    return Err(PutOutcome::Busy);
                }
                Err(PutOutcome::NoSpace | PutOutcome::Busy) if self.reclaim() => {}
                other => return other,
            }
        }
    }

    /// Takes memory for a put, which is as good as a fetch of the same key that is on its way.
    ///
    /// # Errors
    /// As [`Medium::allocate`](crate::Medium::allocate).
    pub(super) fn allocate_put(
        &mut self,
        key: &ObjectKey,
        len: u64,
    ) -> Result<(Pending, PageList), PutOutcome> {
        if let Some(id) = self.current.get(key).copied() {
            self.retire(id);
            self.settle(id);
        }
        self.allocate(key, len)
    }

    /// Takes an object away from its key, also one that is on its way: its readers are still served.
    pub(super) fn remove(&mut self, key: &ObjectKey) -> RemoveOutcome {
        if let Some(id) = self.current.get(key).copied() {
            self.retire(id);
            self.settle(id);
        }
        self.medium.remove(key)
    }

    fn join(&mut self, id: u64, question: &Question<'_>) -> Found {
        let Some(assembly) = self.assemblies.get_mut(&id) else { return Found::Absent };
        self.next += 1;
        let reader = ReaderId(self.next);
        let generation = assembly.source.generation();
        let asked = match self.flights.ask(&id, generation, question.len, reader, question.ranges) {
            Ask::Admitted(asked) => asked,
            Ask::Length(_) => return Found::OtherLength,
            // Checked by the caller.
            Ask::Invalid(_) | Ask::Busy => return Found::Busy,
        };
        let pages = Arc::clone(&assembly.pages);
        if let Some(place) = assembly.idle.take() {
            self.idle.remove(&place);
        }
        if asked.ready {
            assembly.holds += 1;
            return Found::Present { assembly: id, pages };
        }
        assembly.waiting += 1;
        assembly.flying += asked.fetches.len();
        if !asked.fetches.is_empty() {
            assembly.launches += 1;
        }
        // One part of an object is no sign that the rest will be asked for; a second one is.
        let fill = question.will_read_all || (assembly.launches > 1 && !asked.fetches.is_empty());
        let orders = orders(id, assembly, asked.fetches);
        let record = assembly.source.record().clone();
        let waiting =
            Waiting { assembly: id, bell: Arc::clone(question.bell), index: question.index };
        self.readers.insert(reader, waiting);
        let joined = asked.joined_bytes;
        Found::Waiting { reader, assembly: id, pages, record, orders, joined, fill }
    }

    /// Background fetches for what is missing of an object.
    pub(super) fn fill(&mut self, id: u64, budget: u64) -> Vec<Order> {
        let Some(assembly) = self.assemblies.get_mut(&id) else { return Vec::new() };
        if assembly.doomed || assembly.lease.is_some() {
            return Vec::new();
        }
        let fetches = self.flights.fill_holes(&id, assembly.source.generation(), budget);
        if fetches.is_empty() {
            return Vec::new();
        }
        if let Some(place) = assembly.idle.take() {
            self.idle.remove(&place);
        }
        assembly.flying += fetches.len();
        orders(id, assembly, fetches)
    }

    /// The bytes of a fetch lie in their place.
    pub(super) fn landed(&mut self, id: u64, fetch: FetchId) {
        let Some(ended) = self.flights.landed(fetch) else { return };
        let Some(assembly) = self.assemblies.get_mut(&id) else { return };
        assembly.flying = assembly.flying.saturating_sub(1);
        let good = self.medium.written(assembly.pending, ended.range);
        assembly.holds += ended.readers.len();
        assembly.waiting = assembly.waiting.saturating_sub(ended.readers.len());
        if ended.complete && good {
            // Together, so that nothing evicts it while its readers copy.
            let until = Instant::now() + LEASE;
            match self.medium.commit_leased(assembly.pending, until) {
                Ok(lease) => {
                    assembly.lease = Some(lease);
                    self.after.committed = true;
                }
                Err(outcome) => {
                    tracing::warn!(?outcome, "a fetched object could not be committed");
                }
            }
            // From now on it is found in the medium, or not at all.
            self.retire(id);
        } else if !good {
            self.retire(id);
        }
        for reader in ended.readers {
            self.tell(reader, News::Ready(id));
        }
        self.settle(id);
    }

    /// A fetch has ended without its bytes, and nothing writes their place any more. `shared`: it shared
    /// an exchange that the peer refused as a whole.
    pub(super) fn failed(&mut self, id: u64, fetch: FetchId, error: LinkError, shared: bool) {
        let Some(ended) = self.flights.failed(fetch) else { return };
        let Some(assembly) = self.assemblies.get_mut(&id) else { return };
        assembly.flying = assembly.flying.saturating_sub(1);
        assembly.waiting = assembly.waiting.saturating_sub(ended.readers.len());
        let news = if shared {
            assembly.alone = true;
            News::Again
        } else {
            assembly.failures += u32::from(error != LinkError::Busy);
            let hopeless = matches!(error, LinkError::Restarted | LinkError::Broken);
            if hopeless || assembly.failures >= FAILURES {
                self.retire(id);
            }
            let doomed = self.assemblies.get(&id).is_none_or(|assembly| assembly.doomed);
            News::Failed(error, doomed)
        };
        for reader in ended.readers {
            self.tell(reader, news);
        }
        self.settle(id);
    }

    /// A reader waits no longer.
    pub(super) fn leave(&mut self, reader: ReaderId) {
        self.flights.leave(reader);
        let Some(waiting) = self.readers.remove(&reader) else { return };
        if let Some(assembly) = self.assemblies.get_mut(&waiting.assembly) {
            assembly.waiting = assembly.waiting.saturating_sub(1);
        }
        self.settle(waiting.assembly);
        self.after.bells.push(waiting.bell);
    }

    /// A reader has copied what it wanted.
    pub(super) fn release(&mut self, id: u64) {
        if let Some(assembly) = self.assemblies.get_mut(&id) {
            assembly.holds = assembly.holds.saturating_sub(1);
        }
        self.settle(id);
    }

    /// Gives up the assembly that has been idle longest.
    pub(super) fn reclaim(&mut self) -> bool {
        let Some((_, id)) = self.idle.pop_first() else { return false };
        if let Some(assembly) = self.assemblies.get_mut(&id) {
            assembly.idle = None;
        }
        self.retire(id);
        self.settle(id);
        true
    }

    /// Gives up everything that is idle.
    pub(super) fn reclaim_all(&mut self) {
        while self.reclaim() {}
    }

    /// Assemblies, fetches in flight, readers that wait, holds.
    pub(super) fn sizes(&self) -> (usize, usize, usize, usize) {
        let (_, fetches, readers) = self.flights.sizes();
        let holds = self.assemblies.values().map(|assembly| assembly.holds).sum();
        (self.assemblies.len(), fetches, readers, holds)
    }

    fn tell(&mut self, reader: ReaderId, what: News) {
        match self.readers.remove(&reader) {
            Some(Waiting { bell, index, .. }) => self.after.tells.push(Tell { bell, index, what }),
            None => tracing::error!("a reader is told that nobody knows"),
        }
    }

    /// No new reader joins it.
    fn retire(&mut self, id: u64) {
        let Some(assembly) = self.assemblies.get_mut(&id) else { return };
        if !std::mem::replace(&mut assembly.doomed, true) && assembly.lease.is_none() {
            // The key is free for another try; the pages wait for the last fetch and reader.
            self.medium.abort(assembly.pending, false);
        }
        if self.current.get(&assembly.key) == Some(&id) {
            self.current.remove(&assembly.key);
        }
    }

    /// Ends an assembly when nothing concerns it any more.
    fn settle(&mut self, id: u64) {
        let Some(assembly) = self.assemblies.get_mut(&id) else { return };
        if assembly.flying > 0 || assembly.waiting > 0 || assembly.holds > 0 {
            return;
        }
        if !assembly.doomed {
            if assembly.idle.is_none() {
                self.next += 1;
                assembly.idle = Some(self.next);
                self.idle.insert(self.next, id);
            }
            return;
        }
        if !self.flights.forget(&id, assembly.source.generation()) {
            return;
        }
        let Some(assembly) = self.assemblies.remove(&id) else { return };
        match assembly.lease {
            Some(lease) => self.medium.release(lease),
            // Every fetch has ended, which its engine has proved.
            None => self.medium.write_ended(assembly.pending),
        }
        self.after.sources.push(assembly.source);
    }
}

fn orders(id: u64, assembly: &Assembly, fetches: Vec<Fetch>) -> Vec<Order> {
    let order = |fetch| Order {
        assembly: id,
        fetch,
        pages: Arc::clone(&assembly.pages),
        source: assembly.source.clone(),
        alone: assembly.alone,
    };
    fetches.into_iter().map(order).collect()
}

/// How a reader that waited was served.
pub(super) fn served(joined: bool) -> GetOutcome {
    if joined { GetOutcome::Joined } else { GetOutcome::Remote }
}
