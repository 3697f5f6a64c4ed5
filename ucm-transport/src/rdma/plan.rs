//! From a plan to parts: what each peer's adapter is to be told.
//!
//! **Invariant:** a plan that is refused comes back whole, and nothing of it has been posted.

use std::sync::Arc;

use super::{
    peer::Peer,
    pieces::Pieces,
    sys::Sge,
    wire::FarPiece,
    work::{Limits, Operations, Span},
};
use crate::{
    Access, ErrorKind, Location, Region, RegionId, RegionLease, Transfer, TransferError,
    planner::Planned,
};

/// What a region is to the engine.
#[derive(Debug)]
pub(super) enum Attached {
    Local(Pieces),
    Remote(Far),
}

/// A region of a peer.
#[derive(Debug)]
pub(super) struct Far {
    pub(super) peer: Arc<Peer>,
    pub(super) access: Access,
    pieces: Vec<FarPiece>,
    /// Offset of the first byte after each piece.
    ends: Vec<u64>,
}

impl Far {
    pub(super) fn new(peer: Arc<Peer>, access: Access, pieces: Vec<FarPiece>) -> Self {
        let sum = |end: &mut u64, piece: &FarPiece| {
            *end += piece.len;
            Some(*end)
        };
        let ends = pieces.iter().scan(0, sum).collect();
        Self { peer, access, pieces, ends }
    }

    /// Address and key of a place, and how many bytes from there lie in the same piece.
    fn find(&self, offset: u64) -> Option<(u64, u32, u64)> {
        let at = self.ends.partition_point(|end| *end <= offset);
        let (piece, end) = (self.pieces.get(at)?, self.ends.get(at)?);
        let left = end - offset;
        Some((piece.addr + (piece.len - left), piece.rkey, left))
    }
}

/// A plan's work with one peer.
#[derive(Debug)]
pub(super) struct Parcel {
    pub(super) peer: Arc<Peer>,
    pub(super) write: bool,
    /// The processor reaches all of our memory.
    pub(super) host: bool,
    pub(super) operations: Operations,
}

/// Which locations a plan may connect.
pub(super) fn reachable(src: Location, dst: Location) -> bool {
    let far = |location| matches!(location, Location::Peer(_));
    far(src) != far(dst)
}

/// Cuts a plan at the borders of registered pieces, and joins what one operation can carry.
pub(super) fn parcels(
    planned: &Planned,
    lease: &RegionLease<Attached>,
    limits: Limits,
    byte: Sge,
) -> Result<Vec<Parcel>, TransferError> {
    let mut all = Vec::with_capacity(planned.groups.len());
    for group in &planned.groups {
        let items = planned.items.get(group.items.clone()).unwrap_or_default();
        let mut sides: Option<Sides<'_>> = None;
        let mut spans = Vec::with_capacity(items.len());
        let mut host = true;
        for item in items {
            let same = sides.as_ref().is_some_and(|sides| sides.is_of(item));
            let sides = match &mut sides {
                Some(sides) if same => sides,
                other => other.insert(Sides::of(item, lease)?),
            };
            host &= sides.near.host;
            sides.cut(item, &mut spans)?;
        }
        if let Some(Sides { far, write, .. }) = sides {
            let mut operations = Operations::join(spans, write, limits);
            if write {
                operations.seal(byte);
            }
            all.push(Parcel { peer: Arc::clone(&far.peer), write, host, operations });
        }
    }
    Ok(all)
}

/// The two regions of an item.
struct Sides<'a> {
    src: RegionId,
    dst: RegionId,
    far: &'a Far,
    near: &'a Pieces,
    write: bool,
}

impl<'a> Sides<'a> {
    fn of(item: &Transfer, lease: &'a RegionLease<Attached>) -> Result<Self, TransferError> {
        let find = |id| lease.find(id).ok_or_else(|| TransferError::stale(id));
        let (src, dst) = (find(item.src.region)?, find(item.dst.region)?);
        let attached = |region: &'a Arc<Region<Attached>>| region.attached();
        let (far, near, write) = match (attached(src), attached(dst)) {
            (Attached::Remote(far), Attached::Local(near)) => (far, near, false),
            (Attached::Local(near), Attached::Remote(far)) => (far, near, true),
            _ => {
                return Err(TransferError::unsupported(
                    "one end of an item must lie with a peer, the other one here",
                ));
            }
        };
        if write && far.access != Access::ReadWrite {
            let text = "the peer has exported this region for reading only";
            return Err(TransferError::new(ErrorKind::Denied, text));
        }
        Ok(Self { src: item.src.region, dst: item.dst.region, far, near, write })
    }

    fn is_of(&self, item: &Transfer) -> bool {
        self.src == item.src.region && self.dst == item.dst.region
    }

    fn cut(&self, item: &Transfer, spans: &mut Vec<Span>) -> Result<(), TransferError> {
        let (mut far_at, mut near_at) = match self.write {
            true => (item.dst.offset, item.src.offset),
            false => (item.src.offset, item.dst.offset),
        };
        let mut left = item.len;
        while left > 0 {
            let (Some((far, rkey, far_left)), Some((near, lkey, near_left))) =
                (self.far.find(far_at), self.near.find(near_at))
            else {
                // The planner has checked the bounds of both regions.
                return Err(TransferError::out_of_bounds(near_at, left, left));
            };
            let len = left.min(far_left).min(near_left);
            spans.push(Span { far, rkey, near, lkey, len });
            (far_at, near_at, left) = (far_at + len, near_at + len, left - len);
        }
        Ok(())
    }
}
