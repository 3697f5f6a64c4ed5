//! What the other threads of this process may ask about the members.
//!
//! **Invariant:** the table is written by the steward only; `Dead` is answered only for a member
//! whose process the kernel called over.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::fork::Birthplace;
use crate::rendezvous::config::Token;
use crate::rendezvous::process::Life;
use crate::rendezvous::roster::Fate;
use crate::{DataError, ErrorKind};

/// A member as seen from here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerInfo {
    /// Its seat.
    pub seat: u16,
    /// Names this stay on the seat.
    pub incarnation: Token,
    /// Its process id in this process's pid namespace, for people; 0 if it has none here.
    pub pid: i32,
}

/// What is known about a member's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Liveness {
    /// Its process runs (or is stopped).
    Alive,
    /// Its process is proven over.
    Dead,
    /// It left in good order.
    Left,
    /// Nothing is known (yet): it may have joined a moment ago. Never treat this as dead.
    Unknown,
}

/// Counters since `enter`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RendezvousStats {
    /// Joiners that were served the offer's descriptors.
    pub served: u64,
    /// Connections refused because they came from another user.
    pub refused_credentials: u64,
    /// Connections refused because of another layout or message version.
    pub refused_layout: u64,
    /// Connections dropped because this process is out of descriptors.
    pub refused_descriptors: u64,
    /// Foreign listeners found at our seats when entering.
    pub foreign_seats: u64,
    /// Deaths seen.
    pub deaths: u64,
    /// Orderly leaves seen.
    pub leaves: u64,
    /// Hooks that panicked.
    pub hook_panics: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) served: AtomicU64,
    pub(crate) refused_credentials: AtomicU64,
    pub(crate) refused_layout: AtomicU64,
    pub(crate) refused_descriptors: AtomicU64,
    pub(crate) foreign_seats: AtomicU64,
    pub(crate) deaths: AtomicU64,
    pub(crate) leaves: AtomicU64,
    pub(crate) hook_panics: AtomicU64,
}

#[derive(Debug, Default)]
pub(crate) struct Table {
    pub(crate) peers: Vec<(PeerInfo, Arc<Life>)>,
    pub(crate) fates: Vec<(u16, Token, Fate)>,
}

#[derive(Debug)]
pub(crate) struct Shared {
    table: Mutex<Table>,
    pub(crate) counters: Counters,
    poison: Mutex<Option<String>>,
    poisoned: AtomicBool,
    pub(crate) birthplace: Birthplace,
}

/// View of the members of a cache. Cheap to clone, thread-safe, usable inside hooks.
#[derive(Clone, Debug)]
pub struct PeerWatch {
    pub(crate) shared: Arc<Shared>,
}

impl PeerWatch {
    pub(crate) fn new() -> Self {
        Self {
            shared: Arc::new(Shared {
                table: Mutex::default(),
                counters: Counters::default(),
                poison: Mutex::default(),
                poisoned: AtomicBool::new(false),
                birthplace: Birthplace::here(),
            }),
        }
    }

    /// All other members.
    #[must_use]
    pub fn peers(&self) -> Vec<PeerInfo> {
        match self.table() {
            Some(table) => table.peers.iter().map(|(info, _)| *info).collect(),
            None => Vec::new(),
        }
    }

    /// Is this stay on this seat over? Asks the kernel; one system call.
    #[must_use]
    pub fn liveness(&self, seat: u16, incarnation: Token) -> Liveness {
        let Some(table) = self.table() else { return Liveness::Unknown };
        let same = |info: &PeerInfo| info.seat == seat && info.incarnation == incarnation;
        if let Some((_, life)) = table.peers.iter().find(|(info, _)| same(info)) {
            return if life.is_over() { Liveness::Dead } else { Liveness::Alive };
        }
        let fate = table.fates.iter().find(|(s, i, _)| (*s, *i) == (seat, incarnation));
        match fate {
            Some((_, _, Fate::Dead)) => Liveness::Dead,
            Some((_, _, Fate::Left)) => Liveness::Left,
            None => Liveness::Unknown,
        }
    }

    /// True if a known member on this seat runs. `false` is no proof of death: use
    /// [`liveness`](Self::liveness) for that.
    #[must_use]
    pub fn is_alive(&self, seat: u16) -> bool {
        self.table().is_some_and(|table| {
            table.peers.iter().any(|(info, life)| info.seat == seat && !life.is_over())
        })
    }

    /// Counters since `enter`.
    #[must_use]
    pub fn stats(&self) -> RendezvousStats {
        let counters = &self.shared.counters;
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        RendezvousStats {
            served: read(&counters.served),
            refused_credentials: read(&counters.refused_credentials),
            refused_layout: read(&counters.refused_layout),
            refused_descriptors: read(&counters.refused_descriptors),
            foreign_seats: read(&counters.foreign_seats),
            deaths: read(&counters.deaths),
            leaves: read(&counters.leaves),
            hook_panics: read(&counters.hook_panics),
        }
    }

    /// Fails once a hook or the steward itself has panicked, and in a forked child.
    ///
    /// # Errors
    /// `Poisoned` with the panic's message, `Forked` in a forked child.
    pub fn check(&self) -> Result<(), DataError> {
        self.shared.birthplace.check()?;
        if !self.shared.poisoned.load(Ordering::Acquire) {
            return Ok(());
        }
        let poison = self.shared.poison.lock().unwrap_or_else(PoisonError::into_inner);
        let what = poison.as_deref().unwrap_or("unknown");
        Err(DataError::new(ErrorKind::Poisoned, format!("the steward thread panicked: {what}")))
    }

    pub(crate) fn publish(&self, update: impl FnOnce(&mut Table)) {
        if let Some(mut table) = self.table() {
            update(&mut table);
        }
    }

    pub(crate) fn poison(&self, what: String) {
        tracing::error!(what, "steward: a panic was caught; this member is poisoned");
        self.shared.counters.hook_panics.fetch_add(1, Ordering::Relaxed);
        let mut poison = self.shared.poison.lock().unwrap_or_else(PoisonError::into_inner);
        poison.get_or_insert(what);
        self.shared.poisoned.store(true, Ordering::Release);
    }

    /// `None` in a forked child, where the lock may be held by a thread that does not exist.
    fn table(&self) -> Option<MutexGuard<'_, Table>> {
        if !self.shared.birthplace.is_here_fast() {
            return None;
        }
        Some(self.shared.table.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
