//! The functions of `libamdhip64`, found at run time.
//!
//! Handles and flags are those of hip-sys. Its functions are not used: linked, the program would
//! start only where one version of the library is, and its error type cannot hold what later
//! versions answer. No structure whose layout changed with ROCm 6 is used.
//!
//! **Invariant:** no function is called whose symbol was not found; answers are plain integers.

#![expect(non_snake_case, reason = "the names are the library's")]

use std::{
    error::Error as _,
    ffi::{c_char, c_int, c_uint, c_ulonglong, c_void},
    sync::OnceLock,
};

use hip_sys::hiprt::{hipDeviceptr_t, hipEvent_t, hipHostFn_t, hipIpcMemHandle_t, hipStream_t};
use libloading::Library;

use crate::device::absent::{DeviceAbsent, GpuFamily};

/// Newest first.
const NAMES: [&str; 4] =
    ["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5", "libamdhip64.so"];

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
            pub(super) error_name: Option<unsafe extern "C" fn(c_int) -> *const c_char>,
            /// Keeps the functions where they are.
            _library: Library,
        }

        impl Functions {
            /// Looks all of them up, and names the needed ones that are not there.
            fn find(library: Library) -> Result<Self, Vec<&'static str>> {
                let mut missing = Vec::new();
                // SAFETY: the signatures are those of hip_runtime_api.h; the library is kept.
                $(let $need = unsafe { symbol::<unsafe extern "C" fn($($arg),*) -> c_int>(
                    &library,
                    stringify!($need),
                ) };
                if $need.is_none() {
                    missing.push(stringify!($need));
                })*
                // SAFETY: as above.
                $(let $may = unsafe { symbol::<unsafe extern "C" fn($($opt),*) -> c_int>(
                    &library,
                    stringify!($may),
                ) };)*
                // SAFETY: as above.
                let error_name = unsafe {
                    symbol::<unsafe extern "C" fn(c_int) -> *const c_char>(
                        &library,
                        "hipGetErrorName",
                    )
                };
                match ($($need,)*) {
                    ($(Some($need),)*) => {
                        Ok(Self { $($need,)* $($may,)* error_name, _library: library })
                    }
                    _ => Err(missing),
                }
            }
        }
    };
}

functions! {
    needed {
        hipInit: fn(c_uint);
        hipRuntimeGetVersion: fn(*mut c_int);
        hipGetLastError: fn();
        hipGetDeviceCount: fn(*mut c_int);
        hipDeviceGetName: fn(*mut c_char, c_int, c_int);
        hipDeviceTotalMem: fn(*mut usize, c_int);
        hipGetDevice: fn(*mut c_int);
        hipSetDevice: fn(c_int);
        hipDeviceGetStreamPriorityRange: fn(*mut c_int, *mut c_int);
        hipStreamCreateWithPriority: fn(*mut hipStream_t, c_uint, c_int);
        hipStreamDestroy: fn(hipStream_t);
        hipStreamWaitEvent: fn(hipStream_t, hipEvent_t, c_uint);
        hipEventCreateWithFlags: fn(*mut hipEvent_t, c_uint);
        hipEventDestroy: fn(hipEvent_t);
        hipEventRecord: fn(hipEvent_t, hipStream_t);
        hipEventQuery: fn(hipEvent_t);
        hipMalloc: fn(*mut *mut c_void, usize);
        hipFree: fn(*mut c_void);
        hipHostMalloc: fn(*mut *mut c_void, usize, c_uint);
        hipHostFree: fn(*mut c_void);
        hipHostRegister: fn(*mut c_void, usize, c_uint);
        hipHostUnregister: fn(*mut c_void);
        hipMemcpyAsync: fn(*mut c_void, *const c_void, usize, c_uint, hipStream_t);
    }
    optional {
        hipMemcpyBatchAsync: fn(
            *mut *mut c_void, *mut *mut c_void, *mut usize, usize,
            *mut c_void, *mut usize, usize, *mut usize, hipStream_t,
        );
        hipLaunchHostFunc: fn(hipStream_t, hipHostFn_t, *mut c_void);
        hipMemGetAddressRange: fn(*mut hipDeviceptr_t, *mut usize, hipDeviceptr_t);
        hipIpcGetMemHandle: fn(*mut hipIpcMemHandle_t, *mut c_void);
        hipIpcOpenMemHandle: fn(*mut *mut c_void, hipIpcMemHandle_t, c_uint);
        hipIpcCloseMemHandle: fn(*mut c_void);
        hipMemGetHandleForAddressRange: fn(
            *mut c_void, hipDeviceptr_t, usize, c_uint, c_ulonglong,
        );
        hipDeviceCanAccessPeer: fn(*mut c_int, c_int, c_int);
        hipDeviceEnablePeerAccess: fn(c_int, c_uint);
    }
}

/// # Safety
/// `F` is the type of the function of this name, and not used after the library is gone.
unsafe fn symbol<F: Copy>(library: &Library, name: &str) -> Option<F> {
    // SAFETY: the caller vouches for the type.
    unsafe { library.get::<F>(name.as_bytes()) }.ok().map(|found| *found)
}

/// The library's functions; looked up once, but looked for again when it was not there.
pub(super) fn functions() -> Result<&'static Functions, DeviceAbsent> {
    static FUNCTIONS: OnceLock<Functions> = OnceLock::new();
    if let Some(found) = FUNCTIONS.get() {
        return Ok(found);
    }
    let family = GpuFamily::Hip;
    let mut said = String::new();
    for name in NAMES {
        // SAFETY: loading a library runs its initialisers; that is what a runtime is loaded for.
        match unsafe { Library::new(name) } {
            Ok(library) => {
                let found = Functions::find(library)
                    .map_err(|names| DeviceAbsent::MissingSymbols { family, names })?;
                return Ok(FUNCTIONS.get_or_init(|| found));
            }
            // What the loader itself said stands behind the error.
            Err(error) if said.is_empty() => {
                said = error.source().map_or_else(|| error.to_string(), ToString::to_string);
            }
            Err(_) => {}
        }
    }
    Err(DeviceAbsent::NoLibrary { family, said })
}
