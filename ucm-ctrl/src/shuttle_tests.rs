//! Long histories under a random scheduler, held against a sequential cache (`cargo xtask shuttle`).
//!
//! loom explores every interleaving of a few steps; here three members do some dozen operations
//! each, switched between at any access of a shared word, and the whole history must be
//! *linearizable* (Herlihy and Wing, 1990): there is an order of the operations that respects their
//! real order and in which a plain cache (`spec`) answers the same. Exactly one owner, no lost
//! publish, no key that comes back from the dead, no pin on what another evicts: all follow.
//!
//! Memory is sequentially consistent here; weaker orders are loom's.
//!
//! **Invariant:** a history that was not completed (a lost wake-up, a hang) is a failure.
//!
//! Broken on purpose, and found: take-over by a plain store; no look at the key after the pin; no
//! look at the pins after a claim; no look under the lock before a link; the version not moved at
//! the end of a fill; a fill that fails becomes `Ready`.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod expulsion;
mod freeing;
mod history;
mod spec;

use shuttle::{
    Config, PortfolioRunner,
    rand::{Rng, thread_rng},
    scheduler::{PctScheduler, RandomScheduler},
    thread,
};

use self::{
    history::{History, Recorder},
    spec::Did,
};
use crate::{
    Acquired, BlockId, Control, FailKind, Fill, Geometry, Key, MemberSpec, Pin, Pool, PoolId,
    Prealloc, Removal, WaitOutcome, Waiter,
};

const MEMBERS: usize = 3;
const STEPS: usize = 12;
const KEYS: u64 = 3;

/// What a thread holds of a key.
enum Held {
    Pin(Pin),
    Fill(Fill),
    Waiter(Waiter),
}

struct Worker {
    pool: Pool,
    recorder: Recorder,
    held: Vec<(u64, Held)>,
}

fn key(block: u64) -> Key {
    Key::new(BlockId::from_halves(block, block), 0)
}

impl Worker {
    fn step(&mut self) {
        let block = thread_rng().gen_range(0..KEYS);
        match thread_rng().gen_range(0..10) {
            0..=4 => self.acquire(block),
            5 => self.remove(block),
            6 => self.prealloc(block),
            _ => {}
        }
        if !self.held.is_empty() && thread_rng().gen_range(0..3) > 0 {
            let which = thread_rng().gen_range(0..self.held.len());
            self.end(which);
        }
    }

    fn acquire(&mut self, block: u64) {
        let begun = self.recorder.begin(block);
        let got = self.pool.acquire(&key(block)).unwrap();
        let (did, held) = match got {
            Acquired::Hit(pin) => (Did::Hit(pin.generation()), Held::Pin(pin)),
            Acquired::Owner(fill) => (Did::Owner(fill.generation()), Held::Fill(fill)),
            Acquired::Waiter(waiter) => (Did::Waiter(waiter.generation()), Held::Waiter(waiter)),
            Acquired::Full => return self.recorder.forget(begun),
        };
        self.recorder.end(begun, did);
        self.held.push((block, held));
    }

    fn remove(&mut self, block: u64) {
        let begun = self.recorder.begin(block);
        match self.pool.remove(&key(block)).unwrap() {
            Removal::Removed => self.recorder.end(begun, Did::Removed),
            Removal::Absent => self.recorder.end(begun, Did::Absent),
            // Somebody may have held it for an instant.
            Removal::InUse => self.recorder.forget(begun),
        }
    }

    fn prealloc(&mut self, block: u64) {
        let begun = self.recorder.begin(block);
        match self.pool.prealloc(&key(block)).unwrap() {
            Prealloc::Made | Prealloc::MadeReserved => self.recorder.end(begun, Did::Made),
            _ => self.recorder.forget(begun),
        }
    }

    fn end(&mut self, which: usize) {
        let (block, held) = self.held.swap_remove(which);
        match held {
            Held::Pin(pin) => self.unpin(block, pin),
            Held::Fill(fill) => self.fill(block, fill),
            Held::Waiter(waiter) => self.wait(block, waiter),
        }
    }

    fn unpin(&self, block: u64, pin: Pin) {
        let begun = self.recorder.begin(block);
        drop(pin);
        self.recorder.end(begun, Did::Released);
    }

    fn fill(&mut self, block: u64, fill: Fill) {
        let generation = fill.generation();
        let begun = self.recorder.begin(block);
        if thread_rng().gen_range(0..3) == 0 {
            fill.fail(FailKind::Io);
            self.recorder.end(begun, Did::Failed(generation));
        } else {
            let pin = fill.publish().unwrap();
            assert_eq!(pin.generation(), generation);
            self.recorder.end(begun, Did::Published(generation));
            self.held.push((block, Held::Pin(pin)));
        }
    }

    fn wait(&mut self, block: u64, waiter: Waiter) {
        // Whoever holds a fill does not wait for others: they might wait for it.
        if !self.held.iter().any(|(_, held)| matches!(held, Held::Fill(_))) {
            let generation = waiter.generation();
            let begun = self.recorder.begin(block);
            let did = match waiter.wait(None) {
                WaitOutcome::Ready => Did::SawReady(generation),
                WaitOutcome::Failed(FailKind::Io) => Did::SawFailed(generation),
                other => panic!("{other:?}"),
            };
            self.recorder.end(begun, did);
        }
        let begun = self.recorder.begin(block);
        match waiter.into_pin() {
            Ok(pin) => {
                self.recorder.end(begun, Did::Pinned(pin.generation()));
                self.held.push((block, Held::Pin(pin)));
            }
            Err(waiter) => {
                drop(waiter);
                self.recorder.end(begun, Did::Released);
            }
        }
    }
}

/// One history, whatever the scheduler; checked at its end.
fn history(slots: u32) {
    let geometry = Geometry { leases: 0, ..Geometry::single(slots, 1, 1, 4096) };
    let control = Control::private(&geometry).unwrap();
    let history = History::default();
    let members = (0..MEMBERS).map(|_| {
        let member = control.join(MemberSpec::rank(0, 1)).unwrap();
        let pool = member.pool(PoolId(0)).unwrap();
        let recorder = history.recorder();
        thread::spawn(move || {
            let mut worker = Worker { pool, recorder, held: Vec::new() };
            for _ in 0..STEPS {
                worker.step();
            }
            while !worker.held.is_empty() {
                // Fills first: others may wait for them, and so may this thread.
                let fill = worker.held.iter().position(|(_, h)| matches!(h, Held::Fill(_)));
                worker.end(fill.unwrap_or(0));
            }
        })
    });
    Vec::from_iter(members).into_iter().for_each(|member| member.join().unwrap());
    history.check();
    assert_at_rest(&control);
}

fn assert_at_rest(control: &Control) {
    let seen = control.inspect();
    assert_eq!(seen.problems, Vec::<String>::new());
    let pool = &seen.pools[0];
    assert_eq!((pool.pinned, pool.filling, pool.draining, pool.moving), (0, 0, 0, 0));
}

/// So many histories for each scheduler and number of slots (`UCM_SHUTTLE_HISTORIES`).
fn histories() -> usize {
    let set = std::env::var("UCM_SHUTTLE_HISTORIES").ok();
    set.and_then(|text| text.parse().ok()).unwrap_or(2000)
}

fn run(slots: u32) {
    run_both(histories(), move || history(slots));
}

/// So many runs of each scheduler.
fn run_both(times: usize, test: impl Fn() + Send + Sync + 'static) {
    let mut config = Config::new();
    config.max_steps = shuttle::MaxSteps::FailAfter(2_000_000);
    let mut runner = PortfolioRunner::new(true, config);
    runner.add(RandomScheduler::new(times));
    // Few switches at the worst places (Burckhardt et al., 2010).
    runner.add(PctScheduler::new(4, times));
    runner.run(test);
}

#[test]
fn shuttle_histories_with_a_slot_for_each_key_are_linearizable() {
    run(3);
}

#[test]
fn shuttle_histories_with_evictions_are_linearizable() {
    run(1);
}
