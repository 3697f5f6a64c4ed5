//! The state word of a slot: phase, last failure, owner and generation in one atomic u64.
//!
//! **Invariant:** everything that decides what may be done with a slot is read in one load.

use std::fmt;

/// Why a fill did not become `Ready`. Values are part of the shared layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(u8)]
pub enum FailKind {
    /// The backend has no such object.
    Missing = 1,
    /// The object failed verification.
    Corrupt = 2,
    /// The backend reported an IO failure.
    Io = 3,
    /// No space for what was needed.
    NoSpace = 4,
    /// The backend is not available.
    Unavailable = 5,
    /// The owner's request was cancelled.
    Cancelled = 6,
    /// The owner's deadline passed.
    Deadline = 7,
    /// The owner dropped the fill.
    Abandoned = 8,
    /// The owner died.
    OwnerDied = 9,
    /// Anything else; also an unknown value written by a newer or hostile member.
    Other = 255,
}

impl FailKind {
    fn from_bits(bits: u64) -> Self {
        match bits & 0xff {
            1 => Self::Missing,
            2 => Self::Corrupt,
            3 => Self::Io,
            4 => Self::NoSpace,
            5 => Self::Unavailable,
            6 => Self::Cancelled,
            7 => Self::Deadline,
            8 => Self::Abandoned,
            9 => Self::OwnerDied,
            _ => Self::Other,
        }
    }
}

impl fmt::Display for FailKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Missing => "missing",
            Self::Corrupt => "corrupt",
            Self::Io => "io error",
            Self::NoSpace => "no space",
            Self::Unavailable => "backend unavailable",
            Self::Cancelled => "cancelled",
            Self::Deadline => "deadline",
            Self::Abandoned => "abandoned by its owner",
            Self::OwnerDied => "owner died",
            Self::Other => "other failure",
        })
    }
}

/// What a slot is doing. Values are part of the shared layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Phase {
    /// On no chain, in the free map.
    Free = 0,
    /// An evictor has taken the slot, which was `Idle` or `Failed`, but looks once more for pins; it
    /// may give it back.
    Claimed = 1,
    /// Belongs to the member in the owner field; its key counts as absent.
    Detached = 2,
    /// Resident, empty, nobody fills it (preallocated).
    Idle = 3,
    /// Resident, being filled by the owner.
    Filling = 4,
    /// Resident, bytes valid.
    Ready = 5,
    /// Resident, the last fill failed; loadable again.
    Failed = 6,
    /// Unlinked, but something may still write it.
    Draining = 7,
    /// As `Claimed`, of a slot that was `Ready`.
    ClaimedReady = 8,
    /// Not a value of this layout: corrupt memory.
    Invalid = 15,
}

impl Phase {
    /// True when the slot's key counts as resident.
    #[must_use]
    pub fn is_resident(self) -> bool {
        matches!(self, Self::Idle | Self::Filling | Self::Ready | Self::Failed)
    }

    /// True when the slot may be taken from its key, if nothing pins it.
    pub(crate) fn is_evictable(self) -> bool {
        matches!(self, Self::Idle | Self::Ready | Self::Failed)
    }

    pub(crate) fn is_claimed(self) -> bool {
        matches!(self, Self::Claimed | Self::ClaimedReady)
    }
}

const NO_OWNER: u64 = 0xff;
pub(crate) const GENERATION_BITS: u32 = 44;
const GENERATION_MASK: u64 = (1 << GENERATION_BITS) - 1;

/// One value of the word: bits 0..4 phase, 4..12 last failure kind, 12..20 owner, 20..64 generation.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct SlotWord(pub(crate) u64);

impl SlotWord {
    pub(crate) fn phase(self) -> Phase {
        match self.0 & 0xf {
            0 => Phase::Free,
            1 => Phase::Claimed,
            2 => Phase::Detached,
            3 => Phase::Idle,
            4 => Phase::Filling,
            5 => Phase::Ready,
            6 => Phase::Failed,
            7 => Phase::Draining,
            8 => Phase::ClaimedReady,
            _ => Phase::Invalid,
        }
    }

    pub(crate) fn kind(self) -> FailKind {
        FailKind::from_bits(self.0 >> 4)
    }

    /// Member that claims, fills or drains the slot; `None` in the other phases.
    pub(crate) fn owner(self) -> Option<u8> {
        let owner = (self.0 >> 12) & 0xff;
        (owner != NO_OWNER).then_some(owner.to_le_bytes()[0])
    }

    pub(crate) fn generation(self) -> u64 {
        self.0 >> 20
    }

    /// The same generation and failure kind in another phase.
    pub(crate) fn to(self, phase: Phase, owner: Option<u8>) -> Self {
        let owner = owner.map_or(NO_OWNER, u64::from);
        Self((self.0 & !0xff00f) | (phase as u64) | (owner << 12))
    }

    pub(crate) fn failed_as(self, kind: FailKind) -> Self {
        Self((self.0 & !0xff0) | ((kind as u64) << 4))
    }

    /// The word of a slot for a new key: nothing has failed yet.
    pub(crate) fn fresh(self) -> Self {
        Self(self.0 & !0xff0)
    }

    /// An evictor's claim on an evictable slot. Keeps what [`unclaimed`](Self::unclaimed) needs.
    pub(crate) fn claimed(self, member: u8) -> Self {
        let phase = if self.phase() == Phase::Ready { Phase::ClaimedReady } else { Phase::Claimed };
        self.next_generation().to(phase, Some(member))
    }

    /// The word before the claim, for whoever finds the claim of a dead member. An idle slot has
    /// no failure on record, a failed one always does.
    pub(crate) fn unclaimed(self) -> Self {
        let phase = match self.phase() {
            Phase::ClaimedReady => Phase::Ready,
            _ if self.0 & 0xff0 == 0 => Phase::Idle,
            _ => Phase::Failed,
        };
        let before = self.generation().wrapping_sub(1) & GENERATION_MASK;
        Self((self.0 & 0xf_ffff) | (before << 20)).to(phase, None)
    }

    pub(crate) fn next_generation(self) -> Self {
        let next = (self.generation() + 1) & GENERATION_MASK;
        Self((self.0 & 0xf_ffff) | (next << 20))
    }
}

impl fmt::Debug for SlotWord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?}(kind {:?}, owner {:?}, generation {})",
            self.phase(),
            self.kind(),
            self.owner(),
            self.generation()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn word_fields_do_not_disturb_each_other() {
        let mut word = SlotWord(0).to(Phase::Detached, Some(127));
        for step in 1..1000_u64 {
            word = word.next_generation();
            assert_eq!(
                (word.phase(), word.owner(), word.generation()),
                (Phase::Detached, Some(127), step)
            );
        }
        let failed = word.failed_as(FailKind::OwnerDied).to(Phase::Failed, None);
        assert_eq!(
            (failed.phase(), failed.kind(), failed.owner()),
            (Phase::Failed, FailKind::OwnerDied, None)
        );
        assert_eq!(failed.generation(), word.generation());
        for before in [
            failed.fresh().to(Phase::Idle, None),
            failed.to(Phase::Ready, None),
            failed.fresh().to(Phase::Ready, None),
            failed,
            SlotWord(u64::MAX).fresh().to(Phase::Ready, None),
        ] {
            let claimed = before.claimed(77);
            assert!(claimed.phase().is_claimed());
            assert_eq!((claimed.owner(), claimed.unclaimed()), (Some(77), before));
        }
        let last = SlotWord(u64::MAX).next_generation();
        assert_eq!(last.generation(), 0, "the generation wraps within its own bits");
    }
}
