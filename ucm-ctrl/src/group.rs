//! Votes of several members on one thing: all of them for it, or it is off. The records in the region
//! and what may be done to them; who waits for a decision is in `teller.rs`.
//!
//! A record belongs to one attempt of one group. The first of its members opens it, each sets its own
//! bit when it votes for it, the last one commits; one vote against aborts. A decided record is free
//! again when all members have taken note.
//!
//! **Invariant:** a group is decided once, by one compare-and-swap. A member that ends before its vote
//! aborts it; so does one that ends after its vote, unless what it voted for outlives it.

use crate::{
    MemberStay,
    failpoint::failpoint,
    layout::GroupRecord,
    member::{MemberInner, MemberState, MemberWord},
    region::Region,
    sync::{AtomicU64, Ordering},
};

/// State of a group record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum GroupState {
    /// Nobody's.
    Free = 0,
    /// Taken; its opener is still writing what it is about.
    Opening = 1,
    /// Not decided.
    Open = 2,
    /// All have voted for it.
    Committed = 3,
    /// Somebody voted against it, or can vote no more.
    Aborted = 4,
    /// Not a value of this layout.
    Invalid = 255,
}

/// Bits 0..8 state, 8..16 opener, 16 lasting, 17 settled, 32..64 generation.
///
/// *Settled*: the opener has looked at all members since it opened the record, so that who holds it is a
/// member that will let go, or whose end will be seen to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GroupWord(u64);

impl GroupWord {
    fn new(state: GroupState, opener: u8, lasting: bool, generation: u32) -> Self {
        let [lasting, opener, generation] =
            [u64::from(lasting) << 16, u64::from(opener) << 8, u64::from(generation) << 32];
        Self(state as u64 | opener | lasting | generation)
    }

    pub(crate) fn state(self) -> GroupState {
        match self.0 & 0xff {
            0 => GroupState::Free,
            1 => GroupState::Opening,
            2 => GroupState::Open,
            3 => GroupState::Committed,
            4 => GroupState::Aborted,
            _ => GroupState::Invalid,
        }
    }

    fn to(self, state: GroupState) -> Self {
        Self(self.0 & !0xff | state as u64)
    }

    fn opener(self) -> u8 {
        (self.0 >> 8).to_le_bytes()[0]
    }

    fn is_lasting(self) -> bool {
        self.0 & (1 << 16) != 0
    }

    fn is_settled(self) -> bool {
        self.0 & SETTLED != 0
    }

    fn generation(self) -> u32 {
        u32::try_from(self.0 >> 32).unwrap_or(0)
    }

    /// Whether the other fields may be read.
    fn is_complete(self) -> bool {
        self.is_decided() || self.state() == GroupState::Open
    }

    fn is_decided(self) -> bool {
        matches!(self.state(), GroupState::Committed | GroupState::Aborted)
    }
}

const SETTLED: u64 = 1 << 17;

/// A set of seats.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Seats([u64; 2]);

impl Seats {
    pub(crate) fn of(stays: &[MemberStay]) -> Self {
        let mut seats = Self::default();
        for stay in stays {
            if let Some((word, bit)) = place_of(stay.id.0)
                && let Some(word) = seats.0.get_mut(word)
            {
                *word |= bit;
            }
        }
        seats
    }

    fn load(words: &[AtomicU64; 2]) -> Self {
        Self(words.each_ref().map(|word| word.load(Ordering::SeqCst)))
    }

    fn has(self, seat: u8) -> bool {
        let word = |(word, bit): (usize, u64)| self.0.get(word).is_some_and(|word| word & bit != 0);
        place_of(seat).is_some_and(word)
    }

    fn all_in(self, other: Self) -> bool {
        self.0.iter().zip(other.0).all(|(mine, theirs)| mine & !theirs == 0)
    }

    pub(crate) fn len(self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    pub(crate) fn iter(self) -> impl Iterator<Item = u8> {
        (0..128).filter(move |seat| self.has(*seat))
    }
}

/// Word and bit of a seat in a set.
fn place_of(seat: u8) -> Option<(usize, u64)> {
    let word = usize::from(seat) / 64;
    (word < 2).then_some((word, 1_u64 << (seat % 64)))
}

fn set(words: &[AtomicU64; 2], seat: u8) {
    if let Some((word, bit)) = place_of(seat)
        && let Some(word) = words.get(word)
    {
        word.fetch_or(bit, Ordering::SeqCst);
    }
}

fn unset(words: &[AtomicU64; 2], seat: u8) {
    if let Some((word, bit)) = place_of(seat)
        && let Some(word) = words.get(word)
    {
        word.fetch_and(!bit, Ordering::SeqCst);
    }
}

/// A record in the hands of one of its members, until that lets go of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seated {
    index: u32,
    generation: u32,
}

/// What came of opening a record.
pub(crate) enum Opened {
    Yes(Seated),
    /// No record is free; whoever frees one rings.
    Full,
}

impl GroupRecord {
    pub(crate) fn load(&self) -> GroupWord {
        GroupWord(self.word.load(Ordering::SeqCst))
    }

    fn change(&self, from: GroupWord, to: GroupWord) -> bool {
        self.word.compare_exchange(from.0, to.0, Ordering::SeqCst, Ordering::Relaxed).is_ok()
    }

    pub(crate) fn members(&self) -> Seats {
        Seats::load(&self.members)
    }

    pub(crate) fn holders(&self) -> Seats {
        Seats::load(&self.holders)
    }

    /// As [`change`](Self::change), also if the opener has settled the record since `from` was read.
    fn conclude(&self, from: GroupWord, state: GroupState) -> bool {
        let settled = GroupWord(from.0 | SETTLED);
        self.change(from, from.to(state)) || self.change(settled, settled.to(state))
    }

    /// Others can only abort it meanwhile: its opener has not voted.
    fn mark_settled(&self, generation: u32) {
        for _ in 0..2 {
            let word = self.load();
            if word.generation() != generation
                || !word.is_complete()
                || self.change(word, GroupWord(word.0 | SETTLED))
            {
                return;
            }
        }
    }

    /// Decides for it if all have voted for it.
    fn settle(&self, word: GroupWord) -> bool {
        let all = self.members().all_in(Seats::load(&self.ready));
        all && word.state() == GroupState::Open && self.conclude(word, GroupState::Committed)
    }
}

fn record(region: &Region, seated: Seated) -> Option<(&GroupRecord, GroupWord)> {
    let record = region.groups().get(seated.index as usize)?;
    let word = record.load();
    (word.generation() == seated.generation && word.is_complete()).then_some((record, word))
}

/// The open or decided record of a group that `seat` has not let go of.
pub(crate) fn find(region: &Region, id: [u64; 2], lasting: bool, seat: u8) -> Option<Seated> {
    (0_u32..).zip(region.groups()).find_map(|(index, record)| {
        let word = record.load();
        let same = word.is_complete()
            && word.is_lasting() == lasting
            && record.id.each_ref().map(|half| half.load(Ordering::SeqCst)) == id
            && record.holders().has(seat);
        // What was read belongs to this generation if it is still there.
        let still = same && record.load().generation() == word.generation();
        still.then_some(Seated { index, generation: word.generation() })
    })
}

/// Takes a free record for a group.
pub(crate) fn open(me: &MemberInner, id: [u64; 2], lasting: bool, roster: &[MemberStay]) -> Opened {
    let region = &me.control.region;
    if let Some(seated) = claim(me, id, lasting, roster) {
        return Opened::Yes(seated);
    }
    let Some(hot) = region.group_hot() else { return Opened::Full };
    hot.full.0.store(1, Ordering::SeqCst);
    failpoint!("group.full.after");
    // Whoever frees a record does so first and reads the flag then: one of the two sees the other.
    claim(me, id, lasting, roster).map_or(Opened::Full, Opened::Yes)
}

fn claim(me: &MemberInner, id: [u64; 2], lasting: bool, roster: &[MemberStay]) -> Option<Seated> {
    let region = &me.control.region;
    for (index, record) in (0_u32..).zip(region.groups()) {
        let free = record.load();
        let generation = free.generation().wrapping_add(1);
        let opening = GroupWord::new(GroupState::Opening, me.index, lasting, generation);
        if free.state() != GroupState::Free || !record.change(free, opening) {
            continue;
        }
        failpoint!("group.claim.after");
        let seats = Seats::of(roster);
        for (fields, values) in [
            (&record.id, id),
            (&record.members, seats.0),
            (&record.ready, [0; 2]),
            (&record.holders, seats.0),
        ] {
            for (field, value) in fields.iter().zip(values) {
                field.store(value, Ordering::SeqCst);
            }
        }
        record.since_ms.store(crate::clock_ms(), Ordering::Relaxed);
        failpoint!("group.fields.after");
        let seated = Seated { index, generation };
        let open = opening.to(GroupState::Open);
        if !record.change(opening, open) {
            // Somebody has cleared up after this member.
            return Some(seated);
        }
        failpoint!("group.open.after");
        // In one order with the change above, as the others look at the two.
        let stay = MemberStay { id: crate::MemberId(me.index), generation: me.generation };
        if !is_joined(region, &stay) {
            // The others have been told that nobody opens it, and do not look for it any more.
            free_unsettled(region, record, me.index);
            return Some(seated);
        }
        // Who was cleared up after before the record was open is in it for ever; who is later will
        // be found there: the record first, then the members, and a reaper the other way round.
        for stay in roster.iter().filter(|stay| !is_joined(region, stay)) {
            unset(&record.holders, stay.id.0);
            record.change(open, open.to(GroupState::Aborted));
        }
        record.mark_settled(generation);
        failpoint!("group.settled.after");
        tell(region, record, false);
        return Some(seated);
    }
    None
}

/// Whether a member's stay goes on.
pub(crate) fn is_joined(region: &Region, stay: &MemberStay) -> bool {
    let joined = MemberWord::with(MemberState::Joined, 0, stay.generation);
    region.member(stay.id.0).is_some_and(|m| m.word.load(Ordering::SeqCst) == joined.0)
}

/// Votes for or against. A vote against one's own earlier vote counts as long as nothing is decided.
pub(crate) fn vote(me: &MemberInner, seated: Seated, ready: bool) {
    let region = &me.control.region;
    let Some((record, word)) = record(region, seated) else { return };
    if word.state() != GroupState::Open {
        return;
    }
    let decided = if ready {
        set(&record.ready, me.index);
        failpoint!("group.ready.after");
        record.settle(word)
    } else {
        record.conclude(word, GroupState::Aborted)
    };
    failpoint!("group.decide.after");
    if decided {
        tell(region, record, false);
        failpoint!("group.tell.after");
    }
}

/// How the group was decided: `None` while it is open. Of a record that was taken from this member,
/// nothing can be hoped for.
pub(crate) fn decision(region: &Region, seated: Seated) -> Option<bool> {
    match record(region, seated).map(|(_, word)| word.state()) {
        Some(GroupState::Open) => None,
        Some(GroupState::Committed) => Some(true),
        _ => Some(false),
    }
}

/// Members of a group.
pub(crate) fn size(region: &Region, seated: Seated) -> usize {
    record(region, seated).map_or(0, |(record, _)| record.members().len())
}

/// Takes note of the decision.
pub(crate) fn let_go(me: &MemberInner, seated: Seated) {
    let region = &me.control.region;
    let Some((record, _)) = record(region, seated) else { return };
    failpoint!("group.letgo.before");
    unset(&record.holders, me.index);
    failpoint!("group.letgo.after");
    free_if_over(region, record);
}

/// Frees a decided record that nobody holds any more, but for members that an operator has declared gone:
/// they must not keep it for ever. (A seat that is looked at after the record was read is that of the
/// member in it, or the record has another generation.)
fn free_if_over(region: &Region, record: &GroupRecord) {
    let word = record.load();
    let gone = |seat| {
        region.member(seat).is_none_or(|member| {
            let word = MemberWord(member.word.load(Ordering::SeqCst));
            word.state() == MemberState::Expelled
        })
    };
    // One that is not settled is its opener's, which is about to take members out of it.
    if word.is_decided()
        && word.is_settled()
        && record.holders().iter().all(gone)
        && record.change(word, word.to(GroupState::Free))
    {
        free_record_told(region);
    }
}

/// To be called when a record has become free.
fn free_record_told(region: &Region) {
    failpoint!("group.free.after");
    if region.group_hot().is_some_and(|hot| hot.full.0.swap(0, Ordering::SeqCst) != 0) {
        ring_all(region, false);
    }
}

/// Rings the members of a record; `anyway` also where nobody seems to sleep.
fn tell(region: &Region, record: &GroupRecord, anyway: bool) {
    for seat in record.members().iter() {
        ring(region, seat, anyway);
    }
}

/// Rings everybody: a record is free, or a member that others may wait for is gone.
pub(crate) fn ring_all(region: &Region, anyway: bool) {
    for (seat, _) in (0..).zip(region.members()) {
        ring(region, seat, anyway);
    }
}

fn ring(region: &Region, seat: u8, anyway: bool) {
    if let Some(member) = region.member(seat) {
        if anyway { member.group_bell.0.ring_anyway() } else { member.group_bell.0.ring() }
    }
}

/// Counts a member out of all groups that are not decided: it votes no more. `still` is asked after each
/// record was read and says that the seat is not another's yet; what was read is of the gone stay then.
pub(crate) fn count_out(region: &Region, gone: u8, still: impl Fn() -> bool) {
    for record in region.groups() {
        let word = record.load();
        let counts = word.state() == GroupState::Open && record.members().has(gone) && still();
        let outlived = word.is_lasting() && Seats::load(&record.ready).has(gone);
        // One that is outlived may have been the last one, and have died before it decided.
        let decided = counts
            && if outlived {
                record.settle(word)
            } else {
                record.conclude(word, GroupState::Aborted)
            };
        failpoint!("ungroup.word.after");
        if decided {
            tell(region, record, true);
        }
        free_if_over(region, record);
    }
}

/// Frees a record whose opener has ended before it had looked at all members: those that were gone before
/// the record was open would keep it. Who has found it hears that it is off.
fn free_unsettled(region: &Region, record: &GroupRecord, gone: u8) -> bool {
    // Others may abort it meanwhile, once.
    for _ in 0..2 {
        let word = record.load();
        let unsettled = word.is_complete() && !word.is_settled();
        if word.opener() != gone || !(unsettled || word.state() == GroupState::Opening) {
            return false;
        }
        if record.change(word, word.to(GroupState::Free)) {
            free_record_told(region);
            tell(region, record, true);
            return true;
        }
    }
    false
}

/// Takes a member out of all groups that is dead or leaves, and whose seat is nobody else's yet.
pub(crate) fn clear(region: &Region, gone: u8) {
    count_out(region, gone, || true);
    for record in region.groups() {
        if free_unsettled(region, record, gone) {
            continue;
        }
        if record.load().is_complete() {
            if record.holders().has(gone) {
                // Whoever has decided may have died before it told the others.
                tell(region, record, true);
                failpoint!("ungroup.tell.after");
                unset(&record.holders, gone);
                failpoint!("ungroup.seat.after");
            }
            free_if_over(region, record);
        }
    }
}
