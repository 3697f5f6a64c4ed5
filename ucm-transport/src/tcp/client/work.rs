//! What makes exchanges progress: dealing, sending, receiving, ending, expiring.
//!
//! **Invariant:** ends are told, and wakers and holds run, without any lock held.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, atomic::Ordering},
    thread,
    time::{Duration, Instant},
};

use rustix::event::epoll;

use super::{
    Inner,
    job::{Ended, Exchange, Job},
    lane::Lane,
    peer::{Moves, Peer},
};
use crate::{
    ErrorKind, TransferError,
    tcp::{
        bell,
        handshake::{self, Greeted},
        socket::Socket,
    },
};

impl Inner {
    /// Deals what waits for a peer to its lanes, and sees to what comes out of it.
    pub(super) fn pump(self: &Arc<Self>, peer: &Arc<Peer>) {
        let moves = peer.lock().deal(Instant::now(), self.rules);
        self.carry_out(peer, moves);
    }

    pub(super) fn carry_out(self: &Arc<Self>, peer: &Arc<Peer>, moves: Moves) {
        for lane in &moves.stale {
            self.close(lane, &idle(), false);
        }
        for lane in &moves.flush {
            self.mark_busy(lane);
            self.flush(lane);
        }
        for (exchange, error) in moves.failed {
            self.end(Ended::failed(exchange, error));
        }
        if moves.connect {
            self.connect_in_background(peer);
        }
    }

    /// Sends what a lane has to send.
    pub(super) fn flush(self: &Arc<Self>, lane: &Arc<Lane>) {
        match lane.flush() {
            Ok(false) => {}
            Ok(true) => self.watch_for_room(lane),
            Err(broken) => self.close(lane, &broken.error(), false),
        }
    }

    /// Takes in what a lane has received; says whether more may be there.
    pub(super) fn receive(self: &Arc<Self>, lane: &Arc<Lane>) -> bool {
        let mut ended = Vec::new();
        let result = lane.receive(&mut ended);
        let any = !ended.is_empty();
        if any && lane.peer.lock().breaker.is_open() {
            lane.peer.lock().breaker.succeeded();
        }
        for ended in ended {
            self.stats.exchanges.fetch_add(1, Ordering::Relaxed);
            self.end(ended);
        }
        match result {
            Ok(more) => {
                // Credits came back.
                if any && !lane.peer.lock().queue.is_empty() {
                    self.pump(&lane.peer);
                }
                more
            }
            Err(broken) => {
                self.close(lane, &broken.error(), false);
                false
            }
        }
    }

    /// Closes a lane. What was on it and may be repeated goes to another one; the rest ends. With
    /// `blamed` it counts against the peer.
    pub(super) fn close(self: &Arc<Self>, lane: &Arc<Lane>, error: &TransferError, blamed: bool) {
        let Some(exchanges) = lane.kill() else { return };
        self.stats.lanes_closed.fetch_add(1, Ordering::Relaxed);
        self.forget(lane);
        let now = Instant::now();
        let mut over = Vec::new();
        let mut state = lane.peer.lock();
        state.lanes.retain(|known| known.id != lane.id);
        if blamed {
            state.breaker.failed(now);
        }
        for mut exchange in exchanges.into_iter().rev() {
            match exchange.job.over(now) {
                None if exchange.may_go_again() && !self.stopping.load(Ordering::SeqCst) => {
                    exchange.resent = true;
                    self.stats.resent.fetch_add(1, Ordering::Relaxed);
                    state.queue.push_front(exchange);
                }
                reason => over.push((exchange, reason.unwrap_or_else(|| error.clone()))),
            }
        }
        drop(state);
        for (exchange, error) in over.into_iter().rev() {
            self.end(Ended::failed(exchange, error));
        }
        self.pump(&lane.peer);
        self.wake_leader();
    }

    /// An exchange is over.
    pub(super) fn end(&self, ended: Ended) {
        let Ended { job, result, reply } = ended;
        if let Some(completion) = job.exchange_ended(result, reply) {
            self.finish(&job, completion);
        }
    }

    /// A job is over: frees its regions, then tells.
    pub(super) fn finish(&self, job: &Arc<Job>, completion: crate::Completion) {
        job.release();
        let mut ends = self.ends();
        ends.jobs.remove(&job.ticket);
        let waker = if job.direct {
            job.keep(completion);
            None
        } else {
            ends.done.push(completion);
            ends.waker.clone()
        };
        drop(ends);
        self.ended.notify_all();
        if let Some(waker) = waker
            && catch_unwind(AssertUnwindSafe(|| waker.wake())).is_err()
        {
            tracing::error!("the waker of the tcp engine panicked; the engine is poisoned");
            self.poisoned.store(true, Ordering::SeqCst);
        }
    }

    /// Ends what is past its deadline, or cancelled. Returns when to look again.
    pub(super) fn expire(self: &Arc<Self>, now: Instant) -> Option<Instant> {
        let due = |job: &Job| job.over(now);
        for peer in self.all_peers() {
            let mut state = peer.lock();
            let mut late = Vec::new();
            let mut keep = std::collections::VecDeque::with_capacity(state.queue.len());
            for exchange in state.queue.drain(..) {
                match due(&exchange.job) {
                    Some(error) => late.push((exchange, error)),
                    None => keep.push_back(exchange),
                }
            }
            state.queue = keep;
            let lanes = state.lanes.clone();
            drop(state);
            for (exchange, error) in late {
                self.end(Ended::failed(exchange, error));
            }
            for lane in lanes {
                let timed_out = lane.carries(|job| job.deadline <= now);
                if timed_out || lane.carries(|job| due(job).is_some()) {
                    if timed_out {
                        self.stats.timeouts.fetch_add(1, Ordering::Relaxed);
                    }
                    let error = TransferError::new(
                        ErrorKind::PeerDown,
                        "another exchange on this lane did not end in time; the lane was closed",
                    );
                    self.close(&lane, &error, timed_out);
                }
            }
        }
        self.ends().jobs.values().map(|job| job.deadline).min()
    }

    /// A connection that was being made is there, or not.
    fn connected(self: &Arc<Self>, peer: &Arc<Peer>, made: Result<Greeted, TransferError>) {
        let mut state = peer.lock();
        state.connecting = false;
        let mut moves = Moves::default();
        match made.and_then(|greeted| self.same_run(peer, greeted)) {
            Ok((socket, grant)) => {
                state.breaker.succeeded();
                if !self.stopping.load(Ordering::SeqCst) && state.gone.is_none() {
                    let lane = self.open_lane(peer, socket, grant);
                    state.lanes.push(lane);
                }
                drop(state);
            }
            Err(error) => {
                if error.kind() == ErrorKind::Stale {
                    state.gone = Some(error.clone());
                } else {
                    state.breaker.failed(Instant::now());
                }
                if state.lanes.is_empty() {
                    moves.failed = state.queue.drain(..).map(|e| (e, error.clone())).collect();
                }
                drop(state);
                tracing::debug!(address = %peer.address, %error, "a lane could not be opened");
            }
        }
        self.carry_out(peer, moves);
        self.pump(peer);
        self.wake_leader();
    }

    fn same_run(
        &self,
        peer: &Peer,
        greeted: Greeted,
    ) -> Result<(Socket, crate::tcp::wire::Grant), TransferError> {
        if greeted.boot != peer.boot {
            return Err(TransferError::new(
                ErrorKind::Stale,
                format!("the peer at {} has restarted; connect to it anew", peer.address),
            ));
        }
        let grant = greeted.grant;
        let socket = greeted.socket().map_err(|error| {
            TransferError::new(ErrorKind::PeerDown, format!("{}: {error}", peer.address))
        })?;
        Ok((socket, grant))
    }

    pub(super) fn open_lane(
        self: &Arc<Self>,
        peer: &Arc<Peer>,
        socket: Socket,
        grant: crate::tcp::wire::Grant,
    ) -> Arc<Lane> {
        let id = self.next_lane.fetch_add(1, Ordering::Relaxed);
        let lane = Lane::new(id, Arc::clone(peer), socket, grant);
        self.stats.lanes_opened.fetch_add(1, Ordering::Relaxed);
        self.remember(&lane);
        lane
    }

    fn connect_in_background(self: &Arc<Self>, peer: &Arc<Peer>) {
        let (weak, peer_of_thread) = (Arc::downgrade(self), Arc::clone(peer));
        let (boot, limit) = (self.boot, self.connect_timeout);
        let spawned = thread::Builder::new().name("ucm-tcp-connect".into()).spawn(move || {
            let peer = peer_of_thread;
            let deadline = Instant::now() + limit;
            let made =
                handshake::connect(peer.address, &peer.secret, peer.tls.as_ref(), boot, deadline);
            if let Some(inner) = weak.upgrade() {
                inner.connected(&peer, made);
            }
        });
        if let Err(error) = spawned {
            let text = format!("no thread to connect with: {error}");
            self.connected(peer, Err(TransferError::new(ErrorKind::PeerDown, text)));
        }
    }

    /// In threaded mode, the engine's thread watches the lane.
    fn remember(self: &Arc<Self>, lane: &Arc<Lane>) {
        let mut lanes = self.lanes();
        lanes.insert(lane.id, Arc::clone(lane));
        if self.is_threaded() {
            self.watch(lane);
        }
    }

    fn forget(&self, lane: &Arc<Lane>) {
        self.lanes().remove(&lane.id);
        let _ = epoll::delete(&self.epoll, lane.fd());
        self.busy().retain(|known| known.id != lane.id);
    }

    pub(super) fn watch(&self, lane: &Lane) {
        let flags = if lane.is_blocked() {
            epoll::EventFlags::IN | epoll::EventFlags::OUT
        } else {
            epoll::EventFlags::IN
        };
        let data = epoll::EventData::new_u64(lane.id);
        let watched = match epoll::add(&self.epoll, lane.fd(), data, flags) {
            Err(rustix::io::Errno::EXIST) => epoll::modify(&self.epoll, lane.fd(), data, flags),
            other => other,
        };
        if let Err(error) = watched {
            tracing::error!(%error, "a lane of the tcp engine cannot be watched");
        }
    }

    fn watch_for_room(&self, lane: &Arc<Lane>) {
        if self.is_threaded() {
            self.watch(lane);
        } else {
            self.wake_leader();
        }
    }

    fn mark_busy(&self, lane: &Arc<Lane>) {
        if self.is_threaded() {
            return;
        }
        let mut busy = self.busy();
        if !busy.iter().any(|known| known.id == lane.id) {
            busy.push(Arc::clone(lane));
            drop(busy);
            self.wake_leader();
        }
    }

    /// The thread that leads looks again which lanes there are.
    pub(super) fn wake_leader(&self) {
        if self.leading.load(Ordering::SeqCst) {
            bell::ring(&self.lead_bell);
        }
    }

    /// The engine's thread looks again what is due.
    pub(super) fn due_by(&self, deadline: Instant) {
        let at = self.clock(deadline);
        let before = self.earliest.fetch_min(at, Ordering::SeqCst);
        if at < before {
            bell::ring(&self.bell);
        }
    }

    /// Nanoseconds since the engine began; never the value that means "nothing is due".
    pub(super) fn clock(&self, at: Instant) -> u64 {
        let since = at.saturating_duration_since(self.began);
        u64::try_from(since.as_nanos()).unwrap_or(u64::MAX - 1).min(u64::MAX - 1)
    }

    pub(super) fn instant(&self, clock: u64) -> Option<Instant> {
        if clock == u64::MAX { None } else { self.began.checked_add(Duration::from_nanos(clock)) }
    }

    /// Gives exchanges to their peer.
    pub(super) fn start(self: &Arc<Self>, peer: &Arc<Peer>, exchanges: Vec<Exchange>) {
        peer.lock().queue.extend(exchanges);
        self.pump(peer);
    }
}

fn idle() -> TransferError {
    TransferError::new(ErrorKind::PeerDown, "the lane was idle and is replaced")
}
