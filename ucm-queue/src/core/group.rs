//! Dumps of a group: held back until all ranks have committed.
//!
//! A shard of a group waits for nobody else's: a slot that is not to be had and a shard that somebody else
//! fills are failures. Whoever held slots and waited for a group's would wait for each other.
//!
//! **Invariant:** a shard of a group is published only after the group's decision to commit, and the
//! vote for it is cast only when all its shards are held.

use std::sync::Arc;

use ucm_ctrl::{FailKind, Fill, IoToken, Pin};

use crate::{admission::Share, dump::DumpItem, group::Ballot};

use super::Core;

/// A shard whose bytes are safe here and not yet published.
pub(super) enum Held {
    Slot { item: DumpItem, token: IoToken, fill: Fill },
    Resident { item: DumpItem, pin: Pin },
}

/// The shards of one dump task of a group.
pub(super) struct Group {
    ballot: Ballot,
    /// Shards neither held nor failed.
    open: usize,
    failed: bool,
    held: Vec<Held>,
    /// The group is bounded by it even if it has no shards.
    share: Arc<Share>,
}

impl Core {
    /// Begins to hold back the `shards` shards of a dump task.
    pub(super) fn open_group(&mut self, id: u64, shards: usize, ballot: Ballot, share: Arc<Share>) {
        let group = Group { ballot, open: shards, failed: false, held: Vec::new(), share };
        self.groups.insert(id, group);
        self.vote_if_complete(id);
    }

    /// Holds a shard back, unless its group is off already.
    pub(super) fn hold(&mut self, id: u64, held: Held) {
        match self.groups.get_mut(&id) {
            Some(group) => {
                group.open = group.open.saturating_sub(1);
                group.held.push(held);
                self.vote_if_complete(id);
            }
            None => self.drop_held(held),
        }
    }

    /// Whether the shard's group, if it has one, may still commit.
    pub(super) fn may_commit(&self, item: &DumpItem) -> bool {
        item.group.is_none_or(|group| self.groups.contains_key(&group))
    }

    /// Takes the vote of a dump task back. If that was in time, its shards end as cancelled.
    pub(super) fn give_up(&mut self, id: u64) {
        if let Some(group) = self.groups.get_mut(&id) {
            group.ballot.give_up();
        } else if self.gated.get(&id).is_some_and(|gated| gated.ballot.is_some())
            && let Some(gated) = self.gated.remove(&id)
        {
            for mut item in gated.items {
                item.group = None;
                self.dump_failed(item, FailKind::Cancelled);
            }
        }
    }

    /// The same for all groups. They stay until their decisions are told: some may have been made.
    pub(super) fn give_up_groups(&mut self) {
        for group in self.groups.values_mut() {
            group.ballot.give_up();
        }
    }

    /// A shard of the group will never be held.
    pub(super) fn group_failed(&mut self, id: u64) {
        if let Some(group) = self.groups.get_mut(&id) {
            group.open = group.open.saturating_sub(1);
            group.failed = true;
            self.vote_if_complete(id);
        }
    }

    fn vote_if_complete(&mut self, id: u64) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        if group.open == 0 {
            group.ballot.cast(!group.failed);
        }
    }

    /// The group has been decided, maybe before this rank has voted.
    pub(super) fn decided(&mut self, id: u64, commit: bool) {
        let Some(Group { ballot, held, share, .. }) = self.groups.remove(&id) else { return };
        self.freed = true;
        ballot.told();
        // Back before the last shard's end is told.
        drop(share);
        let metrics = &self.parts.metrics;
        if commit {
            metrics.groups_committed.add(1)
        } else {
            metrics.groups_aborted.add(1)
        }
        for held in held {
            if !commit {
                self.drop_held(held);
                continue;
            }
            match held {
                Held::Slot { item, token, fill } => self.publish(item, token, fill),
                Held::Resident { item, pin } => self.cached(item, pin),
            }
        }
    }

    fn drop_held(&mut self, held: Held) {
        let mut item = match held {
            Held::Slot { item, token, fill } => {
                drop(token);
                fill.fail(FailKind::Cancelled);
                item
            }
            Held::Resident { item, .. } => item,
        };
        item.group = None;
        self.dump_failed(item, FailKind::Cancelled);
    }
}
