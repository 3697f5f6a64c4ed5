//! A hostile member: writes anything anywhere into a region while others use it.
//!
//! Shared by the fuzz target and the tests that replay its corpus.
//! **Invariant:** whatever the script, every call returns within its bounds: an answer, or a typed
//! error. A panic, an endless walk or an access outside the region is a bug.

use std::time::{Duration, Instant};

use crate::{
    Acquired, BlockId, Control, CtrlError, FailKind, Fill, Geometry, GroupVote, IoToken, Key,
    Lease, LeaseOutcome, LeaseTicket, Member, MemberId, MemberSpec, Pin, Pool, PoolGeometry,
    PoolId, Presence, PublishError, Statistics, Waiter, sync::Ordering,
};

/// Longest wait for a fill.
const SOON: Duration = Duration::from_micros(200);

struct Script<'a>(&'a [u8]);

impl Script<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn word(&mut self) -> Option<u64> {
        let (word, rest) = self.0.split_first_chunk::<8>()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*word))
    }

    fn short(&mut self) -> Option<usize> {
        Some(usize::from(u16::from_le_bytes([self.byte()?, self.byte()?])))
    }
}

/// A small cache, two of its members, and what they hold.
struct Scene {
    control: Control,
    members: Vec<Member>,
    pins: Vec<Pin>,
    fills: Vec<Fill>,
    waiters: Vec<Waiter>,
    tokens: Vec<IoToken>,
    leases: Vec<Lease>,
}

/// Runs a script of writes into a private region and of calls by its members. Returns the event
/// counts, for what they are worth.
///
/// # Errors
/// Only if the region cannot be made.
pub fn abuse(script: &[u8]) -> Result<Statistics, CtrlError> {
    let pool =
        |slots, reserved| PoolGeometry { slots, reserved, shards_per_block: 2, shard_bytes: 64 };
    let geometry = Geometry { pools: vec![pool(9, 3), pool(2, 0)], leases: 3 };
    let control = Control::private(&geometry)?;
    let members =
        vec![control.join(MemberSpec::rank(0, 2))?, control.join(MemberSpec::rank(1, 2))?];
    let mut scene = Scene {
        control,
        members,
        pins: Vec::new(),
        fills: Vec::new(),
        waiters: Vec::new(),
        tokens: Vec::new(),
        leases: Vec::new(),
    };
    let mut script = Script(script);
    while scene.step(&mut script).is_some() {}
    scene.let_go();
    Ok(scene.control.statistics())
}

impl Scene {
    /// `None` at the end of the script.
    fn step(&mut self, script: &mut Script<'_>) -> Option<()> {
        let operation = script.byte()?;
        // Half of the steps are writes.
        if operation >= 128 {
            return self.scribble(operation, script);
        }
        let which = usize::from(operation & 1);
        let member = self.members.get(which)?.clone();
        let pool = member.pool(PoolId(operation >> 1 & 1)).ok()?;
        // Refusals are answers, too.
        let _ = self.call(operation >> 2, script, &member, &pool)?;
        Some(())
    }

    fn scribble(&self, operation: u8, script: &mut Script<'_>) -> Option<()> {
        let words = self.control.region.words();
        let word = words.get(script.short()? % words.len())?;
        match operation & 3 {
            0 => word.store(script.word()?, Ordering::SeqCst),
            1 => {
                word.fetch_xor(1 << (script.byte()? & 63), Ordering::SeqCst);
            }
            2 => {
                let from = words.get(script.short()? % words.len())?;
                word.store(from.load(Ordering::SeqCst), Ordering::SeqCst);
            }
            _ => {
                let small = u64::from(script.byte()?);
                word.store(small | small << 32, Ordering::SeqCst);
            }
        }
        Some(())
    }

    fn call(
        &mut self,
        operation: u8,
        script: &mut Script<'_>,
        member: &Member,
        pool: &Pool,
    ) -> Option<Result<(), CtrlError>> {
        let key = |byte: u8| {
            Key::new(BlockId::from_halves(u64::from(byte >> 1 & 15), 7), u32::from(byte & 1))
        };
        let soon = || Some(Instant::now() + SOON);
        match operation {
            0..=7 => match pool.acquire(&key(script.byte()?)) {
                Ok(acquired) => self.keep(acquired),
                Err(error) => return Some(Err(error)),
            },
            8 => match pool.acquire_resident(&key(script.byte()?)) {
                Ok(acquired) => acquired.into_iter().for_each(|acquired| self.keep(acquired)),
                Err(error) => return Some(Err(error)),
            },
            9 => drop(self.pins.pop()),
            10 | 11 => match self.fills.pop().map(Fill::publish) {
                Some(Ok(pin)) => self.pins.push(pin),
                Some(Err(PublishError::IoInFlight(fill))) => self.fills.push(fill),
                _ => {}
            },
            12 => {
                if let Some(fill) = self.fills.pop() {
                    fill.fail(FailKind::Io);
                }
            }
            13 => {
                if let Some(fill) = self.fills.pop() {
                    self.tokens.push(fill.start_io());
                    fill.abandon_draining(FailKind::Deadline);
                }
            }
            14 => drop(self.tokens.pop()),
            15 => {
                if let Some(waiter) = self.waiters.pop() {
                    let _ = waiter.wait(soon());
                    self.pins.extend(waiter.into_pin());
                }
            }
            16 => {
                let waiters: Vec<&Waiter> = self.waiters.iter().collect();
                return Some(member.wait_any(&waiters, soon()).map(drop));
            }
            17 => return Some(pool.prealloc(&key(script.byte()?)).map(drop)),
            18 => return Some(pool.remove(&key(script.byte()?)).map(drop)),
            19 => return Some(pool.touch(&[key(script.byte()?).block]).map(drop)),
            20 => {
                let keys: Vec<Key> = (0..32).map(key).collect();
                let mut out = [Presence::Absent; 32];
                return Some(pool.lookup(&keys, &mut out));
            }
            21 => return Some(pool.prefix_lookup(&[key(script.byte()?)]).map(drop)),
            22 => match pool.lease(&[key(script.byte()?)], 2, Instant::now() + SOON) {
                Ok(LeaseOutcome::Leased(lease)) => self.leases.push(lease),
                Ok(_) => {}
                Err(error) => return Some(Err(error)),
            },
            23 => {
                let ticket = LeaseTicket::from_u64(script.word()?);
                return Some(member.redeem(ticket).map(drop));
            }
            24 => {
                if let Some(lease) = self.leases.pop() {
                    let _ = member.redeem(lease.ticket());
                    lease.release();
                }
            }
            25 => drop(self.control.inspect()),
            26 => drop(member.reap(MemberId(script.byte()?), None)),
            27 => drop(member.expel(MemberId(script.byte()?), u32::from(script.byte()?))),
            28 => member.interrupt(),
            29 => member.end_interrupt(),
            30 => return Some(self.control.join(MemberSpec::scheduler()).map(drop)),
            _ => {
                let byte = script.byte()?;
                if byte < 128 {
                    let _ = self.control.incarnation(MemberId(byte));
                } else {
                    return Some(self.vote(byte, member));
                }
            }
        }
        Some(Ok(()))
    }

    fn vote(&self, byte: u8, member: &Member) -> Result<(), CtrlError> {
        let (group, lasting, ready) = ([byte >> 2 & 3; 16], byte & 1 != 0, byte & 2 != 0);
        if byte & 64 != 0 {
            member.withdraw(group, lasting);
            return Ok(());
        }
        let roster = self.members.iter().map(Member::stay).collect();
        member.vote(GroupVote { group, lasting, roster, ready }, Box::new(drop))
    }

    fn keep(&mut self, acquired: Acquired) {
        match acquired {
            Acquired::Hit(pin) => self.pins.push(pin),
            Acquired::Owner(fill) => self.fills.push(fill),
            Acquired::Waiter(waiter) => self.waiters.push(waiter),
            Acquired::Full => self.pins.clear(),
        }
    }

    fn let_go(&mut self) {
        self.pins.clear();
        self.waiters.clear();
        self.fills.clear();
        self.tokens.clear();
        self.leases.drain(..).for_each(Lease::release);
        self.members.clear();
    }
}
