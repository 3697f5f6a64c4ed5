//! Ordered tiers as one backend.
//!
//! **Invariant:** the stack never borrows an operation's memory beyond its end: promotions copy the
//! bytes first. No thread blocks; everything continues where a tier ends an operation.

mod absent;
mod admission;
mod budget;
mod dump;
mod load;
mod record;
mod tier;

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::{Duration, Instant},
};

pub use admission::Admission;
pub use record::TierReport;
pub use tier::{Candidate, Promotion, Tier, Writes};

use crate::{Backend, BackendCapabilities, ErrorKind, Op, Presence, StoreError, xxh3::xxh3_64};
use budget::Budget;
use record::{Clock, Record, add};
use tier::Running;

/// How long dropping waits for what is to be written back.
const CLOSE_WITHIN: Duration = Duration::from_secs(5);

type Key = ([u8; 16], u32);

/// Bytes of promotions that may be in flight.
const PROMOTION_BYTES: u64 = 256 << 20;
/// Bytes of copies that may be on their way to tiers that are written back.
const WRITE_BACK_BYTES: u64 = 256 << 20;

/// Several backends, asked in order.
///
/// * A **load** asks the tiers from the first on; a tier that does not have the object, has it
///   corrupt or fails otherwise passes it on to the next one. If none has it, the result is
///   `Missing`, or the first failure that was something else. A hit below may be **promoted**: a
///   copy of its bytes is dumped into the upper tiers that want it ([`Promotion`], [`Admission`]).
/// * A **dump** goes at the same time into all tiers that take it ([`Writes`]). Its outcome is that of the
///   last of those that write it through, the object's home; failures of the others are counted.
/// * **`touch`** reaches every tier exactly once; failures are counted, and not returned.
/// * **`contains`** is `There` if any tier says so, `Unknown` if any cannot tell, else `Absent`.
/// * **`remove`** removes everywhere, and reports the first failure per key. It knows nothing of
///   promotions and write-backs on their way: [`wait_written`](Stack::wait_written) first.
///
/// A tier that fails is passed over for a while, and one that said a moment ago that it does not have an
/// object is not asked again, if it is set so ([`Tier`]).
///
/// Dropping the stack waits up to 5 s for what is to be written back, then drops the tiers; operations that a tier then ends with a failure are not
/// passed on any more.
#[derive(Debug)]
pub struct Stack {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    tiers: Vec<Running>,
    promoting: Arc<Budget>,
    writing_back: Arc<Budget>,
}

impl Stack {
    /// Puts tiers together, the fastest first.
    ///
    /// # Errors
    /// `Invalid` without a tier; if a tier is written back and none above is written through; if the last
    /// tier that takes dumps has an admission.
    pub fn new(tiers: Vec<Tier>) -> Result<Self, StoreError> {
        Self::with_clock(tiers, Arc::new(Instant::now))
    }

    fn with_clock(tiers: Vec<Tier>, clock: Clock) -> Result<Self, StoreError> {
        let invalid = |what: String| Err(StoreError::new(ErrorKind::Invalid, what));
        if tiers.is_empty() {
            return invalid("a stack needs at least one tier".into());
        }
        let mut above = false;
        for tier in &tiers {
            if tier.writes == Writes::Back && !above {
                return invalid(format!(
                    "tier {:?} is written back, but no tier above it is written through",
                    tier.name
                ));
            }
            above |= tier.writes == Writes::Through;
        }
        let home = tiers.iter().rfind(|tier| tier.writes != Writes::Never);
        if let Some(home) = home.filter(|home| home.admission.is_some()) {
            return invalid(format!(
                "tier {:?} is the last that takes dumps, so it takes all: it can have no admission",
                home.name
            ));
        }
        let running = |tier: Tier| {
            let record = Arc::new(Record::new(&tier, Arc::clone(&clock)));
            Running { tier, record }
        };
        let inner = Inner {
            tiers: tiers.into_iter().map(running).collect(),
            promoting: Budget::new(PROMOTION_BYTES),
            writing_back: Budget::new(WRITE_BACK_BYTES),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Waits until all that is to be written back was tried, at most so long; says how many bytes are still
    /// on their way. What failed is counted in the tier's report.
    #[must_use]
    pub fn wait_written(&self, at_most: Duration) -> u64 {
        self.inner.writing_back.wait_empty(at_most)
    }

    /// Counts of each tier, in order.
    #[must_use]
    pub fn report(&self) -> Vec<TierReport> {
        self.inner.tiers.iter().map(|r| r.record.report(&r.tier.name)).collect()
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        let left = self.wait_written(CLOSE_WITHIN);
        if left > 0 {
            tracing::error!(bytes = left, "a stack is closed before all was written back");
        }
    }
}

impl Backend for Stack {
    fn capabilities(&self) -> BackendCapabilities {
        let all: Vec<_> = self.inner.tiers.iter().map(|t| t.tier.backend.capabilities()).collect();
        let modes: Vec<&str> = all.iter().map(|c| c.mode.as_str()).collect();
        let mut homes =
            self.inner.tiers.iter().zip(&all).filter(|(t, _)| t.tier.writes != Writes::Never);
        let home = homes.next_back().map(|(_, c)| c);
        BackendCapabilities {
            mode: modes.join(" > "),
            depth: all.iter().map(|c| c.depth).max().unwrap_or(1),
            durable: home.is_some_and(|c| c.durable),
            writable: home.is_some_and(|c| c.writable),
        }
    }

    fn load(&self, ops: Vec<Op>) {
        load::start(&self.inner, ops);
    }

    fn dump(&self, ops: Vec<Op>) {
        dump::start(&self.inner, ops);
    }

    fn contains(&self, keys: &[Key]) -> Vec<Presence> {
        let mut merged = vec![Presence::Absent; keys.len()];
        // Only keys that no upper tier has are asked for further down.
        let mut open: Vec<usize> = (0..keys.len()).collect();
        for running in &self.inner.tiers {
            if open.is_empty() {
                break;
            }
            for (at, presence) in running.presence(&open, keys) {
                if let Some(known) = merged.get_mut(at)
                    && presence != Presence::Absent
                {
                    *known = presence;
                }
            }
            open.retain(|at| merged.get(*at).is_some_and(|p| *p != Presence::There));
        }
        merged
    }

    fn touch(&self, blocks: &[[u8; 16]]) -> Result<(), StoreError> {
        for running in &self.inner.tiers {
            let touched = shielded(|| running.tier.backend.touch(blocks));
            if !matches!(touched, Some(Ok(()))) {
                add(&running.record.touch_failures);
            }
        }
        Ok(())
    }

    fn remove(&self, keys: &[Key]) -> Vec<Result<(), StoreError>> {
        let mut results: Vec<Result<(), StoreError>> = keys.iter().map(|_| Ok(())).collect();
        for running in &self.inner.tiers {
            let removed = shielded(|| running.tier.backend.remove(keys)).unwrap_or_default();
            let missing = || Err(StoreError::new(ErrorKind::Io, "a tier gave no answer"));
            let answers = removed.into_iter().chain(std::iter::repeat_with(missing));
            for (result, of_tier) in results.iter_mut().zip(answers) {
                if result.is_ok() {
                    *result = of_tier;
                }
            }
        }
        results
    }
}

impl Running {
    /// What the tier says about these places of `keys`.
    fn presence(&self, places: &[usize], keys: &[Key]) -> Vec<(usize, Presence)> {
        let record = &self.record;
        let now = record.now();
        if record.loads_are_off(now) {
            return places.iter().map(|at| (*at, Presence::Unknown)).collect();
        }
        let mut asked = Vec::new();
        for at in places {
            let Some(key) = keys.get(*at) else { continue };
            if let Ok(question) = record.ask_for(key, now) {
                asked.push((*at, *key, question));
            }
        }
        if asked.is_empty() {
            return Vec::new();
        }
        let of_tier: Vec<Key> = asked.iter().map(|(_, key, _)| *key).collect();
        let mut said = shielded(|| self.tier.backend.contains(&of_tier)).unwrap_or_default();
        said.resize(asked.len(), Presence::Unknown);
        let answers = asked.into_iter().zip(said);
        answers
            .map(|((at, key, question), presence)| {
                if presence == Presence::Absent {
                    record.missed(&key, question);
                }
                (at, presence)
            })
            .collect()
    }
}

/// Spreads keys; never a proof of identity.
fn hash(key: &Key) -> u64 {
    let mut bytes = [0; 20];
    let (block, shard) = bytes.split_at_mut(16);
    block.copy_from_slice(&key.0);
    shard.copy_from_slice(&key.1.to_le_bytes());
    xxh3_64(&bytes)
}

/// Calls a tier; a panic in it is its failure, not ours.
fn shielded<T>(call: impl FnOnce() -> T) -> Option<T> {
    let result = catch_unwind(AssertUnwindSafe(call)).ok();
    if result.is_none() {
        tracing::error!("a tier of a stack panicked");
    }
    result
}

#[cfg(test)]
mod tests;
