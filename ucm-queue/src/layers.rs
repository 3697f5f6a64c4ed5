//! Layer-wise use: one task per group of layers, loaded in order, awaited layer by layer.
//!
//! **Invariant:** a group begins to read when the one before has nothing more to claim, so the copies
//! of a group overlap the reads of the next, and the layer needed first comes first.

use std::{fmt, ops::Range, time::Instant};

use crate::{Outcome, Task, TaskHandle};

/// The shards of some consecutive layers.
#[derive(Clone, Debug, Default)]
pub struct LayerGroup {
    /// Which layers.
    pub layers: Range<u32>,
    /// What to load for them.
    pub task: Task,
}

/// The groups of one layer-wise load, in the order they were submitted. Thread-safe.
pub struct Layers {
    groups: Vec<(Range<u32>, TaskHandle)>,
}

impl Layers {
    pub(crate) fn new(groups: Vec<(Range<u32>, TaskHandle)>) -> Self {
        Self { groups }
    }

    /// The group of a layer; its handle is a future, too. `None` for a layer that is in no group.
    #[must_use]
    pub fn group(&self, layer: u32) -> Option<&TaskHandle> {
        self.groups.iter().find(|(layers, _)| layers.contains(&layer)).map(|(_, handle)| handle)
    }

    /// The same, to be polled as a future.
    #[must_use]
    pub fn group_mut(&mut self, layer: u32) -> Option<&mut TaskHandle> {
        self.groups.iter_mut().find(|(layers, _)| layers.contains(&layer)).map(|(_, handle)| handle)
    }

    /// Sleeps until the group of `layer` has ended, at most until `deadline`; its outcomes, by
    /// request. `None` when the deadline passed first, and for a layer that is in no group.
    #[must_use]
    pub fn wait_layer(&self, layer: u32, deadline: Option<Instant>) -> Option<Vec<Outcome>> {
        self.group(layer)?.wait(deadline)
    }

    /// Sleeps until all groups have ended; their outcomes in order.
    #[must_use]
    pub fn wait(&self, deadline: Option<Instant>) -> Option<Vec<Vec<Outcome>>> {
        self.groups.iter().map(|(_, handle)| handle.wait(deadline)).collect()
    }

    /// Cancels all groups.
    pub fn cancel(&self) {
        self.groups.iter().for_each(|(_, handle)| handle.cancel());
    }

    /// Cancels all groups and waits until no engine can write any of their destinations; `false`
    /// when the deadline passed first.
    #[must_use]
    pub fn preempt(&self, deadline: Option<Instant>) -> bool {
        self.cancel();
        self.groups.iter().all(|(_, handle)| handle.wait_quiesced(deadline))
    }
}

impl fmt::Debug for Layers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.groups.iter().map(|(layers, handle)| (layers, handle))).finish()
    }
}
