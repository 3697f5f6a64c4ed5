//! Threads that read objects through a ring each.
//!
//! **Invariant:** what a ring was given is kept until its completion was taken, whatever happens to
//! the thread; a completion that belongs to nothing is counted and changes nothing; threads without
//! work sleep.

use std::{
    collections::VecDeque,
    io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::Ordering, mpsc},
    thread::{self, JoinHandle},
    time::Duration,
};

use rustix::event::{EventfdFlags, eventfd};

use super::{
    Inner,
    failpoint::{FileStep, Injected},
    reading::{Start, Watched},
    ring::Ring,
    sys::{Incomplete, RawSpan},
    transfer::{Progress, Transfer, empty},
};
use crate::{ErrorKind, StoreError};

/// The number of the read that other threads end to wake this one.
const WAKE: u64 = u64::MAX;
/// Reads are handed to the kernel in batches of at most so many, so that the device does not wait
/// for many files to be opened.
const START_BATCH: usize = 8;

/// The threads.
#[derive(Debug)]
pub(super) struct Rings {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// One eventfd for each thread.
    bells: Vec<OwnedFd>,
    depth: usize,
}

#[derive(Debug)]
struct State {
    queue: VecDeque<Start>,
    /// Reads that go on after a stall.
    again: VecDeque<Watched>,
    /// Threads that sleep and have room.
    free: Vec<bool>,
    /// Reads that a test holds up, by thread independent count.
    held: usize,
    stopped: bool,
}

impl Rings {
    /// Starts `count` threads (at least one) with `depth` reads in flight each; `kept` is held by
    /// every ring until its last request is gone.
    pub(super) fn new(
        inner: &Arc<Inner>,
        count: usize,
        depth: usize,
        kept: Option<&OwnedFd>,
    ) -> io::Result<Self> {
        let count = count.max(1);
        let depth = depth.clamp(1, 4096);
        let bells =
            (0..count).map(|_| eventfd(0, EventfdFlags::CLOEXEC)).collect::<Result<Vec<_>, _>>()?;
        let state = State {
            queue: VecDeque::new(),
            again: VecDeque::new(),
            free: vec![false; count],
            held: 0,
            stopped: false,
        };
        let shared = Arc::new(Shared { state: Mutex::new(state), bells, depth });
        let mut rings = Self { shared, threads: Vec::with_capacity(count) };
        for n in 0..count {
            let (shared, inner) = (Arc::clone(&rings.shared), Arc::clone(inner));
            let kept = kept.map(OwnedFd::try_clone).transpose()?;
            let (ready, is_ready) = mpsc::channel();
            // The ring belongs to the thread that makes it.
            let thread = thread::Builder::new().name(format!("ucm-ring-{n}")).spawn(move || {
                let made = Worker::new(n, shared, inner, kept);
                match made {
                    Ok(mut worker) => {
                        drop(ready.send(Ok(())));
                        worker.run();
                    }
                    Err(e) => drop(ready.send(Err(e))),
                }
            })?;
            rings.threads.push(thread);
            is_ready.recv().unwrap_or_else(|_| Err(io::Error::other("the thread ended")))?;
        }
        Ok(rings)
    }

    /// Adds reads; gives them back when the rings have stopped.
    pub(super) fn submit(&self, ops: Vec<Start>) -> Result<(), Vec<Start>> {
        let mut state = self.shared.lock();
        if state.stopped {
            return Err(ops);
        }
        state.queue.extend(ops);
        self.shared.wake(&mut state);
        Ok(())
    }

    /// Something that takes back what has not begun.
    pub(super) fn drainer(&self) -> impl Fn() -> Vec<Start> + Send + use<> {
        let shared = Arc::clone(&self.shared);
        move || shared.lock().queue.drain(..).collect()
    }

    /// Takes back what has not begun; later reads are refused.
    pub(super) fn close(&self) -> Vec<Start> {
        let mut state = self.shared.lock();
        state.stopped = true;
        let left = state.queue.drain(..).collect();
        drop(state);
        self.shared.bells.iter().for_each(ring_bell);
        left
    }

    /// Leaves the threads to themselves: what they wait for may never come.
    pub(super) fn detach(&mut self) {
        self.threads.clear();
    }

    /// Takes back what has not begun and waits for what is on its way. Later reads are refused.
    pub(super) fn stop(&mut self) -> Vec<Start> {
        let left = self.close();
        let me = thread::current().id();
        for thread in self.threads.drain(..) {
            // A sink called by a thread may drop the last reference to the backend.
            if thread.thread().id() != me && thread.join().is_err() {
                tracing::warn!("a ring's thread ended by a panic");
            }
        }
        left
    }
}

impl Drop for Rings {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes as many free threads as there is work for.
    fn wake(&self, state: &mut State) {
        let work = state.queue.len().div_ceil(self.depth) + state.again.len();
        let free = state.free.iter_mut().zip(&self.bells).filter(|(free, _)| **free);
        for (free, bell) in free.take(work) {
            *free = false;
            ring_bell(bell);
        }
    }
}

fn ring_bell(bell: &OwnedFd) {
    // It can only fail when the bell was rung 2^64 − 2 times.
    if let Err(error) = rustix::io::write(bell, &1u64.to_ne_bytes()) {
        tracing::error!(%error, "a ring's thread could not be woken");
    }
}

/// A read that the ring has, or would have.
#[derive(Debug)]
struct InFlight {
    read: Watched,
    /// A test's lie about the bytes moved.
    short: Option<usize>,
}

#[derive(Debug, Default)]
struct Place {
    uses: u32,
    read: Option<InFlight>,
}

#[derive(Debug)]
struct Worker {
    index: usize,
    shared: Arc<Shared>,
    inner: Arc<Inner>,
    ring: Ring,
    places: Vec<Place>,
    vacant: Vec<usize>,
    in_flight: usize,
    /// Reads that ended and have not been looked at.
    ended: VecDeque<(Watched, Result<(), Incomplete>)>,
    /// Where the bell's count is read to.
    bell: Box<[u8; 8]>,
    bell_transfer: Option<Box<Transfer>>,
}

impl Worker {
    fn new(
        index: usize,
        shared: Arc<Shared>,
        inner: Arc<Inner>,
        kept: Option<OwnedFd>,
    ) -> io::Result<Self> {
        let entries = u32::try_from(shared.depth + 1).unwrap_or(u32::MAX);
        let ring = Ring::new(entries)?;
        if let Some(kept) = &kept {
            ring.keep(kept.as_fd())?;
        }
        Ok(Self {
            index,
            shared,
            inner,
            ring,
            places: Vec::new(),
            vacant: Vec::new(),
            in_flight: 0,
            ended: VecDeque::new(),
            bell: Box::new([0; 8]),
            bell_transfer: None,
        })
    }

    fn run(&mut self) {
        loop {
            self.listen();
            let stopped = self.start();
            if stopped && self.in_flight == 0 && self.ended.is_empty() {
                return;
            }
            let wanted = usize::from(self.ended.is_empty());
            self.submit(wanted);
            self.take();
            // The device is busy again before this thread is.
            if let Some((read, moved)) = self.ended.pop_front() {
                let inner = &self.inner;
                // What the read holds ends by being dropped while the panic unwinds.
                if catch_unwind(AssertUnwindSafe(|| inner.end_watched(read, moved))).is_err() {
                    tracing::error!("the end of a read panicked");
                }
            }
        }
    }

    /// Takes work for which there is room. Says whether there will be no more.
    fn start(&mut self) -> bool {
        loop {
            let room = (self.shared.depth - self.in_flight).min(START_BATCH);
            let mut state = self.shared.lock();
            let again: Vec<_> = {
                let count = state.again.len().min(room);
                state.again.drain(..count).collect()
            };
            let count = state.queue.len().min(room - again.len());
            let ops: Vec<Start> = state.queue.drain(..count).collect();
            let took = again.len() + ops.len();
            if let Some(free) = state.free.get_mut(self.index) {
                *free = took < room;
            }
            state.held -= again.len();
            let stopped = state.stopped && state.held == 0;
            drop(state);
            again.into_iter().for_each(|read| self.push(read));
            let mut found = false;
            for start in ops {
                let inner = &self.inner;
                if let Start::Find(ops) = start {
                    match catch_unwind(AssertUnwindSafe(|| inner.expand(ops))) {
                        Ok(starts) => {
                            let mut state = self.shared.lock();
                            state.queue.extend(starts);
                            self.shared.wake(&mut state);
                        }
                        Err(_) => tracing::error!("a search for objects panicked"),
                    }
                    found = true;
                    continue;
                }
                match catch_unwind(AssertUnwindSafe(|| inner.begin_watched(start))) {
                    Ok(Some(read)) => self.push(read),
                    Ok(None) => {}
                    Err(_) => tracing::error!("the start of a read panicked"),
                }
            }
            if (took < room && !found) || self.in_flight == self.shared.depth {
                return stopped && took == 0;
            }
            self.submit(0);
        }
    }

    /// Hands a read's next call to the ring.
    fn push(&mut self, mut read: Watched) {
        let mut short = None;
        match self.inner.failpoints.inject(FileStep::Read, read.reading.transfer().left()) {
            None => {}
            Some(Injected::Short(most)) => short = Some(most),
            Some(Injected::Error(e)) => return self.advance(read, Err(e)),
            Some(Injected::Stall(stall)) => {
                self.shared.lock().held += 1;
                let shared = Arc::clone(&self.shared);
                // Only tests come here.
                thread::spawn(move || {
                    stall.wait();
                    let mut state = shared.lock();
                    state.again.push_back(read);
                    if state.stopped {
                        shared.bells.iter().for_each(ring_bell);
                    }
                    shared.wake(&mut state);
                });
                return;
            }
        }
        let at = self.vacant.pop().unwrap_or_else(|| {
            self.places.push(Place::default());
            self.places.len() - 1
        });
        let Some(place) = self.places.get_mut(at) else { return };
        let number = (u64::from(place.uses) << 32) | at as u64;
        let fd = read.reading.fd().as_raw_fd();
        let vector = read.reading.transfer().next();
        place.read = Some(InFlight { read, short });
        self.in_flight += 1;
        self.add(fd, vector, number);
    }

    /// Keeps a read of the bell with the ring, so that others can wake this thread.
    fn listen(&mut self) {
        if self.bell_transfer.is_some() {
            return;
        }
        let Some(fd) = self.shared.bells.get(self.index).map(AsRawFd::as_raw_fd) else { return };
        let base = std::ptr::NonNull::from(&mut *self.bell).cast();
        // SAFETY: the count's place lives as long as the worker, which waits for this read.
        let span = unsafe { RawSpan::new(base, 8) };
        let transfer =
            self.bell_transfer.insert(Box::new(Transfer::new(0, [span, empty(), empty()], 1)));
        let (iov, pieces, _) = transfer.next();
        self.add(fd, (iov, pieces, 0), WAKE);
    }

    fn add(&mut self, fd: i32, vector: (*const libc::iovec, u32, u64), number: u64) {
        // SAFETY: vector, memory and descriptor belong to what lies in the read's place (or to the
        // bell), which is boxed and kept until this number comes back.
        while !unsafe { self.ring.push_read(fd, vector, number) } {
            self.submit(0);
        }
    }

    fn submit(&mut self, wanted: usize) {
        if let Err(error) = self.ring.submit_and_wait(wanted) {
            // What was added stays added; nothing is lost by trying again.
            tracing::warn!(%error, "a ring took no requests");
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Takes all completions.
    fn take(&mut self) {
        while let Some((number, moved)) = self.ring.take() {
            if number == WAKE {
                self.bell_transfer = None;
                continue;
            }
            let at = usize::try_from(number & u64::from(u32::MAX)).unwrap_or(usize::MAX);
            let place = self.places.get_mut(at).filter(|p| u64::from(p.uses) == number >> 32);
            let Some((place, ended)) =
                place.and_then(|place| place.read.take().map(|read| (place, read)))
            else {
                self.inner.counters.strangers.fetch_add(1, Ordering::Relaxed);
                tracing::error!(number, "a completion of no request");
                continue;
            };
            place.uses = place.uses.wrapping_add(1) & 0x7FFF_FFFF;
            self.vacant.push(at);
            self.in_flight -= 1;
            let moved = match ended.short {
                Some(most) => moved.map(|n| n.min(most)),
                None => moved,
            };
            self.advance(ended.read, moved);
        }
    }

    fn advance(&mut self, mut read: Watched, moved: io::Result<usize>) {
        match read.reading.transfer().advance(moved) {
            Progress::More => self.push(read),
            Progress::Ended(end) => self.ended.push_back((read, end)),
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Only a panic leaves anything on its way. The memory is not let go before it has ended.
        while self.in_flight > 0 {
            self.submit(1);
            while let Some((number, _)) = self.ring.take() {
                let at = usize::try_from(number & u64::from(u32::MAX)).unwrap_or(usize::MAX);
                let place = self.places.get_mut(at).filter(|_| number != WAKE);
                if let Some(read) = place.and_then(|place| place.read.take()) {
                    self.in_flight -= 1;
                    let message = "the thread of its ring failed";
                    let error = io::Error::other(message);
                    self.inner.end_watched(read.read, Err(Incomplete::Failed(error)));
                }
            }
        }
        if self.bell_transfer.is_some() {
            // The kernel reads the bell no more once somebody rings it.
            if let Some(bell) = self.shared.bells.get(self.index) {
                ring_bell(bell);
            }
            while self.bell_transfer.is_some() {
                self.submit(1);
                while let Some((number, _)) = self.ring.take() {
                    if number == WAKE {
                        self.bell_transfer = None;
                    }
                }
            }
        }
    }
}

/// Why reads of a stopped backend end.
pub(super) fn closed() -> StoreError {
    StoreError::new(ErrorKind::Cancelled, "the backend was closed before the operation began")
}
