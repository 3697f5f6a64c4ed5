//! What a tier did, and whether it is asked.
//!
//! **Invariant:** an operation that has begun is counted once at its end, from its result. Nothing here
//! keeps the backend alive.

use std::{
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use super::{
    Key, Tier,
    absent::{Absent, Asked},
};
use crate::{
    ErrorKind, StoreError,
    health::{Health, Verdict},
};

/// Tells the time.
pub(super) type Clock = Arc<dyn Fn() -> Instant + Send + Sync>;

/// What one tier did. Loads handed to it = hits + misses + failures.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TierReport {
    /// Name of the tier.
    pub name: String,
    /// Loads that this tier answered with verified bytes.
    pub hits: u64,
    /// Bytes of them.
    pub hit_bytes: u64,
    /// Time of all loads that were handed to it, from then to their end.
    pub load_time: Duration,
    /// Loads of objects that it does not have.
    pub misses: u64,
    /// Loads and questions that were not handed to it, because it did not have the object a moment ago.
    pub known_misses: u64,
    /// Loads that failed otherwise, corrupt objects among them.
    pub load_failures: u64,
    /// Corrupt objects among the failures.
    pub corrupt: u64,
    /// Loads that were not handed to it because it is failing.
    pub loads_skipped: u64,
    /// Dumps stored, written back or through.
    pub dumps: u64,
    /// Bytes of them.
    pub dump_bytes: u64,
    /// Dumps that failed.
    pub dump_failures: u64,
    /// Dumps that were not handed to it because it is failing.
    pub dumps_skipped: u64,
    /// Dumps and promotions that its admission refused.
    pub not_admitted: u64,
    /// Dumps that were to be written back, and were written through, because too many bytes were on
    /// their way.
    pub written_through: u64,
    /// Objects promoted into this tier.
    pub promoted: u64,
    /// Bytes of them.
    pub promoted_bytes: u64,
    /// Promotions that failed.
    pub promotion_failures: u64,
    /// Promotions left out because too many bytes were being promoted, or the tier is failing.
    pub promotions_skipped: u64,
    /// Calls of touch that failed.
    pub touch_failures: u64,
    /// How often failures turned loads or dumps off.
    pub turned_off: u64,
    /// Whether it gets no loads now, but for one that tries.
    pub loads_off: bool,
    /// Whether it gets no dumps now, but for one that tries.
    pub dumps_off: bool,
}

/// Counts, breakers and known misses of a tier.
pub(super) struct Record {
    clock: Clock,
    loads: Mutex<Health>,
    dumps: Mutex<Health>,
    absent: Option<Absent>,
    hits: AtomicU64,
    hit_bytes: AtomicU64,
    load_ns: AtomicU64,
    misses: AtomicU64,
    pub(super) known_misses: AtomicU64,
    load_failures: AtomicU64,
    corrupt: AtomicU64,
    pub(super) loads_skipped: AtomicU64,
    stored: AtomicU64,
    stored_bytes: AtomicU64,
    dump_failures: AtomicU64,
    pub(super) dumps_skipped: AtomicU64,
    pub(super) not_admitted: AtomicU64,
    pub(super) written_through: AtomicU64,
    promoted: AtomicU64,
    promoted_bytes: AtomicU64,
    promotion_failures: AtomicU64,
    pub(super) promotions_skipped: AtomicU64,
    pub(super) touch_failures: AtomicU64,
}

impl Record {
    pub(super) fn new(tier: &Tier, clock: Clock) -> Self {
        let health = || Mutex::new(Health::new(tier.failures_off, tier.stall_after));
        Self {
            clock,
            loads: health(),
            dumps: health(),
            absent: tier.absent.map(|(keys, ttl)| Absent::new(keys, ttl)),
            hits: AtomicU64::new(0),
            hit_bytes: AtomicU64::new(0),
            load_ns: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            known_misses: AtomicU64::new(0),
            load_failures: AtomicU64::new(0),
            corrupt: AtomicU64::new(0),
            loads_skipped: AtomicU64::new(0),
            stored: AtomicU64::new(0),
            stored_bytes: AtomicU64::new(0),
            dump_failures: AtomicU64::new(0),
            dumps_skipped: AtomicU64::new(0),
            not_admitted: AtomicU64::new(0),
            written_through: AtomicU64::new(0),
            promoted: AtomicU64::new(0),
            promoted_bytes: AtomicU64::new(0),
            promotion_failures: AtomicU64::new(0),
            promotions_skipped: AtomicU64::new(0),
            touch_failures: AtomicU64::new(0),
        }
    }

    pub(super) fn now(&self) -> Instant {
        (self.clock)()
    }

    /// How many of so many loads the tier gets; these have begun.
    pub(super) fn begin_loads(&self, count: usize, now: Instant) -> usize {
        lock(&self.loads).begin(count, now)
    }

    /// How many of so many dumps or promotions the tier gets; these have begun.
    pub(super) fn begin_dumps(&self, count: usize, now: Instant) -> usize {
        lock(&self.dumps).begin(count, now)
    }

    pub(super) fn loads_are_off(&self, now: Instant) -> bool {
        lock(&self.loads).is_open(now)
    }

    /// `Err`: the tier does not have it, as it said a moment ago.
    pub(super) fn ask_for(&self, key: &Key, now: Instant) -> Result<Option<Asked>, ()> {
        let Some(absent) = &self.absent else { return Ok(None) };
        let asked = absent.ask(key, now);
        if asked.is_none() {
            add(&self.known_misses);
        }
        asked.map(Some).ok_or(())
    }

    pub(super) fn missed(&self, key: &Key, asked: Option<Asked>) {
        if let (Some(absent), Some(asked)) = (&self.absent, asked) {
            absent.missed(key, asked);
        }
    }

    /// A key is about to be stored in the tier, or that has ended.
    pub(super) fn storing(&self, key: &Key) {
        if let Some(absent) = &self.absent {
            absent.storing(key);
        }
    }

    pub(super) fn load_ended(&self, began: Instant, bytes: usize, result: &Result<(), StoreError>) {
        let now = self.now();
        lock(&self.loads).end(Verdict::of(result), now);
        let took = now.saturating_duration_since(began).as_nanos();
        self.load_ns.fetch_add(u64::try_from(took).unwrap_or(u64::MAX), Ordering::Relaxed);
        match result {
            Ok(()) => count(&self.hits, &self.hit_bytes, bytes),
            Err(e) if e.kind() == ErrorKind::Missing => add(&self.misses),
            Err(e) => {
                add(&self.load_failures);
                if e.kind() == ErrorKind::Corrupt {
                    add(&self.corrupt);
                }
            }
        }
    }

    pub(super) fn dump_ended(&self, key: &Key, bytes: usize, result: &Result<(), StoreError>) {
        self.stored(key, result);
        match result {
            Ok(()) => count(&self.stored, &self.stored_bytes, bytes),
            Err(_) => add(&self.dump_failures),
        }
    }

    pub(super) fn promotion_ended(&self, key: &Key, bytes: usize, result: &Result<(), StoreError>) {
        self.stored(key, result);
        match result {
            Ok(()) => count(&self.promoted, &self.promoted_bytes, bytes),
            Err(_) => add(&self.promotion_failures),
        }
    }

    fn stored(&self, key: &Key, result: &Result<(), StoreError>) {
        self.storing(key);
        lock(&self.dumps).end(Verdict::of(result), self.now());
    }

    pub(super) fn report(&self, name: &str) -> TierReport {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let now = self.now();
        let (loads, dumps) = (lock(&self.loads), lock(&self.dumps));
        TierReport {
            name: name.to_owned(),
            hits: read(&self.hits),
            hit_bytes: read(&self.hit_bytes),
            load_time: Duration::from_nanos(read(&self.load_ns)),
            misses: read(&self.misses),
            known_misses: read(&self.known_misses),
            load_failures: read(&self.load_failures),
            corrupt: read(&self.corrupt),
            loads_skipped: read(&self.loads_skipped),
            dumps: read(&self.stored),
            dump_bytes: read(&self.stored_bytes),
            dump_failures: read(&self.dump_failures),
            dumps_skipped: read(&self.dumps_skipped),
            not_admitted: read(&self.not_admitted),
            written_through: read(&self.written_through),
            promoted: read(&self.promoted),
            promoted_bytes: read(&self.promoted_bytes),
            promotion_failures: read(&self.promotion_failures),
            promotions_skipped: read(&self.promotions_skipped),
            touch_failures: read(&self.touch_failures),
            turned_off: loads.opened() + dumps.opened(),
            loads_off: loads.is_open(now),
            dumps_off: dumps.is_open(now),
        }
    }
}

impl fmt::Debug for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Record").field("report", &self.report("")).finish_non_exhaustive()
    }
}

fn lock(health: &Mutex<Health>) -> MutexGuard<'_, Health> {
    health.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn add(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

fn count(events: &AtomicU64, sum: &AtomicU64, bytes: usize) {
    add(events);
    sum.fetch_add(bytes as u64, Ordering::Relaxed);
}
