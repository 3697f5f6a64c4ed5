//! Streams and events.
//!
//! **Invariant:** operations of a stream run one after the other, in its thread; the ranges that an
//! operation names are on record from the call until it has run.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use crate::{Answer, INVALID_HANDLE, NOT_READY, OUT_OF_MEMORY, control};

/// Bytes that an operation reads or writes: address and length.
pub(crate) type Bytes = (usize, usize);

struct Op {
    number: u64,
    run: Box<dyn FnOnce() + Send>,
}

#[derive(Default)]
struct Event {
    /// Recorded so often; and told so often.
    state: Mutex<(u64, u64)>,
    told: Condvar,
}

#[derive(Default)]
struct All {
    streams: HashMap<usize, mpsc::Sender<Op>>,
    events: HashMap<usize, Arc<Event>>,
    next: usize,
    pending: HashMap<u64, Vec<Bytes>>,
    numbers: u64,
}

static ALL: Mutex<Option<All>> = Mutex::new(None);
static HELD: Mutex<bool> = Mutex::new(false);
static RELEASED: Condvar = Condvar::new();
static DELAY_US: AtomicU64 = AtomicU64::new(0);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn with<T>(f: impl FnOnce(&mut All) -> T) -> T {
    let mut all = lock(&ALL);
    f(all.get_or_insert_with(|| All { next: 0x10, ..All::default() }))
}

pub(crate) fn hold(on: bool) {
    *lock(&HELD) = on;
    RELEASED.notify_all();
}

pub(crate) fn delay(us: u64) {
    DELAY_US.store(us, Ordering::SeqCst);
}

pub(crate) fn create() -> Result<usize, i32> {
    let (sender, receiver) = mpsc::channel::<Op>();
    let from_env = control::from_env("UCM_FAKE_GPU_DELAY_US", 0);
    if from_env > 0 {
        delay(u64::try_from(from_env).unwrap_or(0));
    }
    let worker = thread::Builder::new().name("fake-gpu-stream".into()).spawn(move || {
        for op in receiver {
            let mut held = lock(&HELD);
            while *held {
                held = RELEASED.wait(held).unwrap_or_else(PoisonError::into_inner);
            }
            drop(held);
            let us = DELAY_US.load(Ordering::SeqCst);
            pause(Duration::from_micros(us));
            (op.run)();
            with(|all| all.pending.remove(&op.number));
        }
    });
    worker.map_err(|_| OUT_OF_MEMORY)?;
    Ok(with(|all| {
        all.next += 1;
        all.streams.insert(all.next, sender);
        all.next
    }))
}

/// A sleep takes 50 µs at least, which a hundred thousand operations add up.
fn pause(time: Duration) {
    if time >= Duration::from_micros(50) {
        return thread::sleep(time);
    }
    let begin = Instant::now();
    while begin.elapsed() < time {
        thread::yield_now();
    }
}

pub(crate) fn destroy(stream: usize) -> Answer {
    // What the stream still has to do is done.
    with(|all| all.streams.remove(&stream)).map(drop).ok_or_else(dead_handle)
}

pub(crate) fn push(
    stream: usize,
    bytes: Vec<Bytes>,
    run: impl FnOnce() + Send + 'static,
) -> Answer {
    with(|all| {
        all.numbers += 1;
        let number = all.numbers;
        let sender = all.streams.get(&stream).ok_or_else(dead_handle)?;
        let op = Op { number, run: Box::new(run) };
        sender.send(op).map_err(|_| INVALID_HANDLE)?;
        all.pending.insert(number, bytes);
        Ok(())
    })
}

/// Whether an operation that has not run names any of these bytes.
pub(crate) fn touches((start, len): Bytes) -> bool {
    let meets = |&(other, other_len): &Bytes| start < other + other_len && other < start + len;
    with(|all| all.pending.values().flatten().any(meets))
}

pub(crate) fn create_event() -> Result<usize, i32> {
    Ok(with(|all| {
        all.next += 1;
        all.events.insert(all.next, Arc::default());
        all.next
    }))
}

pub(crate) fn destroy_event(event: usize) -> Answer {
    with(|all| all.events.remove(&event)).map(drop).ok_or_else(dead_handle)
}

fn find(event: usize) -> Result<Arc<Event>, i32> {
    with(|all| all.events.get(&event).cloned()).ok_or_else(dead_handle)
}

pub(crate) fn record(event: usize, stream: usize) -> Answer {
    let event = find(event)?;
    let number = {
        let mut state = lock(&event.state);
        state.0 += 1;
        state.0
    };
    push(stream, Vec::new(), move || {
        let mut state = lock(&event.state);
        state.1 = state.1.max(number);
        event.told.notify_all();
    })
}

pub(crate) fn query(event: usize) -> Answer {
    let event = find(event)?;
    let (recorded, told) = *lock(&event.state);
    if told >= recorded { Ok(()) } else { Err(NOT_READY) }
}

pub(crate) fn wait(stream: usize, event: usize) -> Answer {
    let event = find(event)?;
    let recorded = lock(&event.state).0;
    push(stream, Vec::new(), move || {
        let mut state = lock(&event.state);
        while state.1 < recorded {
            state = event.told.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    })
}

fn dead_handle() -> i32 {
    control::violation();
    INVALID_HANDLE
}

pub(crate) fn streams() -> usize {
    with(|all| all.streams.len())
}

pub(crate) fn events() -> usize {
    with(|all| all.events.len())
}

pub(crate) fn pending() -> usize {
    with(|all| all.pending.len())
}

/// Descriptors of the kernel, read when it runs.
pub(crate) fn gather(stream: usize, fragments: usize, count: u32) -> Answer {
    #[repr(C)]
    #[derive(Clone, Copy)]
    struct Fragment {
        src: u64,
        dst: u64,
        len: u64,
    }
    let count = count as usize;
    let list = fragments as *const Fragment;
    // The bytes named now; a list that changes before the kernel runs moves others.
    let mut bytes: HashSet<Bytes> = HashSet::new();
    bytes.insert((fragments, count * size_of::<Fragment>()));
    for at in 0..count {
        let one = unsafe { *list.add(at) };
        bytes.insert((one.src as usize, one.len as usize));
        bytes.insert((one.dst as usize, one.len as usize));
    }
    push(stream, bytes.into_iter().collect(), move || {
        let list = fragments as *const Fragment;
        for at in 0..count {
            unsafe {
                let one = *list.add(at);
                std::ptr::copy(one.src as *const u8, one.dst as *mut u8, one.len as usize);
            }
        }
    })
}
