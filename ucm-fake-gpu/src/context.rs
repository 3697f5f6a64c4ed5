//! Devices, contexts of threads, modules.
//!
//! **Invariant:** a context is named by the number of its device.

use std::{
    cell::RefCell,
    collections::HashSet,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use crate::{
    Answer, INVALID_CONTEXT, INVALID_DEVICE, INVALID_HANDLE, PEER_ALREADY_ENABLED,
    PEER_UNSUPPORTED, control,
};

/// Contexts are these numbers plus the device's.
const CONTEXT: usize = 0x1000;

static RETAINED: AtomicUsize = AtomicUsize::new(0);
static MODULES: AtomicUsize = AtomicUsize::new(0);
static PEERS: Mutex<Option<HashSet<(i32, i32)>>> = Mutex::new(None);

thread_local! {
    static STACK: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
    /// HIP's device of the thread.
    static DEVICE: RefCell<i32> = const { RefCell::new(0) };
}

pub(crate) fn devices() -> i32 {
    control::from_env("UCM_FAKE_GPU_DEVICES", 2)
}

pub(crate) fn device(ordinal: i32) -> Result<i32, i32> {
    if (0..devices()).contains(&ordinal) { Ok(ordinal) } else { Err(INVALID_DEVICE) }
}

pub(crate) fn retain(ordinal: i32) -> Result<usize, i32> {
    RETAINED.fetch_add(1, Ordering::SeqCst);
    Ok(CONTEXT + device(ordinal)? as usize)
}

pub(crate) fn release() -> Answer {
    RETAINED.fetch_sub(1, Ordering::SeqCst);
    Ok(())
}

pub(crate) fn retained() -> usize {
    RETAINED.load(Ordering::SeqCst)
}

pub(crate) fn push(context: usize) -> Answer {
    STACK.with_borrow_mut(|stack| stack.push(context));
    Ok(())
}

pub(crate) fn pop() -> Result<usize, i32> {
    STACK.with_borrow_mut(Vec::pop).ok_or(INVALID_CONTEXT)
}

/// The device of the current context.
pub(crate) fn current() -> Result<i32, i32> {
    let top = STACK.with_borrow(|stack| stack.last().copied()).ok_or(INVALID_CONTEXT)?;
    i32::try_from(top - CONTEXT).map_err(|_| INVALID_CONTEXT)
}

pub(crate) fn hip_device() -> i32 {
    DEVICE.with_borrow(|device| *device)
}

pub(crate) fn set_hip_device(ordinal: i32) -> Answer {
    let ordinal = device(ordinal)?;
    DEVICE.with_borrow_mut(|device| *device = ordinal);
    Ok(())
}

/// Devices 0 and 1 reach each other.
pub(crate) fn can_access_peer(a: i32, b: i32) -> Result<bool, i32> {
    Ok(device(a)? != device(b)? && a < 2 && b < 2)
}

pub(crate) fn enable_peer(from: i32, context: usize) -> Answer {
    let to = i32::try_from(context.wrapping_sub(CONTEXT)).map_err(|_| INVALID_CONTEXT)?;
    enable_peer_device(from, to)
}

pub(crate) fn enable_peer_device(from: i32, to: i32) -> Answer {
    if !can_access_peer(from, to)? {
        return Err(PEER_UNSUPPORTED);
    }
    let mut peers = PEERS.lock().unwrap_or_else(PoisonError::into_inner);
    let new = peers.get_or_insert_with(HashSet::new).insert((from, to));
    if new { Ok(()) } else { Err(PEER_ALREADY_ENABLED) }
}

/// A module is loaded when its text has the kernel's entry.
pub(crate) unsafe fn load_module(image: *const i8) -> Result<usize, i32> {
    let text = std::ffi::CStr::from_ptr(image.cast()).to_string_lossy();
    if !text.contains("ucm_gather") {
        return Err(crate::INVALID_VALUE);
    }
    MODULES.fetch_add(1, Ordering::SeqCst);
    Ok(0x2000)
}

pub(crate) fn unload_module(module: usize) -> Answer {
    if module != 0x2000 {
        control::violation();
        return Err(INVALID_HANDLE);
    }
    MODULES.fetch_sub(1, Ordering::SeqCst);
    Ok(())
}

pub(crate) fn modules() -> usize {
    MODULES.load(Ordering::SeqCst)
}
