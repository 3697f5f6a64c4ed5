//! One tier: its backend and its rules.
//!
//! **Invariant:** settings are plain values; what a tier did stands in its [`Record`].

use std::{fmt, sync::Arc, time::Duration};

use super::{Admission, record::Record};
use crate::Backend;

/// An object that was found below and could be kept in an upper tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Candidate {
    /// Block id.
    pub block: [u8; 16],
    /// Shard index.
    pub shard: u32,
    /// Length in bytes.
    pub bytes: usize,
    /// Number of the tier that had it, from 0.
    pub found_in: usize,
}

/// Which objects found below a tier takes.
#[derive(Clone)]
#[non_exhaustive]
pub enum Promotion {
    /// None.
    Never,
    /// All.
    Always,
    /// Those for which this says yes. Called on backend threads: it must not block.
    If(Arc<dyn Fn(&Candidate) -> bool + Send + Sync>),
}

impl Promotion {
    pub(super) fn admits(&self, candidate: &Candidate) -> bool {
        match self {
            Self::Never => false,
            Self::Always => true,
            Self::If(rule) => super::shielded(|| rule(candidate)).unwrap_or(false),
        }
    }
}

impl fmt::Debug for Promotion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Never => "Never",
            Self::Always => "Always",
            Self::If(_) => "If(..)",
        })
    }
}

/// How dumps come to a tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Writes {
    /// Not at all.
    Never,
    /// A dump ends when this tier has it, too.
    #[default]
    Through,
    /// A dump ends without this tier, which gets a copy of the bytes. Until it has them
    /// ([`Stack::wait_written`](crate::Stack::wait_written)), the object is in the tiers above only, and a
    /// crash may lose it for this one. An object that no other tier takes, and one for which there is no
    /// room among the copies, is written through.
    Back,
}

/// A backend and its place in a [`Stack`](crate::Stack).
#[derive(Clone, Debug)]
#[must_use]
pub struct Tier {
    pub(super) name: String,
    pub(super) backend: Arc<dyn Backend>,
    pub(super) writes: Writes,
    pub(super) promotion: Promotion,
    pub(super) admission: Option<Arc<Admission>>,
    pub(super) absent: Option<(usize, Duration)>,
    pub(super) failures_off: u32,
    pub(super) stall_after: Duration,
}

impl Tier {
    /// A tier that takes all dumps and keeps nothing found below, is not asked for a while after five
    /// failures in a row, nor while nothing has ended in it for 30 s.
    pub fn new(name: impl Into<String>, backend: Arc<dyn Backend>) -> Self {
        Self {
            name: name.into(),
            backend,
            writes: Writes::Through,
            promotion: Promotion::Never,
            admission: None,
            absent: None,
            failures_off: 5,
            stall_after: Duration::from_secs(30),
        }
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How dumps come to this tier.
    pub fn writes(mut self, writes: Writes) -> Self {
        self.writes = writes;
        self
    }

    /// What this tier keeps of what was found below.
    pub fn promotion(mut self, promotion: Promotion) -> Self {
        self.promotion = promotion;
        self
    }

    /// Keeps of dumps, and of what `promotion` wants, only what this admits. Not for the last tier that
    /// takes dumps: it keeps everything.
    pub fn admission(mut self, admission: Arc<Admission>) -> Self {
        self.admission = Some(admission);
        self
    }

    /// Remembers up to about so many keys that this tier does not have, each for so long: within that
    /// time, what another process stores there may look absent. For tiers where asking is slow.
    pub fn remember_absent(mut self, keys: usize, ttl: Duration) -> Self {
        self.absent = (keys > 0 && !ttl.is_zero()).then_some((keys, ttl));
        self
    }

    /// After so many failures in a row (`Io` or `Lost`) one operation at a time tries, first after 1 s,
    /// then after 2, 4, … 60 s, until one gets an answer. Loads and dumps apart.
    pub fn failures_off(mut self, failures: u32) -> Self {
        self.failures_off = failures;
        self
    }

    /// While operations are in it and none has ended for so long, it gets no more.
    pub fn stall_after(mut self, time: Duration) -> Self {
        self.stall_after = time;
        self
    }
}

/// A tier at work.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) tier: Tier,
    pub(super) record: Arc<Record>,
}
