//! `ucm-bench directory --simulate`: one directory under the load of many peers.
//!
//! Owns: peers that exist as members and records only, and what they do to the directory: register, announce
//! all at once, report, restart, leave, place.
//! **Invariant:** the directory and the strategies are the real ones; answers are compared with what was
//! announced.

use std::{
    collections::HashMap,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use ucm_remote::{
    ByHash, Directory as _, DirectoryError, EmbeddedDirectory, EmbeddedLimits, Generation, Member,
    MostFree, ObjectKey, PeerId, PlacementStrategy, Record, Token,
};

use crate::{
    cli::Common, document::Document, error::BenchError, figure::Figure, progress::Progress,
    stats::percentile,
};

/// How often a peer reports; see `AgentBuilder::heartbeat`.
const HEARTBEAT_S: f64 = 0.5;
/// Records of one message, as agents send them.
const BATCH: u64 = 1024;
/// Keys of one question.
const ASKED: usize = 64;
/// Objects that are placed.
const PLACED: u64 = 20_000;
const BOOT: Token = Token([7; 16]);

/// What is simulated.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) peers: u64,
    pub(crate) keys: u64,
    pub(crate) clients: u32,
}

#[derive(Debug, Default)]
struct Samples(HashMap<&'static str, Vec<f64>>);

impl Samples {
    fn add(&mut self, name: &'static str, value: f64) {
        self.0.entry(name).or_default().push(value);
    }
}

fn deadline() -> Instant {
    Instant::now() + Duration::from_secs(600)
}

fn key(number: u64) -> ObjectKey {
    let mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut block = [0; 16];
    let bytes = mixed.to_le_bytes().into_iter().chain(number.to_le_bytes());
    block.iter_mut().zip(bytes).for_each(|(to, from)| *to = from);
    ObjectKey { block, identity: [1; 32] }
}

fn failed(error: &DirectoryError) -> BenchError {
    BenchError::Peer(format!("the directory: {error}"))
}

impl Shape {
    fn member(number: u64) -> Member {
        let address = format!("10.{}.{}.1:7000", number / 256, number % 256);
        let mut member = Member::new(PeerId::new(&format!("peer-{number}")), BOOT, address);
        (member.capacity_bytes, member.free_bytes) = (1 << 40, (1 << 39) + number);
        member
    }

    fn members(self) -> Vec<Member> {
        (0..self.peers).map(Self::member).collect()
    }

    fn record(self, number: u64, members: &[Member]) -> Option<Record> {
        let owner = members.get(usize::try_from(number % self.peers).ok()?)?;
        Some(Record::new(owner.peer.clone(), BOOT, Generation(number), number + 1))
    }

    /// All peers announce all they have, by as many threads as there are clients; seconds.
    fn announce_all(
        self,
        directory: &EmbeddedDirectory,
        members: &[Member],
    ) -> Result<f64, BenchError> {
        let begun = Instant::now();
        let next = AtomicU64::new(0);
        thread::scope(|scope| {
            let run = || -> Result<(), DirectoryError> {
                loop {
                    let peer = next.fetch_add(1, Ordering::Relaxed);
                    if peer >= self.peers {
                        return Ok(());
                    }
                    let mut batch = Vec::new();
                    let own = (peer..self.keys)
                        .step_by(usize::try_from(self.peers).unwrap_or(usize::MAX));
                    for number in own {
                        if let Some(record) = self.record(number, members) {
                            batch.push((key(number), record));
                        }
                        if batch.len() as u64 == BATCH {
                            directory.announce(&batch, deadline())?;
                            batch.clear();
                        }
                    }
                    directory.announce(&batch, deadline())?;
                }
            };
            let threads: Vec<_> = (0..self.clients).map(|_| scope.spawn(run)).collect();
            threads.into_iter().try_for_each(|thread| match thread.join() {
                Ok(ended) => ended.map_err(|error| failed(&error)),
                Err(_) => Err(BenchError::Peer("a thread panicked".into())),
            })
        })?;
        Ok(begun.elapsed().as_secs_f64())
    }

    /// Asks until it is told to end, at least a thousand times; microseconds, and answers that were wrong.
    fn ask(
        self,
        directory: &EmbeddedDirectory,
        members: &[Member],
        over: &AtomicBool,
        may_miss: bool,
    ) -> Result<(Vec<f64>, u64), BenchError> {
        let (mut random, mut times, mut wrong) = (0x2545_f491_4f6c_dd1d_u64, Vec::new(), 0);
        while times.len() < 1000 || !over.load(Ordering::SeqCst) {
            let numbers: [u64; ASKED] = std::array::from_fn(|_| {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                random % self.keys
            });
            let keys = numbers.map(key);
            let begun = Instant::now();
            let told = directory.locate(&keys, deadline()).map_err(|error| failed(&error))?;
            times.push(begun.elapsed().as_secs_f64() * 1e6);
            for (number, told) in numbers.into_iter().zip(told) {
                let right =
                    told.first() == self.record(number, members).as_ref() && told.len() == 1;
                wrong += u64::from(!(right || may_miss && told.is_empty()));
            }
        }
        times.sort_by(f64::total_cmp);
        Ok((times, wrong))
    }

    fn once(self, all: &mut Samples) -> Result<u64, BenchError> {
        let members = self.members();
        let make = || EmbeddedDirectory::new(EmbeddedLimits::default());
        let directory = make();
        let register = |directory: &EmbeddedDirectory| -> Result<f64, BenchError> {
            let begun = Instant::now();
            for member in &members {
                directory.register(member, deadline()).map_err(|error| failed(&error))?;
            }
            Ok(begun.elapsed().as_secs_f64())
        };
        let mut wrong = 0;
        let first = register(&directory)?;
        all.add("register_us", first * 1e6 / self.peers as f64);

        // A storm: everybody announces, somebody asks.
        let over = AtomicBool::new(false);
        let (storm, asked) = thread::scope(|scope| {
            let asking = scope.spawn(|| self.ask(&directory, &members, &over, true));
            let storm = self.announce_all(&directory, &members);
            over.store(true, Ordering::SeqCst);
            (storm, asking.join())
        });
        let (times, bad) = asked.map_err(|_| BenchError::Peer("a thread panicked".into()))??;
        wrong += bad;
        all.add("announce_per_s", self.keys as f64 / storm?);
        all.add("storm_route_us_p50", percentile(&times, 0.5));
        all.add("storm_route_us_p99", percentile(&times, 0.99));
        all.add("bytes_per_key", directory.bytes() as f64 / self.keys as f64);
        let (times, bad) = self.ask(&directory, &members, &AtomicBool::new(true), false)?;
        wrong += bad;
        all.add("quiet_route_us_p50", percentile(&times, 0.5));
        all.add("quiet_route_us_p99", percentile(&times, 0.99));

        // What peers do all the time, and what each asks for when it meets an unknown run.
        let reports = register(&directory)?;
        all.add("heartbeat_us", reports * 1e6 / self.peers as f64);
        all.add("heartbeat_core_share", reports / HEARTBEAT_S);
        let begun = Instant::now();
        let told = directory.members(deadline()).map_err(|error| failed(&error))?;
        all.add("members_us", begun.elapsed().as_secs_f64() * 1e6);
        wrong += u64::from(told.len() as u64 != self.peers);

        // Restarted empty: until everything is told again.
        let second = make();
        let again = register(&second)? + self.announce_all(&second, &members)?;
        all.add("restart_s", again);
        wrong += u64::from(second.records() as u64 != self.keys);
        drop(second);

        // One peer goes, then a tenth of them.
        let gone = self.peers.div_ceil(10);
        let over = AtomicBool::new(false);
        let (removal, asked) = thread::scope(|scope| {
            let asking = scope.spawn(|| self.ask(&directory, &members, &over, true));
            let mut one = 0.0;
            let begun = Instant::now();
            for (number, member) in
                members.iter().take(usize::try_from(gone).unwrap_or(0)).enumerate()
            {
                let ended = directory.remove_peer(&member.peer, BOOT, deadline());
                if number == 0 {
                    one = begun.elapsed().as_secs_f64();
                }
                if let Err(error) = ended {
                    over.store(true, Ordering::SeqCst);
                    return (Err(failed(&error)), asking.join());
                }
            }
            over.store(true, Ordering::SeqCst);
            (Ok((one, begun.elapsed().as_secs_f64())), asking.join())
        });
        let (one, tenth) = removal?;
        let (times, bad) = asked.map_err(|_| BenchError::Peer("a thread panicked".into()))??;
        wrong += bad;
        all.add("node_removal_ms", one * 1e3);
        all.add("tenth_removal_ms", tenth * 1e3);
        all.add("removal_route_us_p99", percentile(&times, 0.99));
        self.place(&members, all);
        Ok(wrong)
    }

    /// Where new objects go, and how many go elsewhere when a peer comes or goes.
    fn place(self, members: &[Member], all: &mut Samples) {
        let chosen = |strategy: &dyn PlacementStrategy, members: &[Member]| -> (Vec<PeerId>, f64) {
            let begun = Instant::now();
            let place = |n| strategy.place(&key(n), 1, members, 1).0.into_iter().next();
            let chosen: Vec<PeerId> = (0..PLACED).filter_map(place).collect();
            (chosen, begun.elapsed().as_secs_f64() * 1e6 / PLACED as f64)
        };
        let spread = |chosen: &[PeerId]| {
            let mut counts: HashMap<&PeerId, u64> = HashMap::new();
            chosen.iter().for_each(|peer| *counts.entry(peer).or_default() += 1);
            let most = counts.values().copied().max().unwrap_or(0);
            most as f64 * self.peers as f64 / PLACED as f64
        };
        let moved = |a: &[PeerId], b: &[PeerId]| {
            a.iter().zip(b).filter(|(a, b)| a != b).count() as f64 / PLACED as f64
        };
        let (hashed, hash_us) = chosen(&ByHash, members);
        let (free, free_us) = chosen(&MostFree, members);
        all.add("place_hash_us", hash_us);
        all.add("place_free_us", free_us);
        all.add("hash_most_over_mean", spread(&hashed));
        all.add("free_most_over_mean", spread(&free));
        let mut more = members.to_vec();
        more.push(Self::member(self.peers));
        all.add("moved_by_a_joiner", moved(&hashed, &chosen(&ByHash, &more).0));
        let fewer = members.get(1..).unwrap_or_default();
        all.add("moved_by_a_leaver", moved(&hashed, &chosen(&ByHash, fewer).0));
    }
}

/// Measures.
pub(crate) fn run(
    shape: Shape,
    common: &Common,
    document: &mut Document,
) -> Result<(), BenchError> {
    document.about(
        "A directory and many peers",
        "Peers register, announce everything at once, report, leave and are placed on, while somebody asks.",
    );
    document.config("peers", shape.peers);
    document.config("keys", shape.keys);
    document.config("clients", shape.clients);
    let progress = Progress::new("directory", u64::from(common.runs), common.quiet);
    let (mut all, mut wrong) = (Samples::default(), 0);
    for _ in 0..common.runs {
        wrong += shape.once(&mut all)?;
        progress.advance(1);
    }
    drop(progress);
    document.result("wrong_records", wrong);
    let mut names: Vec<_> = all.0.into_iter().collect();
    names.sort_unstable_by_key(|(name, _)| *name);
    for (name, samples) in names {
        if let Some(figure) = Figure::of(samples) {
            document.figure(name, &figure);
        }
    }
    document.highlight(["storm_route_us_p99", "restart_s", "node_removal_ms"]);
    Ok(())
}
