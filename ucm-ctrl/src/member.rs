//! Members: ranks and schedulers that joined the region.
//!
//! **Invariant:** a release without a pin poisons the member instead of being ignored; a member
//! that somebody has cleared up after writes no more.

use std::{fmt, sync::OnceLock, time::Instant};

use crate::{
    Control, CtrlError, Liveness, MemberId, Pool, PoolId, WaitAny, Waiter,
    event::{EventWord, SLEEPERS},
    failpoint::failpoint,
    handles::announce,
    layout::{Counters, MAX_MEMBERS, MemberRecord, Slot},
    pins::{Pins, Release},
    region::Region,
    sync::{Arc, AtomicU32, AtomicU64, Counter, Ordering, spin_hint},
};

/// What a member does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Role {
    /// A process with a device: maps the data plane, loads and dumps.
    Rank = 1,
    /// Asks what is there and makes leases; never maps bytes.
    Scheduler = 2,
}

/// How a member introduces itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemberSpec {
    /// What it does.
    pub role: Role,
    /// Device id; negative for schedulers.
    pub device_id: i32,
    /// Ranks on this node.
    pub local_rank_count: u32,
    /// Random number that names this stay, so that news of an earlier stay on the same seat cannot
    /// be mistaken for news of this one. All zero if nobody reports deaths by it.
    pub incarnation: [u8; 16],
}

/// In place of an observer's device.
pub const OBSERVER: i32 = -2;

impl MemberSpec {
    /// A rank on device `device_id` of `local_rank_count`.
    #[must_use]
    pub fn rank(device_id: i32, local_rank_count: u32) -> Self {
        Self { role: Role::Rank, device_id, local_rank_count, incarnation: [0; 16] }
    }

    /// A scheduler.
    #[must_use]
    pub fn scheduler() -> Self {
        Self { role: Role::Scheduler, device_id: -1, local_rank_count: 0, incarnation: [0; 16] }
    }

    /// Somebody who only looks: the cache is not kept for it.
    #[must_use]
    pub fn observer() -> Self {
        Self { device_id: OBSERVER, ..Self::scheduler() }
    }

    /// The same, named by `incarnation`.
    #[must_use]
    pub fn named(self, incarnation: [u8; 16]) -> Self {
        Self { incarnation, ..self }
    }
}

/// State of a member record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum MemberState {
    /// Nobody's.
    Free = 0,
    /// In use.
    Joined = 1,
    /// Its holder died, or is leaving; the named member, perhaps itself, clears up.
    Reaping = 2,
    /// Taken; its holder is still writing who it is.
    Joining = 3,
    /// Declared gone by an operator; its holder may only let go.
    Expelled = 4,
    /// Not a value of this layout.
    Invalid = 255,
}

/// Bits 0..8 state, 8..16 reaper, 32..64 generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MemberWord(pub(crate) u64);

impl MemberWord {
    pub(crate) fn state(self) -> MemberState {
        match self.0 & 0xff {
            0 => MemberState::Free,
            1 => MemberState::Joined,
            2 => MemberState::Reaping,
            3 => MemberState::Joining,
            4 => MemberState::Expelled,
            _ => MemberState::Invalid,
        }
    }

    pub(crate) fn reaper(self) -> u8 {
        (self.0 >> 8).to_le_bytes()[0]
    }

    pub(crate) fn generation(self) -> u32 {
        u32::try_from(self.0 >> 32).unwrap_or(0)
    }

    pub(crate) fn with(state: MemberState, reaper: u8, generation: u32) -> Self {
        Self(state as u64 | (u64::from(reaper) << 8) | (u64::from(generation) << 32))
    }
}

/// A process's membership in a control region. Cheap to clone; thread-safe. The record is given
/// back when the last clone and the last handle made from it are gone.
#[derive(Clone)]
pub struct Member {
    pub(crate) inner: Arc<MemberInner>,
}

pub(crate) struct MemberInner {
    pub(crate) control: Control,
    pub(crate) index: u8,
    pub(crate) generation: u32,
    /// The record's word while this stay goes on.
    joined: u64,
    pins: Pins,
    /// The thread that counts its hits alone, by its [`thread_mark`]; 0 before the first hit.
    hit_thread: Counter,
    /// Set when the member must not touch the region any more.
    fenced: AtomicU32,
    /// 1 while all waits of this process end at once.
    interrupted: Counter,
    /// Threads of this process that sleep on a word of the region, or are about to.
    dozing: Counter,
    liveness: OnceLock<std::sync::Arc<dyn Liveness>>,
    /// Pool and index of slots that wait for their buckets.
    pub(crate) leftovers: std::sync::Mutex<Vec<(u8, u32)>>,
    /// How many these are.
    pub(crate) leftover: Counter,
    /// 1 while a thread tries them again.
    #[cfg(not(ucm_loom))]
    pub(crate) reminded: Counter,
    #[cfg(not(ucm_loom))]
    pub(crate) reminder: std::sync::Mutex<Option<crate::attendant::Attendant>>,
    #[cfg(not(ucm_loom))]
    pub(crate) me: std::sync::Weak<Self>,
    /// One reap at a time in a process.
    #[cfg(not(ucm_loom))]
    pub(crate) reaping: std::sync::Mutex<()>,
    #[cfg(not(ucm_loom))]
    pub(crate) keeper: OnceLock<crate::lease::Keeper>,
    #[cfg(not(ucm_loom))]
    pub(crate) teller: OnceLock<crate::teller::Teller>,
    /// Dropped last, after the record was given back.
    guard: OnceLock<Box<dyn std::any::Any + Send + Sync>>,
}

const NOT_FENCED: u32 = 0;
const FENCED_LOST: u32 = 1;
const FENCED_UNDERFLOW: u32 = 2;

pub(crate) fn free_record(region: &Region, except: &[u16]) -> Option<MemberId> {
    let is_free = |index: &u8| {
        region
            .member(*index)
            .is_some_and(|r| MemberWord(r.word.load(Ordering::SeqCst)).state() == MemberState::Free)
            && !except.contains(&u16::from(*index))
    };
    (0..MAX_MEMBERS).filter_map(|i| u8::try_from(i).ok()).find(is_free).map(MemberId)
}

pub(crate) fn incarnation(region: &Region, id: MemberId) -> Option<[u8; 16]> {
    let record = region.member(id.0)?;
    let word = record.word.load(Ordering::SeqCst);
    let mut halves = record.incarnation.iter().map(|half| half.load(Ordering::SeqCst));
    let (lo, hi) = (halves.next()?, halves.next()?);
    let steady = record.word.load(Ordering::SeqCst) == word;
    (steady && matches!(MemberWord(word).state(), MemberState::Joined | MemberState::Expelled))
        .then(|| crate::BlockId::from_halves(lo, hi).0)
}

pub(crate) fn is_stay_over(region: &Region, id: MemberId, incarnation: [u8; 16]) -> bool {
    let Some(record) = region.member(id.0) else { return true };
    let word = record.word.load(Ordering::SeqCst);
    if matches!(MemberWord(word).state(), MemberState::Free | MemberState::Joining) {
        return true;
    }
    let (lo, hi) = crate::BlockId(incarnation).halves();
    let named = record.incarnation.iter().map(|half| half.load(Ordering::SeqCst)).eq([lo, hi]);
    // Written before the record was joined: they belong to this word if it is still there.
    !named && record.word.load(Ordering::SeqCst) == word
}

pub(crate) fn join(
    control: &Control,
    at: Option<MemberId>,
    spec: MemberSpec,
) -> Result<Member, CtrlError> {
    let region = &control.region;
    if !region.is_ours() {
        return Err(CtrlError::Fenced("it belongs to the parent of this forked process"));
    }
    loop {
        let id = match at {
            Some(id) => id,
            None => free_record(region, &[]).ok_or(CtrlError::MembersFull(MAX_MEMBERS))?,
        };
        let record = region
            .member(id.0)
            .ok_or_else(|| CtrlError::Invalid(format!("there is no member record {}", id.0)))?;
        let seen = MemberWord(record.word.load(Ordering::SeqCst));
        if seen.state() == MemberState::Free {
            let generation = seen.generation().wrapping_add(1);
            let mine = MemberWord::with(MemberState::Joining, 0, generation);
            if record
                .word
                .compare_exchange(seen.0, mine.0, Ordering::SeqCst, Ordering::Relaxed)
                .is_ok()
            {
                return introduce(control, id.0, generation, record, spec);
            }
        }
        if let Some(id) = at {
            return Err(CtrlError::MemberTaken(id));
        }
        spin_hint();
    }
}

fn introduce(
    control: &Control,
    index: u8,
    generation: u32,
    record: &MemberRecord,
    spec: MemberSpec,
) -> Result<Member, CtrlError> {
    failpoint!("join.word.after");
    record.pid.store(std::process::id(), Ordering::Relaxed);
    record.device.store(spec.device_id.cast_unsigned(), Ordering::Relaxed);
    record.local_ranks.store(spec.local_rank_count, Ordering::Relaxed);
    record.role.store(spec.role as u32, Ordering::Relaxed);
    record.joined_ms.store(crate::clock_ms(), Ordering::Relaxed);
    let (lo, hi) = crate::BlockId(spec.incarnation).halves();
    for (to, from) in record.incarnation.iter().zip([lo, hi]) {
        to.store(from, Ordering::Relaxed);
    }
    failpoint!("join.fields.after");
    // Only now may anybody judge this stay by what the record says.
    let joined = MemberWord::with(MemberState::Joined, 0, generation);
    let joining = MemberWord::with(MemberState::Joining, 0, generation);
    let word = &record.word;
    if word.compare_exchange(joining.0, joined.0, Ordering::SeqCst, Ordering::Relaxed).is_err() {
        return Err(CtrlError::Fenced("its record was taken for a dead process's while it joined"));
    }
    failpoint!("join.joined.after");
    let inner = |#[cfg(not(ucm_loom))] me: &std::sync::Weak<MemberInner>| MemberInner {
        control: control.clone(),
        index,
        generation,
        joined: joined.0,
        pins: Pins::new(index),
        hit_thread: Counter::new(0),
        fenced: AtomicU32::new(NOT_FENCED),
        interrupted: Counter::new(0),
        dozing: Counter::new(0),
        liveness: OnceLock::new(),
        leftovers: std::sync::Mutex::default(),
        leftover: Counter::new(0),
        #[cfg(not(ucm_loom))]
        reminded: Counter::new(0),
        #[cfg(not(ucm_loom))]
        reminder: std::sync::Mutex::default(),
        #[cfg(not(ucm_loom))]
        me: me.clone(),
        #[cfg(not(ucm_loom))]
        reaping: std::sync::Mutex::new(()),
        #[cfg(not(ucm_loom))]
        keeper: OnceLock::new(),
        #[cfg(not(ucm_loom))]
        teller: OnceLock::new(),
        guard: OnceLock::new(),
    };
    #[cfg(not(ucm_loom))]
    let inner = Arc::new_cyclic(inner);
    #[cfg(ucm_loom)]
    let inner = Arc::new(inner());
    Ok(Member { inner })
}

impl Member {
    /// Seat of this member.
    #[must_use]
    pub fn id(&self) -> MemberId {
        MemberId(self.inner.index)
    }

    /// How often this seat was taken, including this time.
    #[must_use]
    pub fn generation(&self) -> u32 {
        self.inner.generation
    }

    /// The region this member belongs to.
    #[must_use]
    pub fn control(&self) -> &Control {
        &self.inner.control
    }

    /// A pool of the region.
    ///
    /// # Errors
    /// `Invalid` for a pool that does not exist.
    pub fn pool(&self, id: PoolId) -> Result<Pool, CtrlError> {
        Pool::new(&self.inner, id)
    }

    /// Says how deaths of other members are proved. Without it a lock of a dead member is only
    /// freed by [`reap`](Self::reap). The first call counts.
    pub fn set_liveness(&self, liveness: std::sync::Arc<dyn Liveness>) {
        let _ = self.inner.liveness.set(liveness);
    }

    /// Keeps a value until the member record has been given back: what proves this member's life to
    /// the others must outlive its use of the region. The first call counts.
    pub fn keep_until_left(&self, guard: Box<dyn std::any::Any + Send + Sync>) {
        let _ = self.inner.guard.set(guard);
    }

    /// A reference that does not keep the member.
    #[cfg(not(ucm_loom))]
    #[must_use]
    pub fn downgrade(&self) -> WeakMember {
        WeakMember(Arc::downgrade(&self.inner))
    }

    /// Pins this process holds, over all pools. Walks all slots: for inspection and tests.
    #[must_use]
    pub fn pins_held(&self) -> u64 {
        self.inner.pins_held()
    }

    /// This member's doorbell.
    #[must_use]
    pub fn doorbell(&self) -> Doorbell {
        Doorbell { inner: self.inner.clone() }
    }

    /// Ends all waits of this member's handles, and those that begin later, with `Interrupted`, until
    /// [`end_interrupt`](Self::end_interrupt). Fills and pins stay as they are.
    ///
    /// Meant for SIGTERM: safe in a signal handler (atomics and futex wake-ups only). Walks this
    /// process's pins, so it takes microseconds per thousand slots of the cache.
    pub fn interrupt(&self) {
        self.inner.interrupt();
    }

    /// Lets waits last again.
    pub fn end_interrupt(&self) {
        self.inner.interrupted.store(0, Ordering::SeqCst);
    }

    /// Sleeps until one of the fills has ended, at most until the deadline or an
    /// [`interrupt`](Self::interrupt). All waiters must belong to this member; any number is
    /// possible.
    ///
    /// # Errors
    /// `Invalid` for no waiters or waiters of another member; `Fenced`.
    pub fn wait_any(
        &self,
        waiters: &[&Waiter],
        deadline: Option<Instant>,
    ) -> Result<WaitAny, CtrlError> {
        self.inner.check()?;
        if waiters.is_empty() || waiters.iter().any(|w| !w.belongs_to(&self.inner)) {
            return Err(CtrlError::Invalid(format!(
                "cannot wait for {} waiters of this member",
                waiters.len()
            )));
        }
        let doorbell = self.doorbell();
        loop {
            let ticket = doorbell.ticket();
            for (index, waiter) in waiters.iter().enumerate() {
                let state = waiter.arm();
                if state != crate::FillState::Filling {
                    return Ok(WaitAny::Ended(index, state));
                }
            }
            if self.inner.is_interrupted() {
                return Ok(WaitAny::Interrupted);
            }
            if deadline.is_some_and(|at| at <= Instant::now()) {
                return Ok(WaitAny::Deadline);
            }
            doorbell.wait(ticket, deadline);
        }
    }
}

/// A reference to a [`Member`] that does not keep it.
#[cfg(not(ucm_loom))]
#[derive(Clone)]
pub struct WeakMember(std::sync::Weak<MemberInner>);

#[cfg(not(ucm_loom))]
impl WeakMember {
    /// The member, if it has not left.
    #[must_use]
    pub fn upgrade(&self) -> Option<Member> {
        self.0.upgrade().map(|inner| Member { inner })
    }
}

#[cfg(not(ucm_loom))]
impl fmt::Debug for WeakMember {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WeakMember").finish_non_exhaustive()
    }
}

impl fmt::Debug for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Member")
            .field("index", &self.inner.index)
            .field("generation", &self.inner.generation)
            .finish_non_exhaustive()
    }
}

/// The one place where a member sleeps: rung by owners whose fills it waits for, and by its own
/// process for local events. Cheap to clone; thread-safe.
#[derive(Clone)]
pub struct Doorbell {
    inner: Arc<MemberInner>,
}

impl Doorbell {
    /// Wakes this member's sleepers. One atomic operation when nobody sleeps; safe in a signal
    /// handler.
    pub fn ring(&self) {
        self.inner.ring_doorbell();
    }

    /// To be read before looking at the conditions one waits for.
    #[must_use]
    pub fn ticket(&self) -> u32 {
        self.inner.record().map_or(0, |record| record.doorbell.0.count())
    }

    /// Sleeps until the doorbell has been rung since `ticket`, at most until the deadline. Returns
    /// early at will: look at the conditions again.
    pub fn wait(&self, ticket: u32, deadline: Option<Instant>) {
        if let Some(record) = self.inner.record() {
            self.inner.doze(|| {
                let seen = record.doorbell.0.arm(SLEEPERS);
                if EventWord::count_in(seen) == ticket {
                    record.doorbell.0.sleep(seen, deadline);
                }
            });
        }
    }
}

impl fmt::Debug for Doorbell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Doorbell").field("member", &self.inner.index).finish_non_exhaustive()
    }
}

/// A number that no other living thread of this process has; never 0.
fn thread_mark() -> u64 {
    thread_local! {
        static MARK: u8 = const { 0 };
    }
    MARK.with(|mark| std::ptr::from_ref(mark).addr() as u64)
}

impl MemberInner {
    /// Refuses when this handle must not begin anything in the region any more.
    #[inline]
    pub(crate) fn check(&self) -> Result<(), CtrlError> {
        if self.joined_record().is_some() { Ok(()) } else { Err(self.why_refused()) }
    }

    /// The member's record, while it may begin something. A forked child sees none.
    #[inline]
    pub(crate) fn joined_record(&self) -> Option<&MemberRecord> {
        let record = self.control.region.member(self.index)?;
        let joined = record.word.load(Ordering::Acquire) == self.joined;
        (joined && self.fenced.load(Ordering::Relaxed) == NOT_FENCED).then_some(record)
    }

    #[cold]
    fn why_refused(&self) -> CtrlError {
        CtrlError::Fenced(match self.fenced.load(Ordering::Relaxed) {
            NOT_FENCED if !self.control.region.is_ours() => {
                "it belongs to the parent of this forked process"
            }
            NOT_FENCED if self.is_expelled() => "an operator has expelled it: restart this process",
            FENCED_UNDERFLOW => "a pin was released twice, which is a bug: restart this process",
            _ => {
                self.has_lost_a_slot();
                "it was removed from the cache: join again"
            }
        })
    }

    /// True while the region may be written in this member's name.
    pub(crate) fn may_write(&self) -> bool {
        self.fenced.load(Ordering::Relaxed) == NOT_FENCED && self.control.region.is_ours()
    }

    /// True while this member may clear up after the dead. An operator's word against it is no reason to
    /// leave that to others: it may be the only one that has the proof.
    pub(crate) fn may_clear_up(&self) -> bool {
        self.may_write() && (self.is_joined() || self.is_expelled())
    }

    /// True while the record says that this stay goes on.
    #[inline]
    pub(crate) fn is_joined(&self) -> bool {
        self.control
            .region
            .member(self.index)
            .is_some_and(|record| record.word.load(Ordering::Acquire) == self.joined)
    }

    fn is_expelled(&self) -> bool {
        let expelled = MemberWord::with(MemberState::Expelled, 0, self.generation);
        self.control
            .region
            .member(self.index)
            .is_some_and(|record| record.word.load(Ordering::SeqCst) == expelled.0)
    }

    /// A slot of this member is not its any more. Unless an operator has expelled it, somebody has
    /// cleared up after it, and it must not touch anything.
    pub(crate) fn has_lost_a_slot(&self) {
        if !self.is_expelled() {
            self.fence();
        }
    }

    /// Stops all further use: somebody has cleared up after this member.
    pub(crate) fn fence(&self) {
        self.fenced.store(FENCED_LOST, Ordering::SeqCst);
    }

    pub(crate) fn is_interrupted(&self) -> bool {
        self.interrupted.load(Ordering::SeqCst) != 0
    }

    fn interrupt(&self) {
        self.interrupted.store(1, Ordering::SeqCst);
        if !self.may_write() {
            return;
        }
        let region = &self.control.region;
        // A wait sleeps on its slot's version or on the doorbell. Others that sleep there look again
        // and go on sleeping.
        for slot in self.slots().filter(|slot| self.pins.is_set(&slot.pins)) {
            announce(region, slot);
            if self.is_dozing() {
                slot.version.wake_all();
            }
        }
        self.ring_doorbell();
    }

    /// Wakes this process's sleepers, whatever other members have written over the doorbell's flags.
    fn ring_doorbell(&self) {
        if let Some(record) = self.record() {
            // Whoever dozes only after the word has moved sees that it has.
            record.doorbell.0.ring_if(|| self.is_dozing());
        }
    }

    /// Runs what sleeps on a word of the region; who rings for this process knows that it does.
    pub(crate) fn doze<R>(&self, sleep: impl FnOnce() -> R) -> R {
        self.dozing.fetch_add(1, Ordering::SeqCst);
        let result = sleep();
        self.dozing.fetch_sub(1, Ordering::SeqCst);
        result
    }

    /// The checkers' models show that the flags suffice while nobody spoils them.
    fn is_dozing(&self) -> bool {
        cfg!(not(ucm_loom)) && self.dozing.load(Ordering::SeqCst) != 0
    }

    pub(crate) fn record(&self) -> Option<&MemberRecord> {
        if self.control.region.is_ours() { self.control.region.member(self.index) } else { None }
    }

    pub(crate) fn count(&self, pick: impl FnOnce(&Counters) -> &Counter, by: u64) {
        if by != 0
            && let Some(record) = self.control.region.member(self.index)
        {
            pick(&record.counters).fetch_add(by, Ordering::Relaxed);
        }
    }

    /// Counts a hit. The thread that made the first one does so without a locked instruction.
    pub(crate) fn count_hit(&self, record: &MemberRecord) {
        let (counters, me) = (&record.counters, thread_mark());
        let mine = |thread: u64| thread == me || thread == 0 && self.claim_hits(me);
        if mine(self.hit_thread.load(Ordering::Relaxed)) {
            let hits = counters.hits.load(Ordering::Relaxed);
            counters.hits.store(hits.wrapping_add(1), Ordering::Relaxed);
        } else {
            counters.further_hits.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[cold]
    fn claim_hits(&self, thread: u64) -> bool {
        self.hit_thread.compare_exchange(0, thread, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    pub(crate) fn is_dead(&self, member: u8) -> bool {
        self.liveness.get().is_some_and(|l| l.is_dead(MemberId(member)))
    }

    /// Pins a slot once more.
    pub(crate) fn pin(&self, pool: u8, slot: u32, pins: &[AtomicU64; 2]) {
        self.pins.pin(pool, slot, pins);
    }

    /// Releases one pin; true when it was the slot's last pin of all members. Only to be called
    /// while [`may_write`](Self::may_write).
    pub(crate) fn unpin(&self, pool: u8, slot: u32, pins: &[AtomicU64; 2]) -> bool {
        match self.pins.unpin(pool, slot, pins) {
            Release::Pinned => false,
            Release::Last => true,
            // Whoever clears up after a member takes its pins away, too.
            Release::Nothing if !self.is_joined() => {
                self.has_lost_a_slot();
                false
            }
            Release::Nothing => {
                self.fenced.store(FENCED_UNDERFLOW, Ordering::SeqCst);
                false
            }
        }
    }

    /// Pins this process holds, over all slots; 0 in a forked child.
    pub(crate) fn pins_held(&self) -> u64 {
        if !self.control.region.is_ours() {
            return 0;
        }
        let first = self.slots().filter(|slot| self.pins.is_set(&slot.pins)).count();
        first as u64 + self.pins.further_pins()
    }

    /// All slots; none in a forked child.
    fn slots(&self) -> impl Iterator<Item = &Slot> {
        let region = &self.control.region;
        let pools = if region.is_ours() { region.geometry().pools.len() } else { 0 };
        (0..pools).filter_map(|pool| region.pool(pool)).flat_map(|tables| tables.slots.iter())
    }
}

impl Drop for MemberInner {
    fn drop(&mut self) {
        #[cfg(not(ucm_loom))]
        if let Some(keeper) = self.keeper.take()
            && self.control.region.is_ours()
        {
            keeper.end_all(self);
        }
        #[cfg(not(ucm_loom))]
        if let Some(teller) = self.teller.take()
            && self.control.region.is_ours()
        {
            teller.end_all(self);
        }
        #[cfg(not(ucm_loom))]
        self.end_reminder();
        failpoint!("leave.word.before");
        let Some(record) = self.control.region.member(self.index) else { return };
        // From here on nobody counts on this member; if it dies, whoever reaps it goes on.
        let leaving = MemberWord::with(MemberState::Reaping, self.index, self.generation);
        let from = |state| MemberWord::with(state, 0, self.generation);
        let left = self.may_write()
            && [MemberState::Joined, MemberState::Expelled].map(from).iter().any(|mine| {
                let word = &record.word;
                word.compare_exchange(mine.0, leaving.0, Ordering::SeqCst, Ordering::Relaxed)
                    .is_ok()
            });
        // If not, somebody has cleared up after this member, and the record is not its own.
        if !left {
            return;
        }
        failpoint!("leave.gone.after");
        // Groups that wait for its vote are off; so are those that wait for it to open them.
        #[cfg(not(ucm_loom))]
        {
            crate::group::clear(&self.control.region, self.index);
            crate::group::ring_all(&self.control.region, false);
        }
        // With slots left that cannot be unlinked at the moment, the record stays for those who hear of the
        // leave: they clear up as after a death.
        if !self.retry_leftovers() {
            return;
        }
        let _ = record.word.compare_exchange(
            leaving.0,
            from(MemberState::Free).0,
            Ordering::SeqCst,
            Ordering::Relaxed,
        );
        failpoint!("leave.word.after");
    }
}
