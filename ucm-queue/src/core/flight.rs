//! Backend operations in flight.
//!
//! **Invariant:** the depth counts what the backend really has, wanted or not: an operation leaves
//! the table only by its completion, and its memory is dropped before its slot changes state.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    time::Instant,
};

use ucm_ctrl::{FailKind, Fill, PublishError};
use ucm_store::{Completed, ErrorKind, IoMemory, Op, StoreError};

use crate::failpoint::failpoint;
use crate::{dump::DumpItem, task::UnitState};

use super::{
    Core,
    copy::Source,
    dispatch::Walk,
    load::{Early, Origin},
    stage::Room,
};

/// One operation the backend has.
pub(super) struct Flight {
    started: Instant,
    len: u64,
    what: What,
}

enum What {
    /// A load for a unit. `orphan`: nobody here wants it any more, but it may still be published.
    Load { task: u64, unit: u32, into: Into, orphan: bool },
    /// A load that nothing is to come of.
    Abandoned,
    /// The backend half of a dump.
    Dump(DumpItem),
}

enum Into {
    Slot(Fill),
    Staged(Room),
}

impl Core {
    /// Starts to read a unit into the slot it was given.
    pub(super) fn read_into_slot(&mut self, task: u64, unit: u32, fill: Fill) -> Walk {
        failpoint!("load.own.after");
        let Some(len) = self.unit_mut(task, unit).map(|unit| unit.len) else {
            return Walk::Exhausted;
        };
        let hold = Box::new(fill.start_io());
        let Some(memory) = self.parts.slots.io_memory(fill.slot(), 0, len, hold) else {
            fill.fail(FailKind::Other);
            self.unit_ended(task, unit, Err(FailKind::Other));
            return Walk::Exhausted;
        };
        self.start_load(task, unit, len, memory, Into::Slot(fill));
        Walk::Started
    }

    /// Starts to read a unit around the cache.
    pub(super) fn read_around(&mut self, task: u64, unit: u32, room: Room) -> Walk {
        let Some(len) = self.unit_mut(task, unit).map(|unit| unit.len) else {
            return Walk::Exhausted;
        };
        let Some(memory) = room.io_memory(len) else {
            self.unit_ended(task, unit, Err(FailKind::Other));
            return Walk::Exhausted;
        };
        self.start_load(task, unit, len, memory, Into::Staged(room));
        Walk::Started
    }

    fn start_load(&mut self, task: u64, unit: u32, len: u64, memory: IoMemory, into: Into) {
        let token = self.next_token();
        let Some(state) = self.unit_mut(task, unit) else { return };
        state.state = UnitState::Reading(token);
        state.ours = true;
        let key = state.key;
        if let Some(task) = self.tasks.get_mut(&task) {
            task.busy += 1;
            task.turn_bytes = task.turn_bytes.saturating_add(len);
        }
        let sink = self.sink.clone();
        self.load_ops.push(Op::new(key.block.0, key.shard, token, memory, sink));
        let what = What::Load { task, unit, into, orphan: false };
        self.flights.insert(token, Flight { started: self.now, len, what });
        self.loads_in_flight += 1;
        self.load_bytes_in_flight += len;
        let metrics = &self.parts.metrics;
        metrics.backend_loads.add(1);
        metrics.backend_in_flight.add(1);
        metrics.backend_in_flight_max.raise_to(self.loads_in_flight as u64);
    }

    /// Starts the backend half of a dump.
    pub(super) fn start_store(&mut self, item: DumpItem, memory: IoMemory) {
        let token = self.next_token();
        let sink = self.sink.clone();
        self.dump_ops.push(Op::new(item.key.block.0, item.key.shard, token, memory, sink));
        let len = item.len;
        self.flights.insert(token, Flight { started: self.now, len, what: What::Dump(item) });
        self.dumps_in_flight += 1;
        self.parts.metrics.dumps_in_flight.add(1);
    }

    /// Hands the collected loads to the backend in one call.
    pub(super) fn submit_loads(&mut self) {
        if self.load_ops.is_empty() {
            return;
        }
        self.step();
        let ops = std::mem::take(&mut self.load_ops);
        let backend = &self.parts.backend;
        self.parts.metrics.backend_calls.add(1);
        failpoint!("load.submit.before");
        // Operations a panicking backend drops end as `Lost`, through the sink.
        if catch_unwind(AssertUnwindSafe(|| backend.load(ops))).is_err() {
            self.parts.metrics.caught_panics.add(1);
        }
        failpoint!("load.submit.after");
    }

    /// Hands the collected dumps to the backend in one call.
    pub(super) fn submit_stores(&mut self) {
        if self.dump_ops.is_empty() {
            return;
        }
        self.step();
        let ops = std::mem::take(&mut self.dump_ops);
        let backend = &self.parts.backend;
        failpoint!("dump.submit.before");
        if catch_unwind(AssertUnwindSafe(|| backend.dump(ops))).is_err() {
            self.parts.metrics.caught_panics.add(1);
        }
        failpoint!("dump.submit.after");
    }

    /// The backend has ended an operation.
    pub(super) fn ended(&mut self, completed: Completed) {
        let Completed { token, result, memory } = completed;
        // The memory carries the proof that the IO has ended; nothing may be published before.
        drop(memory);
        let Some(flight) = self.flights.remove(&token) else { return };
        let result = result.map_err(|error| fail_kind(&error));
        if let What::Dump(item) = flight.what {
            self.dumps_in_flight -= 1;
            self.parts.metrics.dumps_in_flight.sub(1);
            self.stored(item, result);
            return;
        }
        self.loads_in_flight -= 1;
        self.load_bytes_in_flight -= flight.len;
        self.parts.metrics.backend_in_flight.sub(1);
        self.parts.metrics.backend_ns.add_time(self.since(flight.started));
        match flight.what {
            What::Load { task, unit, into, orphan } => {
                if orphan {
                    self.leave_quarantine(flight.len);
                }
                self.load_ended(task, unit, into, flight.len, result);
            }
            What::Abandoned => self.leave_quarantine(flight.len),
            What::Dump(_) => {}
        }
    }

    fn load_ended(
        &mut self,
        task: u64,
        unit: u32,
        into: Into,
        len: u64,
        result: Result<(), FailKind>,
    ) {
        failpoint!("load.ended.before");
        match (into, result) {
            (Into::Slot(fill), Ok(())) => match fill.publish_bytes(len) {
                Ok(pin) => {
                    failpoint!("load.publish.after");
                    self.copy_in(task, unit, Source::Slot(pin), Origin::Owned);
                }
                Err(PublishError::IoInFlight(fill)) => {
                    // The backend kept what it should have given back.
                    fill.abandon_draining(FailKind::Other);
                    self.unit_ended(task, unit, Err(FailKind::Other));
                }
                Err(PublishError::Fenced) => {
                    self.unit_ended(task, unit, Err(FailKind::Unavailable));
                }
            },
            (Into::Slot(fill), Err(kind)) => {
                fill.fail(kind);
                self.unit_ended(task, unit, Err(kind));
            }
            (Into::Staged(room), Ok(())) => {
                self.copy_in(task, unit, Source::Staged(room), Origin::Bypass);
            }
            (Into::Staged(_), Err(kind)) => self.unit_ended(task, unit, Err(kind)),
        }
    }

    /// Nobody here wants the load of this token any more. After a cancellation the read goes on and
    /// is published if it succeeds: others may wait for it. After a deadline it counts as stalled:
    /// others hear of the failure and may load the key into another slot.
    pub(super) fn orphan(&mut self, token: u64, why: Early) {
        let Some(flight) = self.flights.get_mut(&token) else { return };
        let What::Load { task, unit, into, .. } =
            std::mem::replace(&mut flight.what, What::Abandoned)
        else {
            return;
        };
        let len = flight.len;
        match (into, why) {
            (Into::Slot(fill), Early::Cancelled) => {
                flight.what = What::Load { task, unit, into: Into::Slot(fill), orphan: true };
            }
            (Into::Slot(fill), Early::Deadline) => {
                fill.abandon_draining(FailKind::Deadline);
                self.parts.metrics.abandoned_fills.add(1);
            }
            // The operation's memory keeps the buffer.
            (Into::Staged(_), _) => {}
        }
        self.parts.metrics.quarantine_loads.add(1);
        self.parts.metrics.quarantine_bytes.add(len);
    }

    fn leave_quarantine(&self, len: u64) {
        self.parts.metrics.quarantine_loads.sub(1);
        self.parts.metrics.quarantine_bytes.sub(len);
    }

    fn next_token(&mut self) -> u64 {
        let token = self.next_token;
        self.next_token += 1;
        token
    }
}

fn fail_kind(error: &StoreError) -> FailKind {
    match error.kind() {
        ErrorKind::Missing => FailKind::Missing,
        ErrorKind::Corrupt => FailKind::Corrupt,
        ErrorKind::Io => FailKind::Io,
        ErrorKind::NoSpace => FailKind::NoSpace,
        ErrorKind::Unavailable => FailKind::Unavailable,
        ErrorKind::Lost => FailKind::Abandoned,
        ErrorKind::Cancelled => FailKind::Cancelled,
        _ => FailKind::Other,
    }
}
