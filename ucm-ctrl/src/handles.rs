//! What an acquire hands out: pins, waiters and fills. Dropping a handle releases it exactly once.
//!
//! **Invariant:** the end of a fill becomes visible in the order data → state → version → wake; a
//! slot that something may still write is neither re-keyed nor given to anybody.

use std::{
    fmt,
    time::{Duration, Instant},
};

use crate::{
    FailKind, Pool, SlotId,
    bucket::Patience,
    event::{ARMED, EventWord, SLEEPERS},
    failpoint::failpoint,
    layout::Slot,
    member::MemberInner,
    region::PoolTables,
    slot::{Phase, SlotWord},
    sync::{Arc, Ordering, spin_hint},
};

/// How long a wait spins before it sleeps in the kernel.
const SPIN: Duration = Duration::from_micros(2);

pub(crate) fn monotonic_ms() -> u64 {
    crate::clock_ms()
}

/// A pinned slot. Released on drop.
pub(crate) struct Handle {
    pool: Pool,
    slot: u32,
    generation: u64,
}

impl Handle {
    /// Takes over a pin already made.
    pub(crate) fn new(pool: &Pool, slot: u32, generation: u64) -> Self {
        Self { pool: pool.clone(), slot, generation }
    }

    fn member(&self) -> &Arc<MemberInner> {
        &self.pool.member
    }

    fn with<R>(&self, f: impl FnOnce(&PoolTables, &Slot) -> R) -> Option<R> {
        if !self.member().may_write() {
            return None;
        }
        let tables = self.pool.tables().ok()?;
        let slot = tables.slot(self.slot)?;
        Some(f(tables, slot))
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.with(|tables, slot| {
            if self.member().unpin(self.pool.id.0, self.slot, &slot.pins) {
                tables.not_full();
            }
        });
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "slot {} of pool {}, generation {}", self.slot, self.pool.id.0, self.generation)
    }
}

/// Keeps a ready slot from being evicted; released on drop.
#[derive(Debug)]
pub struct Pin(Handle);

impl Pin {
    pub(crate) fn new(handle: Handle) -> Self {
        Self(handle)
    }

    /// The pinned slot.
    #[must_use]
    pub fn slot(&self) -> SlotId {
        SlotId(self.0.slot)
    }

    /// Generation of the bytes.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.0.generation
    }

    /// How many bytes of the slot are the shard's: what the fill said when it published. What lies
    /// behind them belongs to an earlier key and must not be read.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        match self.0.with(|_, slot| slot.bytes.load(Ordering::Relaxed)) {
            Some(0) | None => self.0.pool.shard_bytes(),
            Some(bytes) => u64::from(bytes),
        }
    }
}

/// State of somebody else's fill.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FillState {
    /// Not ended.
    Filling,
    /// The bytes are there.
    Ready,
    /// The fill failed.
    Failed(FailKind),
    /// The process that filled it died.
    OwnerDied,
}

/// How a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WaitOutcome {
    /// The bytes are there.
    Ready,
    /// The fill failed; the key is loadable again.
    Failed(FailKind),
    /// The process that filled it died; the key is loadable again.
    OwnerDied,
    /// The deadline passed.
    Deadline,
    /// [`Member::interrupt`](crate::Member::interrupt) was called; the fill goes on.
    Interrupted,
}

/// How a wait for several fills ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WaitAny {
    /// The fill at this position has ended like this.
    Ended(usize, FillState),
    /// The deadline passed.
    Deadline,
    /// [`Member::interrupt`](crate::Member::interrupt) was called; the fills go on.
    Interrupted,
}

/// A pinned slot that somebody else fills; released on drop.
#[derive(Debug)]
pub struct Waiter(Handle);

impl Waiter {
    pub(crate) fn new(handle: Handle) -> Self {
        Self(handle)
    }

    /// The pinned slot.
    #[must_use]
    pub fn slot(&self) -> SlotId {
        SlotId(self.0.slot)
    }

    /// Generation of the fill that is waited for.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.0.generation
    }

    pub(crate) fn belongs_to(&self, member: &Arc<MemberInner>) -> bool {
        Arc::ptr_eq(self.0.member(), member)
    }

    /// How the fill stands now.
    #[must_use]
    pub fn state(&self) -> FillState {
        let word = self.0.with(|_, slot| slot.load());
        word.map_or(FillState::Failed(FailKind::Other), |word| judge(word, self.0.generation))
    }

    /// Asks for this member's doorbell to be rung when the fill ends, and says how it stands after
    /// that. One ring; arm again to hear more.
    pub fn arm(&self) -> FillState {
        self.0.with(|_, slot| slot.version.arm(ARMED));
        self.state()
    }

    /// Sleeps until the fill has ended, at most until the deadline or an
    /// [`interrupt`](crate::Member::interrupt). Uses no CPU; waits of less than about 2 µs never
    /// enter the kernel.
    #[must_use]
    pub fn wait(&self, deadline: Option<Instant>) -> WaitOutcome {
        if let Some(outcome) = self.spin() {
            return outcome;
        }
        self.0.member().doze(|| self.sleep(deadline))
    }

    fn sleep(&self, deadline: Option<Instant>) -> WaitOutcome {
        loop {
            let Some(seen) = self.0.with(|_, slot| slot.version.arm(SLEEPERS)) else {
                return WaitOutcome::Failed(FailKind::Other);
            };
            if let Some(outcome) = ended(self.state()) {
                return outcome;
            }
            if self.0.member().is_interrupted() {
                return WaitOutcome::Interrupted;
            }
            if deadline.is_some_and(|at| at <= Instant::now()) {
                return WaitOutcome::Deadline;
            }
            self.0.with(|_, slot| slot.version.sleep(seen, deadline));
            if let Some(outcome) = ended(self.state()) {
                return outcome;
            }
        }
    }

    fn spin(&self) -> Option<WaitOutcome> {
        if cfg!(ucm_loom) {
            return None;
        }
        let start = Instant::now();
        loop {
            if let Some(outcome) = ended(self.state()) {
                return Some(outcome);
            }
            if start.elapsed() >= SPIN {
                return None;
            }
            for _ in 0..16 {
                spin_hint();
            }
        }
    }

    /// Turns into a pin of the bytes.
    ///
    /// # Errors
    /// Gives the waiter back while the slot is not `Ready`.
    pub fn into_pin(self) -> Result<Pin, Self> {
        let word = self.0.with(|_, slot| slot.load());
        let ready = match word {
            Some(word) if word.phase() == Phase::Ready => word,
            // An evictor's claim that came after our pin: it must give the slot back.
            Some(word) if word.phase() == Phase::ClaimedReady => word.unclaimed(),
            _ => return Err(self),
        };
        let mut handle = self.0;
        handle.generation = ready.generation();
        Ok(Pin(handle))
    }
}

/// What a slot's word says to somebody who waits for the fill of `generation`. The slot is pinned,
/// so its key is the same; only later fills of that key may have happened.
fn judge(word: SlotWord, generation: u64) -> FillState {
    match word.phase() {
        Phase::Ready | Phase::ClaimedReady => FillState::Ready,
        Phase::Filling if word.generation() == generation => FillState::Filling,
        _ if word.kind() == FailKind::OwnerDied => FillState::OwnerDied,
        _ => FillState::Failed(word.kind()),
    }
}

fn ended(state: FillState) -> Option<WaitOutcome> {
    match state {
        FillState::Filling => None,
        FillState::Ready => Some(WaitOutcome::Ready),
        FillState::Failed(kind) => Some(WaitOutcome::Failed(kind)),
        FillState::OwnerDied => Some(WaitOutcome::OwnerDied),
    }
}

/// Why a publish was refused.
#[derive(Debug)]
pub enum PublishError {
    /// Operations that may still write the slot have not ended: the fill is given back.
    IoInFlight(Fill),
    /// This member was removed from the cache meanwhile; the slot is not its any more.
    Fenced,
}

/// The right and duty to fill a slot.
///
/// Ends as [`publish`](Self::publish), [`fail`](Self::fail) or
/// [`abandon_draining`](Self::abandon_draining). Dropped without any of them, it fails as
/// `Abandoned`; if operations are in flight (tokens of [`start_io`](Self::start_io) live), the slot
/// drains first.
#[derive(Debug)]
pub struct Fill {
    /// `None` only while one of the ends consumes the fill.
    core: Option<Arc<FillCore>>,
    slot: SlotId,
    generation: u64,
}

/// Says that an operation may write the slot of a fill. Dropping it states that the operation has
/// ended. May outlive the fill: the slot stays in quarantine until the last token is gone.
#[derive(Clone, Debug)]
pub struct IoToken {
    _core: Option<Arc<FillCore>>,
}

/// Shared between a fill and its tokens. Fields drop in this order when the last of them goes:
/// first the slot leaves quarantine, then it is unpinned.
#[derive(Debug)]
struct FillCore {
    _quarantine: Quarantine,
    handle: Handle,
}

/// Frees the slot when dropped, if it drains by then.
struct Quarantine {
    pool: Pool,
    slot: u32,
    generation: u64,
}

impl Fill {
    pub(crate) fn new(handle: Handle) -> Self {
        let (slot, generation) = (SlotId(handle.slot), handle.generation);
        let quarantine = Quarantine { pool: handle.pool.clone(), slot: handle.slot, generation };
        Self {
            core: Some(Arc::new(FillCore { _quarantine: quarantine, handle })),
            slot,
            generation,
        }
    }

    /// The slot to fill.
    #[must_use]
    pub fn slot(&self) -> SlotId {
        self.slot
    }

    /// Generation of this fill.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// To be held by each operation that writes the slot, until it can write no more.
    #[must_use]
    pub fn start_io(&self) -> IoToken {
        IoToken { _core: self.core.clone() }
    }

    /// Makes a whole shard readable for everybody. Call only after the operation that wrote all of
    /// its bytes has completed successfully. The returned pin keeps them from eviction.
    ///
    /// # Errors
    /// `IoInFlight` while tokens live; `Fenced` when this member was removed meanwhile.
    pub fn publish(self) -> Result<Pin, PublishError> {
        let whole = self.core.as_ref().map_or(0, |core| core.handle.pool.shard_bytes());
        self.publish_bytes(whole)
    }

    /// As [`publish`](Self::publish), of a shard that has only the first `bytes` bytes.
    ///
    /// # Errors
    /// As [`publish`](Self::publish).
    pub fn publish_bytes(mut self, bytes: u64) -> Result<Pin, PublishError> {
        let core = match self.core.take().map(Arc::try_unwrap) {
            Some(Ok(core)) => core,
            Some(Err(shared)) => {
                self.core = Some(shared);
                return Err(PublishError::IoInFlight(self));
            }
            None => return Err(PublishError::Fenced),
        };
        let member = core.handle.member();
        if !member.is_joined() {
            core.end(Phase::Failed, Some(FailKind::OwnerDied));
            member.has_lost_a_slot();
            return Err(PublishError::Fenced);
        }
        // A shard of full size is the rule: zero stands for it.
        let part = if bytes == core.handle.pool.shard_bytes() { 0 } else { bytes };
        let part = u32::try_from(part).unwrap_or(u32::MAX);
        core.handle.with(|_, slot| slot.bytes.store(part, Ordering::Relaxed));
        if !core.end(Phase::Ready, None) {
            core.handle.member().has_lost_a_slot();
            return Err(PublishError::Fenced);
        }
        failpoint!("publish.tell.after");
        core.handle.member().count(|c| &c.publishes, 1);
        // The fill's own pin becomes the caller's.
        Ok(Pin(core.handle))
    }

    /// States that the fill failed and that nothing can write the slot any more: the key is
    /// loadable again at once. While tokens live this is [`abandon_draining`](Self::abandon_draining).
    pub fn fail(mut self, kind: FailKind) {
        self.finish(kind);
    }

    /// Ends the fill while operations may still write the slot: waiters hear of the failure at
    /// once, the key can be loaded into another slot, and this slot stays in quarantine until the
    /// last token is dropped or the process is proven dead.
    pub fn abandon_draining(mut self, kind: FailKind) {
        if let Some(core) = self.core.take() {
            core.drain(kind);
        }
    }

    fn finish(&mut self, kind: FailKind) {
        // Owning the core alone also means to see all that the operations of its tokens wrote.
        match self.core.take().map(Arc::try_unwrap) {
            Some(Ok(core)) => {
                core.end(Phase::Failed, Some(kind));
                core.handle.member().count(|c| &c.failures, 1);
            }
            Some(Err(shared)) => shared.drain(kind),
            None => {}
        }
    }
}

impl Drop for Fill {
    fn drop(&mut self) {
        self.finish(FailKind::Abandoned);
    }
}

impl FillCore {
    /// Leaves `Filling`; false when the slot is not this fill's any more.
    fn end(&self, phase: Phase, kind: Option<FailKind>) -> bool {
        self.change(phase, kind, |_, slot| self.tell(slot))
    }

    fn drain(&self, kind: FailKind) {
        let member = self.handle.member();
        self.change(Phase::Draining, Some(kind), |tables, slot| {
            // Who hears of it may load the key at once: whoever links it clears our entry away.
            self.tell(slot);
            failpoint!("drain.tell.after");
            // Should that not be possible now, the end of the quarantine does it.
            let hasher = member.control.region.hasher();
            tables.vacate(member, hasher, self.handle.slot, Patience::Brief);
        });
        failpoint!("drain.unlink.after");
        member.count(|c| &c.drains, 1);
    }

    fn change(
        &self,
        phase: Phase,
        kind: Option<FailKind>,
        then: impl FnOnce(&PoolTables, &Slot),
    ) -> bool {
        let handle = &self.handle;
        let me = handle.member().index;
        let changed = handle.with(|tables, slot| {
            let word = slot.load();
            let mine = word.phase() == Phase::Filling
                && word.owner() == Some(me)
                && word.generation() == handle.generation;
            failpoint!("end.word.before");
            let owner = (phase == Phase::Draining).then_some(me);
            let next = kind.map_or(word, |kind| word.failed_as(kind)).to(phase, owner);
            let changed = mine && slot.change(word, next);
            if changed {
                failpoint!("end.word.after");
                then(tables, slot);
            }
            changed
        });
        changed.unwrap_or(false)
    }

    /// Call after the state has changed.
    fn tell(&self, slot: &Slot) {
        announce(&self.handle.member().control.region, slot);
    }
}

impl Drop for Quarantine {
    fn drop(&mut self) {
        let member = &self.pool.member;
        if !member.may_write() {
            return;
        }
        if let Ok(tables) = self.pool.tables()
            && let Some(slot) = tables.slot(self.slot)
        {
            let word = slot.load();
            let mine = word.phase() == Phase::Draining
                && word.owner() == Some(member.index)
                && word.generation() == self.generation;
            if mine {
                failpoint!("drain.free.before");
                member.give_back(self.pool.id.0, self.slot, Patience::Enough);
            }
        }
    }
}

impl fmt::Debug for Quarantine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Quarantine").field("slot", &self.slot).finish_non_exhaustive()
    }
}

/// Moves a slot's version on and wakes whoever asked for it. Call after the state has changed.
pub(crate) fn announce(region: &crate::region::Region, slot: &Slot) {
    let bumped = slot.version.bump();
    failpoint!("tell.version.after");
    slot.version.wake(bumped);
    failpoint!("tell.wake.after");
    if bumped.is_armed() {
        for_each_pinner(region, slot, |doorbell| doorbell.ring());
    }
}

/// As [`announce`], for a slot whose owner may have died somewhere in the middle of it.
pub(crate) fn announce_anyway(region: &crate::region::Region, slot: &Slot) {
    slot.version.ring_anyway();
    for_each_pinner(region, slot, EventWord::ring_anyway);
}

fn for_each_pinner(region: &crate::region::Region, slot: &Slot, ring: impl Fn(&EventWord)) {
    for (word_index, word) in slot.pins.iter().enumerate() {
        let mut pins = word.load(Ordering::SeqCst);
        while pins != 0 {
            let member = word_index * 64 + pins.trailing_zeros() as usize;
            pins &= pins - 1;
            if let Some(record) = region.members().get(member) {
                ring(&record.doorbell.0);
            }
        }
    }
}
