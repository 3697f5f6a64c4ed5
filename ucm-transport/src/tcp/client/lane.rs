//! One connection to a peer, and the exchanges on it.
//!
//! **Invariant:** destinations are written under the lock `rx` only, and only while the lane is not
//! dead; sources are read under `tx` only, likewise. Whoever sets `dead` and then takes both locks
//! once knows that nothing of this lane touches any memory any more.

use std::{
    collections::{HashMap, VecDeque},
    io,
    os::fd::BorrowedFd,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use super::{
    job::{Ended, Exchange, Job},
    peer::Peer,
};
use crate::{
    ErrorKind, TransferError,
    tcp::{
        inbuf::InBuf,
        server::refused,
        socket::Socket,
        sys::Scatter,
        wire::{
            Grant, HEAD_BYTES, Malformed, ReplyHead, RequestHead, RequestKind, TEXT_BYTES,
            TRAILER_BYTES, Trailer,
        },
    },
};

/// Replies taken in before others get their turn.
const TURN: usize = 32;

#[derive(Debug)]
pub(super) struct Lane {
    pub(super) id: u64,
    pub(super) peer: Arc<Peer>,
    socket: Socket,
    grant: Grant,
    dead: AtomicBool,
    tx: Mutex<Tx>,
    rx: Mutex<Rx>,
    waiting: Mutex<Waiting>,
}

#[derive(Debug, Default)]
struct Tx {
    queue: VecDeque<Outgoing>,
    /// The socket took no more.
    blocked: bool,
}

#[derive(Debug)]
struct Outgoing {
    id: u64,
    pieces: Scatter,
    /// Keeps the regions that the pieces lie in.
    _job: Arc<Job>,
}

#[derive(Debug)]
struct Rx {
    input: InBuf,
    current: Option<Receiving>,
}

/// A reply whose head has been read.
#[derive(Debug)]
struct Receiving {
    id: u64,
    head: ReplyHead,
    exchange: Exchange,
    pieces: Scatter,
    /// Buffers of ours among the pieces: a text or an answer, and the trailer.
    body: Option<usize>,
    trailer: usize,
}

#[derive(Debug)]
struct Waiting {
    exchanges: HashMap<u64, Exchange>,
    next_id: u64,
    /// Bytes asked for, also of the reply that is being read.
    bytes: u64,
    requests: u32,
    closed: bool,
    last_used: Instant,
}

/// Why a lane is of no use any more.
#[derive(Debug, thiserror::Error)]
pub(super) enum Broken {
    #[error("the connection ended: {0}")]
    Io(#[from] io::Error),
    #[error("the peer broke the protocol: {0}")]
    Malformed(#[from] Malformed),
}

impl Broken {
    pub(super) fn error(&self) -> TransferError {
        TransferError::new(ErrorKind::PeerDown, self.to_string())
    }
}

impl Lane {
    pub(super) fn new(id: u64, peer: Arc<Peer>, socket: Socket, grant: Grant) -> Arc<Self> {
        let waiting = Waiting {
            exchanges: HashMap::new(),
            next_id: 1,
            bytes: 0,
            requests: 0,
            closed: false,
            last_used: Instant::now(),
        };
        Arc::new(Self {
            id,
            peer,
            socket,
            grant,
            dead: AtomicBool::new(false),
            tx: Mutex::default(),
            rx: Mutex::new(Rx { input: InBuf::new(), current: None }),
            waiting: Mutex::new(waiting),
        })
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.fd()
    }

    /// Bytes and requests that are not answered.
    pub(super) fn load(&self) -> (u64, u32) {
        let waiting = lock(&self.waiting);
        (waiting.bytes, waiting.requests)
    }

    /// Nothing is in flight; since when.
    pub(super) fn idle_since(&self) -> Option<Instant> {
        let waiting = lock(&self.waiting);
        (waiting.requests == 0).then_some(waiting.last_used)
    }

    /// It has never carried anything.
    pub(super) fn is_fresh(&self) -> bool {
        lock(&self.waiting).next_id == 1
    }

    /// Whether the credits allow this exchange now.
    pub(super) fn admits(&self, payload: u64) -> bool {
        let (bytes, requests) = self.load();
        requests == 0
            || (requests < self.grant.requests
                && bytes.checked_add(payload).is_some_and(|sum| sum <= self.grant.window))
    }

    /// Takes an exchange over; gives it back when the lane is closed. To be followed by
    /// [`flush`](Self::flush).
    pub(super) fn begin(&self, mut exchange: Exchange) -> Result<(), Box<Exchange>> {
        let mut waiting = lock(&self.waiting);
        if waiting.closed {
            return Err(Box::new(exchange));
        }
        let id = waiting.next_id;
        waiting.next_id += 1;
        let body = exchange.frame.len().saturating_sub(HEAD_BYTES);
        let head = RequestHead {
            kind: exchange.kind,
            id,
            body: u32::try_from(body).unwrap_or(u32::MAX),
            payload: exchange.payload,
        };
        if let Some(place) = exchange.frame.first_chunk_mut() {
            *place = head.encode();
        }
        let mut pieces = Scatter::with_capacity(1);
        if exchange.may_go_again() {
            pieces.push_buffer(exchange.frame.clone());
        } else {
            pieces.push_buffer(std::mem::take(&mut exchange.frame));
        }
        if exchange.kind == RequestKind::Write {
            pieces.append(std::mem::take(&mut exchange.pieces));
        }
        let outgoing = Outgoing { id, pieces, _job: Arc::clone(&exchange.job) };
        waiting.bytes += exchange.payload;
        waiting.requests += 1;
        waiting.exchanges.insert(id, exchange);
        // Under the lock, so that requests are sent in the order of their ids.
        lock(&self.tx).queue.push_back(outgoing);
        Ok(())
    }

    /// Sends what the socket takes; says whether something is left.
    pub(super) fn flush(&self) -> Result<bool, Broken> {
        let mut tx = lock(&self.tx);
        if self.is_dead() {
            return Ok(false);
        }
        while let Some(outgoing) = tx.queue.front_mut() {
            match self.socket.send(&mut outgoing.pieces, false) {
                Ok(()) => drop(tx.queue.pop_front()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    tx.blocked = true;
                    return Ok(true);
                }
                Err(error) => return Err(error.into()),
            }
        }
        tx.blocked = false;
        Ok(false)
    }

    /// Whether there is something to send that the socket did not take.
    pub(super) fn is_blocked(&self) -> bool {
        lock(&self.tx).blocked
    }

    /// Takes in what is there. Exchanges that are over go to `ended`; says whether more may be there
    /// now.
    pub(super) fn receive(&self, ended: &mut Vec<Ended>) -> Result<bool, Broken> {
        let mut rx = lock(&self.rx);
        for _ in 0..TURN {
            if self.is_dead() {
                return Ok(false);
            }
            let Rx { input, current } = &mut *rx;
            if current.is_none() {
                let Some(bytes) = input.take::<HEAD_BYTES>(&self.socket)? else {
                    return Ok(false);
                };
                *current = Some(self.expect(ReplyHead::decode(&bytes)?)?);
            }
            let Some(receiving) = current else { return Ok(false) };
            if !input.fill_pieces(&self.socket, &mut receiving.pieces)? {
                return Ok(false);
            }
            // While it is not understood, the exchange stays on the lane.
            let verdict = receiving.verdict()?;
            if let Some(receiving) = current.take() {
                let mut waiting = lock(&self.waiting);
                waiting.bytes = waiting.bytes.saturating_sub(receiving.exchange.payload);
                waiting.requests = waiting.requests.saturating_sub(1);
                waiting.last_used = Instant::now();
                drop(waiting);
                ended.push(receiving.end(verdict));
            }
        }
        Ok(true)
    }

    /// Finds the exchange of a reply, and where its bytes go.
    fn expect(&self, head: ReplyHead) -> Result<Receiving, Malformed> {
        let mut waiting = lock(&self.waiting);
        let found = waiting.exchanges.remove(&head.id);
        let mut exchange = found.ok_or(Malformed("a reply to nothing that was asked"))?;
        let frame = u64::from(self.grant.frame);
        let expected = match (head.status, exchange.kind) {
            (0, RequestKind::Read) => head.payload == exchange.payload,
            (0, RequestKind::Write) => head.payload == 0,
            (0, RequestKind::Call) => head.payload <= frame,
            _ => head.payload <= TEXT_BYTES as u64,
        };
        // A write whose source is still being sent cannot have been answered.
        let early = lock(&self.tx).queue.iter().any(|outgoing| outgoing.id == head.id);
        if !expected || early {
            waiting.exchanges.insert(head.id, exchange);
            return Err(Malformed(if early {
                "a reply before its request"
            } else {
                "a reply of another length than asked for"
            }));
        }
        drop(waiting);
        let direct = head.status == 0 && exchange.kind == RequestKind::Read;
        let (mut pieces, mut body) = (Scatter::with_capacity(2), None);
        if direct {
            pieces = std::mem::take(&mut exchange.pieces);
        } else if head.payload > 0 {
            // At most the frame limit.
            let length = usize::try_from(head.payload).unwrap_or(0);
            body = Some(pieces.push_buffer(vec![0; length]));
        }
        let trailer = pieces.push_buffer(vec![0; TRAILER_BYTES]);
        Ok(Receiving { id: head.id, head, exchange, pieces, body, trailer })
    }

    /// Whether something of this job is on the lane.
    pub(super) fn carries(&self, which: impl Fn(&Job) -> bool) -> bool {
        if lock(&self.waiting).exchanges.values().any(|exchange| which(&exchange.job)) {
            return true;
        }
        // It may have moved on to here, but from here only to its end.
        lock(&self.rx).current.as_ref().is_some_and(|r| which(&r.exchange.job))
    }

    /// Whether the peer has closed the connection, or sent what nobody asked for. Only for an idle
    /// lane.
    pub(super) fn has_ended(&self) -> bool {
        self.socket.has_something()
    }

    pub(super) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::SeqCst)
    }

    /// Ends the lane for good: when this returns, nothing of it touches any memory. Returns the
    /// exchanges that were on it, the one whose reply had begun first; `None` when it was ended
    /// before (the one who did that has the exchanges).
    pub(super) fn kill(&self) -> Option<Vec<Exchange>> {
        if self.dead.swap(true, Ordering::SeqCst) {
            return None;
        }
        // Wakes whoever polls it.
        self.socket.shut_down();
        // Both locks are held for calls that do not block only.
        lock(&self.tx).queue.clear();
        let current = lock(&self.rx).current.take();
        let mut waiting = lock(&self.waiting);
        waiting.closed = true;
        let mut exchanges: Vec<(u64, Exchange)> = waiting.exchanges.drain().collect();
        drop(waiting);
        exchanges.sort_unstable_by_key(|(id, _)| *id);
        let begun = current.map(|receiving| Exchange {
            // It counts as sent twice: part of its reply was read.
            resent: true,
            ..receiving.exchange
        });
        Some(begun.into_iter().chain(exchanges.into_iter().map(|(_, e)| e)).collect())
    }
}

impl Receiving {
    /// All bytes are here: what they say.
    fn verdict(&self) -> Result<Result<(), TransferError>, Malformed> {
        let trailer = self.pieces.buffer(self.trailer).first_chunk();
        let trailer = Trailer::decode(trailer.ok_or(Malformed("a trailer cut short"))?)?;
        if trailer.id != self.id || (self.head.status != 0 && trailer.status != self.head.status) {
            return Err(Malformed("a trailer of another reply"));
        }
        let body = self.body.filter(|_| self.head.status != 0);
        let text = body.map(|number| self.pieces.buffer(number)).unwrap_or_default();
        let refusal = refused(trailer.status, &String::from_utf8_lossy(text))
            .map_err(|()| Malformed("a status that does not exist"))?;
        Ok(refusal.map_or(Ok(()), Err))
    }

    /// Gives the pieces back: the exchange is over.
    fn end(mut self, result: Result<(), TransferError>) -> Ended {
        let body = self.body.filter(|_| result.is_ok());
        let reply = body.map(|number| self.pieces.take_buffer(number)).unwrap_or_default();
        drop(self.pieces);
        Ended { job: self.exchange.job, result, reply }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
