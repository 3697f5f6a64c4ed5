//! Connections to the runs of peers, each made once for everybody who needs it.
//!
//! **Invariant:** a link is to exactly the run that was asked for; no lock is held while one is made or
//! asked something.

use std::{
    collections::HashMap,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use ucm_transport::{ErrorKind, RegionId, Secret, TcpEngine, TcpPeer, TransferError};

use super::wire::{self, Descriptor, Fields, Malformed, Op};
use crate::{
    Generation, GetOutcome, Member, ObjectKey, PageList, PeerId, PeerUsage, Pending, PutOutcome,
    RemoveOutcome, Token,
};

/// Why a peer did not do what it was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LinkError {
    /// Dead, not reachable, or not letting us in.
    Down,
    /// No answer in time.
    Timeout,
    /// Another run answers at its address.
    Restarted,
    /// Too much is in flight here or there.
    Busy,
    /// It has no such object.
    Missing,
    /// It answered nonsense, or refused what it should not.
    Broken,
}

impl From<TransferError> for LinkError {
    fn from(error: TransferError) -> Self {
        match error.kind() {
            ErrorKind::PeerDown | ErrorKind::Denied => Self::Down,
            ErrorKind::Timeout => Self::Timeout,
            ErrorKind::Stale => Self::Restarted,
            ErrorKind::Busy => Self::Busy,
            _ => Self::Broken,
        }
    }
}

impl From<Malformed> for LinkError {
    fn from(_: Malformed) -> Self {
        Self::Broken
    }
}

impl LinkError {
    pub(crate) fn of_get(self) -> GetOutcome {
        match self {
            Self::Down | Self::Broken => GetOutcome::PeerDown,
            Self::Timeout => GetOutcome::Timeout,
            Self::Restarted => GetOutcome::Stale,
            Self::Busy => GetOutcome::Busy,
            Self::Missing => GetOutcome::Miss,
        }
    }

    pub(crate) fn of_put(self) -> PutOutcome {
        match self {
            Self::Down | Self::Broken => PutOutcome::PeerDown,
            Self::Timeout => PutOutcome::Timeout,
            Self::Restarted | Self::Missing => PutOutcome::Stale,
            Self::Busy => PutOutcome::Busy,
        }
    }
}

const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// All connections of a node.
#[derive(Debug)]
pub(crate) struct Links {
    engine: Arc<TcpEngine>,
    secret: Secret,
    /// How long connecting may take, whatever the deadline.
    limit: Duration,
    states: Mutex<HashMap<PeerId, State>>,
    changed: Condvar,
}

#[derive(Clone, Debug)]
enum State {
    Connecting,
    Up(TcpPeer, String),
    /// Tried in vain: it is left alone until then.
    Down {
        until: Instant,
        pause: Duration,
    },
}

/// A connection to one run of a peer.
#[derive(Clone, Debug)]
pub(crate) struct Link {
    engine: Arc<TcpEngine>,
    tcp: TcpPeer,
}

impl Links {
    pub(crate) fn new(engine: Arc<TcpEngine>, secret: Secret, limit: Duration) -> Self {
        Self { engine, secret, limit, states: Mutex::default(), changed: Condvar::new() }
    }

    /// A connection to exactly this run of a peer.
    pub(crate) fn link(&self, member: &Member, deadline: Instant) -> Result<Link, LinkError> {
        self.reach(&member.peer, &member.address, Some(member.boot), deadline)
    }

    /// A connection to this run of the peer at this address, or to any.
    pub(crate) fn reach(
        &self,
        peer: &PeerId,
        address: &str,
        run: Option<Token>,
        deadline: Instant,
    ) -> Result<Link, LinkError> {
        let is_wanted = |tcp: &TcpPeer| run.is_none_or(|run| tcp.boot() == run);
        let mut states = self.lock();
        let pause = loop {
            let now = Instant::now();
            match states.get(peer) {
                Some(State::Up(tcp, known)) if is_wanted(tcp) && known == address => {
                    let tcp = *tcp;
                    drop(states);
                    return Ok(Link { engine: Arc::clone(&self.engine), tcp });
                }
                Some(State::Connecting) => {
                    let left = deadline.saturating_duration_since(now);
                    if left.is_zero() {
                        return Err(LinkError::Timeout);
                    }
                    let waited = self.changed.wait_timeout(states, left);
                    states = waited.unwrap_or_else(PoisonError::into_inner).0;
                }
                Some(State::Down { until, .. }) if *until > now => return Err(LinkError::Down),
                Some(State::Down { pause, .. }) => break (*pause * 2).min(LONGEST_PAUSE),
                Some(State::Up(..)) | None => break FIRST_PAUSE,
            }
        };
        let before = states.insert(peer.clone(), State::Connecting);
        drop(states);
        if let Some(State::Up(old, _)) = before {
            self.engine.disconnect(old);
        }
        let limit = deadline.min(Instant::now() + self.limit);
        let made = match address.parse() {
            Ok(address) => self.engine.connect(address, &self.secret, limit).map_err(|error| {
                tracing::debug!(%peer, %error, "a peer cannot be reached");
                LinkError::from(error)
            }),
            Err(_) => Err(LinkError::Down),
        };
        let state = match &made {
            Ok(tcp) => State::Up(*tcp, address.to_owned()),
            Err(_) => State::Down { until: Instant::now() + pause, pause },
        };
        self.lock().insert(peer.clone(), state);
        self.changed.notify_all();
        let tcp = made?;
        if is_wanted(&tcp) {
            Ok(Link { engine: Arc::clone(&self.engine), tcp })
        } else {
            Err(LinkError::Restarted)
        }
    }

    /// Closes all connections: what is in flight ends.
    pub(crate) fn close(&self) {
        let states = std::mem::take(&mut *self.lock());
        for state in states.into_values() {
            if let State::Up(tcp, _) = state {
                self.engine.disconnect(tcp);
            }
        }
    }

    /// The run is over: the next one who needs the peer connects anew.
    pub(crate) fn drop_run(&self, peer: &PeerId, link: &Link) {
        let mut states = self.lock();
        if matches!(states.get(peer), Some(State::Up(tcp, _)) if *tcp == link.tcp) {
            states.remove(peer);
            drop(states);
            self.engine.disconnect(link.tcp);
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<PeerId, State>> {
        self.states.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Generation and length of an object, or that it is not there.
pub(crate) type Resolved = Result<(Generation, u64), GetOutcome>;

/// Pages that a peer lends.
#[derive(Clone, Debug)]
pub(crate) struct Lent {
    pub(crate) generation: Generation,
    pub(crate) lease: u64,
    time: Duration,
    /// As the peer names them.
    pub(crate) pages: PageList,
}

impl Lent {
    /// Nothing that is read later is good. The time counts from when the question was sent.
    pub(crate) fn good_until(&self, asked: Instant) -> Instant {
        let margin = (self.time / 8).max(Duration::from_millis(5));
        asked + self.time.saturating_sub(margin)
    }
}

impl Link {
    /// Whether both are the same connection.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.tcp == other.tcp
    }

    /// Asks in words of its own.
    pub(crate) fn call(&self, request: &[u8], deadline: Instant) -> Result<Vec<u8>, LinkError> {
        Ok(self.engine.call(&self.tcp, request, deadline)?)
    }

    /// Leases objects, to read their pages without the peer.
    pub(crate) fn lease(
        &self,
        keys: &[ObjectKey],
        deadline: Instant,
    ) -> Result<Vec<Result<Lent, GetOutcome>>, LinkError> {
        self.batch(Op::Lease, keys, deadline, wire::put_key, |fields| {
            let status = wire::get_outcome(fields.u8()?)?;
            if status != GetOutcome::Remote {
                return Ok(Err(status));
            }
            let (generation, len) = (Generation(fields.u64()?), fields.u64()?);
            let (lease, ms) = (fields.u64()?, fields.u32()?);
            let time = Duration::from_millis(u64::from(ms));
            Ok(Ok(Lent { generation, lease, time, pages: wire::pages(fields, len)? }))
        })
    }

    /// Gives leases back.
    pub(crate) fn release(&self, leases: &[u64], deadline: Instant) -> Result<(), LinkError> {
        let put = |out: &mut Vec<u8>, lease: &u64| out.extend_from_slice(&lease.to_le_bytes());
        self.batch(Op::Release, leases, deadline, put, |_| Ok(())).map(drop)
    }

    /// A source for plans: this storing of an object.
    pub(crate) fn attach_read(
        &self,
        key: &ObjectKey,
        generation: Generation,
        len: u64,
    ) -> Result<RegionId, LinkError> {
        let descriptor = Descriptor::Read { key: *key, generation, len }.encode();
        Ok(self.engine.attach(&self.tcp, &descriptor, len)?)
    }

    /// A destination for plans: a pending object.
    pub(crate) fn attach_write(&self, pending: Pending, len: u64) -> Result<RegionId, LinkError> {
        let descriptor = Descriptor::Write(pending).encode();
        Ok(self.engine.attach(&self.tcp, &descriptor, len)?)
    }

    /// What the peer has of these objects.
    pub(crate) fn resolve(
        &self,
        keys: &[ObjectKey],
        deadline: Instant,
    ) -> Result<Vec<Resolved>, LinkError> {
        self.batch(Op::Resolve, keys, deadline, wire::put_key, |fields| {
            let status = wire::get_outcome(fields.u8()?)?;
            let (generation, len) = (Generation(fields.u64()?), fields.u64()?);
            Ok(if status == GetOutcome::Remote { Ok((generation, len)) } else { Err(status) })
        })
    }

    /// Takes memory for an object.
    pub(crate) fn allocate(
        &self,
        objects: &[(ObjectKey, u64)],
        deadline: Instant,
    ) -> Result<Vec<Result<Pending, PutOutcome>>, LinkError> {
        self.batch(
            Op::Allocate,
            objects,
            deadline,
            |out, (key, len)| {
                wire::put_key(out, key);
                out.extend_from_slice(&len.to_le_bytes());
            },
            |fields| {
                let status = wire::put_outcome(fields.u8()?)?;
                let pending = fields.pending()?;
                Ok(if status == PutOutcome::Created { Ok(pending) } else { Err(status) })
            },
        )
    }

    /// Makes written objects readable (`commit`), or gives their memory back.
    pub(crate) fn end(
        &self,
        pending: &[Pending],
        commit: bool,
        deadline: Instant,
    ) -> Result<Vec<PutOutcome>, LinkError> {
        let op = if commit { Op::Commit } else { Op::Abort };
        self.batch(
            op,
            pending,
            deadline,
            |out, pending| wire::put_pending(out, *pending),
            |fields| wire::put_outcome(fields.u8()?),
        )
    }

    /// Removes objects.
    pub(crate) fn remove(
        &self,
        keys: &[ObjectKey],
        deadline: Instant,
    ) -> Result<Vec<RemoveOutcome>, LinkError> {
        self.batch(Op::Remove, keys, deadline, wire::put_key, |fields| {
            wire::remove_outcome(fields.u8()?)
        })
    }

    /// Marks objects as used.
    pub(crate) fn touch(&self, keys: &[ObjectKey], deadline: Instant) -> Result<(), LinkError> {
        self.batch(Op::Touch, keys, deadline, wire::put_key, |_| Ok(())).map(drop)
    }

    /// How its memory is used.
    pub(crate) fn usage(&self, deadline: Instant) -> Result<PeerUsage, LinkError> {
        let answer = self.engine.call(&self.tcp, &wire::call(Op::Stat, 0), deadline)?;
        Ok(wire::usage(&answer)?)
    }

    fn batch<I, A>(
        &self,
        op: Op,
        items: &[I],
        deadline: Instant,
        put: impl Fn(&mut Vec<u8>, &I),
        take: impl Fn(&mut Fields<'_>) -> Result<A, Malformed>,
    ) -> Result<Vec<A>, LinkError> {
        let mut answers = Vec::with_capacity(items.len());
        for some in items.chunks(wire::MAX_ITEMS as usize) {
            let mut request = wire::call(op, some.len());
            some.iter().for_each(|item| put(&mut request, item));
            let answer = self.engine.call(&self.tcp, &request, deadline)?;
            let mut fields = Fields(&answer);
            for _ in some {
                answers.push(take(&mut fields)?);
            }
            fields.end()?;
        }
        Ok(answers)
    }
}
