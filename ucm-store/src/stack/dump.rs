//! Dumps: one operation, written by several tiers at once from the same memory.
//!
//! **Invariant:** the operation ends only after all tiers have ended their part, so no tier reads
//! the memory after its owner has it back.

use std::sync::{Arc, Mutex, PoisonError};

use super::{
    Inner, shielded,
    tier::{Counts, Running},
};
use crate::{Completed, ErrorKind, Op, Sink, StoreError};

/// Starts dumps in all tiers that take them.
pub(super) fn start(inner: &Inner, ops: Vec<Op>) {
    let takers: Vec<&Running> = inner.tiers.iter().filter(|r| r.tier.takes_dumps).collect();
    if takers.is_empty() {
        let none = || StoreError::new(ErrorKind::Unavailable, "no tier takes dumps");
        Op::finish_all(ops.into_iter().map(|op| (op, Err(none()))));
        return;
    }
    let shared: Vec<Arc<Shared>> = ops
        .into_iter()
        .map(|op| {
            let state = State { op: Some(Arc::new(op)), left: takers.len(), outcome: Ok(()) };
            Arc::new(Shared(Mutex::new(state)))
        })
        .collect();
    for (at, running) in takers.iter().enumerate() {
        let is_home = at + 1 == takers.len();
        let parts = shared.iter().filter_map(|shared| shared.part(&running.counts, is_home));
        let parts = parts.collect();
        shielded(|| running.tier.backend.dump(parts));
    }
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
    /// The part of one tier.
    fn part(self: &Arc<Self>, counts: &Arc<Counts>, is_home: bool) -> Option<Op> {
        let state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // The operation stays until all parts have ended, and this one has not begun.
        let op = state.op.as_ref()?;
        let memory = Op::share_memory(op);
        let end = Part { shared: Arc::clone(self), counts: Arc::clone(counts), is_home };
        Some(Op::new(*op.block(), op.shard(), 0, memory, Arc::new(end)))
    }
}

/// Where the part of one tier ends.
struct Part {
    shared: Arc<Shared>,
    counts: Arc<Counts>,
    is_home: bool,
}

impl Sink for Part {
    fn complete(&self, completed: Completed) {
        let Completed { result, memory, .. } = completed;
        self.counts.dumped(memory.len(), result.is_ok());
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
