//! The side of a served directory that asks.
//!
//! **Invariant:** nothing of a directory whose epoch is lower than one that was heard is believed.

use std::{
    fmt,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use ucm_transport::{Secret, TcpEngine, TransferError};

use super::wire::{self, Op};
use crate::{
    Directory, DirectoryError, Epoch, Member, ObjectKey, PeerId, Placement, Record, Token,
    service::{
        Link, LinkError, Links,
        wire::{Fields, Malformed, put_key},
    },
};

/// How long connecting may take, whatever the deadline.
const CONNECT: Duration = Duration::from_secs(2);

/// A directory that a [`DirectoryServer`](crate::DirectoryServer) serves. Thread-safe; connects with the
/// first question, and again whenever it must.
pub struct DirectoryClient {
    links: Links,
    /// The server as [`Links`] knows it.
    server: PeerId,
    address: SocketAddr,
    /// The highest epoch that was heard.
    epoch: AtomicU64,
    outdated: AtomicU64,
}

impl From<Malformed> for DirectoryError {
    fn from(error: Malformed) -> Self {
        Self::Corrupt(error.to_string())
    }
}

impl DirectoryClient {
    /// Of the server at this address, which must know the secret.
    ///
    /// # Errors
    /// As [`TcpEngineBuilder::build`](ucm_transport::TcpEngineBuilder::build).
    pub fn new(address: SocketAddr, secret: Secret) -> Result<Self, TransferError> {
        let engine = Arc::new(TcpEngine::builder().connect_timeout(CONNECT).build()?);
        Ok(Self {
            links: Links::new(engine, secret, CONNECT),
            server: PeerId::new("directory"),
            address,
            epoch: AtomicU64::new(0),
            outdated: AtomicU64::new(0),
        })
    }

    /// Answers that were not believed because a later directory had been heard.
    #[must_use]
    pub fn outdated(&self) -> u64 {
        self.outdated.load(Ordering::Relaxed)
    }

    fn link(&self, deadline: Instant) -> Result<Link, LinkError> {
        self.links.reach(&self.server, &self.address.to_string(), None, deadline)
    }

    fn head(&self, op: Op, items: usize) -> Vec<u8> {
        wire::call(op, items, Epoch(self.epoch.load(Ordering::SeqCst)))
    }

    fn call(&self, request: &[u8], deadline: Instant) -> Result<Vec<u8>, DirectoryError> {
        // A server that was restarted has lost nothing of ours by that: it is asked once more.
        for again in [false, true] {
            let asked = self.link(deadline).and_then(|link| {
                link.call(request, deadline).inspect_err(|error| {
                    if matches!(error, LinkError::Restarted | LinkError::Down) {
                        self.links.drop_run(&self.server, &link);
                    }
                })
            });
            match asked {
                Ok(answer) => return Ok(answer),
                Err(LinkError::Timeout) => return Err(DirectoryError::Timeout),
                Err(LinkError::Restarted | LinkError::Down) if !again => {}
                Err(LinkError::Broken | LinkError::Missing) => {
                    return Err(DirectoryError::Corrupt(
                        "it refused a well-formed question".into(),
                    ));
                }
                Err(_) => break,
            }
        }
        Err(DirectoryError::Unavailable(format!("nobody answers at {}", self.address)))
    }

    /// Sends items in calls of at most [`wire::MAX_ITEMS`], and reads the answers.
    fn ask<I, A>(
        &self,
        op: Op,
        items: &[I],
        deadline: Instant,
        put: impl Fn(&mut Vec<u8>, &I),
        take: impl Fn(&mut Fields<'_>) -> Result<A, Malformed>,
    ) -> Result<Vec<A>, DirectoryError> {
        let mut answers = Vec::with_capacity(items.len());
        for some in items.chunks(wire::MAX_ITEMS) {
            let mut request = self.head(op, some.len());
            some.iter().for_each(|item| put(&mut request, item));
            let answer = self.call(&request, deadline)?;
            let mut fields = self.believed(&answer)?;
            for _ in some {
                answers.push(take(&mut fields)?);
            }
            fields.end()?;
        }
        Ok(answers)
    }

    fn believed<'a>(&self, answer: &'a [u8]) -> Result<Fields<'a>, DirectoryError> {
        let (epoch, items) = wire::parse_answer(answer)?;
        let highest = self.epoch.fetch_max(epoch.0, Ordering::SeqCst).max(epoch.0);
        if epoch.0 < highest {
            self.outdated.fetch_add(1, Ordering::Relaxed);
            return Err(DirectoryError::Unavailable(format!(
                "it is of epoch {}, and epoch {highest} was heard: another one has taken over",
                epoch.0
            )));
        }
        items
    }
}

impl Directory for DirectoryClient {
    fn epoch(&self, deadline: Instant) -> Result<Epoch, DirectoryError> {
        let answer = self.call(&self.head(Op::Epoch, 0), deadline)?;
        self.believed(&answer)?.end()?;
        Ok(wire::parse_answer(&answer)?.0)
    }

    fn locate(
        &self,
        keys: &[ObjectKey],
        deadline: Instant,
    ) -> Result<Vec<Vec<Record>>, DirectoryError> {
        self.ask(Op::Locate, keys, deadline, put_key, |fields| {
            let count = fields.u16()?;
            (0..count).map(|_| wire::record(fields)).collect()
        })
    }

    fn announce(
        &self,
        records: &[(ObjectKey, Record)],
        deadline: Instant,
    ) -> Result<(), DirectoryError> {
        records.iter().try_for_each(|(_, record)| wire::fits(record.peer.as_str()))?;
        self.ask(Op::Announce, records, deadline, put_pair, |_| Ok(())).map(drop)
    }

    fn withdraw(
        &self,
        records: &[(ObjectKey, Record)],
        deadline: Instant,
    ) -> Result<(), DirectoryError> {
        self.ask(Op::Withdraw, records, deadline, put_pair, |_| Ok(())).map(drop)
    }

    fn register(&self, member: &Member, deadline: Instant) -> Result<Epoch, DirectoryError> {
        wire::fits(member.peer.as_str())?;
        wire::fits(&member.address)?;
        let mut request = self.head(Op::Register, 1);
        wire::put_member(&mut request, member);
        let answer = self.call(&request, deadline)?;
        self.believed(&answer)?.end()?;
        Ok(wire::parse_answer(&answer)?.0)
    }

    fn remove_peer(
        &self,
        peer: &PeerId,
        boot: Token,
        deadline: Instant,
    ) -> Result<(), DirectoryError> {
        let put = |out: &mut Vec<u8>, (boot, peer): &(Token, &PeerId)| {
            out.extend_from_slice(&boot.0);
            wire::put_text(out, peer.as_str());
        };
        self.ask(Op::RemovePeer, &[(boot, peer)], deadline, put, |_| Ok(())).map(drop)
    }

    fn members(&self, deadline: Instant) -> Result<Vec<Member>, DirectoryError> {
        let answer = self.call(&self.head(Op::Members, 0), deadline)?;
        let mut fields = self.believed(&answer)?;
        let count = fields.u32()?;
        let members = (0..count).map(|_| wire::member(&mut fields)).collect::<Result<_, _>>()?;
        fields.end()?;
        Ok(members)
    }

    fn place(
        &self,
        objects: &[(ObjectKey, u64)],
        deadline: Instant,
    ) -> Result<Vec<Placement>, DirectoryError> {
        let put = |out: &mut Vec<u8>, (key, len): &(ObjectKey, u64)| {
            put_key(out, key);
            out.extend_from_slice(&len.to_le_bytes());
        };
        self.ask(Op::Place, objects, deadline, put, |fields| {
            let count = fields.u16()?;
            let peers = (0..count).map(|_| Ok(PeerId::new(wire::text(fields)?)));
            peers.collect::<Result<_, Malformed>>().map(Placement)
        })
    }
}

fn put_pair(out: &mut Vec<u8>, (key, record): &(ObjectKey, Record)) {
    put_key(out, key);
    wire::put_record(out, record);
}

impl fmt::Debug for DirectoryClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DirectoryClient").field("address", &self.address).finish_non_exhaustive()
    }
}
