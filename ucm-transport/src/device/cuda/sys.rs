//! The functions of `libcuda`, found at run time.
//!
//! Handles, structures and constants are cudarc's, and so is the loading; the functions are looked up
//! here, because cudarc's own panic when one is missing, and because an answer that a newer driver
//! invents must not become a value of a Rust enum.
//!
//! **Invariant:** no function is called whose symbol was not found; answers are plain integers.

#![expect(non_snake_case, reason = "the names are the library's")]

use std::{
    ffi::{c_char, c_int, c_uint, c_ulonglong, c_void},
    sync::OnceLock,
};

use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUhostFn, CUipcMemHandle,
    CUmemcpyAttributes, CUmodule, CUstream,
};

use crate::device::absent::{DeviceAbsent, GpuFamily};

macro_rules! functions {
    (
        needed { $($need:ident: fn($($arg:ty),* $(,)?);)* }
        optional { $($may:ident: fn($($opt:ty),* $(,)?);)* }
    ) => {
        /// Entry points of the library.
        #[derive(Debug)]
        pub(super) struct Functions {
            $(pub(super) $need: unsafe extern "C" fn($($arg),*) -> c_int,)*
            $(pub(super) $may: Option<unsafe extern "C" fn($($opt),*) -> c_int>,)*
        }

        impl Functions {
            /// Looks all of them up, and names the needed ones that are not there.
            fn find(library: &'static libloading::Library) -> Result<Self, Vec<&'static str>> {
                let mut missing = Vec::new();
                // SAFETY: the signatures are those of cuda.h; the library is never unloaded.
                $(let $need = unsafe { symbol::<unsafe extern "C" fn($($arg),*) -> c_int>(
                    library,
                    stringify!($need),
                ) };
                if $need.is_none() {
                    missing.push(stringify!($need));
                })*
                // SAFETY: as above.
                $(let $may = unsafe { symbol::<unsafe extern "C" fn($($opt),*) -> c_int>(
                    library,
                    stringify!($may),
                ) };)*
                match ($($need,)*) {
                    ($(Some($need),)*) => Ok(Self { $($need,)* $($may,)* }),
                    _ => Err(missing),
                }
            }
        }
    };
}

functions! {
    needed {
        cuInit: fn(c_uint);
        cuDriverGetVersion: fn(*mut c_int);
        cuGetErrorName: fn(c_int, *mut *const c_char);
        cuDeviceGetCount: fn(*mut c_int);
        cuDeviceGet: fn(*mut CUdevice, c_int);
        cuDeviceGetName: fn(*mut c_char, c_int, CUdevice);
        cuDeviceTotalMem_v2: fn(*mut usize, CUdevice);
        cuDeviceGetAttribute: fn(*mut c_int, c_uint, CUdevice);
        cuDevicePrimaryCtxRetain: fn(*mut CUcontext, CUdevice);
        cuDevicePrimaryCtxRelease_v2: fn(CUdevice);
        cuCtxPushCurrent_v2: fn(CUcontext);
        cuCtxPopCurrent_v2: fn(*mut CUcontext);
        cuCtxGetStreamPriorityRange: fn(*mut c_int, *mut c_int);
        cuStreamCreateWithPriority: fn(*mut CUstream, c_uint, c_int);
        cuStreamDestroy_v2: fn(CUstream);
        cuStreamWaitEvent: fn(CUstream, CUevent, c_uint);
        cuEventCreate: fn(*mut CUevent, c_uint);
        cuEventDestroy_v2: fn(CUevent);
        cuEventRecord: fn(CUevent, CUstream);
        cuEventQuery: fn(CUevent);
        cuMemAlloc_v2: fn(*mut CUdeviceptr, usize);
        cuMemFree_v2: fn(CUdeviceptr);
        cuMemHostAlloc: fn(*mut *mut c_void, usize, c_uint);
        cuMemFreeHost: fn(*mut c_void);
        cuMemHostRegister_v2: fn(*mut c_void, usize, c_uint);
        cuMemHostUnregister: fn(*mut c_void);
        cuMemcpyAsync: fn(CUdeviceptr, CUdeviceptr, usize, CUstream);
    }
    optional {
        cuMemcpyBatchAsync: fn(
            *mut CUdeviceptr, *mut CUdeviceptr, *mut usize, usize,
            *mut CUmemcpyAttributes, *mut usize, usize, *mut usize, CUstream,
        );
        cuModuleLoadData: fn(*mut CUmodule, *const c_void);
        cuModuleUnload: fn(CUmodule);
        cuModuleGetFunction: fn(*mut CUfunction, CUmodule, *const c_char);
        cuLaunchKernel: fn(
            CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint,
            CUstream, *mut *mut c_void, *mut *mut c_void,
        );
        cuLaunchHostFunc: fn(CUstream, CUhostFn, *mut c_void);
        cuMemGetAddressRange_v2: fn(*mut CUdeviceptr, *mut usize, CUdeviceptr);
        cuIpcGetMemHandle: fn(*mut CUipcMemHandle, CUdeviceptr);
        cuIpcOpenMemHandle_v2: fn(*mut CUdeviceptr, CUipcMemHandle, c_uint);
        cuIpcCloseMemHandle: fn(CUdeviceptr);
        cuMemGetHandleForAddressRange: fn(*mut c_void, CUdeviceptr, usize, c_uint, c_ulonglong);
        cuDeviceCanAccessPeer: fn(*mut c_int, CUdevice, CUdevice);
        cuCtxEnablePeerAccess: fn(CUcontext, c_uint);
    }
}

/// # Safety
/// `F` is the type of the function of this name.
unsafe fn symbol<F: Copy>(library: &'static libloading::Library, name: &str) -> Option<F> {
    // SAFETY: the caller vouches for the type; the library is never unloaded, so the pointer stays.
    unsafe { library.get::<F>(name.as_bytes()) }.ok().map(|found| *found)
}

/// The library's functions; looked up once, but looked for again when it was not there.
pub(super) fn functions() -> Result<&'static Functions, DeviceAbsent> {
    static FUNCTIONS: OnceLock<Functions> = OnceLock::new();
    if let Some(found) = FUNCTIONS.get() {
        return Ok(found);
    }
    // SAFETY: loading a library runs its initialisers; that is what a driver is loaded for.
    if !unsafe { cudarc::driver::sys::is_culib_present() } {
        let said = "libcuda.so and libcuda.so.1 cannot be loaded".into();
        return Err(DeviceAbsent::NoLibrary { family: GpuFamily::Cuda, said });
    }
    // SAFETY: as above; it panics when there is no library, and there is one.
    let library = unsafe { cudarc::driver::sys::culib() };
    let found = Functions::find(library)
        .map_err(|names| DeviceAbsent::MissingSymbols { family: GpuFamily::Cuda, names })?;
    Ok(FUNCTIONS.get_or_init(|| found))
}
