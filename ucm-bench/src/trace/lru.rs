//! Least recently used.
//!
//! Owns: a doubly linked list threaded through arrays.
//! **Invariant:** every operation takes constant time; the list holds exactly the residents.

use super::simulate::Policy;

/// The list's anchor: index 0 of the arrays, so block b stands at b + 1.
const ANCHOR: u32 = 0;
const ABSENT: u32 = u32::MAX;

/// The model.
#[derive(Debug, Clone)]
pub(super) struct Lru {
    /// (towards newer, towards older), `ABSENT` for blocks that are not resident.
    links: Vec<(u32, u32)>,
    residents: usize,
    capacity: usize,
}

impl Lru {
    pub(super) fn new(capacity: usize, unique: usize) -> Self {
        let mut links = vec![(ABSENT, ABSENT); unique + 1];
        if let Some(anchor) = links.first_mut() {
            *anchor = (ANCHOR, ANCHOR);
        }
        Self { links, residents: 0, capacity }
    }

    fn link(&self, node: u32) -> (u32, u32) {
        self.links.get(node as usize).copied().unwrap_or((ABSENT, ABSENT))
    }

    fn change(&mut self, node: u32, change: impl FnOnce(&mut (u32, u32))) {
        if let Some(link) = self.links.get_mut(node as usize) {
            change(link);
        }
    }

    fn unlink(&mut self, node: u32) {
        let (newer, older) = self.link(node);
        self.change(newer, |link| link.1 = older);
        self.change(older, |link| link.0 = newer);
        self.change(node, |link| *link = (ABSENT, ABSENT));
        self.residents -= 1;
    }

    fn push_newest(&mut self, node: u32) {
        let (_, newest) = self.link(ANCHOR);
        self.change(node, |link| *link = (ANCHOR, newest));
        self.change(newest, |link| link.0 = node);
        self.change(ANCHOR, |link| link.1 = node);
        self.residents += 1;
    }
}

impl Policy for Lru {
    fn contains(&self, block: u32) -> bool {
        self.link(block + 1).0 != ABSENT
    }

    fn hit(&mut self, block: u32, _next_use: u32) {
        self.unlink(block + 1);
        self.push_newest(block + 1);
    }

    fn load(&mut self, block: u32, _next_use: u32) {
        if self.residents == self.capacity {
            let (oldest, _) = self.link(ANCHOR);
            self.unlink(oldest);
        }
        self.push_newest(block + 1);
    }
}

#[cfg(test)]
mod tests {
    use super::{Lru, Policy};
    use crate::rng::Rng;

    #[test]
    fn equals_a_plain_list_on_random_uses() {
        let mut rng = Rng::new(3);
        for capacity in 1..8 {
            let mut lru = Lru::new(capacity, 12);
            let mut list: Vec<u32> = Vec::new();
            for _ in 0..500 {
                let block = u32::try_from(rng.below(12)).unwrap();
                let known = list.iter().position(|other| *other == block);
                assert_eq!(lru.contains(block), known.is_some());
                match known {
                    Some(at) => {
                        list.remove(at);
                        lru.hit(block, 0);
                    }
                    None => {
                        if list.len() == capacity {
                            list.remove(0);
                        }
                        lru.load(block, 0);
                    }
                }
                list.push(block);
            }
            assert!((0..12).all(|block| lru.contains(block) == list.contains(&block)));
        }
    }
}
