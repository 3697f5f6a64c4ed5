//! Group commit: ranks that store parts of one thing publish all of them or none.
//!
//! Each rank votes when its bytes are in its slots, unpublished, or when they never will be. Nothing is
//! published before all have voted for it. What a rank does after the decision is its own affair: one
//! that dies then loses its part, as an eviction would.
//!
//! **Invariant:** a group is decided once, the same for all; a rank that gives up votes against.

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use ucm_ctrl::{GroupVote, Member, MemberStay};

/// Names one commit of one group, for example a hash of the block and the attempt.
pub type GroupId = [u8; 16];

/// What a rank is told: whether the group commits.
pub type Decided = Box<dyn FnOnce(bool) + Send>;

/// Where the ranks of a group vote: [`SharedBoard`] in the control region of the node's cache,
/// [`LocalBoard`] among threads of one process without one.
pub trait CommitBoard: Send + Sync + fmt::Debug {
    /// Takes the vote of rank `rank` of `ranks`. `decided` is called once, on any thread, also
    /// inside this call: with `true` when all have voted for it, with `false` when anybody votes
    /// against it or can vote no more.
    fn vote(&self, group: GroupId, rank: u32, ranks: u32, ready: bool, decided: Decided);

    /// Takes the vote of this rank back, as long as nothing is decided; the rank is told then.
    fn withdraw(&self, group: GroupId, rank: u32);
}

/// This rank's part in a group.
#[derive(Clone, Debug)]
pub struct CommitGroup {
    /// Where the group votes.
    pub board: Arc<dyn CommitBoard>,
    /// Which group.
    pub id: GroupId,
    /// This rank, below `ranks`.
    pub rank: u32,
    /// How many ranks must commit.
    pub ranks: u32,
}

impl CommitGroup {
    /// Votes against, for a rank that will not dump its part. A dump task that was refused has not
    /// voted: submit it again, or give up, or the others wait.
    pub fn give_up(self) {
        self.board.vote(self.id, self.rank, self.ranks, false, Box::new(|_| ()));
    }
}

/// Votes of ranks that are members of one cache, in their own processes or not. A rank that dies,
/// leaves or is expelled before the decision has voted against.
#[derive(Debug)]
pub struct SharedBoard {
    member: Member,
    roster: Vec<MemberStay>,
}

impl SharedBoard {
    /// A board for `member`'s votes in groups of these members: all of them must be given the same
    /// ones in the same order.
    #[must_use]
    pub fn new(member: &Member, roster: Vec<MemberStay>) -> Arc<Self> {
        Arc::new(Self { member: member.clone(), roster })
    }
}

impl CommitBoard for SharedBoard {
    fn vote(&self, group: GroupId, rank: u32, ranks: u32, ready: bool, decided: Decided) {
        let seat = self.roster.get(rank as usize);
        let agreed = seat == Some(&self.member.stay()) && self.roster.len() == ranks as usize;
        if !agreed {
            tracing::warn!(rank, ranks, roster = ?self.roster, "a vote that the roster does not have");
        }
        let mut roster = self.roster.clone();
        if !roster.contains(&self.member.stay()) {
            // The others may know better, and wait for this vote.
            roster.push(self.member.stay());
        }
        let vote = GroupVote { group, lasting: false, roster, ready: ready && agreed };
        // Whoever cannot vote is told `false`; the others are when this member leaves.
        if let Err(error) = self.member.vote(vote, decided) {
            tracing::warn!(%error, "a vote was refused");
        }
    }

    fn withdraw(&self, group: GroupId, _: u32) {
        self.member.withdraw(group, false);
    }
}

/// Votes of ranks that are threads of one process. A group that is decided is forgotten when all
/// its ranks have voted.
#[derive(Default)]
pub struct LocalBoard {
    groups: Mutex<HashMap<GroupId, Votes>>,
}

#[derive(Default)]
struct Votes {
    /// Ranks that have voted.
    cast: Vec<u32>,
    against: bool,
    waiting: Vec<Decided>,
}

impl LocalBoard {
    /// A board without votes.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Groups that not all ranks have voted in.
    #[must_use]
    pub fn open(&self) -> usize {
        self.lock().len()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<GroupId, Votes>> {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CommitBoard for LocalBoard {
    fn vote(&self, group: GroupId, rank: u32, ranks: u32, ready: bool, decided: Decided) {
        let mut groups = self.lock();
        let votes = groups.entry(group).or_default();
        if !votes.cast.contains(&rank) {
            votes.cast.push(rank);
        }
        votes.against |= !ready;
        votes.waiting.push(decided);
        let all = votes.cast.len() >= ranks as usize;
        let commit = all && !votes.against;
        let tell = if all || votes.against { std::mem::take(&mut votes.waiting) } else { vec![] };
        if all {
            groups.remove(&group);
        }
        drop(groups);
        tell.into_iter().for_each(|decided| decided(commit));
    }

    fn withdraw(&self, group: GroupId, rank: u32) {
        let mut groups = self.lock();
        let votes = groups.get_mut(&group).filter(|votes| votes.cast.contains(&rank));
        let tell = votes.map(|votes| {
            votes.against = true;
            std::mem::take(&mut votes.waiting)
        });
        drop(groups);
        tell.into_iter().flatten().for_each(|decided| decided(false));
    }
}

impl fmt::Debug for LocalBoard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalBoard").field("open", &self.open()).finish()
    }
}

/// A rank's vote, to be cast or to be decided. Dropped before that, it is one against.
pub(crate) struct Ballot {
    group: CommitGroup,
    /// Until the vote is cast.
    decided: Option<Decided>,
    over: bool,
}

impl Ballot {
    pub(crate) fn new(group: CommitGroup, decided: Decided) -> Self {
        Self { group, decided: Some(decided), over: false }
    }

    /// Votes; does nothing if the vote is cast.
    pub(crate) fn cast(&mut self, ready: bool) {
        if let Some(decided) = self.decided.take() {
            let CommitGroup { board, id, rank, ranks } = &self.group;
            board.vote(*id, *rank, *ranks, ready, decided);
        }
    }

    /// Votes against, or takes the vote back if nothing is decided.
    pub(crate) fn give_up(&mut self) {
        if self.decided.is_some() {
            self.cast(false);
        } else if !self.over {
            self.group.board.withdraw(self.group.id, self.group.rank);
        }
    }

    /// The decision has been told.
    pub(crate) fn told(mut self) {
        self.over = true;
    }
}

impl Drop for Ballot {
    fn drop(&mut self) {
        self.give_up();
    }
}
