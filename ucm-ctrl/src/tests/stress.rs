//! Everything at once, with a byte oracle: what a pin shows is always what the fill of exactly that
//! key and generation wrote.
//!
//! **Invariant:** the "memory" of a slot is written by its owner only, between acquire and the last
//! token, and read under a pin only.

use std::thread;

use super::kit::*;
use crate::{
    Acquired, Control, FailKind, Fill, Key, Pin, Pool, PoolGeometry, PoolId, WaitOutcome,
    sync::{AtomicU64, Ordering},
};

const WORDS: usize = 8;

struct Memory(Vec<[AtomicU64; WORDS]>);

/// The word that belongs to (key, generation, offset).
fn word(key: &Key, generation: u64, offset: usize) -> u64 {
    let (lo, _) = key.block.halves();
    let mut x = lo.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(key.shard) << 32;
    x = (x ^ generation).wrapping_mul(0xd6e8_feb8_6659_fd93) ^ offset as u64;
    x ^ (x >> 29)
}

impl Memory {
    fn new(slots: u32) -> Self {
        Self((0..slots).map(|_| Default::default()).collect())
    }

    /// Relaxed: publishing must be what makes the words visible.
    fn write(&self, fill: &Fill, key: &Key) {
        for (offset, to) in self.0[fill.slot().0 as usize].iter().enumerate() {
            to.store(word(key, fill.generation(), offset), Ordering::Relaxed);
        }
    }

    fn spoil(&self, slot: u32) {
        for to in &self.0[slot as usize] {
            to.store(u64::MAX, Ordering::Relaxed);
        }
    }

    fn check(&self, pin: &Pin, key: &Key) {
        for (offset, from) in self.0[pin.slot().0 as usize].iter().enumerate() {
            let found = from.load(Ordering::Relaxed);
            assert_eq!(found, word(key, pin.generation(), offset), "{key:?} word {offset} {pin:?}");
        }
    }
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, n: u64) -> u64 {
        (self.next() >> 11) % n
    }
}

/// One user: random operations, everything it sees is checked.
fn work(pool: &Pool, memory: &Memory, keys: u64, shards: u32, rounds: u32, random: &mut Random) {
    let mut pins: Vec<(Pin, Key)> = Vec::new();
    let mut tokens = Vec::new();
    for _ in 0..rounds {
        let key = shard(random.below(keys), u32::try_from(random.below(shards.into())).unwrap());
        match random.below(100) {
            0..=2 => drop(pool.prealloc(&key).unwrap()),
            3 => drop(pool.remove(&key).unwrap()),
            4 => drop(pool.touch(&[key.block]).unwrap()),
            5 => drop(pool.prefix_lookup(&[key]).unwrap()),
            _ => match pool.acquire(&key).unwrap() {
                Acquired::Hit(pin) => keep(pin, key, &mut pins, memory, random),
                Acquired::Full => pins.clear(),
                Acquired::Waiter(waiter) => {
                    let soon = std::time::Instant::now() + std::time::Duration::from_millis(20);
                    if waiter.wait(Some(soon)) == WaitOutcome::Ready
                        && let Ok(pin) = waiter.into_pin()
                    {
                        keep(pin, key, &mut pins, memory, random);
                    }
                }
                Acquired::Owner(fill) => {
                    memory.write(&fill, &key);
                    match random.below(20) {
                        0 => fill.fail(FailKind::Io),
                        1 => {
                            memory.spoil(fill.slot().0);
                            fill.abandon_draining(FailKind::Deadline);
                        }
                        2 => {
                            let slot = fill.slot().0;
                            tokens.push((fill.start_io(), slot));
                        }
                        _ => keep(fill.publish().unwrap(), key, &mut pins, memory, random),
                    }
                }
            },
        }
        if tokens.len() > 2 || random.below(8) == 0 {
            // The late writes of operations that were given up.
            for (token, slot) in tokens.drain(..) {
                memory.spoil(slot);
                drop(token);
            }
        }
        if random.below(4) == 0 && !pins.is_empty() {
            let at = random.below(pins.len() as u64);
            let (pin, key) = pins.swap_remove(usize::try_from(at).unwrap());
            memory.check(&pin, &key);
        }
    }
    for (token, slot) in tokens {
        memory.spoil(slot);
        drop(token);
    }
    for (pin, key) in pins {
        memory.check(&pin, &key);
    }
}

fn keep(pin: Pin, key: Key, pins: &mut Vec<(Pin, Key)>, memory: &Memory, random: &mut Random) {
    memory.check(&pin, &key);
    if pins.len() < 3 && random.below(2) == 0 {
        pins.push((pin, key));
    }
}

/// `threads` members; each leaves and joins again a few times.
fn storm(pool: PoolGeometry, mask: u64, keys: u64, threads: u64, seed: u64) {
    let shards = pool.shards_per_block;
    let memory = Memory::new(pool.total());
    let control: Control = narrow(pool, mask);
    let shared = super::kit::pool(&control);
    thread::scope(|scope| {
        for thread in 0..threads {
            let (control, memory, shared) = (&control, &memory, &shared);
            scope.spawn(move || {
                let mut random = Random(seed * 1000 + thread + 1);
                for _ in 0..10 {
                    // Some members have several threads.
                    let own = rank(control).pool(PoolId(0)).unwrap();
                    let pool = if random.below(3) == 0 { shared } else { &own };
                    work(pool, memory, keys, shards, 2_000, &mut random);
                }
            });
        }
    });
    drop(shared);
    assert_eq!(control.inspect().members.len(), 0);
    assert_at_rest(&control);
    let counts = control.statistics();
    assert!(counts.hits > 0 && counts.evictions > 0 && counts.drains > 0, "{counts:?}");
}

#[test]
fn storm_under_pressure() {
    storm(geometry(8, 2, 3), u64::MAX, 6, 4, 1);
}

#[test]
fn storm_with_many_slots() {
    storm(geometry(100, 10, 2), u64::MAX, 80, 4, 2);
}

#[test]
fn a60_storm_with_one_bucket_for_all() {
    storm(geometry(24, 2, 1), 0, 40, 4, 3);
}

#[test]
fn a60_storm_with_8_bits_of_hash() {
    storm(geometry(200, 0, 2), 0xff, 130, 4, 4);
}

#[test]
fn c6_storm_on_two_slots() {
    storm(geometry(2, 0, 1), u64::MAX, 3, 4, 5);
}

/// C7: many search at once; no slot is given to two, and nobody runs more than two laps.
#[test]
fn c7_sweeps_at_once_have_different_victims() {
    const SLOTS: u64 = 64;
    let control = cache(64);
    let pools: Vec<_> = (0..8).map(|_| pool(&control)).collect();
    let barrier = std::sync::Barrier::new(pools.len());
    for round in 0..200_u64 {
        for k in 0..SLOTS {
            let known = pools[0].acquire(&key(1_000_000 * (round + 1) + k)).unwrap();
            if let Acquired::Owner(fill) = known {
                drop(fill.publish().unwrap());
            }
        }
        let before = control.statistics();
        let mut fills: Vec<Fill> = thread::scope(|scope| {
            let threads: Vec<_> = (0..8_u64)
                .map(|t| {
                    let (pool, barrier) = (&pools[usize::try_from(t).unwrap()], &barrier);
                    scope.spawn(move || {
                        barrier.wait();
                        let mine = |k| key(1_000_000 * (round + 1) + 1000 * (t + 1) + k);
                        (0..8).map(|k| own(pool, &mine(k))).collect::<Vec<_>>()
                    })
                })
                .collect();
            threads.into_iter().flat_map(|t| t.join().unwrap()).collect()
        });
        fills.sort_by_key(Fill::slot);
        fills.dedup_by_key(|fill| fill.slot());
        assert_eq!(fills.len() as u64, SLOTS, "round {round}: a slot was given to two");
        let after = control.statistics();
        let searches = after.victim_searches - before.victim_searches;
        let steps = after.victim_steps - before.victim_steps;
        assert!(steps <= searches * 2 * SLOTS, "{steps} steps in {searches} searches");
    }
    assert_at_rest(&control);
}
