//! Which shard is taken next: hits and waits freely, claims only when the read can start at once.
//!
//! A rank that reserved a whole task in one go would own everything and leave nothing to the others,
//! so it holds at most `backend_depth` unfinished reads. It visits a task twice at most: once at
//! admission, to take what is there, and once claim by claim, in rotated order. Between claims it
//! looks around for shards that others have finished.
//!
//! **Invariant:** `acquire`, which may claim a slot, is called only when a read can start.

use std::time::{Duration, Instant};

use ucm_ctrl::{Acquired, CtrlError, FailKind, Key, Prealloc, Presence};

use crate::task::UnitState;

use super::{Core, copy::Source, load::Origin};

/// Keys looked up in one go when looking around.
const LOOK: usize = 64;
const LOOK_SOON: Duration = Duration::from_millis(1);
const LOOK_LATE: Duration = Duration::from_millis(16);

/// When and where to look around next.
pub(super) struct Scan {
    due: Instant,
    pause: Duration,
    place: usize,
}

impl Scan {
    pub(super) fn new(now: Instant) -> Self {
        Self { due: now, pause: LOOK_SOON, place: 0 }
    }
}

/// What one walk along a task came to.
pub(super) enum Walk {
    /// A read was started.
    Started,
    /// Nothing is left to claim.
    Exhausted,
    /// The cache is full and no staging buffer is to be had.
    Blocked,
}

impl Core {
    /// First look at a task: copies what is there, joins what others fill, claims nothing.
    pub(super) fn probe(&mut self, id: u64) {
        let count = self.tasks.get(&id).map_or(0, |task| task.prepared.order.len());
        let mut unresolved = false;
        for place in 0..count {
            let Some((unit, key)) = self.unresolved_at(id, place) else { continue };
            match self.parts.pool.acquire_resident(&key) {
                Ok(Some(Acquired::Hit(pin))) => {
                    self.copy_in(id, unit, Source::Slot(pin), Origin::Hit)
                }
                Ok(Some(Acquired::Waiter(waiter))) => self.wait_for(id, unit, waiter),
                Ok(_) => unresolved = true,
                Err(error) => self.cache_failed(id, unit, &error),
            }
        }
        if unresolved {
            self.queue_up(id);
        }
    }

    /// Puts a task with shards to claim into the line, behind the task it follows.
    fn queue_up(&mut self, id: u64) {
        let Some(task) = self.tasks.get(&id) else { return };
        let after = task.prepared.after.filter(|before| {
            self.tasks.get(before).is_some_and(|before| before.queued || before.follows)
        });
        let Some(task) = self.tasks.get_mut(&id) else { return };
        match after {
            Some(before) => {
                task.follows = true;
                self.followers.insert(before, id);
            }
            None => {
                task.follows = false;
                task.queued = true;
                self.line.push_back(id);
                self.admit_from_line();
            }
        }
    }

    /// A task has nothing more to claim: the one that follows may begin.
    pub(super) fn let_follow(&mut self, id: u64) {
        if let Some(next) = self.followers.remove(&id) {
            self.queue_up(next);
        }
    }

    /// Starts reads while more may be in flight, one task after the other.
    pub(super) fn dispatch(&mut self) {
        self.admit_from_line();
        // Tasks that cannot go on now keep their order: after a whole round of them it is as before.
        let mut blocked = 0;
        while self.can_start() && blocked < self.runnable.len() {
            let Some(id) = self.runnable.pop_front() else { return };
            let turn_over = self.is_turn_over(id);
            if turn_over && self.tasks.get(&id).is_some_and(|task| task.busy == 0) {
                self.leave_flight(id);
                self.line.push_back(id);
                self.admit_from_line();
                blocked = 0;
                continue;
            }
            let walk = if turn_over { Walk::Blocked } else { self.walk(id) };
            match walk {
                Walk::Started => {
                    self.runnable.push_back(id);
                    blocked = 0;
                }
                Walk::Exhausted => {
                    if let Some(task) = self.tasks.get_mut(&id) {
                        task.queued = false;
                        task.starved = false;
                        task.part = None;
                    }
                    self.leave_if_done(id);
                    self.let_follow(id);
                }
                Walk::Blocked => {
                    self.runnable.push_back(id);
                    blocked += 1;
                }
            }
        }
    }

    /// Whether a task in flight has had its turn while others wait in line.
    fn is_turn_over(&self, id: u64) -> bool {
        let most = self.parts.limits.turn_bytes;
        !self.line.is_empty() && self.tasks.get(&id).is_some_and(|task| task.turn_bytes >= most)
    }

    /// Lets tasks from the line into flight, first come first, as far as the limit goes.
    pub(super) fn admit_from_line(&mut self) {
        while self.in_flight < self.parts.limits.tasks_in_flight {
            let Some(id) = self.line.pop_front() else { return };
            let Some(task) = self.tasks.get_mut(&id) else { continue };
            task.in_flight = true;
            task.turn_bytes = 0;
            self.in_flight += 1;
            self.runnable.push_back(id);
            self.parts.metrics.tasks_in_flight_max.raise_to(self.in_flight as u64);
        }
    }

    /// A task is no longer among those in flight.
    pub(super) fn leave_flight(&mut self, id: u64) {
        let Some(task) = self.tasks.get_mut(&id) else { return };
        task.part = None;
        if std::mem::take(&mut task.in_flight) {
            self.in_flight -= 1;
        }
    }

    /// The same, if nothing more is to come of it.
    pub(super) fn leave_if_done(&mut self, id: u64) {
        if self.tasks.get(&id).is_some_and(|task| task.busy == 0 && !task.queued) {
            self.leave_flight(id);
            self.admit_from_line();
        }
    }

    /// Whether one more backend load may be in flight.
    fn can_start(&self) -> bool {
        let limits = &self.parts.limits;
        self.loads_in_flight < limits.backend_depth
            && (self.loads_in_flight == 0
                || self
                    .load_bytes_in_flight
                    .checked_add(self.parts.slots.slot_bytes())
                    .is_some_and(|bytes| bytes <= limits.backend_bytes))
    }

    /// Visits the task's shards until a read has started.
    fn walk(&mut self, id: u64) -> Walk {
        loop {
            let Some(task) = self.tasks.get_mut(&id) else { return Walk::Exhausted };
            let again = task.again.last().copied();
            let Some(unit) = again.or_else(|| task.prepared.order.get(task.next).copied()) else {
                return Walk::Exhausted;
            };
            let state = task.prepared.units.get(unit as usize).map(|unit| (unit.state, unit.key));
            if let Some((UnitState::Unresolved, key)) = state {
                match self.claim(id, unit, &key) {
                    Walk::Blocked => return Walk::Blocked,
                    walk => {
                        self.advance(id, again.is_some());
                        if matches!(walk, Walk::Started) {
                            return walk;
                        }
                    }
                }
            } else {
                self.advance(id, again.is_some());
            }
        }
    }

    fn advance(&mut self, id: u64, again: bool) {
        if let Some(task) = self.tasks.get_mut(&id) {
            if again {
                task.again.pop();
            } else {
                task.next += 1;
            }
        }
    }

    /// Asks the cache for one shard. `Exhausted` here means: needs no read of ours.
    fn claim(&mut self, id: u64, unit: u32, key: &Key) -> Walk {
        self.step();
        match self.parts.pool.acquire(key) {
            Ok(Acquired::Hit(pin)) => self.copy_in(id, unit, Source::Slot(pin), Origin::Hit),
            Ok(Acquired::Waiter(waiter)) => self.wait_for(id, unit, waiter),
            Ok(Acquired::Owner(fill)) => return self.read_into_slot(id, unit, fill),
            Ok(Acquired::Full) => {
                if self.parts.load_staging.is_some() {
                    let Some(len) = self.unit_mut(id, unit).map(|unit| unit.len) else {
                        return Walk::Exhausted;
                    };
                    return match self.room(id, len) {
                        Some(room) => self.read_around(id, unit, room),
                        None => Walk::Blocked,
                    };
                }
                // Our own pins come back by themselves; others' may never.
                if self.holds_slots() {
                    return Walk::Blocked;
                }
                self.unit_ended(id, unit, Err(FailKind::NoSpace));
            }
            Err(error) => self.cache_failed(id, unit, &error),
        }
        Walk::Exhausted
    }

    /// Whether a slot will be unpinned when something of ours ends.
    fn holds_slots(&self) -> bool {
        self.loads_in_flight > 0 || !self.copier.is_idle()
    }

    /// While all reads are busy and others may load the same shards: copies what they have finished.
    pub(super) fn look_around(&mut self) {
        if self.scan_at().is_none_or(|due| due > self.now) {
            return;
        }
        self.step();
        let Some(id) = self.runnable.front().copied() else { return };
        let (units, keys) = self.next_unresolved(id);
        let mut presence = vec![Presence::Absent; keys.len()];
        let mut found = false;
        if self.parts.pool.lookup(&keys, &mut presence).is_ok() {
            for ((unit, key), presence) in units.into_iter().zip(&keys).zip(presence) {
                if presence != Presence::Ready {
                    continue;
                }
                if let Ok(Some(Acquired::Hit(pin))) = self.parts.pool.acquire_resident(key) {
                    self.copy_in(id, unit, Source::Slot(pin), Origin::Hit);
                    found = true;
                }
            }
        }
        self.scan.pause = if found { LOOK_SOON } else { (self.scan.pause * 2).min(LOOK_LATE) };
        self.scan.due = self.now + self.scan.pause;
    }

    /// When to look around; `None` while there is no need to.
    pub(super) fn scan_at(&self) -> Option<Instant> {
        let needed = self.parts.limits.ranks > 1 && !self.runnable.is_empty();
        needed.then_some(self.scan.due)
    }

    /// Some of the task's shards that nobody does anything for, going round.
    fn next_unresolved(&mut self, id: u64) -> (Vec<u32>, Vec<Key>) {
        let mut units = Vec::with_capacity(LOOK);
        let mut keys = Vec::with_capacity(LOOK);
        let Some(task) = self.tasks.get(&id) else { return (units, keys) };
        let order = &task.prepared.order;
        if self.scan.place < task.next || self.scan.place >= order.len() {
            self.scan.place = task.next;
        }
        let end = order.len().min(self.scan.place + LOOK);
        for unit in order.get(self.scan.place..end).unwrap_or_default() {
            if let Some(state) = task.prepared.units.get(*unit as usize)
                && state.state == UnitState::Unresolved
            {
                units.push(*unit);
                keys.push(state.key);
            }
        }
        self.scan.place = end;
        (units, keys)
    }

    fn unresolved_at(&self, id: u64, place: usize) -> Option<(u32, Key)> {
        let task = self.tasks.get(&id)?;
        let unit = *task.prepared.order.get(place)?;
        let state = task.prepared.units.get(unit as usize)?;
        (state.state == UnitState::Unresolved).then_some((unit, state.key))
    }

    /// Reserves a slot for `key`; `false` if there was nothing to do or none to be had.
    pub(super) fn preallocate(&mut self, key: &Key) -> bool {
        matches!(self.parts.pool.prealloc(key), Ok(Prealloc::Made | Prealloc::MadeReserved))
    }

    /// The control region refused: fenced, poisoned or damaged.
    fn cache_failed(&mut self, id: u64, unit: u32, error: &CtrlError) {
        tracing::warn!(%error, "the cache refused a shard");
        self.unit_ended(id, unit, Err(FailKind::Unavailable));
    }
}
