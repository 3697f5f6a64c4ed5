//! Load tasks: what callers submit, and what is checked and computed from it before admission.
//!
//! **Invariant:** everything that can be refused is refused here, in the caller's thread, before
//! any effect; the core sees only tasks whose indexes, lengths and destinations are right.

use std::{
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use ucm_ctrl::{BlockId, FailKind, Key};
use ucm_transport::Addr;

use crate::{
    ErrorKind, QueueError, TaskHandle,
    admission::Share,
    hash::{Map, Mix},
    inbox::Inbox,
    outcome::Promise,
    rearrange,
    regions::Regions,
};

/// Requests that are submitted together; they end one by one.
#[derive(Clone, Debug, Default)]
pub struct Task {
    /// The requests.
    pub requests: Vec<Request>,
}

/// Shards that are useful only together.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// The shards, in the caller's order.
    pub shards: Vec<ShardRef>,
    /// When the caller must be released at the latest.
    pub deadline: Option<Deadline>,
}

/// One shard and where it goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardRef {
    /// What to load.
    pub key: Key,
    /// First byte of the destination.
    pub dst: Addr,
    /// Exact length of the shard in bytes; the pool's shard size if absent. Zero means: nothing to
    /// load.
    pub len: Option<u64>,
}

/// When a request must end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deadline {
    /// This long after admission.
    After(Duration),
    /// At this time.
    At(Instant),
}

impl Deadline {
    /// The moment, for a task admitted `now`; a time beyond the clock's range is no deadline.
    pub(crate) fn at(self, now: Instant) -> Option<Instant> {
        match self {
            Self::After(time) => now.checked_add(time),
            Self::At(at) => Some(at),
        }
    }
}

/// In which order a task's shards are visited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Order {
    /// [`rearrange`], so that ranks with the same task start at different shards.
    #[default]
    Rotated,
    /// 0, 1, 2, …; a baseline for measurements.
    Natural,
}

/// What tasks are checked against.
#[derive(Clone, Debug)]
pub(crate) struct Bounds {
    pub(crate) shard_bytes: u64,
    pub(crate) shards_per_block: u32,
    pub(crate) ranks: u32,
    pub(crate) rank: u32,
    pub(crate) order: Order,
}

/// One unique shard of a task.
#[derive(Debug)]
pub(crate) struct Unit {
    pub(crate) key: Key,
    pub(crate) len: u64,
    /// Its destinations in [`Prepared::dsts`].
    pub(crate) dsts: Range<u32>,
    pub(crate) state: UnitState,
    /// Whether the one retry after a filler's failure is used up.
    pub(crate) retried: bool,
    /// Whether this queue reads it, or has read it.
    pub(crate) ours: bool,
}

/// Where a unit is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UnitState {
    /// Nobody does anything for it yet.
    Unresolved,
    /// Somebody else fills it.
    Waiting,
    /// This queue reads it, by the backend operation of this token.
    Reading(u64),
    /// Its bytes are here; the copy is queued or running.
    Copying,
    /// Ended, well or not, or nobody wants it any more.
    Done,
}

/// One destination of a unit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dst {
    pub(crate) addr: Addr,
    pub(crate) request: u32,
    pub(crate) shard: u32,
}

/// The core's view of one request.
#[derive(Debug)]
pub(crate) struct Req {
    /// Destinations whose unit has not ended.
    pub(crate) open: u32,
    /// Copies into its destinations that an engine has not ended.
    pub(crate) copying: u32,
    /// Shards that failed.
    pub(crate) failed: Vec<u32>,
    pub(crate) kind: Option<FailKind>,
    pub(crate) ended: bool,
    /// Cancelled, but a copy has not ended.
    pub(crate) cancelling: bool,
    pub(crate) deadline: Option<Instant>,
    /// Its units in [`Prepared::request_units`].
    pub(crate) units: Range<u32>,
}

impl Req {
    /// Whether anybody still wants bytes in its destinations.
    pub(crate) fn is_live(&self) -> bool {
        !self.ended && !self.cancelling
    }
}

/// A checked task, ready to be worked on.
pub(crate) struct Prepared {
    pub(crate) id: u64,
    /// Given back before the last request ends; fields drop in this order.
    pub(crate) share: Option<Share>,
    pub(crate) promise: Promise,
    pub(crate) units: Vec<Unit>,
    pub(crate) dsts: Vec<Dst>,
    pub(crate) reqs: Vec<Req>,
    pub(crate) request_units: Vec<u32>,
    /// Units in the order of visits.
    pub(crate) order: Vec<u32>,
    /// (block, s + 1) of each block, for the idle window.
    pub(crate) next_keys: Vec<Key>,
    pub(crate) admitted: Instant,
    /// The task that must have nothing more to claim before this one claims anything.
    pub(crate) after: Option<u64>,
}

impl Task {
    /// What admission counts: the shards of all requests, one at least for each.
    pub(crate) fn weight(&self) -> u64 {
        self.requests.iter().map(|request| request.shards.len().max(1) as u64).sum()
    }

    /// Bytes up to the end of each request, shards of several requests counted in each.
    pub(crate) fn bytes_until(&self, shard_bytes: u64) -> impl Iterator<Item = u64> {
        self.requests.iter().scan(0_u64, move |bytes, request| {
            for shard in &request.shards {
                *bytes = bytes.saturating_add(shard.len.unwrap_or(shard_bytes));
            }
            Some(*bytes)
        })
    }

    /// Checks everything and computes what the core needs.
    pub(crate) fn prepare(
        self,
        id: u64,
        now: Instant,
        bounds: &Bounds,
        regions: &Regions,
        share: Share,
        inbox: Arc<Inbox>,
    ) -> Result<(Box<Prepared>, TaskHandle), QueueError> {
        let count = u32::try_from(self.weight()).map_err(|_| too_many(self.weight()))?;
        let mut built = Builder::new(count as usize);
        for (index, request) in (0_u32..).zip(&self.requests) {
            built.request(index, request, now, bounds)?;
        }
        regions.check(built.extents.iter().copied())?;
        check_overlap(&mut built.extents)?;
        let shards =
            self.requests.iter().map(|r| u32::try_from(r.shards.len()).unwrap_or(u32::MAX));
        let (promise, handle) = Promise::new(id, shards.collect(), inbox);
        let Builder { mut units, mut placed, reqs, request_units, next, .. } = built;
        if placed.len() > units.len() {
            placed.sort_by_key(|(unit, _)| *unit);
        }
        let mut dsts = Vec::with_capacity(placed.len());
        for (at, (unit, dst)) in (0_u32..).zip(placed) {
            dsts.push(dst);
            if let Some(unit) = units.get_mut(unit as usize) {
                unit.dsts = if unit.dsts.is_empty() { at..at + 1 } else { unit.dsts.start..at + 1 };
            }
        }
        let order = match bounds.order {
            Order::Natural => (0..units.len()).map(narrow).collect(),
            Order::Rotated => rearrange(units.len(), bounds.ranks as usize, bounds.rank as usize)
                .map(narrow)
                .collect(),
        };
        let next_keys = next
            .into_iter()
            .filter_map(|(block, shard)| Some((block, shard.checked_add(1)?)))
            .filter(|(_, shard)| *shard < bounds.shards_per_block)
            .map(|(block, shard)| Key { block, shard })
            .collect();
        let prepared = Prepared {
            id,
            promise,
            units,
            dsts,
            reqs,
            request_units,
            order,
            next_keys,
            admitted: now,
            after: None,
            share: Some(share),
        };
        Ok((Box::new(prepared), handle))
    }
}

/// One destination in flat form: region, first byte, length.
pub(crate) type Extent = (Addr, u64);

struct Builder {
    units: Vec<Unit>,
    unit_of: Map<Key, u32>,
    placed: Vec<(u32, Dst)>,
    reqs: Vec<Req>,
    request_units: Vec<u32>,
    extents: Vec<Extent>,
    next: Map<BlockId, u32>,
}

impl Builder {
    fn new(count: usize) -> Self {
        Self {
            units: Vec::with_capacity(count),
            unit_of: Map::with_capacity_and_hasher(count, Mix::default()),
            placed: Vec::with_capacity(count),
            reqs: Vec::new(),
            request_units: Vec::with_capacity(count),
            extents: Vec::with_capacity(count),
            next: Map::default(),
        }
    }

    fn request(
        &mut self,
        index: u32,
        request: &Request,
        now: Instant,
        bounds: &Bounds,
    ) -> Result<(), QueueError> {
        let first = narrow(self.request_units.len());
        for (place, shard) in (0_u32..).zip(&request.shards) {
            let len = shard.len.unwrap_or(bounds.shard_bytes);
            if len > bounds.shard_bytes {
                return Err(QueueError::new(
                    ErrorKind::TooLarge,
                    format!(
                        "shard {place} of request {index} has {len} bytes, the pool's slots have {}: \
                         use a pool with larger slots",
                        bounds.shard_bytes
                    ),
                ));
            }
            if shard.key.shard >= bounds.shards_per_block {
                return Err(QueueError::new(
                    ErrorKind::Invalid,
                    format!(
                        "shard {place} of request {index} is {:?}, the pool's blocks have {} shards",
                        shard.key, bounds.shards_per_block
                    ),
                ));
            }
            if len == 0 {
                continue;
            }
            let unit = self.unit(shard.key, len, bounds)?;
            self.placed.push((unit, Dst { addr: shard.dst, request: index, shard: place }));
            self.request_units.push(unit);
            self.extents.push((shard.dst, len));
        }
        let units = first..narrow(self.request_units.len());
        self.reqs.push(Req {
            open: units.end - units.start,
            copying: 0,
            failed: Vec::new(),
            kind: None,
            ended: false,
            cancelling: false,
            deadline: request.deadline.and_then(|deadline| deadline.at(now)),
            units,
        });
        Ok(())
    }

    /// The unit of a key: the first one that named it, so that it is read once.
    fn unit(&mut self, key: Key, len: u64, bounds: &Bounds) -> Result<u32, QueueError> {
        if let Some(&index) = self.unit_of.get(&key) {
            match self.units.get(index as usize) {
                Some(unit) if unit.len == len => return Ok(index),
                unit => {
                    return Err(QueueError::new(
                        ErrorKind::Invalid,
                        format!(
                            "{key:?} is asked for with {} and with {len} bytes: a key has one length",
                            unit.map_or(0, |unit| unit.len)
                        ),
                    ));
                }
            }
        }
        let index = narrow(self.units.len());
        self.unit_of.insert(key, index);
        self.units.push(Unit {
            key,
            len,
            dsts: 0..0,
            state: UnitState::Unresolved,
            retried: false,
            ours: false,
        });
        if bounds.shards_per_block > 1 {
            let next = self.next.entry(key.block).or_insert(key.shard);
            *next = (*next).max(key.shard);
        }
        Ok(index)
    }
}

/// Refuses destinations that share a byte.
fn check_overlap(extents: &mut [Extent]) -> Result<(), QueueError> {
    extents.sort_unstable();
    for pair in extents.windows(2) {
        let [(a, a_len), (b, b_len)] = pair else { continue };
        if a.region == b.region && a.offset.saturating_add(*a_len) > b.offset {
            return Err(QueueError::new(
                ErrorKind::Overlap,
                format!(
                    "two destinations of one task overlap in {:?}: {a_len} bytes at {} and {b_len} \
                     bytes at {}",
                    a.region, a.offset, b.offset
                ),
            ));
        }
    }
    Ok(())
}

fn too_many(shards: u64) -> QueueError {
    QueueError::new(
        ErrorKind::TooLarge,
        format!("a task of {shards} shards; at most {} can be numbered: split it", u32::MAX),
    )
}

/// `prepare` has checked that a task's shards can be counted in 32 bits.
fn narrow(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(u32::MAX)
}
