//! A tier that does not keep everything.
//!
//! Owns: the least recently used of what a rule lets in; the rule is the tiers' own.
//! **Invariant:** each use of a block is told to the rule once.

use ucm_store::Admission;

use super::{lru::Lru, simulate::Policy};

/// The model.
#[derive(Debug)]
pub(super) struct Admitted {
    inner: Lru,
    rule: Rule,
}

#[derive(Debug)]
enum Rule {
    Models(Box<Admission>),
    /// Which blocks were used.
    SecondUse(Vec<bool>),
}

impl Admitted {
    /// As the stack of tiers does it.
    pub(super) fn by_models(capacity: usize, unique: usize) -> Self {
        let rule = Rule::Models(Box::new(Admission::new(capacity as u64)));
        Self { inner: Lru::new(capacity, unique), rule }
    }

    /// Only what was used before, however long ago.
    pub(super) fn second_use(capacity: usize, unique: usize) -> Self {
        Self { inner: Lru::new(capacity, unique), rule: Rule::SecondUse(vec![false; unique]) }
    }

    fn used(&mut self, block: u32) -> bool {
        match &mut self.rule {
            Rule::Models(admission) => {
                let mut id = [0; 16];
                let (first, _) = id.split_at_mut(4);
                first.copy_from_slice(&block.to_le_bytes());
                admission.used(&id, 0)
            }
            Rule::SecondUse(used) => {
                used.get_mut(block as usize).is_some_and(|known| std::mem::replace(known, true))
            }
        }
    }
}

impl Policy for Admitted {
    fn contains(&self, block: u32) -> bool {
        self.inner.contains(block)
    }

    fn hit(&mut self, block: u32, next_use: u32) {
        self.used(block);
        self.inner.hit(block, next_use);
    }

    fn load(&mut self, block: u32, next_use: u32) {
        if self.used(block) {
            self.inner.load(block, next_use);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Admitted, Policy};

    #[test]
    fn a_second_use_is_kept_a_first_one_is_not() {
        let mut model = Admitted::second_use(2, 10);
        model.load(3, 0);
        assert!(!model.contains(3));
        model.load(3, 0);
        assert!(model.contains(3));
        let mut model = Admitted::by_models(2, 10);
        model.load(3, 0);
        assert!(model.contains(3), "what fits is kept");
    }
}
