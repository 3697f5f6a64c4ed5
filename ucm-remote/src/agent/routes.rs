//! Who might have what, as the directory said lately.
//!
//! **Invariant:** nothing here is believed without asking the owner; no lock is held while the directory
//! is asked.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use crate::{Directory, DirectoryError, Member, ObjectKey, PeerId, Record, Token};

#[derive(Debug)]
pub(super) struct Routes {
    directory: Arc<dyn Directory>,
    /// Keys that are remembered.
    limit: usize,
    /// How long an answer counts, and how long an empty one does.
    lives: (Duration, Duration),
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    known: HashMap<ObjectKey, (Vec<Record>, Instant)>,
    members: Vec<Member>,
    calls: u64,
}

impl Routes {
    pub(super) fn new(
        directory: Arc<dyn Directory>,
        limit: usize,
        lives: (Duration, Duration),
    ) -> Self {
        Self { directory, limit: limit.max(1), lives, state: Mutex::default() }
    }

    pub(super) fn directory(&self) -> &Arc<dyn Directory> {
        &self.directory
    }

    /// Questions that went to the directory.
    pub(super) fn calls(&self) -> u64 {
        self.lock().calls
    }

    /// Where these objects might be, with at most one question to the directory. What could not be asked
    /// is its error.
    pub(super) fn locate(
        &self,
        keys: &[ObjectKey],
        deadline: Instant,
    ) -> Vec<Result<Vec<Record>, DirectoryError>> {
        let now = Instant::now();
        let mut unknown = Vec::new();
        let mut found: Vec<Option<Vec<Record>>> = {
            let mut state = self.lock();
            let found = keys.iter().map(|key| match state.known.get(key) {
                Some((records, until)) if *until > now => Some(records.clone()),
                _ => {
                    unknown.push(*key);
                    None
                }
            });
            let found = found.collect();
            if !unknown.is_empty() {
                state.calls += 1;
            }
            found
        };
        let told = if unknown.is_empty() {
            Ok(Vec::new())
        } else {
            self.directory.locate(&unknown, deadline)
        };
        let mut told = match told {
            Ok(told) => told.into_iter(),
            Err(error) => {
                return found.into_iter().map(|known| known.ok_or_else(|| error.clone())).collect();
            }
        };
        let mut state = self.lock();
        for (key, place) in keys.iter().zip(&mut found).filter(|(_, place)| place.is_none()) {
            let records = told.next().unwrap_or_default();
            let life = if records.is_empty() { self.lives.1 } else { self.lives.0 };
            if state.known.len() >= self.limit {
                // Rare, and a lost hint costs one question.
                state.known.clear();
            }
            state.known.insert(*key, (records.clone(), now + life));
            *place = Some(records);
        }
        found.into_iter().map(|records| Ok(records.unwrap_or_default())).collect()
    }

    /// What was known of an object is wrong.
    pub(super) fn forget(&self, key: &ObjectKey) {
        self.lock().known.remove(key);
    }

    /// This run of a peer, as it registered.
    pub(super) fn member(
        &self,
        peer: &PeerId,
        boot: Token,
        deadline: Instant,
    ) -> Result<Option<Member>, DirectoryError> {
        let find = |state: &State| {
            state.members.iter().find(|m| m.peer == *peer && m.boot == boot).cloned()
        };
        if let Some(member) = find(&self.lock()) {
            return Ok(Some(member));
        }
        // The directory has told of the run, so it is newer than our list, or over.
        let members = self.directory.members(deadline)?;
        let mut state = self.lock();
        state.members = members;
        Ok(find(&state))
    }

    /// All peers, asked now.
    pub(super) fn members(&self, deadline: Instant) -> Result<Vec<Member>, DirectoryError> {
        let members = self.directory.members(deadline)?;
        self.lock().members.clone_from(&members);
        Ok(members)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it is held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
