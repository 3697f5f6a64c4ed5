//! The agent: one per node, it holds the medium, fetches for all ranks, and serves other nodes.
//!
//! **Invariant:** each byte of an object is fetched once for the whole node while somebody has it or
//! waits for it; no lock is held while the directory, a peer or an engine is asked.

mod announce;
mod arena;
mod bell;
mod builder;
mod call;
mod fetch;
mod pin;
mod pull;
mod put;
mod routes;
mod source;
mod table;
mod touch;

use std::{
    collections::HashMap,
    fmt,
    net::SocketAddr,
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    task::Wake,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use ucm_data::Segments;
use ucm_transport::{
    Access, ErrorKind, Memory, RegionId, ShmEngine, TcpEngine, TcpServer, TransferEngine,
    TransferError,
};

pub use self::builder::{AgentBuilder, AgentError};
use self::{
    announce::Announcer,
    arena::Arena,
    bell::{Bell, Told},
    builder::Options,
    pull::Puller,
    routes::Routes,
    source::{Ended, Mapped, Source, Way},
    table::{After, News, Table, Tell},
    touch::Toucher,
};
pub(crate) use self::{
    call::{Call, Event, Stop, Want},
    pin::Pin,
    put::Put,
};
use crate::{
    DirectoryError, GetOutcome, HostMedium, Medium as _, MediumUsage, Member, ObjectKey, PeerUsage,
    PoolBackend, PoolBackendOptions, PoolClient, Record, Token,
    client::Node as _,
    ranks::{Rank, RankServer},
    service::{Link, LinkError, Links},
};

/// What an agent has done, and how things stand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct AgentStats {
    /// Bytes that clients asked for.
    pub asked_bytes: u64,
    /// Bytes that were brought from peers, background ones included.
    pub wire_bytes: u64,
    /// Bytes that were brought in the background.
    pub pulled_bytes: u64,
    /// Bytes that went through the arena.
    pub arena_bytes: u64,
    /// Bytes that clients asked for while somebody else was fetching them.
    pub joined_bytes: u64,
    /// Keys served from this node.
    pub local: u64,
    /// Keys served from bytes that somebody else was fetching.
    pub joined: u64,
    /// Keys served from peers.
    pub remote: u64,
    /// Times that requests were sent to one peer together.
    pub remote_calls: u64,
    /// Exchanges with peers, whatever they were.
    pub exchanges: u64,
    /// Questions to the directory about keys.
    pub route_calls: u64,
    /// Fetches that failed.
    pub failed_fetches: u64,
    /// Fetches of something that was not there any more.
    pub stale: u64,
    /// Background pulls that were not begun because too many waited.
    pub dropped_pulls: u64,
    /// Copies of objects that were put here and could not be put elsewhere.
    pub lost_copies: u64,
    /// Announcements that the directory did not take; they are made up for later.
    pub lost_announcements: u64,
    /// Nanoseconds that calls waited for the arena.
    pub arena_wait_ns: u64,
    /// Objects on their way or partly here.
    pub assemblies: usize,
    /// Fetches in flight.
    pub fetches: usize,
    /// Requests that wait for bytes.
    pub waiting: usize,
    /// Copies out of objects that are on their way.
    pub holds: usize,
    /// Pages of the arena in use.
    pub arena_pages: u32,
    /// The medium.
    pub medium: MediumUsage,
}

impl AgentStats {
    /// All numbers, those of the medium included: name, meaning, whether it may fall, value.
    #[must_use]
    pub fn list(&self) -> Vec<(&'static str, &'static str, bool, u64)> {
        let count = |number: usize| u64::try_from(number).unwrap_or(u64::MAX);
        vec![
            ("asked_bytes", "Bytes that clients asked for.", false, self.asked_bytes),
            (
                "wire_bytes",
                "Bytes brought from peers, background ones included.",
                false,
                self.wire_bytes,
            ),
            ("pulled_bytes", "Bytes brought in the background.", false, self.pulled_bytes),
            ("arena_bytes", "Bytes that went through the arena.", false, self.arena_bytes),
            (
                "joined_bytes",
                "Bytes asked for while somebody else was fetching them.",
                false,
                self.joined_bytes,
            ),
            ("local_keys", "Keys served from this node.", false, self.local),
            (
                "joined_keys",
                "Keys served from bytes that somebody else was fetching.",
                false,
                self.joined,
            ),
            ("remote_keys", "Keys served from peers.", false, self.remote),
            (
                "remote_calls",
                "Times that requests were sent to one peer together.",
                false,
                self.remote_calls,
            ),
            ("exchanges", "Exchanges with peers, whatever they were.", false, self.exchanges),
            ("route_calls", "Questions to the directory about keys.", false, self.route_calls),
            ("failed_fetches", "Fetches that failed.", false, self.failed_fetches),
            ("stale", "Fetches of something that was not there any more.", false, self.stale),
            (
                "dropped_pulls",
                "Background pulls not begun because too many waited.",
                false,
                self.dropped_pulls,
            ),
            (
                "lost_copies",
                "Copies of objects put here that could not be put elsewhere.",
                false,
                self.lost_copies,
            ),
            (
                "lost_announcements",
                "Announcements the directory did not take.",
                false,
                self.lost_announcements,
            ),
            ("arena_wait_ns", "Time that calls waited for the arena.", false, self.arena_wait_ns),
            ("assemblies", "Objects on their way or partly here.", true, count(self.assemblies)),
            ("fetches_in_flight", "Fetches in flight.", true, count(self.fetches)),
            ("waiting", "Requests that wait for bytes.", true, count(self.waiting)),
            ("holds", "Copies out of objects that are on their way.", true, count(self.holds)),
            ("arena_pages", "Pages of the arena in use.", true, u64::from(self.arena_pages)),
            ("capacity_bytes", "Bytes the medium has.", true, self.medium.capacity_bytes),
            (
                "committed_bytes",
                "Bytes of objects that can be read.",
                true,
                self.medium.committed_bytes,
            ),
            (
                "pending_bytes",
                "Bytes of objects that are being written.",
                true,
                self.medium.pending_bytes,
            ),
            (
                "quarantine_bytes",
                "Bytes that nobody may use until an operation has ended.",
                true,
                self.medium.quarantine_bytes,
            ),
            ("leases", "Leases held on objects.", true, self.medium.leases),
        ]
    }
}

#[derive(Debug, Default)]
struct Counters {
    asked_bytes: AtomicU64,
    wire_bytes: AtomicU64,
    pulled_bytes: AtomicU64,
    arena_bytes: AtomicU64,
    joined_bytes: AtomicU64,
    local: AtomicU64,
    joined: AtomicU64,
    remote: AtomicU64,
    remote_calls: AtomicU64,
    failed_fetches: AtomicU64,
    stale: AtomicU64,
    lost_copies: AtomicU64,
}

/// See the module description. Dropping it ends everything: calls end as `PeerDown`, connections are
/// closed, and when that has returned nothing of it writes any memory.
pub struct Agent {
    ranks: Vec<RankServer>,
    inner: Arc<Inner>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    options: Options,
    /// Tells this agent from any other one at the same place.
    run: Token,
    medium: HostMedium,
    /// The medium's segments and the arena, in the order of their numbers.
    segments: Arc<[Memory]>,
    /// The same as it can be passed on, if it can.
    shared: Option<Shared>,
    tcp: Arc<TcpEngine>,
    shm: ShmEngine,
    /// Those segments, as each engine names them.
    tcp_segments: Vec<RegionId>,
    shm_segments: Vec<RegionId>,
    /// Peers of this node, whose memory is mapped here.
    mapped: Mutex<HashMap<Token, Vec<RegionId>>>,
    /// Those that say when they have ended.
    neighbours: Mutex<Vec<Rank>>,
    ended: Arc<Ended>,
    links: Links,
    routes: Routes,
    table: Mutex<Table>,
    arena: Arc<Arena>,
    puller: Puller,
    toucher: Toucher,
    announcer: Arc<Announcer>,
    server: Mutex<Option<TcpServer>>,
    /// Foreground plans in flight.
    foreground: AtomicUsize,
    bells: Mutex<Vec<Arc<Bell>>>,
    stopping: AtomicBool,
    counters: Counters,
}

/// Memory that other processes can map.
#[derive(Clone, Debug)]
pub(crate) struct Shared {
    medium: Segments,
    arena: Option<Segments>,
}

impl Shared {
    pub(crate) fn segments(&self) -> Vec<&Segments> {
        std::iter::once(&self.medium).chain(&self.arena).collect()
    }

    pub(crate) fn fds(&self) -> usize {
        self.segments().iter().map(|segments| segments.fds().len()).sum()
    }

    pub(crate) fn geometries(&self) -> Vec<Vec<u8>> {
        self.segments().iter().map(|segments| segments.geometry().encode()).collect()
    }
}

/// Wakes the agent when an engine has something to tell.
struct Woken(Weak<Inner>);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if let Some(inner) = self.0.upgrade() {
            inner.turn();
        }
    }
}

impl Agent {
    /// Where it serves others, if it does.
    #[must_use]
    pub fn address(&self) -> Option<SocketAddr> {
        lock(&self.inner.server).as_ref().map(TcpServer::address)
    }

    /// Names this run for others, if it serves them.
    #[must_use]
    pub fn boot(&self) -> Option<Token> {
        self.inner.boot()
    }

    /// What it keeps.
    #[must_use]
    pub fn medium(&self) -> &HostMedium {
        &self.inner.medium
    }

    /// A client in this process. Its sources and destinations are regions of `engine`, whose completions
    /// it takes over.
    ///
    /// # Errors
    /// As [`TransferEngine::register`]: the node's memory is registered there.
    pub fn client(&self, engine: Arc<dyn TransferEngine>) -> Result<PoolClient, TransferError> {
        PoolClient::new(Box::new(Arc::clone(&self.inner)), engine)
    }

    /// The pool as a storage backend of this process.
    ///
    /// # Errors
    /// When a thread is refused.
    pub fn backend(&self, options: PoolBackendOptions) -> Result<PoolBackend, TransferError> {
        PoolBackend::start(Arc::new(Arc::clone(&self.inner)), None, options)
    }

    /// Lets ranks in other processes in, at a socket file of this name, which must not exist and goes with
    /// the agent. They are its clients by [`PoolClient::connect`].
    ///
    /// # Errors
    /// `Memory` when the medium or the arena cannot be passed on, `System` when the socket cannot be made.
    pub fn serve_ranks(&mut self, path: &Path) -> Result<(), AgentError> {
        let shared = self.inner.shared.clone().ok_or(AgentError::Memory)?;
        let server = RankServer::start(&self.inner, shared, path).map_err(|error| {
            AgentError::System(format!("cannot serve ranks at {}: {error}", path.display()))
        })?;
        self.ranks.push(server);
        Ok(())
    }

    /// As [`attach_neighbour`](Self::attach_neighbour) for the agent that serves ranks at `path`.
    ///
    /// # Errors
    /// As [`PoolClient::connect`]; `PeerDown` when it serves no other nodes.
    pub fn attach_neighbour_at(&self, path: &Path) -> Result<(), TransferError> {
        let neighbour = Rank::connect(path)?;
        let boot = neighbour.boot().ok_or_else(|| {
            TransferError::new(ErrorKind::PeerDown, "the agent serves no other nodes")
        })?;
        self.attach_neighbour(boot, &neighbour.segments())?;
        let inner = Arc::downgrade(&self.inner);
        neighbour.when_over(move || {
            if let Some(inner) = inner.upgrade() {
                inner.detach(boot);
            }
        });
        let mut neighbours = lock(&self.inner.neighbours);
        neighbours.retain(|known| !known.is_over());
        neighbours.push(neighbour);
        Ok(())
    }

    /// Its memory is mapped here no longer; what is being copied from it holds its part until it has ended.
    /// One that was attached [by its socket](Self::attach_neighbour_at) goes by itself when it has ended.
    pub fn detach_neighbour(&self, boot: Token) {
        self.inner.detach(boot);
    }

    /// From now on objects of this run of a peer are copied straight out of its memory, which is mapped
    /// here: all segments of its medium, in order.
    ///
    /// # Errors
    /// As [`ShmEngine::attach`].
    pub fn attach_neighbour(&self, boot: Token, segments: &[Memory]) -> Result<(), TransferError> {
        let shm = &self.inner.shm;
        let number = shm.add_peer(Access::Read)?;
        let mut regions = Vec::with_capacity(segments.len());
        for memory in segments {
            match shm.attach(number, memory.clone()) {
                Ok(region) => regions.push(region),
                Err(error) => {
                    for region in regions {
                        // Nobody knows it yet.
                        let _ = shm.deregister(region);
                    }
                    return Err(error);
                }
            }
        }
        lock(&self.inner.mapped).insert(boot, regions);
        Ok(())
    }

    /// The peers that the directory knows, and how their memory is used, as far as they answer.
    ///
    /// # Errors
    /// The directory's.
    pub fn peers(
        &self,
        deadline: Instant,
    ) -> Result<Vec<(Member, Option<PeerUsage>)>, DirectoryError> {
        self.inner.peers(deadline)
    }

    /// Gives up everything that is only partly here and that nobody waits for.
    pub fn forget_parts(&self) {
        self.inner.with(Table::reclaim_all);
    }

    /// What it has done, and how things stand.
    #[must_use]
    pub fn stats(&self) -> AgentStats {
        self.inner.stats()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let inner = &self.inner;
        inner.stopping.store(true, Ordering::SeqCst);
        inner.puller.stop();
        inner.toucher.stop();
        inner.announcer.ring();
        inner.with(Table::close);
        inner.arena.close();
        let bells = std::mem::take(&mut *lock(&inner.bells));
        bells.iter().for_each(|bell| bell.stop());
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a thread of the remote pool's agent ended by a panic");
            }
        }
        let server = lock(&inner.server).take();
        if let Some(server) = server {
            let goodbye = Instant::now() + Duration::from_secs(1);
            let directory = inner.routes.directory();
            if let Err(error) = directory.remove_peer(&inner.options.me, server.boot(), goodbye) {
                tracing::debug!(%error, "the directory was not told that this peer leaves");
            }
        }
        // Ends what is in flight.
        inner.links.close();
        // Ranks may still copy: nothing writes what they copy from, now and later.
        self.ranks.clear();
        let neighbours = std::mem::take(&mut *lock(&inner.neighbours));
        drop(neighbours);
        inner.turn();
        inner.with(Table::reclaim_all);
        inner.give_back();
    }
}

impl fmt::Debug for Agent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Agent")
            .field("me", &self.inner.options.me)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

impl Inner {
    pub(crate) fn segments(&self) -> &Arc<[Memory]> {
        &self.segments
    }

    fn detach(&self, boot: Token) {
        let regions = lock(&self.mapped).remove(&boot).unwrap_or_default();
        for region in regions {
            if let Err(error) = self.shm.deregister(region) {
                tracing::warn!(%error, "a neighbour's segment could not be detached");
            }
        }
    }

    pub(crate) fn run(&self) -> Token {
        self.run
    }

    pub(crate) fn boot(&self) -> Option<Token> {
        lock(&self.server).as_ref().map(TcpServer::boot)
    }

    fn stats(&self) -> AgentStats {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &self.counters;
        let (assemblies, fetches, waiting, holds) = lock(&self.table).sizes();
        AgentStats {
            asked_bytes: load(&counters.asked_bytes),
            wire_bytes: load(&counters.wire_bytes),
            pulled_bytes: load(&counters.pulled_bytes),
            arena_bytes: load(&counters.arena_bytes),
            joined_bytes: load(&counters.joined_bytes),
            local: load(&counters.local),
            joined: load(&counters.joined),
            remote: load(&counters.remote),
            remote_calls: load(&counters.remote_calls),
            exchanges: self.tcp.stats().exchanges,
            route_calls: self.routes.calls(),
            failed_fetches: load(&counters.failed_fetches),
            stale: load(&counters.stale),
            dropped_pulls: self.puller.dropped(),
            lost_copies: load(&counters.lost_copies),
            lost_announcements: self.announcer.lost(),
            arena_wait_ns: self.arena.wait_ns(),
            assemblies,
            fetches,
            waiting,
            holds,
            arena_pages: self.arena.usage().0,
            medium: self.medium.medium().usage(),
        }
    }

    /// Runs on the table; what that leaves to be done is done without its lock.
    fn with<R>(self: &Arc<Self>, run: impl FnOnce(&mut Table) -> R) -> R {
        let mut table = lock(&self.table);
        let result = run(&mut table);
        let after = table.take_after();
        drop(table);
        let After { tells, sources, bells, committed } = after;
        let mut tells = tells.into_iter().peekable();
        while let Some(Tell { bell, index, what }) = tells.next() {
            let told = |what| match what {
                News::Ready(id) => Told::Ready(Pin::assembly(self, id)),
                News::Failed(error, doomed) => Told::Failed(error, doomed),
                News::Again => Told::Again,
            };
            // A plan brings what one call waits for, mostly.
            let mut together = vec![(index, told(what))];
            while let Some(next) = tells.next_if(|next| Arc::ptr_eq(&next.bell, &bell)) {
                together.push((next.index, told(next.what)));
            }
            bell.tell_all(together);
        }
        drop((sources, bells));
        if committed {
            self.announcer.ring();
        }
        result
    }

    /// A call has begun.
    fn enter(&self, bell: &Arc<Bell>) {
        lock(&self.bells).push(Arc::clone(bell));
        if self.stopping.load(Ordering::SeqCst) {
            bell.stop();
        }
    }

    fn exit(&self, bell: &Arc<Bell>) {
        let mut bells = lock(&self.bells);
        if let Some(at) = bells.iter().position(|known| Arc::ptr_eq(known, bell)) {
            let gone = bells.swap_remove(at);
            drop(bells);
            drop(gone);
        }
    }

    fn link(&self, record: &Record, deadline: Instant) -> Result<Link, LinkError> {
        let member = match self.routes.member(&record.peer, record.boot, deadline) {
            Ok(member) => member.ok_or(LinkError::Down)?,
            Err(DirectoryError::Timeout) => return Err(LinkError::Timeout),
            Err(_) => return Err(LinkError::Down),
        };
        self.links.link(&member, deadline)
    }

    /// The way to one storing of an object.
    fn source(
        &self,
        key: &ObjectKey,
        mut record: Record,
        link: Link,
        deadline: Instant,
    ) -> Result<Source, LinkError> {
        let mapped = lock(&self.mapped).get(&record.boot).cloned();
        let Some(regions) = mapped else {
            let region = link.attach_read(key, record.generation, record.len)?;
            return Ok(Source::new(record, link, self.attached(region)));
        };
        let asked = Instant::now();
        let leased = link.lease(&[*key], deadline)?.pop().ok_or(LinkError::Broken)?;
        let mut leased = leased.map_err(|outcome| match outcome {
            GetOutcome::Busy => LinkError::Busy,
            _ => LinkError::Missing,
        })?;
        // From here on it is given back, whatever happens.
        let lease = leased.lease;
        let mut mapped = Mapped {
            pages: std::mem::take(&mut leased.pages),
            until: leased.good_until(asked),
            lease,
            ended: Arc::clone(&self.ended),
        };
        let known = mapped.pages.pages.iter_mut().all(|page| {
            let region = usize::try_from(page.region.index).ok().and_then(|i| regions.get(i));
            region.is_some_and(|region| {
                page.region = *region;
                true
            })
        });
        let same = mapped.pages.len == record.len;
        // The owner itself says what it has now.
        record.generation = leased.generation;
        let source = Source::new(record, link, Way::Shm(mapped));
        match (known, same) {
            (true, true) => Ok(source),
            (true, false) => Err(LinkError::Restarted),
            (false, _) => Err(LinkError::Broken),
        }
    }

    /// Gives leases of others back.
    fn give_back(&self) {
        let mut by_link: Vec<(Link, Vec<u64>)> = Vec::new();
        for (link, lease) in self.ended.take() {
            match by_link.iter_mut().find(|(known, _)| known.is_same(&link)) {
                Some((_, leases)) => leases.push(lease),
                None => by_link.push((link, vec![lease])),
            }
        }
        for (link, leases) in by_link {
            // If this fails, they run out.
            let _ = link.release(&leases, Instant::now() + Duration::from_secs(1));
        }
    }

    /// The rest of an object will probably be asked for.
    fn pull(&self, assembly: u64) {
        if self.options.prefetch && !self.stopping.load(Ordering::SeqCst) {
            self.puller.want(assembly);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while one is held.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
