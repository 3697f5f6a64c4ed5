//! The IO-free heart of a queue: events and a clock in, actions out.
//!
//! A [`Core`] never sleeps, never reads a clock and has no threads. `turn` takes what happened,
//! looks at the waits, claims what may be claimed, and hands work to the backend and the engine.
//!
//! **Invariant:** whatever holds a slot or buffer that IO may touch (a token, a lease, a pin)
//! travels with that IO and is dropped only when it has ended; ending a request never does that.

pub(crate) mod copy;
mod deadlines;
mod dispatch;
mod flight;
mod group;
mod load;
mod stage;
mod store;
mod wait;

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use ucm_ctrl::{Fill, Key, Pool};
use ucm_store::{Backend, Op, Sink};
use ucm_transport::TransferEngine;

use crate::{
    SlotMemory,
    dump::{DumpItem, PreparedDump, SlotShares},
    hash::Map,
    inbox::{Event, Inbox},
    metrics::Metrics,
    pace::{Pace, PaceMeter},
    staging::StagingPool,
    task::Prepared,
};

use self::{
    copy::Copier,
    deadlines::Deadlines,
    dispatch::Scan,
    flight::Flight,
    group::Group,
    stage::{Part, Unreachable},
    store::Durable,
    wait::Wait,
};

/// Numbers a core works with.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    /// Backend loads in flight.
    pub(crate) backend_depth: usize,
    /// Bytes of backend loads in flight; one load is always allowed.
    pub(crate) backend_bytes: u64,
    /// Backend dumps in flight.
    pub(crate) dump_depth: usize,
    /// Slots that dumps may keep from loads at once.
    pub(crate) dump_slots: usize,
    /// Ranks that may load the same shards.
    pub(crate) ranks: u32,
    /// Tasks that may have reads of ours in flight.
    pub(crate) tasks_in_flight: usize,
    /// Bytes a task reads before it yields to those that wait in line.
    pub(crate) turn_bytes: u64,
}

/// What a core works with.
pub(crate) struct Parts {
    pub(crate) limits: Limits,
    pub(crate) pool: Pool,
    pub(crate) slots: Arc<dyn SlotMemory>,
    pub(crate) load_staging: Option<StagingPool>,
    pub(crate) dump_staging: Option<StagingPool>,
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) engine: Arc<dyn TransferEngine>,
    pub(crate) inbox: Arc<Inbox>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) pace: Arc<Pace>,
    /// Panic at this step.
    #[cfg(feature = "testing")]
    pub(crate) panic_at_step: Option<u64>,
}

/// What the driver must do after a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Turn {
    /// Turn again at this time even if nothing happens.
    pub(crate) wake_at: Option<Instant>,
    /// There is work for the idle window.
    pub(crate) prewarm: bool,
    /// Closed, and nothing is left in flight.
    pub(crate) finished: bool,
}

/// See the module description.
pub(crate) struct Core {
    parts: Parts,
    sink: Arc<dyn Sink>,
    now: Instant,
    closing: bool,
    tasks: Map<u64, Box<LoadTask>>,
    /// Tasks in flight with units that nobody does anything for, next one first.
    runnable: VecDeque<u64>,
    /// The same of tasks that may not be in flight yet, first come first.
    line: VecDeque<u64>,
    /// Tasks that begin when another has nothing more to claim.
    followers: Map<u64, u64>,
    /// Number of tasks in flight.
    in_flight: usize,
    /// Whether something was given back since `dispatch` looked.
    freed: bool,
    deadlines: Deadlines,
    scan: Scan,
    waits: Vec<Wait>,
    flights: Map<u64, Flight>,
    next_token: u64,
    loads_in_flight: usize,
    load_bytes_in_flight: u64,
    dumps_in_flight: usize,
    load_ops: Vec<Op>,
    dump_ops: Vec<Op>,
    copier: Copier,
    /// Shards in slots that the engine cannot reach, waiting for a buffer.
    unreachable: VecDeque<Unreachable>,
    prewarm: VecDeque<Key>,
    /// Dumps whose slot is still to be asked for.
    dumps: VecDeque<DumpItem>,
    /// The same of groups: they wait for nobody, and others wait for them.
    group_dumps: VecDeque<DumpItem>,
    dump_slots: SlotShares,
    /// Dumps whose producer has not finished.
    gated: Map<u64, Box<PreparedDump>>,
    /// Dumps that are held back until their group is decided.
    groups: Map<u64, Group>,
    meter: PaceMeter,
    /// Dumps whose slot the engine cannot reach, waiting for a buffer.
    unreachable_dumps: VecDeque<(DumpItem, Fill)>,
    /// Dumps whose bytes are in a slot or buffer, still to be given to the backend.
    durables: VecDeque<Durable>,
}

/// A task being worked on.
struct LoadTask {
    prepared: Prepared,
    /// First place of `prepared.order` not yet visited by a claim.
    next: usize,
    /// Units to visit again, after a filler's failure.
    again: Vec<u32>,
    /// Units neither ended nor handed to the copier.
    unsent: usize,
    /// Requests that have not ended.
    open_requests: usize,
    /// Whether it is in `runnable` or in `line`.
    queued: bool,
    /// Whether it waits for another task to have nothing more to claim.
    follows: bool,
    /// Whether it counts as in flight.
    in_flight: bool,
    /// Units that this queue reads or has read, not ended.
    busy: usize,
    /// Bytes it has read since it came into flight.
    turn_bytes: u64,
    /// The staging buffer it is filling.
    part: Option<Part>,
    /// One clone for each room in a staging buffer.
    rooms: Arc<()>,
    /// Whether it waits for a staging buffer and holds none.
    starved: bool,
}

impl Core {
    /// A core with nothing to do.
    pub(crate) fn new(parts: Parts, now: Instant) -> Self {
        let sink: Arc<dyn Sink> = Arc::<Inbox>::clone(&parts.inbox);
        let copier = Copier::new(&parts.engine.capabilities());
        Self {
            parts,
            sink,
            now,
            closing: false,
            tasks: Map::default(),
            runnable: VecDeque::new(),
            line: VecDeque::new(),
            followers: Map::default(),
            in_flight: 0,
            freed: false,
            deadlines: Deadlines::default(),
            scan: Scan::new(now),
            waits: Vec::new(),
            flights: Map::default(),
            next_token: 1,
            loads_in_flight: 0,
            load_bytes_in_flight: 0,
            dumps_in_flight: 0,
            load_ops: Vec::new(),
            dump_ops: Vec::new(),
            copier,
            unreachable: VecDeque::new(),
            prewarm: VecDeque::new(),
            dumps: VecDeque::new(),
            group_dumps: VecDeque::new(),
            dump_slots: SlotShares::default(),
            gated: Map::default(),
            groups: Map::default(),
            meter: PaceMeter::new(),
            unreachable_dumps: VecDeque::new(),
            durables: VecDeque::new(),
        }
    }

    /// Takes the events and does everything that can be done without waiting.
    pub(crate) fn turn(&mut self, now: Instant, events: &mut Vec<Event>) -> Turn {
        self.now = now;
        self.parts.metrics.turns.add(1);
        self.meter.turn(now, &self.parts.pace);
        for event in events.drain(..) {
            self.step();
            self.take(event);
        }
        self.reap_copies();
        self.expire();
        self.check_waits();
        self.stage_unreachable();
        loop {
            self.freed = false;
            self.dispatch();
            self.look_around();
            self.start_dumps();
            self.start_durables();
            // Reads first: they run while the copies are made.
            self.submit_loads();
            self.submit_copies();
            self.submit_stores();
            // A plan that an engine refused gave its slots and buffers back just now, and no event
            // will say so.
            if !self.freed {
                break;
            }
            self.stage_unreachable();
        }
        self.meter.rest(now, !self.tasks.is_empty());
        Turn {
            wake_at: self.wake_at(),
            prewarm: !self.prewarm.is_empty(),
            finished: self.closing && self.is_idle(),
        }
    }

    /// One step of the idle window: reserves one slot. Says whether there is more to do.
    pub(crate) fn prewarm_step(&mut self) -> bool {
        self.step();
        let Some(key) = self.prewarm.pop_front() else { return false };
        if self.preallocate(&key) {
            self.parts.metrics.preallocated.add(1);
        } else {
            self.parts.metrics.prealloc_skipped.add(1);
        }
        !self.prewarm.is_empty()
    }

    /// Whether nothing is in flight and no task is open.
    pub(crate) fn is_idle(&self) -> bool {
        self.tasks.is_empty()
            && self.flights.is_empty()
            && self.waits.is_empty()
            && self.copier.is_idle()
            && self.unreachable.is_empty()
            && self.unreachable_dumps.is_empty()
            && self.gated.is_empty()
            && self.groups.is_empty()
            && self.dumps.is_empty()
            && self.group_dumps.is_empty()
            && self.durables.is_empty()
    }

    /// What holds a queue up, for tests that find it stuck.
    #[cfg(feature = "testing")]
    pub(crate) fn describe(&self) -> String {
        let task = |id: &u64| {
            self.tasks.get(id).map(|task| {
                let states: Vec<_> = task.prepared.units.iter().map(|unit| unit.state).collect();
                let (rooms, part) = (Arc::strong_count(&task.rooms) - 1, task.part.is_some());
                let (busy, starved) = (task.busy, task.starved);
                format!("{id}: {states:?} busy {busy} rooms {rooms} part {part} starved {starved}")
            })
        };
        format!(
            "runnable {:?}, line {:?}, in flight {}, reads {}, copies {:?}, waits {}, unreachable {} + \
             {}, dumps {}, durables {}",
            self.runnable.iter().map(task).collect::<Vec<_>>(),
            self.line,
            self.in_flight,
            self.loads_in_flight,
            self.copier.describe(),
            self.waits.len(),
            self.unreachable.len(),
            self.unreachable_dumps.len(),
            self.dumps.len(),
            self.durables.len(),
        )
    }

    /// Deadlines kept, those of ended requests too.
    #[cfg(feature = "testing")]
    pub(crate) fn deadlines(&self) -> usize {
        self.deadlines.len()
    }

    /// Whether the core was told to end everything.
    pub(crate) fn is_closing(&self) -> bool {
        self.closing
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Submit(prepared) => self.admit(prepared),
            Event::Dump(prepared) => {
                self.prewarm.clear();
                if self.closing {
                    drop(prepared);
                } else if prepared.gated {
                    self.gated.insert(prepared.id, prepared);
                } else {
                    self.begin_dump(*prepared);
                }
            }
            Event::Produced(id, well) => {
                if let Some(prepared) = self.gated.remove(&id)
                    && well
                {
                    self.begin_dump(*prepared);
                }
            }
            Event::Decided(id, commit) => self.decided(id, commit),
            Event::GiveUp(id) => self.give_up(id),
            Event::Cancel(task) => self.cancel(task),
            Event::Ended(completed) => self.ended(completed),
            Event::CopyLost(body) => self.copy_lost(*body),
            Event::Close => self.close(),
        }
    }

    /// Ends all load tasks as cancelled and takes no more; dumps not yet started are dropped, those
    /// in flight run to their end, and votes not decided are taken back.
    fn close(&mut self) {
        self.closing = true;
        self.prewarm.clear();
        let tasks: Vec<u64> = self.tasks.keys().copied().collect();
        for task in tasks {
            self.cancel(task);
        }
        self.dumps.clear();
        self.group_dumps.clear();
        // Dropping these votes against their groups, and ends their shards.
        self.gated.clear();
        self.give_up_groups();
        // Dropping a fill fails it.
        self.unreachable_dumps.clear();
        self.drop_dump_waits();
    }

    fn wake_at(&mut self) -> Option<Instant> {
        let deadline = self.next_deadline();
        let scan = self.scan_at();
        match (deadline, scan) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    /// A named point of the core's work: tests make it panic there.
    fn step(&mut self) {
        #[cfg(feature = "testing")]
        if let Some(left) = &mut self.parts.panic_at_step {
            assert!(*left > 0, "injected panic at a step");
            *left -= 1;
        }
    }

    fn since(&self, at: Instant) -> Duration {
        self.now.saturating_duration_since(at)
    }
}
