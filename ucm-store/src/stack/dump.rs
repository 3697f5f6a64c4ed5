//! Dumps: one operation, written by several tiers at once from the same memory, or from a copy.
//!
//! **Invariant:** the operation ends only after all tiers that write through have ended their part, so no
//! tier reads the memory after its owner has it back.

use std::sync::{Arc, Mutex, PoisonError};

use super::{
    Inner, Key,
    budget::Taken,
    record::{Record, add},
    shielded,
    tier::{Running, Writes},
};
use crate::{Completed, ErrorKind, Op, Sink, StoreError, raw};

/// Starts dumps in all tiers that take them.
pub(super) fn start(inner: &Inner, ops: Vec<Op>) {
    if inner.tiers.iter().all(|r| r.tier.writes == Writes::Never) {
        let none = || StoreError::new(ErrorKind::Unavailable, "no tier takes dumps");
        Op::finish_all(ops.into_iter().map(|op| (op, Err(none()))));
        return;
    }
    // Parts of all operations first: an operation must not end while another tier's part is not made.
    let mut of_tiers: Vec<Vec<Op>> = inner.tiers.iter().map(|_| Vec::new()).collect();
    for op in ops {
        parts(inner, op, &mut of_tiers);
    }
    for (running, parts) in inner.tiers.iter().zip(of_tiers) {
        if !parts.is_empty() {
            shielded(|| running.tier.backend.dump(parts));
        }
    }
}

/// Adds to what each tier gets.
fn parts(inner: &Inner, op: Op, of_tiers: &mut [Vec<Op>]) {
    let key = (*op.block(), op.shard());
    let takes = inner.tiers.iter().map(|running| takes(running, &key));
    let mut takes: Vec<Writes> = takes.collect();
    if !takes.contains(&Writes::Through) {
        // Whoever would write it back is the only one to have it.
        takes.iter_mut().filter(|t| **t == Writes::Back).for_each(|t| *t = Writes::Through);
    }
    let mut copy: Option<Arc<[u8]>> = None;
    for ((running, takes), parts) in inner.tiers.iter().zip(&mut takes).zip(of_tiers.iter_mut()) {
        if *takes != Writes::Back {
            continue;
        }
        let Some(taken) = inner.writing_back.take(op.memory().len() as u64) else {
            add(&running.record.written_through);
            *takes = Writes::Through;
            continue;
        };
        let copy = copy.get_or_insert_with(|| raw::snapshot(op.memory()));
        if let Some(record) = begin(running, &key) {
            let memory = raw::lend(Arc::clone(copy));
            let end = Arc::new(WrittenBack { key, record, _taken: taken });
            parts.push(Op::new(key.0, key.1, 0, memory, end));
        }
    }
    let through = || takes.iter().enumerate().filter(|(_, t)| **t == Writes::Through);
    let home = through().next_back().map(|(at, _)| at);
    let state = State { op: Some(Arc::new(op)), left: through().count(), outcome: Ok(()) };
    let shared = Arc::new(Shared(Mutex::new(state)));
    let mut refused = Vec::new();
    for ((at, running), parts) in inner.tiers.iter().enumerate().zip(of_tiers.iter_mut()) {
        if takes.get(at) != Some(&Writes::Through) {
            continue;
        }
        let record = begin(running, &key);
        let begun = record.is_some();
        let Some(part) = shared.part(key, record, Some(at) == home) else { continue };
        if begun {
            parts.push(part);
        } else {
            refused.push((part, Err(failing(&running.tier.name))));
        }
    }
    Op::finish_all(refused);
}

/// How this tier takes this object.
fn takes(running: &Running, key: &Key) -> Writes {
    let kept = running.tier.admission.as_ref().is_none_or(|a| a.used(&key.0, key.1));
    if !kept && running.tier.writes != Writes::Never {
        add(&running.record.not_admitted);
        return Writes::Never;
    }
    running.tier.writes
}

/// `None` if the tier is failing.
fn begin(running: &Running, key: &Key) -> Option<Arc<Record>> {
    let record = &running.record;
    if record.begin_dumps(1, record.now()) == 0 {
        add(&record.dumps_skipped);
        return None;
    }
    record.storing(key);
    Some(Arc::clone(record))
}

pub(super) fn failing(name: &str) -> StoreError {
    let message = format!("tier {name:?} is failing; it is tried again in a minute at most");
    StoreError::new(ErrorKind::Unavailable, message)
}

/// One dump in several tiers.
struct Shared(Mutex<State>);

struct State {
    op: Option<Arc<Op>>,
    /// Tiers that have not ended their part, started or not.
    left: usize,
    /// What the home tier said.
    outcome: Result<(), StoreError>,
}

impl Shared {
    /// The part of one tier; without a record it is not counted.
    fn part(self: &Arc<Self>, key: Key, record: Option<Arc<Record>>, is_home: bool) -> Option<Op> {
        let state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // The operation stays until all parts have ended, and this one has not begun.
        let op = state.op.as_ref()?;
        let memory = Op::share_memory(op);
        let end = Part { shared: Arc::clone(self), key, record, is_home };
        Some(Op::new(key.0, key.1, 0, memory, Arc::new(end)))
    }
}

/// Where the part of one tier ends.
struct Part {
    shared: Arc<Shared>,
    key: Key,
    record: Option<Arc<Record>>,
    is_home: bool,
}

impl Sink for Part {
    fn complete(&self, completed: Completed) {
        let Completed { result, memory, .. } = completed;
        if let Some(record) = &self.record {
            record.dump_ended(&self.key, memory.len(), &result);
        }
        drop(memory);
        let mut state = self.shared.0.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_home {
            state.outcome = result;
        } else if let Err(error) = result {
            tracing::debug!(%error, "a dump failed in an upper tier");
        }
        state.left -= 1;
        if state.left > 0 {
            return;
        }
        let outcome = std::mem::replace(&mut state.outcome, Ok(()));
        let op = state.op.take();
        drop(state);
        // The last part has given its memory back, so nobody shares the operation any more.
        if let Some(op) = op.and_then(Arc::into_inner) {
            op.finish(outcome);
        }
    }
}

/// The end of a copy: nobody waits for it, but for [`Stack::wait_written`](crate::Stack::wait_written).
struct WrittenBack {
    key: Key,
    record: Arc<Record>,
    _taken: Taken,
}

impl Sink for WrittenBack {
    fn complete(&self, completed: Completed) {
        if let Err(error) = &completed.result {
            tracing::warn!(%error, "an object could not be written back");
        }
        self.record.dump_ended(&self.key, completed.memory.len(), &completed.result);
    }
}
