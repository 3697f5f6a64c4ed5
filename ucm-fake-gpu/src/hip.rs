//! The runtime interface of HIP, as far as the engine uses it.
//!
//! **Invariant:** signatures are those of `hip_runtime_api.h`; a failed call leaves its error behind
//! on the thread until `hipGetLastError` takes it.

use std::ffi::c_void;

use crate::{INVALID_DEVICE, IpcHandle, NO_DEVICE, context, control, exports, memory, stream};

type Handle = *mut c_void;

exports! {
    call hipInit(_flags: u32) {
        match control::from_env("UCM_FAKE_GPU_INIT", 0) { 0 => Ok(()), code => Err(code) }
    }
    call hipRuntimeGetVersion(version: *mut i32) {
        *version = control::from_env("UCM_FAKE_GPU_VERSION", 60_300_000);
        Ok(())
    }
    call hipGetDeviceCount(count: *mut i32) {
        *count = context::devices();
        if *count == 0 { Err(NO_DEVICE) } else { Ok(()) }
    }
    call hipDeviceGetName(name: *mut u8, len: i32, device: i32) {
        let text = format!("fake HIP device {device}\0");
        let len = text.len().min(usize::try_from(len).unwrap_or(0));
        std::ptr::copy_nonoverlapping(text.as_ptr(), name, len);
        Ok(())
    }
    call hipDeviceTotalMem(bytes: *mut usize, _device: i32) {
        *bytes = 1 << 30;
        Ok(())
    }
    call hipGetDevice(device: *mut i32) {
        *device = context::hip_device();
        Ok(())
    }
    call hipSetDevice(device: i32) { context::set_hip_device(device) }
    call hipDeviceGetStreamPriorityRange(least: *mut i32, greatest: *mut i32) {
        *least = 1;
        *greatest = -1;
        Ok(())
    }
    call hipStreamCreateWithPriority(made: *mut Handle, _flags: u32, _priority: i32) {
        *made = stream::create()? as Handle;
        Ok(())
    }
    release hipStreamDestroy(given: Handle) { stream::destroy(given as usize) }
    call hipStreamWaitEvent(given: Handle, event: Handle, _flags: u32) {
        stream::wait(given as usize, event as usize)
    }
    call hipEventCreateWithFlags(made: *mut Handle, _flags: u32) {
        *made = stream::create_event()? as Handle;
        Ok(())
    }
    release hipEventDestroy(event: Handle) { stream::destroy_event(event as usize) }
    call hipEventRecord(event: Handle, given: Handle) {
        stream::record(event as usize, given as usize)
    }
    call hipEventQuery(event: Handle) { stream::query(event as usize) }
    call hipMalloc(made: *mut Handle, len: usize) {
        *made = memory::alloc(len)? as Handle;
        Ok(())
    }
    release hipFree(at: Handle) { memory::free(at as usize, false) }
    call hipHostMalloc(made: *mut Handle, len: usize, _flags: u32) {
        *made = memory::host_alloc(len)? as Handle;
        Ok(())
    }
    release hipHostFree(at: Handle) { memory::host_free(at as usize) }
    call hipHostRegister(at: Handle, len: usize, _flags: u32) { memory::pin(at as usize, len) }
    release hipHostUnregister(at: Handle) { memory::unpin(at as usize) }
    call hipMemcpyAsync(dst: Handle, src: Handle, len: usize, _kind: i32, on: Handle) {
        memory::copy(dst as usize, src as usize, len, on as usize)
    }
    call hipLaunchHostFunc(on: Handle, call: extern "C" fn(Handle), arg: Handle) {
        let arg = arg as usize;
        stream::push(on as usize, Vec::new(), move || call(arg as Handle))
    }
    call hipMemGetAddressRange(base: *mut Handle, len: *mut usize, at: Handle) {
        let (found, bytes) = memory::range(at as usize)?;
        *base = found as Handle;
        *len = bytes;
        Ok(())
    }
    call hipIpcGetMemHandle(handle: *mut IpcHandle, at: Handle) {
        *handle = IpcHandle(memory::export(at as usize)?);
        Ok(())
    }
    call hipIpcOpenMemHandle(made: *mut Handle, handle: IpcHandle, _flags: u32) {
        *made = memory::import(&handle.0)? as Handle;
        Ok(())
    }
    release hipIpcCloseMemHandle(at: Handle) { memory::free(at as usize, true) }
    call hipMemGetHandleForAddressRange(handle: *mut c_void, at: Handle, len: usize, kind: u32, _flags: u64) {
        if kind != 1 {
            return Err(crate::INVALID_VALUE);
        }
        *handle.cast::<i32>() = memory::dmabuf(at as usize, len)?;
        Ok(())
    }
    call hipDeviceCanAccessPeer(can: *mut i32, a: i32, b: i32) {
        *can = i32::from(context::can_access_peer(a, b)?);
        Ok(())
    }
    call hipDeviceEnablePeerAccess(other: i32, _flags: u32) {
        if other == context::hip_device() {
            return Err(INVALID_DEVICE);
        }
        context::enable_peer_device(context::hip_device(), other)
    }
}

/// Counted like the others; a failure comes after half of the copies.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipMemcpyBatchAsync(
    dsts: *const Handle,
    srcs: *const Handle,
    lens: *const usize,
    count: usize,
    _attributes: Handle,
    _attribute_starts: *const usize,
    attribute_count: usize,
    failed_at: *mut usize,
    on: Handle,
) -> i32 {
    let wanted = control::call("hipMemcpyBatchAsync");
    if attribute_count != 0 {
        // As versions that take no attributes do.
        return control::answer(Err(crate::NOT_SUPPORTED));
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
pub extern "C" fn hipGetLastError() -> i32 {
    control::take_last()
}

/// Not counted: only asks.
#[unsafe(no_mangle)]
pub extern "C" fn hipGetErrorName(_code: i32) -> *const u8 {
    c"fakeHipError".as_ptr().cast()
}
