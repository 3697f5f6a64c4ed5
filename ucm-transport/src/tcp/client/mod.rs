//! The asking side: a transfer engine whose sources or destinations lie with peers.
//!
//! **Invariant:** a plan that was accepted ends exactly once, whatever becomes of its peer, and not
//! later than its deadline plus the time that one non-blocking system call takes.

mod job;
mod lane;
mod peer;
mod thread;
mod work;

use std::{
    collections::HashMap,
    fmt,
    net::SocketAddr,
    os::fd::OwnedFd,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::Waker,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use rustix::event::epoll;
use ucm_data::Token;

use self::{
    job::{Exchange, Job},
    lane::Lane,
    peer::{LaneRules, Peer},
};
use super::{
    Secret, bell,
    breaker::Breaker,
    handshake,
    sys::Scatter,
    tls::TlsClient,
    wire::{Body, DESCRIPTOR_BYTES, PeerRange, RequestKind},
};
use crate::{
    Capabilities, Completion, ErrorKind, Hold, Location, Memory, PlanLimits, Quiesce, Region,
    RegionId, RegionLease, RegionTable, Rejected, Ticket, Transfer, TransferEngine, TransferError,
    TransferPlan, planner,
};

/// Settings of a [`TcpEngine`].
#[derive(Clone, Debug)]
#[must_use = "call `build`"]
pub struct TcpEngineBuilder {
    max_in_flight: usize,
    timeout: Duration,
    connect_timeout: Duration,
    exchange_bytes: u64,
    failures: u32,
    rules: LaneRules,
}

impl TcpEngineBuilder {
    /// Plans and calls accepted but not yet polled; one more is refused as `Busy`. Default 4096.
    pub fn max_in_flight(mut self, plans: usize) -> Self {
        self.max_in_flight = plans.max(1);
        self
    }

    /// How long a plan may take that was given no deadline. Default 30 s.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// How long connecting and greeting may take. Default 2 s.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// Most bytes of one exchange; longer plans are split. Default 32 MiB, and never more than a
    /// peer grants.
    pub fn exchange_bytes(mut self, bytes: u64) -> Self {
        self.exchange_bytes = bytes.max(1);
        self
    }

    /// Connections to one peer at most. Default 4.
    pub fn max_lanes(mut self, lanes: usize) -> Self {
        self.rules.max_lanes = lanes.max(1);
        self
    }

    /// A further lane is opened when each one has several exchanges of more bytes than this to do.
    /// Default 4 MiB.
    pub fn spread_bytes(mut self, bytes: u64) -> Self {
        self.rules.spread_bytes = bytes;
        self
    }

    /// Lanes that were idle for longer are replaced before they are used. Default 5 s.
    pub fn max_idle(mut self, idle: Duration) -> Self {
        self.rules.max_idle = idle;
        self
    }

    /// Failures in a row after which a peer is left alone for a while. Default 2.
    pub fn breaker(mut self, failures: u32) -> Self {
        self.failures = failures;
        self
    }

    /// Starts the engine: one thread, which sleeps while nothing is due.
    ///
    /// # Errors
    /// `Failed` when the operating system refuses the thread or a descriptor.
    pub fn build(self) -> Result<TcpEngine, TransferError> {
        let failed = |what: &str, error: &dyn fmt::Display| {
            TransferError::new(ErrorKind::Failed, format!("{what}: {error}"))
        };
        let os = |error: std::io::Error| failed("no descriptor for the tcp engine", &error);
        let boot = Token::random().map_err(|error| failed("no boot token", &error))?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|e| os(e.into()))?;
        let bell = bell::new().map_err(os)?;
        let lead_bell = bell::new().map_err(os)?;
        let data = epoll::EventData::new_u64(thread::BELL);
        epoll::add(&epoll, &bell, data, epoll::EventFlags::IN).map_err(|e| os(e.into()))?;
        let epoll_of_thread = epoll.try_clone().map_err(os)?;
        let inner = Arc::new(Inner {
            boot,
            began: Instant::now(),
            max_in_flight: self.max_in_flight,
            timeout: self.timeout,
            connect_timeout: self.connect_timeout,
            failures: self.failures,
            rules: self.rules,
            exchange_bytes: AtomicU64::new(self.exchange_bytes),
            max_ranges: AtomicU64::new(u64::from(u32::MAX)),
            max_frame: AtomicU64::new(u64::from(u32::MAX)),
            regions: RegionTable::default(),
            peers: RwLock::default(),
            lanes: Mutex::default(),
            busy: Mutex::default(),
            next_lane: AtomicU64::new(thread::BELL + 1),
            ends: Mutex::new(Ends { next_ticket: 1, ..Ends::default() }),
            ended: Condvar::new(),
            threaded: AtomicBool::new(false),
            leading: AtomicBool::new(false),
            poisoned: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            earliest: AtomicU64::new(u64::MAX),
            epoll,
            bell,
            lead_bell,
            stats: Counters::default(),
        });
        let weak = Arc::downgrade(&inner);
        let thread = std::thread::Builder::new()
            .name("ucm-tcp".into())
            .spawn(move || thread::run(&weak, &epoll_of_thread))
            .map_err(|error| failed("no thread for the tcp engine", &error))?;
        Ok(TcpEngine { inner, thread: Some(thread) })
    }
}

/// Moves bytes between host regions of this process and memory of peers that a
/// [`TcpServer`](super::TcpServer) serves.
///
/// Without a waker, whoever waits ([`quiesce`](TransferEngine::quiesce), [`transfer`](Self::transfer),
/// [`call`](Self::call)) or polls reads the sockets itself; with one, a thread of the engine does.
/// Dropping the engine closes all lanes; when that has returned, nothing of it touches any memory.
pub struct TcpEngine {
    inner: Arc<Inner>,
    thread: Option<JoinHandle<()>>,
}

/// A run of a peer, as it answered when it was connected to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TcpPeer {
    index: u32,
    boot: Token,
}

impl TcpPeer {
    /// The boot token of this run.
    #[must_use]
    pub fn boot(&self) -> Token {
        self.boot
    }

    /// Where its memory lies, for engines.
    #[must_use]
    pub fn location(&self) -> Location {
        Location::Peer(self.index)
    }
}

/// How a peer is doing.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PeerState {
    /// Connections that are open.
    pub lanes: usize,
    /// Exchanges that wait for a lane or for credits.
    pub queued: usize,
    /// The circuit is open: after failures nothing is tried for a while.
    pub circuit_open: bool,
    /// Another run answers at its address, or it was disconnected.
    pub gone: bool,
}

/// What an engine has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TcpStats {
    /// Exchanges that got their whole reply.
    pub exchanges: u64,
    /// Exchanges repeated on another lane.
    pub resent: u64,
    /// Lanes opened, and closed again.
    pub lanes_opened: u64,
    /// Lanes closed, for whatever reason.
    pub lanes_closed: u64,
    /// Lanes closed because an exchange did not end in time.
    pub timeouts: u64,
}

#[derive(Debug, Default)]
struct Counters {
    exchanges: AtomicU64,
    resent: AtomicU64,
    lanes_opened: AtomicU64,
    lanes_closed: AtomicU64,
    timeouts: AtomicU64,
}

/// What a region is to the engine.
#[derive(Debug)]
enum Attached {
    Local,
    Remote { peer: Arc<Peer>, descriptor: Box<[u8]> },
}

#[derive(Debug)]
struct Inner {
    boot: Token,
    began: Instant,
    max_in_flight: usize,
    timeout: Duration,
    connect_timeout: Duration,
    failures: u32,
    rules: LaneRules,
    /// Limits of an exchange: the least that any peer grants.
    exchange_bytes: AtomicU64,
    max_ranges: AtomicU64,
    max_frame: AtomicU64,
    regions: RegionTable<Attached>,
    /// By the number in their location; `None` when disconnected.
    peers: RwLock<Vec<Option<Arc<Peer>>>>,
    /// All lanes, for the engine's thread.
    lanes: Mutex<HashMap<u64, Arc<Lane>>>,
    /// Lanes with something in flight, for whoever leads.
    busy: Mutex<Vec<Arc<Lane>>>,
    next_lane: AtomicU64,
    ends: Mutex<Ends>,
    ended: Condvar,
    /// A waker is set: the engine's thread reads.
    threaded: AtomicBool,
    /// Some thread that waits reads.
    leading: AtomicBool,
    poisoned: AtomicBool,
    stopping: AtomicBool,
    /// When something is due next, by [`Inner::clock`].
    earliest: AtomicU64,
    epoll: OwnedFd,
    bell: OwnedFd,
    lead_bell: OwnedFd,
    stats: Counters,
}

#[derive(Debug, Default)]
struct Ends {
    next_ticket: u64,
    jobs: HashMap<Ticket, Arc<Job>>,
    done: Vec<Completion>,
    waker: Option<Waker>,
}

impl TcpEngine {
    /// Default settings.
    pub fn builder() -> TcpEngineBuilder {
        TcpEngineBuilder {
            max_in_flight: 4096,
            timeout: Duration::from_secs(30),
            connect_timeout: Duration::from_secs(2),
            exchange_bytes: 32 << 20,
            failures: 2,
            rules: LaneRules {
                max_lanes: 4,
                spread_bytes: 4 << 20,
                max_idle: Duration::from_secs(5),
            },
        }
    }

    /// Connects to a peer and proves itself. The result stands for this run of the peer; lanes are
    /// made anew as needed, but only to the same run.
    ///
    /// # Errors
    /// `PeerDown` when nobody answers by the deadline, `Denied` when secrets or versions differ.
    pub fn connect(
        &self,
        address: SocketAddr,
        secret: &Secret,
        deadline: Instant,
    ) -> Result<TcpPeer, TransferError> {
        self.connect_with(address, secret, None, deadline)
    }

    /// As [`connect`](Self::connect), with TLS around everything: the bytes cannot be read or changed
    /// on the way. Costs a copy and the cipher.
    ///
    /// # Errors
    /// As [`connect`](Self::connect); a certificate that is not trusted is `PeerDown`.
    #[cfg(feature = "tls")]
    pub fn connect_tls(
        &self,
        address: SocketAddr,
        secret: &Secret,
        tls: &TlsClient,
        deadline: Instant,
    ) -> Result<TcpPeer, TransferError> {
        self.connect_with(address, secret, Some(tls.clone()), deadline)
    }

    fn connect_with(
        &self,
        address: SocketAddr,
        secret: &Secret,
        tls: Option<TlsClient>,
        deadline: Instant,
    ) -> Result<TcpPeer, TransferError> {
        let inner = &self.inner;
        let greeted = handshake::connect(address, secret, tls.as_ref(), inner.boot, deadline)?;
        let (boot, grant) = (greeted.boot, greeted.grant);
        inner.exchange_bytes.fetch_min(grant.window, Ordering::SeqCst);
        inner.max_ranges.fetch_min(u64::from(grant.ranges), Ordering::SeqCst);
        inner.max_frame.fetch_min(u64::from(grant.frame), Ordering::SeqCst);
        let socket = greeted
            .socket()
            .map_err(|e| TransferError::new(ErrorKind::PeerDown, format!("{address}: {e}")))?;
        let mut peers = inner.peers.write().unwrap_or_else(PoisonError::into_inner);
        let index = u32::try_from(peers.len()).map_err(|_| {
            TransferError::new(ErrorKind::Registration, "4294967296 peers were connected")
        })?;
        let breaker = Breaker::new(inner.failures);
        let peer = Peer::new(address, secret.clone(), tls, boot, breaker);
        peers.push(Some(Arc::clone(&peer)));
        drop(peers);
        let lane = inner.open_lane(&peer, socket, grant);
        peer.lock().lanes.push(lane);
        Ok(TcpPeer { index, boot })
    }

    /// Lets a peer go: closes its lanes, ends what is in flight as `PeerDown`. Regions attached to it
    /// stay until they are deregistered, and are of no use.
    pub fn disconnect(&self, peer: TcpPeer) {
        let taken = {
            let mut peers = self.inner.peers.write().unwrap_or_else(PoisonError::into_inner);
            let at = usize::try_from(peer.index).unwrap_or(usize::MAX);
            peers.get_mut(at).and_then(Option::take)
        };
        if let Some(peer) = taken {
            self.inner.let_go(&peer, "the peer was disconnected");
        }
    }

    /// Makes `len` bytes with a peer usable in plans: what the descriptor names there, as the peer's
    /// owner understands it. Nothing is sent. Given back by
    /// [`deregister`](TransferEngine::deregister).
    ///
    /// # Errors
    /// `Invalid` for a descriptor over 256 bytes or no bytes at all, `PeerDown` for a peer that was
    /// disconnected.
    pub fn attach(
        &self,
        peer: &TcpPeer,
        descriptor: &[u8],
        len: u64,
    ) -> Result<RegionId, TransferError> {
        if descriptor.len() > DESCRIPTOR_BYTES {
            return Err(TransferError::invalid(format!(
                "a descriptor of {} bytes; at most {DESCRIPTOR_BYTES} fit",
                descriptor.len()
            )));
        }
        let len = usize::try_from(len)
            .map_err(|_| TransferError::invalid(format!("{len} bytes are more than memory")))?;
        let location = peer.location();
        let peer = self.inner.peer(peer)?;
        let attached = Attached::Remote { peer, descriptor: descriptor.into() };
        self.inner.regions.register(Memory::elsewhere(len, location), attached)
    }

    /// As [`submit`](TransferEngine::submit), with a deadline of its own: at the latest then the
    /// plan ends, as `Timeout`.
    ///
    /// # Errors
    /// As [`submit`](TransferEngine::submit).
    pub fn submit_until(&self, plan: TransferPlan, deadline: Instant) -> Result<Ticket, Rejected> {
        self.inner.accept(plan, deadline, false).map(|job| job.ticket)
    }

    /// Runs a plan to its end, which is returned here and not by `poll`.
    ///
    /// # Errors
    /// As [`submit`](TransferEngine::submit).
    pub fn transfer(&self, plan: TransferPlan, deadline: Instant) -> Result<Completion, Rejected> {
        let job = self.inner.accept(plan, deadline, true)?;
        Ok(self.inner.await_direct(&job).0)
    }

    /// Asks the peer's owner something; blocks until it has answered.
    ///
    /// # Errors
    /// What the peer refused, or `Timeout`, `PeerDown`, `Stale`; `Invalid` for a request longer than
    /// the peer takes.
    pub fn call(
        &self,
        peer: &TcpPeer,
        request: &[u8],
        deadline: Instant,
    ) -> Result<Vec<u8>, TransferError> {
        let inner = &self.inner;
        let peer = inner.peer(peer)?;
        let limit = inner.max_frame.load(Ordering::SeqCst);
        if request.len() as u64 > limit {
            return Err(TransferError::invalid(format!(
                "a call of {} bytes; the peer takes {limit}",
                request.len()
            )));
        }
        let mut frame = Body::new(0).finish();
        frame.extend_from_slice(request);
        let no_lease = inner.regions.view().lease(&[])?;
        let job = inner.admit(deadline, true, no_lease, (1, 0), &mut Vec::new())?;
        let exchange = Exchange {
            job: Arc::clone(&job),
            kind: RequestKind::Call,
            frame,
            pieces: Scatter::default(),
            payload: 0,
            resent: false,
        };
        inner.start(&peer, vec![exchange]);
        let (completion, reply) = inner.await_direct(&job);
        completion.result.map(|_| reply)
    }

    /// Ends a plan as `Cancelled`, unless it ends otherwise first. Lanes that carry it are closed;
    /// when this returns, nothing of it touches any memory. `false` when it has ended already.
    pub fn cancel(&self, ticket: Ticket) -> bool {
        let job = self.inner.ends().jobs.get(&ticket).cloned();
        let Some(job) = job else { return false };
        job.cancel();
        self.inner.expire(Instant::now());
        // The last exchange may be with another thread that is about to tell its end.
        let far = Instant::now() + self.inner.timeout;
        self.inner.wait_until(far, |ends| !ends.jobs.contains_key(&ticket))
    }

    /// How a peer is doing; `None` for one that was disconnected.
    #[must_use]
    pub fn peer_state(&self, peer: &TcpPeer) -> Option<PeerState> {
        let peer = self.inner.peer(peer).ok()?;
        let state = peer.lock();
        Some(PeerState {
            lanes: state.lanes.len(),
            queued: state.queue.len(),
            circuit_open: state.breaker.is_open(),
            gone: state.gone.is_some(),
        })
    }

    /// What the engine has done.
    #[must_use]
    pub fn stats(&self) -> TcpStats {
        let stats = &self.inner.stats;
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        TcpStats {
            exchanges: load(&stats.exchanges),
            resent: load(&stats.resent),
            lanes_opened: load(&stats.lanes_opened),
            lanes_closed: load(&stats.lanes_closed),
            timeouts: load(&stats.timeouts),
        }
    }
}

impl Inner {
    fn accept(
        self: &Arc<Self>,
        mut plan: TransferPlan,
        deadline: Instant,
        direct: bool,
    ) -> Result<Arc<Job>, Rejected> {
        match self.accept_in_place(&mut plan, deadline, direct) {
            Ok(job) => Ok(job),
            Err(error) => Err(Rejected { plan, error }),
        }
    }

    fn accept_in_place(
        self: &Arc<Self>,
        plan: &mut TransferPlan,
        deadline: Instant,
        direct: bool,
    ) -> Result<Arc<Job>, TransferError> {
        if self.poisoned.load(Ordering::SeqCst) {
            let text = "a waker or the thread of the tcp engine failed; make a new engine";
            return Err(TransferError::new(ErrorKind::Poisoned, text));
        }
        let most = self.exchange_bytes.load(Ordering::SeqCst);
        let limits = PlanLimits {
            max_item_bytes: most.min(u64::from(u32::MAX)),
            max_group_items: usize::MAX,
            sort: false,
        };
        let (planned, lease) = {
            let view = self.regions.view();
            let planned = planner::plan(&plan.items, limits, |id| view.info(id), reachable)?;
            let lease = view.lease(&planned.regions)?;
            (planned, lease)
        };
        let mut parts: Vec<(Arc<Peer>, Part)> = Vec::new();
        for group in &planned.groups {
            let items = planned.items.get(group.items.clone()).unwrap_or_default();
            self.cut(items, &lease, &mut parts)?;
        }
        let size = (parts.len(), planned.bytes);
        let job = self.admit(deadline, direct, lease, size, &mut plan.holds)?;
        plan.items = Vec::new();
        if parts.is_empty() {
            if let Some(nothing) = job.exchange_ended(Ok(()), Vec::new()) {
                self.finish(&job, nothing);
            }
            return Ok(job);
        }
        for (peer, part) in parts {
            let exchange = Exchange {
                job: Arc::clone(&job),
                kind: part.kind,
                frame: part.body.finish(),
                pieces: part.pieces,
                payload: part.payload,
                resent: false,
            };
            self.start(&peer, vec![exchange]);
        }
        Ok(job)
    }

    /// Cuts items of one pair of locations into requests.
    fn cut(
        &self,
        items: &[Transfer],
        lease: &RegionLease<Attached>,
        parts: &mut Vec<(Arc<Peer>, Part)>,
    ) -> Result<(), TransferError> {
        let most = self.exchange_bytes.load(Ordering::SeqCst);
        let ranges = usize::try_from(self.max_ranges.load(Ordering::SeqCst)).unwrap_or(usize::MAX);
        let frame = usize::try_from(self.max_frame.load(Ordering::SeqCst)).unwrap_or(usize::MAX);
        let mut sides: Option<Sides<'_>> = None;
        let mut part: Option<Part> = None;
        for item in items {
            let same = sides.as_ref().is_some_and(|s| s.is_of(item));
            let side = match &mut sides {
                Some(sides) if same => sides,
                other => other.insert(Sides::of(item, lease)?),
            };
            let descriptor = side.descriptor.len();
            let full = part.as_ref().is_some_and(|part| {
                part.payload + item.len > most
                    || part.ranges >= ranges
                    || part.frame + Body::section_bytes(descriptor, 1) > frame
            });
            if full && let Some(full) = part.take() {
                parts.push((Arc::clone(side.peer), full));
            }
            let fresh = part.is_none();
            let left = items.len().min(ranges);
            let part = part.get_or_insert_with(|| Part::new(side.kind, left));
            if fresh || !same {
                part.body.section(side.descriptor);
                part.frame += Body::section_bytes(descriptor, 0);
            }
            let (far, near) = side.ends(item);
            // Cut to 32 bits by the planner.
            let len = u32::try_from(item.len).unwrap_or(u32::MAX);
            part.body.range(PeerRange { offset: far, len });
            part.pieces.push(side.near.memory(), near, item.len)?;
            part.frame += Body::section_bytes(0, 1) - Body::section_bytes(0, 0);
            part.ranges += 1;
            part.payload += item.len;
        }
        if let (Some(side), Some(part)) = (sides, part) {
            parts.push((Arc::clone(side.peer), part));
        }
        Ok(())
    }

    fn admit(
        &self,
        deadline: Instant,
        direct: bool,
        lease: RegionLease<Attached>,
        (parts, bytes): (usize, u64),
        holds: &mut Vec<Hold>,
    ) -> Result<Arc<Job>, TransferError> {
        let mut ends = self.ends();
        let in_flight = ends.jobs.len() + ends.done.len();
        if in_flight >= self.max_in_flight {
            return Err(TransferError::new(
                ErrorKind::Busy,
                format!(
                    "{in_flight} plans are in flight or not polled yet, the limit is {}; poll \
                     completions first",
                    self.max_in_flight
                ),
            ));
        }
        let ticket = Ticket(ends.next_ticket);
        ends.next_ticket += 1;
        let holds = std::mem::take(holds);
        let job = Job::new(ticket, deadline, direct, lease, (parts, bytes), holds);
        ends.jobs.insert(ticket, Arc::clone(&job));
        drop(ends);
        self.due_by(deadline);
        Ok(job)
    }

    /// Waits for a direct job, which ends by its deadline at the latest.
    fn await_direct(self: &Arc<Self>, job: &Arc<Job>) -> (Completion, Vec<u8>) {
        loop {
            let far = Instant::now() + Duration::from_secs(3600);
            self.wait_until(far, |ends| !ends.jobs.contains_key(&job.ticket));
            if let Some(end) = job.take_end() {
                return end;
            }
        }
    }

    fn let_go(self: &Arc<Self>, peer: &Arc<Peer>, why: &str) {
        let error = TransferError::new(ErrorKind::PeerDown, why);
        let mut state = peer.lock();
        state.gone.get_or_insert_with(|| error.clone());
        let lanes = std::mem::take(&mut state.lanes);
        drop(state);
        for lane in lanes {
            self.close(&lane, &error, false);
        }
        self.pump(peer);
    }

    fn peer(&self, peer: &TcpPeer) -> Result<Arc<Peer>, TransferError> {
        let peers = self.peers.read().unwrap_or_else(PoisonError::into_inner);
        let at = usize::try_from(peer.index).unwrap_or(usize::MAX);
        let found = peers.get(at).and_then(Option::as_ref).filter(|p| p.boot == peer.boot);
        found.cloned().ok_or_else(|| {
            TransferError::new(ErrorKind::PeerDown, "the peer was disconnected, or is another's")
        })
    }

    fn all_peers(&self) -> Vec<Arc<Peer>> {
        let peers = self.peers.read().unwrap_or_else(PoisonError::into_inner);
        peers.iter().flatten().cloned().collect()
    }

    fn is_threaded(&self) -> bool {
        self.threaded.load(Ordering::SeqCst)
    }

    fn ends(&self) -> MutexGuard<'_, Ends> {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lanes(&self) -> MutexGuard<'_, HashMap<u64, Arc<Lane>>> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn busy(&self) -> MutexGuard<'_, Vec<Arc<Lane>>> {
        self.busy.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request under construction.
struct Part {
    kind: RequestKind,
    body: Body,
    pieces: Scatter,
    payload: u64,
    ranges: usize,
    frame: usize,
}

impl Part {
    fn new(kind: RequestKind, ranges: usize) -> Self {
        let ranges = ranges.min(1 << 16);
        let (body, pieces) = (Body::new(ranges), Scatter::with_capacity(ranges + 1));
        Self { kind, body, pieces, payload: 0, ranges: 0, frame: 0 }
    }
}

/// The two regions of an item: ours, and the peer's.
struct Sides<'a> {
    kind: RequestKind,
    src: RegionId,
    dst: RegionId,
    near: &'a Region<Attached>,
    peer: &'a Arc<Peer>,
    descriptor: &'a [u8],
}

impl<'a> Sides<'a> {
    fn of(item: &Transfer, lease: &'a RegionLease<Attached>) -> Result<Self, TransferError> {
        let find = |id| lease.find(id).ok_or_else(|| TransferError::stale(id));
        let (src, dst) = (find(item.src.region)?, find(item.dst.region)?);
        let (kind, far, near) = match (src.attached(), dst.attached()) {
            (Attached::Remote { .. }, Attached::Local) => (RequestKind::Read, src, dst),
            _ => (RequestKind::Write, dst, src),
        };
        let Attached::Remote { peer, descriptor } = far.attached() else {
            return Err(TransferError::unsupported("neither end of the item lies with a peer"));
        };
        Ok(Self { kind, src: item.src.region, dst: item.dst.region, near, peer, descriptor })
    }

    fn is_of(&self, item: &Transfer) -> bool {
        self.src == item.src.region && self.dst == item.dst.region
    }

    /// Offsets with the peer, and here.
    fn ends(&self, item: &Transfer) -> (u64, u64) {
        match self.kind {
            RequestKind::Read => (item.src.offset, item.dst.offset),
            _ => (item.dst.offset, item.src.offset),
        }
    }
}

fn reachable(src: Location, dst: Location) -> bool {
    let host = |l| matches!(l, Location::Host | Location::PinnedHost);
    let peer = |l| matches!(l, Location::Peer(_));
    (peer(src) && host(dst)) || (host(src) && peer(dst))
}

impl TransferEngine for TcpEngine {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            max_in_flight: self.inner.max_in_flight,
            hard_completion: true,
            ..Capabilities::unlimited(1)
        }
    }

    fn register(&self, memory: Memory) -> Result<RegionId, TransferError> {
        if !matches!(memory.location(), Location::Host | Location::PinnedHost) {
            return Err(TransferError::unsupported(format!(
                "the tcp engine cannot reach {:?}; memory of peers is attached",
                memory.location()
            )));
        }
        self.inner.regions.register(memory, Attached::Local)
    }

    fn deregister(&self, region: RegionId) -> Result<(), TransferError> {
        self.inner.regions.deregister(region).map(drop)
    }

    fn submit(&self, plan: TransferPlan) -> Result<Ticket, Rejected> {
        self.submit_until(plan, Instant::now() + self.inner.timeout)
    }

    fn poll(&self, out: &mut Vec<Completion>) -> usize {
        let take = |out: &mut Vec<Completion>| {
            let mut ends = self.inner.ends();
            let count = ends.done.len();
            out.append(&mut ends.done);
            (count, ends.jobs.is_empty())
        };
        let (count, idle) = take(out);
        if count > 0 || idle || self.inner.is_threaded() {
            return count;
        }
        self.inner.look();
        take(out).0
    }

    fn set_waker(&self, waker: Option<Waker>) {
        let inner = &self.inner;
        let threaded = waker.is_some();
        let mut ends = inner.ends();
        let earlier = std::mem::replace(&mut ends.waker, waker);
        let now = if ends.done.is_empty() { None } else { ends.waker.clone() };
        drop(ends);
        drop(earlier);
        let lanes = inner.lanes();
        if inner.threaded.swap(threaded, Ordering::SeqCst) != threaded {
            for lane in lanes.values() {
                if threaded {
                    inner.watch(lane);
                } else {
                    let _ = epoll::delete(&inner.epoll, lane.fd());
                    if lane.idle_since().is_none() {
                        inner.busy().push(Arc::clone(lane));
                    }
                }
            }
            drop(lanes);
            // Whoever leads steps down, whoever waits for the thread leads.
            inner.wake_leader();
            // Under the lock, so that nobody is between looking and waiting.
            let ends = inner.ends();
            inner.ended.notify_all();
            drop(ends);
        } else {
            drop(lanes);
        }
        if let Some(waker) = now {
            waker.wake();
        }
    }

    fn quiesce(&self, target: Quiesce, deadline: Instant) -> Result<(), TransferError> {
        let before = Ticket(self.inner.ends().next_ticket);
        let concerns = |ticket: &Ticket, job: &Job| match target {
            Quiesce::All => *ticket < before,
            Quiesce::Ticket(wanted) => *ticket == wanted,
            Quiesce::Region(region) => job.uses(region),
        };
        let left = |ends: &Ends| ends.jobs.iter().filter(|(t, job)| concerns(t, job)).count();
        if self.inner.wait_until(deadline, |ends| left(ends) == 0) {
            return Ok(());
        }
        let count = left(&self.inner.ends());
        let text = format!("{count} plans of {target:?} had not ended at the deadline");
        Err(TransferError::new(ErrorKind::Stuck, text))
    }
}

impl Drop for TcpEngine {
    fn drop(&mut self) {
        let inner = &self.inner;
        inner.stopping.store(true, Ordering::SeqCst);
        bell::ring(&inner.bell);
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
            && thread.join().is_err()
        {
            tracing::error!("the thread of the tcp engine ended by a panic");
        }
        for peer in inner.all_peers() {
            inner.let_go(&peer, "the engine was dropped");
        }
        let mut ends = inner.ends();
        let (done, waker) = (std::mem::take(&mut ends.done), ends.waker.take());
        drop(ends);
        drop((done, waker));
    }
}

impl fmt::Debug for TcpEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TcpEngine")
            .field("boot", &self.inner.boot)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}
