//! The region, three busy members, and what is done to a fourth.
//!
//! **Invariant:** between two runs nothing is pinned, filled, drained or half done, and the only
//! members are the parent and the three.

use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, WaitOptions, waitpid};
use ucm_ctrl::{
    Acquired, Control, Geometry, Key, Member, MemberId, MemberState, Pool, Statistics, Waiter,
};

use super::CROWDED;
use crate::{
    WATCHDOG,
    parent::{Proc, Proof, Shared, pidfd, until_dead},
    rank,
    storm::{Memory, RESERVED, SLOTS, word},
};

/// Steps of each of the others that show that they go on.
const STEPS: u64 = 10;

pub(crate) struct Scene {
    control: Control,
    member: Member,
    pool: Pool,
    keys: Vec<Key>,
    region: Shared,
    memory_fd: Shared,
    memory: Memory,
    others: Vec<Busy>,
    paused: bool,
    seed: u64,
    pub(crate) slowest_progress: Duration,
    pub(crate) slowest_reap: Duration,
}

/// A working process, and the seat it said it has (empty if it never came so far).
struct Busy {
    process: Proc,
    seat: String,
}

impl Busy {
    fn index(&self) -> u8 {
        self.seat.split(' ').next().unwrap().parse().unwrap()
    }

    fn generation(&self) -> u32 {
        self.seat.split(' ').nth(1).unwrap().parse().unwrap()
    }

    /// Returns when the kernel says that it is dead.
    fn until_dead(&mut self) {
        until_dead(&pidfd(self.process.pid()));
    }

    /// Returns when a signal has stopped it.
    fn until_stopped(&self, what: &str) {
        let begun = Instant::now();
        loop {
            let options = WaitOptions::UNTRACED | WaitOptions::NOHANG;
            match waitpid(Some(self.process.pid()), options).unwrap() {
                Some((_, status)) => return assert!(status.stopped(), "{what}: {status:?}"),
                None => assert!(begun.elapsed() < WATCHDOG, "{what} was never reached"),
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Threads that sleep until somebody tells them. Mutant: who relieves, or completes an expulsion, does not.
struct Patient(Vec<std::thread::JoinHandle<()>>);

impl Patient {
    fn end(&self, point: &str) {
        let begun = Instant::now();
        while !self.0.iter().all(std::thread::JoinHandle::is_finished) {
            assert!(begun.elapsed() < WATCHDOG, "{point}: a waiter was not told");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Scene {
    pub(crate) fn new(seed: u64) -> Self {
        let geometry = Geometry { leases: 8, ..Geometry::single(SLOTS, RESERVED, 1, 64) };
        let control = Control::create(&geometry, [3; 16]).unwrap();
        let (member, pool) = rank(&control);
        member.set_liveness(Arc::new(Proof(control.clone())));
        let fd = Memory::create();
        let memory = Memory::map(&fd);
        let mut scene = Self {
            keys: super::keys(&control),
            region: Shared::of(&control),
            memory_fd: Shared::new(fd),
            control,
            member,
            pool,
            memory,
            others: Vec::new(),
            paused: false,
            seed,
            slowest_progress: Duration::ZERO,
            slowest_reap: Duration::ZERO,
        };
        for _ in 0..3 {
            let mut busy = scene.start(None, Duration::from_secs(3600));
            busy.seat = busy.process.hear();
            scene.others.push(busy);
        }
        scene
    }

    /// Starts a working process, perhaps with an armed point.
    fn start(&mut self, armed: Option<String>, longest: Duration) -> Busy {
        self.seed = self.seed.wrapping_add(7);
        let arguments = [self.memory_fd.path(), (self.seed & 0xffff_ffff).to_string()];
        let environment = Vec::from_iter(armed.map(|armed| ("UCM_FAILPOINT", armed)));
        let process = Proc::start_with("busy", &self.region, &arguments, &environment, longest);
        Busy { process, seat: String::new() }
    }

    /// A victim, dead at the point.
    fn dead_at(&mut self, point: &str, nth: u64) -> Busy {
        let begun = Instant::now();
        let mut victim = self.start(Some(format!("{point}:{nth}")), WATCHDOG);
        victim.seat = victim.process.hear();
        let said = victim.process.hear();
        assert_eq!(said, "", "{point}: the victim goes on");
        assert!(begun.elapsed() < WATCHDOG, "{point} was never reached");
        victim.until_dead();
        victim
    }

    /// A victim, stopped at the point.
    fn stopped_at(&mut self, point: &str, nth: u64) -> Busy {
        let victim = self.start(Some(format!("{point}:{nth}:stop")), WATCHDOG * 4);
        victim.until_stopped(point);
        victim
    }

    /// SIGKILL at the point.
    pub(crate) fn kill(&mut self, point: &str, nth: u64) {
        let before = self.control.statistics();
        let victim = self.dead_at(point, nth);
        self.others_go_on(point);
        // Every other time by one of the others.
        let by_other = self.seed.is_multiple_of(2) && !victim.seat.is_empty();
        if by_other {
            self.others[0].process.tell(&format!("reap {}", victim.seat));
            self.others[0].process.expect("done true");
        }
        self.reap_the_dead();
        self.check(point, &before, !victim.seat.is_empty());
    }

    /// SIGSTOP at the point; the victim goes on later as if nothing had been.
    pub(crate) fn stop(&mut self, point: &str, nth: u64) {
        let before = self.control.statistics();
        let mut victim = self.stopped_at(point, nth);
        self.others_go_on(point);
        victim.process.signal(Signal::CONT);
        victim.seat = victim.process.hear();
        assert_ne!(victim.seat, "", "{point}: the victim does not go on");
        self.others_go_on(point);
        assert!(victim.process.end().success(), "{point}: the victim fails");
        // Its teller may have had the last word, and the process ended in the midst of that; or somebody had
        // the bucket of a slot locked just then. Those who hear of the end clear up.
        self.reap_the_dead();
        self.check(point, &before, false);
    }

    /// SIGSTOP at the point; expelled; the victim notices when it goes on, and lets go.
    pub(crate) fn stop_and_expel(&mut self, point: &str, nth: u64) {
        let before = self.control.statistics();
        let mut victim = self.stopped_at(point, nth);
        let mut expelled = false;
        for (seat, generation, state) in self.strangers() {
            let done = self.member.expel(seat, generation).done;
            assert_eq!(done, state == MemberState::Joined, "{point}: {state:?}");
            expelled |= done;
        }
        self.others_go_on(point);
        victim.process.signal(Signal::CONT);
        if expelled {
            // Its seat, unless it was stopped before it could say so.
            while !matches!(victim.process.hear().as_str(), "fenced" | "") {}
        }
        let ended = victim.process.end();
        assert!(ended.success(), "{point}: the victim fails: {ended}");
        self.reap_the_dead();
        self.check(point, &before, false);
    }

    /// A member dies at `first`; the one that clears up after it dies at `second`.
    pub(crate) fn reaper(&mut self, first: &str, second: &str) {
        self.pause();
        let died = self.both_die(first, second);
        self.resume();
        assert!(died, "{second} was not reached while clearing up after {first}");
        self.others_go_on(second);
        let before = self.control.statistics();
        self.reap_the_dead();
        self.check(second, &before, false);
    }

    /// As [`reaper`](Self::reaper), while the others work; they may be faster than the second.
    pub(crate) fn pair(&mut self, first: &str, second: &str) -> bool {
        let before = self.control.statistics();
        let died = self.both_die(first, second);
        self.reap_the_dead();
        self.others_go_on(second);
        self.check(&format!("{first} + {second}"), &before, false);
        died
    }

    /// False when the second was not reached; then that member is killed as it works.
    fn both_die(&mut self, first: &str, second: &str) -> bool {
        let mut reaper = self.start(Some(format!("{second}:1")), WATCHDOG * 4);
        reaper.seat = reaper.process.hear();
        // At rest: it has no guest, who would be taken for one of the dead, and meets no lock of theirs.
        reaper.process.tell("pause");
        reaper.process.expect("paused");
        let _dead = self.dead_at(first, 1);
        let dead: Vec<_> = self.strangers();
        for (seat, generation, _) in dead {
            if seat.0 == reaper.index() {
                continue;
            }
            reaper.process.tell(&format!("reap {} {generation}", seat.0));
            if reaper.process.hear().is_empty() {
                reaper.until_dead();
                return true;
            }
        }
        reaper.process.tell("resume");
        reaper.process.kill();
        false
    }

    /// A member dies with a lock; another waits for it and dies at the point.
    pub(crate) fn breaker(&mut self, point: &str) {
        self.pause();
        let before = self.control.statistics();
        let _holder = self.dead_at("link.lock.after", 1);
        let _breaker = self.dead_at(point, 1);
        self.resume();
        self.others_go_on(point);
        self.reap_the_dead();
        self.check(point, &before, true);
    }

    /// A member is stopped with a lock until others sleep on it, and dies at the point later.
    pub(crate) fn with_sleepers(&mut self, point: &str) {
        let before = self.control.statistics();
        let orders = format!("link.lock.after:1:stop,{point}:1");
        let mut victim = self.start(Some(orders), WATCHDOG * 4);
        victim.until_stopped(point);
        // It takes a moment of waiting until somebody sleeps.
        self.others_go_on(point);
        victim.process.signal(Signal::CONT);
        victim.seat = victim.process.hear();
        assert_eq!(victim.process.hear(), "", "{point} was not reached");
        victim.until_dead();
        self.others_go_on(point);
        self.reap_the_dead();
        self.check(point, &before, true);
    }

    /// Everything is pinned; a member that looks for a slot dies at the point.
    pub(crate) fn with_all_slots_pinned(&mut self, point: &str) {
        self.pause();
        let before = self.control.statistics();
        let mut kept = Vec::new();
        for key in &self.keys {
            match self.pool.acquire(key).unwrap() {
                Acquired::Full => {}
                Acquired::Hit(pin) => kept.push(pin),
                Acquired::Owner(fill) => {
                    let generation = fill.generation();
                    self.memory.write(fill.slot(), |offset| word(key, generation, offset));
                    kept.push(fill.publish().unwrap());
                }
                other => panic!("{point}: {other:?}"),
            }
        }
        // Whoever was told that everything is pinned does not look again: one slot comes and goes.
        kept.pop();
        let _victim = self.dead_at(point, 1);
        drop(kept);
        self.resume();
        self.others_go_on(point);
        self.reap_the_dead();
        self.check(point, &before, true);
    }

    /// A member is stopped with a lock; another cannot evict because of it and dies at the point.
    pub(crate) fn beside_a_stopped_lock(&mut self, point: &str) {
        self.pause();
        let before = self.control.statistics();
        // Only keys of one bucket are resident, so it is that bucket's lock.
        for key in &self.keys[CROWDED..] {
            self.pool.remove(key).unwrap();
        }
        self.load(&self.keys[..CROWDED], point);
        let mut holder = self.stopped_at("evict.lock.after", 1);
        let victim = self.dead_at(point, 1);
        self.resume();
        self.others_go_on(point);
        let seat = MemberId(victim.index());
        assert!(self.member.reap(seat, Some(victim.generation())).done);
        holder.process.signal(Signal::CONT);
        holder.seat = holder.process.hear();
        self.others_go_on(point);
        assert!(holder.process.end().success());
        self.reap_the_dead();
        self.check(point, &before, true);
    }

    /// A member dies in mid-fill, its reaper is stopped; another that sees to the fill dies at the point,
    /// and the parent goes on with it. Nothing waits for the stopped one.
    pub(crate) fn beside_a_stopped_reaper(&mut self, point: &str) {
        let before = self.control.statistics();
        let mut reaper = self.start(Some("reap.word.after:1:stop".into()), WATCHDOG * 4);
        reaper.seat = reaper.process.hear();
        let mut reliever = self.start(Some(format!("{point}:1")), WATCHDOG * 4);
        reliever.seat = reliever.process.hear();
        for busy in [&mut reaper, &mut reliever] {
            busy.process.tell("pause");
            busy.process.expect("paused");
        }
        let victim = self.dead_at("end.word.before", 1);
        let patient = self.wait_for_all();
        reaper.process.tell(&format!("reap {}", victim.seat));
        reaper.until_stopped(point);
        reliever.process.tell(&format!("reap {}", victim.seat));
        assert_eq!(reliever.process.hear(), "", "{point} was not reached");
        reliever.until_dead();
        let (seat, generation) = (MemberId(victim.index()), victim.generation());
        assert!(!self.member.reap(seat, Some(generation)).done, "{point}: it is another's");
        patient.end(point);
        self.others_go_on(point);
        self.pause();
        let seen = self.control.inspect();
        assert_eq!(seen.pools[0].filling, 0, "{point}: a fill of the dead is left");
        self.resume();
        reaper.process.signal(Signal::CONT);
        reaper.process.expect("done true");
        reaper.process.tell("resume");
        assert!(reaper.process.end().success(), "{point}: the reaper fails");
        self.reap_the_dead();
        self.check(point, &before, true);
    }

    /// A member is stopped in mid-fill; the one that expels it dies at the point.
    pub(crate) fn operator(&mut self, point: &str) {
        let before = self.control.statistics();
        let mut operator = self.start(Some(format!("{point}:1")), WATCHDOG * 4);
        operator.seat = operator.process.hear();
        // At rest, so that it has one seat; the guest of the one that is stopped is alive.
        operator.process.tell("pause");
        operator.process.expect("paused");
        let mut stopped = self.stopped_at("end.word.before", 1);
        stopped.seat = stopped.process.hear();
        let patient = self.wait_for_all();
        operator.process.tell(&format!("expel {}", stopped.seat));
        assert_eq!(operator.process.hear(), "", "{point} was not reached");
        operator.until_dead();
        let (seat, generation) = (MemberId(operator.index()), operator.generation());
        assert!(self.member.reap(seat, Some(generation)).done);
        let marked = point != "expel.mark.before";
        if marked {
            // The reaper has completed it.
            let seen = self.control.inspect().members;
            let record = seen.iter().find(|m| m.index == stopped.index()).unwrap();
            assert_eq!(record.state, MemberState::Expelled);
            patient.end(point);
        }
        self.others_go_on(point);
        stopped.process.signal(Signal::CONT);
        if marked {
            stopped.process.expect("fenced");
        }
        assert!(stopped.process.end().success());
        self.check(point, &before, true);
    }

    /// Waits without a deadline for every fill there is, until it has ended.
    fn wait_for_all(&self) -> Patient {
        let (pool, keys) = (self.pool.clone(), self.keys.clone());
        let waiters: Vec<_> = keys
            .iter()
            .filter_map(|key| match pool.acquire_resident(key).unwrap() {
                Some(Acquired::Waiter(waiter)) => Some(waiter),
                _ => None,
            })
            .collect();
        assert!(!waiters.is_empty(), "the victim has a fill");
        let wait = |waiter: Waiter| {
            std::thread::spawn(move || {
                let _ = waiter.wait(None);
            })
        };
        Patient(waiters.into_iter().map(wait).collect())
    }

    /// Each of the others does some steps, without anybody's help.
    fn others_go_on(&mut self, point: &str) {
        let seats: Vec<u8> = self.others.iter().map(Busy::index).collect();
        let steps = |seat: &u8| self.memory.progress(*seat).load(Ordering::Relaxed);
        let goals: Vec<u64> = seats.iter().map(|seat| steps(seat) + STEPS).collect();
        let begun = Instant::now();
        while !seats.iter().zip(&goals).all(|(seat, goal)| steps(seat) >= *goal) {
            assert!(begun.elapsed() < WATCHDOG, "{point}: the others do not go on");
            std::thread::sleep(Duration::from_micros(200));
        }
        self.slowest_progress = self.slowest_progress.max(begun.elapsed());
    }

    /// Members of other processes than the parent and the three, who have guests now and then.
    fn strangers(&mut self) -> Vec<(MemberId, u32, MemberState)> {
        let mut strangers = self.perhaps_strangers();
        let joining = |(_, _, state): &(_, _, MemberState)| *state == MemberState::Joining;
        if !self.paused && strangers.iter().any(joining) {
            // A guest that has not said yet who it is has done so after its host's next step.
            self.others_go_on("join");
            let now = self.perhaps_strangers();
            strangers.retain(|stranger| now.contains(stranger));
        }
        strangers
    }

    fn perhaps_strangers(&self) -> Vec<(MemberId, u32, MemberState)> {
        let of_the_living = |pid| {
            let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
            pid == Some(rustix::process::getpid())
                || self.others.iter().any(|busy| pid == Some(busy.process.pid()))
        };
        let members = self.control.inspect_members();
        let strangers = members
            .iter()
            .filter(|member| member.state == MemberState::Joining || !of_the_living(member.pid));
        strangers.map(|m| (MemberId(m.index), m.generation, m.state)).collect()
    }

    /// Clears up after all strangers; what falls to the reaper with one of them is gone with it.
    fn reap_the_dead(&mut self) {
        let begun = Instant::now();
        for (seat, generation, _) in self.strangers() {
            self.member.reap(seat, Some(generation));
        }
        self.slowest_reap = self.slowest_reap.max(begun.elapsed());
        assert_eq!(self.strangers(), []);
    }

    fn pause(&mut self) {
        self.paused = true;
        self.others.iter_mut().for_each(|busy| busy.process.tell("pause"));
        self.others.iter_mut().for_each(|busy| busy.process.expect("paused"));
    }

    fn resume(&mut self) {
        self.paused = false;
        self.others.iter_mut().for_each(|busy| busy.process.tell("resume"));
    }

    /// With everybody at rest: nothing is left of the victim.
    fn check(&mut self, point: &str, before: &Statistics, died: bool) {
        self.pause();
        let begun = Instant::now();
        loop {
            let seen = self.control.inspect();
            let pool = &seen.pools[0];
            let groups = seen.groups.open + seen.groups.decided;
            let left = (pool.pinned, pool.filling, pool.draining, pool.moving, groups);
            // The keepers of leases release in their own time, and a guest's teller may be the one
            // that ends it.
            let members = seen.members.len();
            let states: Vec<_> = seen.members.iter().map(|m| (m.index, m.state, m.pid)).collect();
            if left == (0, 0, 0, 0, 0) && seen.problems.is_empty() && members == 4 {
                break;
            }
            let patience = Duration::from_secs(5);
            let problems = seen.problems;
            assert!(begun.elapsed() < patience, "{point}: {left:?}, {states:?} left, {problems:?}");
            std::thread::yield_now();
        }
        assert_eq!(self.strangers(), [], "{point}");
        let after = self.control.statistics();
        if died {
            assert!(after.deaths > before.deaths, "{point}: the death is not counted");
        }
        assert_eq!(after.corruptions, 0, "{point}");
        self.load(&self.keys, point);
        self.resume();
    }

    /// Every key is loadable, and what is loaded already is right.
    fn load(&self, keys: &[Key], point: &str) {
        for key in keys {
            match self.pool.acquire(key).unwrap() {
                Acquired::Hit(pin) => self.memory.check(&pin, key),
                Acquired::Owner(fill) => {
                    let generation = fill.generation();
                    self.memory.write(fill.slot(), |offset| word(key, generation, offset));
                    drop(fill.publish().unwrap());
                }
                other => panic!("{point}: {key:?} is not loadable: {other:?}"),
            }
        }
    }

    pub(crate) fn end(self) {
        for busy in self.others {
            assert!(busy.process.end().success(), "a member has seen wrong bytes");
        }
    }
}
