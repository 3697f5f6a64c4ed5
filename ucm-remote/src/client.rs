//! The client's side of a node's pool: asks the agent, and copies.
//!
//! **Invariant:** a destination is written by this client's engine only, and no longer when the call has
//! returned; what is copied from stays as it is until the copy has ended.

use std::{
    any::Any,
    collections::HashMap,
    fmt,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use ucm_transport::{
    Addr, Completion, Hold, Memory, Quiesce, RegionId, Rejected, SharedEngine, Ticket, Transfer,
    TransferEngine, TransferError, TransferPlan,
};

use crate::{
    ByteRange, GetOutcome, GetRequest, ObjectKey, PageList, PutOutcome, PutRequest, RemotePool,
    RemoveOutcome, Source,
    agent::{Call, Event, Inner, Put, Want},
    core::{Coverage, coverage, walk},
    ranks::Rank,
};

/// A rank's way to the pool of its node. Thread-safe; sources and destinations are regions of the engine
/// that it was made with.
pub struct PoolClient {
    node: Box<dyn Node>,
    engine: SharedEngine,
    /// The node's segments, as the engine names them.
    segments: Vec<RegionId>,
    copied: AtomicU64,
}

/// Copies of a call that have not ended.
struct Copies<'a> {
    client: &'a PoolClient,
    lane: Arc<dyn TransferEngine>,
    flying: HashMap<Ticket, Vec<(usize, Vec<Transfer>)>>,
    ended: Vec<Completion>,
    /// Something of the arena may still be held.
    lent: bool,
}

/// What is copied for one key, and what must live until that has ended.
struct Copy {
    index: usize,
    items: Vec<Transfer>,
    hold: Hold,
    /// From the arena.
    lent: bool,
}

/// Bytes of one plan of copies, about: what is ready together is copied together, but a reader of the
/// first bytes does not wait for all.
const COPIED_TOGETHER: u64 = 1 << 20;

/// Long enough for anything that ends at all.
const LONG: Duration = Duration::from_secs(3600);

/// The node's agent, as its clients know it.
pub(crate) trait Node: fmt::Debug + Send + Sync {
    /// The medium's segments and the arena; none when the agent has ended.
    fn segments(&self) -> Arc<[Memory]>;

    /// The agent has ended; another one has other memory.
    fn is_over(&self) -> bool {
        false
    }

    fn call(&self, wants: Vec<Want>, deadline: Instant) -> Box<dyn Events>;

    /// Takes memory for an object.
    fn begin_put(
        &self,
        key: &ObjectKey,
        len: u64,
        deadline: Instant,
    ) -> Result<Box<dyn Begun>, PutOutcome>;

    fn exists(&self, keys: &[ObjectKey], deadline: Instant)
    -> Vec<Result<Option<u64>, GetOutcome>>;

    fn remove(&self, keys: &[ObjectKey], deadline: Instant) -> Vec<RemoveOutcome>;

    fn touch(&self, keys: &[ObjectKey]);
}

/// What a call says, until every key has ended.
pub(crate) trait Events {
    fn next(&mut self) -> Option<Happened>;

    /// As [`next`](Self::next), if there is something without waiting. May overlook some.
    fn next_at_hand(&mut self) -> Option<Happened>;
}

#[derive(Debug)]
pub(crate) enum Happened {
    Ready(Delivered),
    Ended(usize, GetOutcome),
}

/// Bytes that can be copied; see `Delivery`.
#[derive(Debug)]
pub(crate) struct Delivered {
    pub(crate) index: usize,
    pub(crate) outcome: GetOutcome,
    pub(crate) pages: Arc<PageList>,
    pub(crate) parts: Vec<(usize, u64)>,
    pub(crate) last: bool,
    /// They stay while this lives.
    pub(crate) hold: Box<dyn Any + Send>,
}

/// An object that is being put. Given up by dropping it, which must come after the last copy.
pub(crate) trait Begun {
    /// Where its bytes go.
    fn pages(&self) -> &PageList;

    /// Goes with a copy into the pages.
    fn hold(&self) -> Box<dyn Any + Send>;

    /// All bytes are there: publishes it.
    fn commit(&self, deadline: Instant) -> PutOutcome;
}

impl Node for Arc<Inner> {
    fn segments(&self) -> Arc<[Memory]> {
        Arc::clone(Inner::segments(self))
    }

    fn call(&self, wants: Vec<Want>, deadline: Instant) -> Box<dyn Events> {
        Box::new(Call::new(self, wants, deadline))
    }

    fn begin_put(
        &self,
        key: &ObjectKey,
        len: u64,
        deadline: Instant,
    ) -> Result<Box<dyn Begun>, PutOutcome> {
        Ok(Box::new(Inner::begin_put(self, key, len, deadline)?))
    }

    fn exists(
        &self,
        keys: &[ObjectKey],
        deadline: Instant,
    ) -> Vec<Result<Option<u64>, GetOutcome>> {
        Inner::exists(self, keys, deadline)
    }

    fn remove(&self, keys: &[ObjectKey], deadline: Instant) -> Vec<RemoveOutcome> {
        Inner::remove(self, keys, deadline)
    }

    fn touch(&self, keys: &[ObjectKey]) {
        Inner::touch(self, keys);
    }
}

impl Events for Call {
    fn next(&mut self) -> Option<Happened> {
        Self::next(self).map(Happened::from)
    }

    fn next_at_hand(&mut self) -> Option<Happened> {
        Self::next_at_hand(self).map(Happened::from)
    }
}

impl From<Event> for Happened {
    fn from(event: Event) -> Self {
        match event {
            Event::Ended(index, outcome) => Self::Ended(index, outcome),
            Event::Ready(delivery) => Self::Ready(Delivered {
                index: delivery.index,
                outcome: delivery.outcome,
                pages: delivery.pages,
                parts: delivery.parts,
                last: delivery.last,
                hold: Box::new(delivery.pin),
            }),
        }
    }
}

impl Begun for Arc<Put> {
    fn pages(&self) -> &PageList {
        Put::pages(self)
    }

    fn hold(&self) -> Box<dyn Any + Send> {
        Box::new(Self::clone(self))
    }

    fn commit(&self, deadline: Instant) -> PutOutcome {
        Put::commit(self, deadline)
    }
}

impl PoolClient {
    /// The client of a rank in a process of its own: connects to the agent that serves ranks at `path`, and
    /// maps the node's memory, until that agent has ended. Takes over the completions of `engine`.
    ///
    /// # Errors
    /// `PeerDown` when no agent of this version answers, `Registration` when its memory cannot be mapped,
    /// and as [`TransferEngine::register`].
    pub fn connect(path: &Path, engine: Arc<dyn TransferEngine>) -> Result<Self, TransferError> {
        let rank = Rank::connect(path)?;
        let client = Self::new(Box::new(rank.clone()), Arc::clone(&engine))?;
        let segments = client.segments.clone();
        rank.when_over(move || {
            for region in segments {
                // What is being copied holds its memory.
                if let Err(error) = engine.deregister(region) {
                    tracing::warn!(%error, "a segment of an agent that has ended stays mapped");
                }
            }
        });
        Ok(client)
    }

    pub(crate) fn new(
        node: Box<dyn Node>,
        engine: Arc<dyn TransferEngine>,
    ) -> Result<Self, TransferError> {
        let memory = node.segments();
        let mut segments = Vec::with_capacity(memory.len());
        for memory in &*memory {
            match engine.register(memory.clone()) {
                Ok(region) => segments.push(region),
                Err(error) => {
                    for region in segments {
                        // Nobody knows it yet.
                        let _ = engine.deregister(region);
                    }
                    return Err(error);
                }
            }
        }
        Ok(Self { node, engine: SharedEngine::new(engine), segments, copied: AtomicU64::new(0) })
    }

    /// Bytes that were copied to destinations.
    #[must_use]
    pub fn copied_bytes(&self) -> u64 {
        self.copied.load(Ordering::Relaxed)
    }

    /// As [`get`](RemotePool::get), telling each key's end when it comes: a reader begins with what is
    /// there first.
    pub fn get_each(
        &self,
        requests: &[GetRequest],
        deadline: Instant,
        mut ended: impl FnMut(usize, GetOutcome),
    ) {
        let wants = requests.iter().map(|request| Want {
            key: request.key,
            len: request.len,
            ranges: request.ranges.iter().map(|destination| destination.range).collect(),
            will_read_all: request.will_read_all,
        });
        let mut call = self.node.call(wants.collect(), deadline);
        let mut copies = self.copies();
        let mut keys: Vec<Progress> = vec![Progress::default(); requests.len()];
        while let Some(first) = call.next_at_hand().or_else(|| {
            if copies.lent {
                // The round that is waited for may need what has been copied.
                copies.finish(|index, good| self.copied(index, good, &mut keys, &mut ended));
            }
            call.next()
        }) {
            let (mut together, mut bytes, mut next) = (Vec::new(), 0, Some(first));
            while let Some(event) = next {
                match event {
                    Happened::Ended(index, outcome) => {
                        if let Some(key) = keys.get_mut(index) {
                            key.end = Some(outcome);
                        }
                        self.tell(index, &mut keys, &mut ended);
                    }
                    Happened::Ready(delivery) => {
                        let index = delivery.index;
                        let items = requests.get(index).and_then(|r| self.items(r, &delivery));
                        let lent = !delivery.parts.is_empty();
                        if let Some(key) = keys.get_mut(index) {
                            key.end = delivery.last.then_some(delivery.outcome);
                            match items {
                                Some(items) => {
                                    key.copying += 1;
                                    bytes += items.iter().map(|item| item.len).sum::<u64>();
                                    together.push(Copy { index, items, hold: delivery.hold, lent });
                                }
                                None => key.failed = true,
                            }
                        }
                        self.tell(index, &mut keys, &mut ended);
                    }
                }
                next = if bytes < COPIED_TOGETHER { call.next_at_hand() } else { None };
            }
            copies.start(together, |index| self.copied(index, false, &mut keys, &mut ended));
            copies.look(|index, good| self.copied(index, good, &mut keys, &mut ended));
        }
        copies.finish(|index, good| self.copied(index, good, &mut keys, &mut ended));
    }

    fn copied(
        &self,
        index: usize,
        good: bool,
        keys: &mut [Progress],
        ended: &mut impl FnMut(usize, GetOutcome),
    ) {
        if let Some(key) = keys.get_mut(index) {
            key.copying -= 1;
            key.failed |= !good;
        }
        self.tell(index, keys, ended);
    }

    fn tell(&self, index: usize, keys: &mut [Progress], ended: &mut impl FnMut(usize, GetOutcome)) {
        let Some(key) = keys.get_mut(index) else { return };
        // Nothing writes its destinations, and nothing will.
        if key.copying == 0
            && let Some(outcome) = key.end.take()
        {
            let failed = key.failed && outcome.is_served();
            let why = if self.node.is_over() { GetOutcome::PeerDown } else { GetOutcome::Failed };
            ended(index, if failed { why } else { outcome });
        }
    }

    /// From the node's memory to the destinations.
    fn items(&self, request: &GetRequest, delivery: &Delivered) -> Option<Vec<Transfer>> {
        let mut items = Vec::with_capacity(request.ranges.len());
        let mut copy = |index: usize, at: Option<u64>| {
            let destination = request.ranges.get(index)?;
            let range = destination.range;
            let from = ByteRange { offset: at.unwrap_or(range.offset), len: range.len };
            self.pieces(&delivery.pages, from, destination.to, |page, other, len| {
                items.push(Transfer { src: page, dst: other, len });
            })
        };
        if delivery.parts.is_empty() {
            (0..request.ranges.len()).try_for_each(|index| copy(index, None))?;
        } else {
            delivery.parts.iter().try_for_each(|(index, at)| copy(*index, Some(*at)))?;
        }
        Some(items)
    }

    /// Pieces of a range of an object here, each with its place in a region that holds the range from
    /// `other` on. `None` when the pages do not hold it.
    fn pieces(
        &self,
        pages: &PageList,
        range: ByteRange,
        other: Addr,
        mut emit: impl FnMut(Addr, Addr, u64),
    ) -> Option<()> {
        let mut known = true;
        let walked = walk(pages, range, |fragment| {
            let index = usize::try_from(fragment.addr.region.index).ok();
            let region = index.and_then(|index| self.segments.get(index));
            match (region, other.offset.checked_add(fragment.before)) {
                (Some(region), Some(offset)) => {
                    let page = Addr { region: *region, offset: fragment.addr.offset };
                    emit(page, Addr { offset, ..other }, fragment.len);
                    std::ops::ControlFlow::Continue(())
                }
                _ => {
                    known = false;
                    std::ops::ControlFlow::Break(())
                }
            }
        });
        (walked.is_ok() && known).then_some(())
    }

    fn copies(&self) -> Copies<'_> {
        Copies {
            client: self,
            lane: self.engine.lane(),
            flying: HashMap::new(),
            ended: Vec::new(),
            lent: false,
        }
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Progress {
    /// How it ends once nothing is copied any more.
    end: Option<GetOutcome>,
    copying: usize,
    failed: bool,
}

/// Copies of keys, taken from a plan that was made of them.
fn joined(parts: Vec<(usize, Vec<Transfer>)>, holds: Vec<Hold>) -> Vec<Copy> {
    // Whether they are lent has been noted.
    let copy = |((index, items), hold)| Copy { index, items, hold, lent: false };
    parts.into_iter().zip(holds).map(copy).collect()
}

impl Copies<'_> {
    /// Begins to copy; says what was refused. An engine refuses a plan as a whole: whose copy it meant is
    /// found out by asking for each alone.
    fn start(&mut self, copies: Vec<Copy>, mut refused: impl FnMut(usize)) {
        let Err((error, copies)) = self.submit(copies) else { return };
        tracing::debug!(%error, "a copy was refused");
        if let [alone] = &copies[..] {
            refused(alone.index);
            return;
        }
        for copy in copies {
            let index = copy.index;
            if self.submit(vec![copy]).is_err() {
                refused(index);
            }
        }
    }

    fn submit(&mut self, copies: Vec<Copy>) -> Result<(), (TransferError, Vec<Copy>)> {
        if copies.is_empty() {
            return Ok(());
        }
        let (mut parts, mut holds) = (Vec::with_capacity(copies.len()), Vec::new());
        for Copy { index, items, hold, lent } in copies {
            self.lent |= lent;
            parts.push((index, items));
            holds.push(hold);
        }
        let items = parts.iter().flat_map(|(_, items)| items.iter().copied()).collect();
        match self.lane.submit(TransferPlan { items, holds }) {
            Ok(ticket) => {
                self.flying.insert(ticket, parts);
                Ok(())
            }
            Err(Rejected { plan, error }) => Err((error, joined(parts, plan.holds))),
        }
    }

    /// Takes in what has ended.
    fn look(&mut self, mut ended: impl FnMut(usize, bool)) {
        self.lane.poll(&mut self.ended);
        for completion in std::mem::take(&mut self.ended) {
            let Some(parts) = self.flying.remove(&completion.ticket) else { continue };
            if let Ok(bytes) = &completion.result {
                self.client.copied.fetch_add(*bytes, Ordering::Relaxed);
            } else if parts.len() > 1 {
                // A failed copy fails its key alone: whose it was shows the second time.
                for copy in joined(parts, completion.holds) {
                    let index = copy.index;
                    if self.submit(vec![copy]).is_err() {
                        ended(index, false);
                    }
                }
                continue;
            }
            let good = completion.result.is_ok();
            // The pages go before the keys are told of: when a call returns, nothing is held for it.
            drop(completion);
            parts.into_iter().for_each(|(index, _)| ended(index, good));
        }
    }

    /// Waits until nothing is copied any more.
    fn finish(&mut self, mut ended: impl FnMut(usize, bool)) {
        self.look(&mut ended);
        while !self.flying.is_empty() {
            // The caller's memory is lent by reference: it cannot be let go earlier.
            let _ = self.lane.quiesce(Quiesce::All, Instant::now() + LONG);
            self.look(&mut ended);
        }
        self.lent = false;
    }
}

impl RemotePool for PoolClient {
    fn get(&self, requests: &[GetRequest], deadline: Instant) -> Vec<GetOutcome> {
        let mut outcomes = vec![GetOutcome::Timeout; requests.len()];
        self.get_each(requests, deadline, |index, outcome| {
            if let Some(place) = outcomes.get_mut(index) {
                *place = outcome;
            }
        });
        outcomes
    }

    fn put(&self, requests: &[PutRequest], deadline: Instant) -> Vec<PutOutcome> {
        requests.iter().map(|request| self.put_one(request, deadline)).collect()
    }

    fn exists(
        &self,
        keys: &[ObjectKey],
        deadline: Instant,
    ) -> Vec<Result<Option<u64>, GetOutcome>> {
        self.node.exists(keys, deadline)
    }

    fn remove(&self, keys: &[ObjectKey], deadline: Instant) -> Vec<RemoveOutcome> {
        self.node.remove(keys, deadline)
    }

    fn touch(&self, keys: &[ObjectKey]) {
        self.node.touch(keys);
    }
}

impl PoolClient {
    fn put_one(&self, request: &PutRequest, deadline: Instant) -> PutOutcome {
        let ranges: Vec<ByteRange> = request.ranges.iter().map(|source| source.range).collect();
        // A gap or an overlap publishes nothing.
        if matches!(coverage(&ranges, request.len), Err(_) | Ok(Coverage::Part)) {
            return PutOutcome::Invalid;
        }
        let put = match self.node.begin_put(&request.key, request.len, deadline) {
            Ok(put) => put,
            Err(outcome) => return outcome,
        };
        let mut items = Vec::with_capacity(request.ranges.len());
        for Source { range, from } in &request.ranges {
            let pieces = self.pieces(put.pages(), *range, *from, |page, other, len| {
                items.push(Transfer { src: other, dst: page, len });
            });
            if pieces.is_none() {
                return PutOutcome::Invalid;
            }
        }
        let mut copies = self.copies();
        let mut good = true;
        let copy = Copy { index: 0, items, hold: put.hold(), lent: false };
        copies.start(vec![copy], |_| good = false);
        copies.finish(|_, ended_well| good &= ended_well);
        if good { put.commit(deadline) } else { PutOutcome::Failed }
    }
}

impl fmt::Debug for PoolClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolClient")
            .field("engine", &self.engine)
            .field("copied_bytes", &self.copied_bytes())
            .finish_non_exhaustive()
    }
}
