//! Loads: down the tiers until one has the object, and a copy up again.
//!
//! **Invariant:** an operation is in one tier at a time, and is tried in each tier at most once.

use std::sync::{
    Arc, Mutex, PoisonError, Weak,
    atomic::{AtomicU64, Ordering},
};

use super::{
    Inner, shielded,
    tier::{Candidate, Counts},
};
use crate::{Completed, ErrorKind, Op, Sink, StoreError, raw};

/// A load on its way down.
struct Descent {
    op: Op,
    /// The first failure that was more than a miss.
    failure: Option<StoreError>,
}

/// Starts loads in the first tier.
pub(super) fn start(inner: &Arc<Inner>, ops: Vec<Op>) {
    descend(inner, 0, ops.into_iter().map(|op| Descent { op, failure: None }).collect());
}

/// What a tier does not have while its `load` is still running goes to the next tier as one batch.
type Batch = Mutex<Option<Vec<Descent>>>;

/// Loads from tier `at` on.
fn descend(inner: &Arc<Inner>, mut at: usize, mut loads: Vec<Descent>) {
    // A loop, not a recursion: tiers that end inside their call are the usual case.
    while !loads.is_empty() {
        let Some(running) = inner.tiers.get(at) else {
            let ended = loads.into_iter().map(|load| {
                let missing = || StoreError::new(ErrorKind::Missing, "no tier has the object");
                let error = load.failure.unwrap_or_else(missing);
                (load.op, Err(error))
            });
            Op::finish_all(ended);
            return;
        };
        let batch: Arc<Batch> = Arc::new(Mutex::new(Some(Vec::new())));
        let ops = loads.into_iter().map(|load| {
            let (stack, batch) = (Arc::downgrade(inner), Arc::clone(&batch));
            load.op.intercept(move |op, result| {
                ended(&stack, at, &batch, Descent { op, failure: load.failure }, result);
            })
        });
        let ops = ops.collect();
        shielded(|| running.tier.backend.load(ops));
        loads = batch.lock().unwrap_or_else(PoisonError::into_inner).take().unwrap_or_default();
        at += 1;
    }
}

/// Tier `at` has ended a load.
fn ended(
    stack: &Weak<Inner>,
    at: usize,
    batch: &Batch,
    mut load: Descent,
    result: Result<(), StoreError>,
) {
    let inner = stack.upgrade();
    let Some((inner, running)) = inner.as_ref().and_then(|i| Some((i, i.tiers.get(at)?))) else {
        load.op.finish(result);
        return;
    };
    running.counts.loaded(load.op.memory().len(), &result);
    let error = match result {
        Ok(()) => {
            let promotions = promotions(inner, at, &load.op);
            load.op.finish(Ok(()));
            promotions.into_iter().for_each(|p| p.start(inner));
            return;
        }
        Err(error) if error.kind() == ErrorKind::Invalid => {
            load.op.finish(Err(error));
            return;
        }
        Err(error) => error,
    };
    if error.kind() != ErrorKind::Missing {
        load.failure.get_or_insert(error);
    }
    let mut open = batch.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(batch) = open.as_mut() {
        batch.push(load);
        return;
    }
    drop(open);
    descend(inner, at + 1, vec![load]);
}

/// An object on its way up, with bytes of its own.
struct Ascent {
    tier: usize,
    op: Op,
}

impl Ascent {
    fn start(self, inner: &Inner) {
        if let Some(running) = inner.tiers.get(self.tier) {
            shielded(|| running.tier.backend.dump(vec![self.op]));
        }
    }
}

/// Copies the object for the upper tiers that want it. Its operation has not been finished yet, so
/// the memory is still the stack's to read.
fn promotions(inner: &Inner, found_in: usize, op: &Op) -> Vec<Ascent> {
    let (block, shard, bytes) = (*op.block(), op.shard(), op.memory().len());
    let candidate = Candidate { block, shard, bytes, found_in };
    let uppers = inner.tiers.iter().enumerate().take(found_in);
    let wanted = uppers.filter(|(_, running)| running.tier.promotion.admits(&candidate));
    let mut copy: Option<Arc<[u8]>> = None;
    let mut ascents = Vec::new();
    for (tier, running) in wanted {
        let budget = Budget::take(&inner.promoting, bytes as u64, inner.promotion_bytes);
        let Some(budget) = budget else {
            running.counts.promotions_skipped.fetch_add(1, Ordering::Relaxed);
            continue;
        };
        let copy = copy.get_or_insert_with(|| raw::snapshot(op.memory()));
        let memory = raw::lend(Arc::clone(copy));
        let counts = Arc::clone(&running.counts);
        let sink = Arc::new(Promoted { counts, _budget: budget });
        ascents.push(Ascent { tier, op: Op::new(block, shard, 0, memory, sink) });
    }
    ascents
}

/// The end of a promotion: nobody waits for it.
struct Promoted {
    counts: Arc<Counts>,
    _budget: Budget,
}

impl Sink for Promoted {
    fn complete(&self, completed: Completed) {
        if let Err(error) = &completed.result {
            tracing::debug!(%error, "a promotion failed");
        }
        self.counts.promoted(completed.memory.len(), completed.result.is_ok());
    }
}

/// Bytes of promotions in flight; given back when dropped.
struct Budget {
    total: Arc<AtomicU64>,
    bytes: u64,
}

impl Budget {
    fn take(total: &Arc<AtomicU64>, bytes: u64, limit: u64) -> Option<Self> {
        let more = |now: u64| now.checked_add(bytes).filter(|sum| *sum <= limit);
        let taken = total.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        taken.is_ok().then(|| Self { total: Arc::clone(total), bytes })
    }
}

impl Drop for Budget {
    fn drop(&mut self) {
        self.total.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
