//! The asking side: a transfer engine whose sources or destinations lie with peers.
//!
//! **Invariant:** a plan that was accepted ends exactly once, whatever becomes of its peer, and not
//! later than its deadline plus the time that one non-blocking system call takes.

mod accept;
mod builder;
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

pub use builder::TcpEngineBuilder;

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
    wire::{Body, DESCRIPTOR_BYTES, RequestKind},
};
use crate::{
    Capabilities, Completion, ErrorKind, Location, Memory, Quiesce, RegionId, RegionTable,
    Rejected, Ticket, TransferEngine, TransferError, TransferPlan,
};

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
