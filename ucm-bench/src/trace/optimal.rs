//! Belady's optimum with bypass: what no policy can beat.
//!
//! Owns: a heap of residents by next use, with stale entries left in place until they surface.
//! **Invariant:** among residents and the newcomer, the one used last in the future is not kept.

use std::{cmp::Reverse, collections::BinaryHeap};

use super::simulate::{NEVER, Policy};

/// The model: n log n over a whole trace.
#[derive(Debug, Clone)]
pub(super) struct Optimal {
    /// Next use and order of arrival of each resident block.
    resident: Vec<Option<(u32, u64)>>,
    /// Latest next use first; of equals, the one that came first (the deeper of one chain).
    heap: BinaryHeap<(u32, Reverse<u64>, u32)>,
    residents: usize,
    capacity: usize,
    arrivals: u64,
}

impl Optimal {
    pub(super) fn new(capacity: usize, unique: usize) -> Self {
        Self {
            resident: vec![None; unique],
            heap: BinaryHeap::new(),
            residents: 0,
            capacity,
            arrivals: 0,
        }
    }

    fn keep(&mut self, block: u32, next_use: u32) {
        self.arrivals += 1;
        if let Some(entry) = self.resident.get_mut(block as usize) {
            self.residents += usize::from(entry.is_none());
            *entry = Some((next_use, self.arrivals));
            self.heap.push((next_use, Reverse(self.arrivals), block));
        }
    }

    fn drop_block(&mut self, block: u32) {
        if let Some(entry) = self.resident.get_mut(block as usize) {
            self.residents -= usize::from(entry.take().is_some());
        }
    }

    /// The resident that is used last in the future.
    fn latest(&mut self) -> Option<(u32, u32)> {
        while let Some((next_use, Reverse(arrival), block)) = self.heap.peek().copied() {
            if self.resident.get(block as usize) == Some(&Some((next_use, arrival))) {
                return Some((block, next_use));
            }
            self.heap.pop();
        }
        None
    }
}

impl Policy for Optimal {
    fn contains(&self, block: u32) -> bool {
        matches!(self.resident.get(block as usize), Some(Some(_)))
    }

    fn hit(&mut self, block: u32, next_use: u32) {
        if next_use == NEVER { self.drop_block(block) } else { self.keep(block, next_use) }
    }

    fn load(&mut self, block: u32, next_use: u32) {
        if next_use == NEVER {
            return;
        }
        if self.residents == self.capacity {
            match self.latest() {
                Some((latest, when)) if when >= next_use => self.drop_block(latest),
                _ => return,
            }
        }
        self.keep(block, next_use);
    }
}
