//! The driver interface of CUDA, as far as the engine uses it.
//!
//! **Invariant:** signatures are those of `cuda.h`, version 12.8.

use std::ffi::c_void;

use crate::{IpcHandle, NO_DEVICE, NOT_FOUND, context, control, exports, memory, stream};

type Handle = *mut c_void;

exports! {
    call cuInit(_flags: u32) {
        match control::from_env("UCM_FAKE_GPU_INIT", 0) { 0 => Ok(()), code => Err(code) }
    }
    call cuDriverGetVersion(version: *mut i32) {
        *version = control::from_env("UCM_FAKE_GPU_VERSION", 12_080);
        Ok(())
    }
    call cuDeviceGetCount(count: *mut i32) {
        *count = context::devices();
        if *count == 0 { Err(NO_DEVICE) } else { Ok(()) }
    }
    call cuDeviceGet(device: *mut i32, ordinal: i32) {
        *device = context::device(ordinal)?;
        Ok(())
    }
    call cuDeviceGetName(name: *mut u8, len: i32, device: i32) {
        let text = format!("fake CUDA device {device}\0");
        let len = text.len().min(usize::try_from(len).unwrap_or(0));
        std::ptr::copy_nonoverlapping(text.as_ptr(), name, len);
        Ok(())
    }
    call cuDeviceTotalMem_v2(bytes: *mut usize, _device: i32) {
        *bytes = 1 << 30;
        Ok(())
    }
    call cuDeviceGetAttribute(value: *mut i32, _attribute: i32, _device: i32) {
        *value = 1;
        Ok(())
    }
    call cuDevicePrimaryCtxRetain(made: *mut Handle, device: i32) {
        *made = context::retain(device)? as Handle;
        Ok(())
    }
    release cuDevicePrimaryCtxRelease_v2(_device: i32) { context::release() }
    call cuCtxPushCurrent_v2(given: Handle) { context::push(given as usize) }
    release cuCtxPopCurrent_v2(popped: *mut Handle) {
        *popped = context::pop()? as Handle;
        Ok(())
    }
    call cuCtxGetStreamPriorityRange(least: *mut i32, greatest: *mut i32) {
        context::current()?;
        *least = 0;
        *greatest = -5;
        Ok(())
    }
    call cuStreamCreateWithPriority(made: *mut Handle, _flags: u32, _priority: i32) {
        context::current()?;
        *made = stream::create()? as Handle;
        Ok(())
    }
    release cuStreamDestroy_v2(given: Handle) { stream::destroy(given as usize) }
    call cuStreamWaitEvent(given: Handle, event: Handle, _flags: u32) {
        stream::wait(given as usize, event as usize)
    }
    call cuEventCreate(made: *mut Handle, _flags: u32) {
        context::current()?;
        *made = stream::create_event()? as Handle;
        Ok(())
    }
    release cuEventDestroy_v2(event: Handle) { stream::destroy_event(event as usize) }
    call cuEventRecord(event: Handle, given: Handle) {
        stream::record(event as usize, given as usize)
    }
    call cuEventQuery(event: Handle) { stream::query(event as usize) }
    call cuMemAlloc_v2(made: *mut u64, len: usize) {
        context::current()?;
        *made = memory::alloc(len)? as u64;
        Ok(())
    }
    release cuMemFree_v2(at: u64) { memory::free(at as usize, false) }
    call cuMemHostAlloc(made: *mut Handle, len: usize, _flags: u32) {
        context::current()?;
        *made = memory::host_alloc(len)? as Handle;
        Ok(())
    }
    release cuMemFreeHost(at: Handle) { memory::host_free(at as usize) }
    call cuMemHostRegister_v2(at: Handle, len: usize, _flags: u32) {
        context::current()?;
        memory::pin(at as usize, len)
    }
    release cuMemHostUnregister(at: Handle) { memory::unpin(at as usize) }
    call cuMemcpyAsync(dst: u64, src: u64, len: usize, on: Handle) {
        context::current()?;
        memory::copy(dst as usize, src as usize, len, on as usize)
    }
    call cuModuleLoadData(made: *mut Handle, image: *const i8) {
        context::current()?;
        *made = context::load_module(image)? as Handle;
        Ok(())
    }
    release cuModuleUnload(module: Handle) { context::unload_module(module as usize) }
    call cuModuleGetFunction(made: *mut Handle, _module: Handle, name: *const i8) {
        let name = std::ffi::CStr::from_ptr(name.cast());
        if name != c"ucm_gather" {
            return Err(NOT_FOUND);
        }
        *made = 0x3000 as Handle;
        Ok(())
    }
    call cuLaunchKernel(
        _function: Handle,
        _grid_x: u32, _grid_y: u32, _grid_z: u32,
        _block_x: u32, _block_y: u32, _block_z: u32,
        _shared: u32,
        on: Handle,
        params: *const *const c_void,
        _extra: *const Handle,
    ) {
        context::current()?;
        let fragments = *(*params).cast::<u64>();
        let count = *(*params.add(1)).cast::<u32>();
        stream::gather(on as usize, fragments as usize, count)
    }
    call cuLaunchHostFunc(on: Handle, call: extern "C" fn(Handle), arg: Handle) {
        let arg = arg as usize;
        stream::push(on as usize, Vec::new(), move || call(arg as Handle))
    }
    call cuMemGetAddressRange_v2(base: *mut u64, len: *mut usize, at: u64) {
        let (found, bytes) = memory::range(at as usize)?;
        *base = found as u64;
        *len = bytes;
        Ok(())
    }
    call cuIpcGetMemHandle(handle: *mut IpcHandle, at: u64) {
        *handle = IpcHandle(memory::export(at as usize)?);
        Ok(())
    }
    call cuIpcOpenMemHandle_v2(made: *mut u64, handle: IpcHandle, _flags: u32) {
        context::current()?;
        *made = memory::import(&handle.0)? as u64;
        Ok(())
    }
    release cuIpcCloseMemHandle(at: u64) { memory::free(at as usize, true) }
    call cuMemGetHandleForAddressRange(handle: *mut c_void, at: u64, len: usize, kind: u32, _flags: u64) {
        if kind != 1 {
            return Err(crate::INVALID_VALUE);
        }
        *handle.cast::<i32>() = memory::dmabuf(at as usize, len)?;
        Ok(())
    }
    call cuDeviceCanAccessPeer(can: *mut i32, a: i32, b: i32) {
        *can = i32::from(context::can_access_peer(a, b)?);
        Ok(())
    }
    call cuCtxEnablePeerAccess(other: Handle, _flags: u32) {
        context::enable_peer(context::current()?, other as usize)
    }
}

/// Counted like the others; a failure comes after half of the copies, the nastiest place.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyBatchAsync(
    dsts: *const u64,
    srcs: *const u64,
    lens: *const usize,
    count: usize,
    _attributes: Handle,
    _attribute_starts: *const usize,
    attribute_count: usize,
    failed_at: *mut usize,
    on: Handle,
) -> i32 {
    let wanted = control::call("cuMemcpyBatchAsync");
    if attribute_count == 0 {
        return control::answer(Err(crate::INVALID_VALUE));
    }
    let end = if wanted.is_err() { count / 2 } else { count };
    for at in 0..end {
        let (dst, src, len) = (*dsts.add(at), *srcs.add(at), *lens.add(at));
        if let Err(code) = memory::copy(dst as usize, src as usize, len, on as usize) {
            *failed_at = at;
            return control::answer(Err(code));
        }
    }
    if wanted.is_err() {
        *failed_at = end;
    }
    control::answer(wanted)
}

/// Not counted: only asks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(_code: i32, name: *mut *const u8) -> i32 {
    *name = c"FAKE_CUDA_ERROR".as_ptr().cast();
    0
}
