//! The reference model: a plain, single-threaded cache that says what every operation must do.
//!
//! **Invariant:** after every operation residents, states, pins, bits and hands of the real cache
//! equal the model's, whatever the pool size and however many keys share a hash.

use proptest::prelude::*;

use super::kit::*;
use crate::{
    Acquired, Control, FailKind, Fill, IoToken, Key, Member, Phase, Pin, Pool, PoolId, Prealloc,
    Presence, Removal, Waiter, sync::Ordering,
};

#[derive(Clone, Debug, PartialEq)]
struct Cell {
    phase: Phase,
    key: Option<Key>,
    pins: u32,
    bit: bool,
}

struct Model {
    cells: Vec<Cell>,
    regular: usize,
    shards_per_block: u32,
    hand: usize,
    reserved_hand: usize,
}

#[derive(Debug, PartialEq)]
enum Got {
    Hit(usize),
    Owner(usize),
    Waiter(usize),
    Full,
}

impl Model {
    fn new(slots: u32, reserved: u32, shards_per_block: u32) -> Self {
        let cell = Cell { phase: Phase::Free, key: None, pins: 0, bit: false };
        Self {
            cells: vec![cell; (slots + reserved) as usize],
            regular: slots as usize,
            shards_per_block,
            hand: 0,
            reserved_hand: 0,
        }
    }

    fn find(&self, key: &Key) -> Option<usize> {
        self.cells.iter().position(|c| c.key == Some(*key) && c.phase.is_resident())
    }

    fn evictable(&self, at: usize) -> bool {
        self.cells[at].phase.is_evictable() && self.cells[at].pins == 0
    }

    fn free(&self, range: std::ops::Range<usize>) -> Option<usize> {
        let free = |c: &Cell| c.phase == Phase::Free && c.pins == 0;
        range.into_iter().find(|at| free(&self.cells[*at]))
    }

    fn acquire(&mut self, key: &Key) -> Got {
        let (at, got): (usize, fn(usize) -> Got) = match self.find(key) {
            Some(at) => match self.cells[at].phase {
                Phase::Ready => (at, Got::Hit),
                Phase::Filling => (at, Got::Waiter),
                _ => (at, Got::Owner),
            },
            None => match self.free(0..self.regular).or_else(|| self.sweep()) {
                Some(at) => (at, Got::Owner),
                None => return Got::Full,
            },
        };
        let cell = &mut self.cells[at];
        cell.pins += 1;
        if got(at) != Got::Waiter(at) {
            cell.bit = true;
        }
        if got(at) == Got::Owner(at) {
            cell.phase = Phase::Filling;
            cell.key = Some(*key);
        }
        got(at)
    }

    fn sweep(&mut self) -> Option<usize> {
        for lap in 0..2 {
            for _ in 0..self.regular {
                let at = self.hand;
                self.hand = (self.hand + 1) % self.regular;
                if self.evictable(at) {
                    if lap == 0 && self.cells[at].bit {
                        self.cells[at].bit = false;
                    } else {
                        return Some(at);
                    }
                }
            }
        }
        None
    }

    fn prealloc(&mut self, key: &Key) -> Prealloc {
        if key.shard >= self.shards_per_block {
            return Prealloc::NoSuchShard;
        }
        if self.find(key).is_some() {
            return Prealloc::Resident;
        }
        let cold = |m: &Self| {
            (0..m.regular)
                .map(|step| (m.hand + step) % m.regular)
                .find(|at| m.evictable(*at) && !m.cells[*at].bit)
        };
        let regular = self.free(0..self.regular).or_else(|| cold(self));
        let total = self.cells.len();
        let reserved = |m: &mut Self| m.free(m.regular..total).or_else(|| m.sweep_reserved());
        let Some(at) = regular.or_else(|| reserved(self)) else { return Prealloc::NoSlot };
        let pins = self.cells[at].pins;
        self.cells[at] = Cell { phase: Phase::Idle, key: Some(*key), pins, bit: true };
        if at < self.regular { Prealloc::Made } else { Prealloc::MadeReserved }
    }

    fn sweep_reserved(&mut self) -> Option<usize> {
        let reserved = self.cells.len() - self.regular;
        for _ in 0..reserved {
            let at = self.regular + self.reserved_hand % reserved;
            self.reserved_hand += 1;
            if self.evictable(at) {
                if self.cells[at].bit {
                    self.cells[at].bit = false;
                } else {
                    return Some(at);
                }
            }
        }
        None
    }

    fn remove(&mut self, key: &Key) -> Removal {
        match self.find(key) {
            None => Removal::Absent,
            Some(at) if !self.evictable(at) => Removal::InUse,
            Some(at) => {
                self.cells[at].phase = Phase::Free;
                Removal::Removed
            }
        }
    }

    fn presence(&self, key: &Key) -> Presence {
        match self.find(key).map(|at| self.cells[at].phase) {
            Some(Phase::Ready) => Presence::Ready,
            Some(Phase::Filling) => Presence::Filling,
            _ => Presence::Absent,
        }
    }
}

/// Something in the hands of a user of the cache, and the cell it pins.
enum Held {
    Pin(usize, Pin),
    Waiter(usize, Waiter),
    Fill(usize, Fill, Option<IoToken>),
    Token(usize, IoToken),
}

#[derive(Clone, Debug)]
enum Op {
    Acquire(u8, usize),
    Publish(usize),
    Fail(usize),
    Drop(usize),
    StartIo(usize),
    Abandon(usize),
    Touch(u8),
    Prealloc(u8, usize),
    Remove(u8),
}

fn op() -> impl Strategy<Value = Op> {
    let (any, k, who) = (any::<usize>(), any::<u8>(), 0_usize..2);
    prop_oneof![
        8 => (k, who.clone()).prop_map(|(k, w)| Op::Acquire(k, w)),
        4 => any.prop_map(Op::Publish),
        2 => any.prop_map(Op::Fail),
        5 => any.prop_map(Op::Drop),
        1 => any.prop_map(Op::StartIo),
        1 => any.prop_map(Op::Abandon),
        1 => k.prop_map(Op::Touch),
        3 => (k, who).prop_map(|(k, w)| Op::Prealloc(k, w)),
        1 => k.prop_map(Op::Remove),
    ]
}

struct Run {
    control: Control,
    members: [Member; 2],
    pools: [Pool; 2],
    model: Model,
    held: Vec<Held>,
    blocks: u64,
}

impl Run {
    fn new(slots: u32, reserved: u32, shards: u32, mask: u64) -> Self {
        let control = narrow(geometry(slots, reserved, shards), mask);
        let members = [rank(&control), rank(&control)];
        let pools = members.each_ref().map(|m| m.pool(PoolId(0)).unwrap());
        let model = Model::new(slots, reserved, shards);
        // Somewhat more keys than slots.
        let blocks = u64::from((slots + reserved) * 3 / (2 * shards) + 2);
        Self { control, members, pools, model, held: Vec::new(), blocks }
    }

    fn key(&self, k: u8) -> Key {
        let shards = u64::from(self.model.shards_per_block);
        let k = u64::from(k) % (self.blocks * shards);
        shard(k / shards, u32::try_from(k % shards).unwrap())
    }

    fn pick(&mut self, at: usize) -> Option<Held> {
        if self.held.is_empty() {
            return None;
        }
        let at = at % self.held.len();
        Some(self.held.swap_remove(at))
    }

    fn apply(&mut self, op: &Op) {
        match *op {
            Op::Acquire(k, who) => self.acquire(self.key(k), who),
            Op::Touch(k) => {
                let block = self.key(k).block;
                let mut renewed = 0;
                for cell in &mut self.model.cells {
                    if cell.phase.is_resident() && cell.key.is_some_and(|k| k.block == block) {
                        cell.bit = true;
                        renewed += 1;
                    }
                }
                assert_eq!(self.pools[0].touch(&[block]).unwrap(), renewed);
            }
            Op::Prealloc(k, who) => {
                let mut key = self.key(k);
                key.shard += u32::from(k % 7 == 0);
                let expected = self.model.prealloc(&key);
                assert_eq!(self.pools[who].prealloc(&key).unwrap(), expected);
            }
            Op::Remove(k) => {
                let key = self.key(k);
                assert_eq!(self.pools[1].remove(&key).unwrap(), self.model.remove(&key));
            }
            Op::Publish(at) | Op::Fail(at) | Op::Drop(at) | Op::StartIo(at) | Op::Abandon(at) => {
                if let Some(held) = self.pick(at) {
                    self.use_held(op, held);
                }
            }
        }
    }

    fn acquire(&mut self, key: Key, who: usize) {
        let (got, held) = match self.pools[who].acquire(&key).unwrap() {
            Acquired::Hit(pin) => {
                let at = pin.slot().0 as usize;
                (Got::Hit(at), Held::Pin(at, pin))
            }
            Acquired::Owner(fill) => {
                let at = fill.slot().0 as usize;
                (Got::Owner(at), Held::Fill(at, fill, None))
            }
            Acquired::Waiter(waiter) => {
                let at = waiter.slot().0 as usize;
                (Got::Waiter(at), Held::Waiter(at, waiter))
            }
            Acquired::Full => {
                assert_eq!(self.model.acquire(&key), Got::Full);
                return;
            }
        };
        assert_eq!(got, self.model.acquire(&key));
        self.held.push(held);
    }

    fn use_held(&mut self, op: &Op, held: Held) {
        let model = &mut self.model;
        match (op, held) {
            (Op::Publish(_), Held::Fill(at, fill, None)) => {
                model.cells[at].phase = Phase::Ready;
                self.held.push(Held::Pin(at, fill.publish().unwrap()));
            }
            (Op::Publish(_), Held::Fill(at, fill, token)) => {
                let back = match fill.publish() {
                    Err(crate::PublishError::IoInFlight(fill)) => fill,
                    other => panic!("published under operations in flight: {other:?}"),
                };
                self.held.push(Held::Fill(at, back, token));
            }
            (Op::StartIo(_), Held::Fill(at, fill, None)) => {
                let token = fill.start_io();
                self.held.push(Held::Fill(at, fill, Some(token)));
            }
            (Op::Abandon(_), Held::Fill(at, fill, None)) => {
                fill.abandon_draining(FailKind::Deadline);
                model.cells[at].phase = Phase::Free;
                model.cells[at].pins -= 1;
            }
            (_, Held::Fill(at, fill, Some(token))) if !matches!(op, Op::StartIo(_)) => {
                fill.fail(FailKind::Io);
                model.cells[at].phase = Phase::Draining;
                self.held.push(Held::Token(at, token));
            }
            (Op::Fail(_), Held::Fill(at, fill, None)) => {
                fill.fail(FailKind::Io);
                model.cells[at].phase = Phase::Failed;
                model.cells[at].pins -= 1;
            }
            (Op::Drop(_), Held::Fill(at, fill, None)) => {
                drop(fill);
                model.cells[at].phase = Phase::Failed;
                model.cells[at].pins -= 1;
            }
            (Op::Drop(_), Held::Pin(at, pin)) => {
                drop(pin);
                model.cells[at].pins -= 1;
            }
            (Op::Drop(_), Held::Waiter(at, waiter)) => {
                drop(waiter);
                model.cells[at].pins -= 1;
            }
            (Op::Drop(_), Held::Token(at, token)) => {
                drop(token);
                model.cells[at].phase = Phase::Free;
                model.cells[at].pins -= 1;
            }
            (_, other) => self.held.push(other),
        }
    }

    fn compare(&self) {
        let tables = tables(&self.control);
        for (at, cell) in self.model.cells.iter().enumerate() {
            let slot = &tables.slots[at];
            let index = u32::try_from(at).unwrap();
            assert_eq!(slot.load().phase(), cell.phase, "slot {at}");
            assert_eq!(slot.unpinned(), cell.pins == 0, "pins of slot {at}");
            assert_eq!(tables.is_marked(index), cell.bit, "bit of slot {at}");
            if cell.phase.is_resident() {
                assert_eq!(key_in(&self.control, index), cell.key, "key of slot {at}");
            }
        }
        assert_eq!(cursor(&self.control), self.model.hand as u64);
        let reserved = (self.model.cells.len() - self.model.regular).max(1) as u64;
        let hand = tables.hot().reserved_cursor.0.load(Ordering::SeqCst) % reserved;
        assert_eq!(hand, self.model.reserved_hand as u64 % reserved);
        let pins: u32 = self.model.cells.iter().map(|c| c.pins).sum();
        assert_eq!(self.members.iter().map(Member::pins_held).sum::<u64>(), u64::from(pins));
        let seen = self.control.inspect();
        assert_eq!(seen.problems, Vec::<String>::new());
        let shards = self.model.shards_per_block;
        let keys: Vec<_> =
            (0..self.blocks).flat_map(|b| (0..shards).map(move |s| shard(b, s))).collect();
        let mut found = vec![Presence::Absent; keys.len()];
        self.pools[0].lookup(&keys, &mut found).unwrap();
        let expected: Vec<_> = keys.iter().map(|key| self.model.presence(key)).collect();
        assert_eq!(found, expected);
        let prefix = expected.iter().take_while(|p| **p == Presence::Ready).count();
        assert_eq!(self.pools[1].prefix_lookup(&keys).unwrap(), prefix);
    }
}

fn check(slots: u32, reserved: u32, shards: u32, mask: u64, ops: &[Op]) {
    let mut run = Run::new(slots, reserved, shards, mask);
    for op in ops {
        run.apply(op);
        run.compare();
    }
    // Everybody lets go: nothing stays behind.
    while let Some(held) = run.held.pop() {
        if let Held::Fill(_, fill, token) = held {
            fill.fail(FailKind::Cancelled);
            drop(token);
        }
    }
    assert_at_rest(&run.control);
}

const ALL: u64 = u64::MAX;

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn c5_model_one_slot(ops in prop::collection::vec(op(), 1..150)) {
        check(1, 0, 1, ALL, &ops);
    }

    #[test]
    fn c5_model_few_slots(ops in prop::collection::vec(op(), 1..300), slots in 2_u32..9, reserved in 0_u32..4) {
        check(slots, reserved, 3, ALL, &ops);
    }

    #[test]
    fn c5_model_at_word_borders(ops in prop::collection::vec(op(), 1..400), slots in 64_u32..=65, reserved in 0_u32..2) {
        check(slots, reserved, 2, ALL, &ops);
    }

    #[test]
    fn a60_model_with_8_bits_of_hash(ops in prop::collection::vec(op(), 1..300), slots in 1_u32..80, reserved in 0_u32..4) {
        check(slots, reserved, 2, 0xff, &ops);
    }

    #[test]
    fn a60_model_with_the_same_hash_for_all(ops in prop::collection::vec(op(), 1..300), slots in 1_u32..80, reserved in 0_u32..4) {
        check(slots, reserved, 1, 0, &ops);
    }

    #[test]
    fn a60_model_with_equal_tags(ops in prop::collection::vec(op(), 1..300), slots in 1_u32..40) {
        check(slots, 0, 3, 0, &ops);
    }
}
