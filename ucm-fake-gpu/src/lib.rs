//! A stand-in for `libcuda.so.1` and `libamdhip64.so.6` in one shared library, for tests.
//!
//! Device memory is host memory (memfds, so that other processes can really open it), a stream is a
//! worker thread that runs its operations in order and later, an event is told by the worker. It is
//! as strict as the drivers are: handles are checked, calls need a current context, a range may be
//! pinned once, a copy may not cross the border of a pin.
//!
//! What a test can do to it stands in `control`: let the n-th call fail, hold all streams, slow
//! them down, count what lives. Memory that is given back while an operation still names it is
//! counted as a violation.
//!
//! **Invariant:** an operation runs only when its stream has come to it; nothing runs in the
//! caller's thread.

#![allow(unsafe_op_in_unsafe_fn, reason = "bodies of C functions: their callers are C's callers")]
#![allow(non_snake_case, reason = "the names are those of the drivers")]

mod context;
mod control;
mod cuda;
mod hip;
mod memory;
mod stream;

/// What a call answers; the numbers are those of both drivers.
type Answer = Result<(), i32>;

/// Passed by value, as a structure of C.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct IpcHandle([u8; 64]);

const INVALID_VALUE: i32 = 1;
const OUT_OF_MEMORY: i32 = 2;
const NO_DEVICE: i32 = 100;
const INVALID_DEVICE: i32 = 101;
const INVALID_CONTEXT: i32 = 201;
const PEER_UNSUPPORTED: i32 = 217;
const INVALID_HANDLE: i32 = 400;
const NOT_FOUND: i32 = 500;
const NOT_READY: i32 = 600;
const PEER_ALREADY_ENABLED: i32 = 704;
const ALREADY_PINNED: i32 = 712;
const NOT_PINNED: i32 = 713;
const NOT_SUPPORTED: i32 = 801;

/// Exports C functions: each is counted, and fails when the test wants it. `release` functions do
/// their work even then, as the drivers do.
macro_rules! exports {
    ($($kind:ident $name:ident($($arg:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> i32 {
            let wanted = crate::control::call(stringify!($name));
            exports!(@$kind wanted, $body)
        }
    )*};
    (@call $wanted:ident, $body:block) => {{
        let answer: crate::Answer = $wanted.and_then(|()| $body);
        crate::control::answer(answer)
    }};
    (@release $wanted:ident, $body:block) => {{
        let body = || $body;
        let answer: crate::Answer = body();
        crate::control::answer($wanted.and(answer))
    }};
}
use exports;
