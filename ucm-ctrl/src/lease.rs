//! Leases: a scheduler pins what it promised, for a number of consumers, until a deadline.
//!
//! A lease's pins are ordinary pins of its holder, so a dead holder's leases fall with its pins.
//! The shared record only counts the consumers; the last one rings the holder's lease bell, and the
//! holder's keeper thread (which also minds the deadlines) releases the pins.
//!
//! **Invariant:** a lease is consumed at most as often as it was made for, and its pins are released
//! exactly once: by the last consumer's ring, the deadline, the holder's drop, or its death.

use std::{
    collections::HashMap,
    fmt,
    sync::{Mutex, MutexGuard, PoisonError},
    thread::Thread,
    time::{Duration, Instant},
};

use crate::{
    Acquired, Control, CtrlError, Key, Member, Pool,
    attendant::{Alive, Attendant},
    event::SLEEPERS,
    failpoint::failpoint,
    member::MemberInner,
    sync::{Arc, Ordering},
};

/// Names a lease to its consumers; may be passed to other processes as a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LeaseTicket(u64);

impl LeaseTicket {
    /// The ticket as a number.
    #[must_use]
    pub fn to_u64(self) -> u64 {
        self.0
    }

    /// A ticket received as a number; a wrong one is refused when it is redeemed.
    #[must_use]
    pub fn from_u64(number: u64) -> Self {
        Self(number)
    }

    fn new(index: u32, generation: u32) -> Self {
        Self(u64::from(index) | (u64::from(generation) << 32))
    }

    fn index(self) -> u32 {
        u32::try_from(self.0 & u64::from(u32::MAX)).unwrap_or(0)
    }

    fn generation(self) -> u32 {
        u32::try_from(self.0 >> 32).unwrap_or(0)
    }
}

/// Answer of [`Pool::lease`].
#[derive(Debug)]
#[must_use]
pub enum LeaseOutcome {
    /// The first keys are promised.
    Leased(Lease),
    /// Not even the first key is ready.
    NothingReady,
    /// All lease records are in use: try again when one has been consumed.
    TableFull,
}

/// Answer of [`Member::redeem`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Redeemed {
    /// Consumed; so many consumers are left.
    Ok(u16),
    /// The lease was consumed, released, expired, or never existed.
    Gone,
}

/// A promise that the leased keys stay until consumed. Dropping it does not end it; releasing,
/// consumption, the deadline, or the holder's end do.
pub struct Lease {
    ticket: LeaseTicket,
    covered: usize,
    member: Arc<MemberInner>,
}

impl Lease {
    /// What the consumers redeem.
    #[must_use]
    pub fn ticket(&self) -> LeaseTicket {
        self.ticket
    }

    /// How many of the asked keys, from the first, are promised.
    #[must_use]
    pub fn covered(&self) -> usize {
        self.covered
    }

    /// Ends the lease now.
    pub fn release(self) {
        if let Some(keeper) = self.member.keeper.get()
            && self.member.may_write()
        {
            keeper.end(&self.member, self.ticket);
        }
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("ticket", &self.ticket)
            .field("covered", &self.covered)
            .finish_non_exhaustive()
    }
}

impl Pool {
    /// Pins the longest ready prefix of `keys` for `consumers` later loads, until the deadline.
    ///
    /// # Errors
    /// `Invalid` for no consumers; `Fenced`; `Os` when the keeper thread cannot be started.
    pub fn lease(
        &self,
        keys: &[Key],
        consumers: u16,
        deadline: Instant,
    ) -> Result<LeaseOutcome, CtrlError> {
        if consumers == 0 {
            return Err(CtrlError::Invalid("a lease for 0 consumers".into()));
        }
        let mut pins = Vec::with_capacity(keys.len());
        for key in keys {
            match self.acquire_resident(key)? {
                Some(Acquired::Hit(pin)) => pins.push(pin),
                _ => break,
            }
        }
        if pins.is_empty() {
            return Ok(LeaseOutcome::NothingReady);
        }
        failpoint!("lease.pins.before");
        let keeper = Keeper::of(&self.member)?;
        let Some(ticket) = take_record(&self.member, consumers, deadline, pins.len()) else {
            return Ok(LeaseOutcome::TableFull);
        };
        let tables = self.tables()?;
        let slots: Vec<u32> = pins.iter().map(|pin| pin.slot().0).collect();
        for index in &slots {
            if let Some(slot) = tables.slot(*index) {
                self.member.pin(self.id.0, *index, &slot.pins);
            }
        }
        failpoint!("lease.pins.after");
        keeper.add(&self.member, ticket, Held { pool: self.id.0, slots, deadline });
        failpoint!("lease.kept.after");
        self.member.count(|c| &c.leases, 1);
        Ok(LeaseOutcome::Leased(Lease { ticket, covered: pins.len(), member: self.member.clone() }))
    }
}

fn take_record(
    member: &MemberInner,
    consumers: u16,
    deadline: Instant,
    slots: usize,
) -> Option<LeaseTicket> {
    for (index, record) in member.control.region.leases().iter().enumerate() {
        if let Some(generation) = record.take(member.index, consumers) {
            failpoint!("lease.record.after");
            let left = deadline.saturating_duration_since(Instant::now());
            let left = u64::try_from(left.as_millis()).unwrap_or(u64::MAX);
            record.deadline_ms.store(crate::clock_ms().saturating_add(left), Ordering::Relaxed);
            record.slots.store(u32::try_from(slots).unwrap_or(u32::MAX), Ordering::Relaxed);
            record.consumers.store(u32::from(consumers), Ordering::Relaxed);
            failpoint!("lease.fields.after");
            return Some(LeaseTicket::new(u32::try_from(index).ok()?, generation));
        }
    }
    None
}

impl Member {
    /// Consumes a lease once. Call it when the leased keys have been pinned by a load of one's own.
    ///
    /// # Errors
    /// `Fenced`.
    pub fn redeem(&self, ticket: LeaseTicket) -> Result<Redeemed, CtrlError> {
        self.inner.check()?;
        let region = &self.inner.control.region;
        let Some(record) = region.lease(ticket.index()) else { return Ok(Redeemed::Gone) };
        let Some(word) = record.consume(ticket.generation()) else { return Ok(Redeemed::Gone) };
        if word.left() == 0
            && let Some(holder) = region.member(word.holder())
        {
            holder.lease_bell.0.ring();
        }
        failpoint!("redeem.bell.after");
        Ok(Redeemed::Ok(word.left()))
    }

    /// Leases this member holds at the moment.
    #[must_use]
    pub fn leases_held(&self) -> usize {
        match self.inner.keeper.get() {
            Some(keeper) if self.inner.may_write() => lock(&keeper.held).len(),
            _ => 0,
        }
    }
}

/// Wakes the keepers: a consumer may have died between the last consumption and the ring.
pub(crate) fn ring_all_bells(control: &Control) {
    for member in control.region.members() {
        member.lease_bell.0.ring_anyway();
    }
}

/// Frees the lease records of a dead member; its pins are removed with all others.
pub(crate) fn free_records_of(control: &Control, holder: u8) {
    for record in control.region.leases() {
        record.retire(|word| word.holder() == holder);
    }
}

struct Held {
    pool: u8,
    slots: Vec<u32>,
    deadline: Instant,
}

type HeldLeases = std::sync::Arc<Mutex<HashMap<u64, Held>>>;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while the lock is held.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The leases of one member and the thread that releases them in time.
pub(crate) struct Keeper {
    held: HeldLeases,
    thread: Attendant,
}

impl Keeper {
    fn of(member: &Arc<MemberInner>) -> Result<&Self, CtrlError> {
        if member.keeper.get().is_none() {
            let keeper = Self::start(member)?;
            // A second thread may have been faster; the surplus keeper ends at once.
            let _ = member.keeper.set(keeper);
        }
        member.keeper.get().ok_or(CtrlError::Fenced("its lease keeper could not be started"))
    }

    fn start(member: &Arc<MemberInner>) -> Result<Self, CtrlError> {
        let held = HeldLeases::default();
        let (control, index) = (member.control.clone(), member.index);
        let ring = move |_: &Thread| {
            if let Some(record) = control.region.member(index) {
                record.lease_bell.0.ring_anyway();
            }
        };
        let (keeps, control, weak) = (held.clone(), member.control.clone(), Arc::downgrade(member));
        let run = move |alive| keep(&keeps, &alive, &control, index, || weak.upgrade());
        Attendant::start(&member.control, "ucm-leases", ring, run)
            .map(|thread| Self { held, thread })
            .map_err(|source| CtrlError::Os { what: "start the lease keeper thread", source })
    }

    fn add(&self, member: &MemberInner, ticket: LeaseTicket, held: Held) {
        lock(&self.held).insert(ticket.to_u64(), held);
        if let Some(record) = member.record() {
            record.lease_bell.0.ring_anyway();
        }
    }

    fn end(&self, member: &MemberInner, ticket: LeaseTicket) {
        let held = lock(&self.held).remove(&ticket.to_u64());
        if let Some(held) = held {
            release(member, ticket, &held);
        }
    }

    /// Releases everything; for the holder's own end. The thread goes first: what it has taken in
    /// hand and cannot release any more is on record again then.
    pub(crate) fn end_all(self, member: &MemberInner) {
        drop(self.thread);
        let all: Vec<_> = lock(&self.held).drain().collect();
        for (ticket, held) in all {
            release(member, LeaseTicket(ticket), &held);
        }
    }
}

impl fmt::Debug for Keeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keeper").field("leases", &lock(&self.held).len()).finish_non_exhaustive()
    }
}

fn release(member: &MemberInner, ticket: LeaseTicket, held: &Held) {
    if !member.may_write() {
        return;
    }
    let region = &member.control.region;
    if let Some(record) = region.lease(ticket.index()) {
        record.retire(|word| word.generation() == ticket.generation());
    }
    failpoint!("unlease.record.after");
    if let Some(tables) = region.pool(usize::from(held.pool)) {
        for index in &held.slots {
            if let Some(slot) = tables.slot(*index)
                && member.unpin(held.pool, *index, &slot.pins)
            {
                tables.not_full();
            }
        }
    }
}

fn keep(
    held: &HeldLeases,
    alive: &Alive,
    control: &Control,
    index: u8,
    member: impl Fn() -> Option<Arc<MemberInner>>,
) {
    let Some(record) = control.region.member(index) else { return };
    loop {
        let seen = record.lease_bell.0.arm(SLEEPERS);
        if alive.is_over() {
            return;
        }
        let now = Instant::now();
        let mut next: Option<Instant> = None;
        let mut due = Vec::new();
        {
            let mut held = lock(held);
            let tickets: Vec<u64> = held.keys().copied().collect();
            for ticket in tickets {
                let spent =
                    control.region.lease(LeaseTicket(ticket).index()).is_none_or(|record| {
                        let word = record.load();
                        let ours = word.generation() == LeaseTicket(ticket).generation();
                        !ours || !word.is_live() || word.left() == 0
                    });
                let Some(lease) = held.get(&ticket) else { continue };
                if spent || lease.deadline <= now {
                    due.extend(held.remove(&ticket).map(|lease| (ticket, lease)));
                } else {
                    next = Some(next.map_or(lease.deadline, |at| at.min(lease.deadline)));
                }
            }
        }
        if due.is_empty() {
            // A clock that stands still for a moment must not turn this into a busy loop.
            record
                .lease_bell
                .0
                .sleep(seen, next.map(|at| at.max(now + Duration::from_micros(100))));
            continue;
        }
        let Some(member) = member() else {
            // Its holder is ending and releases everything that is on record.
            lock(held).extend(due);
            return;
        };
        for (ticket, lease) in due {
            release(&member, LeaseTicket(ticket), &lease);
        }
    }
}
