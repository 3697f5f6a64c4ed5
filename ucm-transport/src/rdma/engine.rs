//! The asking side: a transfer engine whose sources or destinations lie with peers.
//!
//! **Invariant:** when the engine has been dropped, no adapter touches memory of its plans.

use std::{
    fmt,
    net::SocketAddr,
    os::fd::BorrowedFd,
    sync::{Arc, PoisonError, atomic::Ordering},
    task::Waker,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use ucm_data::Token;

use super::{
    builder::RdmaEngineBuilder,
    device::RdmaDevice,
    dial::Dialed,
    inner::{Inner, MAX_ITEMS},
    peer::{Counters, Peer},
    pieces::Pieces,
    plan::{Attached, Far},
    verbs::{self, Rights},
    wire::{Ask, FarRegion},
};
use crate::{
    Capabilities, Completion, ErrorKind, Location, Memory, PeerState, Quiesce, RegionId, Rejected,
    Secret, Ticket, TransferEngine, TransferError, TransferPlan,
    tcp::{Breaker, bell},
};

/// A run of a peer, as it answered when it was connected to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RdmaPeer {
    pub(super) index: u32,
    pub(super) boot: Token,
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

/// Moves bytes between registered memory of this process and memory that an
/// [`RdmaOwner`](super::RdmaOwner) exports, by the network adapter.
///
/// Host memory is registered; memory of other devices by its dmabuf. Dropping the engine destroys all
/// its connections; when that has returned, no adapter touches any memory of its plans.
pub struct RdmaEngine {
    pub(super) inner: Arc<Inner>,
    pub(super) thread: Option<JoinHandle<()>>,
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
