//! Lets parallel allocations share one limit without promising the same bytes twice.
//!
//! **Invariant:** a shortage is only reported when nothing else is being allocated, so that bytes in
//! flight (counted both as promised and as used) never make a false one.

use std::sync::{Condvar, Mutex, PoisonError};

use crate::DataError;

/// Bytes promised to allocations in progress.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    promised: Mutex<u64>,
    changed: Condvar,
}

/// Ends the promise when dropped.
#[derive(Debug)]
pub(crate) struct Permit<'a> {
    gate: &'a Gate,
    bytes: u64,
}

impl Gate {
    /// Waits until `check(bytes promised to others)` agrees, or fails when it disagrees although
    /// nothing is promised to others.
    pub(crate) fn pass(
        &self,
        bytes: u64,
        check: impl Fn(u64) -> Result<(), DataError>,
    ) -> Result<Permit<'_>, DataError> {
        let mut promised = self.promised.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match check(*promised) {
                Ok(()) => break,
                Err(error) if *promised == 0 => return Err(error),
                Err(_) => {
                    promised = self.changed.wait(promised).unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
        *promised = promised.saturating_add(bytes);
        Ok(Permit { gate: self, bytes })
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        let mut promised = self.gate.promised.lock().unwrap_or_else(PoisonError::into_inner);
        *promised = promised.saturating_sub(self.bytes);
        self.gate.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    #[test]
    fn four_threads_never_take_more_than_there_is() {
        let gate = Gate::default();
        let free = AtomicU64::new(25);
        let taken = AtomicU64::new(0);
        let take_all = || {
            loop {
                let check = |others: u64| {
                    if free.load(Ordering::SeqCst) >= 10 + others {
                        Ok(())
                    } else {
                        Err(DataError::invalid("short"))
                    }
                };
                let Ok(_permit) = gate.pass(10, check) else { return };
                free.fetch_sub(10, Ordering::SeqCst);
                taken.fetch_add(10, Ordering::SeqCst);
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(take_all);
            }
        });
        assert_eq!(taken.into_inner(), 20);
    }
}
