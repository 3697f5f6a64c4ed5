//! The votes of this process: cast, and told how they came out.
//!
//! A vote that cannot be cast yet (nobody has opened the group, no record is free) is kept. One thread
//! sleeps on the member's group bell while votes are out.
//!
//! **Invariant:** each vote is told a decision once: the group's, or that it is off.

use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Mutex, MutexGuard, PoisonError},
    thread::Thread,
};

use crate::{
    BlockId, Control, CtrlError, Member, MemberId,
    attendant::{Alive, Attendant},
    event::SLEEPERS,
    group::{self, Opened, Seated},
    layout::MAX_MEMBERS,
    member::MemberInner,
    sync::Arc,
};

/// One stay of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MemberStay {
    /// Its seat.
    pub id: MemberId,
    /// How often the seat was taken, including this time.
    pub generation: u32,
}

/// A member's vote on something that all members of a group do, or none.
#[derive(Clone, Debug)]
pub struct GroupVote {
    /// Names this attempt of this group: the same for all its members, never in use twice at once.
    pub group: [u8; 16],
    /// Whether what is voted for outlives the voter. If not, the voter's death before the decision
    /// is a vote against. The same for all; a group may be voted on once each way at a time.
    pub lasting: bool,
    /// Who must vote, all in the same order. The first one opens the group.
    pub roster: Vec<MemberStay>,
    /// For it.
    pub ready: bool,
}

/// What a voter is told: whether the group commits. Called once, on any thread.
pub type GroupDecided = Box<dyn FnOnce(bool) + Send>;

impl Member {
    /// This stay.
    #[must_use]
    pub fn stay(&self) -> MemberStay {
        MemberStay { id: self.id(), generation: self.generation() }
    }

    /// Votes in a group. All its members must vote, end, or leave: a group waits for a member that
    /// lives and does not vote, however long. `decided` is called in any case, maybe inside this
    /// call; with `false` at once for a vote against.
    ///
    /// # Errors
    /// `Invalid` for a roster without this member or with one twice, or a second vote on the same;
    /// `Fenced`; `Os` when the thread that waits cannot be started.
    pub fn vote(&self, vote: GroupVote, decided: GroupDecided) -> Result<(), CtrlError> {
        let teller = match self.checked(&vote).and_then(|()| Teller::of(&self.inner)) {
            Ok(teller) => teller,
            Err(error) => {
                decided(false);
                return Err(error);
            }
        };
        teller.cast(&self.inner, vote, decided)
    }

    /// Takes a vote for a group back. Does nothing once the group is decided; its voter is told
    /// either way, and has been when this returns.
    pub fn withdraw(&self, group: [u8; 16], lasting: bool) {
        if let Some(teller) = self.inner.teller.get() {
            teller.withdraw(&self.inner, group, lasting);
        }
    }

    /// Votes of this member that are not decided, or not cast yet.
    #[must_use]
    pub fn votes_out(&self) -> usize {
        self.inner.teller.get().map_or(0, |teller| lock(&teller.out).len())
    }

    fn checked(&self, vote: &GroupVote) -> Result<(), CtrlError> {
        self.inner.check()?;
        let me = self.stay();
        let distinct = group::Seats::of(&vote.roster).len();
        if distinct == vote.roster.len() && distinct <= MAX_MEMBERS && vote.roster.contains(&me) {
            return Ok(());
        }
        Err(CtrlError::Invalid(format!(
            "a group of {} members on {distinct} seats, among them member {} once: name each rank's \
             member once",
            vote.roster.len(),
            me.id.0
        )))
    }
}

/// A vote that is out.
struct Vote {
    group: [u64; 2],
    lasting: bool,
    roster: Vec<MemberStay>,
    ready: bool,
    record: Option<Seated>,
    cast: bool,
    /// Who is told; nobody any more after a vote against.
    decided: Option<GroupDecided>,
}

impl Vote {
    /// Does what can be done for it; the decision once it is known.
    fn advance(&mut self, me: &MemberInner) -> Option<bool> {
        if me.check().is_err() {
            // Nobody counts on this member any more, but it has its record to let go of.
            return Some(self.end(me));
        }
        let region = &me.control.region;
        let record = match self.record {
            Some(record) => record,
            None => match group::find(region, self.group, self.lasting, me.index) {
                Some(record) => record,
                None => match self.roster.first() {
                    Some(opener) if opener.id.0 == me.index => {
                        match group::open(me, self.group, self.lasting, &self.roster) {
                            Opened::Yes(record) => record,
                            Opened::Full => return None,
                        }
                    }
                    Some(opener) if group::is_joined(region, opener) => return None,
                    // What it opened before it was gone is there by now; what it opens after, it frees.
                    _ => match group::find(region, self.group, self.lasting, me.index) {
                        Some(record) => record,
                        None => return Some(false),
                    },
                },
            },
        };
        self.record = Some(record);
        if !self.cast {
            let agreed = group::size(region, record) == self.roster.len();
            group::vote(me, record, self.ready && agreed);
            self.cast = true;
        }
        let decision = group::decision(region, record)?;
        group::let_go(me, record);
        Some(decision)
    }

    /// Ends it while this member leaves: what is not decided is off.
    fn end(&mut self, me: &MemberInner) -> bool {
        let Some(record) = self.record.filter(|_| me.may_write()) else { return false };
        group::vote(me, record, false);
        let decision = group::decision(&me.control.region, record).unwrap_or(false);
        group::let_go(me, record);
        decision
    }
}

type VotesOut = std::sync::Arc<Mutex<Vec<Vote>>>;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while the lock is held.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The votes of one member and the thread that waits for their decisions.
pub(crate) struct Teller {
    out: VotesOut,
    thread: Attendant,
}

impl Teller {
    fn of(member: &Arc<MemberInner>) -> Result<&Self, CtrlError> {
        if member.teller.get().is_none() {
            let teller = Self::start(member)?;
            // A second thread may have been faster; the surplus teller ends at once.
            let _ = member.teller.set(teller);
        }
        member.teller.get().ok_or(CtrlError::Fenced("its votes could not be waited for"))
    }

    fn start(member: &Arc<MemberInner>) -> Result<Self, CtrlError> {
        let out = VotesOut::default();
        let (control, index) = (member.control.clone(), member.index);
        let ring = move |_: &Thread| {
            if let Some(record) = control.region.member(index) {
                record.group_bell.0.ring_anyway();
            }
        };
        let (votes, control, weak) = (out.clone(), member.control.clone(), Arc::downgrade(member));
        let run = move |alive| listen(&votes, &alive, &control, index, || weak.upgrade());
        Attendant::start(&member.control, "ucm-groups", ring, run)
            .map(|thread| Self { out, thread })
            .map_err(|source| CtrlError::Os { what: "start the thread of groups", source })
    }

    fn cast(
        &self,
        member: &MemberInner,
        vote: GroupVote,
        decided: GroupDecided,
    ) -> Result<(), CtrlError> {
        let (lo, hi) = BlockId(vote.group).halves();
        let GroupVote { lasting, roster, ready, .. } = vote;
        let group = [lo, hi];
        let mut out = lock(&self.out);
        if out.iter().any(|vote| vote.group == group && vote.lasting == lasting) {
            drop(out);
            decided(false);
            return Err(CtrlError::Invalid(format!(
                "member {} votes twice in group {:?}: name each attempt anew",
                member.index, vote.group
            )));
        }
        let (now, decided) = if ready { (None, Some(decided)) } else { (Some(decided), None) };
        out.push(Vote { group, lasting, roster, ready, record: None, cast: false, decided });
        let told = advance(&mut out, member);
        drop(out);
        now.into_iter().for_each(|decided| decided(false));
        tell(told);
        Ok(())
    }

    fn withdraw(&self, member: &MemberInner, group: [u8; 16], lasting: bool) {
        let (lo, hi) = BlockId(group).halves();
        let mut out = lock(&self.out);
        let is_it = |vote: &&mut Vote| vote.group == [lo, hi] && vote.lasting == lasting;
        for vote in out.iter_mut().filter(is_it) {
            (vote.ready, vote.cast) = (false, false);
        }
        let mut told = advance(&mut out, member);
        // One that nobody has opened yet can only come out one way now.
        for vote in out.iter_mut().filter(is_it) {
            told.extend(vote.decided.take().map(|decided| (decided, false)));
        }
        drop(out);
        tell(told);
    }

    /// Ends all votes; for the member's own end. The thread goes first.
    pub(crate) fn end_all(self, member: &MemberInner) {
        drop(self.thread);
        let out = std::mem::take(&mut *lock(&self.out));
        let end = |mut vote: Vote| {
            let decision = vote.end(member);
            vote.decided.map(|decided| (decided, decision))
        };
        tell(out.into_iter().filter_map(end).collect());
    }
}

impl fmt::Debug for Teller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Teller").field("votes", &lock(&self.out).len()).finish_non_exhaustive()
    }
}

/// Advances all votes; those that have come out, for [`tell`] once nothing is locked.
fn advance(out: &mut Vec<Vote>, member: &MemberInner) -> Vec<(GroupDecided, bool)> {
    let mut told = Vec::new();
    out.retain_mut(|vote| {
        let Some(decision) = vote.advance(member) else { return true };
        told.extend(vote.decided.take().map(|decided| (decided, decision)));
        false
    });
    told
}

fn tell(told: Vec<(GroupDecided, bool)>) {
    for (decided, decision) in told {
        // The others must hear of theirs, and the thread go on.
        if catch_unwind(AssertUnwindSafe(|| decided(decision))).is_err() {
            tracing::error!("whoever was told a decision panicked");
        }
    }
}

fn listen(
    out: &VotesOut,
    alive: &Alive,
    control: &Control,
    index: u8,
    member: impl Fn() -> Option<Arc<MemberInner>>,
) {
    let Some(record) = control.region.member(index) else { return };
    loop {
        let seen = record.group_bell.0.arm(SLEEPERS);
        // A member that is ending ends its votes itself.
        let Some(member) = member() else { return };
        let mut votes = lock(out);
        let told = advance(&mut votes, &member);
        drop(votes);
        tell(told);
        // Perhaps the last reference: then this thread ends the member, and itself with it.
        drop(member);
        if alive.is_over() {
            return;
        }
        record.group_bell.0.sleep(seen, None);
    }
}
