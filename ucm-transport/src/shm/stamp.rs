//! Stamps: one shared word per slot, with which an owner says that it rewrites the slot.
//!
//! A word is even while the slot's bytes belong to the generation it names, and odd while they are
//! being rewritten. Readers copy first and ask afterwards, as with a sequence lock; the owner never
//! waits for them. A word left odd by an owner that died stays odd: such a slot is not served.
//!
//! **Invariant:** words only grow, so a check that failed stays failed.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering, fence},
};

use crate::{Location, Memory, SourceCheck, TransferError};

/// The version of a slot's bytes, as a reader saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stamp(u64);

/// Words in memory that the owner of some slots shares with its readers. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Stamps {
    memory: Memory,
    count: u32,
}

impl Stamps {
    /// One word for every 8 bytes of `memory`, all of them as they are. Zeroed memory means:
    /// generation 0 of every slot.
    ///
    /// # Errors
    /// `Invalid` for memory that is not aligned to 8 bytes or holds no word, `Unsupported` for
    /// memory outside this process's reach.
    pub fn new(memory: Memory) -> Result<Self, TransferError> {
        if !matches!(memory.location(), Location::Host | Location::PinnedHost) {
            return Err(TransferError::unsupported(format!(
                "stamps must be mapped here, {:?} is not",
                memory.location()
            )));
        }
        let words = u32::try_from(memory.len() / 8).unwrap_or(u32::MAX);
        if words == 0 || !memory.as_ptr().addr().get().is_multiple_of(8) {
            return Err(TransferError::invalid(format!(
                "{} bytes at {:?} hold no aligned word of 8 bytes",
                memory.len(),
                memory.as_ptr()
            )));
        }
        Ok(Self { memory, count: words })
    }

    /// Number of words.
    #[must_use]
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Reader: the version of a slot's bytes; `None` while they are rewritten, or past the last
    /// slot.
    #[must_use]
    pub fn current(&self, slot: u32) -> Option<Stamp> {
        let word = self.word(slot)?.load(Ordering::Acquire);
        word.is_multiple_of(2).then_some(Stamp(word))
    }

    /// Reader: a check that all these slots still have these versions.
    #[must_use]
    pub fn check(&self, slots: Vec<(u32, Stamp)>) -> Arc<StampCheck> {
        Arc::new(StampCheck { stamps: self.clone(), slots })
    }

    /// Owner: from now on nobody takes the slot's bytes for good. Only one thread of the owner may
    /// rewrite a slot at a time. `false`, without effect, past the last slot or when the words are
    /// used up.
    pub fn begin_rewrite(&self, slot: u32) -> bool {
        let Some(word) = self.word(slot) else { return false };
        let now = word.load(Ordering::Relaxed);
        let Some(next) = (now | 1).checked_add((now % 2) * 2) else { return false };
        word.store(next, Ordering::Relaxed);
        // No byte of the new generation may be seen before the odd word.
        fence(Ordering::Release);
        true
    }

    /// Owner: all bytes are written; they are a new generation. `None` without
    /// [`begin_rewrite`](Self::begin_rewrite).
    pub fn end_rewrite(&self, slot: u32) -> Option<Stamp> {
        let word = self.word(slot)?;
        let now = word.load(Ordering::Relaxed);
        if now.is_multiple_of(2) {
            return None;
        }
        let next = now.checked_add(1)?;
        word.store(next, Ordering::Release);
        Some(Stamp(next))
    }

    fn word(&self, slot: u32) -> Option<&AtomicU64> {
        if slot >= self.count {
            return None;
        }
        let at = usize::try_from(slot).ok()?;
        // SAFETY: the word lies inside the memory (`count` is its length over 8).
        let word = unsafe { self.memory.as_ptr().cast::<AtomicU64>().add(at) };
        // SAFETY: aligned (checked in `new`), mapped as long as `self.memory` lives, and only ever
        // accessed as an atomic by those who use stamps; other content is some number.
        Some(unsafe { word.as_ref() })
    }
}

/// See [`Stamps::check`].
#[derive(Debug)]
pub struct StampCheck {
    stamps: Stamps,
    slots: Vec<(u32, Stamp)>,
}

impl SourceCheck for StampCheck {
    fn is_current(&self) -> bool {
        // The copies before must not be moved behind the loads.
        fence(Ordering::Acquire);
        self.slots.iter().all(|(slot, stamp)| {
            self.stamps.word(*slot).is_some_and(|word| word.load(Ordering::Acquire) == stamp.0)
        })
    }
}
