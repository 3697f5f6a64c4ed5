//! What a test does to the library: faults, holds, delays; and what it may ask.
//!
//! **Invariant:** a fault is decided when a call begins, by its number or its name, and by nothing
//! else; asking changes nothing.

use std::{
    cell::Cell,
    collections::HashMap,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::{Answer, context, memory, stream};

#[derive(Default)]
struct Control {
    calls: u64,
    calls_of: HashMap<&'static str, u64>,
    fault: Option<Fault>,
}

/// From its `at`-th matching call (from 0) on, `count` calls answer `code`.
struct Fault {
    name: String,
    at: u64,
    count: u64,
    code: i32,
    seen: u64,
}

static CONTROL: Mutex<Option<Control>> = Mutex::new(None);
static VIOLATIONS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// What `hipGetLastError` tells.
    static LAST: Cell<i32> = const { Cell::new(0) };
}

fn with<T>(f: impl FnOnce(&mut Control) -> T) -> T {
    let mut control: MutexGuard<'_, _> = CONTROL.lock().unwrap_or_else(PoisonError::into_inner);
    f(control.get_or_insert_with(Control::default))
}

/// Counts a call; the error it is to answer, if any.
pub(crate) fn call(name: &'static str) -> Answer {
    with(|control| {
        control.calls += 1;
        *control.calls_of.entry(name).or_default() += 1;
        let Some(fault) = &mut control.fault else { return Ok(()) };
        if !fault.name.is_empty() && fault.name != name {
            return Ok(());
        }
        let at = fault.seen;
        fault.seen += 1;
        let hit = at >= fault.at && at - fault.at < fault.count;
        if hit { Err(fault.code) } else { Ok(()) }
    })
}

/// Turns an answer into C's number, and remembers a failure for the thread.
pub(crate) fn answer(answer: Answer) -> i32 {
    match answer {
        Ok(()) => 0,
        Err(code) => {
            if code != crate::NOT_READY {
                LAST.set(code);
            }
            code
        }
    }
}

pub(crate) fn take_last() -> i32 {
    LAST.replace(0)
}

pub(crate) fn violation() {
    VIOLATIONS.fetch_add(1, Ordering::SeqCst);
}

/// A number from the environment, which tests set before the process starts.
pub(crate) fn from_env(name: &str, otherwise: i32) -> i32 {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(otherwise)
}

/// From the `at`-th call of this name (empty: of any name) on, `count` calls answer `code`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_gpu_fail(
    name: *const u8,
    name_len: usize,
    at: u64,
    count: u64,
    code: i32,
) {
    let name = std::slice::from_raw_parts(name, name_len);
    let name = String::from_utf8_lossy(name).into_owned();
    with(|control| control.fault = Some(Fault { name, at, count, code, seen: 0 }));
}

/// Calls so far, but for those that only ask.
#[unsafe(no_mangle)]
pub extern "C" fn fake_gpu_calls() -> u64 {
    with(|control| control.calls)
}

/// Calls of this name so far.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_gpu_calls_of(name: *const u8, name_len: usize) -> u64 {
    let name = std::slice::from_raw_parts(name, name_len);
    let name = String::from_utf8_lossy(name).into_owned();
    with(|control| control.calls_of.get(name.as_str()).copied().unwrap_or(0))
}

/// Holds all streams before their next operation, or lets them go.
#[unsafe(no_mangle)]
pub extern "C" fn fake_gpu_hold(on: i32) {
    stream::hold(on != 0);
}

/// Lets every stream wait this long before each operation.
#[unsafe(no_mangle)]
pub extern "C" fn fake_gpu_delay_us(us: u64) {
    stream::delay(us);
}

/// How many live: 0 streams, 1 events, 2 device allocations, 3 host allocations, 4 pins, 5 modules,
/// 6 imported handles, 7 retained contexts, 8 operations not yet done.
#[unsafe(no_mangle)]
pub extern "C" fn fake_gpu_live(what: u32) -> u64 {
    let live = match what {
        0 => stream::streams(),
        1 => stream::events(),
        2 => memory::allocations(),
        3 => memory::host_allocations(),
        4 => memory::pins(),
        5 => context::modules(),
        6 => memory::imports(),
        7 => context::retained(),
        _ => stream::pending(),
    };
    live as u64
}

/// Memory given back while an operation still named it, and dead handles used.
#[unsafe(no_mangle)]
pub extern "C" fn fake_gpu_violations() -> u64 {
    VIOLATIONS.load(Ordering::SeqCst)
}
