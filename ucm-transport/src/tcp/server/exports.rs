//! The simplest owner: whole regions, each behind a random token.
//!
//! **Invariant:** a token names one exporting of one region; after its revocation it names nothing,
//! for ever.

use std::{
    collections::HashMap,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use ucm_data::Token;

use super::serve::{Pieces, Refusal, RefusalKind, Request, Serve, Served};
use crate::{Access, ErrorKind, Memory, TransferError};

/// Regions that peers may read, or write, by a token. Thread-safe; cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Exports {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct State {
    regions: HashMap<[u8; 16], Export>,
    /// Requests that still touch a revoked region.
    leaving: HashMap<[u8; 16], u64>,
}

#[derive(Debug)]
struct Export {
    memory: Memory,
    access: Access,
    uses: u64,
}

impl Exports {
    /// Exports memory; the token is the descriptor that clients attach.
    ///
    /// # Errors
    /// `Registration` when the system gives no random bytes.
    pub fn export(&self, memory: Memory, access: Access) -> Result<Token, TransferError> {
        let token = Token::random()
            .map_err(|error| TransferError::new(ErrorKind::Registration, error.to_string()))?;
        self.shared.lock().regions.insert(token.0, Export { memory, access, uses: 0 });
        Ok(token)
    }

    /// Ends an export: later requests are `Stale`. Waits until no request touches it any more.
    ///
    /// # Errors
    /// `StaleRegion` for an unknown token; `Stuck` when requests still touch it at the deadline:
    /// it is revoked, but its memory must not be used for anything else yet. Ask again.
    pub fn revoke(&self, token: Token, deadline: Instant) -> Result<(), TransferError> {
        let mut state = self.shared.lock();
        match state.regions.remove(&token.0) {
            Some(Export { uses: 0, .. }) => return Ok(()),
            Some(export) => drop(state.leaving.insert(token.0, export.uses)),
            None if state.leaving.contains_key(&token.0) => {}
            None => {
                let text = "the token names no export";
                return Err(TransferError::new(ErrorKind::StaleRegion, text));
            }
        }
        loop {
            let Some(uses) = state.leaving.get(&token.0) else { return Ok(()) };
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let text = format!("{uses} requests still touch the revoked region");
                return Err(TransferError::new(ErrorKind::Stuck, text));
            }
            let waited = self.shared.ended.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn serve(
        &self,
        request: &Request<'_>,
        pieces: &mut Pieces,
        write: bool,
    ) -> Result<Served, Refusal> {
        let token: [u8; 16] = request.descriptor.try_into().map_err(|_| {
            Refusal::new(RefusalKind::Invalid, "a descriptor of an export has 16 bytes")
        })?;
        let mut state = self.shared.lock();
        let Some(export) = state.regions.get_mut(&token) else {
            return Err(Refusal::new(RefusalKind::Stale, "the token names no export any more"));
        };
        if write && export.access != Access::ReadWrite {
            return Err(Refusal::new(RefusalKind::Denied, "exported for reading only"));
        }
        for range in request.ranges {
            pieces.push(&export.memory, range.offset, u64::from(range.len))?;
        }
        export.uses += 1;
        drop(state);
        Ok(Served::holding(Use { shared: Arc::clone(&self.shared), token }))
    }
}

impl Serve for Exports {
    fn read(&self, request: &Request<'_>, pieces: &mut Pieces) -> Result<Served, Refusal> {
        self.serve(request, pieces, false)
    }

    fn write(&self, request: &Request<'_>, pieces: &mut Pieces) -> Result<Served, Refusal> {
        self.serve(request, pieces, true)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request that touches an export.
struct Use {
    shared: Arc<Shared>,
    token: [u8; 16],
}

impl Drop for Use {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        if let Some(export) = state.regions.get_mut(&self.token) {
            export.uses = export.uses.saturating_sub(1);
        } else if let Some(uses) = state.leaving.get_mut(&self.token) {
            *uses = uses.saturating_sub(1);
            if *uses == 0 {
                state.leaving.remove(&self.token);
                self.shared.ended.notify_all();
            }
        }
    }
}
