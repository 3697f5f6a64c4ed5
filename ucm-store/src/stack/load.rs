//! Loads: down the tiers until one has the object, and a copy up again.
//!
//! **Invariant:** an operation is in one tier at a time, and is tried in each tier at most once.

use std::{
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Instant,
};

use super::{
    Inner, Key,
    absent::Asked,
    budget::Taken,
    dump::failing,
    record::{Record, add},
    shielded,
    tier::{Candidate, Running},
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
        let (asked, passed_over) = choose(running, loads);
        let batch: Arc<Batch> = Arc::new(Mutex::new(Some(passed_over)));
        let ops = asked.into_iter().map(|(load, question)| {
            let (stack, batch) = (Arc::downgrade(inner), Arc::clone(&batch));
            let record = Arc::clone(&running.record);
            load.op.intercept(move |op, result| {
                let load = Descent { op, failure: load.failure };
                question.answered(&record, &load.op, &result);
                ended(&stack, at, &batch, load, result);
            })
        });
        let ops: Vec<_> = ops.collect();
        if !ops.is_empty() {
            shielded(|| running.tier.backend.load(ops));
        }
        loads = batch.lock().unwrap_or_else(PoisonError::into_inner).take().unwrap_or_default();
        at += 1;
    }
}

/// What a tier is asked.
struct Question {
    began: Instant,
    asked: Option<Asked>,
}

impl Question {
    fn answered(&self, record: &Record, op: &Op, result: &Result<(), StoreError>) {
        record.load_ended(self.began, op.memory().len(), result);
        if result.as_ref().is_err_and(|e| e.kind() == ErrorKind::Missing) {
            record.missed(&(*op.block(), op.shard()), self.asked);
        }
    }
}

/// Which loads a tier gets, and which it does not: what it does not have, and all if it is failing.
fn choose(running: &Running, loads: Vec<Descent>) -> (Vec<(Descent, Question)>, Vec<Descent>) {
    let record = &running.record;
    let began = record.now();
    let (mut asked, mut passed_over) = (Vec::new(), Vec::new());
    for load in loads {
        match record.ask_for(&(*load.op.block(), load.op.shard()), began) {
            Ok(question) => asked.push((load, Question { began, asked: question })),
            Err(()) => passed_over.push(load),
        }
    }
    let begun = record.begin_loads(asked.len(), began);
    for (mut load, _) in asked.drain(begun..) {
        add(&record.loads_skipped);
        load.failure.get_or_insert_with(|| failing(&running.tier.name));
        passed_over.push(load);
    }
    (asked, passed_over)
}

/// Tier `at` has ended a load.
fn ended(
    stack: &Weak<Inner>,
    at: usize,
    batch: &Batch,
    mut load: Descent,
    result: Result<(), StoreError>,
) {
    let Some(inner) = stack.upgrade() else {
        load.op.finish(result);
        return;
    };
    let error = match result {
        Ok(()) => {
            let promotions = promotions(&inner, at, &load.op);
            load.op.finish(Ok(()));
            promotions.into_iter().for_each(|p| p.start(&inner));
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
    descend(&inner, at + 1, vec![load]);
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
    let key = (block, shard);
    let mut copy: Option<Arc<[u8]>> = None;
    let mut ascents = Vec::new();
    for (tier, running) in inner.tiers.iter().enumerate().take(found_in + 1) {
        // The tier that has it hears of the use, too.
        let kept = running.tier.admission.as_ref().is_none_or(|a| a.used(&block, shard));
        if tier == found_in || !running.tier.promotion.admits(&candidate) {
            continue;
        }
        let record = &running.record;
        if !kept {
            add(&record.not_admitted);
            continue;
        }
        let taken = inner.promoting.take(bytes as u64);
        let begun = taken.filter(|_| record.begin_dumps(1, record.now()) == 1);
        let Some(taken) = begun else {
            add(&record.promotions_skipped);
            continue;
        };
        record.storing(&key);
        let copy = copy.get_or_insert_with(|| raw::snapshot(op.memory()));
        let memory = raw::lend(Arc::clone(copy));
        let sink = Arc::new(Promoted { key, record: Arc::clone(record), _taken: taken });
        ascents.push(Ascent { tier, op: Op::new(block, shard, 0, memory, sink) });
    }
    ascents
}

/// The end of a promotion: nobody waits for it.
struct Promoted {
    key: Key,
    record: Arc<Record>,
    _taken: Taken,
}

impl Sink for Promoted {
    fn complete(&self, completed: Completed) {
        if let Err(error) = &completed.result {
            tracing::debug!(%error, "a promotion failed");
        }
        self.record.promotion_ended(&self.key, completed.memory.len(), &completed.result);
    }
}
