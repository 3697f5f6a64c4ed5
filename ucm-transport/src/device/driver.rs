//! What the device engine asks of a driver. CUDA and HIP are thin layers below it.
//!
//! **Invariant:** a driver only passes calls on: what a failure means, when memory is free and in
//! which order things happen is decided above, once for all drivers.

use std::{ffi::c_void, fmt, os::fd::OwnedFd};

use super::error::Call;

/// A stream of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RawStream(pub(super) usize);

/// An event of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RawEvent(pub(super) usize);

/// One copy between addresses; the driver finds out where they lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CopyOp {
    pub(super) dst: u64,
    pub(super) src: u64,
    pub(super) len: usize,
}

/// One fragment as the kernel reads it; the layout is that of `Fragment` in `cuda/gather.cu`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(super) struct Fragment {
    pub(super) src: u64,
    pub(super) dst: u64,
    pub(super) len: u64,
}

const _: () = assert!(size_of::<Fragment>() == 24 && align_of::<Fragment>() == 8);

/// What a driver, as loaded, can do besides the necessary.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Abilities {
    /// Many copies by one call.
    pub(super) batch: bool,
    /// The kernel for fragments is loaded.
    pub(super) gather: bool,
    /// Kernels may use the host's own address of pinned memory.
    pub(super) host_addresses: bool,
    /// A stream can call the host back.
    pub(super) call_back: bool,
    /// Memory can be opened by other processes.
    pub(super) ipc: bool,
    /// Memory can be handed to other devices as a dmabuf.
    pub(super) dmabuf: bool,
}

/// A function that a stream calls when it gets there. It must not call the driver.
pub(super) type CallBack = unsafe extern "C" fn(*mut c_void);

/// A driver with one of its devices.
///
/// # Safety of all unsafe methods
/// The device is current on this thread (between [`enter`](Self::enter) and
/// [`leave`](Self::leave)); streams and events were made by this driver and are not destroyed;
/// addresses name live memory of the given length until the stream has passed the operation.
pub(super) trait Driver: Send + Sync + fmt::Debug {
    fn abilities(&self) -> Abilities;

    /// Makes the device current on this thread; what was before is for `leave`.
    fn enter(&self) -> Call<usize>;
    /// Restores what was current before.
    fn leave(&self, before: usize);
    /// Takes the error that a failed call left behind on this thread, if the driver keeps one.
    fn consume_error(&self);

    fn stream_create(&self, urgent: bool) -> Call<RawStream>;
    unsafe fn stream_destroy(&self, stream: RawStream) -> Call<()>;
    unsafe fn stream_wait(&self, stream: RawStream, event: RawEvent) -> Call<()>;
    unsafe fn call_back(&self, stream: RawStream, call: CallBack, arg: *mut c_void) -> Call<()>;

    fn event_create(&self) -> Call<RawEvent>;
    unsafe fn event_destroy(&self, event: RawEvent) -> Call<()>;
    unsafe fn event_record(&self, event: RawEvent, stream: RawStream) -> Call<()>;
    /// Whether everything before the last record has ended.
    unsafe fn event_query(&self, event: RawEvent) -> Call<bool>;

    unsafe fn copy(&self, op: CopyOp, stream: RawStream) -> Call<()>;
    /// After an error, any of the copies may be under way.
    unsafe fn copy_batch(&self, ops: &[CopyOp], stream: RawStream) -> Call<()>;
    /// Runs the kernel over `count` [`Fragment`]s at `fragments`, which stay until it has ended.
    unsafe fn gather(&self, fragments: u64, count: u32, stream: RawStream) -> Call<()>;

    fn alloc(&self, len: usize) -> Call<u64>;
    unsafe fn free(&self, addr: u64) -> Call<()>;
    /// Pinned memory that the device can reach at the host's address.
    fn host_alloc(&self, len: usize) -> Call<u64>;
    unsafe fn host_free(&self, addr: u64) -> Call<()>;
    unsafe fn pin(&self, addr: u64, len: usize) -> Call<()>;
    unsafe fn unpin(&self, addr: u64) -> Call<()>;

    /// The allocation that holds this address: base and length.
    fn allocation_of(&self, addr: u64) -> Call<(u64, usize)>;
    unsafe fn ipc_export(&self, addr: u64) -> Call<[u8; 64]>;
    fn ipc_import(&self, handle: [u8; 64]) -> Call<u64>;
    unsafe fn ipc_close(&self, addr: u64) -> Call<()>;
    /// Address and length are whole pages.
    unsafe fn dmabuf(&self, addr: u64, len: usize) -> Call<OwnedFd>;
    /// Lets the device reach the memory of another.
    fn reach_peer(&self, ordinal: u16) -> Call<()>;
}
