//! Several ranks of one node in simulated time, driven by one thread.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use ucm_ctrl::Key;
use ucm_queue::{Builder, testing::SimQueue};
use ucm_store::{
    Backend, BackendCapabilities, ErrorKind, Op, Presence, StoreError, fill_pattern, verify_pattern,
};
use ucm_transport::{DeviceRates, SimDevice};

use super::{Buffer, Node, Rank, backend::key_of};

/// What a simulated operation comes to.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fate {
    Good,
    Fails(ErrorKind),
    Lost,
}

type Draw = Box<dyn FnMut(bool, Key) -> (Duration, Fate) + Send>;

/// A backend whose operations take simulated time.
pub(crate) struct SimBackend {
    state: Mutex<State>,
    loads: Arc<Mutex<Vec<(usize, Instant, Key)>>>,
    rank: usize,
}

struct State {
    now: Instant,
    due: Vec<(Instant, bool, Op, Fate)>,
    draw: Draw,
    in_flight_max: usize,
}

impl std::fmt::Debug for SimBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SimBackend")
    }
}

impl SimBackend {
    pub(crate) fn in_flight_max(&self) -> usize {
        self.state.lock().unwrap().in_flight_max
    }

    fn next_due(&self) -> Option<Instant> {
        self.state.lock().unwrap().due.iter().map(|(at, ..)| *at).min()
    }

    /// Ends what is due; says whether there was anything.
    pub(crate) fn advance(&self, now: Instant) -> bool {
        let mut state = self.state.lock().unwrap();
        state.now = now;
        let (due, rest) =
            std::mem::take(&mut state.due).into_iter().partition(|(at, ..)| *at <= now);
        state.due = rest;
        drop(state);
        let mut due: Vec<(Instant, bool, Op, Fate)> = due;
        due.sort_by_key(|(at, ..)| *at);
        let any = !due.is_empty();
        for (_, load, op, fate) in due {
            let mut bytes = vec![0; op.memory().len()];
            let result = match (load, fate) {
                (_, Fate::Lost) => {
                    drop(op);
                    continue;
                }
                (true, Fate::Good) => {
                    fill_pattern(&mut bytes, op.block(), op.shard(), 0, 0);
                    op.memory().write(0, &bytes)
                }
                (true, Fate::Fails(kind)) => {
                    bytes.fill(0xee);
                    op.memory().write(0, &bytes[..bytes.len() / 2]).unwrap();
                    Err(StoreError::new(kind, "injected"))
                }
                (false, Fate::Good) => {
                    op.memory().read(0, &mut bytes).unwrap();
                    verify_pattern(&bytes, op.block(), op.shard(), 0, 0)
                        .unwrap_or_else(|wrong| panic!("dumped wrong bytes: {wrong}"));
                    Ok(())
                }
                (false, Fate::Fails(kind)) => Err(StoreError::new(kind, "injected")),
            };
            op.finish(result);
        }
        any
    }

    fn take(&self, load: bool, ops: Vec<Op>) {
        let mut state = self.state.lock().unwrap();
        for op in ops {
            let key = key_of(&op);
            let (delay, fate) = (state.draw)(load, key);
            let due = state.now + delay;
            if load {
                self.loads.lock().unwrap().push((self.rank, state.now, key));
            }
            state.due.push((due, load, op, fate));
        }
        state.in_flight_max = state.in_flight_max.max(state.due.len());
    }
}

impl Backend for SimBackend {
    fn capabilities(&self) -> BackendCapabilities {
        BackendCapabilities::new("sim", 4, true)
    }

    fn load(&self, ops: Vec<Op>) {
        self.take(true, ops);
    }

    fn dump(&self, ops: Vec<Op>) {
        self.take(false, ops);
    }

    fn contains(&self, keys: &[([u8; 16], u32)]) -> Vec<Presence> {
        keys.iter().map(|_| Presence::There).collect()
    }

    fn touch(&self, _blocks: &[[u8; 16]]) -> Result<(), StoreError> {
        Ok(())
    }

    fn remove(&self, keys: &[([u8; 16], u32)]) -> Vec<Result<(), StoreError>> {
        keys.iter().map(|_| Ok(())).collect()
    }
}

/// One rank of a [`World`].
pub(crate) struct SimRank {
    pub(crate) rank: Rank,
    pub(crate) queue: SimQueue,
    pub(crate) backend: Arc<SimBackend>,
    pub(crate) device: Arc<SimDevice>,
    pub(crate) buffer: Buffer,
}

/// How the simulated engines copy.
#[derive(Clone, Copy)]
pub(crate) struct Copies {
    pub(crate) per_item: Duration,
    pub(crate) max_items: usize,
    pub(crate) max_in_flight: usize,
}

impl Default for Copies {
    fn default() -> Self {
        Self { per_item: Duration::ZERO, max_items: 1000, max_in_flight: 1000 }
    }
}

/// A node whose ranks share one simulated clock.
pub(crate) struct World {
    pub(crate) node: Node,
    pub(crate) now: Instant,
    pub(crate) ranks: Vec<SimRank>,
    loads: Arc<Mutex<Vec<(usize, Instant, Key)>>>,
}

impl World {
    /// `ranks` queues, each with its own backend (`draw` makes the fate of its operations) and a
    /// buffer of `places`.
    pub(crate) fn new(
        node: Node,
        ranks: usize,
        places: u64,
        draw: impl FnMut(usize) -> Draw,
        configure: impl Fn(&Rank, Builder) -> Builder,
    ) -> Self {
        Self::with_copies(node, ranks, places, Copies::default(), draw, configure)
    }

    /// The same with an engine whose copies take time.
    pub(crate) fn with_copies(
        node: Node,
        ranks: usize,
        places: u64,
        copies: Copies,
        mut draw: impl FnMut(usize) -> Draw,
        configure: impl Fn(&Rank, Builder) -> Builder,
    ) -> Self {
        let now = Instant::now();
        let loads: Arc<Mutex<Vec<(usize, Instant, Key)>>> = Arc::default();
        let ranks = (0..ranks)
            .map(|index| {
                let Copies { per_item, max_items, max_in_flight } = copies;
                let rates =
                    DeviceRates { per_item, max_items, max_in_flight, ..DeviceRates::default() };
                let device = SimDevice::manual(rates, now);
                let rank = node.rank_with(device.clone());
                let state = State { now, due: Vec::new(), draw: draw(index), in_flight_max: 0 };
                let (state, loads) = (Mutex::new(state), loads.clone());
                let backend = Arc::new(SimBackend { state, loads, rank: index });
                let of = u32::try_from(ranks).unwrap();
                let builder = rank.builder(backend.clone()).rank(u32::try_from(index).unwrap(), of);
                let builder = configure(&rank, builder);
                let queue = SimQueue::new(builder, rank.member.doorbell(), now).unwrap();
                let buffer =
                    Buffer::new(|memory| queue.register(memory).unwrap(), places, node.shard_bytes);
                SimRank { rank, queue, backend, device, buffer }
            })
            .collect();
        Self { node, now, ranks, loads }
    }

    /// Turns every queue that would be awake now, until all sleep.
    pub(crate) fn settle(&mut self) {
        for _ in 0..100_000 {
            let mut busy = false;
            for rank in &mut self.ranks {
                busy |= rank.backend.advance(self.now) | rank.device.advance(self.now);
                if rank.queue.is_due(self.now) {
                    rank.queue.turn(self.now);
                    busy = true;
                } else if rank.queue.prewarm_step() {
                    busy = true;
                }
            }
            if !busy {
                return;
            }
        }
        panic!("the queues spin");
    }

    /// Goes to the next moment at which anything happens by itself; `false` if nothing will.
    pub(crate) fn step(&mut self, limit: Option<Instant>) -> bool {
        self.settle();
        let backends = self.ranks.iter().filter_map(|rank| rank.backend.next_due());
        let queues = self.ranks.iter().filter_map(|rank| rank.queue.wake_at());
        let engines = self.ranks.iter().filter_map(|rank| rank.device.next_due());
        let Some(next) = backends.chain(queues).chain(engines).min() else { return false };
        if limit.is_some_and(|limit| next > limit) {
            return false;
        }
        self.now = self.now.max(next);
        self.settle();
        true
    }

    /// Lets `time` pass.
    pub(crate) fn pass(&mut self, time: Duration) {
        let until = self.now + time;
        while self.step(Some(until)) {}
        self.now = until;
        self.settle();
    }

    /// Goes on until nothing will happen any more.
    pub(crate) fn run(&mut self) {
        for _ in 0..1_000_000 {
            if !self.step(None) {
                return;
            }
        }
        panic!("the queues never rest: {:#?}", self.queues());
    }

    /// The queues, for messages.
    pub(crate) fn queues(&self) -> Vec<&SimQueue> {
        self.ranks.iter().map(|rank| &rank.queue).collect()
    }

    /// Every backend load so far: rank, time, key.
    pub(crate) fn loads(&self) -> Vec<(usize, Instant, Key)> {
        self.loads.lock().unwrap().clone()
    }

    /// Loads by key.
    pub(crate) fn loads_by_key(&self) -> HashMap<Key, usize> {
        let mut by_key = HashMap::new();
        for (_, _, key) in self.loads() {
            *by_key.entry(key).or_default() += 1;
        }
        by_key
    }

    /// Loads by rank.
    pub(crate) fn owned(&self) -> Vec<usize> {
        let mut owned = vec![0; self.ranks.len()];
        for (rank, ..) in self.loads() {
            owned[rank] += 1;
        }
        owned
    }
}

/// SplitMix64.
pub(crate) struct Random(pub u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    /// Evenly in `0..n`.
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    pub(crate) fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    pub(crate) fn time(&mut self, max: Duration) -> Duration {
        Duration::from_nanos(self.below(u64::try_from(max.as_nanos()).unwrap() + 1))
    }
}
