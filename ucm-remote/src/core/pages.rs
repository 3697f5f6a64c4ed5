//! Which pages of a medium are free.
//!
//! **Invariant:** a page is handed out once until it is given back; the summary has a bit exactly for
//! each word with a free page.

/// A set of free pages: a bit each, and a bit for each word of them, so that a search skips 4,096 full
/// pages at a time.
#[derive(Clone, Debug)]
pub struct FreePages {
    /// 1 = free.
    words: Vec<u64>,
    /// 1 = its word has a free page.
    summary: Vec<u64>,
    free: u32,
    pages: u32,
    /// Where the next search begins.
    hand: u32,
}

impl FreePages {
    /// All of `pages` free.
    #[must_use]
    pub fn new(pages: u32) -> Self {
        let count = pages as usize;
        let mut all = Self {
            words: vec![0; count.div_ceil(64)],
            summary: vec![0; count.div_ceil(64 * 64)],
            free: 0,
            pages,
            hand: 0,
        };
        (0..pages).for_each(|page| all.set(page));
        all
    }

    /// Free pages.
    #[must_use]
    pub fn free(&self) -> u32 {
        self.free
    }

    /// All pages.
    #[must_use]
    pub fn pages(&self) -> u32 {
        self.pages
    }

    /// Takes `count` pages, one run of them where there is one near the hand, else what is free in
    /// ascending order from there. `None`, without effect, when fewer are free.
    pub fn take(&mut self, count: u32) -> Option<Box<[u32]>> {
        if count > self.free {
            return None;
        }
        let taken: Box<[u32]> = match self.find_run(count) {
            Some(start) => (start..start + count).collect(),
            None => {
                let from_hand = self.iter_from(self.hand);
                from_hand.chain(self.iter_from(0)).take(count as usize).collect()
            }
        };
        taken.iter().for_each(|page| self.clear(*page));
        self.hand = taken.last().map_or(0, |last| (last + 1) % self.pages.max(1));
        Some(taken)
    }

    /// Gives pages back. False for a page that is free already or none of this medium; the others are
    /// free then.
    pub fn give(&mut self, pages: &[u32]) -> bool {
        let mut good = true;
        for page in pages {
            if *page < self.pages && !self.is_free(*page) {
                self.set(*page);
            } else {
                good = false;
            }
        }
        good
    }

    /// Whether a page is free.
    #[must_use]
    pub fn is_free(&self, page: u32) -> bool {
        bit(&self.words, page)
    }

    /// Runs are looked for among the next free pages only: a search that always succeeds somewhere
    /// would visit a fragmented medium to the end each time, to gain one descriptor.
    fn find_run(&self, count: u32) -> Option<u32> {
        const TRIES: usize = 4096;
        let (mut start, mut len) = (0, 0);
        for page in self.iter_from(self.hand).chain(self.iter_from(0)).take(TRIES) {
            if len > 0 && page == start + len {
                len += 1;
            } else {
                (start, len) = (page, 1);
            }
            if len == count {
                return Some(start);
            }
        }
        None
    }

    /// Free pages from here to the end.
    fn iter_from(&self, from: u32) -> impl Iterator<Item = u32> + '_ {
        let mut at = from;
        std::iter::from_fn(move || {
            let page = self.next_free(at)?;
            at = page + 1;
            Some(page)
        })
    }

    fn next_free(&self, from: u32) -> Option<u32> {
        let word = from / 64;
        let here = self.words.get(word as usize)? & (u64::MAX << (from % 64));
        if here != 0 {
            return Some(word * 64 + here.trailing_zeros());
        }
        let next = next_bit(&self.summary, word + 1)?;
        let bits = self.words.get(next as usize)?;
        Some(next * 64 + bits.trailing_zeros())
    }

    fn set(&mut self, page: u32) {
        let word = page / 64;
        if let Some(bits) = self.words.get_mut(word as usize) {
            *bits |= 1 << (page % 64);
            self.free += 1;
        }
        if let Some(bits) = self.summary.get_mut(word as usize / 64) {
            *bits |= 1 << (word % 64);
        }
    }

    fn clear(&mut self, page: u32) {
        let word = page / 64;
        let Some(bits) = self.words.get_mut(word as usize) else { return };
        *bits &= !(1 << (page % 64));
        self.free -= 1;
        if *bits == 0
            && let Some(summary) = self.summary.get_mut(word as usize / 64)
        {
            *summary &= !(1 << (word % 64));
        }
    }
}

fn bit(words: &[u64], at: u32) -> bool {
    words.get(at as usize / 64).is_some_and(|word| word & (1 << (at % 64)) != 0)
}

fn next_bit(words: &[u64], from: u32) -> Option<u32> {
    let mut word = from / 64;
    let mut mask = u64::MAX << (from % 64);
    loop {
        let bits = words.get(word as usize)? & mask;
        if bits != 0 {
            return Some(word * 64 + bits.trailing_zeros());
        }
        word += 1;
        mask = u64::MAX;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_where_there_are_some_and_scattered_pages_else() {
        let mut pages = FreePages::new(10);
        assert_eq!(pages.take(3).unwrap().as_ref(), [0, 1, 2]);
        assert_eq!(pages.take(5).unwrap().as_ref(), [3, 4, 5, 6, 7]);
        assert!(pages.give(&[1, 3, 4, 6]));
        assert_eq!(pages.take(2).unwrap().as_ref(), [8, 9], "from the hand");
        assert_eq!(pages.take(2).unwrap().as_ref(), [3, 4], "a run");
        assert_eq!(pages.take(3), None);
        assert_eq!(pages.free(), 2);
        assert_eq!(pages.take(2).unwrap().as_ref(), [6, 1], "scattered, from the hand on");
        assert!(!pages.give(&[6, 6, 10]), "twice, and none of ours");
        assert_eq!((pages.free(), pages.is_free(6), pages.is_free(10)), (1, true, false));
    }

    /// Against a plain vector, over sizes around the words' ends.
    #[test]
    fn every_page_is_handed_out_once() {
        let mut random = 88_172_645_463_325_252_u64;
        let mut next = move |below: u32| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            u32::try_from(random % u64::from(below.max(1))).unwrap()
        };
        for size in [0, 1, 63, 64, 65, 4095, 4096, 4097, 10_000] {
            let mut pages = FreePages::new(size);
            let mut held: Vec<Box<[u32]>> = Vec::new();
            let mut owned = vec![false; size as usize];
            for _ in 0..300 {
                if next(2) == 0 && !held.is_empty() {
                    let back = held.swap_remove(next(u32::try_from(held.len()).unwrap()) as usize);
                    back.iter().for_each(|page| owned[*page as usize] = false);
                    assert!(pages.give(&back));
                } else {
                    let count = 1 + next(size / 4 + 1);
                    let enough = pages.free() >= count;
                    let taken = pages.take(count);
                    assert_eq!(taken.is_some(), enough);
                    for page in taken.iter().flatten() {
                        assert!(!std::mem::replace(&mut owned[*page as usize], true));
                    }
                    held.extend(taken);
                }
                let used = owned.iter().filter(|owned| **owned).count();
                assert_eq!(pages.free() as usize, size as usize - used);
            }
        }
    }
}
