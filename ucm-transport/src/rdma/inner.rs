//! What the callers of an engine and its thread share.
//!
//! **Invariant:** a plan that was accepted ends exactly once; not before its deadline is over unless
//! all its bytes are there or it has failed, and then only when no adapter touches its memory.

use std::{
    net::SocketAddr,
    os::fd::OwnedFd,
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use rustix::event::epoll;

use super::{
    builder::RdmaEngineBuilder,
    conn::Conn,
    dial::Dialer,
    ends::{Ends, Job},
    engine::RdmaPeer,
    peer::{Moves, Part, Peer},
    plan::{self, Attached},
    sys::Sge,
    work::Limits,
};
use crate::{
    ErrorKind, PlanLimits, RegionTable, Ticket, TransferError, TransferPlan, planner,
    tcp::{ControlLane, bell},
};

/// Most items of one plan.
pub(super) const MAX_ITEMS: usize = 1 << 20;
/// Most bytes of one operation.
pub(super) const MAX_OPERATION_BYTES: u64 = 1 << 30;

#[derive(Debug)]
pub(super) struct Inner {
    pub(super) dialer: Dialer,
    pub(super) limits: Limits,
    pub(super) settings: RdmaEngineBuilder,
    pub(super) ends: Ends,
    pub(super) began: Instant,
    pub(super) regions: RegionTable<Attached>,
    /// By the number in their location; `None` when disconnected.
    pub(super) peers: RwLock<Vec<Option<Arc<Peer>>>>,
    pub(super) next_conn: AtomicU64,
    /// A waker is set: the engine's thread looks for completions.
    pub(super) threaded: AtomicBool,
    pub(super) stopping: AtomicBool,
    /// When something is due next, in nanoseconds since the beginning.
    pub(super) earliest: AtomicU64,
    pub(super) sleeps: AtomicU64,
    pub(super) epoll: OwnedFd,
    pub(super) bell: OwnedFd,
}

impl Inner {
    pub(super) fn accept(
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
    pub(super) fn redial(self: &Arc<Self>, peer: &Arc<Peer>) {
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

    pub(super) fn dialed(self: &Arc<Self>, peer: &Arc<Peer>, outcome: Result<Conn, TransferError>) {
        let mut moves = Moves::default();
        peer.lock().dialed(outcome, Instant::now(), &mut moves);
        self.watch(peer);
        self.finish(peer, moves);
        // The thread is to be told of its completions.
        bell::ring(&self.bell);
    }

    /// Lets the thread hear when the peer ends the control connection, or has done so.
    pub(super) fn watch(&self, peer: &Peer) {
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
    pub(super) fn expel(self: &Arc<Self>, job: &Arc<Job>) {
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
    pub(super) fn let_go(self: &Arc<Self>, peer: &Arc<Peer>, why: &str) -> usize {
        let error = TransferError::new(ErrorKind::PeerDown, why);
        let mut moves = Moves::default();
        let mut state = peer.lock();
        state.let_go(&error, Instant::now(), &mut moves);
        let left = state.bury(&mut moves);
        drop(state);
        self.finish(peer, moves);
        left
    }

    pub(super) fn conn_number(&self) -> u64 {
        self.next_conn.fetch_add(1, Ordering::Relaxed)
    }

    pub(super) fn peer(&self, peer: &RdmaPeer) -> Result<Arc<Peer>, TransferError> {
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
    pub(super) fn ask(
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
    pub(super) fn restarted(address: SocketAddr) -> Self {
        let text = format!("another run answers at {address}; connect to it anew");
        Self::new(ErrorKind::Stale, text)
    }
}
