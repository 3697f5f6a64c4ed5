//! Gives a backend the timing of a device: a delay per operation, and how many are served at once.
//!
//! **Invariant:** an operation ends not before its delay has passed since its service began, and
//! at most `depth` operations are in service at any time.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap, VecDeque},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
    time::Duration,
};

use crate::{
    Backend, BackendCapabilities, ErrorKind, Meter, Op, Presence, StoreError,
    meter::Direction,
    random::SplitMix,
    timer::{Alarm, Moment},
};

type Key = ([u8; 16], u32);
type Ended = (Op, Result<(), StoreError>);

/// How long an operation takes, from the start of its service to its end.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Delay {
    /// Always the same.
    Fixed(Duration),
    /// Evenly between two values.
    Uniform(Duration, Duration),
    /// Memoryless, with this mean: many short ones, some long ones.
    Exponential(Duration),
    /// Usually the first; with this probability (0 to 1) the second.
    Mixed(Duration, Duration, f64),
}

impl Delay {
    fn draw(self, random: &mut SplitMix) -> Duration {
        match self {
            Self::Fixed(delay) => delay,
            Self::Uniform(a, b) => {
                let (low, high) = (a.min(b), a.max(b));
                low + (high - low).mul_f64(random.unit())
            }
            Self::Exponential(mean) => mean.mul_f64(-(1.0 - random.unit()).ln()),
            Self::Mixed(usual, rare, share) => {
                if random.unit() < share {
                    rare
                } else {
                    usual
                }
            }
        }
    }
}

/// A backend as slow as you like.
///
/// Each operation enters service as soon as fewer than `depth` are in service, and ends exactly
/// when its delay has passed, or later if the backend inside needs longer: like a device doing DMA
/// the bytes are moved *during* the delay. An operation that had to queue enters service at the
/// moment its predecessor was due. Operations due together end as one batch. The queue is not
/// bounded here: callers bound what they submit.
///
/// One thread per backend, which sleeps until the next operation is due; idle, it never wakes.
/// `contains`, `touch` and `remove` are passed on at once. Dropping the backend ends queued
/// operations as `Cancelled`; those in service end with their result, without further delay.
#[derive(Debug)]
pub struct LatencyBackend<B: Backend + 'static> {
    shared: Arc<Shared<B>>,
    thread: Option<JoinHandle<()>>,
}

impl<B: Backend + 'static> LatencyBackend<B> {
    /// Wraps `inner`; `depth` is at least one.
    ///
    /// # Errors
    /// `Io` when the operating system refuses a timer or a thread.
    pub fn new(inner: B, delay: Delay, depth: usize) -> Result<Self, StoreError> {
        Self::with_seed(inner, delay, depth, 0)
    }

    /// As [`new`](Self::new), with the seed of random delays.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_seed(inner: B, delay: Delay, depth: usize, seed: u64) -> Result<Self, StoreError> {
        let refused = |what: &str, e: std::io::Error| {
            StoreError::new(ErrorKind::Io, format!("{what} for a latency backend: {e}"))
        };
        let alarm = Alarm::new().map_err(|e| refused("no timer", e))?;
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
        let (meter, depth) = (Meter::default(), depth.max(1));
        let shared = Arc::new(Shared {
            inner,
            delay,
            depth,
            meter,
            alarm,
            state: Mutex::new(state),
            #[cfg(test)]
            thread_id: std::sync::OnceLock::new(),
        });
        let of_thread = Arc::clone(&shared);
        let thread = thread::Builder::new()
            .name("ucm-latency".into())
            .spawn(move || of_thread.run())
            .map_err(|e| refused("no thread", e))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Operations as the device sees them: in flight means in service.
    pub fn meter(&self) -> &Meter {
        &self.shared.meter
    }

    /// The backend inside.
    pub fn inner(&self) -> &B {
        &self.shared.inner
    }
}

impl<B: Backend + 'static> Backend for LatencyBackend<B> {
    fn capabilities(&self) -> BackendCapabilities {
        let inner = self.shared.inner.capabilities();
        let mode = format!("{} + {:?}", inner.mode, self.shared.delay);
        BackendCapabilities { mode, depth: self.shared.depth, ..inner }
    }

    fn load(&self, ops: Vec<Op>) {
        self.shared.submit(Direction::Load, ops);
    }

    fn dump(&self, ops: Vec<Op>) {
        self.shared.submit(Direction::Dump, ops);
    }

    fn contains(&self, keys: &[Key]) -> Vec<Presence> {
        self.shared.inner.contains(keys)
    }

    fn touch(&self, blocks: &[[u8; 16]]) -> Result<(), StoreError> {
        self.shared.inner.touch(blocks)
    }

    fn remove(&self, keys: &[Key]) -> Vec<Result<(), StoreError>> {
        self.shared.inner.remove(keys)
    }
}

impl<B: Backend + 'static> Drop for LatencyBackend<B> {
    fn drop(&mut self) {
        self.shared.stop();
        let me = thread::current().id();
        if let Some(thread) = self.thread.take()
            // A sink called by the thread may drop the last reference to the backend.
            && thread.thread().id() != me
            && thread.join().is_err()
        {
            tracing::warn!("the thread of a latency backend ended by a panic");
        }
    }
}

#[derive(Debug)]
struct Shared<B> {
    inner: B,
    delay: Delay,
    depth: usize,
    meter: Meter,
    alarm: Alarm,
    state: Mutex<State>,
    /// Kernel id of the thread, for whoever wants to watch it.
    #[cfg(test)]
    thread_id: std::sync::OnceLock<i32>,
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
type Starting = Vec<(Direction, u64, Op)>;

impl<B: Backend + 'static> Shared<B> {
    fn submit(self: &Arc<Self>, direction: Direction, ops: Vec<Op>) {
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
        self.start(starting);
    }

    fn run(self: &Arc<Self>) {
        #[cfg(test)]
        self.thread_id.get_or_init(|| rustix::thread::gettid().as_raw_nonzero().get());
        while let Ok(()) = self.alarm.wait() {
            let mut ended = Vec::new();
            let mut starting = Vec::new();
            {
                let mut state = self.lock();
                if state.stopped {
                    return;
                }
                state.armed = None;
                self.advance(&mut state, &mut ended, &mut starting);
                self.arm(&mut state);
            }
            // Foreign code: neither a sink nor a backend may end this thread.
            self.isolate(|| Op::finish_all(ended));
            self.isolate(|| self.start(starting));
        }
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

    fn start(self: &Arc<Self>, starting: Starting) {
        let (mut loads, mut dumps) = (Vec::new(), Vec::new());
        for (direction, id, op) in starting {
            let shared = Arc::clone(self);
            let inner = op.intercept(move |op, result| {
                shared.inner_ended(direction, id, op, result);
            });
            match direction {
                Direction::Load => loads.push(inner),
                Direction::Dump => dumps.push(inner),
            }
        }
        if !loads.is_empty() {
            self.inner.load(loads);
        }
        if !dumps.is_empty() {
            self.inner.dump(dumps);
        }
    }

    fn inner_ended(&self, direction: Direction, id: u64, op: Op, result: Result<(), StoreError>) {
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

    fn stop(&self) {
        let mut state = self.lock();
        state.stopped = true;
        let mut ended: Vec<Ended> =
            state.waiting.drain(..).map(|(_, op)| (op, Err(shut_down()))).collect();
        // Those that the backend still has end through it.
        for (_, service) in state.serving.drain() {
            if let Service::Landed(direction, op, result) = service {
                self.leave(direction, &op, &result);
                ended.push((op, result));
            }
        }
        self.alarm.set(Moment::now());
        drop(state);
        self.isolate(|| Op::finish_all(ended));
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

    fn isolate(&self, foreign: impl FnOnce()) {
        if catch_unwind(AssertUnwindSafe(foreign)).is_err() {
            tracing::error!("a sink or backend panicked in the thread of a latency backend");
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn shut_down() -> StoreError {
    StoreError::new(ErrorKind::Cancelled, "the backend was shut down before the operation began")
}

#[cfg(test)]
mod tests;
