//! C5 and P8: random schedules of everything against a backend and an engine that fail at random.

use std::time::Duration;

use proptest::prelude::*;
use ucm_ctrl::{FailKind, Key};
use ucm_queue::{Deadline, DumpHandle, DumpRef, DumpTask, Outcome, Request, Task, TaskHandle};
use ucm_store::ErrorKind;
use ucm_transport::{DeviceFault, ErrorKind as CopyError};

use crate::support::*;

const BYTES: u64 = 64;
const PLACES: u64 = 512;

struct Live {
    rank: usize,
    handle: TaskHandle,
    /// Key and place of each shard, by request.
    shards: Vec<Vec<(Key, u64)>>,
    deadlines: Vec<bool>,
    cancelled: bool,
}

struct LiveDump {
    rank: usize,
    handle: DumpHandle,
    places: Vec<u64>,
    /// Whether the sources have been overwritten.
    reused: bool,
    durable: bool,
}

struct Run {
    world: World,
    random: Random,
    free: Vec<Vec<u64>>,
    live: Vec<Live>,
    dumps: Vec<LiveDump>,
    keys: u64,
    requests: u64,
}

impl Run {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let ranks = 1 + usize::try_from(random.below(3)).unwrap();
        let slots = 2 + u32::try_from(random.below(24)).unwrap();
        let depth = 1 + usize::try_from(random.below(6)).unwrap();
        let depth_of_pool = 1 + u32::try_from(random.below(4)).unwrap();
        let buffer = BYTES * (1 + random.below(3));
        let limit = if random.chance(50) {
            1 + usize::try_from(random.below(4)).unwrap()
        } else {
            usize::MAX
        };
        let unreachable = random.chance(25);
        let mut node = Node::with_reserved(slots, 2, BYTES);
        node.unreachable = unreachable;
        let seeds = random.next();
        let copies = Copies {
            per_item: random.time(Duration::from_micros(200)),
            max_items: 1 + usize::try_from(random.below(8)).unwrap(),
            max_in_flight: 1 + usize::try_from(random.below(8)).unwrap(),
        };
        let world = World::with_copies(
            node,
            ranks,
            PLACES,
            copies,
            |rank| {
                let mut random = Random(seeds ^ rank as u64);
                Box::new(move |_, _| {
                    let fate = match random.below(100) {
                        0..8 => Fate::Fails(ErrorKind::Io),
                        8..11 => Fate::Fails(ErrorKind::Missing),
                        11..14 => Fate::Lost,
                        _ => Fate::Good,
                    };
                    (random.time(Duration::from_millis(8)), fate)
                })
            },
            |rank, builder| {
                builder
                    .backend_depth(depth)
                    .tasks_in_flight(limit)
                    .staging(rank.buffers_of(depth_of_pool, buffer))
                    .dump_staging(rank.buffers(1))
                    .dump_depth(2)
            },
        );
        let free = (0..ranks).map(|_| (0..PLACES).rev().collect()).collect();
        let keys = 4 + random.below(60);
        Self { world, random, free, live: Vec::new(), dumps: Vec::new(), keys, requests: 0 }
    }

    fn step(&mut self) {
        match self.random.below(100) {
            0..35 => self.submit(),
            35..50 => self.cancel(),
            50..58 => self.dump(),
            58..78 => {
                let time = self.random.time(Duration::from_millis(4));
                self.world.pass(time);
            }
            78..90 => {
                self.world.step(None);
            }
            _ => self.gate(),
        }
        self.world.settle();
        self.reap();
    }

    fn place(&mut self, rank: usize) -> Option<u64> {
        let place = self.free[rank].pop()?;
        // Nobody wrote it since its last user ended.
        self.world.ranks[rank].buffer.assert_untouched(place);
        Some(place)
    }

    fn random_rank(&mut self) -> usize {
        usize::try_from(self.random.below(self.world.ranks.len() as u64)).unwrap()
    }

    fn submit(&mut self) {
        let rank = self.random_rank();
        let mut task = Task::default();
        let mut shards = Vec::new();
        let mut deadlines = Vec::new();
        for _ in 0..self.random.below(5) {
            let mut request = Request::default();
            let mut placed = Vec::new();
            for _ in 0..self.random.below(8) {
                let Some(place) = self.place(rank) else { break };
                let key = key(self.random.below(self.keys));
                request.shards.push(self.world.ranks[rank].buffer.shard(key, place));
                placed.push((key, place));
            }
            if self.random.chance(40) {
                let time = self.random.time(Duration::from_millis(10));
                request.deadline = Some(if self.random.chance(50) {
                    Deadline::After(time)
                } else {
                    Deadline::At(self.world.now + time)
                });
            }
            deadlines.push(request.deadline.is_some());
            shards.push(placed);
            task.requests.push(request);
        }
        self.requests += task.requests.len() as u64;
        let handle = self.world.ranks[rank].queue.submit(task, self.world.now).unwrap();
        self.live.push(Live { rank, handle, shards, deadlines, cancelled: false });
        if self.random.chance(10) {
            self.cancel();
        }
    }

    fn cancel(&mut self) {
        if self.live.is_empty() {
            return;
        }
        let at = usize::try_from(self.random.below(self.live.len() as u64)).unwrap();
        self.live[at].cancelled = true;
        self.live[at].handle.cancel();
    }

    fn dump(&mut self) {
        let rank = self.random_rank();
        let durable = self.random.chance(60);
        let mut shards: Vec<DumpRef> = Vec::new();
        let mut places = Vec::new();
        for _ in 0..=self.random.below(4) {
            let key = key(self.random.below(self.keys));
            if shards.iter().any(|shard| shard.key == key) {
                continue;
            }
            let Some(place) = self.place(rank) else { break };
            let buffer = &self.world.ranks[rank].buffer;
            buffer.fill(key, place);
            shards.push(DumpRef { key, src: buffer.addr(place), len: None });
            places.push(place);
        }
        let handle = self.world.ranks[rank]
            .queue
            .dump(DumpTask { shards, durable, ..DumpTask::default() })
            .unwrap();
        self.dumps.push(LiveDump { rank, handle, places, reused: false, durable });
    }

    fn gate(&mut self) {
        let rank = self.random_rank();
        let choice = self.random.below(12);
        let device = &self.world.ranks[rank].device;
        let gate = &self.world.ranks[rank].rank.gate;
        match choice {
            3 => device.inject(DeviceFault::Fails(CopyError::Failed)),
            4 => device.inject(DeviceFault::Delays(self.random.time(Duration::from_millis(5)))),
            5 => device.inject(DeviceFault::Loses),
            6 => device.inject(DeviceFault::Refuses),
            7 => device.inject(DeviceFault::Stalls),
            8..10 => device.resume(),
            0 => gate.close(),
            1 => gate.fail_next(CopyError::Failed),
            2 => {
                gate.release(1);
            }
            _ => gate.open(),
        }
    }

    /// Checks what has ended and reuses its memory at once.
    fn reap(&mut self) {
        let (ended, live) = std::mem::take(&mut self.live)
            .into_iter()
            .partition::<Vec<_>, _>(|live| live.handle.is_done() && live.handle.is_quiesced());
        self.live = live;
        for ended in ended {
            self.check(&ended);
            for (_, place) in ended.shards.into_iter().flatten() {
                self.world.ranks[ended.rank].buffer.wipe(place);
                self.free[ended.rank].push(place);
            }
        }
        let now = Some(std::time::Instant::now());
        let (free, ranks) = (&mut self.free, &self.world.ranks);
        self.dumps.retain_mut(|dump| {
            if !dump.reused && dump.handle.wait_cached(now).is_some() {
                dump.reused = true;
                for place in dump.places.drain(..) {
                    ranks[dump.rank].buffer.wipe(place);
                    free[dump.rank].push(place);
                }
            }
            let Some(durable) = dump.handle.wait_durable(now) else { return true };
            assert!(dump.reused, "durable before the source was free");
            if !dump.durable {
                let failed = |result: &Result<(), FailKind>| result.is_err();
                let cached = dump.handle.wait_cached(now).unwrap();
                assert_eq!(
                    cached.iter().filter(|r| failed(r)).count(),
                    durable.iter().filter(|r| failed(r)).count()
                );
            }
            false
        });
    }

    fn check(&self, ended: &Live) {
        let buffer = &self.world.ranks[ended.rank].buffer;
        let all = ended.handle.poll().unwrap();
        assert_eq!(all.len(), ended.shards.len());
        for ((outcome, shards), deadline) in
            all.into_iter().zip(&ended.shards).zip(&ended.deadlines)
        {
            let invalid = match outcome {
                Outcome::Loaded => vec![],
                Outcome::Recompute { shards: invalid, .. } => {
                    assert!(!invalid.is_empty() && invalid.is_sorted());
                    assert!(invalid.iter().all(|i| (*i as usize) < shards.len()));
                    invalid
                }
                Outcome::Cancelled => {
                    assert!(ended.cancelled);
                    continue;
                }
                Outcome::Deadline | Outcome::Stuck => {
                    assert!(*deadline);
                    continue;
                }
            };
            for (index, (key, place)) in (0_u32..).zip(shards) {
                if !invalid.contains(&index) {
                    buffer.assert_holds(*key, *place);
                }
            }
        }
    }

    /// Lets everything end and checks that nothing is left.
    fn finish(mut self) -> u64 {
        for rank in &self.world.ranks {
            rank.rank.gate.open();
            rank.device.heal();
        }
        self.world.run();
        self.reap();
        assert!(
            self.live.is_empty(),
            "{} tasks are lost: {:#?}",
            self.live.len(),
            self.world.queues()
        );
        assert!(self.dumps.is_empty(), "{} dumps are lost", self.dumps.len());
        let mut ended = 0;
        for (rank, free) in self.world.ranks.iter().zip(&self.free) {
            assert!(rank.queue.is_idle());
            let stats = rank.queue.stats();
            ended += stats.loaded + stats.recomputed + stats.cancelled + stats.expired;
            assert_eq!(stats.backend_in_flight, 0);
            assert_eq!(stats.dumps_in_flight, 0);
            assert_eq!(stats.staging_in_use, 0, "P8: the pool is full again");
            assert_eq!(stats.dump_bytes_in_flight, 0);
            assert_eq!((stats.quarantine_loads, stats.quarantine_bytes), (0, 0));
            assert_eq!(free.len() as u64, PLACES);
            free.iter().for_each(|place| rank.buffer.assert_untouched(*place));
        }
        assert_eq!(ended, self.requests, "every request ended once");
        self.world.node.assert_at_rest();
        self.requests
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..Default::default() })]
    #[test]
    fn c5_random_schedules_lose_and_leak_nothing(seed in any::<u64>()) {
        let mut run = Run::new(seed);
        for _ in 0..150 {
            run.step();
        }
        run.finish();
    }
}

#[test]
fn c5_a_hundred_thousand_requests_with_random_ends() {
    let mut requests = 0;
    let mut seed = 0;
    while requests < 100_000 {
        let mut run = Run::new(seed);
        for _ in 0..4000 {
            run.step();
        }
        requests += run.finish();
        seed += 1;
    }
}

/// Hours on a small machine; `UCM_SCHEDULES` says how many, `UCM_SEED` where to begin.
#[test]
#[ignore = "long: a million random schedules"]
fn c5_a_million_schedules() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let first = number("UCM_SEED").unwrap_or(0);
    for seed in first..first + number("UCM_SCHEDULES").unwrap_or(1_000_000) {
        let ended = std::panic::catch_unwind(|| {
            let mut run = Run::new(seed);
            for _ in 0..150 {
                run.step();
            }
            run.finish()
        });
        assert!(ended.is_ok(), "seed {seed}");
    }
}
