//! Counters of one queue.
//!
//! **Invariant:** counters only grow, gauges return to zero when the queue has nothing in flight.

use std::time::Duration;

use ucm_ctrl::sync::{AtomicU64, Ordering};

use crate::ErrorKind;

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// What a queue has done so far and holds now. Times are sums in nanoseconds.
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct QueueStats {
            $($(#[$doc])* pub $name: u64,)*
            /// Refused submissions by [`ErrorKind`] number.
            pub rejected: [u64; ErrorKind::COUNT],
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
    backend_in_flight,
    /// Most backend loads that were in flight at once.
    backend_in_flight_max,
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
    quarantine_loads,
    /// Bytes of `quarantine_loads`.
    quarantine_bytes,
    /// Fills given up while their read was in flight.
    abandoned_fills,
    /// Staging buffers in use now.
    staging_in_use,
    /// Most staging buffers that were in use at once, of loads and dumps each, summed.
    staging_in_use_max,
    /// Times a task with a buffer left the next one to a task without.
    staging_yields,
    /// Shards copied by the processor because the engine cannot reach their slot.
    staged_shards,
    /// Staging pools that a backend or peer has registered.
    staging_registered,
    /// Most tasks that had reads in flight at once.
    tasks_in_flight_max,
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
    dump_bytes_in_flight,
    /// Groups that committed.
    groups_committed,
    /// Groups that were given up.
    groups_aborted,
    /// Backend dumps in flight now.
    dumps_in_flight,
    /// Turns of the dispatcher.
    turns,
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
