//! The copier: batches copies between slots and the caller's memory into engine plans.
//!
//! **Invariant:** a pin, lease or fill whose bytes are copied travels inside the plan's hold; it
//! comes back with the plan's end, or as a lost plan when the engine drops it, never in between.

use std::{
    collections::VecDeque,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::Instant,
};

use ucm_ctrl::{FailKind, Fill, IoToken, Pin};
use ucm_transport::{
    Addr, Capabilities, Completion, ErrorKind, Hold, Rejected, Transfer, TransferError,
    TransferPlan,
};

use crate::failpoint::failpoint;
use crate::{
    dump::DumpItem,
    inbox::{Event, Inbox},
    outcome::CopyGuard,
    task::UnitState,
};

use super::{Core, LoadTask, load::Origin, stage::Room};

const PLAN_ITEMS: usize = 64;
const PLAN_BYTES: u64 = 8 << 20;
/// An engine that copies in the dispatcher's thread must give it back soon.
const INLINE_PLAN_BYTES: u64 = 1 << 20;
const LOAD_PLANS: usize = 16;
const SNAP_PLANS: usize = 4;

/// What a load's bytes are copied from.
pub(super) enum Source {
    Slot(Pin),
    Staged(Room),
}

/// One unit on its way to its destinations.
struct Job {
    task: u64,
    unit: u32,
    origin: Origin,
    source: Source,
    from: Addr,
    len: u64,
    /// Destinations not yet copied to, and the end of those in the plan.
    dsts: std::ops::Range<u32>,
    planned: u32,
    /// Must not share a plan: a shared one has failed.
    alone: bool,
}

/// One dump on its way into a slot or buffer.
pub(super) struct Snap {
    pub(super) item: DumpItem,
    pub(super) to: Addr,
    pub(super) into: SnapInto,
    pub(super) alone: bool,
}

/// What a dump's bytes are copied into.
pub(super) enum SnapInto {
    /// The token goes before the fill: by then the copy has ended.
    Slot {
        token: IoToken,
        fill: Fill,
    },
    /// A slot that the engine cannot reach: the processor copies the second half of the way.
    Through {
        token: IoToken,
        fill: Fill,
        room: Room,
    },
    Staged(Room),
}

enum Work {
    Loads(Vec<Job>),
    Snaps(Vec<Snap>),
}

/// Everything that belongs to one plan in flight.
pub(crate) struct PlanBody {
    work: Work,
    guards: Vec<(u64, CopyGuard)>,
    started: Instant,
}

/// The body inside the engine. Dropped there, it reports the plan as lost.
struct PlanHold {
    body: Option<Box<PlanBody>>,
    inbox: Arc<Inbox>,
}

impl Drop for PlanHold {
    fn drop(&mut self) {
        if let Some(body) = self.body.take() {
            // A closed inbox gives the body back; dropping it ends everything in it.
            let _ = self.inbox.push(Event::CopyLost(body));
        }
    }
}

/// Copies waiting and in flight.
pub(super) struct Copier {
    plan_items: usize,
    plan_bytes: u64,
    load_plans: usize,
    snap_plans: usize,
    inline: bool,
    loads: VecDeque<Job>,
    load_bytes: u64,
    snaps: VecDeque<Snap>,
    loads_in_flight: usize,
    snaps_in_flight: usize,
    completions: Vec<Completion>,
}

impl Copier {
    pub(super) fn new(engine: &Capabilities) -> Self {
        let inline = engine.workers == 0;
        let most = engine.max_in_flight.max(1);
        Self {
            plan_items: PLAN_ITEMS.min(engine.max_items).max(1),
            plan_bytes: if inline { INLINE_PLAN_BYTES } else { PLAN_BYTES },
            load_plans: if inline { 1 } else { LOAD_PLANS.min(most) },
            snap_plans: if inline { 1 } else { SNAP_PLANS.min(most) },
            inline,
            loads: VecDeque::new(),
            load_bytes: 0,
            snaps: VecDeque::new(),
            loads_in_flight: 0,
            snaps_in_flight: 0,
            completions: Vec::new(),
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.loads.is_empty()
            && self.snaps.is_empty()
            && self.loads_in_flight == 0
            && self.snaps_in_flight == 0
    }

    #[cfg(feature = "testing")]
    pub(super) fn describe(&self) -> (usize, usize, usize, usize) {
        (self.loads.len(), self.snaps.len(), self.loads_in_flight, self.snaps_in_flight)
    }

    fn push_load(&mut self, job: Job) {
        self.load_bytes += job.len;
        self.loads.push_back(job);
    }

    fn push_load_front(&mut self, job: Job) {
        self.load_bytes += job.len;
        self.loads.push_front(job);
    }

    fn pop_load(&mut self) -> Option<Job> {
        let job = self.loads.pop_front()?;
        self.load_bytes -= job.len;
        Some(job)
    }

    /// Whether the queued copies fill a plan, and the engine works while we go on.
    fn has_full_plan(&self) -> bool {
        !self.inline && (self.loads.len() >= self.plan_items || self.load_bytes >= self.plan_bytes)
    }
}

impl Core {
    /// The bytes of a unit are here: queue the copies to its destinations.
    pub(super) fn copy_in(&mut self, id: u64, unit: u32, source: Source, origin: Origin) {
        self.step();
        let Some(len) = self.unit_mut(id, unit).map(|unit| unit.len) else { return };
        if let Source::Slot(pin) = &source
            && pin.bytes() != len
        {
            // What lies behind a shorter shard belongs to an earlier key.
            tracing::warn!(cached = pin.bytes(), asked = len, "a shard of another length");
            return self.unit_ended(id, unit, Err(FailKind::Corrupt));
        }
        let (from, source) = match source {
            Source::Slot(pin) => match self.parts.slots.slot_addr(pin.slot()) {
                Some(from) => (Some(from), Source::Slot(pin)),
                None => return self.stage_slot(id, unit, pin, origin),
            },
            Source::Staged(room) => (room.addr(len), Source::Staged(room)),
        };
        let Some(mut task) = self.tasks.remove(&id) else { return };
        let job = task.prepared.units.get_mut(unit as usize).and_then(|state| {
            let from = from?;
            if state.state == UnitState::Done {
                return None;
            }
            state.state = UnitState::Copying;
            let dsts = state.dsts.clone();
            let planned = dsts.start;
            Some(Job { task: id, unit, origin, source, from, len, dsts, planned, alone: false })
        });
        let queued = job.is_some();
        if let Some(job) = job {
            self.sent(&mut task);
            self.copier.push_load(job);
        }
        self.tasks.insert(id, task);
        if !queued && from.is_none() {
            self.unit_ended(id, unit, Err(FailKind::Other));
        } else if self.copier.has_full_plan() {
            self.submit_load_copies(true);
        }
    }

    /// Queues the copy of a dump.
    pub(super) fn copy_out(&mut self, snap: Snap) {
        self.copier.snaps.push_back(snap);
    }

    /// Takes the ended plans back from the engine.
    pub(super) fn reap_copies(&mut self) {
        if self.copier.loads_in_flight + self.copier.snaps_in_flight == 0 {
            return;
        }
        let mut completions = std::mem::take(&mut self.copier.completions);
        let engine = &self.parts.engine;
        if catch_unwind(AssertUnwindSafe(|| engine.poll(&mut completions))).is_err() {
            self.parts.metrics.caught_panics.add(1);
        }
        for Completion { result, holds, .. } in completions.drain(..) {
            self.step();
            if let Some(body) = body_of(holds) {
                self.plan_ended(*body, result.map(drop));
            }
        }
        self.copier.completions = completions;
    }

    /// The engine dropped a plan without ending it.
    pub(super) fn copy_lost(&mut self, body: PlanBody) {
        let lost = TransferError::new(ErrorKind::Failed, "the engine dropped the plan");
        self.plan_ended(body, Err(lost));
    }

    /// Submits all queued copies, as far as the engine takes them: loads first.
    pub(super) fn submit_copies(&mut self) {
        self.submit_load_copies(false);
        while self.copier.snaps_in_flight < self.copier.snap_plans {
            let Some((body, items)) = self.plan_snaps() else { return };
            self.copier.snaps_in_flight += 1;
            if !self.submit_plan(body, items) {
                return;
            }
        }
    }

    fn submit_load_copies(&mut self, only_full: bool) {
        while self.copier.loads_in_flight < self.copier.load_plans
            && (!only_full || self.copier.has_full_plan())
        {
            let Some((body, items)) = self.plan_loads() else { return };
            self.copier.loads_in_flight += 1;
            if !self.submit_plan(body, items) {
                return;
            }
        }
    }

    /// Drops the queued copies that no live request wants.
    pub(super) fn drop_unwanted_copies(&mut self) {
        let mut dropped = Vec::new();
        let Self { copier, tasks, unreachable, .. } = self;
        let mut wants = |id: u64, unit: u32| {
            let task: Option<&Box<LoadTask>> = tasks.get(&id);
            let wanted = task.is_some_and(|task| task.is_wanted(unit));
            if !wanted {
                dropped.push((id, unit));
            }
            wanted
        };
        unreachable.retain(|staged| wants(staged.task, staged.unit));
        copier.loads.retain(|job| {
            let wanted = wants(job.task, job.unit);
            if !wanted {
                copier.load_bytes -= job.len;
            }
            wanted
        });
        for (id, unit) in dropped {
            if let Some(task) = self.tasks.get_mut(&id)
                && let Some(unit) = task.prepared.units.get_mut(unit as usize)
            {
                unit.state = UnitState::Done;
                task.busy -= usize::from(std::mem::take(&mut unit.ours));
            }
            self.leave_if_done(id);
        }
    }

    /// Takes queued load copies for one plan.
    fn plan_loads(&mut self) -> Option<(PlanBody, Vec<Transfer>)> {
        let mut jobs = Vec::new();
        let mut requests = Vec::new();
        let mut items = Vec::new();
        let mut bytes = 0;
        let mut ended = Vec::new();
        while let Some(job) = self.copier.loads.front() {
            let fits = bytes + job.len <= self.copier.plan_bytes
                && items.len() < self.copier.plan_items
                && !job.alone;
            if !jobs.is_empty() && !fits {
                break;
            }
            let Some(mut job) = self.copier.pop_load() else { break };
            let Some(task) = self.tasks.get_mut(&job.task) else { continue };
            let prepared = &mut task.prepared;
            let before = items.len();
            job.planned = job.dsts.start;
            while job.planned < job.dsts.end && items.len() < self.copier.plan_items {
                let dst = prepared.dsts.get(job.planned as usize).copied();
                job.planned += 1;
                let Some(dst) = dst else { continue };
                let Some(request) = prepared.reqs.get_mut(dst.request as usize) else { continue };
                if !request.is_live() {
                    continue;
                }
                request.copying += 1;
                requests.push((job.task, dst.request));
                items.push(Transfer { src: job.from, dst: dst.addr, len: job.len });
                bytes += job.len;
            }
            if items.len() == before {
                // Nobody wants the rest of its destinations any more.
                ended.push((job.task, job.unit, job.origin));
                continue;
            }
            let alone = job.alone;
            jobs.push(job);
            if alone {
                break;
            }
        }
        let guards = self.guard(&requests);
        for (task, unit, origin) in ended {
            self.unit_ended(task, unit, Ok(origin));
        }
        let body = PlanBody { work: Work::Loads(jobs), guards, started: self.now };
        (!items.is_empty()).then_some((body, items))
    }

    /// Counts copies into these requests' destinations as in flight, task by task.
    fn guard(&self, requests: &[(u64, u32)]) -> Vec<(u64, CopyGuard)> {
        requests
            .chunk_by(|a, b| a.0 == b.0)
            .filter_map(|run| {
                let (task, _) = *run.first()?;
                let requests = run.iter().map(|(_, request)| *request).collect();
                Some((task, self.tasks.get(&task)?.prepared.promise.copying(requests)))
            })
            .collect()
    }

    /// Takes queued dump copies for one plan.
    fn plan_snaps(&mut self) -> Option<(PlanBody, Vec<Transfer>)> {
        let mut snaps = Vec::new();
        let mut items = Vec::new();
        let mut bytes = 0;
        while let Some(snap) = self.copier.snaps.front() {
            let fits = bytes + snap.item.len <= self.copier.plan_bytes
                && items.len() < self.copier.plan_items
                && !snap.alone;
            if !items.is_empty() && !fits {
                break;
            }
            let Some(snap) = self.copier.snaps.pop_front() else { break };
            bytes += snap.item.len;
            items.push(Transfer { src: snap.item.src, dst: snap.to, len: snap.item.len });
            let alone = snap.alone;
            snaps.push(snap);
            if alone {
                break;
            }
        }
        let body = PlanBody { work: Work::Snaps(snaps), guards: Vec::new(), started: self.now };
        (!items.is_empty()).then_some((body, items))
    }

    /// Hands a plan to the engine, which is already counted as in flight. `false` when the engine is
    /// full: the copies are queued again.
    fn submit_plan(&mut self, body: PlanBody, items: Vec<Transfer>) -> bool {
        self.step();
        let hold = PlanHold { body: Some(Box::new(body)), inbox: Arc::clone(&self.parts.inbox) };
        let plan = TransferPlan { items, holds: vec![Box::new(hold)] };
        let engine = &self.parts.engine;
        failpoint!("copy.submit.before");
        match catch_unwind(AssertUnwindSafe(|| engine.submit(plan))) {
            Ok(Ok(_ticket)) => {
                failpoint!("copy.submit.after");
                true
            }
            Ok(Err(Rejected { plan, error })) => {
                let Some(body) = body_of(plan.holds) else { return true };
                let others = self.copier.loads_in_flight + self.copier.snaps_in_flight > 1;
                if error.kind() == ErrorKind::Busy && others {
                    self.requeue(*body);
                    return false;
                }
                self.plan_ended(*body, Err(error));
                true
            }
            Err(_panic) => {
                // Unwinding dropped the hold, which reports the plan as lost.
                self.parts.metrics.caught_panics.add(1);
                true
            }
        }
    }

    /// Puts the copies of a plan that was not accepted back, in their order.
    fn requeue(&mut self, body: PlanBody) {
        let PlanBody { work, guards, .. } = body;
        match work {
            Work::Loads(jobs) => {
                self.copier.loads_in_flight -= 1;
                self.release(guards);
                for job in jobs.into_iter().rev() {
                    self.copier.push_load_front(job);
                }
            }
            Work::Snaps(snaps) => {
                self.copier.snaps_in_flight -= 1;
                for snap in snaps.into_iter().rev() {
                    self.copier.snaps.push_front(snap);
                }
            }
        }
    }

    fn plan_ended(&mut self, body: PlanBody, result: Result<(), TransferError>) {
        failpoint!("copy.ended.before");
        self.step();
        let PlanBody { work, guards, started } = body;
        self.parts.metrics.copy_plans.add(1);
        self.parts.metrics.copy_ns.add_time(self.since(started));
        let failure = result.as_ref().err().map(copy_fail_kind);
        if let Err(error) = &result {
            tracing::warn!(%error, "a copy failed");
        }
        match work {
            Work::Loads(jobs) => {
                self.copier.loads_in_flight -= 1;
                self.loads_ended(jobs, guards, failure);
            }
            Work::Snaps(snaps) => {
                self.copier.snaps_in_flight -= 1;
                self.snaps_ended(snaps, failure);
            }
        }
    }

    /// Counts the copies of a plan as ended.
    fn release(&mut self, guards: Vec<(u64, CopyGuard)>) {
        for (task, guard) in guards {
            // The caller may reuse the destinations before it hears so, never after.
            let requests = guard.end();
            failpoint!("copy.guard.after");
            self.copies_ended(task, &requests);
        }
    }

    fn loads_ended(
        &mut self,
        jobs: Vec<Job>,
        guards: Vec<(u64, CopyGuard)>,
        failure: Option<FailKind>,
    ) {
        let shared = jobs.len() > 1;
        let mut ended = Vec::with_capacity(jobs.len());
        for mut job in jobs {
            let wanted = self.tasks.get(&job.task).is_some_and(|task| task.is_wanted(job.unit));
            if wanted && failure.is_some() && shared {
                // One bad piece fails the plan: find out which by copying each alone.
                job.alone = true;
                self.parts.metrics.copy_retries.add(1);
                self.copier.push_load(job);
            } else if wanted && failure.is_none() && job.planned < job.dsts.end {
                job.dsts.start = job.planned;
                self.copier.push_load_front(job);
            } else {
                let Job { task, unit, origin, source, .. } = job;
                // Pins go before any request can end.
                drop(source);
                ended.push((task, unit, failure.map_or(Ok(origin), Err)));
            }
        }
        self.release(guards);
        for (task, unit, result) in ended {
            self.unit_ended(task, unit, result);
        }
    }

    fn snaps_ended(&mut self, snaps: Vec<Snap>, failure: Option<FailKind>) {
        let shared = snaps.len() > 1;
        for mut snap in snaps {
            if failure.is_some() && shared {
                snap.alone = true;
                self.parts.metrics.copy_retries.add(1);
                self.copier.snaps.push_back(snap);
            } else {
                self.snapped(snap, failure.map_or(Ok(()), Err));
            }
        }
    }
}

fn body_of(holds: Vec<Hold>) -> Option<Box<PlanBody>> {
    holds.into_iter().find_map(|hold| hold.downcast::<PlanHold>().ok()?.body.take())
}

fn copy_fail_kind(error: &TransferError) -> FailKind {
    match error.kind() {
        ErrorKind::Poisoned | ErrorKind::Busy => FailKind::Unavailable,
        _ => FailKind::Io,
    }
}
