//! The sequential cache, for one key.
//!
//! **Invariant:** an operation that the state does not allow is refused, not corrected.

/// What an operation was seen to do, with the generation it was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Did {
    /// `acquire`: a pin.
    Hit(u64),
    /// `acquire`: to be filled by the caller.
    Owner(u64),
    /// `acquire`: being filled.
    Waiter(u64),
    Published(u64),
    Failed(u64),
    /// A pin, or a waiter that got none, is gone.
    Released,
    /// A waiter for this generation was told; a later fill of the key may have answered it.
    SawReady(u64),
    SawFailed(u64),
    /// A waiter turned into a pin.
    Pinned(u64),
    Removed,
    /// `remove`: the key was not there.
    Absent,
    /// `prealloc`: an idle slot.
    Made,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Phase {
    Absent,
    /// Resident without bytes.
    Loadable,
    Filling,
    Ready,
    Failed,
}

/// A key. `handles` counts who pins the slot of this generation: pins, waiters, the owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct State {
    phase: Phase,
    generation: u64,
    handles: u32,
}

impl State {
    pub(super) const ABSENT: Self = Self { phase: Phase::Absent, generation: 0, handles: 0 };

    fn with(self, phase: Phase, handles: u32) -> Self {
        Self { phase, handles, ..self }
    }

    fn is(self, phase: Phase, generation: u64) -> bool {
        self.phase == phase && self.generation == generation
    }

    /// Anything unpinned and not being filled may be evicted at any time.
    pub(super) fn evicted(self) -> Option<Self> {
        let evictable = self.handles == 0
            && matches!(self.phase, Phase::Loadable | Phase::Ready | Phase::Failed);
        evictable.then(|| self.with(Phase::Absent, 0))
    }

    /// The state after the operation; `None` where the operation cannot have done that.
    pub(super) fn after(self, did: Did) -> Option<Self> {
        let more = self.handles + 1;
        match did {
            Did::Owner(generation) => {
                let loadable =
                    matches!(self.phase, Phase::Absent | Phase::Loadable | Phase::Failed);
                // A slot that others still pin passes on with them.
                let handles = if self.phase == Phase::Absent { 1 } else { more };
                loadable.then_some(Self { phase: Phase::Filling, generation, handles })
            }
            Did::Hit(generation) => {
                self.is(Phase::Ready, generation).then(|| self.with(Phase::Ready, more))
            }
            Did::Waiter(generation) => {
                self.is(Phase::Filling, generation).then(|| self.with(Phase::Filling, more))
            }
            Did::Published(generation) => {
                self.is(Phase::Filling, generation).then(|| self.with(Phase::Ready, self.handles))
            }
            Did::Failed(generation) => self
                .is(Phase::Filling, generation)
                .then(|| self.with(Phase::Failed, self.handles - 1)),
            Did::Released => {
                let handles = self.handles.checked_sub(1)?;
                Some(self.with(self.phase, handles))
            }
            Did::Pinned(generation) => self.is(Phase::Ready, generation).then_some(self),
            Did::SawReady(generation) => {
                (self.phase == Phase::Ready && self.generation >= generation).then_some(self)
            }
            // Somebody may have taken over meanwhile.
            Did::SawFailed(generation) => {
                (self.is(Phase::Failed, generation) || self.generation > generation).then_some(self)
            }
            Did::Removed => self.evicted(),
            Did::Absent => (self.phase == Phase::Absent).then_some(self),
            Did::Made => {
                let made = Self { phase: Phase::Loadable, ..Self::ABSENT };
                (self.phase == Phase::Absent).then_some(made)
            }
        }
    }
}
