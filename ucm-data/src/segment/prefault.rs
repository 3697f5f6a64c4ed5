//! Filling page tables in parallel, with progress.
//!
//! **Invariant:** prefaulting changes no byte, so that it may run beside live readers and writers.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::segment::map::Mapped;
use crate::{DataError, ErrorKind};

/// One step of one thread.
const CHUNK_BYTES: usize = 64 << 20;

impl Mapped {
    /// Makes every page present in this process's page tables, on `threads` threads (at least one),
    /// calling `progress(bytes done, bytes in total)` after every step. Allocates nothing: the pages
    /// are there since creation.
    ///
    /// # Errors
    /// `Os` with the offset if the kernel cannot map a page (poisoned memory, limits), `Forked` in
    /// a forked child.
    pub fn prefault(
        &self,
        threads: usize,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<(), DataError> {
        self.birthplace().check()?;
        let mut chunks = Vec::new();
        for (window, info) in self.windows().iter().zip(self.geometry().segments()) {
            let page = usize::try_from(info.tier.page_bytes()).unwrap_or(4096);
            let step = CHUNK_BYTES.max(page);
            let starts = (0..window.len()).step_by(step);
            chunks.extend(starts.map(|at| (window, at, step.min(window.len() - at), page)));
        }
        let total = self.geometry().total_bytes();
        let next = AtomicUsize::new(0);
        let stop = AtomicBool::new(false);
        let state = Mutex::new((0u64, None));
        let lock = || state.lock().unwrap_or_else(PoisonError::into_inner);
        let work = || {
            while !stop.load(Ordering::Relaxed) {
                let Some(&(window, at, len, page)) =
                    chunks.get(next.fetch_add(1, Ordering::Relaxed))
                else {
                    return;
                };
                let result = window.populate(at, len, page);
                // The lock orders progress reports: they never go backwards.
                let mut state = lock();
                match result {
                    Ok(()) => {
                        state.0 += len as u64;
                        progress(state.0, total);
                    }
                    Err(error) => {
                        state.1.get_or_insert(error);
                        stop.store(true, Ordering::Relaxed);
                    }
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..threads.min(chunks.len()) {
                scope.spawn(work);
            }
            work();
        });
        let (done, error) = state.into_inner().unwrap_or_else(PoisonError::into_inner);
        match error {
            Some(error) => Err(error),
            None if done != total => {
                Err(DataError::new(ErrorKind::Poisoned, "a prefaulting thread panicked"))
            }
            None => Ok(()),
        }
    }
}
