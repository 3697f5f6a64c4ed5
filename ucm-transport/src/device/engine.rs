//! The engine over a device: plans in, events out.
//!
//! **Invariant:** a plan is either given back untouched, or ends once, when its event has ended.

use std::{
    fmt,
    sync::{Arc, PoisonError},
    task::Waker,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use super::{
    counters::DeviceCounters,
    driver::{RawEvent, RawStream},
    error::DriverError,
    gpu::Gpu,
    handles::{Event, Stream},
    issue::{Issued, issue},
    measure::{KernelUse, SwitchPoint},
    pins::HostPins,
    shared::{Bell, Holds, Job, Lane, Shared},
    tender,
    work::{Direction, Work},
};
use crate::{
    Capabilities, Completion, ErrorKind, Location, Memory, PlanLimits, Quiesce, RegionId, Rejected,
    Ticket, TransferEngine, TransferError, TransferPlan, planner,
};

/// Most items of one plan.
const MAX_ITEMS: usize = 1 << 20;

/// What happens to host memory when it is registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum PinPolicy {
    /// It is pinned, or not registered.
    #[default]
    Require,
    /// It is pinned if the driver agrees; if not, its bytes are counted as unpinned.
    Prefer,
    /// It is used as it is.
    Never,
}

/// How the engine hears that copies have ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum EndNotice {
    /// A thread asks the driver, with sleeps from 5 to 200 µs between.
    #[default]
    Polled,
    /// Streams call the host, which wakes that thread; costs the stream some microseconds a plan.
    Called,
}

/// What copies must wait for: whoever writes their sources or reads their destinations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Producer {
    /// An event recorded by the producer (`CUevent`, `hipEvent_t`).
    Event(usize),
    /// A stream of the producer (`CUstream`, `hipStream_t`): all that was given to it so far.
    Stream(usize),
}

/// Settings of a [`DeviceEngine`].
#[derive(Clone, Debug)]
#[must_use = "call `build`"]
pub struct DeviceEngineBuilder {
    gpu: Gpu,
    peers: Vec<Gpu>,
    load_streams: usize,
    store_streams: usize,
    max_in_flight: usize,
    pin: PinPolicy,
    pin_piece_bytes: usize,
    kernel: KernelUse,
    notice: EndNotice,
    linger: Duration,
}

impl DeviceEngineBuilder {
    /// Streams for copies to the device; they are urgent, because computation waits for them.
    /// Default 2, minimum 1.
    pub fn load_streams(mut self, streams: usize) -> Self {
        self.load_streams = streams.clamp(1, 64);
        self
    }

    /// Streams for copies from the device. Default 2, minimum 1.
    pub fn store_streams(mut self, streams: usize) -> Self {
        self.store_streams = streams.clamp(1, 64);
        self
    }

    /// Plans accepted but not yet polled; one more is refused as `Busy`. Default 4096.
    pub fn max_in_flight(mut self, plans: usize) -> Self {
        self.max_in_flight = plans.max(1);
        self
    }

    /// What happens to host memory when it is registered. Default [`PinPolicy::Require`].
    pub fn pin(mut self, pin: PinPolicy) -> Self {
        self.pin = pin;
        self
    }

    /// Most bytes pinned by one call: drivers refuse very big ones. Default 1 GiB; whole pages.
    pub fn pin_piece_bytes(mut self, bytes: usize) -> Self {
        self.pin_piece_bytes = bytes.max(4096) / 4096 * 4096;
        self
    }

    /// When small fragments go to the kernel. Default [`KernelUse::Measured`].
    pub fn kernel(mut self, kernel: KernelUse) -> Self {
        self.kernel = kernel;
        self
    }

    /// How the engine hears that copies have ended. Default [`EndNotice::Polled`].
    pub fn notice(mut self, notice: EndNotice) -> Self {
        self.notice = notice;
        self
    }

    /// Longest time that dropping the engine waits for copies in flight. After it a thread of the
    /// engine stays behind, with all their memory, until they have ended. Default 5 s.
    pub fn linger(mut self, linger: Duration) -> Self {
        self.linger = linger;
        self
    }

    /// A further device whose memory is to be reached; see [`Gpu::reach_peer`].
    pub fn peer(mut self, peer: &Gpu) -> Self {
        self.peers.push(peer.clone());
        self
    }

    /// Starts the engine.
    ///
    /// # Errors
    /// `Unsupported` for a peer that cannot be reached; `Failed` when the driver refuses a stream or
    /// the operating system a thread.
    pub fn build(self) -> Result<DeviceEngine, TransferError> {
        let device = &self.gpu.device;
        for peer in &self.peers {
            self.gpu.reach_peer(peer)?;
        }
        let mut lanes = Vec::new();
        let kinds =
            [(Direction::ToDevice, self.load_streams), (Direction::FromDevice, self.store_streams)];
        for (direction, streams) in kinds {
            for _ in 0..streams {
                let stream = Stream::new(device, direction == Direction::ToDevice)
                    .map_err(|error| error.into_transfer(ErrorKind::Failed))?;
                lanes.push(Lane { stream, direction, order: std::sync::Mutex::default() });
            }
        }
        let switch = SwitchPoint::of(device, self.kernel);
        let shared = Arc::new(Shared::new(Arc::clone(device), lanes, switch, self.max_in_flight));
        let abilities = device.abilities();
        let calls = self.notice == EndNotice::Called && abilities.call_back;
        let of_tender = Arc::clone(&shared);
        let tender = thread::Builder::new()
            .name(format!("ucm-{}-{}", self.gpu.info().family.name(), self.gpu.info().ordinal))
            .spawn(move || tender::run(&of_tender, calls))
            .map_err(|error| {
                TransferError::new(ErrorKind::Failed, format!("no thread for events: {error}"))
            })?;
        Ok(DeviceEngine { shared, tender: Some(tender), settings: self, calls })
    }
}

/// Moves bytes between host memory, memory of a device, and memory of its peers, by the device's
/// driver.
///
/// Copies to the device run on urgent streams, copies from it on ordinary ones; streams run beside
/// each other. A plan stays on one stream. What a plan may touch is free when the event recorded
/// behind it has ended; an engine that is dropped waits for that, or leaves a thread behind that
/// does. When the driver cannot tell any more (the device is lost), plans end as `Poisoned`
/// **without their holds**: those stay, counted, with the memory.
pub struct DeviceEngine {
    shared: Arc<Shared>,
    tender: Option<JoinHandle<()>>,
    settings: DeviceEngineBuilder,
    calls: bool,
}

impl DeviceEngine {
    /// Default settings for this device.
    pub fn builder(gpu: &Gpu) -> DeviceEngineBuilder {
        DeviceEngineBuilder {
            gpu: gpu.clone(),
            peers: Vec::new(),
            load_streams: 2,
            store_streams: 2,
            max_in_flight: 4096,
            pin: PinPolicy::default(),
            pin_piece_bytes: 1 << 30,
            kernel: KernelUse::default(),
            notice: EndNotice::default(),
            linger: Duration::from_secs(5),
        }
    }

    /// The device.
    #[must_use]
    pub fn gpu(&self) -> &Gpu {
        &self.settings.gpu
    }

    /// What the engine has done.
    #[must_use]
    pub fn counters(&self) -> DeviceCounters {
        self.shared.counters()
    }

    /// Up to which size fragments go to the kernel.
    #[must_use]
    pub fn switch_point(&self) -> SwitchPoint {
        self.shared.switch
    }

    /// As [`submit`](TransferEngine::submit), but no byte moves before the producers are done.
    ///
    /// # Safety
    /// The handles are live events and streams of this device's driver.
    ///
    /// # Errors
    /// As `submit`.
    pub unsafe fn submit_after(
        &self,
        plan: TransferPlan,
        producers: &[Producer],
    ) -> Result<Ticket, Rejected> {
        let mut plan = plan;
        self.accept(&mut plan, producers).map_err(|error| Rejected { plan, error })
    }

    /// Lets a stream wait until the plan has ended, without the host: the other half of
    /// [`submit_after`](Self::submit_after). A plan that has ended holds nothing back.
    ///
    /// # Safety
    /// The stream is a live one of this device's driver.
    ///
    /// # Errors
    /// `Failed` when the driver refuses, or cannot tell when the plan ends.
    pub unsafe fn hold_back(&self, stream: usize, ticket: Ticket) -> Result<(), TransferError> {
        match self.shared.event_of(ticket) {
            None => Ok(()),
            Some(Some(event)) => {
                // SAFETY: as the caller promises.
                let held = unsafe { event.hold_back(RawStream(stream)) };
                held.map_err(|error| error.into_transfer(ErrorKind::Failed))
            }
            Some(None) => Err(TransferError::new(
                ErrorKind::Failed,
                "the plan has no event yet; wait for its completion",
            )),
        }
    }

    fn reaches(&self, src: Location, dst: Location) -> bool {
        self.reaches_one(src) && self.reaches_one(dst)
    }

    fn reaches_one(&self, location: Location) -> bool {
        matches!(location, Location::Host | Location::PinnedHost)
            || location == self.gpu().location()
            || self.settings.peers.iter().any(|peer| peer.location() == location)
    }

    fn accept(
        &self,
        plan: &mut TransferPlan,
        producers: &[Producer],
    ) -> Result<Ticket, TransferError> {
        if !self.shared.device.is_of_this_process() {
            return Err(failed(DriverError::forked()));
        }
        if plan.items.len() > MAX_ITEMS {
            let message =
                format!("{} items, the limit is {MAX_ITEMS}: split the plan", plan.items.len());
            return Err(TransferError::invalid(message));
        }
        let reservation = self.shared.reserve()?;
        let (planned, lease) = {
            let view = self.shared.regions.view();
            let info = |id| view.info(id);
            let reaches = |src, dst| self.reaches(src, dst);
            let planned = planner::plan(&plan.items, PlanLimits::NONE, info, reaches)?;
            let lease = view.lease(&planned.regions)?;
            (planned, lease)
        };
        if planned.items.is_empty() {
            return Ok(self.shared.end_empty(reservation, std::mem::take(&mut plan.holds)));
        }
        let work = Work::resolve(&planned, &lease)?;
        let loads = work.runs.iter().any(|run| run.direction == Direction::ToDevice);
        let direction = if loads { Direction::ToDevice } else { Direction::FromDevice };
        let (at, lane) = self
            .shared
            .lane(direction)
            .ok_or_else(|| TransferError::new(ErrorKind::Failed, "an engine without streams"))?;

        let event = self.shared.event().map_err(failed)?;
        let order = lane.order.lock().unwrap_or_else(PoisonError::into_inner);
        let begun = self.begin(lane, &event, &work, producers);
        let (issued, recorded) = match begun {
            Ok(begun) => begun,
            Err(error) => {
                // Nothing was given to the driver that could touch the memory.
                self.shared.give_back(event);
                return Err(failed(error));
            }
        };
        let Issued { error, scratch, single, batched, gathered, .. } = issued;
        let job = Job {
            ticket: Ticket(0),
            event: recorded.then(|| Arc::new(event)),
            strikes: 0,
            error: error.map(failed),
            bytes: planned.bytes,
            lease,
            holds: Holds(std::mem::take(&mut plan.holds)),
            scratch,
        };
        plan.items = Vec::new();
        let failures = u64::from(job.error.is_some()) + u64::from(!recorded);
        let ticket = self.shared.admit(reservation, at, job, |counters| {
            counters.copied_single += single;
            counters.copied_batched += batched;
            counters.copied_gathered += gathered;
            counters.unpinned_bytes += work.unpinned_bytes;
            counters.driver_errors += failures;
        });
        drop(order);
        Ok(ticket)
    }

    /// Gives a plan to the driver, and records the event that tells of its end; says whether that
    /// was possible.
    fn begin(
        &self,
        lane: &Lane,
        event: &Event,
        work: &Work,
        producers: &[Producer],
    ) -> Result<(Issued, bool), DriverError> {
        self.wait_for(lane, producers)?;
        let entered = self.shared.device.enter()?;
        let issued = issue(&self.shared, &*entered, lane.stream.raw(), work);
        drop(entered);
        if let (false, Some(error)) = (issued.begun, &issued.error) {
            return Err(error.clone());
        }
        if let Err(error) = event.record(&lane.stream) {
            tracing::warn!("no event for a plan yet: {error}");
            return Ok((issued, false));
        }
        if self.calls {
            self.ask_for_call(&lane.stream);
        }
        Ok((issued, true))
    }

    fn wait_for(&self, lane: &Lane, producers: &[Producer]) -> Result<(), DriverError> {
        for producer in producers {
            match *producer {
                Producer::Event(event) => {
                    let entered = self.shared.device.enter()?;
                    // SAFETY: our stream; the event is live, as the caller of `submit_after` says.
                    unsafe { entered.stream_wait(lane.stream.raw(), RawEvent(event)) }?;
                }
                Producer::Stream(stream) => {
                    let event = self.shared.event()?;
                    // SAFETY: the stream is live, as the caller of `submit_after` says.
                    unsafe { event.record_on(RawStream(stream)) }?;
                    // SAFETY: our own stream.
                    unsafe { event.hold_back(lane.stream.raw()) }?;
                    // The wait has taken what it needs of the event.
                    self.shared.give_back(event);
                }
            }
        }
        Ok(())
    }

    /// Lets the stream wake the tender. Without it the tender looks by itself, only later.
    fn ask_for_call(&self, stream: &Stream) {
        let bell = Arc::into_raw(Arc::clone(&self.shared.bell));
        // SAFETY: the function takes the reference that is given away here, once.
        let asked = unsafe { stream.call_back(ring, bell.cast_mut().cast()) };
        if let Err(error) = asked {
            // SAFETY: the call was refused, so the reference is still ours.
            drop(unsafe { Arc::from_raw(bell) });
            tracing::debug!("a stream does not call: {error}");
        }
    }
}

fn failed(error: DriverError) -> TransferError {
    error.into_transfer(ErrorKind::Failed)
}

/// Called by the driver when a stream gets to it.
unsafe extern "C" fn ring(bell: *mut std::ffi::c_void) {
    // SAFETY: the reference that `ask_for_call` gave away.
    let bell = unsafe { Arc::from_raw(bell.cast::<Bell>().cast_const()) };
    // Nothing may unwind into the driver; ringing takes a lock and allocates nothing.
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| bell.ring()));
}

impl TransferEngine for DeviceEngine {
    fn name(&self) -> &'static str {
        self.gpu().info().family.name()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            max_items: MAX_ITEMS,
            max_in_flight: self.settings.max_in_flight,
            ..Capabilities::unlimited(1)
        }
    }

    fn register(&self, memory: Memory) -> Result<RegionId, TransferError> {
        let location = memory.location();
        if !self.reaches_one(location) {
            let message = format!(
                "{:?} cannot reach {location:?}: name the device as a peer of the engine",
                self.gpu().location()
            );
            return Err(TransferError::unsupported(message));
        }
        if memory.is_empty() {
            return Err(TransferError::invalid("a region of zero bytes cannot be registered"));
        }
        let device = &self.shared.device;
        let pins = match (location, self.settings.pin) {
            (Location::Host, PinPolicy::Never) => HostPins::none(false),
            (Location::Host, policy) => {
                match HostPins::of(device, &memory, self.settings.pin_piece_bytes) {
                    Ok(pins) => pins,
                    Err(error) if policy == PinPolicy::Prefer => {
                        tracing::warn!("{error}; copies of this region take the slow path");
                        self.shared.count_unpinned(memory.len());
                        HostPins::none(false)
                    }
                    Err(error) => return Err(error),
                }
            }
            // Pinned by others; if by us, the borders of its pieces matter.
            (Location::PinnedHost, _) => HostPins::known(device, &memory),
            _ => HostPins::none(true),
        };
        self.shared.regions.register(memory, pins)
    }

    fn deregister(&self, region: RegionId) -> Result<(), TransferError> {
        self.shared.regions.deregister(region).map(drop)
    }

    fn submit(&self, mut plan: TransferPlan) -> Result<Ticket, Rejected> {
        self.accept(&mut plan, &[]).map_err(|error| Rejected { plan, error })
    }

    fn poll(&self, out: &mut Vec<Completion>) -> usize {
        self.shared.poll(out)
    }

    fn set_waker(&self, waker: Option<Waker>) {
        self.shared.set_waker(waker);
    }

    fn quiesce(&self, target: Quiesce, deadline: Instant) -> Result<(), TransferError> {
        self.shared.quiesce(target, deadline)
    }
}

impl Drop for DeviceEngine {
    fn drop(&mut self) {
        if !self.shared.device.is_of_this_process() {
            // A forked child: threads, streams and copies are the parent's.
            let _ = Box::leak(Box::new(Arc::clone(&self.shared)));
            return;
        }
        // A waker run by the tender may hold the last reference to the engine.
        let tender = self.tender.take();
        let is_tender =
            tender.as_ref().is_some_and(|tender| tender.thread().id() == thread::current().id());
        let linger = if is_tender { Duration::ZERO } else { self.settings.linger };
        let gone = self.shared.stop(linger);
        match tender {
            Some(tender) if gone && !is_tender => {
                if tender.join().is_err() {
                    tracing::error!("the thread for events ended by a panic");
                }
            }
            _ if is_tender => {}
            _ => tracing::warn!(
                "copies have not ended in {linger:?}; a thread keeps their memory until they have"
            ),
        }
        drop(self.shared.abandon());
    }
}

impl fmt::Debug for DeviceEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceEngine")
            .field("gpu", self.gpu())
            .field("switch", &self.shared.switch)
            .field("counters", &self.counters())
            .finish_non_exhaustive()
    }
}
