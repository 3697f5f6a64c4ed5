//! Counting what a backend does: loads per key, operations in flight.
//!
//! **Invariant:** every started operation is counted as ended exactly once, however it ends.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use crate::{Backend, BackendCapabilities, Op, Presence, StoreError};

type Key = ([u8; 16], u32);

/// A snapshot of a [`Meter`].
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct MeterReport {
    /// Loads started.
    pub loads: u64,
    /// Dumps started.
    pub dumps: u64,
    /// Operations that ended with an error.
    pub failed: u64,
    /// Bytes of loads that ended well.
    pub loaded_bytes: u64,
    /// Bytes of dumps that ended well.
    pub dumped_bytes: u64,
    /// Different keys loaded.
    pub keys_loaded: u64,
    /// Most loads of one key.
    pub max_loads_per_key: u64,
    /// Operations in flight now.
    pub in_flight: u64,
    /// Most operations in flight at once.
    pub in_flight_max: u64,
    /// Mean number in flight, over the time in which there was at least one.
    pub in_flight_mean: f64,
    /// That time.
    pub busy: Duration,
}

/// Counts the operations of a backend. Thread-safe.
#[derive(Debug, Default)]
pub struct Meter {
    counts: Mutex<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    report: MeterReport,
    per_key: HashMap<Key, u64>,
    last_change: Option<Instant>,
    /// Sum of (number in flight × time).
    operation_time: Duration,
    /// Number in flight after each change, if somebody asked for it.
    timeline: Option<Vec<(Instant, u64)>>,
}

impl Meter {
    /// What was counted so far.
    #[must_use]
    pub fn report(&self) -> MeterReport {
        let mut counts = self.lock();
        counts.advance(Instant::now());
        let busy = counts.report.busy.as_secs_f64();
        let mean = if busy > 0.0 { counts.operation_time.as_secs_f64() / busy } else { 0.0 };
        MeterReport { in_flight_mean: mean, ..counts.report.clone() }
    }

    /// How often this key was loaded.
    #[must_use]
    pub fn loads_of(&self, block: &[u8; 16], shard: u32) -> u64 {
        self.lock().per_key.get(&(*block, shard)).copied().unwrap_or(0)
    }

    /// From now on, notes the number in flight after each change.
    pub fn keep_timeline(&self) {
        self.lock().timeline = Some(Vec::new());
    }

    /// Takes what was noted since [`keep_timeline`](Self::keep_timeline), and stops noting.
    pub fn take_timeline(&self) -> Vec<(Instant, u64)> {
        self.lock().timeline.take().unwrap_or_default()
    }

    /// Starts again from zero; operations in flight stay counted as such.
    pub fn reset(&self) {
        let mut counts = self.lock();
        let in_flight = counts.report.in_flight;
        let last_change = (in_flight > 0).then(Instant::now);
        let report = MeterReport { in_flight, in_flight_max: in_flight, ..MeterReport::default() };
        let timeline = counts.timeline.take();
        *counts = Counts { report, last_change, timeline, ..Counts::default() };
    }

    pub(crate) fn started(&self, ops: &[Op], direction: Direction) {
        let mut counts = self.lock();
        counts.advance(Instant::now());
        for op in ops {
            match direction {
                Direction::Load => counts.count_load((*op.block(), op.shard())),
                Direction::Dump => counts.report.dumps += 1,
            }
        }
        let report = &mut counts.report;
        report.in_flight += ops.len() as u64;
        report.in_flight_max = report.in_flight_max.max(report.in_flight);
        counts.note();
    }

    pub(crate) fn ended(&self, direction: Direction, bytes: usize, ok: bool) {
        let mut counts = self.lock();
        counts.advance(Instant::now());
        let report = &mut counts.report;
        report.in_flight = report.in_flight.saturating_sub(1);
        match (ok, direction) {
            (false, _) => report.failed += 1,
            (true, Direction::Load) => report.loaded_bytes += bytes as u64,
            (true, Direction::Dump) => report.dumped_bytes += bytes as u64,
        }
        counts.note();
    }

    fn lock(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Counts {
    fn advance(&mut self, now: Instant) {
        let since = self.last_change.replace(now);
        if self.report.in_flight == 0 {
            return;
        }
        let passed = since.map_or(Duration::ZERO, |t| now.saturating_duration_since(t));
        self.report.busy += passed;
        let n = u32::try_from(self.report.in_flight).unwrap_or(u32::MAX);
        self.operation_time += passed.saturating_mul(n);
    }

    fn note(&mut self) {
        if let (Some(timeline), Some(now)) = (&mut self.timeline, self.last_change) {
            timeline.push((now, self.report.in_flight));
        }
    }

    fn count_load(&mut self, key: Key) {
        self.report.loads += 1;
        let of_key = self.per_key.entry(key).or_insert(0);
        *of_key += 1;
        self.report.max_loads_per_key = self.report.max_loads_per_key.max(*of_key);
        self.report.keys_loaded = self.per_key.len() as u64;
    }
}

/// Which way an operation goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Load,
    Dump,
}

impl Direction {
    /// Starts operations of this direction.
    pub(crate) fn start(self, backend: &(impl Backend + ?Sized), ops: Vec<Op>) {
        match self {
            Self::Load => backend.load(ops),
            Self::Dump => backend.dump(ops),
        }
    }
}

/// A backend with a [`Meter`].
#[derive(Debug)]
pub struct Metered<B> {
    inner: B,
    meter: std::sync::Arc<Meter>,
}

impl<B: Backend> Metered<B> {
    /// Counts the operations of `inner`.
    pub fn new(inner: B) -> Self {
        Self { inner, meter: std::sync::Arc::default() }
    }

    /// The counts.
    pub fn meter(&self) -> &Meter {
        &self.meter
    }

    /// The backend inside.
    pub fn inner(&self) -> &B {
        &self.inner
    }

    fn start(&self, direction: Direction, ops: Vec<Op>) {
        self.meter.started(&ops, direction);
        let watch = |op: Op| {
            let meter = std::sync::Arc::clone(&self.meter);
            op.intercept(move |op, result| {
                meter.ended(direction, op.memory().len(), result.is_ok());
                op.finish(result);
            })
        };
        direction.start(&self.inner, ops.into_iter().map(watch).collect());
    }
}

impl<B: Backend> Backend for Metered<B> {
    fn capabilities(&self) -> BackendCapabilities {
        self.inner.capabilities()
    }

    fn load(&self, ops: Vec<Op>) {
        self.start(Direction::Load, ops);
    }

    fn dump(&self, ops: Vec<Op>) {
        self.start(Direction::Dump, ops);
    }

    fn contains(&self, keys: &[Key]) -> Vec<Presence> {
        self.inner.contains(keys)
    }

    fn touch(&self, blocks: &[[u8; 16]]) -> Result<(), StoreError> {
        self.inner.touch(blocks)
    }

    fn remove(&self, keys: &[Key]) -> Vec<Result<(), StoreError>> {
        self.inner.remove(keys)
    }
}
