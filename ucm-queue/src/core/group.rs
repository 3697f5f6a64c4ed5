//! Dumps of a group: held back until all ranks have committed.
//!
//! **Invariant:** a shard of a group is published only after the group's decision to commit, and the
//! vote for it is cast only when all its shards are held.

use std::sync::Arc;

use ucm_ctrl::{FailKind, Fill, IoToken, Pin};

use crate::{admission::Share, dump::DumpItem, group::Ballot};

use super::{Core, stage::Room};

/// A shard whose bytes are safe here and not yet published.
pub(super) enum Held {
    Slot { item: DumpItem, token: IoToken, fill: Fill },
    Staged { item: DumpItem, room: Room },
    Resident { item: DumpItem, pin: Pin },
}

/// The shards of one dump task of a group.
pub(super) struct Group {
    ballot: Option<Ballot>,
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
        let (ballot, open, failed, held) = (Some(ballot), shards, false, Vec::new());
        let group = Group { ballot, open, failed, held, share };
        self.groups.insert(id, group);
        self.vote_if_complete(id);
    }

    /// Holds a shard back. Its group is gone only when everything is being ended.
    pub(super) fn hold(&mut self, id: u64, held: Held) {
        if let Some(group) = self.groups.get_mut(&id) {
            group.open = group.open.saturating_sub(1);
            group.held.push(held);
            self.vote_if_complete(id);
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
        if group.open == 0
            && let Some(ballot) = group.ballot.take()
        {
            ballot.cast(!group.failed);
        }
    }

    /// The group has been decided, maybe before this rank has voted.
    pub(super) fn decided(&mut self, id: u64, commit: bool) {
        let Some(group) = self.groups.remove(&id) else { return };
        self.freed = true;
        // Back before the last shard's end is told.
        drop(group.share);
        let metrics = &self.parts.metrics;
        if commit {
            metrics.groups_committed.add(1)
        } else {
            metrics.groups_aborted.add(1)
        }
        for held in group.held {
            if !commit {
                self.drop_held(held);
                continue;
            }
            match held {
                Held::Slot { item, token, fill } => self.publish(item, token, fill),
                Held::Staged { item, room } => self.bypassed(item, room),
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
            Held::Staged { item, .. } | Held::Resident { item, .. } => item,
        };
        item.group = None;
        self.dump_failed(item, FailKind::Cancelled);
    }
}
