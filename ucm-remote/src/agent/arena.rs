//! Memory for what finds no place in the medium: leases of pages, first come, first served.
//!
//! **Invariant:** a page is leased to one call at a time; who waits is served in the order of asking, and
//! no lock is held while anybody waits.

use std::{
    collections::VecDeque,
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use super::bell::{Bell, Told};
use crate::{PageList, core::FreePages, host_medium::segment};

/// See the module description.
#[derive(Debug)]
pub(super) struct Arena {
    /// Number of its segment.
    index: u32,
    page_bytes: u64,
    bytes: u64,
    state: Mutex<State>,
    wait_ns: AtomicU64,
}

#[derive(Debug)]
struct State {
    free: FreePages,
    waiting: VecDeque<Waiting>,
    closed: bool,
}

#[derive(Debug)]
struct Waiting {
    pages: u32,
    bytes: u64,
    bell: Arc<Bell>,
    index: usize,
    since: Instant,
}

/// Pages of the arena; given back by dropping it.
pub(super) struct ArenaLease {
    arena: Arc<Arena>,
    numbers: Box<[u32]>,
    pub(super) pages: Arc<PageList>,
}

impl Arena {
    pub(super) fn new(index: u32, bytes: u64, page_bytes: u64) -> Arc<Self> {
        let pages = u32::try_from(bytes / page_bytes.max(1)).unwrap_or(u32::MAX);
        let state = State { free: FreePages::new(pages), waiting: VecDeque::new(), closed: false };
        Arc::new(Self {
            index,
            page_bytes,
            bytes: u64::from(pages) * page_bytes,
            state: Mutex::new(state),
            wait_ns: AtomicU64::new(0),
        })
    }

    /// Bytes that one lease can have.
    pub(super) fn capacity(&self) -> u64 {
        self.bytes
    }

    /// Nanoseconds that calls have waited for it.
    pub(super) fn wait_ns(&self) -> u64 {
        self.wait_ns.load(Ordering::Relaxed)
    }

    /// Pages that are leased, and calls that wait.
    pub(super) fn usage(&self) -> (u32, usize) {
        let state = self.lock();
        (state.free.pages() - state.free.free(), state.waiting.len())
    }

    /// Asks for memory; the bell is told `Granted` when it is there, perhaps at once. At most
    /// [`capacity`](Self::capacity) bytes.
    pub(super) fn ask(self: &Arc<Self>, bytes: u64, bell: &Arc<Bell>, index: usize) {
        let pages = u32::try_from(bytes.div_ceil(self.page_bytes)).unwrap_or(u32::MAX);
        let since = Instant::now();
        let waiting = Waiting { pages, bytes, bell: Arc::clone(bell), index, since };
        let mut state = self.lock();
        state.waiting.push_back(waiting);
        let granted = self.grant(&mut state);
        drop(state);
        tell(granted);
    }

    /// Nothing is granted any more.
    pub(super) fn close(&self) {
        self.lock().closed = true;
    }

    /// A key of this bell waits no longer; `None`: none of its keys.
    pub(super) fn leave(self: &Arc<Self>, bell: &Arc<Bell>, index: Option<usize>) {
        let gone = |waiting: &Waiting| {
            Arc::ptr_eq(&waiting.bell, bell) && index.is_none_or(|index| waiting.index == index)
        };
        let mut state = self.lock();
        let (left, stay): (VecDeque<_>, _) =
            std::mem::take(&mut state.waiting).into_iter().partition(gone);
        state.waiting = stay;
        // The next one may have waited only for its turn.
        let granted = self.grant(&mut state);
        drop(state);
        drop(left);
        tell(granted);
    }

    fn grant(self: &Arc<Self>, state: &mut State) -> Vec<(Waiting, ArenaLease)> {
        let mut granted = Vec::new();
        if state.closed {
            return granted;
        }
        while let Some(numbers) = state.waiting.front().and_then(|w| state.free.take(w.pages)) {
            let Some(waiting) = state.waiting.pop_front() else { break };
            let waited = u64::try_from(waiting.since.elapsed().as_nanos()).unwrap_or(u64::MAX);
            self.wait_ns.fetch_add(waited, Ordering::Relaxed);
            let pages = numbers
                .iter()
                .map(|page| segment(self.index, u64::from(*page) * self.page_bytes))
                .collect();
            let pages =
                Arc::new(PageList { pages, page_bytes: self.page_bytes, len: waiting.bytes });
            granted.push((waiting, ArenaLease { arena: Arc::clone(self), numbers, pages }));
        }
        granted
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it is held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn tell(granted: Vec<(Waiting, ArenaLease)>) {
    for (waiting, lease) in granted {
        waiting.bell.tell(waiting.index, Told::Granted(lease));
    }
}

impl Drop for ArenaLease {
    fn drop(&mut self) {
        let mut state = self.arena.lock();
        state.free.give(&self.numbers);
        let granted = self.arena.grant(&mut state);
        drop(state);
        tell(granted);
    }
}

impl fmt::Debug for ArenaLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ArenaLease({} bytes)", self.pages.len)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn granted(bell: &Bell) -> Option<ArenaLease> {
        match bell.wait(Instant::now()) {
            Some((_, Told::Granted(lease))) => Some(lease),
            _ => None,
        }
    }

    #[test]
    fn who_waits_is_served_in_order_and_who_leaves_holds_nobody_up() {
        let arena = Arena::new(3, 10 * 16 + 5, 16);
        assert_eq!(arena.capacity(), 160);
        let bells: Vec<Arc<Bell>> = (0..4).map(|_| Arc::default()).collect();
        arena.ask(97, &bells[0], 0);
        let first = wait(&bells[0]);
        assert_eq!(first.pages.pages.len(), 7);
        assert_eq!(first.pages.pages[1], segment(3, 16));
        arena.ask(160, &bells[1], 0);
        arena.ask(16, &bells[2], 0);
        assert!(granted(&bells[2]).is_none(), "three pages are free, but it is not its turn");
        arena.leave(&bells[1], Some(7));
        assert!(granted(&bells[2]).is_none(), "another key of the same call");
        arena.leave(&bells[1], Some(0));
        let third = wait(&bells[2]);
        arena.ask(160, &bells[3], 0);
        drop(first);
        assert!(granted(&bells[3]).is_none());
        drop(third);
        assert_eq!(wait(&bells[3]).pages.len, 160);
        assert_eq!(arena.usage(), (0, 0));
    }

    fn wait(bell: &Bell) -> ArenaLease {
        let Some((_, Told::Granted(lease))) = bell.wait(Instant::now() + Duration::from_secs(60))
        else {
            panic!("nothing was granted");
        };
        lease
    }

    #[test]
    fn a_lease_told_to_nobody_comes_back() {
        let arena = Arena::new(0, 16, 16);
        let bell: Arc<Bell> = Arc::default();
        bell.stop();
        arena.ask(16, &bell, 0);
        assert_eq!(arena.usage(), (0, 0));
        arena.ask(16, &Arc::default(), 0);
        assert_eq!(arena.usage(), (0, 0), "the bell took the lease with it");
    }
}
