//! One tier: its backend, its rules and its counts.
//!
//! **Invariant:** counts are written at the end of an operation, from its result.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::{Backend, ErrorKind, StoreError};

/// An object that was found below and could be kept in an upper tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Candidate {
    /// Block id.
    pub block: [u8; 16],
    /// Shard index.
    pub shard: u32,
    /// Length in bytes.
    pub bytes: usize,
    /// Number of the tier that had it, from 0.
    pub found_in: usize,
}

/// Which objects found below a tier takes.
#[derive(Clone)]
#[non_exhaustive]
pub enum Promotion {
    /// None.
    Never,
    /// All.
    Always,
    /// Those for which this says yes. Called on backend threads: it must not block.
    If(Arc<dyn Fn(&Candidate) -> bool + Send + Sync>),
}

impl Promotion {
    pub(super) fn admits(&self, candidate: &Candidate) -> bool {
        match self {
            Self::Never => false,
            Self::Always => true,
            Self::If(rule) => super::shielded(|| rule(candidate)).unwrap_or(false),
        }
    }
}

impl fmt::Debug for Promotion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Never => "Never",
            Self::Always => "Always",
            Self::If(_) => "If(..)",
        })
    }
}

/// A backend and its place in a [`Stack`](crate::Stack).
#[derive(Clone, Debug)]
#[must_use]
pub struct Tier {
    pub(super) name: String,
    pub(super) backend: Arc<dyn Backend>,
    pub(super) takes_dumps: bool,
    pub(super) promotion: Promotion,
}

impl Tier {
    /// A tier that takes dumps, and keeps nothing found below.
    pub fn new(name: impl Into<String>, backend: Arc<dyn Backend>) -> Self {
        Self { name: name.into(), backend, takes_dumps: true, promotion: Promotion::Never }
    }

    /// Whether dumps are written to this tier.
    pub fn takes_dumps(mut self, yes: bool) -> Self {
        self.takes_dumps = yes;
        self
    }

    /// What this tier keeps of what was found below.
    pub fn promotion(mut self, promotion: Promotion) -> Self {
        self.promotion = promotion;
        self
    }
}

/// What one tier did. Looked for = hits + misses + failures.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TierReport {
    /// Name of the tier.
    pub name: String,
    /// Loads that this tier answered with verified bytes.
    pub hits: u64,
    /// Bytes of them.
    pub hit_bytes: u64,
    /// Loads of objects that it does not have.
    pub misses: u64,
    /// Loads that failed otherwise, corrupt objects among them.
    pub load_failures: u64,
    /// Corrupt objects among the failures.
    pub corrupt: u64,
    /// Dumps stored.
    pub dumps: u64,
    /// Bytes of them.
    pub dump_bytes: u64,
    /// Dumps that failed.
    pub dump_failures: u64,
    /// Objects promoted into this tier.
    pub promoted: u64,
    /// Bytes of them.
    pub promoted_bytes: u64,
    /// Promotions that failed.
    pub promotion_failures: u64,
    /// Promotions left out because too many bytes were being promoted.
    pub promotions_skipped: u64,
    /// Calls of touch that failed.
    pub touch_failures: u64,
}

/// A tier at work.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) tier: Tier,
    pub(super) counts: Arc<Counts>,
}

#[derive(Debug, Default)]
pub(super) struct Counts {
    hits: AtomicU64,
    hit_bytes: AtomicU64,
    misses: AtomicU64,
    load_failures: AtomicU64,
    corrupt: AtomicU64,
    dumps: AtomicU64,
    dump_bytes: AtomicU64,
    dump_failures: AtomicU64,
    promoted: AtomicU64,
    promoted_bytes: AtomicU64,
    promotion_failures: AtomicU64,
    pub(super) promotions_skipped: AtomicU64,
    pub(super) touch_failures: AtomicU64,
}

impl Running {
    pub(super) fn new(tier: Tier) -> Self {
        Self { tier, counts: Arc::default() }
    }

    pub(super) fn report(&self) -> TierReport {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let c = &self.counts;
        TierReport {
            name: self.tier.name.clone(),
            hits: read(&c.hits),
            hit_bytes: read(&c.hit_bytes),
            misses: read(&c.misses),
            load_failures: read(&c.load_failures),
            corrupt: read(&c.corrupt),
            dumps: read(&c.dumps),
            dump_bytes: read(&c.dump_bytes),
            dump_failures: read(&c.dump_failures),
            promoted: read(&c.promoted),
            promoted_bytes: read(&c.promoted_bytes),
            promotion_failures: read(&c.promotion_failures),
            promotions_skipped: read(&c.promotions_skipped),
            touch_failures: read(&c.touch_failures),
        }
    }
}

impl Counts {
    pub(super) fn loaded(&self, bytes: usize, result: &Result<(), StoreError>) {
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

    pub(super) fn dumped(&self, bytes: usize, ok: bool) {
        if ok { count(&self.dumps, &self.dump_bytes, bytes) } else { add(&self.dump_failures) }
    }

    pub(super) fn promoted(&self, bytes: usize, ok: bool) {
        if ok {
            count(&self.promoted, &self.promoted_bytes, bytes);
        } else {
            add(&self.promotion_failures);
        }
    }
}

fn add(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

fn count(events: &AtomicU64, sum: &AtomicU64, bytes: usize) {
    add(events);
    sum.fetch_add(bytes as u64, Ordering::Relaxed);
}
