//! The shm engine: peers of the same node, reached through their own mapped segments.
//!
//! A peer passes the descriptors of its segments once (the rendezvous of `ucm-data` does that);
//! from then on a read is a copy out of the mapping, without a socket and without a system call.
//! What makes it safe is a check that travels with the plan: see [`Stamps`].
//!
//! **Invariant:** a checked plan succeeds only if every byte was read while its source was current.

mod stamp;

use std::{
    sync::{Arc, PoisonError, RwLock},
    task::Waker,
    time::Instant,
};

use ucm_data::Segments;

use crate::{
    Capabilities, Completion, ErrorKind, HostEngine, HostEngineBuilder, Location, Memory, Quiesce,
    RegionId, Rejected, SourceCheck, Ticket, TransferEngine, TransferError, TransferPlan,
};

pub use stamp::{Stamp, StampCheck, Stamps};

/// What may be done with a peer's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Plans may read it.
    Read,
    /// Plans may read and write it.
    ReadWrite,
}

/// Settings of a [`ShmEngine`].
#[derive(Clone, Debug)]
#[must_use = "call `build`"]
pub struct ShmEngineBuilder {
    host: HostEngineBuilder,
}

impl ShmEngineBuilder {
    /// Number of worker threads. Zero (the default): `submit` copies in the caller's thread.
    pub fn workers(mut self, workers: usize) -> Self {
        self.host = self.host.workers(workers);
        self
    }

    /// Plans accepted but not yet polled; one more is refused as `Busy`. Default 4096.
    pub fn max_in_flight(mut self, plans: usize) -> Self {
        self.host = self.host.max_in_flight(plans);
        self
    }

    /// Starts the engine.
    ///
    /// # Errors
    /// `Failed` when the operating system refuses a thread.
    pub fn build(self) -> Result<ShmEngine, TransferError> {
        Ok(ShmEngine { host: self.host.build()?, peers: RwLock::default() })
    }
}

/// Moves bytes between this process's memory and that of peers on the same node.
///
/// A plan ends when its last copy has ended, as in [`HostEngine`]; the death of a peer changes
/// nothing for the mapping, which stays readable as long as it is attached. Nobody can take a
/// mapping back: an owner that lets a peer *write* must wait for the end of that write, or for the
/// proven death of the writer, before it uses the memory for anything else.
#[derive(Debug)]
pub struct ShmEngine {
    host: HostEngine,
    /// What may be done with the memory of each peer, by the number in its locations.
    peers: RwLock<Vec<Access>>,
}

impl ShmEngine {
    /// Default settings: no workers, 4096 plans in flight.
    pub fn builder() -> ShmEngineBuilder {
        ShmEngineBuilder { host: HostEngine::builder().name("ucm-shm") }
    }

    /// A further peer; the number is part of the [`Location`] of its memory, and is never reused.
    ///
    /// # Errors
    /// `Registration` after 2³² peers.
    pub fn add_peer(&self, access: Access) -> Result<u32, TransferError> {
        let mut peers = self.peers.write().unwrap_or_else(PoisonError::into_inner);
        let number = u32::try_from(peers.len()).map_err(|_| {
            TransferError::new(ErrorKind::Registration, "4294967296 peers have been added")
        })?;
        peers.push(access);
        Ok(number)
    }

    /// Makes memory of a peer, mapped into this process, usable in plans. Given back by
    /// [`deregister`](TransferEngine::deregister).
    ///
    /// # Errors
    /// `Invalid` for an unknown peer or memory of no bytes, `Unsupported` for memory that is not
    /// mapped into this process.
    pub fn attach(&self, peer: u32, memory: Memory) -> Result<RegionId, TransferError> {
        if self.access(peer).is_none() {
            return Err(TransferError::invalid(format!("there is no peer {peer}; add it first")));
        }
        if !is_host(memory.location()) {
            return Err(TransferError::unsupported(format!(
                "memory of a peer must be mapped here, {:?} is not",
                memory.location()
            )));
        }
        self.host.register_reachable(memory.at(Location::Peer(peer)))
    }

    /// Maps all segments of a peer and attaches them: one region a segment, in order.
    ///
    /// # Errors
    /// `Registration` when a mapping is refused, and as [`attach`](Self::attach); nothing stays
    /// attached then.
    pub fn attach_segments(
        &self,
        peer: u32,
        segments: &Segments,
    ) -> Result<Vec<RegionId>, TransferError> {
        let mut regions = Vec::new();
        let attached = Memory::of_segments(segments)?
            .into_iter()
            .try_for_each(|memory| self.attach(peer, memory).map(|region| regions.push(region)));
        if let Err(error) = attached {
            for region in regions {
                // Nobody knows these handles yet, so no plan uses them.
                let _ = self.deregister(region);
            }
            return Err(error);
        }
        Ok(regions)
    }

    /// Starts a plan that is good only if `check` says so before the first byte and after the last
    /// one of each piece.
    ///
    /// # Errors
    /// As [`submit`](TransferEngine::submit), and `Stale` when the check fails at once. A source
    /// that changes later ends the plan as `Stale`.
    pub fn submit_checked(
        &self,
        plan: TransferPlan,
        check: Arc<dyn SourceCheck>,
    ) -> Result<Ticket, Rejected> {
        if !check.is_current() {
            return Err(Rejected { plan, error: TransferError::source_changed() });
        }
        self.submit_between(plan, Some(check))
    }

    fn submit_between(
        &self,
        plan: TransferPlan,
        check: Option<Arc<dyn SourceCheck>>,
    ) -> Result<Ticket, Rejected> {
        let supports = |src, dst| {
            let writable = |l| match l {
                Location::Peer(peer) => self.access(peer) == Some(Access::ReadWrite),
                other => is_host(other),
            };
            (is_host(src) || matches!(src, Location::Peer(_))) && writable(dst)
        };
        self.host.submit_between(plan, supports, check)
    }

    fn access(&self, peer: u32) -> Option<Access> {
        let peers = self.peers.read().unwrap_or_else(PoisonError::into_inner);
        peers.get(usize::try_from(peer).ok()?).copied()
    }
}

impl Memory {
    /// All segments of a pool, mapped, each as memory that keeps the mapping.
    ///
    /// # Errors
    /// `Registration` when the mapping is refused.
    pub fn of_segments(segments: &Segments) -> Result<Vec<Self>, TransferError> {
        let refused = |why: String| TransferError::new(ErrorKind::Registration, why);
        let mapped = segments.map().map_err(|error| refused(error.to_string()))?;
        (0..segments.geometry().segments().len())
            .map(|index| {
                let range = u32::try_from(index).ok().and_then(|i| mapped.segment_range(i));
                let (base, len) =
                    range.ok_or_else(|| refused(format!("segment {index} is gone")))?;
                // SAFETY: the mapping is readable and writable as long as `mapped` lives, and this
                // process makes no references to its bytes.
                Ok(unsafe { Self::from_raw(base, len, Location::Host, Arc::clone(&mapped) as _) })
            })
            .collect()
    }
}

fn is_host(location: Location) -> bool {
    matches!(location, Location::Host | Location::PinnedHost)
}

impl TransferEngine for ShmEngine {
    fn name(&self) -> &'static str {
        "shm"
    }

    fn capabilities(&self) -> Capabilities {
        self.host.capabilities()
    }

    fn register(&self, memory: Memory) -> Result<RegionId, TransferError> {
        self.host.register(memory)
    }

    fn deregister(&self, region: RegionId) -> Result<(), TransferError> {
        self.host.deregister(region)
    }

    fn submit(&self, plan: TransferPlan) -> Result<Ticket, Rejected> {
        self.submit_between(plan, None)
    }

    fn poll(&self, out: &mut Vec<Completion>) -> usize {
        self.host.poll(out)
    }

    fn set_waker(&self, waker: Option<Waker>) {
        self.host.set_waker(waker);
    }

    fn quiesce(&self, target: Quiesce, deadline: Instant) -> Result<(), TransferError> {
        self.host.quiesce(target, deadline)
    }
}

#[cfg(test)]
mod tests;
