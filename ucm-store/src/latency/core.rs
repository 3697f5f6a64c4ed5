//! The device behind a latency backend: who is in service, who waits, what is due.
//!
//! **Invariant:** every operation given in leaves exactly once: as one to start in the backend, and
//! then as ended; or as refused. No foreign code runs under the lock.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap, VecDeque},
    io,
    sync::{Mutex, MutexGuard, PoisonError},
};

use super::Delay;
use crate::{
    ErrorKind, Meter, Op, StoreError,
    meter::Direction,
    random::SplitMix,
    timer::{Alarm, Moment},
};

/// An operation at its end.
pub(super) type Ended = (Op, Result<(), StoreError>);

#[derive(Debug)]
pub(super) struct Core {
    pub(super) delay: Delay,
    pub(super) depth: usize,
    pub(super) meter: Meter,
    alarm: Alarm,
    state: Mutex<State>,
    /// Kernel id of the thread, for whoever wants to watch it.
    #[cfg(test)]
    pub(super) thread_id: std::sync::OnceLock<i32>,
}

#[derive(Debug)]
struct State {
    waiting: VecDeque<(Direction, Op)>,
    serving: HashMap<u64, Service>,
    due: BinaryHeap<Reverse<(Moment, u64)>>,
    /// Places in service freed by operations whose backend was slower than their delay.
    late_exits: usize,
    next_id: u64,
    /// What the alarm is set to.
    armed: Option<Moment>,
    random: SplitMix,
    stopped: bool,
}

/// An operation in service.
#[derive(Debug)]
enum Service {
    /// Not due, the backend works.
    Working,
    /// Not due, the backend has ended.
    Landed(Direction, Op, Result<(), StoreError>),
    /// Due, the backend still works.
    Overdue,
}

/// Operations that enter service now.
pub(super) type Starting = Vec<(Direction, u64, Op)>;

impl Core {
    pub(super) fn new(delay: Delay, depth: usize, seed: u64) -> io::Result<Self> {
        let state = State {
            waiting: VecDeque::new(),
            serving: HashMap::new(),
            due: BinaryHeap::new(),
            late_exits: 0,
            next_id: 0,
            armed: None,
            random: SplitMix::new(seed),
            stopped: false,
        };
        Ok(Self {
            delay,
            depth: depth.max(1),
            meter: Meter::default(),
            alarm: Alarm::new()?,
            state: Mutex::new(state),
            #[cfg(test)]
            thread_id: std::sync::OnceLock::new(),
        })
    }

    /// Takes operations; returns those that enter service now.
    pub(super) fn submit(&self, direction: Direction, ops: Vec<Op>) -> Starting {
        let mut starting = Vec::with_capacity(ops.len().min(self.depth));
        let mut refused = Vec::new();
        {
            let mut state = self.lock();
            let now = Moment::now();
            for op in ops {
                if state.stopped {
                    refused.push((op, Err(shut_down())));
                } else if state.serving.len() < self.depth && state.waiting.is_empty() {
                    self.enter(&mut state, now, direction, op, &mut starting);
                } else {
                    state.waiting.push_back((direction, op));
                }
            }
            self.arm(&mut state);
        }
        Op::finish_all(refused);
        starting
    }

    /// Sleeps until something is due; returns what ends and what enters service then, or `None`
    /// when the backend is gone.
    pub(super) fn wait(&self) -> Option<(Vec<Ended>, Starting)> {
        #[cfg(test)]
        self.thread_id.get_or_init(|| rustix::thread::gettid().as_raw_nonzero().get());
        self.alarm.wait().ok()?;
        let (mut ended, mut starting) = (Vec::new(), Vec::new());
        let mut state = self.lock();
        if state.stopped {
            return None;
        }
        state.armed = None;
        self.advance(&mut state, &mut ended, &mut starting);
        self.arm(&mut state);
        Some((ended, starting))
    }

    /// Ends what is due and lets waiting operations into the freed places.
    fn advance(&self, state: &mut State, ended: &mut Vec<Ended>, starting: &mut Starting) {
        let now = Moment::now();
        for _ in 0..std::mem::take(&mut state.late_exits) {
            self.enter_next(state, now, starting);
        }
        while let Some(Reverse((due, id))) = state.due.peek().copied() {
            if due > now {
                break;
            }
            state.due.pop();
            match state.serving.remove(&id) {
                Some(Service::Landed(direction, op, result)) => {
                    self.leave(direction, &op, &result);
                    ended.push((op, result));
                    // The successor had been waiting: the device took it up at that moment.
                    self.enter_next(state, due, starting);
                }
                Some(Service::Working | Service::Overdue) => {
                    state.serving.insert(id, Service::Overdue);
                }
                None => {}
            }
        }
    }

    fn enter_next(&self, state: &mut State, at: Moment, starting: &mut Starting) {
        if state.serving.len() < self.depth
            && let Some((direction, op)) = state.waiting.pop_front()
        {
            self.enter(state, at, direction, op, starting);
        }
    }

    fn enter(
        &self,
        state: &mut State,
        at: Moment,
        direction: Direction,
        op: Op,
        starting: &mut Starting,
    ) {
        self.meter.started(std::slice::from_ref(&op), direction);
        let id = state.next_id;
        state.next_id += 1;
        let due = at.after(self.delay.draw(&mut state.random));
        state.serving.insert(id, Service::Working);
        state.due.push(Reverse((due, id)));
        starting.push((direction, id, op));
    }

    /// The backend has ended an operation.
    pub(super) fn landed(
        &self,
        direction: Direction,
        id: u64,
        op: Op,
        result: Result<(), StoreError>,
    ) {
        {
            let mut state = self.lock();
            let stopped = state.stopped;
            match state.serving.remove(&id) {
                Some(Service::Working) if !stopped => {
                    state.serving.insert(id, Service::Landed(direction, op, result));
                    return;
                }
                Some(Service::Overdue) if !stopped && !state.waiting.is_empty() => {
                    // Not from here: a backend that ends inside its call would recurse.
                    state.late_exits += 1;
                    self.arm_for(&mut state, Moment::now());
                }
                _ => {}
            }
            self.leave(direction, &op, &result);
        }
        op.finish(result);
    }

    fn leave(&self, direction: Direction, op: &Op, result: &Result<(), StoreError>) {
        self.meter.ended(direction, op.memory().len(), result.is_ok());
    }

    /// Ends what waits and what has landed; operations in the backend end through it.
    pub(super) fn stop(&self) {
        let mut state = self.lock();
        state.stopped = true;
        let mut ended: Vec<Ended> =
            state.waiting.drain(..).map(|(_, op)| (op, Err(shut_down()))).collect();
        for (_, service) in state.serving.drain() {
            if let Service::Landed(direction, op, result) = service {
                self.leave(direction, &op, &result);
                ended.push((op, result));
            }
        }
        self.alarm.set(Moment::now());
        drop(state);
        Op::finish_all(ended);
    }

    /// Sets the alarm to the next due time, unless it will ring before anyway.
    fn arm(&self, state: &mut State) {
        // An overdue operation is not in the heap any more, so its top is always to come.
        if let Some(Reverse((due, _))) = state.due.peek().copied() {
            self.arm_for(state, due);
        }
    }

    fn arm_for(&self, state: &mut State, at: Moment) {
        if state.armed.is_none_or(|armed| at < armed) {
            state.armed = Some(at);
            self.alarm.set(at);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn shut_down() -> StoreError {
    StoreError::new(ErrorKind::Cancelled, "the backend was shut down before the operation began")
}
