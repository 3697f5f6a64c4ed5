//! Processes that work, are killed anywhere, and are cleared up after, with a byte oracle in memory
//! that they share.
//!
//! **Invariant:** whoever reads a wrong word under a pin fails, and with it the test.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Instant,
};

use rustix::{
    fs::MemfdFlags,
    mm::{MapFlags, ProtFlags},
};
use ucm_ctrl::{
    Acquired, Control, FailKind, Geometry, Key, Member, MemberId, Pin, SlotId, WaitOutcome,
};

use crate::{
    child::{hear, say},
    from_environment, key,
    parent::{Proc, Proof, Shared},
    rank,
};

pub(crate) const SLOTS: u32 = 12;
pub(crate) const RESERVED: u32 = 2;
const KEYS: u64 = 30;
const WORDS: usize = 8;
/// The slots, and a word of progress for each seat.
const BYTES: usize = ((SLOTS + RESERVED) as usize * WORDS + ucm_ctrl::MAX_MEMBERS) * 8;

/// Slot memory shared by all processes.
pub(crate) struct Memory(&'static [AtomicU64]);

impl Memory {
    /// A memfd of the right size, for all processes.
    pub(crate) fn create() -> OwnedFd {
        let fd = rustix::fs::memfd_create("bytes", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, BYTES as u64).unwrap();
        fd
    }

    pub(crate) fn map(fd: impl AsFd) -> Self {
        let shared = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice, never unmapped.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), BYTES, shared, MapFlags::SHARED, fd, 0)
        };
        let base = base.unwrap().cast::<AtomicU64>();
        // SAFETY: page-aligned, as long as the file, atomics only, mapped for ever.
        Self(unsafe { std::slice::from_raw_parts(base, BYTES / 8) })
    }

    /// Steps done by the holders of a seat.
    #[cfg(feature = "failpoints")]
    pub(crate) fn progress(&self, seat: u8) -> &AtomicU64 {
        &self.0[(SLOTS + RESERVED) as usize * WORDS + usize::from(seat)]
    }

    fn slot(&self, slot: SlotId) -> &[AtomicU64] {
        &self.0[slot.0 as usize * WORDS..][..WORDS]
    }

    pub(crate) fn write(&self, slot: SlotId, word: impl Fn(usize) -> u64) {
        for (offset, to) in self.slot(slot).iter().enumerate() {
            to.store(word(offset), Ordering::Relaxed);
        }
    }

    pub(crate) fn check(&self, pin: &Pin, key: &Key) {
        for (offset, from) in self.slot(pin.slot()).iter().enumerate() {
            let found = from.load(Ordering::Relaxed);
            assert_eq!(found, word(key, pin.generation(), offset), "{key:?} {offset} {pin:?}");
        }
    }
}

pub(crate) fn word(key: &Key, generation: u64, offset: usize) -> u64 {
    let block = u128::from_le_bytes(key.block.0);
    let x = u64::try_from(block >> 64).unwrap() << 48 | generation << 8 | offset as u64;
    x.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % n
    }
}

/// In a child: works until the input is closed; clears up after a dead member when told.
pub(crate) fn child(control: &Control, memory: &str, seed: u64) {
    let file = std::fs::File::options().read(true).write(true).open(memory).unwrap();
    let memory = Memory::map(&file);
    let (member, pool) = rank(control);
    member.set_liveness(Arc::new(Proof(control.clone())));
    say(&format!("{} {}", member.id().0, member.generation()));
    let commands = {
        let member = member.clone();
        thread::spawn(move || {
            while let Some(seat) = hear() {
                let (seat, generation) = seat.split_once(' ').unwrap();
                let seat = MemberId(seat.parse().unwrap());
                let done = member.reap(seat, Some(generation.parse().unwrap())).done;
                say(&format!("reaped {done}"));
            }
        })
    };
    let mut random = Random(seed | 1);
    let mut pins: Vec<(Pin, Key)> = Vec::new();
    while !commands.is_finished() {
        let key = key(random.below(KEYS));
        match random.below(40) {
            0 => drop(pool.prealloc(&key).unwrap()),
            1 => drop(pool.remove(&key).unwrap()),
            2 => drop(pool.touch(&[key.block]).unwrap()),
            _ => {}
        }
        match pool.acquire(&key).unwrap() {
            Acquired::Hit(pin) => {
                memory.check(&pin, &key);
                pins.push((pin, key));
            }
            Acquired::Owner(fill) => {
                memory.write(fill.slot(), |offset| word(&key, fill.generation(), offset));
                match random.below(12) {
                    0 => fill.fail(FailKind::Io),
                    1 => {
                        let (slot, token) = (fill.slot(), fill.start_io());
                        drop(fill);
                        memory.write(slot, |_| u64::MAX);
                        drop(token);
                    }
                    _ => memory.check(&fill.publish().unwrap(), &key),
                }
            }
            Acquired::Waiter(waiter) => {
                let soon = Instant::now() + std::time::Duration::from_millis(50);
                if waiter.wait(Some(soon)) == WaitOutcome::Ready
                    && let Ok(pin) = waiter.into_pin()
                {
                    memory.check(&pin, &key);
                }
            }
            Acquired::Full => pins.clear(),
        }
        if pins.len() > 2 || random.below(3) == 0 {
            for (pin, key) in pins.drain(..) {
                memory.check(&pin, &key);
            }
        }
    }
    commands.join().unwrap();
}

struct Worker {
    process: Proc,
    seat: String,
}

impl Worker {
    fn start(control: &Shared, memory: &Shared, seed: u64) -> Self {
        let arguments = [memory.path(), seed.to_string()];
        let mut process = Proc::start("storm", control, &arguments);
        let seat = process.hear();
        Self { process, seat }
    }

    fn reap_by(&self, member: &Member) -> bool {
        let (seat, generation) = self.seat.split_once(' ').unwrap();
        member.reap(MemberId(seat.parse().unwrap()), Some(generation.parse().unwrap())).done
    }
}

/// D1 in part: kills at random moments, also of whoever clears up. `UCM_MP_KILLS` for more.
#[test]
fn d1_killed_anywhere_leaves_nothing_and_serves_no_wrong_byte() {
    let kills = from_environment("UCM_MP_KILLS", 60);
    let geometry = Geometry::single(SLOTS, RESERVED, 1, 64);
    let control = Control::create(&geometry, [3; 16]).unwrap();
    let (member, _) = rank(&control);
    member.set_liveness(Arc::new(Proof(control.clone())));
    let (region, memory) = (Shared::of(&control), Shared::new(Memory::create()));
    let mut random = Random(from_environment("UCM_MP_SEED", 77));
    let mut seeds = 1000;
    let mut start = || {
        seeds += 7;
        Worker::start(&region, &memory, seeds)
    };
    let mut workers: Vec<_> = (0..4).map(|_| start()).collect();
    for round in 0..kills {
        // Some progress, of any length.
        let goal = control.statistics().hits + random.below(3000);
        let begun = Instant::now();
        while control.statistics().hits < goal {
            assert!(begun.elapsed() < crate::WATCHDOG, "round {round}: nobody makes progress");
            thread::yield_now();
        }
        let mut dead = workers.swap_remove(usize::try_from(random.below(4)).unwrap());
        dead.process.kill();
        match random.below(3) {
            0 => assert!(dead.reap_by(&member)),
            1 => {
                workers[0].process.tell(&dead.seat);
                workers[0].process.expect("reaped true");
            }
            _ => {
                // The reaper is killed, too, perhaps on the way.
                let mut reaper = workers.swap_remove(0);
                reaper.process.tell(&dead.seat);
                for _ in 0..random.below(20_000) {
                    std::hint::spin_loop();
                }
                reaper.process.kill();
                assert!(reaper.reap_by(&member));
                // Nobody was at it, or it fell to us with the reaper.
                dead.reap_by(&member);
                workers.push(start());
            }
        }
        workers.push(start());
    }
    for worker in workers {
        assert!(worker.process.end().success(), "a worker has seen wrong bytes");
    }
    let seen = control.inspect();
    assert_eq!(seen.problems, Vec::<String>::new());
    let pool = &seen.pools[0];
    let left = (pool.pinned, pool.filling, pool.draining, pool.moving, seen.members.len());
    assert_eq!(left, (0, 0, 0, 0, 1));
    assert!(seen.statistics.deaths >= kills);
}
