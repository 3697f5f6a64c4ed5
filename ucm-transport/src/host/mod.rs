//! The host engine: copies between regions of this process by the CPU.
//!
//! **Invariant:** a plan's completion is published only after its last copy has ended, and its
//! regions and holds stay until then, also when a worker panics or the engine is dropped.

mod copy;
mod state;
mod worker;

use std::{
    sync::Arc,
    task::Waker,
    thread::{self, JoinHandle},
    time::Instant,
};

use crate::{
    Capabilities, Completion, ErrorKind, Location, Memory, PlanLimits, Quiesce, RegionId,
    RegionTable, Rejected, SourceCheck, Ticket, TransferEngine, TransferError, TransferPlan,
    planner,
};
use copy::CopyOp;
use state::{Job, Piece, Shared};

/// Copies shorter than this are not worth a second worker.
const SPAN_BYTES: usize = 256 * 1024;

/// Settings of a [`HostEngine`].
#[derive(Clone, Debug)]
#[must_use = "call `build`"]
pub struct HostEngineBuilder {
    workers: usize,
    max_in_flight: usize,
    span_bytes: usize,
    panic_at: Option<u64>,
    name: String,
}

impl HostEngineBuilder {
    /// Number of worker threads. Zero (the default): `submit` copies in the caller's thread.
    pub fn workers(mut self, workers: usize) -> Self {
        self.workers = workers;
        self
    }

    /// Plans accepted but not yet polled; one more is refused as `Busy`. Default 4096.
    pub fn max_in_flight(mut self, plans: usize) -> Self {
        self.max_in_flight = plans.max(1);
        self
    }

    /// Bytes that a worker takes at a time; a plan of more is shared by several workers.
    /// Default 256 KiB, minimum 4 KiB.
    pub fn span_bytes(mut self, bytes: usize) -> Self {
        self.span_bytes = bytes.max(4096);
        self
    }

    /// Name of the worker threads, as `top` and debuggers show it; a number is added.
    /// Default "ucm-copy".
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Makes the worker that takes the `nth` piece of work (from 0) panic, for tests.
    #[cfg(any(test, feature = "testing"))]
    pub fn panic_at(mut self, nth: u64) -> Self {
        self.panic_at = Some(nth);
        self
    }

    /// Starts the engine.
    ///
    /// # Errors
    /// `Failed` when the operating system refuses a thread.
    pub fn build(self) -> Result<HostEngine, TransferError> {
        let shared = Arc::new(Shared::new(self.panic_at));
        let mut engine = HostEngine {
            regions: RegionTable::default(),
            shared,
            workers: Vec::with_capacity(self.workers),
            max_in_flight: self.max_in_flight,
            span_bytes: if self.workers > 1 { self.span_bytes } else { usize::MAX },
        };
        for n in 0..self.workers {
            let shared = Arc::clone(&engine.shared);
            let handle = thread::Builder::new()
                .name(format!("{}-{n}", self.name))
                .spawn(move || worker::run(&shared))
                .map_err(|e| {
                    TransferError::new(
                        ErrorKind::Failed,
                        format!("worker {n} of {} did not start: {e}", self.workers),
                    )
                })?;
            engine.workers.push(handle);
        }
        Ok(engine)
    }
}

/// Moves bytes between host regions with the CPU.
///
/// With workers, `submit` returns at once and big plans are shared among them; without, `submit`
/// copies and the completion is ready when it returns. Idle workers sleep and are woken by nothing
/// but work. Dropping the engine waits for copies that have begun and drops the rest.
#[derive(Debug)]
pub struct HostEngine {
    regions: RegionTable,
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    max_in_flight: usize,
    span_bytes: usize,
}

impl HostEngine {
    /// Default settings: no workers, 4096 plans in flight.
    pub fn builder() -> HostEngineBuilder {
        HostEngineBuilder {
            workers: 0,
            max_in_flight: 4096,
            span_bytes: SPAN_BYTES,
            panic_at: None,
            name: "ucm-copy".into(),
        }
    }

    /// Registers memory that this process can reach, whatever its location is called.
    pub(crate) fn register_reachable(&self, memory: Memory) -> Result<RegionId, TransferError> {
        self.regions.register(memory, ())
    }

    /// As [`submit`](TransferEngine::submit), between locations that `supports` allows, and with
    /// each piece's source checked after it was read.
    pub(crate) fn submit_between(
        &self,
        mut plan: TransferPlan,
        supports: impl Fn(Location, Location) -> bool,
        check: Option<Arc<dyn SourceCheck>>,
    ) -> Result<Ticket, Rejected> {
        match self.accept(&mut plan, supports, check) {
            Ok((ticket, inline)) => {
                if let Some(piece) = inline {
                    worker::run_piece(&self.shared, piece);
                }
                Ok(ticket)
            }
            Err(error) => Err(Rejected { plan, error }),
        }
    }

    fn accept(
        &self,
        plan: &mut TransferPlan,
        supports: impl Fn(Location, Location) -> bool,
        check: Option<Arc<dyn SourceCheck>>,
    ) -> Result<(Ticket, Option<Piece>), TransferError> {
        let (planned, lease) = {
            let view = self.regions.view();
            let planned =
                planner::plan(&plan.items, PlanLimits::UNSORTED, |id| view.info(id), supports)?;
            let lease = view.lease(&planned.regions)?;
            (planned, lease)
        };
        let ops = CopyOp::resolve(&planned.items, &lease)?;
        let (ops, spans) = copy::spans(ops, self.span_bytes);
        let job = Job::new(ops, spans, planned.bytes, lease, check);
        self.shared.admit(job, plan, self.max_in_flight, self.workers.is_empty())
    }
}

fn on_host(src: Location, dst: Location) -> bool {
    let host = |l| matches!(l, Location::Host | Location::PinnedHost);
    host(src) && host(dst)
}

impl TransferEngine for HostEngine {
    fn name(&self) -> &'static str {
        "host"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            max_in_flight: self.max_in_flight,
            ..Capabilities::unlimited(self.workers.len())
        }
    }

    fn register(&self, memory: Memory) -> Result<RegionId, TransferError> {
        if !on_host(memory.location(), memory.location()) {
            return Err(TransferError::unsupported(format!(
                "the host engine cannot reach {:?}",
                memory.location()
            )));
        }
        self.regions.register(memory, ())
    }

    fn deregister(&self, region: RegionId) -> Result<(), TransferError> {
        self.regions.deregister(region).map(drop)
    }

    fn submit(&self, plan: TransferPlan) -> Result<Ticket, Rejected> {
        self.submit_between(plan, on_host, None)
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

impl Drop for HostEngine {
    fn drop(&mut self) {
        self.shared.stop();
        let me = thread::current().id();
        for worker in self.workers.drain(..) {
            // A waker run by a worker may hold the last reference to the engine: that worker
            // cannot wait for itself, and touches no memory of ours after the waker returns.
            if worker.thread().id() != me && worker.join().is_err() {
                tracing::warn!("a copy worker ended by a panic");
            }
        }
        self.shared.abandon();
    }
}

#[cfg(test)]
mod tests;
