//! Histories, and the search for an order that explains them (Wing and Gong, 1993).
//!
//! **Invariant:** an operation begins at a tick and ends at a later one; no two share a tick.

use std::{
    collections::HashSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use super::{
    KEYS,
    spec::{Did, State},
};

#[derive(Clone, Copy, Debug)]
struct Operation {
    begun: u64,
    ended: u64,
    did: Did,
}

/// What happened, by key. Not seen by the scheduler.
#[derive(Debug, Default)]
pub(super) struct History {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    tick: AtomicU64,
    operations: Mutex<Vec<(u64, Operation)>>,
}

/// A thread's pen.
pub(super) struct Recorder(Arc<Shared>);

/// An operation that goes on.
#[must_use]
pub(super) struct Begun {
    block: u64,
    tick: u64,
}

impl Recorder {
    pub(super) fn begin(&self, block: u64) -> Begun {
        Begun { block, tick: self.0.tick.fetch_add(1, Ordering::SeqCst) }
    }

    pub(super) fn end(&self, begun: Begun, did: Did) {
        let ended = self.0.tick.fetch_add(1, Ordering::SeqCst);
        let operation = Operation { begun: begun.tick, ended, did };
        self.0.operations.lock().unwrap().push((begun.block, operation));
    }

    /// It did nothing to the key that the model knows.
    #[expect(clippy::unused_self, reason = "the pair of `end`")]
    pub(super) fn forget(&self, _: Begun) {}
}

impl History {
    pub(super) fn recorder(&self) -> Recorder {
        Recorder(self.shared.clone())
    }

    /// # Panics
    /// When the operations on a key have no order in which the sequential cache does the same.
    pub(super) fn check(&self) {
        let all = self.shared.operations.lock().unwrap();
        for block in 0..KEYS {
            let mut operations: Vec<Operation> = all
                .iter()
                .filter(|(of, _)| *of == block)
                .map(|(_, operation)| *operation)
                .collect();
            operations.sort_by_key(|operation| operation.begun);
            let mut search = Search { operations: &operations, tried: HashSet::new(), furthest: 0 };
            assert!(
                search.explains(0, State::ABSENT),
                "no order explains key {block} beyond {} of {} operations: {operations:#?}",
                search.furthest,
                operations.len()
            );
        }
    }
}

struct Search<'a> {
    operations: &'a [Operation],
    /// Dead ends: which operations were done, and the state they led to.
    tried: HashSet<(u128, State)>,
    furthest: u32,
}

impl Search<'_> {
    /// `done` has a bit for each operation.
    fn explains(&mut self, done: u128, state: State) -> bool {
        assert!(self.operations.len() <= 128, "a history too long for this search");
        self.furthest = self.furthest.max(done.count_ones());
        if done.count_ones() as usize == self.operations.len() {
            return true;
        }
        if !self.tried.insert((done, state)) {
            return false;
        }
        let left = |index: &usize| done & (1 << index) == 0;
        let open: Vec<usize> = (0..self.operations.len()).filter(left).collect();
        // What begins after another has ended comes after it.
        let first_end = open.iter().map(|i| self.operations[*i].ended).min().unwrap_or(0);
        let next = open.into_iter().filter(|i| self.operations[*i].begun < first_end);
        for index in Vec::from_iter(next) {
            let did = self.operations[index].did;
            let states = [Some(state), state.evicted()];
            for after in states.into_iter().flatten().filter_map(|state| state.after(did)) {
                if self.explains(done | 1 << index, after) {
                    return true;
                }
            }
        }
        false
    }
}
