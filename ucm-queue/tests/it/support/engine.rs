//! An engine whose plans take simulated time, one after the other, like a device's copy stream.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard},
    task::Waker,
    time::{Duration, Instant},
};

use ucm_transport::{
    Capabilities, Completion, ErrorKind, Memory, Quiesce, RegionId, Rejected, Ticket,
    TransferEngine, TransferError, TransferPlan,
};

#[derive(Debug)]
pub(crate) struct SlowEngine {
    inner: Arc<dyn TransferEngine>,
    max_items: usize,
    max_in_flight: usize,
    per_item: Duration,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    now: Instant,
    free_at: Instant,
    next_ticket: u64,
    running: VecDeque<(Instant, Ticket, TransferPlan)>,
    done: Vec<Completion>,
    waker: Option<Waker>,
}

impl SlowEngine {
    pub(crate) fn new(
        inner: Arc<dyn TransferEngine>,
        now: Instant,
        per_item: Duration,
        max_items: usize,
        max_in_flight: usize,
    ) -> Arc<Self> {
        let state = State {
            now,
            free_at: now,
            next_ticket: 0,
            running: VecDeque::new(),
            done: Vec::new(),
            waker: None,
        };
        Arc::new(Self { inner, max_items, max_in_flight, per_item, state: Mutex::new(state) })
    }

    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.lock().running.front().map(|(due, ..)| *due)
    }

    /// Makes the copies that are due; says whether there were any.
    pub(crate) fn advance(&self, now: Instant) -> bool {
        let mut any = false;
        self.lock().now = now;
        loop {
            let mut state = self.lock();
            if state.running.front().is_none_or(|(due, ..)| *due > now) {
                return any;
            }
            let Some((_, ticket, plan)) = state.running.pop_front() else { return any };
            drop(state);
            any = true;
            let completion = match self.inner.submit(plan) {
                Ok(_) => {
                    let mut ended = Vec::new();
                    assert_eq!(self.inner.poll(&mut ended), 1, "the engine inside is inline");
                    Completion { ticket, ..ended.remove(0) }
                }
                Err(Rejected { plan, error }) => {
                    Completion { ticket, result: Err(error), holds: plan.holds }
                }
            };
            let mut state = self.lock();
            state.done.push(completion);
            let waker = state.waker.clone();
            drop(state);
            waker.inspect(Waker::wake_by_ref);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }
}

impl TransferEngine for SlowEngine {
    fn name(&self) -> &'static str {
        "slow"
    }

    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::unlimited(1);
        capabilities.max_items = self.max_items;
        capabilities.max_in_flight = self.max_in_flight;
        capabilities
    }

    fn register(&self, memory: Memory) -> Result<RegionId, TransferError> {
        self.inner.register(memory)
    }

    fn deregister(&self, region: RegionId) -> Result<(), TransferError> {
        self.inner.deregister(region)
    }

    fn submit(&self, plan: TransferPlan) -> Result<Ticket, Rejected> {
        assert!(plan.items.len() <= self.max_items, "the plan has too many items");
        let mut state = self.lock();
        if state.running.len() >= self.max_in_flight {
            let error = TransferError::new(ErrorKind::Busy, "full");
            return Err(Rejected { plan, error });
        }
        state.next_ticket += 1;
        let ticket = Ticket(state.next_ticket);
        let items = u32::try_from(plan.items.len()).unwrap();
        state.free_at = state.free_at.max(state.now) + self.per_item * items;
        let due = state.free_at;
        state.running.push_back((due, ticket, plan));
        Ok(ticket)
    }

    fn poll(&self, out: &mut Vec<Completion>) -> usize {
        let mut state = self.lock();
        let count = state.done.len();
        out.append(&mut state.done);
        count
    }

    fn set_waker(&self, waker: Option<Waker>) {
        self.lock().waker = waker;
    }

    fn quiesce(&self, _target: Quiesce, _deadline: Instant) -> Result<(), TransferError> {
        unreachable!("a simulated queue has no thread that waits")
    }
}
