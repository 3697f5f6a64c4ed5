//! A simulated device: copies that take the time a device would need, and fail on demand.
//!
//! Overlap, order and failure of whatever drives an engine can be seen with it on any machine. It is
//! no test double of the trait alone: it passes the conformance suite, moves real bytes between
//! real regions, and moves them only when the copy is due.
//!
//! **Invariant:** no byte of a plan moves before its turn on its stream, and its end is told only
//! after the last one has moved.

mod state;

use std::{
    fmt,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    task::Waker,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use crate::{
    Capabilities, Completion, ErrorKind, Location, Memory, PlanLimits, Quiesce, RegionId,
    RegionLease, RegionTable, Rejected, Ticket, TransferEngine, TransferError, TransferPlan,
    planner,
};
use state::{Running, State};

/// How fast a simulated device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceRates {
    /// Bytes per second of one stream; 0 means: no time.
    pub bytes_per_s: u64,
    /// Time of one piece, whatever its length.
    pub per_item: Duration,
    /// Time from the submission of a plan to its first byte, if its stream is free.
    pub launch: Duration,
    /// Streams that copy at the same time; a plan goes to the one that is free first. At least 1.
    pub streams: usize,
    /// Most items of a plan.
    pub max_items: usize,
    /// Most plans in flight; one more is `Busy`.
    pub max_in_flight: usize,
}

impl Default for DeviceRates {
    fn default() -> Self {
        Self {
            bytes_per_s: 0,
            per_item: Duration::ZERO,
            launch: Duration::ZERO,
            streams: 1,
            max_items: 1 << 16,
            max_in_flight: 1 << 12,
        }
    }
}

/// What a simulated device does wrong, with the next plan that has nothing else to do wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceFault {
    /// Moves half of the plan's bytes and reports this.
    Fails(ErrorKind),
    /// Takes this much longer.
    Delays(Duration),
    /// Does not end before [`SimDevice::resume`]; plans behind it on its stream wait.
    Stalls,
    /// Forgets the plan: drops it without an end.
    Loses,
    /// Refuses it as `Busy`.
    Refuses,
    /// Panics in `submit`.
    Panics,
}

/// What a simulated device has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceStats {
    /// Plans that ended.
    pub plans: u64,
    /// Bytes moved.
    pub bytes: u64,
    /// Time its streams were busy, summed.
    pub busy: Duration,
    /// Most plans that were in flight at once.
    pub in_flight_max: usize,
    /// Calls of [`TransferEngine::quiesce`] that would have stopped a whole stream.
    pub synchronisations: u64,
}

/// See the module description.
///
/// With [`start`](Self::start) the device keeps its own time, in a thread that sleeps until a copy
/// is due. With [`manual`](Self::manual) there is no thread and time is what
/// [`advance`](Self::advance) says.
pub struct SimDevice {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    regions: RegionTable,
    rates: DeviceRates,
    state: Mutex<State>,
    changed: Condvar,
}

impl SimDevice {
    /// A device with a thread that ends its copies when they are due.
    ///
    /// # Errors
    /// `Failed` when the operating system refuses the thread.
    pub fn start(rates: DeviceRates) -> Result<Arc<Self>, TransferError> {
        let mut device = Self::new(rates, None);
        let shared = Arc::clone(&device.shared);
        let thread = thread::Builder::new()
            .name("ucm-sim-device".into())
            .spawn(move || shared.run())
            .map_err(|error| {
                TransferError::new(ErrorKind::Failed, format!("no device thread: {error}"))
            })?;
        device.thread = Some(thread);
        Ok(Arc::new(device))
    }

    /// A device whose time stands at `now` until it is advanced.
    #[must_use]
    pub fn manual(rates: DeviceRates, now: Instant) -> Arc<Self> {
        Arc::new(Self::new(rates, Some(now)))
    }

    fn new(rates: DeviceRates, manual: Option<Instant>) -> Self {
        let state = Mutex::new(State::new(rates.streams, manual));
        let shared =
            Shared { regions: RegionTable::default(), rates, state, changed: Condvar::new() };
        Self { shared: Arc::new(shared), thread: None }
    }

    /// Adds a fault; faults are used up in order, one a plan.
    pub fn inject(&self, fault: DeviceFault) {
        self.shared.lock().faults.push_back(fault);
    }

    /// Ends the stalls: plans that stalled are due now.
    pub fn resume(&self) {
        let mut state = self.shared.lock();
        let now = state.now();
        state.resume(now);
        drop(state);
        self.shared.changed.notify_all();
    }

    /// Forgets the faults still to come, and ends the stalls.
    pub fn heal(&self) {
        self.shared.lock().faults.clear();
        self.resume();
    }

    /// Plans that stall now.
    #[must_use]
    pub fn stalled(&self) -> usize {
        self.shared.lock().running.iter().filter(|plan| plan.due.is_none()).count()
    }

    /// When the next copy is due.
    #[must_use]
    pub fn next_due(&self) -> Option<Instant> {
        self.shared.lock().next_due()
    }

    /// Makes it `now` for a manual device and ends what is due; says whether anything was.
    pub fn advance(&self, now: Instant) -> bool {
        self.shared.lock().set_now(now);
        let mut any = false;
        while self.shared.end_next(now) {
            any = true;
        }
        any
    }

    /// What the device has done.
    #[must_use]
    pub fn stats(&self) -> DeviceStats {
        self.shared.lock().stats
    }
}

impl Shared {
    /// Body of the device's thread.
    fn run(&self) {
        let mut state = self.lock();
        while !state.stopping {
            let now = Instant::now();
            match state.next_due() {
                Some(due) if due <= now => {
                    drop(state);
                    self.end_next(now);
                    state = self.lock();
                }
                Some(due) => {
                    let wait = self.changed.wait_timeout(state, due.saturating_duration_since(now));
                    state = wait.unwrap_or_else(PoisonError::into_inner).0;
                }
                None => {
                    state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }

    /// Ends the plan that is due first, if one is due; says whether there was one.
    fn end_next(&self, now: Instant) -> bool {
        let Some(running) = self.lock().take_due(now) else { return false };
        let Running { ticket, plan, lease, fault, .. } = running;
        let result = match fault {
            Some(DeviceFault::Fails(kind)) => {
                // What a failed copy leaves behind is undefined; half of it is a nasty case.
                let half = plan.items.len().div_ceil(2);
                let _ = move_bytes(&plan, &lease, half);
                Err(TransferError::new(kind, "injected into the simulated device"))
            }
            _ => move_bytes(&plan, &lease, plan.items.len()),
        };
        // Regions first: whoever hears of the end may deregister them.
        drop(lease);
        let lost = fault == Some(DeviceFault::Loses);
        let mut state = self.lock();
        state.ending -= 1;
        state.stats.plans += 1;
        state.stats.bytes += result.as_ref().copied().unwrap_or(0);
        let waker = if lost {
            None
        } else {
            state.done.push(Completion { ticket, result, holds: plan.holds });
            state.waker.clone()
        };
        drop(state);
        self.changed.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
        true
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Moves the first `count` items. Through a buffer of our own: device copies are no `memcpy`.
fn move_bytes(
    plan: &TransferPlan,
    lease: &RegionLease<()>,
    count: usize,
) -> Result<u64, TransferError> {
    let mut chunk = vec![0_u8; 64 << 10];
    let mut moved = 0;
    let stale = |id: RegionId| TransferError::new(ErrorKind::StaleRegion, format!("{id:?}"));
    for item in plan.items.iter().take(count) {
        let src = lease.find(item.src.region).ok_or_else(|| stale(item.src.region))?;
        let dst = lease.find(item.dst.region).ok_or_else(|| stale(item.dst.region))?;
        let mut done = 0;
        while done < item.len {
            let len = usize::try_from(item.len - done).unwrap_or(usize::MAX).min(chunk.len());
            let (part, _) = chunk.split_at_mut(len);
            let at = |offset: u64| usize::try_from(offset + done).unwrap_or(usize::MAX);
            src.memory().read(at(item.src.offset), part)?;
            dst.memory().write(at(item.dst.offset), part)?;
            done += len as u64;
        }
        moved += item.len;
    }
    Ok(moved)
}

fn reachable(src: Location, dst: Location) -> bool {
    let host = |l| matches!(l, Location::Host | Location::PinnedHost);
    host(src) && host(dst)
}

impl TransferEngine for SimDevice {
    fn name(&self) -> &'static str {
        "simulated"
    }

    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::unlimited(self.shared.rates.streams.max(1));
        capabilities.max_items = self.shared.rates.max_items;
        capabilities.max_in_flight = self.shared.rates.max_in_flight;
        capabilities
    }

    fn register(&self, memory: Memory) -> Result<RegionId, TransferError> {
        if !reachable(memory.location(), memory.location()) {
            let message = format!("the simulated device cannot reach {:?}", memory.location());
            return Err(TransferError::new(ErrorKind::Unsupported, message));
        }
        self.shared.regions.register(memory, ())
    }

    fn deregister(&self, region: RegionId) -> Result<(), TransferError> {
        self.shared.regions.deregister(region).map(drop)
    }

    fn submit(&self, plan: TransferPlan) -> Result<Ticket, Rejected> {
        let checked = || {
            let view = self.shared.regions.view();
            let limits = PlanLimits::UNSORTED;
            let planned = planner::plan(&plan.items, limits, |id| view.info(id), reachable)?;
            if plan.items.len() > self.shared.rates.max_items {
                let message = format!(
                    "{} items, the device takes {} at once: split the plan",
                    plan.items.len(),
                    self.shared.rates.max_items
                );
                return Err(TransferError::new(ErrorKind::Invalid, message));
            }
            view.lease(&planned.regions)
        };
        let lease = match checked() {
            Ok(lease) => lease,
            Err(error) => return Err(Rejected { plan, error }),
        };
        let mut state = self.shared.lock();
        let fault = state.faults.pop_front();
        let panics = fault == Some(DeviceFault::Panics);
        let full = state.in_flight() >= self.shared.rates.max_in_flight;
        if panics || full || fault == Some(DeviceFault::Refuses) {
            drop(state);
            drop(lease);
            assert!(!panics, "injected panic in the simulated device");
            let message = format!("{} plans are in flight", self.shared.rates.max_in_flight);
            return Err(Rejected { plan, error: TransferError::new(ErrorKind::Busy, message) });
        }
        let ticket = state.start(plan, lease, fault, &self.shared.rates);
        drop(state);
        self.shared.changed.notify_all();
        Ok(ticket)
    }

    fn poll(&self, out: &mut Vec<Completion>) -> usize {
        let mut state = self.shared.lock();
        let count = state.done.len();
        out.append(&mut state.done);
        count
    }

    fn set_waker(&self, waker: Option<Waker>) {
        let mut state = self.shared.lock();
        state.waker.clone_from(&waker);
        let now = if state.done.is_empty() { None } else { waker };
        drop(state);
        if let Some(waker) = now {
            waker.wake();
        }
    }

    fn quiesce(&self, target: Quiesce, deadline: Instant) -> Result<(), TransferError> {
        let mut state = self.shared.lock();
        state.stats.synchronisations += u64::from(target == Quiesce::All && state.in_flight() > 0);
        let before = state.next_ticket;
        while state.holds_back(target, before) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let message = format!("{} plans have not ended at the deadline", state.in_flight());
                return Err(TransferError::new(ErrorKind::Stuck, message));
            }
            let wait = self.shared.changed.wait_timeout(state, left);
            state = wait.unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }
}

impl Drop for SimDevice {
    fn drop(&mut self) {
        self.shared.lock().stopping = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != thread::current().id()
        {
            // It catches nothing and panics nowhere; a poisoned lock is read all the same.
            let _ = thread.join();
        }
        // What had not begun never will; its holds go with it, outside of the lock.
        let (running, done) = self.shared.lock().abandon();
        drop((running, done));
    }
}

impl fmt::Debug for SimDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimDevice")
            .field("rates", &self.shared.rates)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
