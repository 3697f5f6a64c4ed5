//! HIP behind the [`Driver`] trait: answers become results, nothing else.
//!
//! **Invariant:** the thread's device is what it was when a call of the engine is over, and no failed
//! call leaves its error behind on the thread.

use std::{
    ffi::{CStr, c_int, c_uint, c_void},
    os::fd::{FromRawFd as _, OwnedFd},
    ptr::null_mut,
};

use hip_sys::hiprt::{
    hipEvent_t, hipEventDisableTiming, hipHostMallocMapped, hipHostMallocPortable,
    hipIpcMemHandle_st, hipMemcpyKind, hipStream_t, hipStreamNonBlocking,
};

use super::sys::{self, Functions};
use crate::device::{
    absent::{DeviceAbsent, GpuFamily},
    driver::{Abilities, CallBack, CopyOp, Driver, RawEvent, RawStream},
    error::{Call, DriverError},
    gpu::GpuInfo,
};

/// ROCm 5: the oldest runtime whose interface is used.
const OLDEST: i32 = 50_000_000;

/// The runtime finds out itself where addresses lie.
const ANY_DIRECTION: c_uint = hipMemcpyKind::hipMemcpyDefault as c_uint;
/// The same numbers for allocations and registrations.
const HOST_FLAGS: c_uint = hipHostMallocPortable | hipHostMallocMapped;
const IPC_LAZY_PEER_ACCESS: c_uint = 1;
const DMABUF: c_uint = 1;

/// A device of the HIP runtime.
#[derive(Debug)]
pub(in crate::device) struct HipDriver {
    f: &'static Functions,
    device: c_int,
    /// Of ordinary and of urgent streams.
    priorities: (c_int, c_int),
    abilities: Abilities,
}

fn check(f: &Functions, call: &'static str, code: c_int) -> Call<()> {
    if code == 0 {
        return Ok(());
    }
    // A failed call leaves its error on the thread, where the next one to look would take it for its
    // own: it is taken here, at once.
    // SAFETY: no arguments.
    let _ = unsafe { (f.hipGetLastError)() };
    let name = f.error_name.map_or(std::ptr::null(), |name_of| {
        // SAFETY: answers a static text for any number.
        unsafe { name_of(code) }
    });
    let text = if name.is_null() {
        "unknown to the runtime".into()
    } else {
        // SAFETY: a static text of the runtime.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    };
    Err(DriverError::new(call, code, text))
}

/// Calls a needed function.
macro_rules! call {
    ($f:expr, $name:ident($($arg:expr),* $(,)?)) => {{
        let f = $f;
        // SAFETY: the arguments are as hip_runtime_api.h asks, see the methods; outputs point to
        // locals.
        let code = unsafe { (f.$name)($($arg),*) };
        check(f, stringify!($name), code)
    }};
}

/// Calls a function that may be missing.
macro_rules! may_call {
    ($f:expr, $name:ident($($arg:expr),* $(,)?)) => {{
        let f = $f;
        match f.$name {
            Some(function) => {
                // SAFETY: as for needed functions.
                let code = unsafe { function($($arg),*) };
                check(f, stringify!($name), code)
            }
            None => Err(DriverError::missing(stringify!($name))),
        }
    }};
}

/// Finds runtime and devices; returns the version and how many devices there are.
pub(in crate::device) fn probe() -> Result<(i32, i32), DeviceAbsent> {
    let f = sys::functions()?;
    let family = GpuFamily::Hip;
    let refused = |error: &DriverError| DeviceAbsent::Refused { family, said: error.to_string() };
    let mut version = 0;
    call!(f, hipRuntimeGetVersion(&raw mut version)).map_err(|error| refused(&error))?;
    if version < OLDEST {
        return Err(DeviceAbsent::TooOld { family, found: version, needed: OLDEST });
    }
    let mut devices = 0;
    let counted = call!(f, hipInit(0)).and_then(|()| call!(f, hipGetDeviceCount(&raw mut devices)));
    match counted {
        Ok(()) if devices > 0 => Ok((version, devices)),
        Ok(()) => Err(DeviceAbsent::NoDevice { family, devices: 0, code: 0 }),
        Err(error) => Err(match error.code {
            // No device, and what a runtime without a kernel driver says.
            100 | 101 => DeviceAbsent::NoDevice { family, devices: 0, code: error.code },
            35 => DeviceAbsent::TooOld { family, found: version, needed: OLDEST },
            _ => refused(&error),
        }),
    }
}

impl HipDriver {
    /// Opens a device.
    pub(in crate::device) fn open(ordinal: u16) -> Result<(Self, GpuInfo), DeviceAbsent> {
        let (version, devices) = probe()?;
        let family = GpuFamily::Hip;
        if i32::from(ordinal) >= devices {
            return Err(DeviceAbsent::NoDevice { family, devices, code: 0 });
        }
        let f = sys::functions()?;
        Self::open_device(f, ordinal, version)
            .map_err(|error| DeviceAbsent::Refused { family, said: error.to_string() })
    }

    fn open_device(f: &'static Functions, ordinal: u16, version: i32) -> Call<(Self, GpuInfo)> {
        let device = c_int::from(ordinal);
        let mut name = [0_u8; 128];
        call!(f, hipDeviceGetName(name.as_mut_ptr().cast(), 127, device))?;
        let mut memory_bytes = 0;
        call!(f, hipDeviceTotalMem(&raw mut memory_bytes, device))?;
        let abilities = Abilities {
            batch: f.hipMemcpyBatchAsync.is_some(),
            // A kernel would have to be compiled for each kind of device.
            gather: false,
            host_addresses: false,
            call_back: f.hipLaunchHostFunc.is_some(),
            ipc: f.hipIpcGetMemHandle.is_some()
                && f.hipIpcOpenMemHandle.is_some()
                && f.hipIpcCloseMemHandle.is_some()
                && f.hipMemGetAddressRange.is_some(),
            dmabuf: f.hipMemGetHandleForAddressRange.is_some() && f.hipMemGetAddressRange.is_some(),
        };
        let mut this = Self { f, device, priorities: (0, 0), abilities };
        let before = this.enter()?;
        let (mut least, mut greatest) = (0, 0);
        let asked = call!(f, hipDeviceGetStreamPriorityRange(&raw mut least, &raw mut greatest));
        this.leave(before);
        asked?;
        // Ordinary streams have priority 0, which lies in the range.
        this.priorities = (least.min(0), greatest);
        let name = CStr::from_bytes_until_nul(&name).unwrap_or_default();
        let info = GpuInfo {
            family: GpuFamily::Hip,
            ordinal,
            name: name.to_string_lossy().into_owned(),
            memory_bytes: memory_bytes as u64,
            driver_version: version,
        };
        Ok((this, info))
    }
}

fn stream_of(stream: RawStream) -> hipStream_t {
    std::ptr::with_exposed_provenance_mut(stream.0)
}

fn event_of(event: RawEvent) -> hipEvent_t {
    std::ptr::with_exposed_provenance_mut(event.0)
}

fn pointer(addr: u64) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(usize::try_from(addr).unwrap_or(0))
}

impl Driver for HipDriver {
    fn abilities(&self) -> Abilities {
        self.abilities
    }

    fn enter(&self) -> Call<usize> {
        let mut before = 0;
        call!(self.f, hipGetDevice(&raw mut before))?;
        if before != self.device {
            call!(self.f, hipSetDevice(self.device))?;
        }
        Ok(usize::try_from(before).unwrap_or(0))
    }

    fn leave(&self, before: usize) {
        let before = c_int::try_from(before).unwrap_or(self.device);
        if before != self.device
            && let Err(error) = call!(self.f, hipSetDevice(before))
        {
            tracing::warn!("{error}");
        }
    }

    fn consume_error(&self) {
        // SAFETY: no arguments; its answer is the error that was pending.
        let _ = unsafe { (self.f.hipGetLastError)() };
    }

    fn stream_create(&self, urgent: bool) -> Call<RawStream> {
        let mut stream = null_mut();
        let priority = if urgent { self.priorities.1 } else { self.priorities.0 };
        call!(
            self.f,
            hipStreamCreateWithPriority(&raw mut stream, hipStreamNonBlocking, priority)
        )?;
        Ok(RawStream(stream.expose_provenance()))
    }

    unsafe fn stream_destroy(&self, stream: RawStream) -> Call<()> {
        call!(self.f, hipStreamDestroy(stream_of(stream)))
    }

    unsafe fn stream_wait(&self, stream: RawStream, event: RawEvent) -> Call<()> {
        call!(self.f, hipStreamWaitEvent(stream_of(stream), event_of(event), 0))
    }

    unsafe fn call_back(&self, stream: RawStream, call: CallBack, arg: *mut c_void) -> Call<()> {
        may_call!(self.f, hipLaunchHostFunc(stream_of(stream), Some(call), arg))
    }

    fn event_create(&self) -> Call<RawEvent> {
        let mut event = null_mut();
        call!(self.f, hipEventCreateWithFlags(&raw mut event, hipEventDisableTiming))?;
        Ok(RawEvent(event.expose_provenance()))
    }

    unsafe fn event_destroy(&self, event: RawEvent) -> Call<()> {
        call!(self.f, hipEventDestroy(event_of(event)))
    }

    unsafe fn event_record(&self, event: RawEvent, stream: RawStream) -> Call<()> {
        call!(self.f, hipEventRecord(event_of(event), stream_of(stream)))
    }

    unsafe fn event_query(&self, event: RawEvent) -> Call<bool> {
        match call!(self.f, hipEventQuery(event_of(event))) {
            Ok(()) => Ok(true),
            Err(error) if error.code == 600 => Ok(false),
            Err(error) => Err(error),
        }
    }

    unsafe fn copy(&self, op: CopyOp, stream: RawStream) -> Call<()> {
        let (dst, src) = (pointer(op.dst), pointer(op.src));
        call!(self.f, hipMemcpyAsync(dst, src, op.len, ANY_DIRECTION, stream_of(stream)))
    }

    unsafe fn copy_batch(&self, ops: &[CopyOp], stream: RawStream) -> Call<()> {
        let mut dsts: Vec<*mut c_void> = ops.iter().map(|op| pointer(op.dst)).collect();
        let mut srcs: Vec<*mut c_void> = ops.iter().map(|op| pointer(op.src)).collect();
        let mut lens: Vec<usize> = ops.iter().map(|op| op.len).collect();
        let mut failed = 0;
        // No attributes: not every version takes them, and the order of the stream is the default.
        may_call!(
            self.f,
            hipMemcpyBatchAsync(
                dsts.as_mut_ptr(),
                srcs.as_mut_ptr(),
                lens.as_mut_ptr(),
                ops.len(),
                null_mut(),
                null_mut(),
                0,
                &raw mut failed,
                stream_of(stream),
            )
        )
    }

    unsafe fn gather(&self, _fragments: u64, _count: u32, _stream: RawStream) -> Call<()> {
        Err(DriverError::missing("hipModuleLaunchKernel"))
    }

    fn alloc(&self, len: usize) -> Call<u64> {
        let mut addr = null_mut();
        call!(self.f, hipMalloc(&raw mut addr, len))?;
        Ok(addr.expose_provenance() as u64)
    }

    unsafe fn free(&self, addr: u64) -> Call<()> {
        call!(self.f, hipFree(pointer(addr)))
    }

    fn host_alloc(&self, len: usize) -> Call<u64> {
        let mut addr = null_mut();
        call!(self.f, hipHostMalloc(&raw mut addr, len, HOST_FLAGS))?;
        Ok(addr.expose_provenance() as u64)
    }

    unsafe fn host_free(&self, addr: u64) -> Call<()> {
        call!(self.f, hipHostFree(pointer(addr)))
    }

    unsafe fn pin(&self, addr: u64, len: usize) -> Call<()> {
        call!(self.f, hipHostRegister(pointer(addr), len, HOST_FLAGS))
    }

    unsafe fn unpin(&self, addr: u64) -> Call<()> {
        call!(self.f, hipHostUnregister(pointer(addr)))
    }

    fn allocation_of(&self, addr: u64) -> Call<(u64, usize)> {
        let (mut base, mut len) = (null_mut(), 0);
        may_call!(self.f, hipMemGetAddressRange(&raw mut base, &raw mut len, pointer(addr)))?;
        Ok((base.expose_provenance() as u64, len))
    }

    unsafe fn ipc_export(&self, addr: u64) -> Call<[u8; 64]> {
        let mut handle = hipIpcMemHandle_st { reserved: [0; 64] };
        may_call!(self.f, hipIpcGetMemHandle(&raw mut handle, pointer(addr)))?;
        Ok(handle.reserved.map(std::ffi::c_char::cast_unsigned))
    }

    fn ipc_import(&self, handle: [u8; 64]) -> Call<u64> {
        let handle = hipIpcMemHandle_st { reserved: handle.map(u8::cast_signed) };
        let mut addr = null_mut();
        may_call!(self.f, hipIpcOpenMemHandle(&raw mut addr, handle, IPC_LAZY_PEER_ACCESS))?;
        Ok(addr.expose_provenance() as u64)
    }

    unsafe fn ipc_close(&self, addr: u64) -> Call<()> {
        may_call!(self.f, hipIpcCloseMemHandle(pointer(addr)))
    }

    unsafe fn dmabuf(&self, addr: u64, len: usize) -> Call<OwnedFd> {
        let mut fd: c_int = -1;
        may_call!(
            self.f,
            hipMemGetHandleForAddressRange((&raw mut fd).cast(), pointer(addr), len, DMABUF, 0,)
        )?;
        if fd < 0 {
            let what = format!("descriptor {fd}");
            return Err(DriverError::nonsense("hipMemGetHandleForAddressRange", what));
        }
        // SAFETY: the runtime made this descriptor for us.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    fn reach_peer(&self, ordinal: u16) -> Call<()> {
        let other = c_int::from(ordinal);
        let mut can = 0;
        may_call!(self.f, hipDeviceCanAccessPeer(&raw mut can, self.device, other))?;
        if can == 0 {
            return Err(DriverError::new("hipDeviceCanAccessPeer", 801, "no way between them"));
        }
        match may_call!(self.f, hipDeviceEnablePeerAccess(other, 0)) {
            // Enabled already.
            Err(error) if error.code == 704 => Ok(()),
            other => other,
        }
    }
}
