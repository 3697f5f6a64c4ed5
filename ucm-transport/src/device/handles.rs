//! Streams, events and memory of a device as values that give themselves back.
//!
//! **Invariant:** a handle is destroyed once, by the value that owns it; memory that a copy may still
//! use is owned by the copy, so nothing here has to wait.

use std::{
    ffi::c_void,
    ptr::NonNull,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    driver::{CallBack, Fragment, RawEvent, RawStream},
    error::Call,
    opened::Device,
};

/// Reports what could not be given back; there is nobody left to tell.
fn given_back(what: &str, result: Call<()>) {
    if let Err(error) = result {
        tracing::warn!("giving back {what}: {error}");
    }
}

/// A stream of a device.
#[derive(Debug)]
pub(super) struct Stream {
    device: Arc<Device>,
    raw: RawStream,
}

impl Stream {
    pub(super) fn new(device: &Arc<Device>, urgent: bool) -> Call<Self> {
        let raw = device.enter()?.stream_create(urgent)?;
        Ok(Self { device: Arc::clone(device), raw })
    }

    pub(super) fn raw(&self) -> RawStream {
        self.raw
    }

    /// Lets the host be called when the stream gets here.
    ///
    /// # Safety
    /// `call` may be called once with `arg`, from any thread, at any time until the process ends.
    pub(super) unsafe fn call_back(&self, call: CallBack, arg: *mut c_void) -> Call<()> {
        let entered = self.device.enter()?;
        // SAFETY: our stream; the caller vouches for the function.
        unsafe { entered.call_back(self.raw, call, arg) }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.device.is_of_this_process() {
            let destroyed = self.device.enter_to_give_back().and_then(|entered| {
                // SAFETY: made by `new`, destroyed once. What is under way on it goes on.
                unsafe { entered.stream_destroy(self.raw) }
            });
            given_back("a stream", destroyed);
        }
    }
}

/// An event of a device.
#[derive(Debug)]
pub(super) struct Event {
    device: Arc<Device>,
    raw: RawEvent,
}

impl Event {
    pub(super) fn new(device: &Arc<Device>) -> Call<Self> {
        let raw = device.enter()?.event_create()?;
        Ok(Self { device: Arc::clone(device), raw })
    }

    /// From now on it tells that everything given to `stream` so far has ended.
    pub(super) fn record(&self, stream: &Stream) -> Call<()> {
        let entered = self.device.enter()?;
        // SAFETY: both live.
        unsafe { entered.event_record(self.raw, stream.raw) }
    }

    /// Whether what it was recorded after has ended.
    pub(super) fn has_ended(&self) -> Call<bool> {
        let entered = self.device.enter()?;
        // SAFETY: it lives.
        unsafe { entered.event_query(self.raw) }
    }

    /// Lets a stream wait for it.
    ///
    /// # Safety
    /// The stream is one of this driver, and not destroyed.
    pub(super) unsafe fn hold_back(&self, stream: RawStream) -> Call<()> {
        let entered = self.device.enter()?;
        // SAFETY: the event lives, and so does the stream, as the caller promises.
        unsafe { entered.stream_wait(stream, self.raw) }
    }

    /// Records it on a stream of somebody else.
    ///
    /// # Safety
    /// As for [`hold_back`](Self::hold_back).
    pub(super) unsafe fn record_on(&self, stream: RawStream) -> Call<()> {
        let entered = self.device.enter()?;
        // SAFETY: as above.
        unsafe { entered.event_record(self.raw, stream) }
    }
}

/// After a failure: whether everything given to the stream is proved to have ended. Asks again and
/// again until `time` is over.
pub(super) fn settled(event: &Event, stream: &Stream, time: Duration) -> bool {
    let begin = Instant::now();
    let mut recorded = false;
    while begin.elapsed() < time {
        if !recorded {
            recorded = event.record(stream).is_ok();
        }
        if recorded && matches!(event.has_ended(), Ok(true)) {
            return true;
        }
        std::thread::sleep(Duration::from_micros(500));
    }
    false
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.device.is_of_this_process() {
            let destroyed = self.device.enter_to_give_back().and_then(|entered| {
                // SAFETY: made by `new`, destroyed once; a record under way does not need it.
                unsafe { entered.event_destroy(self.raw) }
            });
            given_back("an event", destroyed);
        }
    }
}

/// Pinned host memory of the engine's own.
#[derive(Debug)]
pub(super) struct Scratch {
    device: Arc<Device>,
    addr: u64,
    len: usize,
}

impl Scratch {
    pub(super) fn new(device: &Arc<Device>, len: usize) -> Call<Self> {
        let addr = device.enter()?.host_alloc(len)?;
        Ok(Self { device: Arc::clone(device), addr, len })
    }

    /// Writes the fragments to its start; says where they are. `None` if they do not fit.
    pub(super) fn put(&mut self, fragments: &[Fragment]) -> Option<u64> {
        if size_of_val(fragments) > self.len {
            return None;
        }
        let to = self.pointer()?.cast::<Fragment>();
        // SAFETY: the memory is ours, long enough, aligned for any type, and disjoint from a slice.
        unsafe {
            std::ptr::copy_nonoverlapping(fragments.as_ptr(), to.as_ptr(), fragments.len());
        }
        Some(self.addr)
    }

    pub(super) fn addr(&self) -> u64 {
        self.addr
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn pointer(&self) -> Option<NonNull<u8>> {
        let addr = usize::try_from(self.addr).ok()?;
        NonNull::new(std::ptr::with_exposed_provenance_mut(addr))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if self.device.is_of_this_process() {
            let freed = self.device.enter_to_give_back().and_then(|entered| {
                // SAFETY: made by `new`, freed once; its user has ended, or leaks it.
                unsafe { entered.host_free(self.addr) }
            });
            given_back("pinned memory", freed);
        }
    }
}

/// Memory of a device: allocated here, or opened from another process.
#[derive(Debug)]
pub(super) struct DeviceBytes {
    device: Arc<Device>,
    addr: u64,
    imported: bool,
}

impl DeviceBytes {
    pub(super) fn alloc(device: &Arc<Device>, len: usize) -> Call<Self> {
        let addr = device.enter()?.alloc(len)?;
        Ok(Self { device: Arc::clone(device), addr, imported: false })
    }

    pub(super) fn import(device: &Arc<Device>, handle: [u8; 64]) -> Call<Self> {
        let addr = device.enter()?.ipc_import(handle)?;
        Ok(Self { device: Arc::clone(device), addr, imported: true })
    }

    pub(super) fn addr(&self) -> u64 {
        self.addr
    }
}

impl Drop for DeviceBytes {
    fn drop(&mut self) {
        if self.device.is_of_this_process() {
            let freed = self.device.enter_to_give_back().and_then(|entered| {
                if self.imported {
                    // SAFETY: opened by `import`, closed once.
                    unsafe { entered.ipc_close(self.addr) }
                } else {
                    // SAFETY: made by `alloc`, freed once.
                    unsafe { entered.free(self.addr) }
                }
            });
            given_back("device memory", freed);
        }
    }
}
