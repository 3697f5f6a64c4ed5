//! From a plan to a job: checks, and the requests that its items become.
//!
//! **Invariant:** a plan that is refused comes back whole, and nothing of it has been sent.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use super::{
    super::{
        sys::Scatter,
        wire::{Body, PeerRange, RequestKind},
    },
    Attached, Inner,
    job::{Exchange, Job},
    peer::Peer,
};
use crate::{
    ErrorKind, Hold, Location, PlanLimits, Region, RegionId, RegionLease, Rejected, Ticket,
    Transfer, TransferError, TransferPlan, planner,
};

impl Inner {
    pub(super) fn accept(
        self: &Arc<Self>,
        mut plan: TransferPlan,
        deadline: Instant,
        direct: bool,
    ) -> Result<Arc<Job>, Rejected> {
        match self.accept_in_place(&mut plan, deadline, direct) {
            Ok(job) => Ok(job),
            Err(error) => Err(Rejected { plan, error }),
        }
    }

    fn accept_in_place(
        self: &Arc<Self>,
        plan: &mut TransferPlan,
        deadline: Instant,
        direct: bool,
    ) -> Result<Arc<Job>, TransferError> {
        if self.poisoned.load(Ordering::SeqCst) {
            let text = "a waker or the thread of the tcp engine failed; make a new engine";
            return Err(TransferError::new(ErrorKind::Poisoned, text));
        }
        let most = self.exchange_bytes.load(Ordering::SeqCst);
        let limits = PlanLimits {
            max_item_bytes: most.min(u64::from(u32::MAX)),
            max_group_items: usize::MAX,
            sort: false,
        };
        let (planned, lease) = {
            let view = self.regions.view();
            let planned = planner::plan(&plan.items, limits, |id| view.info(id), reachable)?;
            let lease = view.lease(&planned.regions)?;
            (planned, lease)
        };
        let mut parts: Vec<(Arc<Peer>, Part)> = Vec::new();
        for group in &planned.groups {
            let items = planned.items.get(group.items.clone()).unwrap_or_default();
            self.cut(items, &lease, &mut parts)?;
        }
        let size = (parts.len(), planned.bytes);
        let job = self.admit(deadline, direct, lease, size, &mut plan.holds)?;
        plan.items = Vec::new();
        if parts.is_empty() {
            if let Some(nothing) = job.exchange_ended(Ok(()), Vec::new()) {
                self.finish(&job, nothing);
            }
            return Ok(job);
        }
        for (peer, part) in parts {
            let exchange = Exchange {
                job: Arc::clone(&job),
                kind: part.kind,
                frame: part.body.finish(),
                pieces: part.pieces,
                payload: part.payload,
                resent: false,
            };
            self.start(&peer, vec![exchange]);
        }
        Ok(job)
    }

    /// Cuts items of one pair of locations into requests.
    fn cut(
        &self,
        items: &[Transfer],
        lease: &RegionLease<Attached>,
        parts: &mut Vec<(Arc<Peer>, Part)>,
    ) -> Result<(), TransferError> {
        let most = self.exchange_bytes.load(Ordering::SeqCst);
        let ranges = usize::try_from(self.max_ranges.load(Ordering::SeqCst)).unwrap_or(usize::MAX);
        let frame = usize::try_from(self.max_frame.load(Ordering::SeqCst)).unwrap_or(usize::MAX);
        let mut sides: Option<Sides<'_>> = None;
        let mut part: Option<Part> = None;
        for item in items {
            let same = sides.as_ref().is_some_and(|s| s.is_of(item));
            let side = match &mut sides {
                Some(sides) if same => sides,
                other => other.insert(Sides::of(item, lease)?),
            };
            let descriptor = side.descriptor.len();
            let full = part.as_ref().is_some_and(|part| {
                part.payload + item.len > most
                    || part.ranges >= ranges
                    || part.frame + Body::section_bytes(descriptor, 1) > frame
            });
            if full && let Some(full) = part.take() {
                parts.push((Arc::clone(side.peer), full));
            }
            let fresh = part.is_none();
            let left = items.len().min(ranges);
            let part = part.get_or_insert_with(|| Part::new(side.kind, left));
            if fresh || !same {
                part.body.section(side.descriptor);
                part.frame += Body::section_bytes(descriptor, 0);
            }
            let (far, near) = side.ends(item);
            // Cut to 32 bits by the planner.
            let len = u32::try_from(item.len).unwrap_or(u32::MAX);
            part.body.range(PeerRange { offset: far, len });
            part.pieces.push(side.near.memory(), near, item.len)?;
            part.frame += Body::section_bytes(0, 1) - Body::section_bytes(0, 0);
            part.ranges += 1;
            part.payload += item.len;
        }
        if let (Some(side), Some(part)) = (sides, part) {
            parts.push((Arc::clone(side.peer), part));
        }
        Ok(())
    }

    pub(super) fn admit(
        &self,
        deadline: Instant,
        direct: bool,
        lease: RegionLease<Attached>,
        (parts, bytes): (usize, u64),
        holds: &mut Vec<Hold>,
    ) -> Result<Arc<Job>, TransferError> {
        let mut ends = self.ends();
        let in_flight = ends.jobs.len() + ends.done.len();
        if in_flight >= self.max_in_flight {
            return Err(TransferError::new(
                ErrorKind::Busy,
                format!(
                    "{in_flight} plans are in flight or not polled yet, the limit is {}; poll \
                     completions first",
                    self.max_in_flight
                ),
            ));
        }
        let ticket = Ticket(ends.next_ticket);
        ends.next_ticket += 1;
        let holds = std::mem::take(holds);
        let job = Job::new(ticket, deadline, direct, lease, (parts, bytes), holds);
        ends.jobs.insert(ticket, Arc::clone(&job));
        drop(ends);
        self.due_by(deadline);
        Ok(job)
    }
}

/// A request under construction.
struct Part {
    kind: RequestKind,
    body: Body,
    pieces: Scatter,
    payload: u64,
    ranges: usize,
    frame: usize,
}

impl Part {
    fn new(kind: RequestKind, ranges: usize) -> Self {
        let ranges = ranges.min(1 << 16);
        let (body, pieces) = (Body::new(ranges), Scatter::with_capacity(ranges + 1));
        Self { kind, body, pieces, payload: 0, ranges: 0, frame: 0 }
    }
}

/// The two regions of an item: ours, and the peer's.
struct Sides<'a> {
    kind: RequestKind,
    src: RegionId,
    dst: RegionId,
    near: &'a Region<Attached>,
    peer: &'a Arc<Peer>,
    descriptor: &'a [u8],
}

impl<'a> Sides<'a> {
    fn of(item: &Transfer, lease: &'a RegionLease<Attached>) -> Result<Self, TransferError> {
        let find = |id| lease.find(id).ok_or_else(|| TransferError::stale(id));
        let (src, dst) = (find(item.src.region)?, find(item.dst.region)?);
        let (kind, far, near) = match (src.attached(), dst.attached()) {
            (Attached::Remote { .. }, Attached::Local) => (RequestKind::Read, src, dst),
            _ => (RequestKind::Write, dst, src),
        };
        let Attached::Remote { peer, descriptor } = far.attached() else {
            return Err(TransferError::unsupported("neither end of the item lies with a peer"));
        };
        Ok(Self { kind, src: item.src.region, dst: item.dst.region, near, peer, descriptor })
    }

    fn is_of(&self, item: &Transfer) -> bool {
        self.src == item.src.region && self.dst == item.dst.region
    }

    /// Offsets with the peer, and here.
    fn ends(&self, item: &Transfer) -> (u64, u64) {
        match self.kind {
            RequestKind::Read => (item.src.offset, item.dst.offset),
            _ => (item.dst.offset, item.src.offset),
        }
    }
}

fn reachable(src: Location, dst: Location) -> bool {
    let host = |l| matches!(l, Location::Host | Location::PinnedHost);
    let peer = |l| matches!(l, Location::Peer(_));
    (peer(src) && host(dst)) || (host(src) && peer(dst))
}
