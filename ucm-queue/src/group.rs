//! Group commit: ranks that store parts of one thing publish all of them or none.
//!
//! Each rank votes when its bytes are safe in its own memory, or when they will never be. Nothing is
//! published before all have voted for it.
//!
//! **Invariant:** a group is decided once, the same for all; a rank that gives up votes against.

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

/// Names one commit of one group, for example a hash of the block and the attempt.
pub type GroupId = [u8; 16];

/// What a rank is told: whether the group commits.
pub type Decided = Box<dyn FnOnce(bool) + Send>;

/// Where the ranks of a group vote. [`LocalBoard`] serves ranks that are threads of one process.
pub trait CommitBoard: Send + Sync + fmt::Debug {
    /// Takes the vote of rank `rank` of `ranks`. `decided` is called once, on any thread, also
    /// inside this call: with `true` when all have voted for it, with `false` when anybody votes
    /// against it or can vote no more.
    fn vote(&self, group: GroupId, rank: u32, ranks: u32, ready: bool, decided: Decided);
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
        self.groups.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
}

impl CommitBoard for LocalBoard {
    fn vote(&self, group: GroupId, rank: u32, ranks: u32, ready: bool, decided: Decided) {
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
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
}

impl fmt::Debug for LocalBoard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalBoard").field("open", &self.open()).finish()
    }
}

/// A vote still to be cast; dropped, it is one against.
pub(crate) struct Ballot {
    group: Option<CommitGroup>,
    decided: Option<Decided>,
}

impl Ballot {
    pub(crate) fn new(group: CommitGroup, decided: Decided) -> Self {
        Self { group: Some(group), decided: Some(decided) }
    }

    pub(crate) fn cast(mut self, ready: bool) {
        self.vote(ready);
    }

    fn vote(&mut self, ready: bool) {
        if let (Some(group), Some(decided)) = (self.group.take(), self.decided.take()) {
            group.board.vote(group.id, group.rank, group.ranks, ready, decided);
        }
    }
}

impl Drop for Ballot {
    fn drop(&mut self) {
        self.vote(false);
    }
}
