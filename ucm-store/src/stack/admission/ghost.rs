//! A model of a tier: keys without bytes, the least recently used one goes.
//!
//! **Invariant:** it holds at most `capacity` keys; the list has exactly those of the map.

use std::collections::HashMap;

/// No node.
const NONE: usize = usize::MAX;

/// The model.
#[derive(Debug)]
pub(super) struct Ghost {
    capacity: usize,
    places: HashMap<u64, usize>,
    nodes: Vec<Node>,
    newest: usize,
    oldest: usize,
}

#[derive(Clone, Copy, Debug)]
struct Node {
    key: u64,
    newer: usize,
    older: usize,
}

impl Ghost {
    pub(super) fn new(capacity: u64) -> Self {
        let capacity = usize::try_from(capacity).unwrap_or(usize::MAX).max(1);
        Self { capacity, places: HashMap::new(), nodes: Vec::new(), newest: NONE, oldest: NONE }
    }

    /// A key is used; if it is not there, it is kept if `keep`. Says whether it was there.
    pub(super) fn used(&mut self, key: u64, keep: bool) -> bool {
        if let Some(at) = self.places.get(&key).copied() {
            self.unlink(at);
            self.link(at);
            return true;
        }
        if !keep {
            return false;
        }
        let at = if self.nodes.len() < self.capacity {
            self.nodes.push(Node { key, newer: NONE, older: NONE });
            self.nodes.len() - 1
        } else {
            let at = self.oldest;
            self.unlink(at);
            if let Some(node) = self.nodes.get_mut(at) {
                self.places.remove(&node.key);
                node.key = key;
            }
            at
        };
        self.places.insert(key, at);
        self.link(at);
        false
    }

    pub(super) fn is_full(&self) -> bool {
        self.nodes.len() >= self.capacity
    }

    fn link(&mut self, at: usize) {
        let newest = std::mem::replace(&mut self.newest, at);
        if let Some(node) = self.nodes.get_mut(at) {
            (node.newer, node.older) = (NONE, newest);
        }
        match self.nodes.get_mut(newest) {
            Some(node) => node.newer = at,
            None => self.oldest = at,
        }
    }

    fn unlink(&mut self, at: usize) {
        let Some(Node { newer, older, .. }) = self.nodes.get(at).copied() else { return };
        match self.nodes.get_mut(newer) {
            Some(node) => node.older = older,
            None => self.newest = older,
        }
        match self.nodes.get_mut(older) {
            Some(node) => node.newer = newer,
            None => self.oldest = newer,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::SplitMix;

    /// Broken on purpose: a hit does not renew; the newest goes.
    #[test]
    fn it_equals_a_plain_list() {
        let mut random = SplitMix::new(5);
        for capacity in 1..9 {
            let mut ghost = Ghost::new(capacity);
            let mut list: Vec<u64> = Vec::new();
            for _ in 0..2000 {
                let (key, keep) = (random.next() % 12, random.next().is_multiple_of(3));
                let known = list.iter().position(|k| *k == key);
                assert_eq!(ghost.used(key, keep), known.is_some());
                match known {
                    Some(at) => drop(list.remove(at)),
                    None if !keep => continue,
                    None if list.len() as u64 == capacity => drop(list.remove(0)),
                    None => {}
                }
                list.push(key);
            }
        }
    }
}
