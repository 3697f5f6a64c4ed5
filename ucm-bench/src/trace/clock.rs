//! CLOCK with second chance.
//!
//! Owns: slots, accessed bits and the cursor, as the node cache has them for one rank that pins
//! nothing for long.
//! **Invariant:** a search ends within one lap and one slot: the lap clears every bit.

use super::simulate::Policy;

const NONE: u32 = u32::MAX;

/// The model. Free slots are filled in order before anything is evicted.
#[derive(Debug, Clone)]
pub(super) struct Clock {
    slot_of: Vec<u32>,
    blocks: Vec<u32>,
    bits: Vec<bool>,
    cursor: usize,
    capacity: usize,
    bit_on_load: bool,
}

impl Clock {
    pub(super) fn new(capacity: usize, unique: usize, bit_on_load: bool) -> Self {
        Self {
            slot_of: vec![NONE; unique],
            blocks: Vec::with_capacity(capacity),
            bits: Vec::with_capacity(capacity),
            cursor: 0,
            capacity,
            bit_on_load,
        }
    }

    /// Clears bits from the cursor on until a slot without one is found; moves the cursor past it.
    fn victim(&mut self) -> usize {
        loop {
            let slot = self.cursor;
            self.cursor = (slot + 1) % self.capacity;
            match self.bits.get_mut(slot) {
                Some(bit) if *bit => *bit = false,
                _ => return slot,
            }
        }
    }

    fn slot(&self, block: u32) -> Option<usize> {
        let slot = *self.slot_of.get(block as usize)?;
        (slot != NONE).then_some(slot as usize)
    }

    fn place(&mut self, block: u32, slot: usize) {
        if let Some(place) = self.slot_of.get_mut(block as usize) {
            *place = u32::try_from(slot).unwrap_or(NONE);
        }
    }
}

impl Policy for Clock {
    fn contains(&self, block: u32) -> bool {
        self.slot(block).is_some()
    }

    fn hit(&mut self, block: u32, _next_use: u32) {
        let slot = self.slot(block);
        if let Some(bit) = slot.and_then(|slot| self.bits.get_mut(slot)) {
            *bit = true;
        }
    }

    fn load(&mut self, block: u32, _next_use: u32) {
        if self.blocks.len() < self.capacity {
            self.place(block, self.blocks.len());
            self.blocks.push(block);
            self.bits.push(self.bit_on_load);
            return;
        }
        let slot = self.victim();
        if let (Some(old), Some(bit)) = (self.blocks.get_mut(slot), self.bits.get_mut(slot)) {
            let gone = std::mem::replace(old, block);
            *bit = self.bit_on_load;
            if let Some(place) = self.slot_of.get_mut(gone as usize) {
                *place = NONE;
            }
        }
        self.place(block, slot);
    }
}

#[cfg(test)]
mod tests {
    use super::{Clock, Policy};

    const A: u32 = 0;
    const B: u32 = 1;
    const C: u32 = 2;
    const D: u32 = 3;
    const E: u32 = 4;
    const F: u32 = 5;

    /// Scenario C of the cache's specification.
    #[test]
    fn c1_model_follows_scenario_c() {
        let mut clock = Clock::new(4, 6, true);
        for block in [A, B, C, D] {
            clock.load(block, 0);
        }
        assert_eq!((clock.bits.as_slice(), clock.cursor), ([true; 4].as_slice(), 0));
        clock.load(E, 0);
        assert_eq!(clock.blocks, [E, B, C, D]);
        assert_eq!(
            (clock.bits.as_slice(), clock.cursor),
            ([true, false, false, false].as_slice(), 1)
        );
        clock.hit(B, 0);
        clock.load(F, 0);
        assert_eq!(clock.blocks, [E, B, F, D]);
        assert_eq!(
            (clock.bits.as_slice(), clock.cursor),
            ([true, false, true, false].as_slice(), 3)
        );
        assert!(!clock.contains(A) && !clock.contains(C) && clock.contains(D));
    }

    #[test]
    fn a_load_without_a_bit_has_no_second_chance() {
        let mut clock = Clock::new(2, 4, false);
        clock.load(A, 0);
        clock.load(B, 0);
        clock.hit(A, 0);
        clock.load(C, 0);
        assert_eq!(clock.blocks, [A, C]);
        clock.load(D, 0);
        assert_eq!(clock.blocks, [D, C]);
    }
}
