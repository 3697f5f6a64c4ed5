//! A busy member: does everything a member can do, in random order, with a byte oracle.
//!
//! Commands (a line each): `pause` (answers `paused` when nothing is held any more), `resume`,
//! `reap SEAT GENERATION`, `expel SEAT GENERATION` (both answer `done true` or `done false`).
//!
//! **Invariant:** whoever reads a wrong word under a pin panics; so does whoever meets an error
//! other than `Fenced`, with which it says `fenced` and leaves.

use std::{
    sync::{Arc, atomic::Ordering, mpsc},
    thread,
    time::{Duration, Instant},
};

use ucm_ctrl::{
    Acquired, Control, CtrlError, ErrorKind, FailKind, Fill, GroupVote, Key, Lease, LeaseOutcome,
    Member, MemberId, MemberSpec, Pin, Pool, PublishError, WaitOutcome, WeakMember,
};

use super::KEYS;
use crate::{
    child::{hear, say},
    parent::Proof,
    rank,
    storm::{Memory, Random, word},
};

/// Longest wait for somebody else's fill: its owner may be stopped or dead.
const SOON: Duration = Duration::from_millis(20);

enum Order {
    Pause,
    Resume,
}

struct Worker {
    control: Control,
    member: Member,
    pool: Pool,
    keys: Vec<Key>,
    memory: Memory,
    random: Random,
    pins: Vec<(Pin, Key)>,
    leases: Vec<Lease>,
    groups: u64,
    votes: Option<Votes>,
}

/// Votes that are out: who else has voted, how they are told, how many, and what.
struct Votes {
    _guest: Option<Member>,
    told: mpsc::Receiver<bool>,
    left: u64,
    expected: bool,
}

/// Works until the input is closed.
pub(crate) fn child(control: &Control, memory: &str, seed: u64) {
    let file = std::fs::File::options().read(true).write(true).open(memory).unwrap();
    let memory = Memory::map(&file);
    let (member, pool) = rank(control);
    member.set_liveness(Arc::new(Proof(control.clone())));
    say(&format!("{} {}", member.id().0, member.generation()));
    let orders = listen(member.downgrade());
    let keys = super::keys(control);
    let random = Random(seed | 1);
    let (pins, leases) = (Vec::new(), Vec::new());
    let control = control.clone();
    let (groups, votes) = (0, None);
    let mut worker =
        Worker { control, member, pool, keys, memory, random, pins, leases, groups, votes };
    loop {
        match orders.try_recv() {
            Ok(Order::Pause) => {
                worker.let_go();
                say("paused");
                while !matches!(orders.recv(), Ok(Order::Resume) | Err(_)) {}
            }
            Ok(Order::Resume) | Err(mpsc::TryRecvError::Empty) => {}
            Err(mpsc::TryRecvError::Disconnected) => return worker.let_go(),
        }
        match worker.step() {
            Ok(()) => worker.memory.progress(worker.member.id().0).fetch_add(1, Ordering::Relaxed),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Fenced, "{error}");
                worker.let_go();
                return say("fenced");
            }
        };
    }
}

/// Obeys the commands that are not the worker's own, and passes on the others.
fn listen(member: WeakMember) -> mpsc::Receiver<Order> {
    let (orders, received) = mpsc::channel();
    thread::spawn(move || {
        while let Some(line) = hear() {
            let words: Vec<&str> = line.split(' ').collect();
            let number = |i: usize| words[i].parse::<u32>().unwrap();
            let seat = || MemberId(u8::try_from(number(1)).unwrap());
            let Some(member) = member.upgrade() else { return };
            match words[0] {
                "pause" => orders.send(Order::Pause).unwrap_or(()),
                "resume" => orders.send(Order::Resume).unwrap_or(()),
                "reap" => say(&format!("done {}", member.reap(seat(), Some(number(2))).done)),
                "expel" => say(&format!("done {}", member.expel(seat(), number(2)).done)),
                other => panic!("{other}"),
            }
        }
    });
    received
}

impl Worker {
    fn let_go(&mut self) {
        self.pins.clear();
        self.leases.drain(..).for_each(Lease::release);
        while let Some(votes) = &self.votes {
            // The sender is gone only with the votes.
            let commit = votes.told.recv_timeout(crate::WATCHDOG).unwrap();
            if self.told(commit).is_err() {
                self.votes = None;
            }
        }
    }

    fn step(&mut self) -> Result<(), CtrlError> {
        let key = self.keys[usize::try_from(self.random.below(KEYS)).unwrap()];
        match self.random.below(24) {
            0 | 1 => drop(self.pool.prealloc(&key)?),
            2 | 3 => drop(self.pool.remove(&key)?),
            4 => drop(self.pool.touch(&[key.block])?),
            5 | 6 => self.lease(&key)?,
            7 => {
                // A guest on another seat: joins, looks, and leaves.
                let guest = self.control.join(MemberSpec::scheduler())?;
                guest.pool(self.pool.id())?.prefix_lookup(&[key])?;
            }
            8 if self.votes.is_none() => self.group()?,
            8 => {
                // Others may have died with all the records: this waits for nobody.
                let told =
                    self.votes.as_ref().map(|votes| votes.told.try_iter().collect::<Vec<_>>());
                told.into_iter().flatten().try_for_each(|commit| self.told(commit))?;
            }
            _ => {}
        }
        match self.pool.acquire(&key)? {
            Acquired::Hit(pin) => {
                self.memory.check(&pin, &key);
                self.pins.push((pin, key));
            }
            Acquired::Owner(fill) => self.fill(fill, &key)?,
            Acquired::Waiter(waiter) => {
                let deadline = Some(Instant::now() + SOON);
                if self.random.below(2) == 0 {
                    self.member.wait_any(&[&waiter], deadline)?;
                } else if waiter.wait(deadline) != WaitOutcome::Ready {
                    return Ok(());
                }
                if let Ok(pin) = waiter.into_pin() {
                    self.memory.check(&pin, &key);
                }
            }
            Acquired::Full => self.pins.clear(),
        }
        if self.pins.len() > 2 || self.random.below(3) == 0 {
            for (pin, key) in self.pins.drain(..) {
                self.memory.check(&pin, &key);
            }
        }
        Ok(())
    }

    fn fill(&mut self, fill: Fill, key: &Key) -> Result<(), CtrlError> {
        // Long enough for others to come and wait.
        for _ in 0..self.random.below(20_000) {
            std::hint::spin_loop();
        }
        let generation = fill.generation();
        self.memory.write(fill.slot(), |offset| word(key, generation, offset));
        match self.random.below(8) {
            0 => fill.fail(FailKind::Io),
            1 => {
                let (slot, token) = (fill.slot(), fill.start_io());
                drop(fill);
                // Late writes into the quarantined slot.
                self.memory.write(slot, |_| u64::MAX);
                drop(token);
            }
            _ => match fill.publish() {
                Ok(pin) => self.memory.check(&pin, key),
                Err(PublishError::Fenced) => {
                    return Err(CtrlError::Fenced("the fill was refused"));
                }
                Err(PublishError::IoInFlight(_)) => panic!("no token lives"),
            },
        }
        Ok(())
    }

    /// Votes with a guest of this process, now and then in more groups than there are records.
    fn group(&mut self) -> Result<(), CtrlError> {
        let guest = self.control.join(MemberSpec::rank(0, 8))?;
        let flood = self.random.below(16) == 0;
        let (send, told) = mpsc::channel();
        let vote = |member: &Member, nth: u64, ready: bool| {
            let name = (self.groups + nth) << 8 | u64::from(self.member.id().0);
            let group = (u128::from(name) << 64 | u128::from(std::process::id())).to_le_bytes();
            let roster = vec![self.member.stay(), guest.stay()];
            let send = send.clone();
            let decided = Box::new(move |commit| {
                let _ = send.send(commit);
            });
            member.vote(GroupVote { group, lasting: nth.is_multiple_of(2), roster, ready }, decided)
        };
        let (votes, expected) = if flood {
            (0..260).try_for_each(|nth| vote(&self.member, nth, true))?;
            (260, false)
        } else {
            let ready = [(); 2].map(|()| self.random.below(8) != 0);
            let expected = ready == [true; 2];
            vote(&self.member, 0, ready[0])?;
            vote(&guest, 0, ready[1])?;
            (2, expected)
        };
        self.groups += votes;
        // In a flood it leaves without a vote.
        let guest = (!flood).then_some(guest);
        self.votes = Some(Votes { _guest: guest, told, left: votes, expected });
        Ok(())
    }

    fn told(&mut self, commit: bool) -> Result<(), CtrlError> {
        let Some(votes) = &mut self.votes else { return Ok(()) };
        votes.left -= 1;
        if commit != votes.expected {
            // Only a member that was declared gone is told less than the truth.
            self.member.redeem(ucm_ctrl::LeaseTicket::from_u64(0))?;
            panic!("told {commit}, not {}", votes.expected);
        }
        if votes.left == 0 {
            self.votes = None;
        }
        Ok(())
    }

    fn lease(&mut self, key: &Key) -> Result<(), CtrlError> {
        let soon = Instant::now() + SOON;
        if let LeaseOutcome::Leased(lease) = self.pool.lease(&[*key], 2, soon)? {
            for _ in 0..self.random.below(3) {
                self.member.redeem(lease.ticket())?;
            }
            // Released, or left to the deadline.
            if self.random.below(2) == 0 {
                lease.release();
            } else {
                self.leases.push(lease);
            }
        }
        if self.leases.len() > 4 {
            self.leases.drain(..).for_each(Lease::release);
        }
        Ok(())
    }
}
