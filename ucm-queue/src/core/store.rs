//! Dumps inside the core: into the cache first, then to the backend in the background.
//!
//! **Invariant:** the backend reads a dump only from a pinned ready slot or a buffer of its own, and
//! loads never wait for any of it: dumps have their own depth, plans and buffers.

use ucm_ctrl::{Acquired, FailKind, Fill, IoToken, Pin, PublishError};

use crate::failpoint::failpoint;
use crate::{
    dump::{DumpItem, PreparedDump},
    staging::{StagingLease, StagingPool},
};

use super::{
    Core,
    copy::{Snap, SnapInto},
    group::Held,
    stage::{Room, copy},
};

/// How often a dump meets another filler's failure before it gives up.
const RETRIES: u8 = 3;

/// A dump whose bytes wait to be stored.
pub(super) struct Durable {
    item: DumpItem,
    bytes: Bytes,
}

enum Bytes {
    Slot(Pin),
    Staged(Room),
}

impl Core {
    /// A dump whose producer has finished.
    pub(super) fn begin_dump(&mut self, prepared: PreparedDump) {
        let PreparedDump { id, items, ballot, share, .. } = prepared;
        if let Some(ballot) = ballot {
            self.open_group(id, items.len(), ballot, share);
            self.group_dumps.extend(items);
        } else {
            self.dumps.extend(items);
        }
    }

    /// Asks for the slots of new dumps.
    pub(super) fn start_dumps(&mut self) {
        self.stage_dumps();
        while let Some(mut item) = self.group_dumps.pop_front().or_else(|| self.dumps.pop_front()) {
            self.step();
            if !self.may_commit(&item) {
                item.group = None;
                self.dump_failed(item, FailKind::Cancelled);
                continue;
            }
            // Groups need all their slots at once; they are bounded by their bytes.
            if item.group.is_none() && item.slot.is_none() {
                if self.dump_slots.taken() >= self.parts.limits.dump_slots {
                    self.dumps.push_front(item);
                    return;
                }
                item.slot = Some(self.dump_slots.take());
            }
            match self.parts.pool.acquire(&item.key) {
                Ok(Acquired::Hit(pin)) => self.dump_resident(item, pin),
                Ok(Acquired::Waiter(_)) if item.group.is_some() => {
                    self.dump_failed(item, FailKind::Unavailable);
                }
                Ok(Acquired::Waiter(waiter)) => self.wait_for_dump(item, waiter),
                Ok(Acquired::Owner(fill)) => self.snap_into_slot(item, fill),
                Ok(Acquired::Full) => {
                    let bypass = item.durable && item.group.is_none();
                    let staging = self.parts.dump_staging.as_ref().filter(|_| bypass);
                    match staging.map(StagingPool::try_acquire) {
                        None => self.dump_failed(item, FailKind::NoSpace),
                        Some(Some(lease)) => self.snap_into_buffer(item, lease),
                        Some(None) => {
                            self.dumps.push_front(item);
                            return;
                        }
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "the cache refused a dump");
                    self.dump_failed(item, FailKind::Unavailable);
                }
            }
        }
    }

    /// The shard is in the cache already: nothing is copied.
    pub(super) fn dump_resident(&mut self, item: DumpItem, pin: Pin) {
        if pin.bytes() != item.len {
            tracing::warn!(cached = pin.bytes(), dumped = item.len, "a shard of another length");
            return self.dump_failed(item, FailKind::Corrupt);
        }
        self.parts.metrics.dump_resident.add(1);
        match item.group {
            Some(group) => self.hold(group, Held::Resident { item, pin }),
            None => self.cached(item, pin),
        }
    }

    /// Whoever was filling the shard failed; our bytes are here, so try to be the next.
    pub(super) fn dump_filler_failed(&mut self, mut item: DumpItem, kind: FailKind) {
        item.retries += 1;
        if item.retries > RETRIES {
            self.dump_failed(item, kind);
        } else {
            self.dumps.push_front(item);
        }
    }

    fn snap_into_slot(&mut self, item: DumpItem, fill: Fill) {
        failpoint!("dump.own.after");
        match self.parts.slots.slot_addr(fill.slot()) {
            Some(to) => {
                let into = SnapInto::Slot { token: fill.start_io(), fill };
                self.copy_out(Snap { item, to, into, alone: false });
            }
            None if self.parts.dump_staging.is_some() => {
                self.unreachable_dumps.push_back((item, fill));
                self.stage_dumps();
            }
            None => {
                fill.fail(FailKind::Unavailable);
                self.dump_failed(item, FailKind::Unavailable);
            }
        }
    }

    /// Starts the first half of the way into slots that the engine cannot reach.
    fn stage_dumps(&mut self) {
        while !self.unreachable_dumps.is_empty() {
            let Some(pool) = self.parts.dump_staging.as_ref() else { return };
            let Some(lease) = pool.try_acquire() else { return };
            let Some((item, fill)) = self.unreachable_dumps.pop_front() else { return };
            let room = Room::whole(lease);
            match room.addr(item.len) {
                Some(to) => {
                    let into = SnapInto::Through { token: fill.start_io(), fill, room };
                    self.copy_out(Snap { item, to, into, alone: false });
                }
                None => {
                    fill.fail(FailKind::Other);
                    self.dump_failed(item, FailKind::Other);
                }
            }
        }
    }

    fn snap_into_buffer(&mut self, item: DumpItem, lease: StagingLease) {
        match lease.addr(0, item.len) {
            Some(to) => {
                self.copy_out(Snap {
                    item,
                    to,
                    into: SnapInto::Staged(Room::whole(lease)),
                    alone: false,
                });
            }
            None => self.dump_failed(item, FailKind::Other),
        }
    }

    /// The copy of a dump has ended.
    pub(super) fn snapped(&mut self, snap: Snap, result: Result<(), FailKind>) {
        self.freed = true;
        let Snap { item, into, .. } = snap;
        let (into, result) = match (into, result) {
            (SnapInto::Through { token, fill, room }, result) => {
                let to = self.parts.slots.io_memory(fill.slot(), 0, item.len, Box::new(()));
                let copied =
                    result.and_then(|()| copy(room.io_memory(item.len), to).ok_or(FailKind::Other));
                self.parts.metrics.staged_shards.add(u64::from(copied.is_ok()));
                (SnapInto::Slot { token, fill }, copied)
            }
            other => other,
        };
        match (into, result) {
            (SnapInto::Slot { token, fill }, Ok(())) => match item.group {
                Some(group) => self.hold(group, Held::Slot { item, token, fill }),
                None => self.publish(item, token, fill),
            },
            (SnapInto::Slot { token, fill }, Err(kind)) => {
                drop(token);
                fill.fail(kind);
                self.dump_failed(item, kind);
            }
            (SnapInto::Staged(room), Ok(())) => self.bypassed(item, room),
            // `Through` has become `Slot` above.
            (SnapInto::Staged(_) | SnapInto::Through { .. }, Err(kind)) => {
                self.dump_failed(item, kind);
            }
            (SnapInto::Through { .. }, Ok(())) => self.dump_failed(item, FailKind::Other),
        }
    }

    /// All bytes of a dump are in its slot.
    pub(super) fn publish(&mut self, item: DumpItem, token: IoToken, fill: Fill) {
        drop(token);
        failpoint!("dump.publish.before");
        match fill.publish_bytes(item.len) {
            Ok(pin) => {
                failpoint!("dump.publish.after");
                self.parts.metrics.dump_copied.add(1);
                self.cached(item, pin);
            }
            Err(PublishError::IoInFlight(fill)) => {
                fill.abandon_draining(FailKind::Other);
                self.dump_failed(item, FailKind::Other);
            }
            Err(PublishError::Fenced) => self.dump_failed(item, FailKind::Unavailable),
        }
    }

    /// All bytes of a dump are in a buffer, because the cache is full.
    pub(super) fn bypassed(&mut self, item: DumpItem, room: Room) {
        self.parts.metrics.dump_bypass.add(1);
        item.promise.cached(Err(FailKind::NoSpace));
        self.durables.push_back(Durable { item, bytes: Bytes::Staged(room) });
    }

    /// The bytes of a dump are in the cache; the backend comes next, if asked for.
    pub(super) fn cached(&mut self, item: DumpItem, pin: Pin) {
        if item.durable {
            item.promise.cached(Ok(()));
            self.durables.push_back(Durable { item, bytes: Bytes::Slot(pin) });
        } else {
            drop(pin);
            item.end(Ok(()), Ok(()));
        }
    }

    /// Gives the backend what it may have in flight.
    pub(super) fn start_durables(&mut self) {
        while self.dumps_in_flight < self.parts.limits.dump_depth {
            let Some(Durable { item, bytes }) = self.durables.pop_front() else { return };
            let memory = match bytes {
                Bytes::Slot(pin) => {
                    self.parts.slots.io_memory(pin.slot(), 0, item.len, Box::new(pin))
                }
                Bytes::Staged(room) => room.io_memory(item.len),
            };
            match memory {
                Some(memory) => self.start_store(item, memory),
                None => self.dump_failed(item, FailKind::Other),
            }
        }
    }

    /// The backend has ended a dump.
    pub(super) fn stored(&mut self, item: DumpItem, result: Result<(), FailKind>) {
        failpoint!("dump.ended.before");
        match result {
            Ok(()) => self.parts.metrics.dump_durable.add(1),
            Err(_) => self.parts.metrics.dump_failed.add(1),
        }
        // `cached` has ended long ago.
        item.end(result, result);
    }

    /// Ends what is open of a dump with this failure.
    pub(super) fn dump_failed(&mut self, item: DumpItem, kind: FailKind) {
        self.parts.metrics.dump_failed.add(1);
        if let Some(group) = item.group {
            self.group_failed(group);
        }
        item.end(Err(kind), Err(kind));
    }
}
