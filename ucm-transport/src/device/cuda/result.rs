//! CUDA behind the [`Driver`] trait: answers become results, nothing else.
//!
//! **Invariant:** the primary context is retained as long as the value lives; it is the context of
//! the runtime interface, too, so memory of frameworks in this process can be named.

use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    os::fd::{FromRawFd as _, OwnedFd},
    ptr::null_mut,
};

use cudarc::driver::sys::{
    CU_MEMHOSTALLOC_DEVICEMAP, CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP,
    CU_MEMHOSTREGISTER_PORTABLE, CUcontext, CUdevice, CUdevice_attribute, CUevent, CUevent_flags,
    CUfunction, CUipcMem_flags, CUipcMemHandle, CUmemLocation, CUmemLocationType,
    CUmemRangeHandleType, CUmemcpyAttributes, CUmemcpySrcAccessOrder, CUmodule, CUstream,
    CUstream_flags,
};

use super::sys::{self, Functions};
use crate::device::{
    absent::{DeviceAbsent, GpuFamily},
    driver::{Abilities, CallBack, CopyOp, Driver, RawEvent, RawStream},
    error::{Call, DriverError},
    gpu::GpuInfo,
};

/// CUDA 11.4: the oldest driver whose interface is used.
const OLDEST: i32 = 11_040;
/// CUDA 12.8 brought the batch copy.
const WITH_BATCH: i32 = 12_080;

/// The kernel for fragments, compiled from `gather.cu`; the driver translates it for its device.
const GATHER: &CStr =
    match CStr::from_bytes_with_nul(concat!(include_str!("gather.ptx"), "\0").as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("gather.ptx holds a zero byte"),
    };
/// Threads that share one fragment.
const GATHER_THREADS: c_uint = 128;
/// Enough blocks to fill any device; each takes fragment after fragment.
const GATHER_BLOCKS: c_uint = 1024;

/// A device of the CUDA driver.
#[derive(Debug)]
pub(in crate::device) struct CudaDriver {
    f: &'static Functions,
    device: CUdevice,
    context: Context,
    /// Of ordinary and of urgent streams.
    priorities: (c_int, c_int),
    gather: Option<(CUmodule, CUfunction)>,
    abilities: Abilities,
}

#[derive(Clone, Copy, Debug)]
struct Context(CUcontext);

// SAFETY: driver handles may be used from any thread; that is what `enter` is for.
unsafe impl Send for CudaDriver {}
// SAFETY: as above, and the driver locks for itself.
unsafe impl Sync for CudaDriver {}

fn check(f: &Functions, call: &'static str, code: c_int) -> Call<()> {
    if code == 0 {
        return Ok(());
    }
    let mut name: *const c_char = std::ptr::null();
    // SAFETY: writes a pointer to a static text, or leaves null.
    let known = unsafe { (f.cuGetErrorName)(code, &raw mut name) };
    let text = if known == 0 && !name.is_null() {
        // SAFETY: a static text of the driver.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    } else {
        "unknown to the driver".into()
    };
    Err(DriverError::new(call, code, text))
}

/// Calls a needed function.
macro_rules! call {
    ($f:expr, $name:ident($($arg:expr),* $(,)?)) => {{
        let f = $f;
        // SAFETY: the arguments are as cuda.h asks, see the methods; outputs point to locals.
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

fn refused(error: &DriverError) -> DeviceAbsent {
    DeviceAbsent::Refused { family: GpuFamily::Cuda, said: error.to_string() }
}

/// Finds driver and devices; returns the version and how many devices there are.
pub(in crate::device) fn probe() -> Result<(i32, i32), DeviceAbsent> {
    let f = sys::functions()?;
    let family = GpuFamily::Cuda;
    let mut version = 0;
    call!(f, cuDriverGetVersion(&raw mut version)).map_err(|error| refused(&error))?;
    let too_old = DeviceAbsent::TooOld { family, found: version, needed: OLDEST };
    if version < OLDEST {
        return Err(too_old);
    }
    let mut devices = 0;
    let counted = call!(f, cuInit(0)).and_then(|()| call!(f, cuDeviceGetCount(&raw mut devices)));
    match counted {
        Ok(()) if devices > 0 => Ok((version, devices)),
        Ok(()) => Err(DeviceAbsent::NoDevice { family, devices: 0, code: 0 }),
        Err(error) => Err(match error.code {
            // A toolkit's stub library; no device; an ordinal that does not exist.
            34 | 100 | 101 => DeviceAbsent::NoDevice { family, devices: 0, code: error.code },
            // Insufficient driver, or one that does not fit the kernel's.
            35 | 803 | 804 => too_old,
            _ => refused(&error),
        }),
    }
}

impl CudaDriver {
    /// Opens a device.
    pub(in crate::device) fn open(ordinal: u16) -> Result<(Self, GpuInfo), DeviceAbsent> {
        let (version, devices) = probe()?;
        if i32::from(ordinal) >= devices {
            let family = GpuFamily::Cuda;
            return Err(DeviceAbsent::NoDevice { family, devices, code: 0 });
        }
        Self::open_device(sys::functions()?, ordinal, version).map_err(|error| refused(&error))
    }

    fn open_device(f: &'static Functions, ordinal: u16, version: i32) -> Call<(Self, GpuInfo)> {
        let mut device = 0;
        call!(f, cuDeviceGet(&raw mut device, c_int::from(ordinal)))?;
        let mut name = [0_u8; 128];
        call!(f, cuDeviceGetName(name.as_mut_ptr().cast(), 127, device))?;
        let mut memory_bytes = 0;
        call!(f, cuDeviceTotalMem_v2(&raw mut memory_bytes, device))?;
        let has = |attribute: CUdevice_attribute| {
            let mut value = 0;
            let asked = call!(f, cuDeviceGetAttribute(&raw mut value, attribute as c_uint, device));
            asked.is_ok() && value != 0
        };
        let abilities = Abilities {
            batch: f.cuMemcpyBatchAsync.is_some() && version >= WITH_BATCH,
            gather: false,
            host_addresses: has(
                CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM,
            ),
            call_back: f.cuLaunchHostFunc.is_some(),
            ipc: f.cuIpcGetMemHandle.is_some()
                && f.cuIpcOpenMemHandle_v2.is_some()
                && f.cuIpcCloseMemHandle.is_some()
                && f.cuMemGetAddressRange_v2.is_some(),
            dmabuf: f.cuMemGetHandleForAddressRange.is_some()
                && f.cuMemGetAddressRange_v2.is_some()
                && has(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED),
        };
        let mut context = null_mut();
        call!(f, cuDevicePrimaryCtxRetain(&raw mut context, device))?;
        // From here on the value releases the context when it goes.
        let context = Context(context);
        let mut this = Self { f, device, context, priorities: (0, 0), gather: None, abilities };
        let before = this.enter()?;
        let prepared = this.prepare();
        this.leave(before);
        prepared?;
        let name = CStr::from_bytes_until_nul(&name).unwrap_or_default();
        let info = GpuInfo {
            family: GpuFamily::Cuda,
            ordinal,
            name: name.to_string_lossy().into_owned(),
            memory_bytes: memory_bytes as u64,
            driver_version: version,
        };
        Ok((this, info))
    }

    /// What needs the current context.
    fn prepare(&mut self) -> Call<()> {
        let (mut least, mut greatest) = (0, 0);
        call!(self.f, cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest))?;
        self.priorities = (least, greatest);
        match self.load_gather() {
            Ok(loaded) => {
                self.gather = Some(loaded);
                self.abilities.gather = true;
            }
            // It only makes small fragments faster.
            Err(error) => tracing::warn!("the kernel for fragments is not used: {error}"),
        }
        Ok(())
    }

    fn load_gather(&self) -> Call<(CUmodule, CUfunction)> {
        if self.f.cuLaunchKernel.is_none() || self.f.cuModuleUnload.is_none() {
            return Err(DriverError::missing("cuLaunchKernel"));
        }
        let mut module = null_mut();
        may_call!(self.f, cuModuleLoadData(&raw mut module, GATHER.as_ptr().cast()))?;
        let mut function = null_mut();
        let name = c"ucm_gather".as_ptr();
        match may_call!(self.f, cuModuleGetFunction(&raw mut function, module, name)) {
            Ok(()) => Ok((module, function)),
            Err(error) => {
                let _ = may_call!(self.f, cuModuleUnload(module));
                Err(error)
            }
        }
    }
}

impl Drop for CudaDriver {
    fn drop(&mut self) {
        if let Some((module, _)) = self.gather.take()
            && let Ok(before) = self.enter().or_else(|_| self.enter())
        {
            if let Err(error) = may_call!(self.f, cuModuleUnload(module)) {
                tracing::warn!("{error}");
            }
            self.leave(before);
        }
        if let Err(error) = call!(self.f, cuDevicePrimaryCtxRelease_v2(self.device)) {
            tracing::warn!("{error}");
        }
    }
}

fn stream_of(stream: RawStream) -> CUstream {
    std::ptr::with_exposed_provenance_mut(stream.0)
}

fn event_of(event: RawEvent) -> CUevent {
    std::ptr::with_exposed_provenance_mut(event.0)
}

fn host(addr: u64) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(usize::try_from(addr).unwrap_or(0))
}

impl Driver for CudaDriver {
    fn abilities(&self) -> Abilities {
        self.abilities
    }

    fn enter(&self) -> Call<usize> {
        // A stack of contexts: what is below is restored by popping.
        call!(self.f, cuCtxPushCurrent_v2(self.context.0)).map(|()| 0)
    }

    fn leave(&self, _before: usize) {
        let mut popped = null_mut();
        if let Err(error) = call!(self.f, cuCtxPopCurrent_v2(&raw mut popped)) {
            tracing::warn!("{error}");
        }
    }

    fn consume_error(&self) {
        // The driver interface keeps no error for the thread; the runtime interface keeps its own.
    }

    fn stream_create(&self, urgent: bool) -> Call<RawStream> {
        let mut stream = null_mut();
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint;
        let priority = if urgent { self.priorities.1 } else { self.priorities.0 };
        call!(self.f, cuStreamCreateWithPriority(&raw mut stream, flags, priority))?;
        Ok(RawStream(stream.expose_provenance()))
    }

    unsafe fn stream_destroy(&self, stream: RawStream) -> Call<()> {
        call!(self.f, cuStreamDestroy_v2(stream_of(stream)))
    }

    unsafe fn stream_wait(&self, stream: RawStream, event: RawEvent) -> Call<()> {
        call!(self.f, cuStreamWaitEvent(stream_of(stream), event_of(event), 0))
    }

    unsafe fn call_back(&self, stream: RawStream, call: CallBack, arg: *mut c_void) -> Call<()> {
        may_call!(self.f, cuLaunchHostFunc(stream_of(stream), Some(call), arg))
    }

    fn event_create(&self) -> Call<RawEvent> {
        let mut event = null_mut();
        let flags = CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint;
        call!(self.f, cuEventCreate(&raw mut event, flags))?;
        Ok(RawEvent(event.expose_provenance()))
    }

    unsafe fn event_destroy(&self, event: RawEvent) -> Call<()> {
        call!(self.f, cuEventDestroy_v2(event_of(event)))
    }

    unsafe fn event_record(&self, event: RawEvent, stream: RawStream) -> Call<()> {
        call!(self.f, cuEventRecord(event_of(event), stream_of(stream)))
    }

    unsafe fn event_query(&self, event: RawEvent) -> Call<bool> {
        match call!(self.f, cuEventQuery(event_of(event))) {
            Ok(()) => Ok(true),
            Err(error) if error.code == 600 => Ok(false),
            Err(error) => Err(error),
        }
    }

    unsafe fn copy(&self, op: CopyOp, stream: RawStream) -> Call<()> {
        call!(self.f, cuMemcpyAsync(op.dst, op.src, op.len, stream_of(stream)))
    }

    unsafe fn copy_batch(&self, ops: &[CopyOp], stream: RawStream) -> Call<()> {
        let mut dsts: Vec<u64> = ops.iter().map(|op| op.dst).collect();
        let mut srcs: Vec<u64> = ops.iter().map(|op| op.src).collect();
        let mut lens: Vec<usize> = ops.iter().map(|op| op.len).collect();
        let anywhere =
            CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID, id: 0 };
        let mut attributes = CUmemcpyAttributes {
            // Sources are read when the stream gets there, not during the call.
            srcAccessOrder: CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
            srcLocHint: anywhere,
            dstLocHint: anywhere,
            flags: 0,
        };
        let (mut first, mut failed) = (0, 0);
        may_call!(
            self.f,
            cuMemcpyBatchAsync(
                dsts.as_mut_ptr(),
                srcs.as_mut_ptr(),
                lens.as_mut_ptr(),
                ops.len(),
                &raw mut attributes,
                &raw mut first,
                1,
                &raw mut failed,
                stream_of(stream),
            )
        )
    }

    unsafe fn gather(&self, mut fragments: u64, mut count: u32, stream: RawStream) -> Call<()> {
        let Some((_, function)) = self.gather else {
            return Err(DriverError::missing("cuLaunchKernel"));
        };
        let mut params: [*mut c_void; 2] = [(&raw mut fragments).cast(), (&raw mut count).cast()];
        let blocks = count.clamp(1, GATHER_BLOCKS);
        may_call!(
            self.f,
            cuLaunchKernel(
                function,
                blocks,
                1,
                1,
                GATHER_THREADS,
                1,
                1,
                0,
                stream_of(stream),
                params.as_mut_ptr(),
                null_mut(),
            )
        )
    }

    fn alloc(&self, len: usize) -> Call<u64> {
        let mut addr = 0;
        call!(self.f, cuMemAlloc_v2(&raw mut addr, len))?;
        Ok(addr)
    }

    unsafe fn free(&self, addr: u64) -> Call<()> {
        call!(self.f, cuMemFree_v2(addr))
    }

    fn host_alloc(&self, len: usize) -> Call<u64> {
        let mut addr = null_mut();
        let flags = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP;
        call!(self.f, cuMemHostAlloc(&raw mut addr, len, flags))?;
        Ok(addr.expose_provenance() as u64)
    }

    unsafe fn host_free(&self, addr: u64) -> Call<()> {
        call!(self.f, cuMemFreeHost(host(addr)))
    }

    unsafe fn pin(&self, addr: u64, len: usize) -> Call<()> {
        let flags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
        call!(self.f, cuMemHostRegister_v2(host(addr), len, flags))
    }

    unsafe fn unpin(&self, addr: u64) -> Call<()> {
        call!(self.f, cuMemHostUnregister(host(addr)))
    }

    fn allocation_of(&self, addr: u64) -> Call<(u64, usize)> {
        let (mut base, mut len) = (0, 0);
        may_call!(self.f, cuMemGetAddressRange_v2(&raw mut base, &raw mut len, addr))?;
        Ok((base, len))
    }

    unsafe fn ipc_export(&self, addr: u64) -> Call<[u8; 64]> {
        let mut handle = CUipcMemHandle { reserved: [0; 64] };
        may_call!(self.f, cuIpcGetMemHandle(&raw mut handle, addr))?;
        Ok(handle.reserved.map(c_char::cast_unsigned))
    }

    fn ipc_import(&self, handle: [u8; 64]) -> Call<u64> {
        let handle = CUipcMemHandle { reserved: handle.map(u8::cast_signed) };
        let mut addr = 0;
        let flags = CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as c_uint;
        may_call!(self.f, cuIpcOpenMemHandle_v2(&raw mut addr, handle, flags))?;
        Ok(addr)
    }

    unsafe fn ipc_close(&self, addr: u64) -> Call<()> {
        may_call!(self.f, cuIpcCloseMemHandle(addr))
    }

    unsafe fn dmabuf(&self, addr: u64, len: usize) -> Call<OwnedFd> {
        let mut fd: c_int = -1;
        let kind = CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD as c_uint;
        may_call!(self.f, cuMemGetHandleForAddressRange((&raw mut fd).cast(), addr, len, kind, 0))?;
        if fd < 0 {
            let what = format!("descriptor {fd}");
            return Err(DriverError::nonsense("cuMemGetHandleForAddressRange", what));
        }
        // SAFETY: the driver made this descriptor for us.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    fn reach_peer(&self, ordinal: u16) -> Call<()> {
        let mut other = 0;
        call!(self.f, cuDeviceGet(&raw mut other, c_int::from(ordinal)))?;
        let mut can = 0;
        may_call!(self.f, cuDeviceCanAccessPeer(&raw mut can, self.device, other))?;
        if can == 0 {
            return Err(DriverError::new("cuDeviceCanAccessPeer", 801, "no way between them"));
        }
        let mut context = null_mut();
        call!(self.f, cuDevicePrimaryCtxRetain(&raw mut context, other))?;
        let enabled = may_call!(self.f, cuCtxEnablePeerAccess(context, 0));
        let released = call!(self.f, cuDevicePrimaryCtxRelease_v2(other));
        match enabled {
            // Enabled already.
            Err(error) if error.code == 704 => released,
            other => other.and(released),
        }
    }
}
