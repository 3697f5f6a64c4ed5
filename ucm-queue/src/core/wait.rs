//! Shards that somebody else fills.
//!
//! **Invariant:** a wait is armed whenever it is kept, so the end of the fill rings the bell; there
//! are few waits at a time, because every rank has few unfinished fills.

use ucm_ctrl::{FailKind, FillState, Waiter};

use crate::{dump::DumpItem, task::UnitState};

use super::{Core, LoadTask, copy::Source, load::Origin};

/// One wait and who wants its end.
pub(super) struct Wait {
    waiter: Waiter,
    who: Who,
}

enum Who {
    Load { task: u64, unit: u32 },
    Dump(DumpItem),
}

impl Core {
    /// A load's shard is being filled: wait for it.
    pub(super) fn wait_for(&mut self, task: u64, unit: u32, waiter: Waiter) {
        let Some(state) = self.unit_mut(task, unit) else { return };
        state.state = UnitState::Waiting;
        self.watch(Wait { waiter, who: Who::Load { task, unit } });
    }

    /// A dump's shard is being filled by somebody else: wait for it.
    pub(super) fn wait_for_dump(&mut self, item: DumpItem, waiter: Waiter) {
        self.watch(Wait { waiter, who: Who::Dump(item) });
    }

    /// Looks at every wait and goes on with those that have ended.
    pub(super) fn check_waits(&mut self) {
        let waits = std::mem::take(&mut self.waits);
        for wait in waits {
            self.watch(wait);
        }
    }

    /// Drops the waits of ended units of this task, and with them their pins.
    pub(super) fn drop_waits(&mut self, id: u64, task: &LoadTask) {
        self.waits.retain(|wait| match wait.who {
            Who::Load { task: of, unit } if of == id => task
                .prepared
                .units
                .get(unit as usize)
                .is_some_and(|unit| unit.state == UnitState::Waiting),
            _ => true,
        });
    }

    /// Ends the waits of dumps; their promises say `Abandoned`.
    pub(super) fn drop_dump_waits(&mut self) {
        self.waits.retain(|wait| !matches!(wait.who, Who::Dump(_)));
    }

    fn watch(&mut self, wait: Wait) {
        self.step();
        // Arming anew each time costs little and cannot miss a fill that began meanwhile.
        match wait.waiter.arm() {
            FillState::Filling => self.waits.push(wait),
            FillState::Ready => {
                let Wait { waiter, who } = wait;
                match waiter.into_pin() {
                    Ok(pin) => match who {
                        Who::Load { task, unit } => {
                            self.copy_in(task, unit, Source::Slot(pin), Origin::Waited);
                        }
                        Who::Dump(item) => self.dump_resident(item, pin),
                    },
                    Err(waiter) => self.waits.push(Wait { waiter, who }),
                }
            }
            FillState::Failed(kind) => self.filler_failed(wait, kind),
            FillState::OwnerDied => self.filler_failed(wait, FailKind::OwnerDied),
        }
    }

    /// The filler failed: one more try as owner, unless the failure is a verdict on the object.
    fn filler_failed(&mut self, wait: Wait, kind: FailKind) {
        let Wait { waiter, who } = wait;
        // The pin goes first: the next acquire may want this very slot.
        drop(waiter);
        match who {
            Who::Load { task, unit } => self.load_filler_failed(task, unit, kind),
            Who::Dump(item) => self.dump_filler_failed(item, kind),
        }
    }

    fn load_filler_failed(&mut self, task: u64, unit: u32, kind: FailKind) {
        let retry =
            !is_verdict(kind) && self.unit_mut(task, unit).is_some_and(|unit| !unit.retried);
        if !retry {
            self.unit_ended(task, unit, Err(kind));
            return;
        }
        let Some(state) = self.unit_mut(task, unit) else { return };
        state.retried = true;
        state.state = UnitState::Unresolved;
        self.parts.metrics.retried_shards.add(1);
        let Some(entry) = self.tasks.get_mut(&task) else { return };
        entry.again.push(unit);
        if !entry.queued {
            entry.queued = true;
            self.runnable.push_front(task);
        }
    }

    pub(super) fn unit_mut(&mut self, task: u64, unit: u32) -> Option<&mut crate::task::Unit> {
        self.tasks.get_mut(&task)?.prepared.units.get_mut(unit as usize)
    }
}

/// Whether another try can only say the same: the object is not there, or not what it should be.
pub(super) fn is_verdict(kind: FailKind) -> bool {
    matches!(kind, FailKind::Missing | FailKind::Corrupt)
}
