//! What submitters, pollers and the tender of a device engine share.
//!
//! **Invariant:** a job leaves its queue when its event has ended, or goes to quarantine with
//! everything that its copies may still touch; regions and holds become free in no other way.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::Waker,
    time::{Duration, Instant},
};

use super::{
    counters::DeviceCounters,
    error::{Call, DriverError},
    handles::{Event, Scratch, Stream},
    measure::SwitchPoint,
    opened::Device,
    pins::HostPins,
    work::Direction,
};
use crate::{
    Completion, ErrorKind, Hold, Quiesce, Region, RegionId, RegionLease, RegionTable, Ticket,
    TransferError,
};

/// Unused lists of fragments that are kept.
const SPARE_SCRATCH: usize = 8;
/// Smallest list of fragments.
const SCRATCH_BYTES: usize = 64 << 10;

/// Plans whose memory was given up for the life of this process, because nothing proved that their
/// copies had ended.
pub(super) static LEAKED: AtomicU64 = AtomicU64::new(0);

/// See the module description.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) device: Arc<Device>,
    pub(super) regions: RegionTable<HostPins>,
    pub(super) lanes: Vec<Lane>,
    pub(super) switch: SwitchPoint,
    pub(super) batch_refused: AtomicBool,
    pub(super) max_in_flight: usize,
    pub(super) bell: Arc<Bell>,
    state: Mutex<State>,
    /// `quiesce` and the end of the engine sleep here.
    ended: Condvar,
}

/// A stream, and the order of what is given to it.
#[derive(Debug)]
pub(super) struct Lane {
    pub(super) stream: Stream,
    pub(super) direction: Direction,
    /// Held while a plan is given to the stream and queued: queue and stream keep one order.
    pub(super) order: Mutex<()>,
}

/// One accepted plan.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) ticket: Ticket,
    /// `None` when it could not be recorded: nothing would tell of the end.
    pub(super) event: Option<Arc<Event>>,
    /// How often in a row the driver failed to say whether it has ended.
    pub(super) strikes: u32,
    pub(super) error: Option<TransferError>,
    pub(super) bytes: u64,
    pub(super) lease: RegionLease<HostPins>,
    pub(super) holds: Holds,
    pub(super) scratch: Vec<Scratch>,
}

/// Holds of a plan, which say nothing about themselves.
pub(super) struct Holds(pub(super) Vec<Hold>);

impl std::fmt::Debug for Holds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} holds", self.0.len())
    }
}

#[derive(Debug, Default)]
struct State {
    next_ticket: u64,
    /// Plans being given to the driver now.
    reserved: usize,
    /// By lane, in the order of the stream.
    queues: Vec<VecDeque<Job>>,
    /// Bytes in flight by lane.
    backlog: Vec<u64>,
    /// Told as ended, but not proved to be.
    quarantine: Vec<Job>,
    done: Vec<Completion>,
    waker: Option<Waker>,
    stop: bool,
    tender_gone: bool,
    poisoned: Option<TransferError>,
    events: Vec<Event>,
    scratch: Vec<Scratch>,
    counters: DeviceCounters,
}

/// What is dropped or called without the lock.
#[derive(Default)]
#[must_use]
pub(super) struct After {
    waker: Option<Waker>,
    _regions: Vec<(RegionId, Arc<Region<HostPins>>)>,
    _events: Vec<Arc<Event>>,
    _scratch: Vec<Scratch>,
}

/// What the tender has to look at.
pub(super) enum Watch {
    /// The oldest plan of each stream that has one: lane, ticket, event.
    Heads(Vec<(usize, Ticket, Option<Arc<Event>>)>),
    /// Only plans in quarantine are left.
    Quarantine(Vec<(Ticket, Option<Arc<Event>>)>),
    Nothing,
}

impl Shared {
    pub(super) fn new(
        device: Arc<Device>,
        lanes: Vec<Lane>,
        switch: SwitchPoint,
        max_in_flight: usize,
    ) -> Self {
        let state = State {
            next_ticket: 1,
            queues: lanes.iter().map(|_| VecDeque::new()).collect(),
            backlog: vec![0; lanes.len()],
            ..State::default()
        };
        Self {
            device,
            regions: RegionTable::default(),
            lanes,
            switch,
            batch_refused: AtomicBool::new(false),
            max_in_flight,
            bell: Arc::default(),
            state: Mutex::new(state),
            ended: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No foreign code runs under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a place for one more plan.
    pub(super) fn reserve(&self) -> Result<Reservation<'_>, TransferError> {
        let mut state = self.lock();
        if let Some(error) = &state.poisoned {
            return Err(error.clone());
        }
        let quarantined = state.quarantine.len();
        let waiting: usize = state.queues.iter().map(VecDeque::len).sum();
        let in_flight = waiting + state.reserved + state.done.len() + quarantined;
        if in_flight >= self.max_in_flight {
            return Err(TransferError::new(
                ErrorKind::Busy,
                format!(
                    "{in_flight} plans are in flight, in quarantine or not polled yet, the limit is \
                     {}; poll completions first",
                    self.max_in_flight
                ),
            ));
        }
        state.reserved += 1;
        Ok(Reservation { shared: self })
    }

    /// The lane of this direction with the least in flight.
    pub(super) fn lane(&self, direction: Direction) -> Option<(usize, &Lane)> {
        let state = self.lock();
        let lanes = self.lanes.iter().enumerate().filter(|(_, lane)| lane.direction == direction);
        lanes.min_by_key(|(at, _)| state.backlog.get(*at).copied().unwrap_or(0))
    }

    /// An event that nobody uses.
    pub(super) fn event(&self) -> Call<Event> {
        let spare = self.lock().events.pop();
        spare.map_or_else(|| Event::new(&self.device), Ok)
    }

    pub(super) fn give_back(&self, event: Event) {
        self.lock().events.push(event);
    }

    /// Pinned memory for a list of this many bytes.
    pub(super) fn scratch(&self, bytes: usize) -> Call<Scratch> {
        let mut state = self.lock();
        let fits = state.scratch.iter().position(|scratch| scratch.len() >= bytes);
        if let Some(at) = fits {
            return Ok(state.scratch.swap_remove(at));
        }
        drop(state);
        let len = bytes.max(SCRATCH_BYTES).checked_next_power_of_two().unwrap_or(bytes);
        Scratch::new(&self.device, len)
    }

    /// Queues a plan that was given to the stream of this lane.
    pub(super) fn admit(
        &self,
        reservation: Reservation<'_>,
        lane: usize,
        mut job: Job,
        counted: impl FnOnce(&mut DeviceCounters),
    ) -> Ticket {
        let mut state = self.lock();
        let ticket = state.take_ticket();
        job.ticket = ticket;
        counted(&mut state.counters);
        if let Some(backlog) = state.backlog.get_mut(lane) {
            *backlog += job.bytes;
        }
        if let Some(queue) = state.queues.get_mut(lane) {
            queue.push_back(job);
        }
        drop(state);
        drop(reservation);
        self.bell.ring();
        ticket
    }

    /// Ends a plan without items.
    pub(super) fn end_empty(&self, reservation: Reservation<'_>, holds: Vec<Hold>) -> Ticket {
        let mut state = self.lock();
        let ticket = state.take_ticket();
        state.counters.plans += 1;
        state.done.push(Completion { ticket, result: Ok(0), holds });
        let waker = state.waker.clone();
        drop(state);
        drop(reservation);
        self.finish(After { waker, ..After::default() });
        ticket
    }

    /// What the tender has to look at next.
    pub(super) fn watch(&self) -> (Watch, bool) {
        let mut state = self.lock();
        let heads: Vec<_> = state
            .queues
            .iter()
            .enumerate()
            .filter_map(|(at, queue)| queue.front().map(|job| (at, job.ticket, job.event.clone())))
            .collect();
        state.counters.polls += heads.len() as u64;
        let stop = state.stop && state.reserved == 0;
        if !heads.is_empty() {
            return (Watch::Heads(heads), stop);
        }
        if state.quarantine.is_empty() {
            return (Watch::Nothing, stop);
        }
        let held = state.quarantine.iter().map(|job| (job.ticket, job.event.clone())).collect();
        (Watch::Quarantine(held), stop)
    }

    /// The head of this lane has ended.
    pub(super) fn end_head(&self, lane: usize, ticket: Ticket) {
        let mut state = self.lock();
        let Some(job) = state.pop_head(lane, ticket) else { return };
        let Job { event, error, bytes, lease, holds, scratch, .. } = job;
        let result = error.map_or(Ok(bytes), Err);
        state.counters.plans += 1;
        state.counters.bytes += result.as_ref().copied().unwrap_or(0);
        state.done.push(Completion { ticket, result, holds: holds.0 });
        // Before anybody can hear of the end: whoever does may deregister the regions.
        let mut after = After { _regions: lease.release(), ..After::default() };
        state.keep_for_later(event, scratch, &mut after);
        after.waker = state.waker.clone();
        drop(state);
        self.finish(after);
    }

    /// The driver failed to say whether the head has ended; says how often in a row it did.
    pub(super) fn strike(&self, lane: usize, ticket: Ticket, error: &DriverError) -> u32 {
        let mut state = self.lock();
        state.counters.driver_errors += 1;
        let head = state.queues.get_mut(lane).and_then(VecDeque::front_mut);
        head.filter(|job| job.ticket == ticket).map_or(0, |job| {
            // An error heard while waiting may be one of the copies: the bytes are undefined.
            job.error.get_or_insert_with(|| error.clone().into_transfer(ErrorKind::Failed));
            job.strikes += 1;
            job.strikes
        })
    }

    /// The driver answers again.
    pub(super) fn forgive(&self, lane: usize, ticket: Ticket) {
        let mut state = self.lock();
        let head = state.queues.get_mut(lane).and_then(VecDeque::front_mut);
        if let Some(job) = head.filter(|job| job.ticket == ticket) {
            job.strikes = 0;
        }
    }

    /// Gives an event to a plan that could not get one when it began.
    pub(super) fn recorded(&self, lane: usize, ticket: Ticket, event: Event) {
        let mut state = self.lock();
        let head = state.queues.get_mut(lane).and_then(VecDeque::front_mut);
        match head.filter(|job| job.ticket == ticket) {
            Some(job) => job.event = Some(Arc::new(event)),
            None => state.events.push(event),
        }
    }

    /// Nothing will prove any more that plans have ended: all are told, and their memory is kept.
    pub(super) fn poison(&self, error: &DriverError) {
        let told = TransferError::new(
            ErrorKind::Poisoned,
            format!("the device is lost, open it anew: {error}"),
        );
        let mut state = self.lock();
        if state.poisoned.is_none() {
            tracing::error!("{told}");
            state.poisoned = Some(told.clone());
        }
        let jobs: Vec<Job> = state.queues.iter_mut().flat_map(|queue| queue.drain(..)).collect();
        state.backlog.iter_mut().for_each(|bytes| *bytes = 0);
        for job in jobs {
            state.counters.plans += 1;
            state.counters.quarantined += 1;
            let result = Err(told.clone());
            // The holds stay with the memory: nothing proves that the copies do not touch it.
            state.done.push(Completion { ticket: job.ticket, result, holds: Vec::new() });
            state.quarantine.push(job);
        }
        let waker = state.waker.clone();
        drop(state);
        self.finish(After { waker, ..After::default() });
    }

    /// A plan in quarantine has ended after all.
    pub(super) fn acquit(&self, ticket: Ticket) {
        let mut state = self.lock();
        let Some(at) = state.quarantine.iter().position(|job| job.ticket == ticket) else { return };
        let Job { event, lease, holds, scratch, .. } = state.quarantine.swap_remove(at);
        state.counters.quarantined -= 1;
        let mut after = After { _regions: lease.release(), ..After::default() };
        state.keep_for_later(event, scratch, &mut after);
        drop(state);
        drop(holds);
        self.finish(after);
    }

    /// Gives up what is in quarantine: its memory stays as it is until the process ends.
    pub(super) fn leak_quarantine(&self) {
        let jobs = std::mem::take(&mut self.lock().quarantine);
        if !jobs.is_empty() {
            LEAKED.fetch_add(jobs.len() as u64, Ordering::Relaxed);
            tracing::error!("the memory of {} plans is given up", jobs.len());
            // Freed by the end of the process, which also ends the copies.
            let _ = Box::leak(Box::new(jobs));
        }
    }

    /// Whatever may run foreign code, without the lock.
    pub(super) fn finish(&self, after: After) {
        self.ended.notify_all();
        let waker = after.waker.clone();
        drop(after);
        if let Some(waker) = waker {
            let woken = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| waker.wake()));
            if woken.is_err() {
                let error = TransferError::new(ErrorKind::Poisoned, "a waker panicked");
                self.lock().poisoned.get_or_insert(error);
            }
        }
    }

    pub(super) fn poll(&self, out: &mut Vec<Completion>) -> usize {
        let mut state = self.lock();
        let count = state.done.len();
        out.append(&mut state.done);
        count
    }

    pub(super) fn set_waker(&self, waker: Option<Waker>) {
        let mut state = self.lock();
        let earlier = std::mem::replace(&mut state.waker, waker);
        let now = if state.done.is_empty() { None } else { state.waker.clone() };
        drop(state);
        drop(earlier);
        self.finish(After { waker: now, ..After::default() });
    }

    pub(super) fn quiesce(&self, target: Quiesce, deadline: Instant) -> Result<(), TransferError> {
        let mut state = self.lock();
        let before = state.next_ticket;
        loop {
            let left = state.concerned(target, before);
            if left == 0 {
                return Ok(());
            }
            let time = deadline.saturating_duration_since(Instant::now());
            if time.is_zero() {
                let message = format!(
                    "{left} plans of {target:?} have not ended at the deadline ({} in quarantine)",
                    state.quarantine.len()
                );
                return Err(TransferError::new(ErrorKind::Stuck, message));
            }
            let wait = self.ended.wait_timeout(state, time);
            state = wait.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The event of a plan that has not ended.
    pub(super) fn event_of(&self, ticket: Ticket) -> Option<Option<Arc<Event>>> {
        let state = self.lock();
        let mut all = state.queues.iter().flatten().chain(&state.quarantine);
        all.find(|job| job.ticket == ticket).map(|job| job.event.clone())
    }

    /// Bytes that were to be pinned and are not.
    pub(super) fn count_unpinned(&self, bytes: usize) {
        self.lock().counters.unpinned_regions_bytes += bytes as u64;
    }

    pub(super) fn counters(&self) -> DeviceCounters {
        let mut counters = self.lock().counters;
        counters.leaked = LEAKED.load(Ordering::Relaxed);
        counters
    }

    /// Lets the tender go when everything has ended, and waits this long for it.
    pub(super) fn stop(&self, linger: Duration) -> bool {
        let mut state = self.lock();
        state.stop = true;
        drop(state);
        self.bell.ring();
        state = self.lock();
        let deadline = Instant::now() + linger;
        while !state.tender_gone {
            let time = deadline.saturating_duration_since(Instant::now());
            if time.is_zero() {
                return false;
            }
            let wait = self.ended.wait_timeout(state, time);
            state = wait.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    pub(super) fn tender_goes(&self) {
        self.lock().tender_gone = true;
        self.ended.notify_all();
    }

    /// Takes out what nobody will poll any more.
    pub(super) fn abandon(&self) -> Vec<Completion> {
        std::mem::take(&mut self.lock().done)
    }
}

impl State {
    fn take_ticket(&mut self) -> Ticket {
        let ticket = Ticket(self.next_ticket);
        self.next_ticket += 1;
        ticket
    }

    fn pop_head(&mut self, lane: usize, ticket: Ticket) -> Option<Job> {
        let queue = self.queues.get_mut(lane)?;
        if queue.front()?.ticket != ticket {
            return None;
        }
        let job = queue.pop_front()?;
        if let Some(backlog) = self.backlog.get_mut(lane) {
            *backlog -= job.bytes;
        }
        Some(job)
    }

    /// Events and lists serve again; what is too much goes.
    fn keep_for_later(
        &mut self,
        event: Option<Arc<Event>>,
        scratch: Vec<Scratch>,
        after: &mut After,
    ) {
        if let Some(event) = event {
            match Arc::try_unwrap(event) {
                Ok(event) => self.events.push(event),
                Err(used) => after._events.push(used),
            }
        }
        for one in scratch {
            if self.scratch.len() < SPARE_SCRATCH {
                self.scratch.push(one);
            } else {
                after._scratch.push(one);
            }
        }
    }

    /// Plans that keep the target from having ended.
    fn concerned(&self, target: Quiesce, before: u64) -> usize {
        let concerns = |job: &&Job| match target {
            Quiesce::All => job.ticket.0 < before,
            Quiesce::Ticket(ticket) => job.ticket == ticket,
            Quiesce::Region(id) => job.lease.find(id).is_some(),
        };
        self.queues.iter().flatten().chain(&self.quarantine).filter(concerns).count()
    }
}

/// A place for a plan; given back unless the plan is admitted.
#[derive(Debug)]
pub(super) struct Reservation<'a> {
    shared: &'a Shared,
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        self.shared.lock().reserved -= 1;
    }
}

/// Wakes the tender: a plan came, a stream called back, the engine ends.
#[derive(Debug, Default)]
pub(super) struct Bell {
    rings: Mutex<u64>,
    rung: Condvar,
}

impl Bell {
    pub(super) fn ring(&self) {
        *self.rings.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.rung.notify_all();
    }

    pub(super) fn rings(&self) -> u64 {
        *self.rings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sleeps until it rang since `seen`, at most this long (`None`: for ever).
    pub(super) fn wait(&self, seen: u64, time: Option<Duration>) {
        let rings = self.rings.lock().unwrap_or_else(PoisonError::into_inner);
        let same = |now: &mut u64| *now == seen;
        match time {
            Some(time) => drop(self.rung.wait_timeout_while(rings, time, same)),
            None => drop(self.rung.wait_while(rings, same)),
        }
    }
}
