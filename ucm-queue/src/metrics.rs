//! Counters of one queue.
//!
//! **Invariant:** counters only grow, gauges return to zero when the queue has nothing in flight.

use std::{sync::Arc, time::Duration};

use ucm_ctrl::sync::{AtomicU64, Ordering};

use crate::{ErrorKind, StagingPool, admission::Admission};

macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $name:ident $($gauge:literal)?,)*) => {
        /// What a queue has done so far and holds now. Times are sums in nanoseconds.
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct QueueStats {
            $($(#[doc = $doc])+ pub $name: u64,)*
            /// Refused submissions by [`ErrorKind`] number.
            pub rejected: [u64; ErrorKind::COUNT],
        }

        impl QueueStats {
            /// Names, what they say, and whether they may fall; in the order of [`list`](Self::list).
            pub const MEANINGS: &[(&str, &str, bool)] = &[
                $((stringify!($name), concat!($($doc),+), !matches!(concat!($($gauge)?).as_bytes(), [])),)*
            ];

            /// Refused submissions of one kind.
            #[must_use]
            pub fn rejected(&self, kind: ErrorKind) -> u64 {
                self.rejected.get(kind as usize).copied().unwrap_or(0)
            }

            /// Names and values, in a fixed order; without `rejected`.
            #[must_use]
            pub fn list(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name),)*]
            }
        }

        /// The live counters behind [`QueueStats`].
        #[derive(Debug, Default)]
        pub(crate) struct Metrics {
            $(pub(crate) $name: Count,)*
            rejected: [Count; ErrorKind::COUNT],
        }

        impl Metrics {
            /// The values now; each is exact, together they are not one instant.
            pub(crate) fn snapshot(&self) -> QueueStats {
                QueueStats {
                    $($name: self.$name.value(),)*
                    rejected: std::array::from_fn(|kind| {
                        self.rejected.get(kind).map_or(0, Count::value)
                    }),
                }
            }
        }
    };
}

counters! {
    /// Load tasks admitted.
    tasks,
    /// Requests admitted.
    requests,
    /// Requests that ended `Loaded`.
    loaded,
    /// Requests that ended `Recompute`.
    recomputed,
    /// Requests that ended `Cancelled`.
    cancelled,
    /// Requests that ended `Deadline` or `Stuck`.
    expired,
    /// Unique shards copied from a slot that was ready when first seen.
    hit_shards,
    /// Unique shards copied after waiting for another filler.
    waited_shards,
    /// Unique shards loaded by this queue into a slot.
    owned_shards,
    /// Unique shards loaded around a full cache.
    bypass_shards,
    /// Unique shards that could not be loaded.
    failed_shards,
    /// Waits on a failed or dead filler that were tried again.
    retried_shards,
    /// Bytes of `hit_shards`.
    hit_bytes,
    /// Bytes of `waited_shards`.
    waited_bytes,
    /// Bytes of `owned_shards`.
    owned_bytes,
    /// Bytes of `bypass_shards`.
    bypass_bytes,
    /// Backend loads started.
    backend_loads,
    /// Calls of `Backend::load` (each may start many).
    backend_calls,
    /// Backend loads in flight now.
    backend_in_flight "gauge",
    /// Most backend loads that were in flight at once.
    backend_in_flight_max "gauge",
    /// Time from admission to the first look at a task.
    queue_ns,
    /// Time of backend loads, summed over loads.
    backend_ns,
    /// Time of copy plans, summed over plans.
    copy_ns,
    /// Copy plans that ended.
    copy_plans,
    /// Copy plans that failed and were tried again piece by piece.
    copy_retries,
    /// Loads in flight whose request has ended: their memory is in quarantine until they end.
    quarantine_loads "gauge",
    /// Bytes of `quarantine_loads`.
    quarantine_bytes "gauge",
    /// Fills given up while their read was in flight.
    abandoned_fills,
    /// Staging buffers in use now.
    staging_in_use "gauge",
    /// Most staging buffers that were in use at once, of loads and dumps each, summed.
    staging_in_use_max "gauge",
    /// Times a task with a buffer left the next one to a task without.
    staging_yields,
    /// Shards copied by the processor because the engine cannot reach their slot.
    staged_shards,
    /// Staging pools that a backend or peer has registered.
    staging_registered "gauge",
    /// Most tasks that had reads in flight at once.
    tasks_in_flight_max "gauge",
    /// Keys preallocated in the idle window.
    preallocated,
    /// Keys the idle window looked at without reserving a slot.
    prealloc_skipped,
    /// Panics of a backend or engine that were caught.
    caught_panics,
    /// Dump tasks admitted.
    dump_tasks,
    /// Shards copied into the cache by dumps.
    dump_copied,
    /// Shards of dumps that were in the cache already.
    dump_resident,
    /// Shards of dumps that went around a full cache.
    dump_bypass,
    /// Shards of dumps made durable.
    dump_durable,
    /// Shards of dumps that failed at either level.
    dump_failed,
    /// Bytes of dumps admitted and not yet ended.
    dump_bytes_in_flight "gauge",
    /// Groups that committed.
    groups_committed,
    /// Groups that were given up.
    groups_aborted,
    /// Backend dumps in flight now.
    dumps_in_flight "gauge",
    /// Turns of the dispatcher.
    turns,
}

/// Reads a queue's [`QueueStats`] without keeping the queue: for what outlives it. Thread-safe.
#[derive(Clone, Debug)]
pub struct QueueMeter {
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) admission: Arc<Admission>,
    pub(crate) staging: [Option<StagingPool>; 2],
}

impl QueueMeter {
    /// What the queue has done and holds; what it had done when it ended.
    #[must_use]
    pub fn stats(&self) -> QueueStats {
        let mut stats = self.metrics.snapshot();
        stats.dump_bytes_in_flight = self.admission.dump_bytes_held();
        for pool in self.staging.iter().flatten() {
            stats.staging_in_use += u64::from(pool.in_use());
            stats.staging_in_use_max += u64::from(pool.in_use_max());
        }
        stats
    }
}

impl Metrics {
    pub(crate) fn reject(&self, kind: ErrorKind) {
        if let Some(count) = self.rejected.get(kind as usize) {
            count.add(1);
        }
    }
}

/// One counter or gauge.
#[derive(Debug, Default)]
pub(crate) struct Count(AtomicU64);

impl Count {
    pub(crate) fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub(crate) fn sub(&self, n: u64) {
        self.0.fetch_sub(n, Ordering::Relaxed);
    }

    pub(crate) fn add_time(&self, time: Duration) {
        self.add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    }

    pub(crate) fn raise_to(&self, n: u64) {
        self.0.fetch_max(n, Ordering::Relaxed);
    }

    /// Adds `n` if the sum stays within `limit`; otherwise says what is there.
    pub(crate) fn reserve(&self, n: u64, limit: u64) -> Result<(), u64> {
        let mut old = self.0.load(Ordering::Relaxed);
        loop {
            match old.checked_add(n) {
                Some(new) if new <= limit => {
                    match self.0.compare_exchange_weak(
                        old,
                        new,
                        Ordering::Relaxed,
                        Ordering::Relaxed,
                    ) {
                        Ok(_) => return Ok(()),
                        Err(now) => old = now,
                    }
                }
                _ => return Err(old),
            }
        }
    }

    pub(crate) fn value(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
