//! One engine for several users: each gets a lane that sees its own plans' ends only.
//!
//! **Invariant:** an end is handed to the lane that submitted the plan, exactly once, whichever lane
//! happened to take it from the engine; an end that is faster than its own submission waits for it.

use std::{
    collections::{HashMap, HashSet},
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Wake, Waker},
    time::Instant,
};

use crate::{
    Capabilities, Completion, Memory, Quiesce, RegionId, Rejected, Ticket, TransferEngine,
    TransferError, TransferPlan,
};

/// Shares an engine between users that each call [`TransferEngine::poll`] on their own: the queues
/// of several pools, several ranks of one process. Regions are common to all lanes. Thread-safe.
#[derive(Clone, Debug)]
pub struct SharedEngine {
    hub: Arc<Hub>,
}

impl SharedEngine {
    /// Takes over all completions of `engine`: nobody else may poll it or set its waker from now on.
    #[must_use]
    pub fn new(engine: Arc<dyn TransferEngine>) -> Self {
        let hub = Arc::new(Hub { engine, state: Mutex::default() });
        // The engine must not keep the hub alive that keeps the engine.
        let waker = Waker::from(Arc::new(WakeAll(Arc::downgrade(&hub))));
        hub.engine.set_waker(Some(waker));
        Self { hub }
    }

    /// A further user.
    #[must_use]
    pub fn lane(&self) -> Arc<dyn TransferEngine> {
        let mut state = self.hub.lock();
        let id = state.next_lane;
        state.next_lane += 1;
        state.lanes.insert(id, Lane::default());
        drop(state);
        Arc::new(LaneEngine { hub: self.hub.clone(), id })
    }
}

struct Hub {
    engine: Arc<dyn TransferEngine>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    next_lane: u64,
    lanes: HashMap<u64, Lane>,
    owners: HashMap<Ticket, u64>,
    /// Ends of plans whose submission has not returned yet.
    early: HashMap<Ticket, Completion>,
}

#[derive(Default)]
struct Lane {
    ended: Vec<Completion>,
    waker: Option<Waker>,
}

impl Hub {
    fn lock(&self) -> MutexGuard<'_, State> {
        // No foreign code runs under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes what the engine has and sorts it; wakes the other lanes that got something.
    fn sort(&self, own: u64) {
        let mut taken = Vec::new();
        self.engine.poll(&mut taken);
        if taken.is_empty() {
            return;
        }
        let mut wake = Vec::new();
        let mut orphans = Vec::new();
        {
            let mut state = self.lock();
            for completion in taken {
                match state.owners.remove(&completion.ticket) {
                    Some(owner) => match state.lanes.get_mut(&owner) {
                        Some(lane) => {
                            lane.ended.push(completion);
                            if owner != own {
                                wake.extend(lane.waker.clone());
                            }
                        }
                        // Its user is gone: what the plan held may go, too.
                        None => orphans.push(completion),
                    },
                    None => {
                        state.early.insert(completion.ticket, completion);
                    }
                }
            }
        }
        drop(orphans);
        wake.into_iter().for_each(Waker::wake);
    }
}

impl fmt::Debug for Hub {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hub").field("engine", &self.engine).finish_non_exhaustive()
    }
}

/// The engine says that something has ended, not whose it is: every lane looks.
struct WakeAll(std::sync::Weak<Hub>);

impl Wake for WakeAll {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if let Some(hub) = self.0.upgrade() {
            let wakers: Vec<Waker> =
                hub.lock().lanes.values().filter_map(|lane| lane.waker.clone()).collect();
            wakers.into_iter().for_each(Waker::wake);
        }
    }
}

#[derive(Debug)]
struct LaneEngine {
    hub: Arc<Hub>,
    id: u64,
}

impl LaneEngine {
    fn tickets(&self) -> HashSet<Ticket> {
        let state = self.hub.lock();
        state
            .owners
            .iter()
            .filter(|(_, owner)| **owner == self.id)
            .map(|(ticket, _)| *ticket)
            .collect()
    }
}

impl TransferEngine for LaneEngine {
    fn name(&self) -> &'static str {
        self.hub.engine.name()
    }

    fn capabilities(&self) -> Capabilities {
        self.hub.engine.capabilities()
    }

    fn register(&self, memory: Memory) -> Result<RegionId, TransferError> {
        self.hub.engine.register(memory)
    }

    fn deregister(&self, region: RegionId) -> Result<(), TransferError> {
        self.hub.engine.deregister(region)
    }

    fn submit(&self, plan: TransferPlan) -> Result<Ticket, Rejected> {
        let ticket = self.hub.engine.submit(plan)?;
        let mut state = self.hub.lock();
        let waker = match state.early.remove(&ticket) {
            None => {
                state.owners.insert(ticket, self.id);
                None
            }
            Some(completion) => state.lanes.get_mut(&self.id).and_then(|lane| {
                lane.ended.push(completion);
                lane.waker.clone()
            }),
        };
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
        Ok(ticket)
    }

    fn poll(&self, out: &mut Vec<Completion>) -> usize {
        self.hub.sort(self.id);
        let mut state = self.hub.lock();
        let Some(lane) = state.lanes.get_mut(&self.id) else { return 0 };
        let count = lane.ended.len();
        out.append(&mut lane.ended);
        count
    }

    fn set_waker(&self, waker: Option<Waker>) {
        if let Some(lane) = self.hub.lock().lanes.get_mut(&self.id) {
            lane.waker = waker;
        }
    }

    fn quiesce(&self, target: Quiesce, deadline: Instant) -> Result<(), TransferError> {
        if target != Quiesce::All {
            return self.hub.engine.quiesce(target, deadline);
        }
        // All of this lane; the others may go on for ever.
        for ticket in self.tickets() {
            self.hub.engine.quiesce(Quiesce::Ticket(ticket), deadline)?;
        }
        Ok(())
    }
}

impl Drop for LaneEngine {
    fn drop(&mut self) {
        let lane = self.hub.lock().lanes.remove(&self.id);
        // What its plans held is dropped without the lock.
        drop(lane);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::{Addr, HostEngine, Transfer};

    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn plan(region: RegionId, from: u64, to: u64) -> TransferPlan {
        let at = |offset| Addr { region, offset };
        TransferPlan {
            items: vec![Transfer { src: at(from), dst: at(to), len: 8 }],
            holds: vec![Box::new(from)],
        }
    }

    /// Both lanes submit, only one polls: each end reaches its own lane, with its own holds.
    #[test]
    fn every_lane_gets_its_own_ends_whoever_polls() {
        for workers in [0, 2] {
            let engine: Arc<dyn TransferEngine> =
                Arc::new(HostEngine::builder().workers(workers).build().unwrap());
            let shared = SharedEngine::new(engine);
            let lanes = [shared.lane(), shared.lane()];
            let region = lanes[0].register(Memory::host(4096).unwrap()).unwrap();
            let bells: Vec<Arc<Count>> =
                (0..2).map(|_| Arc::new(Count(AtomicUsize::new(0)))).collect();
            for (lane, bell) in lanes.iter().zip(&bells) {
                lane.set_waker(Some(Waker::from(bell.clone())));
            }
            let mut tickets = [HashSet::new(), HashSet::new()];
            for round in 0..50_u64 {
                for (number, lane) in (0_u64..).zip(&lanes) {
                    let from = (round * 2 + number) * 8;
                    let ticket = lane.submit(plan(region, from, 2048 + from)).unwrap();
                    tickets[usize::try_from(number).unwrap()].insert(ticket);
                }
            }
            for (number, lane) in lanes.iter().enumerate() {
                lane.quiesce(Quiesce::All, Instant::now() + std::time::Duration::from_secs(60))
                    .unwrap();
                let mut ended = Vec::new();
                while ended.len() < 50 {
                    lane.poll(&mut ended);
                }
                let got: HashSet<Ticket> = ended.iter().map(|c| c.ticket).collect();
                assert_eq!(got, tickets[number]);
                for completion in ended {
                    assert_eq!(completion.result.unwrap(), 8);
                    let from = *completion.holds[0].downcast_ref::<u64>().unwrap();
                    assert_eq!(from / 8 % 2, number as u64, "the holds of the other lane's plan");
                }
                assert!(bells[number].0.load(Ordering::SeqCst) > 0);
            }
            let mut rest = Vec::new();
            assert_eq!(lanes[0].poll(&mut rest) + lanes[1].poll(&mut rest), 0);
        }
    }

    /// A lane that is gone keeps nothing alive; the other goes on.
    #[test]
    fn a_dropped_lane_takes_its_plans_with_it() {
        let shared = SharedEngine::new(Arc::new(HostEngine::builder().build().unwrap()));
        let (gone, stays) = (shared.lane(), shared.lane());
        let region = stays.register(Memory::host(4096).unwrap()).unwrap();
        let held = Arc::new(());
        let mut first = plan(region, 0, 1024);
        first.holds.push(Box::new(held.clone()));
        gone.submit(first).unwrap();
        drop(gone);
        let ticket = stays.submit(plan(region, 8, 1032)).unwrap();
        let mut ended = Vec::new();
        assert_eq!(stays.poll(&mut ended), 1);
        assert_eq!(ended[0].ticket, ticket);
        assert_eq!(Arc::strong_count(&held), 1);
    }
}
