//! The controls of the fake driver in this process.

use std::time::{Duration, Instant};

use libloading::Library;
use ucm_transport::{Gpu, GpuFamily, testing::WATCHDOG};

pub(crate) struct Fake {
    library: Library,
    pub(crate) family: GpuFamily,
}

/// What the fake counts, by its own numbers.
const KINDS: [&str; 9] = [
    "streams",
    "events",
    "device allocations",
    "host allocations",
    "pins",
    "modules",
    "imports",
    "contexts",
    "operations",
];

impl Fake {
    /// The library that the engine loads, too.
    pub(crate) fn find(family: GpuFamily) -> Self {
        let name = match family {
            GpuFamily::Cuda => "libcuda.so.1",
            _ => "libamdhip64.so.6",
        };
        // SAFETY: the fake has no initialisers.
        let library = unsafe { Library::new(name) }.unwrap();
        Self { library, family }
    }

    pub(crate) fn gpu(&self, ordinal: u16) -> Gpu {
        Gpu::open(self.family, ordinal).unwrap()
    }

    /// The function of this family.
    pub(crate) fn name(&self, cuda: &'static str, hip: &'static str) -> &'static str {
        if self.family == GpuFamily::Cuda { cuda } else { hip }
    }

    fn symbol<F: Copy>(&self, name: &str) -> F {
        // SAFETY: the callers below know the types of the fake's functions.
        *unsafe { self.library.get::<F>(name.as_bytes()) }.unwrap()
    }

    /// From the `at`-th call of this name (empty: of any) on, `count` calls answer `code`.
    pub(crate) fn fail(&self, name: &str, at: u64, count: u64, code: i32) {
        let fail: unsafe extern "C" fn(*const u8, usize, u64, u64, i32) =
            self.symbol("fake_gpu_fail");
        // SAFETY: a text with its length.
        unsafe { fail(name.as_ptr(), name.len(), at, count, code) }
    }

    pub(crate) fn heal(&self) {
        self.fail("", 0, 0, 0);
    }

    pub(crate) fn calls(&self) -> u64 {
        let calls: extern "C" fn() -> u64 = self.symbol("fake_gpu_calls");
        calls()
    }

    pub(crate) fn calls_of(&self, name: &str) -> u64 {
        let calls: unsafe extern "C" fn(*const u8, usize) -> u64 = self.symbol("fake_gpu_calls_of");
        // SAFETY: a text with its length.
        unsafe { calls(name.as_ptr(), name.len()) }
    }

    /// Holds all streams before their next operation.
    pub(crate) fn hold(&self, on: bool) {
        let hold: extern "C" fn(i32) = self.symbol("fake_gpu_hold");
        hold(i32::from(on));
    }

    pub(crate) fn delay_us(&self, us: u64) {
        let delay: extern "C" fn(u64) = self.symbol("fake_gpu_delay_us");
        delay(us);
    }

    pub(crate) fn live(&self, what: &str) -> u64 {
        let live: extern "C" fn(u32) -> u64 = self.symbol("fake_gpu_live");
        let at = KINDS.iter().position(|kind| *kind == what).unwrap();
        live(u32::try_from(at).unwrap())
    }

    pub(crate) fn violations(&self) -> u64 {
        let violations: extern "C" fn() -> u64 = self.symbol("fake_gpu_violations");
        violations()
    }

    /// Nothing is left behind, and nothing was touched after its end. Work may take its time.
    pub(crate) fn assert_clean(&self, what: &str) {
        let left = || -> Vec<String> {
            let all = KINDS.iter().map(|kind| (kind, self.live(kind)));
            all.filter(|(_, count)| *count > 0).map(|(k, n)| format!("{n} {k}")).collect()
        };
        let deadline = Instant::now() + WATCHDOG / 3;
        while !left().is_empty() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(left(), Vec::<String>::new(), "{what}: left behind");
        assert_eq!(self.violations(), 0, "{what}: memory or handles used after their end");
        assert_eq!(self.pending_error(), 0, "{what}: an error is left on the thread");
    }

    /// The error that a failed call left on this thread.
    pub(crate) fn pending_error(&self) -> i32 {
        if self.family == GpuFamily::Cuda {
            return 0;
        }
        let last: extern "C" fn() -> i32 = self.symbol("hipGetLastError");
        last()
    }

    // A producer's and a consumer's side, as a framework would have it.

    /// A stream of somebody else.
    pub(crate) fn stream(&self) -> usize {
        type Create = unsafe extern "C" fn(*mut usize, u32, i32) -> i32;
        let create: Create =
            self.symbol(self.name("cuStreamCreateWithPriority", "hipStreamCreateWithPriority"));
        let mut stream = 0;
        self.current(|| {
            // SAFETY: the output is a local.
            assert_eq!(unsafe { create(&raw mut stream, 0, 0) }, 0);
        });
        stream
    }

    pub(crate) fn destroy_stream(&self, stream: usize) {
        type Destroy = unsafe extern "C" fn(usize) -> i32;
        let destroy: Destroy = self.symbol(self.name("cuStreamDestroy_v2", "hipStreamDestroy"));
        // SAFETY: a stream of `stream`.
        assert_eq!(unsafe { destroy(stream) }, 0);
    }

    /// Copies on somebody else's stream.
    pub(crate) fn copy(&self, dst: usize, src: usize, len: usize, stream: usize) {
        self.current(|| {
            let answer = if self.family == GpuFamily::Cuda {
                let copy: unsafe extern "C" fn(usize, usize, usize, usize) -> i32 =
                    self.symbol("cuMemcpyAsync");
                // SAFETY: the tests name live memory.
                unsafe { copy(dst, src, len, stream) }
            } else {
                let copy: unsafe extern "C" fn(usize, usize, usize, u32, usize) -> i32 =
                    self.symbol("hipMemcpyAsync");
                // SAFETY: as above.
                unsafe { copy(dst, src, len, 4, stream) }
            };
            assert_eq!(answer, 0);
        });
    }

    /// An event of somebody else, recorded on a stream.
    pub(crate) fn event(&self, stream: usize) -> usize {
        type Create = unsafe extern "C" fn(*mut usize, u32) -> i32;
        type Record = unsafe extern "C" fn(usize, usize) -> i32;
        let create: Create = self.symbol(self.name("cuEventCreate", "hipEventCreateWithFlags"));
        let record: Record = self.symbol(self.name("cuEventRecord", "hipEventRecord"));
        let mut event = 0;
        self.current(|| {
            // SAFETY: the output is a local.
            assert_eq!(unsafe { create(&raw mut event, 0) }, 0);
            // SAFETY: both live.
            assert_eq!(unsafe { record(event, stream) }, 0);
        });
        event
    }

    pub(crate) fn destroy_event(&self, event: usize) {
        type Destroy = unsafe extern "C" fn(usize) -> i32;
        let destroy: Destroy = self.symbol(self.name("cuEventDestroy_v2", "hipEventDestroy"));
        // SAFETY: an event of `event`.
        assert_eq!(unsafe { destroy(event) }, 0);
    }

    /// Makes device 0 current for a call of our own.
    fn current(&self, call: impl FnOnce()) {
        if self.family != GpuFamily::Cuda {
            return call();
        }
        let push: unsafe extern "C" fn(usize) -> i32 = self.symbol("cuCtxPushCurrent_v2");
        let pop: unsafe extern "C" fn(*mut usize) -> i32 = self.symbol("cuCtxPopCurrent_v2");
        let mut popped = 0;
        // SAFETY: the fake's name of device 0's context.
        assert_eq!(unsafe { push(0x1000) }, 0);
        call();
        // SAFETY: the output is a local.
        assert_eq!(unsafe { pop(&raw mut popped) }, 0);
    }

    /// How many contexts are left on this thread, which must be none.
    pub(crate) fn contexts_of_thread(&self) -> usize {
        let pop: unsafe extern "C" fn(*mut usize) -> i32 = self.symbol("cuCtxPopCurrent_v2");
        let mut count = 0;
        let mut popped = 0;
        // SAFETY: the output is a local.
        while unsafe { pop(&raw mut popped) } == 0 {
            count += 1;
        }
        count
    }

    pub(crate) fn set_device(&self, ordinal: i32) {
        let set: unsafe extern "C" fn(i32) -> i32 = self.symbol("hipSetDevice");
        // SAFETY: a number.
        assert_eq!(unsafe { set(ordinal) }, 0);
    }

    pub(crate) fn device(&self) -> i32 {
        let get: unsafe extern "C" fn(*mut i32) -> i32 = self.symbol("hipGetDevice");
        let mut ordinal = -1;
        // SAFETY: the output is a local.
        assert_eq!(unsafe { get(&raw mut ordinal) }, 0);
        ordinal
    }
}
