//! Ordered tiers as one backend.
//!
//! **Invariant:** the stack never borrows an operation's memory beyond its end: promotions copy the
//! bytes first. No thread blocks; everything continues where a tier ends an operation.

mod dump;
mod load;
mod tier;

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, atomic::Ordering},
};

pub use tier::{Candidate, Promotion, Tier, TierReport};

use crate::{Backend, BackendCapabilities, ErrorKind, Op, Presence, StoreError};
use tier::Running;

type Key = ([u8; 16], u32);

/// Bytes of promotions that may be in flight.
const PROMOTION_BYTES: u64 = 256 << 20;

/// Several backends, asked in order.
///
/// * A **load** asks the tiers from the first on; a tier that does not have the object, has it
///   corrupt or fails otherwise passes it on to the next one. If none has it, the result is
///   `Missing`, or the first failure that was something else. A hit below may be **promoted**: a
///   copy of its bytes is dumped into the upper tiers that want it.
/// * A **dump** goes at the same time into all tiers that take dumps. Its outcome is that of the
///   last of them, the object's home; failures of the others are counted.
/// * **`touch`** reaches every tier exactly once; failures are counted, and not returned.
/// * **`contains`** is `There` if any tier says so, `Unknown` if any cannot tell, else `Absent`.
/// * **`remove`** removes everywhere, and reports the first failure per key.
///
/// Dropping the stack drops the tiers; operations that a tier then ends with a failure are not
/// passed on any more.
#[derive(Debug)]
pub struct Stack {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    tiers: Vec<Running>,
    /// Bytes of promotions in flight, shared with their sinks.
    promoting: Arc<std::sync::atomic::AtomicU64>,
    promotion_bytes: u64,
}

impl Stack {
    /// Puts tiers together, the fastest first.
    ///
    /// # Errors
    /// `Invalid` without a tier.
    pub fn new(tiers: Vec<Tier>) -> Result<Self, StoreError> {
        if tiers.is_empty() {
            return Err(StoreError::new(ErrorKind::Invalid, "a stack needs at least one tier"));
        }
        let inner = Inner {
            tiers: tiers.into_iter().map(Running::new).collect(),
            promoting: Arc::default(),
            promotion_bytes: PROMOTION_BYTES,
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Counts of each tier, in order.
    #[must_use]
    pub fn report(&self) -> Vec<TierReport> {
        self.inner.tiers.iter().map(Running::report).collect()
    }
}

impl Backend for Stack {
    fn capabilities(&self) -> BackendCapabilities {
        let all: Vec<_> = self.inner.tiers.iter().map(|t| t.tier.backend.capabilities()).collect();
        let modes: Vec<&str> = all.iter().map(|c| c.mode.as_str()).collect();
        let mut homes = self.inner.tiers.iter().zip(&all).filter(|(t, _)| t.tier.takes_dumps);
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
            let asked: Vec<Key> = open.iter().filter_map(|at| keys.get(*at).copied()).collect();
            if asked.is_empty() {
                break;
            }
            let mut said = shielded(|| running.tier.backend.contains(&asked)).unwrap_or_default();
            said.resize(asked.len(), Presence::Unknown);
            for (at, presence) in open.iter().zip(&said) {
                if let Some(known) = merged.get_mut(*at)
                    && *presence != Presence::Absent
                {
                    *known = *presence;
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
                running.counts.touch_failures.fetch_add(1, Ordering::Relaxed);
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
