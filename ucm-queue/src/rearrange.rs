//! The order in which a rank visits the shards of a task.
//!
//! **Invariant:** for every rank the order is a permutation of `0..len`, and in the first
//! `len / ranks` steps no two ranks visit the same shard.

use std::iter::FusedIterator;

/// Order of rank `rank` of `ranks` over `len` shards: `rank`, `rank + ranks`, … and then the other
/// strides in turn. A `ranks` of zero counts as one; `rank` is taken modulo `ranks`.
#[must_use]
pub fn rearrange(len: usize, ranks: usize, rank: usize) -> Rearrange {
    let ranks = ranks.max(1);
    let start = rank % ranks;
    Rearrange { len, ranks, stride: start, next: start, left: len }
}

/// Iterator made by [`rearrange`].
#[derive(Clone, Debug)]
pub struct Rearrange {
    len: usize,
    ranks: usize,
    stride: usize,
    next: usize,
    left: usize,
}

impl Iterator for Rearrange {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        if self.left == 0 {
            return None;
        }
        while self.next >= self.len {
            self.stride = (self.stride + 1) % self.ranks;
            self.next = self.stride;
        }
        let shard = self.next;
        self.next = self.next.saturating_add(self.ranks);
        self.left -= 1;
        Some(shard)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for Rearrange {}
impl FusedIterator for Rearrange {}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn r1_every_order_is_a_permutation() {
        for len in 0..=200 {
            for ranks in 1..=16 {
                for rank in 0..ranks {
                    let order: Vec<usize> = rearrange(len, ranks, rank).collect();
                    let mut sorted = order.clone();
                    sorted.sort_unstable();
                    assert_eq!(
                        sorted,
                        (0..len).collect::<Vec<_>>(),
                        "{len} {ranks} {rank}: {order:?}"
                    );
                    assert_eq!(rearrange(len, ranks, rank).len(), len);
                }
            }
        }
    }

    #[test]
    fn r1_strides_follow_each_other() {
        let order: Vec<usize> = rearrange(10, 4, 2).collect();
        assert_eq!(order, [2, 6, 3, 7, 0, 4, 8, 1, 5, 9]);
    }

    #[test]
    fn r2_ranks_visit_different_shards_at_each_step() {
        for len in 0..=200 {
            for ranks in 1..=16 {
                let orders: Vec<Vec<usize>> =
                    (0..ranks).map(|rank| rearrange(len, ranks, rank).collect()).collect();
                for step in 0..len / ranks {
                    let seen: HashSet<usize> = orders.iter().map(|order| order[step]).collect();
                    assert_eq!(seen.len(), ranks, "len {len}, ranks {ranks}, step {step}");
                }
            }
        }
    }
}
