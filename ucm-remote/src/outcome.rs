//! How one key of a batch ended.
//!
//! **Invariant:** a key ends with exactly one outcome; only `Local`, `Remote` and `Joined` mean that
//! the caller's bytes are there, and then all of them are.

/// How a get of one key ended. Numbers are stable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[must_use]
pub enum GetOutcome {
    /// Served from this node's medium.
    Local = 1,
    /// Served from another peer.
    Remote = 2,
    /// Served from bytes that somebody on this node was fetching already.
    Joined = 3,
    /// Nobody has it.
    Miss = 4,
    /// The request makes no sense (no range, an empty one, one outside, two that overlap); the
    /// destination is untouched.
    Invalid = 5,
    /// No way is large enough for it; the destination is untouched.
    TooLarge = 6,
    /// Too much is in flight; try again later.
    Busy = 7,
    /// The peers that have it are dead or cannot be reached.
    PeerDown = 8,
    /// The deadline passed; nothing writes the destination any more.
    Timeout = 9,
    /// What was found is not what was asked for any more: the peer restarted, or the object was
    /// replaced or evicted meanwhile.
    Stale = 10,
    /// The bytes that came are not the object's.
    Corrupt = 11,
    /// The bytes came to this node and could not be copied to their destination.
    Failed = 12,
}

impl GetOutcome {
    /// The outcome of this number.
    pub(crate) fn from_number(number: u8) -> Option<Self> {
        Some(match number {
            1 => Self::Local,
            2 => Self::Remote,
            3 => Self::Joined,
            4 => Self::Miss,
            5 => Self::Invalid,
            6 => Self::TooLarge,
            7 => Self::Busy,
            8 => Self::PeerDown,
            9 => Self::Timeout,
            10 => Self::Stale,
            11 => Self::Corrupt,
            12 => Self::Failed,
            _ => return None,
        })
    }

    /// Whether every asked byte is in its destination.
    #[must_use]
    pub fn is_served(self) -> bool {
        matches!(self, Self::Local | Self::Remote | Self::Joined)
    }

    /// Whether asking again later may help.
    #[must_use]
    pub fn may_pass(self) -> bool {
        matches!(self, Self::Busy | Self::PeerDown | Self::Timeout | Self::Stale)
    }
}

/// How a put of one key ended. Numbers are stable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[must_use]
pub enum PutOutcome {
    /// Stored and readable.
    Created = 1,
    /// It was there already, with the same length.
    AlreadyExists = 2,
    /// It is there with another length; nothing was changed.
    Conflict = 3,
    /// The ranges leave a gap or overlap; nothing was published.
    Invalid = 4,
    /// No peer can hold it, however empty.
    TooLarge = 5,
    /// No peer has room now.
    NoSpace = 6,
    /// Too much is in flight; try again later.
    Busy = 7,
    /// The chosen peers are dead or cannot be reached.
    PeerDown = 8,
    /// The deadline passed; the object is absent, or whole.
    Timeout = 9,
    /// The peer restarted meanwhile; nothing was published.
    Stale = 10,
    /// The bytes could not be copied from their source; nothing was published.
    Failed = 11,
}

impl PutOutcome {
    /// The outcome of this number.
    pub(crate) fn from_number(number: u8) -> Option<Self> {
        Some(match number {
            1 => Self::Created,
            2 => Self::AlreadyExists,
            3 => Self::Conflict,
            4 => Self::Invalid,
            5 => Self::TooLarge,
            6 => Self::NoSpace,
            7 => Self::Busy,
            8 => Self::PeerDown,
            9 => Self::Timeout,
            10 => Self::Stale,
            11 => Self::Failed,
            _ => return None,
        })
    }

    /// Whether the object can be read now.
    #[must_use]
    pub fn is_stored(self) -> bool {
        matches!(self, Self::Created | Self::AlreadyExists)
    }
}

/// How a removal of one key ended. Numbers are stable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[must_use]
pub enum RemoveOutcome {
    /// Nobody can find it any more; its memory is free when its last lease ends.
    Removed = 1,
    /// It was not there.
    Miss = 2,
    /// A peer that may have it is dead or cannot be reached.
    PeerDown = 3,
    /// The deadline passed.
    Timeout = 4,
}

impl RemoveOutcome {
    /// The outcome of this number.
    pub(crate) fn from_number(number: u8) -> Option<Self> {
        Some(match number {
            1 => Self::Removed,
            2 => Self::Miss,
            3 => Self::PeerDown,
            4 => Self::Timeout,
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{GetOutcome, PutOutcome, RemoveOutcome};

    #[test]
    fn only_three_gets_and_two_puts_are_good() {
        let gets = [
            GetOutcome::Local,
            GetOutcome::Remote,
            GetOutcome::Joined,
            GetOutcome::Miss,
            GetOutcome::Invalid,
            GetOutcome::TooLarge,
            GetOutcome::Busy,
            GetOutcome::PeerDown,
            GetOutcome::Timeout,
            GetOutcome::Stale,
            GetOutcome::Corrupt,
            GetOutcome::Failed,
        ];
        for (number, outcome) in (1..).zip(gets) {
            assert_eq!(outcome as u8, number, "numbers never change");
            assert_eq!(GetOutcome::from_number(number), Some(outcome));
            assert_eq!(outcome.is_served(), number <= 3);
            assert!(!(outcome.is_served() && outcome.may_pass()));
        }
        let puts = [PutOutcome::Created, PutOutcome::AlreadyExists, PutOutcome::Conflict];
        assert_eq!(puts.map(PutOutcome::is_stored), [true, true, false]);
        assert_eq!(PutOutcome::Stale as u8, 10);
        assert_eq!((GetOutcome::from_number(0), GetOutcome::from_number(13)), (None, None));
        for number in 1..=11 {
            assert_eq!(PutOutcome::from_number(number).map(|o| o as u8), Some(number));
        }
        for number in 1..=4 {
            assert_eq!(RemoveOutcome::from_number(number).map(|o| o as u8), Some(number));
        }
        assert_eq!((PutOutcome::from_number(12), RemoveOutcome::from_number(5)), (None, None));
    }
}
