//! One call of a client: what becomes of each of its keys.
//!
//! The caller's thread does whatever may block (directory, connections, resolving); bytes are moved by
//! the engines, and their ends come as news.
//!
//! **Invariant:** each key ends exactly once, at the deadline at the latest; no lock is held while
//! anything blocks; dropping the call gives back all that it was told and did not take.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use super::{
    Inner,
    bell::{Bell, Told},
    fetch::{self, ArenaFetch},
    pin::Pin,
    source::{Attached, Source, Way},
    table::{Found, Order, Question, served},
};
use crate::{
    ByteRange, DirectoryError, GetOutcome, ObjectKey, PageList, Record,
    core::{Part, ReaderId, Round, pack},
    service::{Leased, Link, LinkError},
};

/// What a client wants of one object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Want {
    pub(crate) key: ObjectKey,
    pub(crate) len: u64,
    pub(crate) ranges: Vec<ByteRange>,
    pub(crate) will_read_all: bool,
}

/// Bytes that can be copied.
#[derive(Debug)]
pub(crate) struct Delivery {
    /// Which key of the call.
    pub(crate) index: usize,
    /// How the key ends, if the copies of all its deliveries succeed.
    pub(crate) outcome: GetOutcome,
    /// Where they lie: segments of the node, the arena being the last one.
    pub(crate) pages: Arc<PageList>,
    /// Range of the key, and its first byte in the list; empty: all ranges, at their own offsets.
    pub(crate) parts: Vec<(usize, u64)>,
    /// No other delivery of this key follows.
    pub(crate) last: bool,
    /// Until when they stay.
    pub(crate) pin: Pin,
}

/// What a call says next.
#[derive(Debug)]
pub(crate) enum Event {
    Ready(Delivery),
    /// Not served; nothing was delivered, or not all of it.
    Ended(usize, GetOutcome),
}

/// Keys that are asked for under one hold of the table's lock: others wait for so many at most.
const ASKED_TOGETHER: usize = 64;

/// Tries of one key before it is given up, whatever they end as.
const TRIES: u32 = 12;

#[derive(Debug)]
pub(crate) struct Call {
    inner: Arc<Inner>,
    bell: Arc<Bell>,
    deadline: Instant,
    keys: Vec<Key>,
    open: usize,
    out: VecDeque<Event>,
    /// Assemblies to be completed in the background, once what is asked for now is on its way.
    pulls: Vec<u64>,
}

#[derive(Debug)]
struct Key {
    want: Want,
    state: State,
    /// Storings that did not work, and why the last one did not.
    tried: Vec<Record>,
    last: GetOutcome,
    resolved_again: bool,
    joined: bool,
    tries: u32,
}

#[derive(Debug)]
enum State {
    /// To be looked for.
    Open,
    /// What was known of it is not true any more: the owner is asked.
    Stale(Record),
    Waiting(ReaderId, Arc<PageList>, Record),
    /// Round by round through the arena.
    Arena(Box<ArenaRun>),
    Ended,
}

#[derive(Debug)]
struct ArenaRun {
    source: Source,
    rounds: VecDeque<Round>,
    flying: Vec<Part>,
}

/// Ends a call from another thread.
#[derive(Debug)]
pub(crate) struct Stop(Arc<Bell>);

impl Stop {
    pub(crate) fn stop(&self) {
        self.0.stop();
    }
}

impl Call {
    pub(crate) fn stop(&self) -> Stop {
        Stop(Arc::clone(&self.bell))
    }

    pub(crate) fn new(inner: &Arc<Inner>, wants: Vec<Want>, deadline: Instant) -> Self {
        let bell: Arc<Bell> = Arc::default();
        inner.enter(&bell);
        let keys: Vec<Key> = wants
            .into_iter()
            .map(|want| Key {
                want,
                state: State::Open,
                tried: Vec::new(),
                last: GetOutcome::Miss,
                resolved_again: false,
                joined: false,
                tries: 0,
            })
            .collect();
        let open = keys.len();
        let mut call = Self {
            inner: Arc::clone(inner),
            bell,
            deadline,
            keys,
            open,
            out: VecDeque::new(),
            pulls: Vec::new(),
        };
        for index in 0..call.keys.len() {
            call.check(index);
        }
        call
    }

    /// The next thing to be told; `None` when every key has ended.
    pub(crate) fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.out.pop_front() {
                return Some(event);
            }
            if self.open == 0 {
                return None;
            }
            self.look();
            if !self.out.is_empty() {
                continue;
            }
            match self.bell.wait(self.deadline) {
                Some((index, told)) => self.hear(index, told),
                None => {
                    let outcome = if self.bell.is_stopped() {
                        GetOutcome::PeerDown
                    } else {
                        GetOutcome::Timeout
                    };
                    (0..self.keys.len()).for_each(|index| self.end(index, outcome));
                }
            }
        }
    }

    /// The next thing to be told, if there is one without waiting. May overlook some.
    pub(crate) fn next_at_hand(&mut self) -> Option<Event> {
        while self.out.is_empty() {
            let (index, told) = self.bell.look()?;
            self.hear(index, told);
        }
        self.out.pop_front()
    }

    /// What makes no sense is refused before anything is done for it.
    fn check(&mut self, index: usize) {
        let Some(key) = self.keys.get(index) else { return };
        match crate::check_ranges(&key.want.ranges, key.want.len) {
            Ok(bytes) => {
                self.inner.counters.asked_bytes.fetch_add(bytes, Ordering::Relaxed);
            }
            Err(_) => self.end(index, GetOutcome::Invalid),
        }
    }

    /// Looks for all open keys.
    fn look(&mut self) {
        let mut orders = Vec::new();
        let mut absent: Vec<usize> = Vec::new();
        let is_open =
            |index: &usize| matches!(self.keys.get(*index), Some(Key { state: State::Open, .. }));
        let open = (0..self.keys.len()).filter(is_open).map(|index| (index, None)).collect();
        for (index, found) in self.ask(open) {
            if matches!(found, Found::Absent) {
                absent.push(index);
            } else {
                self.take(index, found, &mut orders);
            }
        }
        // What is known is on its way while the rest is looked for.
        self.submit(std::mem::take(&mut orders));
        self.route(absent, &mut orders);
        let stale: Vec<usize> = (0..self.keys.len())
            .filter(|i| matches!(self.keys.get(*i), Some(Key { state: State::Stale(_), .. })))
            .collect();
        for index in stale {
            self.resolve_again(index, &mut orders);
        }
        self.submit(orders);
        self.pulls.drain(..).for_each(|assembly| self.inner.pull(assembly));
    }

    fn submit(&self, orders: Vec<Order>) {
        if orders.is_empty() {
            return;
        }
        let mut peers: Vec<_> = orders.iter().map(|order| order.source.peer()).collect();
        peers.sort_unstable();
        peers.dedup();
        self.inner.counters.remote_calls.fetch_add(peers.len() as u64, Ordering::Relaxed);
        fetch::submit(&self.inner, orders, true, self.fetch_deadline());
    }

    /// A fetch belongs to the node: it has its own time, so that a peer that hangs leaves some for the
    /// next one.
    fn fetch_deadline(&self) -> Instant {
        Instant::now() + self.inner.options.fetch_timeout
    }

    /// Asks the table about keys, some at a time under one hold of its lock.
    fn ask(&self, asked: Vec<(usize, Option<Source>)>) -> Vec<(usize, Found)> {
        let mut answers = Vec::with_capacity(asked.len());
        for some in asked.chunks(ASKED_TOGETHER) {
            self.inner.with(|table| {
                for (index, source) in some {
                    let Some(key) = self.keys.get(*index) else {
                        answers.push((*index, Found::Absent));
                        continue;
                    };
                    let question = Question {
                        key: &key.want.key,
                        len: key.want.len,
                        ranges: &key.want.ranges,
                        will_read_all: key.want.will_read_all,
                        bell: &self.bell,
                        index: *index,
                    };
                    let found = match source {
                        None => table.find(&question),
                        Some(source) => table.find_or_fetch(&question, source),
                    };
                    answers.push((*index, found));
                }
            });
        }
        answers
    }

    fn take(&mut self, index: usize, found: Found, orders: &mut Vec<Order>) {
        let inner = Arc::clone(&self.inner);
        match found {
            Found::Local { lease, pages } => {
                let pin = Pin::object(Leased::new(inner.medium.medium(), lease));
                self.deliver(index, GetOutcome::Local, Arc::new(pages), pin);
            }
            Found::Present { assembly, pages } => {
                let outcome = match self.keys.get(index) {
                    Some(Key { tries, joined, .. }) if *tries > 0 => served(*joined),
                    _ => GetOutcome::Local,
                };
                self.deliver(index, outcome, pages, Pin::assembly(&inner, assembly));
            }
            Found::Waiting { reader, assembly, pages, record, orders: more, joined, fill } => {
                inner.counters.joined_bytes.fetch_add(joined, Ordering::Relaxed);
                if let Some(key) = self.keys.get_mut(index) {
                    key.joined = more.is_empty() && key.tries == 0;
                    key.tries += 1;
                    key.state = State::Waiting(reader, pages, record);
                }
                orders.extend(more);
                if fill {
                    self.pulls.push(assembly);
                }
            }
            Found::OtherLength => self.end(index, GetOutcome::Stale),
            Found::Busy | Found::Absent => self.end(index, GetOutcome::Busy),
        }
    }

    /// Asks the directory about keys that are neither here nor on their way, and begins to fetch them.
    fn route(&mut self, indices: Vec<usize>, orders: &mut Vec<Order>) {
        if indices.is_empty() {
            return;
        }
        let inner = Arc::clone(&self.inner);
        let keys: Vec<ObjectKey> =
            indices.iter().filter_map(|i| self.keys.get(*i).map(|key| key.want.key)).collect();
        let located = inner.routes.locate(&keys, self.deadline);
        let mut places = Vec::with_capacity(indices.len());
        for (index, located) in indices.into_iter().zip(located) {
            match located {
                Ok(records) => places.push((index, records)),
                Err(error) => {
                    let outcome = match error {
                        DirectoryError::Timeout => GetOutcome::Timeout,
                        _ => GetOutcome::PeerDown,
                    };
                    self.end(index, outcome);
                }
            }
        }
        self.start(places, orders);
    }

    /// Fetches keys, each from the first of its places that can be reached.
    fn start(&mut self, places: Vec<(usize, Vec<Record>)>, orders: &mut Vec<Order>) {
        let mut links = HashMap::new();
        let mut sources = Vec::with_capacity(places.len());
        for (index, records) in places {
            match self.reach(index, records, &mut links) {
                Some(source) => sources.push((index, Some(source))),
                None => {
                    let last = self.keys.get(index).map_or(GetOutcome::Miss, |key| key.last);
                    self.end(index, last);
                }
            }
        }
        for ((index, found), (_, source)) in self.ask(sources.clone()).into_iter().zip(sources) {
            match (found, source) {
                (Found::Absent, Some(source)) => self.start_arena(index, source),
                (found, _) => self.take(index, found, orders),
            }
        }
    }

    /// The first of these places of a key that can be reached.
    fn reach(
        &mut self,
        index: usize,
        records: Vec<Record>,
        links: &mut HashMap<crate::Token, Result<Link, LinkError>>,
    ) -> Option<Source> {
        let inner = Arc::clone(&self.inner);
        for record in records {
            let key = self.keys.get_mut(index)?;
            if record.peer == inner.options.me || key.tried.contains(&record) {
                continue;
            }
            if record.len != key.want.len {
                key.last = GetOutcome::Stale;
                continue;
            }
            let object = key.want.key;
            // Once for all keys.
            let link = links
                .entry(record.boot)
                .or_insert_with(|| inner.link(&record, self.deadline))
                .clone();
            let made =
                link.and_then(|link| inner.source(&object, record.clone(), link, self.deadline));
            match made {
                Ok(source) => return Some(source),
                Err(error) => {
                    inner.routes.forget(&object);
                    key.last = error.of_get();
                    key.tried.push(record);
                }
            }
        }
        None
    }

    /// No place in the medium: round by round, not to stay.
    fn start_arena(&mut self, index: usize, source: Source) {
        let Some(key) = self.keys.get_mut(index) else { return };
        let (rounds, refused) = pack(&[&key.want.ranges], self.inner.arena.capacity());
        if !refused.is_empty() {
            return self.end(index, GetOutcome::TooLarge);
        }
        key.tries += 1;
        key.state =
            State::Arena(Box::new(ArenaRun { source, rounds: rounds.into(), flying: Vec::new() }));
        self.next_round(index);
    }

    fn next_round(&self, index: usize) {
        if let Some(Key { state: State::Arena(run), .. }) = self.keys.get(index)
            && let Some(round) = run.rounds.front()
        {
            self.inner.arena.ask(round.bytes, &self.bell, index);
        }
    }

    fn hear(&mut self, index: usize, told: Told) {
        let Some(key) = self.keys.get_mut(index) else { return };
        match (told, &mut key.state) {
            (Told::Ready(pin), State::Waiting(_, pages, _)) => {
                let (pages, outcome) = (Arc::clone(pages), served(key.joined));
                self.deliver(index, outcome, pages, pin);
            }
            (Told::Again, State::Waiting(..)) => key.state = State::Open,
            (Told::Failed(error, doomed), State::Waiting(_, _, record)) => {
                let record = record.clone();
                key.state = State::Open;
                if error == LinkError::Busy || key.tries > TRIES {
                    self.end(index, error.of_get());
                } else if doomed {
                    self.gone(index, record, error);
                }
            }
            (Told::Granted(lease), State::Arena(run)) => {
                if let Some(round) = run.rounds.pop_front() {
                    run.flying = round.parts;
                    self.inner.counters.arena_bytes.fetch_add(round.bytes, Ordering::Relaxed);
                    let (source, parts) = (run.source.clone(), run.flying.clone());
                    self.inner.counters.remote_calls.fetch_add(1, Ordering::Relaxed);
                    let fetch = ArenaFetch { bell: Arc::clone(&self.bell), index, lease };
                    fetch::submit_arena(&self.inner, &source, &parts, fetch, self.fetch_deadline());
                }
            }
            (Told::Landed(lease), State::Arena(run)) => {
                let last = run.rounds.is_empty();
                let delivery = Delivery {
                    index,
                    outcome: GetOutcome::Remote,
                    pages: Arc::clone(&lease.pages),
                    parts: run.flying.drain(..).map(|part| (part.index, part.at)).collect(),
                    last,
                    pin: Pin::arena(lease),
                };
                self.out.push_back(Event::Ready(delivery));
                if last {
                    key.state = State::Ended;
                    self.open -= 1;
                } else {
                    // On the wire while the caller copies.
                    self.next_round(index);
                }
            }
            (Told::Failed(error, _), State::Arena(run)) => {
                let record = run.source.record().clone();
                key.state = State::Open;
                self.gone(index, record, error);
            }
            // Of a state that is over; what it holds goes with it.
            (told, _) => drop(told),
        }
    }

    /// A storing of the object did not work.
    fn gone(&mut self, index: usize, record: Record, error: LinkError) {
        let Some(key) = self.keys.get_mut(index) else { return };
        key.last = error.of_get();
        key.tried.push(record.clone());
        self.inner.routes.forget(&key.want.key);
        if error == LinkError::Restarted && !std::mem::replace(&mut key.resolved_again, true) {
            key.state = State::Stale(record);
        }
    }

    /// Asks the owner what it has under the key now, and the directory if the owner is another run.
    fn resolve_again(&mut self, index: usize, orders: &mut Vec<Order>) {
        let inner = Arc::clone(&self.inner);
        let Some(key) = self.keys.get_mut(index) else { return };
        let State::Stale(record) = std::mem::replace(&mut key.state, State::Open) else { return };
        let object = key.want.key;
        match inner.link(&record, self.deadline) {
            Ok(link) => match link.resolve(&[object], self.deadline).map(|mut all| all.pop()) {
                Ok(Some(Ok((generation, len)))) => {
                    let mut now = record;
                    (now.generation, now.len) = (generation, len);
                    return self.start(vec![(index, vec![now])], orders);
                }
                Ok(_) => key.last = GetOutcome::Miss,
                Err(LinkError::Restarted) => inner.links.drop_run(&record.peer, &link),
                Err(error) => key.last = error.of_get(),
            },
            Err(error) => key.last = error.of_get(),
        }
        // Others may have it, or the same peer in another run.
        self.route(vec![index], orders);
    }

    fn deliver(&mut self, index: usize, outcome: GetOutcome, pages: Arc<PageList>, pin: Pin) {
        let Some(key) = self.keys.get_mut(index) else { return };
        key.state = State::Ended;
        self.open -= 1;
        let counters = &self.inner.counters;
        match outcome {
            GetOutcome::Local => counters.local.fetch_add(1, Ordering::Relaxed),
            GetOutcome::Joined => counters.joined.fetch_add(1, Ordering::Relaxed),
            _ => counters.remote.fetch_add(1, Ordering::Relaxed),
        };
        let delivery = Delivery { index, outcome, pages, parts: Vec::new(), last: true, pin };
        self.out.push_back(Event::Ready(delivery));
    }

    /// Ends a key without bytes; without effect when it has ended.
    fn end(&mut self, index: usize, outcome: GetOutcome) {
        let Some(key) = self.keys.get_mut(index) else { return };
        let state = std::mem::replace(&mut key.state, State::Ended);
        if matches!(state, State::Ended) {
            return;
        }
        self.open -= 1;
        self.out.push_back(Event::Ended(index, outcome));
        match state {
            State::Waiting(reader, ..) => self.inner.with(|table| table.leave(reader)),
            State::Arena(_) => self.inner.arena.leave(&self.bell, Some(index)),
            _ => {}
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        for key in &self.keys {
            if let State::Waiting(reader, ..) = &key.state {
                self.inner.with(|table| table.leave(*reader));
            }
        }
        self.inner.arena.leave(&self.bell, None);
        self.bell.stop();
        self.inner.exit(&self.bell);
    }
}

impl Inner {
    pub(super) fn attached(&self, region: ucm_transport::RegionId) -> Way {
        Way::Tcp(Attached { engine: Arc::clone(&self.tcp), region })
    }
}
