//! The asking side: a transfer engine whose sources or destinations lie with peers.
//!
//! **Invariant:** a plan that was accepted ends exactly once; not before its deadline is over unless
//! all its bytes are there or it has failed, and then only when no adapter touches its memory.

use std::{
    fmt,
    net::SocketAddr,
    os::fd::{BorrowedFd, OwnedFd},
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::Waker,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use rustix::event::epoll;
use ucm_data::Token;

use super::{
    conn::Conn,
    device::RdmaDevice,
    dial::{Dialed, Dialer},
    ends::{Ends, Job},
    peer::{Counters, Moves, Part, Peer},
    pieces::Pieces,
    plan::{self, Attached, Far},
    random,
    sys::{QpCap, Sge},
    thread,
    verbs::{self, Channel, Registered, Rights},
    wire::{Ask, FarRegion},
    work::Limits,
};
use crate::{
    Capabilities, Completion, ErrorKind, Location, Memory, PeerState, PlanLimits, Quiesce,
    RegionId, RegionTable, Rejected, Secret, Ticket, TransferEngine, TransferError, TransferPlan,
    planner,
    tcp::{Breaker, ControlLane, bell},
};

/// Most items of one plan.
const MAX_ITEMS: usize = 1 << 20;
/// Most bytes of one operation.
const MAX_OPERATION_BYTES: u64 = 1 << 30;

/// Settings of an [`RdmaEngine`].
#[derive(Clone, Debug)]
#[must_use = "call `build`"]
pub struct RdmaEngineBuilder {
    device: RdmaDevice,
    max_in_flight: usize,
    timeout: Duration,
    connect_timeout: Duration,
    piece_bytes: usize,
    queue: u32,
    pieces: u32,
    inline_bytes: u32,
    pub(super) spin: Duration,
    failures: u32,
}

impl RdmaEngineBuilder {
    /// Plans accepted but not yet polled; one more is refused as `Busy`. Default 4096.
    pub fn max_in_flight(mut self, plans: usize) -> Self {
        self.max_in_flight = plans.max(1);
        self
    }

    /// How long a plan may take that was given no deadline. Default 30 s.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// How long connecting may take. Default 2 s.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// Most bytes registered by one call: devices refuse very big ones. Default 1 GiB, multiples of
    /// 2 MiB.
    pub fn piece_bytes(mut self, bytes: usize) -> Self {
        self.piece_bytes = bytes;
        self
    }

    /// Operations that a connection may have posted. Default 256; less if the device allows less.
    pub fn queue(mut self, operations: u32) -> Self {
        self.queue = operations.max(2);
        self
    }

    /// Pieces of our memory in one operation. Default 16; less if the device allows less.
    pub fn pieces(mut self, pieces: u32) -> Self {
        self.pieces = pieces.max(1);
        self
    }

    /// Bytes up to which a write goes to the device with its request. Default 128; less if the device
    /// allows less.
    pub fn inline_bytes(mut self, bytes: u32) -> Self {
        self.inline_bytes = bytes;
        self
    }

    /// How long the engine's thread looks for completions without a pause after the last one, before
    /// it lets itself be woken. Default 20 µs.
    pub fn spin(mut self, time: Duration) -> Self {
        self.spin = time;
        self
    }

    /// Failures to connect in a row after which a peer is left alone for a while. Default 2.
    pub fn breaker(mut self, failures: u32) -> Self {
        self.failures = failures;
        self
    }

    /// Starts the engine: one thread, which sleeps while nothing is under way.
    ///
    /// # Errors
    /// `Failed` when the device refuses a queue or the operating system a thread or a descriptor.
    pub fn build(self) -> Result<RdmaEngine, TransferError> {
        let os = |error: std::io::Error| {
            TransferError::new(ErrorKind::Failed, format!("no thread for the rdma engine: {error}"))
        };
        let verb = |error| TransferError::verb(ErrorKind::Failed, error);
        let opened = &self.device.opened;
        let wish = QpCap {
            max_send_wr: self.queue,
            max_send_sge: self.pieces,
            max_inline_data: self.inline_bytes,
            ..QpCap::default()
        };
        // What the device really gives is known only when it has given it.
        let probe = opened.queue_pair(wish, None).map_err(verb)?;
        let cap = QpCap { max_recv_wr: 0, max_recv_sge: 0, ..probe.cap };
        let cap = QpCap {
            max_send_sge: cap.max_send_sge.min(self.pieces.min(opened.info.max_pieces)),
            max_inline_data: cap.max_inline_data.min(self.inline_bytes),
            ..cap
        };
        drop(probe);
        let channel = Channel::new(opened.context()).map_err(verb)?;
        let byte =
            Registered::new(&opened.domain, Memory::host(4096)?, Rights::Own).map_err(verb)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|e| os(e.into()))?;
        let bell = bell::new().map_err(os)?;
        let watch = |fd: BorrowedFd<'_>, number| {
            let data = epoll::EventData::new_u64(number);
            epoll::add(&epoll, fd, data, epoll::EventFlags::IN).map_err(|e| os(e.into()))
        };
        watch(std::os::fd::AsFd::as_fd(&bell), thread::BELL)?;
        watch(std::os::fd::AsFd::as_fd(&*channel), thread::CHANNEL)?;
        let limits = Limits {
            elements: usize::try_from(cap.max_send_sge).unwrap_or(1),
            bytes: opened.info.max_message_bytes.min(MAX_OPERATION_BYTES),
        };
        let dialer = Dialer {
            device: self.device.clone(),
            boot: Token(random()?),
            cap,
            channel,
            byte: Arc::new(byte),
            timeout: self.connect_timeout,
        };
        let inner = Arc::new(Inner {
            dialer,
            limits,
            ends: Ends::new(self.max_in_flight),
            settings: self,
            began: Instant::now(),
            regions: RegionTable::default(),
            peers: RwLock::default(),
            next_conn: AtomicU64::new(thread::FIRST),
            threaded: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            earliest: AtomicU64::new(u64::MAX),
            sleeps: AtomicU64::new(0),
            epoll,
            bell,
        });
        let of_thread = Arc::clone(&inner);
        let thread = std::thread::Builder::new()
            .name("ucm-rdma".into())
            .spawn(move || thread::run(&of_thread))
            .map_err(os)?;
        Ok(RdmaEngine { inner, thread: Some(thread) })
    }
}

/// A run of a peer, as it answered when it was connected to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RdmaPeer {
    index: u32,
    boot: Token,
}

impl RdmaPeer {
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

/// What an engine has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RdmaStats {
    /// Plans that ended.
    pub plans: u64,
    /// Bytes of plans that ended well.
    pub bytes: u64,
    /// Operations posted for plans that read.
    pub reads: u64,
    /// Operations posted for plans that write.
    pub writes: u64,
    /// Calls that posted them.
    pub doorbells: u64,
    /// Operations whose completion was asked for.
    pub signalled: u64,
    /// Completions of nothing that is known; they are ignored.
    pub strangers: u64,
    /// Reads begun again over a new connection.
    pub resent: u64,
    /// Connections made.
    pub connected: u64,
    /// Connections given up.
    pub broken: u64,
    /// Times that the engine's thread went to sleep.
    pub sleeps: u64,
    /// Plans that wait for the device to destroy their queue pair; their memory waits with them.
    pub quarantined: u64,
    /// Objects, and plans with their memory, that were given up for the life of this process.
    pub leaked: u64,
}

#[derive(Debug)]
pub(super) struct Inner {
    pub(super) dialer: Dialer,
    limits: Limits,
    pub(super) settings: RdmaEngineBuilder,
    pub(super) ends: Ends,
    began: Instant,
    regions: RegionTable<Attached>,
    /// By the number in their location; `None` when disconnected.
    peers: RwLock<Vec<Option<Arc<Peer>>>>,
    next_conn: AtomicU64,
    /// A waker is set: the engine's thread looks for completions.
    threaded: AtomicBool,
    pub(super) stopping: AtomicBool,
    /// When something is due next, in nanoseconds since the beginning.
    earliest: AtomicU64,
    pub(super) sleeps: AtomicU64,
    pub(super) epoll: OwnedFd,
    pub(super) bell: OwnedFd,
}

/// Moves bytes between registered memory of this process and memory that an
/// [`RdmaOwner`](super::RdmaOwner) exports, by the network adapter.
///
/// Host memory is registered; memory of other devices by its dmabuf. Dropping the engine destroys all
/// its connections; when that has returned, no adapter touches any memory of its plans.
pub struct RdmaEngine {
    inner: Arc<Inner>,
    thread: Option<JoinHandle<()>>,
}

impl RdmaEngine {
    /// Default settings.
    pub fn builder(device: &RdmaDevice) -> RdmaEngineBuilder {
        RdmaEngineBuilder {
            device: device.clone(),
            max_in_flight: 4096,
            timeout: Duration::from_secs(30),
            connect_timeout: Duration::from_secs(2),
            piece_bytes: 1 << 30,
            queue: 256,
            pieces: 16,
            inline_bytes: 128,
            spin: Duration::from_micros(20),
            failures: 2,
        }
    }

    /// Connects to an owner and proves itself. The result stands for this run of the peer; broken
    /// connections are made anew as needed, but only to the same run.
    ///
    /// # Errors
    /// `PeerDown` when nobody answers by the deadline, over tcp or over RDMA; `Denied` when secrets
    /// or versions differ; `Unsupported` when it serves no memory by RDMA.
    pub fn connect(
        &self,
        address: SocketAddr,
        secret: &Secret,
        deadline: Instant,
    ) -> Result<RdmaPeer, TransferError> {
        let inner = &self.inner;
        inner.ends.check()?;
        let dialed = inner.dialer.dial(inner.conn_number(), address, secret, deadline)?;
        let Dialed { conn, boot, owner } = dialed;
        let mut peers = inner.peers.write().unwrap_or_else(PoisonError::into_inner);
        let index = u32::try_from(peers.len()).map_err(|_| {
            TransferError::new(ErrorKind::Registration, "4294967296 peers were connected")
        })?;
        let breaker = Breaker::new(inner.settings.failures);
        let peer = Peer::new(address, secret.clone(), (boot, owner), breaker, conn);
        peers.push(Some(Arc::clone(&peer)));
        drop(peers);
        inner.watch(&peer);
        // The thread is to be told of its completions.
        bell::ring(&inner.bell);
        Ok(RdmaPeer { index, boot })
    }

    /// Lets a peer go: destroys its connection, ends what is in flight as `PeerDown`. Regions attached
    /// to it stay until they are deregistered, and are of no use.
    pub fn disconnect(&self, peer: RdmaPeer) {
        let taken = {
            let mut peers = self.inner.peers.write().unwrap_or_else(PoisonError::into_inner);
            let at = usize::try_from(peer.index).unwrap_or(usize::MAX);
            match peers.get_mut(at) {
                // One that waits for the device stays in sight of the thread.
                Some(Some(known)) if known.boot == peer.boot => Some(Arc::clone(known)),
                _ => None,
            }
        };
        if let Some(known) = taken {
            let left = self.inner.let_go(&known, "the peer was disconnected");
            if left == 0 {
                let mut peers = self.inner.peers.write().unwrap_or_else(PoisonError::into_inner);
                let at = usize::try_from(peer.index).unwrap_or(usize::MAX);
                if let Some(place) = peers.get_mut(at) {
                    *place = None;
                }
            }
        }
    }

    /// Makes a region that a peer exports usable in plans. Asks the peer where it lies. Given back by
    /// [`deregister`](TransferEngine::deregister).
    ///
    /// # Errors
    /// `Stale` when the token names no export, or the peer has restarted; `PeerDown`, `Timeout`.
    pub fn attach(
        &self,
        peer: &RdmaPeer,
        token: Token,
        deadline: Instant,
    ) -> Result<RegionId, TransferError> {
        let location = peer.location();
        let known = self.inner.peer(peer)?;
        let answer = known.ask(&self.inner.dialer, &Ask::Attach(token).encode(), deadline)?;
        let region = FarRegion::decode(&answer).map_err(|error| {
            TransferError::unsupported(format!("{} says nonsense: {error}", known.address))
        })?;
        if region.owner != known.owner {
            return Err(TransferError::restarted(known.address));
        }
        let len = usize::try_from(region.len).map_err(|_| {
            TransferError::invalid(format!("{} bytes are more than memory", region.len))
        })?;
        let far = Far::new(known, region.access, region.pieces);
        self.inner.regions.register(Memory::elsewhere(len, location), Attached::Remote(far))
    }

    /// Registers memory of another device, which begins at `offset` of the dmabuf.
    ///
    /// # Errors
    /// `Unsupported` where library, kernel or adapter cannot, `Registration` when they refuse.
    pub fn register_dmabuf(
        &self,
        memory: Memory,
        dmabuf: BorrowedFd<'_>,
        offset: u64,
    ) -> Result<RegionId, TransferError> {
        if memory.is_empty() {
            return Err(TransferError::invalid("a region of zero bytes cannot be registered"));
        }
        let domain = &self.inner.dialer.device.opened.domain;
        let pieces = Pieces::of_dmabuf(domain, memory.clone(), (dmabuf, offset), Rights::Own)?;
        self.inner.regions.register(memory, Attached::Local(pieces))
    }

    /// As [`submit`](TransferEngine::submit), with a deadline of its own: then the plan ends as
    /// `Timeout`, as soon as its connection is destroyed.
    ///
    /// # Errors
    /// As [`submit`](TransferEngine::submit).
    pub fn submit_until(&self, plan: TransferPlan, deadline: Instant) -> Result<Ticket, Rejected> {
        let mut plan = plan;
        match self.inner.accept(&mut plan, deadline) {
            Ok(ticket) => Ok(ticket),
            Err(error) => Err(Rejected { plan, error }),
        }
    }

    /// Ends a plan as `Cancelled`, unless it has ended or failed otherwise: `false` then. A connection
    /// that carries a part of it is destroyed, and made anew for others. When this returns, nothing of
    /// the plan touches any memory, unless [`RdmaStats::quarantined`] says otherwise.
    pub fn cancel(&self, ticket: Ticket) -> bool {
        let Some(job) = self.inner.ends.job(ticket) else { return false };
        let text = "the plan was cancelled";
        let first = job.fail(TransferError::new(ErrorKind::Cancelled, text));
        job.expel();
        self.inner.expel(&job);
        first
    }

    /// How a peer is doing; `None` for one that was disconnected.
    #[must_use]
    pub fn peer_state(&self, peer: &RdmaPeer) -> Option<PeerState> {
        let peer = self.inner.peer(peer).ok()?;
        let state = peer.lock();
        Some(PeerState {
            lanes: usize::from(state.conn().is_some()),
            queued: state.waiting(),
            circuit_open: state.breaker.is_open(),
            gone: state.gone().is_some(),
        })
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &RdmaDevice {
        &self.inner.dialer.device
    }

    /// What the engine has done.
    #[must_use]
    pub fn stats(&self) -> RdmaStats {
        let (plans, bytes) = self.inner.ends.totals();
        let mut stats = RdmaStats {
            plans,
            bytes,
            sleeps: self.inner.sleeps.load(Ordering::Relaxed),
            leaked: verbs::LEAKED.load(Ordering::Relaxed),
            ..RdmaStats::default()
        };
        for peer in self.inner.all_peers() {
            let state = peer.lock();
            stats.quarantined += state.quarantined() as u64;
            let Counters {
                reads,
                writes,
                doorbells,
                signalled,
                strangers,
                resent,
                connected,
                broken,
            } = state.counters;
            stats.reads += reads;
            stats.writes += writes;
            stats.doorbells += doorbells;
            stats.signalled += signalled;
            stats.strangers += strangers;
            stats.resent += resent;
            stats.connected += connected;
            stats.broken += broken;
        }
        stats
    }
}

impl Inner {
    fn accept(
        self: &Arc<Self>,
        plan: &mut TransferPlan,
        deadline: Instant,
    ) -> Result<Ticket, TransferError> {
        self.ends.check()?;
        if !self.dialer.device.opened.context().is_of_this_process() {
            let text = "a device cannot be used in a forked child; open it there";
            return Err(TransferError::new(ErrorKind::Poisoned, text));
        }
        if plan.items.len() > MAX_ITEMS {
            return Err(TransferError::invalid(format!(
                "{} items, the limit is {MAX_ITEMS}: split the plan",
                plan.items.len()
            )));
        }
        let limits = PlanLimits { max_item_bytes: MAX_OPERATION_BYTES, ..PlanLimits::NONE };
        let (planned, lease) = {
            let view = self.regions.view();
            let info = |id| view.info(id);
            let planned = planner::plan(&plan.items, limits, info, plan::reachable)?;
            let lease = view.lease(&planned.regions)?;
            (planned, lease)
        };
        let byte = &self.dialer.byte;
        let byte = Sge { addr: byte.addr, length: 1, lkey: byte.lkey };
        let parcels = plan::parcels(&planned, &lease, self.limits, byte)?;
        let size = (parcels.len(), planned.bytes);
        let job = self.ends.admit(deadline, lease, size, &mut plan.holds)?;
        plan.items = Vec::new();
        let now = Instant::now();
        for parcel in parcels {
            let peer = Arc::clone(&parcel.peer);
            let mut moves = Moves::default();
            peer.lock().begin(Part::new(Arc::clone(&job), parcel), now, &mut moves);
            self.finish(&peer, moves);
        }
        self.due_by(deadline);
        Ok(job.ticket)
    }

    /// Does what was found out under a peer's lock.
    pub(super) fn finish(self: &Arc<Self>, peer: &Arc<Peer>, moves: Moves) {
        for (part, error) in moves.ended {
            self.ends.part_ended(&part.job, error);
        }
        if moves.dial {
            let (inner, of_thread) = (Arc::clone(self), Arc::clone(peer));
            let begun = std::thread::Builder::new()
                .name("ucm-rdma-dial".into())
                .spawn(move || inner.redial(&of_thread));
            if let Err(error) = begun {
                let text = format!("no thread to connect with: {error}");
                self.dialed(peer, Err(TransferError::new(ErrorKind::PeerDown, text)));
            }
        }
    }

    /// Makes a connection to the same run of a peer.
    fn redial(self: &Arc<Self>, peer: &Arc<Peer>) {
        let deadline = Instant::now() + self.dialer.timeout;
        let number = self.conn_number();
        let outcome = self.dialer.dial(number, peer.address, &peer.secret, deadline);
        let outcome = outcome.and_then(|dialed| {
            if (dialed.boot, dialed.owner) != (peer.boot, peer.owner) {
                return Err(TransferError::restarted(peer.address));
            }
            Ok(dialed.conn)
        });
        self.dialed(peer, outcome);
    }

    fn dialed(self: &Arc<Self>, peer: &Arc<Peer>, outcome: Result<Conn, TransferError>) {
        let mut moves = Moves::default();
        peer.lock().dialed(outcome, Instant::now(), &mut moves);
        self.watch(peer);
        self.finish(peer, moves);
        // The thread is to be told of its completions.
        bell::ring(&self.bell);
    }

    /// Lets the thread hear when the peer ends the control connection, or has done so.
    fn watch(&self, peer: &Peer) {
        let state = peer.lock();
        let Some(conn) = state.conn() else { return };
        let data = epoll::EventData::new_u64(conn.id);
        let flags = epoll::EventFlags::RDHUP | epoll::EventFlags::ONESHOT;
        if let Err(error) = epoll::add(&self.epoll, &*conn.control, data, flags)
            && error != rustix::io::Errno::EXIST
        {
            // The adapter finds out, too, later.
            tracing::warn!("a control connection is not watched: {error}");
        }
    }

    /// Takes completions of all peers that have something under way. Says whether there were any, and
    /// whether something is still under way. Peers that somebody else has in hand are left to them,
    /// unless each one must be looked at.
    pub(super) fn look(self: &Arc<Self>, each: bool) -> (bool, bool) {
        let (mut some, mut busy) = (false, false);
        let mut all = Vec::new();
        let now = Instant::now();
        {
            let peers = self.peers.read().unwrap_or_else(PoisonError::into_inner);
            for peer in peers.iter().flatten() {
                let state = if each { Some(peer.lock()) } else { peer.try_lock() };
                let Some(mut state) = state else {
                    busy = true;
                    continue;
                };
                if !state.is_busy() {
                    continue;
                }
                let mut moves = Moves::default();
                some |= state.look(now, &mut moves);
                busy |= state.is_busy();
                if !moves.is_empty() {
                    all.push((Arc::clone(peer), moves));
                }
            }
        }
        for (peer, moves) in all {
            self.finish(&peer, moves);
        }
        (some, busy)
    }

    /// Ends failed plans by force.
    fn expel(self: &Arc<Self>, job: &Arc<Job>) {
        for peer in self.all_peers() {
            let mut moves = Moves::default();
            peer.lock().expel(job, Instant::now(), &mut moves);
            self.finish(&peer, moves);
        }
        // The thread tries again what did not work.
        bell::ring(&self.bell);
    }

    /// Ends plans whose deadline has come.
    pub(super) fn expire(self: &Arc<Self>, now: Instant) {
        if self.clock(now) < self.earliest.load(Ordering::SeqCst) {
            return;
        }
        // Before plans are looked through: one that is admitted later sets it again.
        self.earliest.store(u64::MAX, Ordering::SeqCst);
        let (due, next) = self.ends.due(now);
        if let Some(next) = next {
            self.earliest.fetch_min(self.clock(next), Ordering::SeqCst);
        }
        for job in due {
            if job.expel() {
                let text = "the plan has not ended by its deadline";
                job.fail(TransferError::new(ErrorKind::Timeout, text));
                self.expel(&job);
            }
        }
    }

    fn due_by(&self, deadline: Instant) {
        let at = self.clock(deadline);
        if at < self.earliest.fetch_min(at, Ordering::SeqCst) {
            bell::ring(&self.bell);
        }
    }

    /// When something is due next.
    pub(super) fn next_due(&self) -> Option<Duration> {
        let earliest = self.earliest.load(Ordering::SeqCst);
        (earliest != u64::MAX)
            .then(|| Duration::from_nanos(earliest.saturating_sub(self.clock(Instant::now()))))
    }

    fn clock(&self, at: Instant) -> u64 {
        let since = at.saturating_duration_since(self.began).as_nanos();
        u64::try_from(since).unwrap_or(u64::MAX - 1)
    }

    /// The peer of this connection has ended it.
    pub(super) fn lost(self: &Arc<Self>, number: u64) {
        for peer in self.all_peers() {
            let mut state = peer.lock();
            if state.conn().is_some_and(|conn| conn.id == number) {
                let text = format!("{} has ended the control connection", peer.address);
                let error = TransferError::new(ErrorKind::PeerDown, text);
                let mut moves = Moves::default();
                state.tear_down(&error, Instant::now(), &mut moves);
                drop(state);
                self.finish(&peer, moves);
            }
        }
    }

    /// Tries again to destroy queue pairs; says how many are left.
    pub(super) fn bury(self: &Arc<Self>) -> usize {
        let mut left = 0;
        for peer in self.all_peers() {
            let mut moves = Moves::default();
            left += peer.lock().bury(&mut moves);
            self.finish(&peer, moves);
        }
        left
    }

    /// Ends everything with a peer; says how many of its queue pairs are left.
    fn let_go(self: &Arc<Self>, peer: &Arc<Peer>, why: &str) -> usize {
        let error = TransferError::new(ErrorKind::PeerDown, why);
        let mut moves = Moves::default();
        let mut state = peer.lock();
        state.let_go(&error, Instant::now(), &mut moves);
        let left = state.bury(&mut moves);
        drop(state);
        self.finish(peer, moves);
        left
    }

    fn conn_number(&self) -> u64 {
        self.next_conn.fetch_add(1, Ordering::Relaxed)
    }

    fn peer(&self, peer: &RdmaPeer) -> Result<Arc<Peer>, TransferError> {
        let peers = self.peers.read().unwrap_or_else(PoisonError::into_inner);
        let at = usize::try_from(peer.index).unwrap_or(usize::MAX);
        let found = peers.get(at).and_then(Option::as_ref).filter(|p| p.boot == peer.boot);
        found.cloned().ok_or_else(|| {
            TransferError::new(ErrorKind::PeerDown, "the peer was disconnected, or is another's")
        })
    }

    pub(super) fn all_peers(&self) -> Vec<Arc<Peer>> {
        let peers = self.peers.read().unwrap_or_else(PoisonError::into_inner);
        peers.iter().flatten().cloned().collect()
    }
}

impl Peer {
    /// Asks over the control connection, or over one for this question alone.
    fn ask(
        &self,
        dialer: &Dialer,
        question: &[u8],
        deadline: Instant,
    ) -> Result<Vec<u8>, TransferError> {
        let state = self.lock();
        if let Some(error) = state.gone() {
            return Err(error.clone());
        }
        let control = state.conn().map(|conn| Arc::clone(&conn.control));
        drop(state);
        if let Some(control) = control {
            match control.ask(question, deadline) {
                Err(error) if error.kind() == ErrorKind::PeerDown => {}
                answered => return answered,
            }
        }
        let control = ControlLane::connect(self.address, &self.secret, dialer.boot, deadline)?;
        if control.boot() != self.boot {
            return Err(TransferError::restarted(self.address));
        }
        control.ask(question, deadline)
    }
}

impl TransferError {
    fn restarted(address: SocketAddr) -> Self {
        let text = format!("another run answers at {address}; connect to it anew");
        Self::new(ErrorKind::Stale, text)
    }
}

impl TransferEngine for RdmaEngine {
    fn name(&self) -> &'static str {
        "rdma"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            max_items: MAX_ITEMS,
            max_in_flight: self.inner.settings.max_in_flight,
            hard_completion: true,
            ..Capabilities::unlimited(1)
        }
    }

    fn register(&self, memory: Memory) -> Result<RegionId, TransferError> {
        if !matches!(memory.location(), Location::Host | Location::PinnedHost) {
            return Err(TransferError::unsupported(format!(
                "{:?} is registered by its dmabuf; memory of peers is attached",
                memory.location()
            )));
        }
        if memory.is_empty() {
            return Err(TransferError::invalid("a region of zero bytes cannot be registered"));
        }
        let domain = &self.inner.dialer.device.opened.domain;
        let pieces = Pieces::of(domain, &memory, self.inner.settings.piece_bytes, Rights::Own)?;
        self.inner.regions.register(memory, Attached::Local(pieces))
    }

    fn deregister(&self, region: RegionId) -> Result<(), TransferError> {
        self.inner.regions.deregister(region).map(drop)
    }

    fn submit(&self, plan: TransferPlan) -> Result<Ticket, Rejected> {
        self.submit_until(plan, Instant::now() + self.inner.settings.timeout)
    }

    fn poll(&self, out: &mut Vec<Completion>) -> usize {
        let count = self.inner.ends.poll(out);
        let threaded = self.inner.threaded.load(Ordering::SeqCst);
        if count > 0 || threaded || self.inner.ends.in_flight() == 0 {
            return count;
        }
        self.inner.look(false);
        self.inner.ends.poll(out)
    }

    fn set_waker(&self, waker: Option<Waker>) {
        self.inner.threaded.store(waker.is_some(), Ordering::SeqCst);
        self.inner.ends.set_waker(waker);
    }

    fn quiesce(&self, target: Quiesce, deadline: Instant) -> Result<(), TransferError> {
        let until = Instant::now() + self.inner.settings.spin;
        // Whoever waits looks by itself for a moment, which saves two changes of threads.
        self.inner.ends.quiesce(target, deadline, || {
            let (some, _) = self.inner.look(false);
            let now = Instant::now();
            now < deadline && (some || now < until)
        })
    }
}

impl Drop for RdmaEngine {
    fn drop(&mut self) {
        let inner = &self.inner;
        if !inner.dialer.device.opened.context().is_of_this_process() {
            // A forked child: thread, connections and operations are the parent's.
            let _ = std::mem::ManuallyDrop::new(Arc::clone(inner));
            return;
        }
        inner.stopping.store(true, Ordering::SeqCst);
        bell::ring(&inner.bell);
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
            && thread.join().is_err()
        {
            tracing::error!("the thread of the rdma engine ended by a panic");
        }
        for peer in inner.all_peers() {
            let left = inner.let_go(&peer, "the engine was dropped");
            if left > 0 {
                let undead = peer.lock().take_undead();
                let plans: usize = undead.iter().map(|(_, parts)| parts.len()).sum();
                verbs::LEAKED.fetch_add(plans as u64, Ordering::Relaxed);
                tracing::error!("the memory of {plans} plans is given up with {left} queue pairs");
                // Freed by the end of the process, which also ends what the adapter does.
                let _ = std::mem::ManuallyDrop::new(undead);
            }
        }
        drop(inner.ends.abandon());
    }
}

impl fmt::Debug for RdmaEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RdmaEngine")
            .field("device", self.device().info())
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}
