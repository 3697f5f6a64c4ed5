//! Load tasks inside the core: admission, the end of units and requests, deadlines, cancellation.
//!
//! **Invariant:** a unit ends once and is counted once in each of its requests; a request ends when
//! its last unit has, or earlier by deadline or cancellation, and then keeps its outcome.

use std::{sync::Arc, time::Instant};

use ucm_ctrl::FailKind;

use crate::{
    Outcome,
    hash::Map,
    task::{Prepared, UnitState},
};

use super::{Core, LoadTask};

/// Why a request ends before its units.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Early {
    Cancelled,
    Deadline,
}

/// Where a unit's bytes came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// Ready when first seen.
    Hit,
    /// Filled by somebody else while this queue waited.
    Waited,
    /// Filled by this queue.
    Owned,
    /// Read around the cache.
    Bypass,
}

impl Core {
    pub(super) fn admit(&mut self, prepared: Box<Prepared>) {
        // The idle window is over.
        self.prewarm.clear();
        let id = prepared.id;
        let metrics = &self.parts.metrics;
        metrics.tasks.add(1);
        metrics.requests.add(prepared.reqs.len() as u64);
        metrics.queue_ns.add_time(self.since(prepared.admitted));
        let mut task = Box::new(LoadTask {
            next: 0,
            again: Vec::new(),
            unsent: prepared.units.len(),
            open_requests: prepared.reqs.len(),
            queued: false,
            follows: false,
            in_flight: false,
            busy: 0,
            turn_bytes: 0,
            part: None,
            rooms: Arc::default(),
            starved: false,
            prepared: *prepared,
        });
        for (index, request) in (0_u32..).zip(&task.prepared.reqs) {
            if let Some(at) = request.deadline {
                self.deadlines.push(at, id, index);
            }
        }
        let empty: Vec<u32> = (0_u32..)
            .zip(&task.prepared.reqs)
            .filter(|(_, request)| request.open == 0)
            .map(|(index, _)| index)
            .collect();
        for request in empty {
            self.end_request(&mut task, request, Outcome::Loaded);
        }
        if task.open_requests == 0 {
            return;
        }
        self.tasks.insert(id, task);
        if self.closing {
            self.cancel(id);
            return;
        }
        self.expire();
        self.probe(id);
    }

    /// A unit has ended, with its bytes in all live destinations or without.
    pub(super) fn unit_ended(&mut self, task_id: u64, unit: u32, result: Result<Origin, FailKind>) {
        self.freed = true;
        let Some(mut task) = self.tasks.remove(&task_id) else { return };
        let unit_len = self.finish_unit(&mut task, unit);
        if let Some(len) = unit_len {
            self.meter.moved(if result.is_ok() { len } else { 0 });
            self.count_unit(len, result);
        }
        let range = task.prepared.units.get(unit as usize).map_or(0..0, |unit| unit.dsts.clone());
        if unit_len.is_some() {
            for at in range {
                let Some(dst) = task.prepared.dsts.get(at as usize).copied() else { continue };
                let Some(request) = task.prepared.reqs.get_mut(dst.request as usize) else {
                    continue;
                };
                request.open = request.open.saturating_sub(1);
                if let Err(kind) = result {
                    request.failed.push(dst.shard);
                    request.kind.get_or_insert(kind);
                }
                if request.open > 0 || !request.is_live() {
                    continue;
                }
                let mut shards = std::mem::take(&mut request.failed);
                let outcome = match request.kind {
                    None => Outcome::Loaded,
                    Some(kind) => {
                        shards.sort_unstable();
                        Outcome::Recompute { shards, kind }
                    }
                };
                self.end_request(&mut task, dst.request, outcome);
            }
        }
        self.keep(task_id, task);
    }

    /// Marks a unit as ended; its length if it had not ended before.
    fn finish_unit(&mut self, task: &mut LoadTask, unit: u32) -> Option<u64> {
        let unit = task.prepared.units.get_mut(unit as usize)?;
        let old = std::mem::replace(&mut unit.state, UnitState::Done);
        if old == UnitState::Done {
            return None;
        }
        let len = unit.len;
        if std::mem::take(&mut unit.ours) {
            task.busy -= 1;
        }
        if old != UnitState::Copying {
            self.sent(task);
        }
        Some(len)
    }

    /// A unit of this task has gone to the copier, or has ended without.
    pub(super) fn sent(&mut self, task: &mut LoadTask) {
        task.unsent = task.unsent.saturating_sub(1);
        if task.unsent == 0 && !self.closing {
            self.prewarm.extend(std::mem::take(&mut task.prepared.next_keys));
        }
    }

    fn count_unit(&self, len: u64, result: Result<Origin, FailKind>) {
        let metrics = &self.parts.metrics;
        let (shards, bytes) = match result {
            Ok(Origin::Hit) => (&metrics.hit_shards, &metrics.hit_bytes),
            Ok(Origin::Waited) => (&metrics.waited_shards, &metrics.waited_bytes),
            Ok(Origin::Owned) => (&metrics.owned_shards, &metrics.owned_bytes),
            Ok(Origin::Bypass) => (&metrics.bypass_shards, &metrics.bypass_bytes),
            Err(_) => {
                metrics.failed_shards.add(1);
                return;
            }
        };
        shards.add(1);
        bytes.add(len);
    }

    /// Ends a request, unless it has ended already.
    fn end_request(&mut self, task: &mut LoadTask, index: u32, outcome: Outcome) {
        let Some(request) = task.prepared.reqs.get_mut(index as usize) else { return };
        if !std::mem::replace(&mut request.ended, true) {
            self.tell(task, index, outcome);
        }
    }

    /// Tells the caller about the end of a request that is marked as ended.
    fn tell(&mut self, task: &mut LoadTask, index: u32, outcome: Outcome) {
        task.open_requests -= 1;
        if task.prepared.reqs.get(index as usize).is_some_and(|req| req.deadline.is_some()) {
            self.deadlines.ended();
        }
        let metrics = &self.parts.metrics;
        match outcome {
            Outcome::Loaded => metrics.loaded.add(1),
            Outcome::Recompute { .. } => metrics.recomputed.add(1),
            Outcome::Cancelled => metrics.cancelled.add(1),
            Outcome::Deadline | Outcome::Stuck => metrics.expired.add(1),
        }
        if task.open_requests == 0 {
            // Whoever hears of the last end may submit again at once.
            task.prepared.share = None;
        }
        task.prepared.promise.end(index, outcome);
    }

    /// Puts a task back unless all its requests have ended.
    pub(super) fn keep(&mut self, id: u64, task: Box<LoadTask>) {
        let done = task.open_requests == 0;
        let queued = task.queued;
        // Even a task that is over goes through the table once more, to be taken out in full.
        self.tasks.insert(id, task);
        if !done {
            self.leave_if_done(id);
            return;
        }
        if queued {
            self.runnable.retain(|runnable| *runnable != id);
            self.line.retain(|waiting| *waiting != id);
        }
        self.leave_flight(id);
        self.tasks.remove(&id);
        self.let_follow(id);
        self.admit_from_line();
    }

    /// Ends all requests of a task.
    pub(super) fn cancel(&mut self, id: u64) {
        let Some(task) = self.tasks.get(&id) else { return };
        let all = (0_u32..).take(task.prepared.reqs.len()).map(|request| (id, request));
        self.end_early(&all.collect::<Vec<_>>(), Early::Cancelled);
    }

    /// Ends the requests whose time is over.
    pub(super) fn expire(&mut self) {
        let mut over = Vec::new();
        while let Some(due) = self.deadlines.pop_due(self.now) {
            over.push(due);
        }
        if !over.is_empty() {
            self.step();
            self.end_early(&over, Early::Deadline);
        }
        let Self { deadlines, tasks, .. } = self;
        deadlines.compact(|id, request| is_open(tasks, id, request));
    }

    pub(super) fn next_deadline(&mut self) -> Option<Instant> {
        let Self { deadlines, tasks, .. } = self;
        deadlines.first(|id, request| is_open(tasks, id, request))
    }

    /// Ends requests before their units. What only they held is released before they hear of it.
    fn end_early(&mut self, which: &[(u64, u32)], why: Early) {
        let mut ended = Vec::new();
        for &(id, index) in which {
            let Some(task) = self.tasks.get_mut(&id) else { continue };
            let Some(request) = task.prepared.reqs.get_mut(index as usize) else { continue };
            if request.ended {
                continue;
            }
            let outcome = match (why, request.copying > 0) {
                (Early::Cancelled, true) => {
                    request.cancelling = true;
                    continue;
                }
                (Early::Cancelled, false) => Outcome::Cancelled,
                (Early::Deadline, true) => Outcome::Stuck,
                (Early::Deadline, false) => Outcome::Deadline,
            };
            request.ended = true;
            ended.push((id, index, outcome));
        }
        for &(id, index) in which {
            self.drop_unwanted(id, index, why);
        }
        self.drop_unwanted_copies();
        for (id, index, outcome) in ended {
            let Some(mut task) = self.tasks.remove(&id) else { continue };
            self.tell(&mut task, index, outcome);
            self.keep(id, task);
        }
    }

    /// Stops what only request `index` wanted. Operations in flight go on, on their own.
    fn drop_unwanted(&mut self, id: u64, index: u32, why: Early) {
        let Some(mut task) = self.tasks.remove(&id) else { return };
        let units = task.prepared.reqs.get(index as usize).map_or(0..0, |req| req.units.clone());
        let mut waiting = false;
        for at in units {
            let Some(&index) = task.prepared.request_units.get(at as usize) else { continue };
            if task.is_wanted(index) {
                continue;
            }
            let Some(unit) = task.prepared.units.get_mut(index as usize) else { continue };
            match unit.state {
                // The copier drops what nobody wants.
                UnitState::Done | UnitState::Copying => continue,
                UnitState::Unresolved => {}
                UnitState::Waiting => waiting = true,
                UnitState::Reading(token) => self.orphan(token, why),
            }
            unit.state = UnitState::Done;
            if std::mem::take(&mut unit.ours) {
                task.busy -= 1;
            }
            // Not `sent`: what nobody wants any more is no reason to prepare for more of it.
            task.unsent = task.unsent.saturating_sub(1);
        }
        if waiting {
            self.drop_waits(id, &task);
        }
        self.tasks.insert(id, task);
    }

    /// Copies into destinations of these requests have ended.
    pub(super) fn copies_ended(&mut self, id: u64, requests: &[u32]) {
        let Some(mut task) = self.tasks.remove(&id) else { return };
        for &request in requests {
            let Some(state) = task.prepared.reqs.get_mut(request as usize) else { continue };
            state.copying = state.copying.saturating_sub(1);
            if state.cancelling && state.copying == 0 {
                self.end_request(&mut task, request, Outcome::Cancelled);
            }
        }
        self.keep(id, task);
    }
}

fn is_open(tasks: &Map<u64, Box<LoadTask>>, id: u64, request: u32) -> bool {
    let task = tasks.get(&id);
    let request = task.and_then(|task| task.prepared.reqs.get(request as usize));
    request.is_some_and(|request| !request.ended)
}

impl LoadTask {
    /// Whether a live request still wants the unit.
    pub(super) fn is_wanted(&self, unit: u32) -> bool {
        let Some(unit) = self.prepared.units.get(unit as usize) else { return false };
        unit.dsts.clone().any(|at| {
            self.prepared
                .dsts
                .get(at as usize)
                .and_then(|dst| self.prepared.reqs.get(dst.request as usize))
                .is_some_and(|request| request.is_live())
        })
    }
}
