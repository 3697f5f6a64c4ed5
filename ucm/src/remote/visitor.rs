//! Somebody who looks at the pool, gets, puts and removes, and keeps nothing.
//!
//! **Invariant:** a visitor serves nobody and is in no directory.

use std::{fmt, sync::Arc, time::Instant};

use ucm_remote::{
    Agent, ByteRange, Destination, GetOutcome, GetRequest, HostMedium, Member, MostFree, ObjectKey,
    PagedLimits, PeerId, PeerUsage, PoolClient, PutOutcome, PutRequest, RemotePool as _,
    RemoveOutcome, Source,
};
use ucm_transport::{Addr, HostEngine, Memory, TransferEngine as _};

use super::{directory, refused, secret};
use crate::{Config, Error, ErrorKind};

const PAGE: u64 = 4096;
/// What a get brings at a time.
const ROUND: u64 = 1 << 20;

/// See the module description.
pub struct PoolVisitor {
    agent: Agent,
    client: PoolClient,
    engine: Arc<HostEngine>,
}

/// What became of a get.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fetched {
    /// The bytes.
    Bytes(Vec<u8>),
    /// Why there are none.
    Not(GetOutcome),
}

impl PoolVisitor {
    /// A visitor of the pool whose directory is configured; `put_bytes`: the largest object that it will
    /// put.
    ///
    /// # Errors
    /// `Config` without a directory or a secret, `Environment` without memory.
    pub fn open(config: &Config, put_bytes: u64) -> Result<Self, Error> {
        let remote = &config.remote;
        if remote.directory.is_empty() {
            return Err(Error::Config(
                "remote.directory is empty: give the one that the pool's peers have".into(),
            ));
        }
        let secret = secret(remote)?;
        let (directory, _) = directory(remote, &secret)?;
        let no_memory = |what: String| Error::Remote { kind: ErrorKind::Environment, what };
        let memory = |bytes: u64| Memory::host(usize::try_from(bytes).unwrap_or(usize::MAX));
        let bytes = put_bytes.div_ceil(PAGE).max(1).saturating_mul(PAGE);
        let medium = HostMedium::new(vec![memory(bytes)?], PagedLimits::new(PAGE))
            .map_err(|error| no_memory(error.to_string()))?;
        let me = PeerId::new(&format!("visitor {}", std::process::id()));
        let agent = Agent::builder(me, medium, directory, secret)
            .arena(memory(2 * ROUND)?)
            .prefetch(false)
            .placement(Arc::new(MostFree), remote.copies.max(1))
            .start()
            .map_err(refused)?;
        let engine = Arc::new(HostEngine::builder().build()?);
        let client = agent.client(Arc::clone(&engine) as _)?;
        Ok(Self { agent, client, engine })
    }

    /// The peers, and how their memory is used, as far as they answer.
    ///
    /// # Errors
    /// `Io` when the directory does not answer.
    pub fn peers(&self, deadline: Instant) -> Result<Vec<(Member, Option<PeerUsage>)>, Error> {
        self.agent
            .peers(deadline)
            .map_err(|error| Error::Remote { kind: ErrorKind::Io, what: error.to_string() })
    }

    /// A part of an object from `offset` on: `len` bytes, or all there are.
    ///
    /// # Errors
    /// Without memory for it.
    pub fn get(
        &self,
        key: ObjectKey,
        offset: u64,
        len: Option<u64>,
        deadline: Instant,
    ) -> Result<Fetched, Error> {
        let total = match self.client.exists(&[key], deadline).pop() {
            Some(Ok(Some(total))) => total,
            Some(Err(outcome)) => return Ok(Fetched::Not(outcome)),
            _ => return Ok(Fetched::Not(GetOutcome::Miss)),
        };
        let len = len.unwrap_or_else(|| total.saturating_sub(offset));
        let end = offset.checked_add(len).filter(|end| len > 0 && *end <= total);
        let Some(end) = end else { return Ok(Fetched::Not(GetOutcome::Invalid)) };
        let memory = Memory::host(usize::try_from(len).unwrap_or(usize::MAX))?;
        let region = self.engine.register(memory.clone())?;
        let starts = (0..len.div_ceil(ROUND)).map(|round| offset + round * ROUND);
        let ranges = starts.map(|at| Destination {
            range: ByteRange { offset: at, len: ROUND.min(end - at) },
            to: Addr { region, offset: at - offset },
        });
        let ranges = ranges.collect();
        let request = GetRequest { key, len: total, ranges, will_read_all: false };
        let outcome = self.client.get(&[request], deadline).pop().unwrap_or(GetOutcome::Miss);
        self.engine.deregister(region)?;
        if !outcome.is_served() {
            return Ok(Fetched::Not(outcome));
        }
        let mut bytes = vec![0; memory.len()];
        memory.read(0, &mut bytes)?;
        Ok(Fetched::Bytes(bytes))
    }

    /// Puts an object where the pool has most room, on as many peers as `remote.copies` says.
    ///
    /// # Errors
    /// Without memory for it.
    pub fn put(
        &self,
        key: ObjectKey,
        bytes: &[u8],
        deadline: Instant,
    ) -> Result<PutOutcome, Error> {
        if bytes.is_empty() {
            return Ok(PutOutcome::Invalid);
        }
        let memory = Memory::host(bytes.len())?;
        memory.write(0, bytes)?;
        let region = self.engine.register(memory)?;
        let len = bytes.len() as u64;
        let range = ByteRange { offset: 0, len };
        let ranges = vec![Source { range, from: Addr { region, offset: 0 } }];
        let outcome = self.client.put(&[PutRequest { key, len, ranges }], deadline).pop();
        self.engine.deregister(region)?;
        Ok(outcome.unwrap_or(PutOutcome::Failed))
    }

    /// Removes an object from all peers that are known to have it.
    #[must_use]
    pub fn remove(&self, key: ObjectKey, deadline: Instant) -> Option<RemoveOutcome> {
        self.client.remove(&[key], deadline).pop()
    }
}

impl fmt::Debug for PoolVisitor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolVisitor").field("agent", &self.agent).finish_non_exhaustive()
    }
}
